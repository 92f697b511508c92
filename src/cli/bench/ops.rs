//! `ops`: single ops through a session, as `bench/ops.json` lists them for every side, and a plain copy to compare
//! with.

use std::sync::Arc;
use std::time::Instant;

use crate::{AttrValue, DType, Error, Graph, Output, Result, Session, Shape, Tensor};
use half::{bf16, f16};
use serde_json::Value;

use super::measure::{Better, Report, median};

/// What every side runs; `bench/README.md` says how to read it.
const CASES: &str = include_str!("../../../bench/ops.json");
/// Sizes, and how often the op runs in one call.
const SIZES: &[(&str, usize)] = &[("small", 50), ("medium", 20), ("large", 3)];
/// Ops that do so little that moving their bytes is the work: their large case is also given as a share of a copy's
/// speed.
const MOVERS: &[&str] =
    &["add", "add-bias", "mul-row", "mul-column", "mul-scalar", "relu", "relu-grad", "exp", "tanh", "sigmoid"];
/// Elements that the plain copy copies.
const COPIED: usize = 4096 * 4096;

/// Runs the cases whose name begins with one of `only`, or all.
pub fn run(report: &Report, only: &[String]) -> Result<()> {
    let wanted = |case: &str| only.is_empty() || only.iter().any(|start| case.starts_with(start.as_str()));
    let families: Vec<Value> = serde_json::from_str(CASES).map_err(|e| bad("bench/ops.json", &e.to_string()))?;
    let mut copy_rate = None;
    for family in &families {
        let name = text(family, "case")?;
        for &(size, times) in SIZES {
            let case = format!("{name}/{size}");
            let share = size == "large" && MOVERS.contains(&name) && wanted(&format!("of-memcpy/{name}"));
            if !wanted(&case) && !share {
                continue;
            }
            let (samples, bytes) = measure(report, family, size, times).map_err(|error| error.context(&case))?;
            if wanted(&case) {
                let micros: Vec<f64> = samples.iter().map(|seconds| seconds * 1e6).collect();
                report.print("ops", &case, "us", Better::Lower, &micros)?;
            }
            if share {
                let copy = match copy_rate {
                    Some(rate) => rate,
                    None => copy_speed(report)?,
                };
                copy_rate = Some(copy);
                let shares: Vec<f64> = samples.iter().map(|seconds| bytes / seconds / copy).collect();
                report.print("ops", &format!("of-memcpy/{name}"), "x", Better::Higher, &shares)?;
            }
        }
    }
    Ok(())
}

/// Seconds for one op, and the bytes that it reads and writes.
fn measure(report: &Report, family: &Value, size: &str, times: usize) -> Result<(Vec<f64>, f64)> {
    let inputs = tensors(family, size)?;
    let g = crate::graph();
    let inputs_of_g: Vec<Output<'_>> = inputs.iter().map(|tensor| g.constant(tensor.clone())).collect();
    let first = node(&g, family, text(family, "op")?, &inputs_of_g)?;
    let mut last = first;
    for _ in 1..times {
        last = g.control_dependencies(&[last.operation()], || node(&g, family, text(family, "op")?, &inputs_of_g))?;
    }
    let session = Arc::new(Session::new(&g)?);
    let output = session.fetch(first)?;
    let bytes = inputs.iter().chain([&output]).map(Tensor::n_bytes).sum::<usize>();
    drop(output);
    let call = session.make_callable(&[], &[], &[last.operation()])?;
    let samples = report.sample(|| call.call(&[]).map(drop))?;
    Ok((samples.iter().map(|seconds| seconds / times as f64).collect(), bytes as f64))
}

/// Adds one op with the attributes of its family.
fn node<'g>(g: &'g Graph, family: &Value, op: &str, inputs: &[Output<'g>]) -> Result<Output<'g>> {
    let mut builder = g.op(op).inputs(inputs.iter().copied());
    for (name, value) in family["attrs"].as_object().into_iter().flatten() {
        builder = builder.attr(name, attr(value)?);
    }
    Ok(builder.try_build()?.output(0))
}

fn attr(value: &Value) -> Result<AttrValue> {
    Ok(match value {
        Value::Bool(value) => AttrValue::Bool(*value),
        Value::String(text) => AttrValue::from(text.as_str()),
        Value::Number(number) => match number.as_i64() {
            Some(number) => AttrValue::Int(number),
            None => AttrValue::Float(number.as_f64().unwrap_or(f64::NAN) as f32),
        },
        Value::Array(values) => AttrValue::List(values.iter().map(attr).collect::<Result<_>>()?),
        Value::Object(_) => AttrValue::Type(DType::from_name(text(value, "type")?)?),
        Value::Null => return Err(bad("an attribute", "null")),
    })
}

/// The inputs of one size: numbers from a fixed sequence, constants as written, or what another op makes of the inputs
/// before it.
fn tensors(family: &Value, size: &str) -> Result<Vec<Tensor>> {
    let specs = family[size].as_array().ok_or_else(|| bad(size, "not a list"))?;
    let mut made: Vec<Tensor> = Vec::new();
    for (i, spec) in specs.iter().enumerate() {
        let tensor = match spec {
            Value::String(spec) => match spec.strip_prefix('$') {
                Some(op) => {
                    let g = crate::graph();
                    let before: Vec<_> = made.iter().map(|tensor| g.constant(tensor.clone())).collect();
                    let output = node(&g, family, op, &before)?;
                    Session::new(&g)?.fetch(output)?
                }
                None => in_device_memory(random(spec, i as u64 + 1)?)?,
            },
            spec => constant(spec)?,
        };
        made.push(tensor);
    }
    Ok(made)
}

/// A copy in the device's memory, allocated as an op's result or a variable is.
fn in_device_memory(tensor: Tensor) -> Result<Tensor> {
    let g = crate::graph();
    let value = g.constant(tensor.clone());
    let op = if tensor.dtype() == DType::Bool { "LogicalOr" } else { "Maximum" };
    let copy = g.op(op).inputs([value, value]).out();
    Session::new(&g)?.fetch(copy)
}

/// `{"i32": …}` or `{"f32": …}`: a number, a list, or a list of lists.
fn constant(spec: &Value) -> Result<Tensor> {
    let (kind, value) = spec.as_object().and_then(|map| map.iter().next()).ok_or_else(|| bad("a constant", "empty"))?;
    let (mut dims, mut flat) = (Vec::new(), vec![value]);
    while let Some(Value::Array(_)) = flat.first() {
        let lists: Vec<&Vec<Value>> = flat.iter().filter_map(|value| value.as_array()).collect();
        dims.push(lists[0].len());
        flat = lists.into_iter().flatten().collect();
    }
    let numbers: Vec<f64> = flat.iter().filter_map(|value| value.as_f64()).collect();
    let shape = Shape::new(&dims)?;
    match kind.as_str() {
        "i32" => Tensor::from_vec(shape, numbers.iter().map(|&x| x as i32).collect()),
        "f32" => Tensor::from_vec(shape, numbers.iter().map(|&x| x as f32).collect()),
        kind => Err(bad(kind, "neither i32 nor f32")),
    }
}

/// `f32[2,3]` from -1 to 1, also as `f16` and `bf16`, `f32[2,3]+` from 0.1 to 1.1, `i32[5]<10` from 0 to 9, `u8[4]`,
/// `bool[4]`.
fn random(spec: &str, seed: u64) -> Result<Tensor> {
    let (kind, rest) = spec.split_once('[').ok_or_else(|| bad(spec, "no shape"))?;
    let (dims, tail) = rest.split_once(']').ok_or_else(|| bad(spec, "no shape"))?;
    let dims: Vec<usize> = dims.split(',').filter(|dim| !dim.is_empty()).filter_map(|dim| dim.parse().ok()).collect();
    let shape = Shape::new(&dims)?;
    let n = shape.n_elements();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let float = |x: f32| if tail == "+" { 0.1 + x } else { 2.0 * x - 1.0 };
    match (kind, tail.strip_prefix('<').and_then(|limit| limit.parse::<f32>().ok())) {
        ("f32", _) => Tensor::from_vec(shape, (0..n).map(|_| float(next())).collect()),
        ("f16", _) => Tensor::from_vec(shape, (0..n).map(|_| f16::from_f32(float(next()))).collect()),
        ("bf16", _) => Tensor::from_vec(shape, (0..n).map(|_| bf16::from_f32(float(next()))).collect()),
        ("i32", Some(limit)) => Tensor::from_vec(shape, (0..n).map(|_| (next() * limit) as i32).collect()),
        ("u8", _) => Tensor::from_vec(shape, (0..n).map(|_| (next() * 256.0) as u8).collect()),
        ("bool", _) => Tensor::from_vec(shape, (0..n).map(|_| next() < 0.5).collect()),
        _ => Err(bad(spec, "unknown kind")),
    }
}

/// Bytes per second, read and written, of copying from one part of memory to another with all cores.
fn copy_speed(report: &Report) -> Result<f64> {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let from = vec![1.0f32; COPIED];
    let mut to = vec![0.0f32; COPIED];
    let chunk = COPIED.div_ceil(n_threads);
    let start = Instant::now();
    let mut rates = Vec::new();
    while rates.len() < 5 || start.elapsed() < report.budget() {
        let sample = Instant::now();
        std::thread::scope(|scope| {
            for (from, to) in from.chunks(chunk).zip(to.chunks_mut(chunk)) {
                scope.spawn(|| to.copy_from_slice(from));
            }
        });
        rates.push(2.0 * size_of_val(&from[..]) as f64 / sample.elapsed().as_secs_f64());
    }
    let gigabytes: Vec<f64> = rates.iter().map(|rate| rate / 1e9).collect();
    report.print("ops", "memcpy/large", "GB/s", Better::Higher, &gigabytes)?;
    Ok(median(&rates))
}

fn text<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key].as_str().ok_or_else(|| bad(key, "no text"))
}

fn bad(what: &str, why: &str) -> Error {
    Error::internal(format!("{what}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_can_be_read_and_built() {
        let families: Vec<Value> = serde_json::from_str(CASES).unwrap();
        assert!(!families.is_empty());
        for family in &families {
            let inputs = tensors(family, "small").unwrap();
            let g = crate::graph();
            let inputs: Vec<_> = inputs.into_iter().map(|tensor| g.constant(tensor)).collect();
            let output = node(&g, family, text(family, "op").unwrap(), &inputs).unwrap();
            Session::new(&g).unwrap().fetch(output).unwrap_or_else(|error| panic!("{}: {error}", family["case"]));
        }
        for mover in MOVERS {
            assert!(families.iter().any(|family| family["case"] == *mover), "{mover}");
        }
    }
}
