//! Variables to and from safetensors files, the format that PyTorch and JAX programs share weights in.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::Path;

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_graph::Variable;
use kolo_ops::io::files::{NewFile, file_error, sync_directory_of};
use kolo_runtime::Session;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, View};

/// Writes the values of `variables` to a safetensors file, under their own names.
///
/// ```
/// use kolo::train::{load_safetensors, save_safetensors};
/// use kolo::{Session, Tensor};
///
/// let path = std::env::temp_dir().join(format!("kolo-{}.safetensors", std::process::id()));
/// let g = kolo::graph();
/// let w = g.variable("w", [1.0f32, 2.0]);
/// let init = g.global_variables_initializer();
/// let session = Session::new(&g)?;
/// session.run_op(init)?;
/// save_safetensors(&session, &[w], &path)?;
///
/// let other = Session::new(&g)?;
/// load_safetensors(&other, &[w], &path)?;
/// assert_eq!(other.fetch(w.read())?, Tensor::from([1.0f32, 2.0]));
/// # std::fs::remove_file(&path).ok();
/// # Ok::<(), kolo::Error>(())
/// ```
pub fn save_safetensors(session: &Session, variables: &[Variable<'_>], path: impl AsRef<Path>) -> Result<()> {
    let reads: Vec<_> = variables.iter().map(|variable| variable.read()).collect();
    let values = session.run(&reads, &[], &[])?;
    let named: BTreeMap<String, Tensor> = variables.iter().map(|variable| variable.name()).zip(values).collect();
    write_safetensors(&named, path)
}

/// Gives each of `variables` the value that the safetensors file has under its name. All must be there, with the variable's
/// dtype and shape; the file may hold more.
pub fn load_safetensors(session: &Session, variables: &[Variable<'_>], path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let mut values = read_safetensors(path)?;
    let mut found = Vec::with_capacity(variables.len());
    // Everything is checked before anything is assigned.
    for variable in variables {
        let name = variable.name();
        let value = values
            .remove(&name)
            .ok_or_else(|| Error::not_found(format!("{} has no tensor '{name}'", path.display())))?;
        if value.dtype() != variable.dtype() || !variable.shape().admits(value.shape()) {
            return Err(Error::invalid_argument(format!(
                "'{name}' is {}{} in {}, and the variable is {}{}",
                value.dtype(),
                value.shape(),
                path.display(),
                variable.dtype(),
                variable.shape()
            )));
        }
        found.push((*variable, value));
    }
    // A variable is given a value in place of its initial one, by ops that every session of the graph has.
    let inputs: Vec<String> = found.iter().map(|(variable, _)| variable.initializer().input(1).name()).collect();
    let initializers: Vec<String> = found.iter().map(|(variable, _)| variable.initializer().name()).collect();
    let named: Vec<(&str, Tensor)> =
        inputs.iter().zip(found).map(|(name, (_, value))| (name.as_str(), value)).collect();
    let targets: Vec<&str> = initializers.iter().map(String::as_str).collect();
    session.run_named(&[], &named, &targets).map(drop)
}

/// Writes tensors to a safetensors file, straight from their buffers.
pub fn write_safetensors(tensors: &BTreeMap<String, Tensor>, path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let mut views = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let dtype = to_safetensors(tensor.dtype()).ok_or_else(|| {
            Error::unimplemented(format!("'{name}' is {}, which safetensors does not know", tensor.dtype()))
        })?;
        let view = TensorView::new(dtype, tensor.shape().to_vec(), tensor.host_bytes()?)
            .map_err(|error| Error::internal(format!("'{name}': {error}")))?;
        views.push((name.as_str(), view));
    }
    let mut file = NewFile::create(path)?;
    let n_bytes: usize = views.iter().map(|(_, view)| view.data_len()).sum();
    let write = |file: &mut NewFile| -> std::io::Result<()> {
        let (header, order) = layout(&views)?;
        let mut out = BufWriter::new(file.file());
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        order.iter().try_for_each(|&i| out.write_all(views[i].1.data()))?;
        out.flush()
    };
    write(&mut file).map_err(|error| {
        file_error("cannot write", path, &error).and(format_args!(" ({n_bytes} bytes were to be written)"))
    })?;
    file.sync()?;
    file.publish()?;
    sync_directory_of(path);
    Ok(())
}

/// The header, and the order of the data: larger elements first, then by name, so that everything is aligned.
fn layout(views: &[(&str, TensorView<'_>)]) -> std::io::Result<(String, Vec<usize>)> {
    let mut order: Vec<usize> = (0..views.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(views[i].1.dtype().bitsize()), views[i].0));
    let mut fields = serde_json::Map::new();
    let mut at = 0;
    for &i in &order {
        let (name, view) = &views[i];
        let end = at + view.data_len();
        let about = serde_json::json!({
            "dtype": view.dtype().to_string(),
            "shape": view.shape(),
            "data_offsets": [at, end],
        });
        fields.insert((*name).to_owned(), about);
        at = end;
    }
    let mut header = serde_json::to_string(&fields).map_err(std::io::Error::other)?;
    // Data begins at a multiple of eight; spaces after the header are allowed for that.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    Ok((header, order))
}

/// All tensors of a safetensors file, by name.
pub fn read_safetensors(path: impl AsRef<Path>) -> Result<BTreeMap<String, Tensor>> {
    let path = path.as_ref();
    let bytes = std::fs::read(path).map_err(|error| file_error("cannot read", path, &error))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| {
        Error::data_loss(format!("{} is not a safetensors file, or damaged: {error}", path.display()))
    })?;
    let tensor = |(name, view): (String, TensorView<'_>)| {
        let dtype = from_safetensors(view.dtype()).ok_or_else(|| {
            Error::unimplemented(format!(
                "'{name}' in {} is {}, which Kolo does not know",
                path.display(),
                view.dtype()
            ))
        })?;
        let mut tensor = Tensor::zeros(dtype, Shape::new(view.shape())?)?;
        let data: Cow<'_, [u8]> = view.data().into();
        let target = tensor.host_bytes_mut()?;
        if target.len() != data.len() || (dtype == DType::Bool && data.iter().any(|byte| *byte > 1)) {
            return Err(Error::data_loss(format!("'{name}' in {} is damaged", path.display())));
        }
        target.copy_from_slice(&data);
        Ok((name, tensor))
    };
    file.tensors().into_iter().map(tensor).collect()
}

const DTYPES: [(DType, Dtype); 13] = [
    (DType::F32, Dtype::F32),
    (DType::F64, Dtype::F64),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I8, Dtype::I8),
    (DType::I16, Dtype::I16),
    (DType::I32, Dtype::I32),
    (DType::I64, Dtype::I64),
    (DType::U8, Dtype::U8),
    (DType::U16, Dtype::U16),
    (DType::U32, Dtype::U32),
    (DType::U64, Dtype::U64),
    (DType::Bool, Dtype::BOOL),
];

fn to_safetensors(dtype: DType) -> Option<Dtype> {
    DTYPES.iter().find(|(ours, _)| *ours == dtype).map(|(_, theirs)| *theirs)
}

fn from_safetensors(dtype: Dtype) -> Option<DType> {
    DTYPES.iter().find(|(_, theirs)| *theirs == dtype).map(|(ours, _)| *ours)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::Code;

    use super::*;

    struct File(std::path::PathBuf);

    impl File {
        fn new(name: &str) -> File {
            File(std::env::temp_dir().join(format!("kolo-{}-{name}.safetensors", std::process::id())))
        }
    }

    impl Drop for File {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn the_bytes_are_as_the_format_says() {
        let file = File::new("bytes");
        let tensors =
            [("a", Tensor::from([1i8, 2])), ("b", Tensor::from([[1.0f32], [2.0]])), ("c", Tensor::scalar(true))];
        let tensors: BTreeMap<String, Tensor> = tensors.into_iter().map(|(name, t)| (name.to_owned(), t)).collect();
        write_safetensors(&tensors, &file.0).unwrap();
        let bytes = std::fs::read(&file.0).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(n % 8, 0);
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        assert_eq!(header["b"], serde_json::json!({"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}));
        assert_eq!(header["a"], serde_json::json!({"dtype": "I8", "shape": [2], "data_offsets": [8, 10]}));
        assert_eq!(bytes[8 + n..], [0, 0, 128, 63, 0, 0, 0, 64, 1, 2, 1]);
        // The crate's own reader takes it, and so do we.
        assert_eq!(SafeTensors::deserialize(&bytes).unwrap().len(), 3);
        assert_eq!(read_safetensors(&file.0).unwrap(), tensors);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let file = File::new("fit");
        let g = kolo_ops::graph();
        let (v, n) = (g.variable("v", [1.0f32, 2.0]), g.variable("n", 3i64));
        let init = g.global_variables_initializer();
        let session = Session::new(&g).unwrap();
        session.run_op(init).unwrap();
        let write = |tensors: &[(&str, Tensor)]| {
            let tensors = tensors.iter().map(|(name, tensor)| (name.to_string(), tensor.clone())).collect();
            write_safetensors(&tensors, &file.0).unwrap();
        };
        let fails = |code: Code, text: &str| {
            let error = load_safetensors(&session, &[v, n], &file.0).unwrap_err();
            assert_eq!(error.code(), code, "{error}");
            assert!(error.message().contains(text), "{error}");
        };
        write(&[("v", Tensor::from([5.0f32, 6.0]))]);
        fails(Code::NotFound, "has no tensor 'n'");
        write(&[("v", Tensor::from([5.0f32, 6.0])), ("n", Tensor::scalar(4i32))]);
        fails(Code::InvalidArgument, "'n' is int32[]");
        write(&[("v", Tensor::from([5.0f32])), ("n", Tensor::scalar(4i64))]);
        fails(Code::InvalidArgument, "'v' is float[1]");
        std::fs::write(&file.0, b"nonsense").unwrap();
        fails(Code::DataLoss, "not a safetensors file");
        assert_eq!(session.fetch(v.read()).unwrap(), Tensor::from([1.0f32, 2.0]));
        let strings = BTreeMap::from([("s".to_owned(), Tensor::string("x"))]);
        assert_eq!(write_safetensors(&strings, &file.0).unwrap_err().code(), Code::Unimplemented);
        write(&[("v", Tensor::from([5.0f32, 6.0])), ("n", Tensor::scalar(4i64)), ("more", Tensor::scalar(1u8))]);
        load_safetensors(&session, &[v, n], &file.0).unwrap();
        assert_eq!(session.fetch(v.read()).unwrap(), Tensor::from([5.0f32, 6.0]));
        assert_eq!(session.fetch(n.read()).unwrap(), Tensor::scalar(4i64));
    }
}
