//! For tests of passes, in this crate and in others: a rewritten graph computes what the plain one computes.

use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Graph, Operation, Output, Pass};

use crate::{GpuOptions, RunOptions, Session, SessionConfig};

/// How far a value may be off, in relation to the largest of its tensor: passes may round in another order.
const TOLERANCE: f64 = 1e-4;
/// Steps that are compared: state must agree from one to the next, and the fourth may be captured.
const N_STEPS: usize = 5;

/// One run of a graph.
#[derive(Clone, Copy)]
pub struct Run<'a, 'g> {
    /// The operation to run first, once.
    pub init: Option<Operation<'g>>,
    /// What is compared.
    pub fetches: &'a [Output<'g>],
    /// What is fed.
    pub feeds: &'a [(Output<'g>, Tensor)],
    /// What else runs.
    pub targets: &'a [Operation<'g>],
}

/// Runs the graph with these passes alone, and with none, on the devices of `config`, and compares what is fetched over several
/// steps. Returns the graph as text after the last of the passes; an error says which value differs, or what failed.
pub fn check_rewrite(graph: &Graph, run: Run<'_, '_>, passes: &[Pass], config: &SessionConfig) -> Result<String> {
    let session = |passes: &[Pass]| {
        let gpu = GpuOptions { no_fusion: true, full_precision: true, ..config.gpu.clone() };
        Session::with_config(graph, SessionConfig { gpu, passes: passes.to_vec(), ..config.clone() })
    };
    let (plain, rewritten) = (session(&[])?, session(passes)?);
    for session in [&plain, &rewritten] {
        run.init.map_or(Ok(()), |init| session.run_op(init))?;
    }
    for step in 0..N_STEPS {
        let values = |session: &Session| {
            session.run_with(&RunOptions::default(), run.fetches, run.feeds, run.targets).map(|(values, _)| values)
        };
        let (expected, found) = (values(&plain)?, values(&rewritten)?);
        for ((output, expected), found) in run.fetches.iter().zip(&expected).zip(&found) {
            if !is_near(expected, found)? {
                return Err(Error::internal(format!(
                    "{} differs in step {step}: {expected:?} became {found:?}",
                    output.operation().name()
                )));
            }
        }
    }
    let names: Vec<String> = run.fetches.iter().map(|output| output.operation().name().to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let report = rewritten.local()?.explain_passes(&names, passes.last().map(Pass::name))?;
    if let Some((record, why)) = report.log.iter().find_map(|record| Some((record, record.undone.as_ref()?))) {
        return Err(Error::internal(format!("pass '{}' was undone: {why}", record.pass)));
    }
    Ok(report.text.unwrap_or_default())
}

fn is_near(expected: &Tensor, found: &Tensor) -> Result<bool> {
    if expected.dtype() != found.dtype() || expected.shape() != found.shape() {
        return Ok(false);
    }
    if expected.dtype() != DType::F32 {
        return Ok(expected == found);
    }
    let (expected, found) = (expected.data::<f32>()?, found.data::<f32>()?);
    let largest = expected.iter().fold(1.0f64, |most, value| most.max(f64::from(value.abs())));
    let is_same = |(a, b): (&f32, &f32)| a == b || f64::from((a - b).abs()) <= TOLERANCE * largest;
    Ok(expected.iter().zip(found).all(is_same))
}
