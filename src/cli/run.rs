//! `kolo run`: computes outputs of a model that was written to files.

use std::path::PathBuf;

use crate::saved_model::{LoadOptions, SavedModel};
use crate::wire::graph::{ImportOptions, import, read_graph_file, subgraph};
use crate::{DType, Error, PartialShape, Result, Session, Shape, Tensor, data};
use serde_json::Value;

use super::{checkpoint, print};

/// Flags of `kolo run`.
#[derive(clap::Args)]
#[command(
    after_help = "A feed is a file, x=@in.npy, or a value, x=1.5 or x=[[1,2],[3,4]]. With a SavedModel, names are those\n\
    of the signature or of tensors in the graph, and without --fetch all outputs of the signature are computed.\n\n\
    Examples:\n  kolo run frozen.pb --feed x=@in.npy --fetch y --out y.npy\n  \
    kolo run exported/1 --feed x=[[1,2,3]]\n  kolo run exported/1 --signature scale --feed by=2 --json"
)]
pub struct Args {
    /// Run this GraphDef, binary (.pb) or text (.pbtxt), or this SavedModel's folder
    model: PathBuf,
    /// Feed a tensor; may be given more than once
    #[arg(long = "feed", value_name = "NAME=@FILE.npy|VALUE")]
    feeds: Vec<String>,
    /// Compute this tensor, or run this operation; may be given more than once
    #[arg(long = "fetch", value_name = "NAME")]
    fetches: Vec<String>,
    /// Write a fetched tensor to this file, one for each --fetch, in order [default: print them]
    #[arg(long = "out", value_name = "FILE.npy")]
    outs: Vec<PathBuf>,
    /// Run this operation first, such as init
    #[arg(long = "first", value_name = "NAME")]
    first: Vec<String>,
    /// Use this signature of a SavedModel
    #[arg(long, value_name = "NAME", default_value = "serving_default")]
    signature: String,
    /// Use the graph of a SavedModel with this tag; may be given more than once [default: serve]
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    if !args.outs.is_empty() && !args.fetches.is_empty() && args.outs.len() != args.fetches.len() {
        return Err(Error::invalid_argument(format!(
            "--out is given {} times and --fetch {} times; give one file for each tensor",
            args.outs.len(),
            args.fetches.len()
        )));
    }
    let given = args.feeds.iter().map(|feed| split_feed(feed)).collect::<Result<Vec<_>>>()?;
    let mut job = match args.model.is_dir() {
        true => Job::of_saved_model(args, &given)?,
        false => Job::of_graph(args, &given)?,
    };
    if !args.outs.is_empty() && args.outs.len() != job.fetches.len() {
        return Err(Error::invalid_argument(format!(
            "--out is given {} times, and {} tensors are computed; name them with --fetch",
            args.outs.len(),
            job.fetches.len()
        )));
    }
    for first in &args.first {
        job.session.run_named(&[], &[], &[first])?;
    }
    let feeds: Vec<(&str, Tensor)> = job.feeds.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let tensors: Vec<&str> = job.fetches.iter().map(|(_, tensor)| tensor.as_str()).collect();
    let targets: Vec<&str> = job.targets.iter().map(String::as_str).collect();
    let values = job.session.run_named(&tensors, &feeds, &targets)?;
    let results: Vec<(String, Tensor)> = job.fetches.drain(..).map(|(name, _)| name).zip(values).collect();
    show(args, &results)
}

/// What to run, with names of the graph.
struct Job {
    session: Session,
    feeds: Vec<(String, Tensor)>,
    /// The requested names, and the names of their tensors.
    fetches: Vec<(String, String)>,
    targets: Vec<String>,
}

impl Job {
    fn of_graph(args: &Args, given: &[(&str, &str)]) -> Result<Job> {
        let name = args.model.display();
        if args.fetches.is_empty() {
            return Err(Error::invalid_argument(format!("{name} is a graph: say with --fetch what to compute")));
        }
        let bytes =
            std::fs::read(&args.model).map_err(|error| Error::not_found(format!("cannot read {name}: {error}")))?;
        let (def, origins) = read_graph_file(&bytes, &name.to_string()).map_err(|error| error.context(&name))?;
        let wanted: Vec<&str> = args.fetches.iter().chain(&args.first).map(String::as_str).collect();
        let fed = given.iter().map(|(name, _)| *name);
        let part = subgraph(&def, &wanted.into_iter().chain(fed).collect::<Vec<_>>())?;
        // Lines of the file belong to all of its nodes, so they are of use only if none was left out.
        let origins = if part.node.len() == def.node.len() { origins } else { Default::default() };
        let graph = crate::graph();
        import(&graph, &part, ImportOptions { origins, ..ImportOptions::default() })
            .map_err(|error| error.context(&name))?;
        let mut feeds = Vec::with_capacity(given.len());
        for (name, value) in given {
            let output = graph.output(name)?;
            feeds.push((output.name(), read_value(name, value, output.dtype(), &output.shape())?));
        }
        let (targets, fetches) = args.fetches.iter().cloned().partition(|name| is_operation(&graph, name));
        let fetches = Vec::into_iter(fetches).map(|name: String| (name.clone(), name)).collect();
        Ok(Job { session: Session::new(&graph)?, feeds, fetches, targets })
    }

    fn of_saved_model(args: &Args, given: &[(&str, &str)]) -> Result<Job> {
        if !SavedModel::is_at(&args.model) {
            let name = args.model.display();
            return Err(Error::not_found(format!("{name} is a folder without a saved_model.pb")));
        }
        // Names that are not the signature's may still be in the graph.
        let plain = |name: &str| name.contains(':') || name.contains('/');
        let also: Vec<String> = args
            .fetches
            .iter()
            .map(String::as_str)
            .chain(given.iter().map(|(name, _)| *name))
            .filter(|name| plain(name))
            .chain(args.first.iter().map(String::as_str))
            .map(str::to_owned)
            .collect();
        let options = LoadOptions { tags: args.tags.clone(), also, ..LoadOptions::default() };
        let model = SavedModel::load_with(&args.model, options)?;
        let signature = model.signature(&args.signature)?;
        let mut feeds = Vec::with_capacity(given.len());
        for (name, value) in given {
            let (tensor, dtype, shape) = match signature.inputs.get(*name) {
                Some(input) => (input.name.clone(), input.dtype, input.shape.clone()),
                None if plain(name) => {
                    let output = model.graph().output(name)?;
                    (output.name(), output.dtype(), output.shape())
                }
                None => return Err(unknown("input", name, args, signature.inputs.keys())),
            };
            feeds.push((tensor, read_value(name, value, dtype, &shape)?));
        }
        let uses_signature = args.fetches.iter().all(|name| signature.outputs.contains_key(name));
        let is_fed = |tensor: &str| feeds.iter().any(|(fed, _)| fed == tensor);
        if uses_signature && let Some((name, _)) = signature.inputs.iter().find(|(_, input)| !is_fed(&input.name)) {
            return Err(Error::invalid_argument(format!(
                "signature '{}' needs input '{name}': say --feed {name}=@FILE.npy",
                args.signature
            )));
        }
        let (mut fetches, mut targets) = (Vec::new(), Vec::new());
        if args.fetches.is_empty() {
            fetches = signature.outputs.iter().map(|(name, output)| (name.clone(), output.name.clone())).collect();
        }
        for name in &args.fetches {
            match signature.outputs.get(name) {
                Some(output) => fetches.push((name.clone(), output.name.clone())),
                None if plain(name) && is_operation(model.graph(), name) => targets.push(name.clone()),
                None if plain(name) => fetches.push((name.clone(), name.clone())),
                None => return Err(unknown("output", name, args, signature.outputs.keys())),
            }
        }
        Ok(Job { session: model.into_session(), feeds, fetches, targets })
    }
}

fn unknown<'a>(what: &str, name: &str, args: &Args, known: impl Iterator<Item = &'a String>) -> Error {
    let known: Vec<&str> = known.map(String::as_str).collect();
    Error::not_found(format!(
        "signature '{}' has no {what} '{name}'; it has {}",
        args.signature,
        known.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ")
    ))
}

fn is_operation(graph: &crate::Graph, name: &str) -> bool {
    graph.operation(name).is_ok_and(|operation| operation.n_outputs() == 0)
}

fn split_feed(text: &str) -> Result<(&str, &str)> {
    text.split_once('=')
        .filter(|(name, _)| !name.is_empty())
        .ok_or_else(|| Error::invalid_argument(format!("--feed: '{text}' should look like x=@in.npy or x=[1,2,3]")))
}

/// A feed from a file or from the command line, of this dtype and a shape that fits.
fn read_value(name: &str, text: &str, dtype: DType, shape: &PartialShape) -> Result<Tensor> {
    let value = match text.strip_prefix('@') {
        Some(file) => data::npy::read(file).map_err(|error| error.context(format_args!("--feed {name}")))?,
        None => parse_value(text, dtype).map_err(|error| error.context(format_args!("--feed {name}")))?,
    };
    if value.dtype() != dtype || !shape.admits(value.shape()) {
        return Err(Error::invalid_argument(format!(
            "--feed {name}: '{name}' is {dtype}{shape}, and the value is {}{}",
            value.dtype(),
            value.shape()
        )));
    }
    Ok(value)
}

/// Numbers in JSON's brackets. What is not JSON is a string.
fn parse_value(text: &str, dtype: DType) -> Result<Tensor> {
    let value: Value = match serde_json::from_str(text) {
        Ok(value) => value,
        Err(_) if dtype == DType::Str => Value::String(text.to_owned()),
        Err(error) => return Err(Error::invalid_argument(format!("'{text}' is not a value: {error}"))),
    };
    let (mut dims, mut flat) = (Vec::new(), Vec::new());
    flatten(&value, 0, &mut dims, &mut flat)?;
    let shape = Shape::new(&dims)?;
    let bad = |found: &Value| Error::invalid_argument(format!("{found} is not a {dtype}"));
    macro_rules! numbers {
        ($ty:ty, $read:expr) => {{
            let read: fn(&Value) -> Option<$ty> = $read;
            let elements = flat.iter().map(|found| read(found).ok_or_else(|| bad(found)));
            Tensor::from_vec::<$ty>(shape, elements.collect::<Result<Vec<_>>>()?)
        }};
    }
    match dtype {
        DType::F32 => numbers!(f32, |value| value.as_f64().map(|x| x as f32)),
        DType::F64 => numbers!(f64, Value::as_f64),
        DType::I32 => numbers!(i32, |value| value.as_i64()?.try_into().ok()),
        DType::I64 => numbers!(i64, Value::as_i64),
        DType::U8 => numbers!(u8, |value| value.as_u64()?.try_into().ok()),
        DType::Bool => numbers!(bool, Value::as_bool),
        DType::Str => {
            let strings = flat.iter().map(|found| {
                let text = found.as_str().map(str::to_owned).unwrap_or_else(|| found.to_string());
                text.into()
            });
            Tensor::from_strings(shape, strings.collect())
        }
        other => Err(Error::unimplemented(format!("values of {other} come from files: NAME=@FILE.npy"))),
    }
}

/// The elements of nested lists in order, and the lengths of the lists.
fn flatten<'v>(value: &'v Value, depth: usize, dims: &mut Vec<usize>, flat: &mut Vec<&'v Value>) -> Result<()> {
    let ragged = || Error::invalid_argument("the lists are not all of one length and depth");
    let is_list = value.as_array();
    // The first elements determine the depth of all others.
    if flat.is_empty() && dims.len() == depth && is_list.is_some() {
        dims.extend(is_list.map(Vec::len));
    }
    match is_list {
        Some(items) if dims.get(depth) == Some(&items.len()) => {
            items.iter().try_for_each(|item| flatten(item, depth + 1, dims, flat))
        }
        None if dims.len() == depth => {
            flat.push(value);
            Ok(())
        }
        _ => Err(ragged()),
    }
}

fn show(args: &Args, results: &[(String, Tensor)]) -> Result<()> {
    if !args.outs.is_empty() {
        for ((name, tensor), out) in results.iter().zip(&args.outs) {
            data::npy::write(out, tensor)?;
            if !args.json {
                print(format_args!("{name} {}{} written to {}", tensor.dtype(), tensor.shape(), out.display()))?;
            }
        }
        return Ok(());
    }
    if args.json {
        let one = |(name, tensor): &(String, Tensor)| Ok((name.clone(), checkpoint::value(tensor)?));
        return print(Value::Object(results.iter().map(one).collect::<Result<_>>()?));
    }
    for (name, tensor) in results {
        let mut values = checkpoint::value(tensor)?["values"].take();
        let values = nested(values.as_array_mut().map_or(&mut [][..], Vec::as_mut_slice), tensor.shape());
        print(format_args!("{name} {}{}\n{values}", tensor.dtype(), tensor.shape()))?;
    }
    Ok(())
}

/// The elements in lists of these lengths.
fn nested(elements: &mut [Value], dims: &[usize]) -> Value {
    let Some((&n, inner)) = dims.split_first() else {
        return elements.first_mut().map_or(Value::Null, Value::take);
    };
    if elements.is_empty() {
        return Value::Array(Vec::new());
    }
    let step = elements.len() / n.max(1);
    Value::Array(elements.chunks_mut(step.max(1)).map(|row| nested(row, inner)).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_read_as_the_dtype_that_is_fed() {
        assert_eq!(parse_value("1.5", DType::F32).unwrap(), Tensor::scalar(1.5f32));
        assert_eq!(parse_value("[[1,2],[3,4]]", DType::I32).unwrap(), Tensor::from([[1, 2], [3, 4]]));
        assert_eq!(parse_value("[]", DType::F32).unwrap(), Tensor::zeros(DType::F32, [0]).unwrap());
        assert_eq!(parse_value("true", DType::Bool).unwrap(), Tensor::scalar(true));
        assert_eq!(parse_value("a b", DType::Str).unwrap(), Tensor::string("a b"));
        for (text, dtype, why) in [
            ("[[1],[2,3]]", DType::F32, "not all of one length"),
            ("[1,[2]]", DType::F32, "not all of one length"),
            ("1.5", DType::I32, "1.5 is not a int32"),
            ("x", DType::F32, "'x' is not a value"),
        ] {
            let error = parse_value(text, dtype).unwrap_err();
            assert!(error.message().contains(why), "{error}");
        }
    }

    #[test]
    fn results_are_nested_by_their_shape() {
        let mut elements: Vec<Value> = (0..6).map(|i| json!(i)).collect();
        assert_eq!(nested(&mut elements, &[3, 2]).to_string(), "[[0,1],[2,3],[4,5]]");
        assert_eq!(nested(&mut [json!(7)], &[]).to_string(), "7");
        assert_eq!(nested(&mut [], &[0, 2]).to_string(), "[]");
    }
}
