//! `kolo checkpoint`: looks into checkpoints and converts them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::train::{latest_checkpoint, read_safetensors, write_safetensors};
use crate::{Code, DType, Element, Error, Result, Tensor};
use clap::{Args as ClapArgs, Subcommand};
use half::{bf16, f16};
use kolo_ops::io::bundle::{Bundle, Item, index_path, save};
use serde_json::{Value, json};

use super::print;

/// Flags of `kolo checkpoint`.
#[derive(ClapArgs)]
#[command(
    after_help = "A checkpoint is named by its prefix (logs/model-100), by one of its files, or by a directory, which\n\
    stands for the newest checkpoint its `checkpoint` file lists. Names that end in .safetensors are such files.\n\n\
    Examples:\n  kolo checkpoint show logs\n  kolo checkpoint show logs/model-100 --tensor w --json\n  \
    kolo checkpoint verify logs/model-100\n  kolo checkpoint convert logs/model-100 model.safetensors"
)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the tensors with dtype, shape and size, or print the values of some
    Show {
        /// A prefix, a directory, or a .safetensors file
        checkpoint: PathBuf,
        /// Print the values of this tensor; may be given more than once
        #[arg(long = "tensor", value_name = "NAME")]
        tensors: Vec<String>,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Read every tensor and verify its checksum; fail if one is corrupt
    Verify {
        /// A prefix or a directory
        checkpoint: PathBuf,
    },
    /// Copy all tensors to another checkpoint; names that end in .safetensors are such files
    Convert {
        /// Read this checkpoint
        from: PathBuf,
        /// Write this checkpoint
        to: PathBuf,
    },
}

pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Show { checkpoint, tensors, json } => show(checkpoint, tensors, *json),
        Command::Verify { checkpoint } => verify(checkpoint),
        Command::Convert { from, to } => convert(from, to),
    }
}

fn show(checkpoint: &Path, wanted: &[String], as_json: bool) -> Result<()> {
    if !wanted.is_empty() {
        let tensors = read(checkpoint, Some(wanted))?;
        if as_json {
            let object: serde_json::Map<String, Value> =
                tensors.iter().map(|(name, tensor)| Ok((name.clone(), value(tensor)?))).collect::<Result<_>>()?;
            return print(Value::Object(object));
        }
        return tensors.iter().try_for_each(|(name, tensor)| {
            print(format_args!("{name} {}{}\n{}", tensor.dtype(), tensor.shape(), value(tensor)?["values"]))
        });
    }
    let rows = list(checkpoint)?;
    if as_json {
        let row = |row: &Row| {
            let about = json!({
                "dtype": row.dtype, "shape": row.shape, "bytes": row.n_bytes, "slices": row.n_slices,
            });
            (row.name.clone(), about)
        };
        return print(Value::Object(rows.iter().map(row).collect()));
    }
    let width = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for row in &rows {
        let dims = row.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let slices = if row.n_slices > 0 { format!("  in {} slices", row.n_slices) } else { String::new() };
        let shape = format!("{}[{dims}]", row.dtype);
        let _ = writeln!(text, "{:width$}  {shape:24} {:>14} bytes{slices}", row.name, row.n_bytes);
    }
    let total: u64 = rows.iter().map(|row| row.n_bytes).sum();
    print(format_args!("{text}{} tensors, {total} bytes", rows.len()))
}

/// One tensor of a list.
struct Row {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    n_bytes: u64,
    n_slices: usize,
}

fn list(checkpoint: &Path) -> Result<Vec<Row>> {
    if is_safetensors(checkpoint) {
        let row = |(name, tensor): (String, Tensor)| Row {
            name,
            dtype: tensor.dtype().to_string(),
            shape: tensor.shape().to_vec(),
            n_bytes: tensor.n_bytes() as u64,
            n_slices: 0,
        };
        return Ok(read_safetensors(checkpoint)?.into_iter().map(row).collect());
    }
    let bundle = Bundle::open(&prefix_of(checkpoint)?)?;
    let row = |name: &str| {
        let stored = bundle.find(name)?;
        let dtype = stored.dtype().map_or_else(|_| format!("dtype {}", stored.dtype), |dtype| dtype.to_string());
        let (shape, n_slices) = (stored.shape.to_vec(), stored.slices.len());
        Ok(Row { name: stored.name, dtype, shape, n_bytes: stored.n_bytes, n_slices })
    };
    bundle.names().map(row).collect()
}

fn verify(checkpoint: &Path) -> Result<()> {
    let prefix = prefix_of(checkpoint)?;
    let mut bundle = Bundle::open(&prefix)?;
    let n_tensors = bundle.names().count();
    let wrong = bundle.verify();
    for (_, error) in &wrong {
        print(error)?;
    }
    match wrong.len() {
        0 => print(format_args!("{prefix}: OK, {n_tensors} tensors, all checksums match")),
        n => Err(Error::data_loss(format!("{prefix}: {n} of {n_tensors} tensors are damaged"))),
    }
}

fn convert(from: &Path, to: &Path) -> Result<()> {
    let tensors = read(from, None)?;
    let (n_tensors, n_bytes) = (tensors.len(), tensors.values().map(Tensor::n_bytes).sum::<usize>());
    if is_safetensors(to) {
        write_safetensors(&tensors, to)?;
    } else {
        let item = |(name, tensor)| Item { name, slice: None, tensor };
        let items: Vec<Item> = tensors.into_iter().map(item).collect();
        save(text(to)?, &items, None)?;
    }
    print(format_args!("{}: {n_tensors} tensors, {n_bytes} bytes", to.display()))
}

/// Some tensors, or all.
fn read(checkpoint: &Path, wanted: Option<&[String]>) -> Result<BTreeMap<String, Tensor>> {
    if is_safetensors(checkpoint) {
        let mut tensors = read_safetensors(checkpoint)?;
        let Some(wanted) = wanted else { return Ok(tensors) };
        let find = |name: &String| {
            let missing = || Error::not_found(format!("{} has no tensor '{name}'", checkpoint.display()));
            Ok((name.clone(), tensors.remove(name).ok_or_else(missing)?))
        };
        return wanted.iter().map(find).collect();
    }
    let mut bundle = Bundle::open(&prefix_of(checkpoint)?)?;
    match wanted {
        None => bundle.read_all(),
        Some(names) => names.iter().map(|name| Ok((name.clone(), bundle.read(name)?))).collect(),
    }
}

fn is_safetensors(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors")
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::invalid_argument(format!("{} is not valid UTF-8", path.display())))
}

/// The prefix that is meant by a prefix, a file of a checkpoint or a directory.
fn prefix_of(checkpoint: &Path) -> Result<String> {
    let given = text(checkpoint)?;
    if index_path(given).is_file() {
        return Ok(given.to_owned());
    }
    if checkpoint.is_dir() {
        return latest_checkpoint(checkpoint)?
            .ok_or_else(|| Error::not_found(format!("{given} has no `checkpoint` file that names a checkpoint")));
    }
    let stem = given.strip_suffix(".index").or_else(|| given.strip_suffix(".meta"));
    let stem = stem.or_else(|| given.rsplit_once(".data-").map(|(stem, _)| stem));
    match stem.filter(|stem| index_path(stem).is_file()) {
        Some(stem) => Ok(stem.to_owned()),
        None => {
            Err(Error::new(Code::NotFound, format!("there is no checkpoint {given}: {given}.index does not exist")))
        }
    }
}

/// A tensor as JSON: dtype, shape, and its values in one list. Numbers that JSON does not have are strings, and so are
/// byte strings, with `\xNN` for bytes that are not text.
pub(super) fn value(tensor: &Tensor) -> Result<Value> {
    fn numbers<T: Element>(tensor: &Tensor, convert: impl Fn(T) -> Value) -> Result<Value> {
        Ok(Value::Array(tensor.data::<T>()?.iter().map(|&x| convert(x)).collect()))
    }
    let float = |x: f64| if x.is_finite() { json!(x) } else { json!(x.to_string()) };
    let values = match tensor.dtype() {
        DType::F32 => numbers::<f32>(tensor, |x| float(f64::from(x)))?,
        DType::F64 => numbers::<f64>(tensor, float)?,
        DType::F16 => numbers::<f16>(tensor, |x| float(x.to_f64()))?,
        DType::BF16 => numbers::<bf16>(tensor, |x| float(x.to_f64()))?,
        DType::I8 => numbers::<i8>(tensor, |x| json!(x))?,
        DType::I16 => numbers::<i16>(tensor, |x| json!(x))?,
        DType::I32 => numbers::<i32>(tensor, |x| json!(x))?,
        DType::I64 => numbers::<i64>(tensor, |x| json!(x))?,
        DType::U8 => numbers::<u8>(tensor, |x| json!(x))?,
        DType::U16 => numbers::<u16>(tensor, |x| json!(x))?,
        DType::U32 => numbers::<u32>(tensor, |x| json!(x))?,
        DType::U64 => numbers::<u64>(tensor, |x| json!(x))?,
        DType::Bool => numbers::<bool>(tensor, |x| json!(x))?,
        DType::Str => tensor.strings()?.iter().map(|text| json!(text.escape_ascii().to_string())).collect(),
        other => return Err(Error::unimplemented(format!("values of {other} cannot be printed"))),
    };
    Ok(json!({ "dtype": tensor.dtype().to_string(), "shape": tensor.shape().to_vec(), "values": values }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_plain_json() {
        let found = value(&Tensor::from([1.5f32, f32::NAN, f32::INFINITY])).unwrap();
        assert_eq!(found, json!({"dtype": "float", "shape": [3], "values": [1.5, "NaN", "inf"]}));
        assert_eq!(value(&Tensor::string(&b"a\xff"[..])).unwrap()["values"], json!(["a\\xff"]));
        assert_eq!(value(&Tensor::scalar(u64::MAX)).unwrap()["values"], json!([u64::MAX]));
    }
}
