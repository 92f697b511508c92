//! Runs a case and collects what differs.

use std::panic::AssertUnwindSafe;
use std::sync::OnceLock;
use std::time::Duration;

use kolo::wire::proto::GraphDef;
use kolo::{
    Code, Error, GpuOptions, GradientOptions, Graph, Host, Output, Result, RunOptions, Session, SessionConfig, Tensor,
    gradients_with, wire,
};

use crate::case::{Case, GradCase, Run};
use crate::compare::difference;
use crate::folder::Folder;
use crate::train;

/// For runs without a deadline of their own. A GPU's kernels may have to be compiled first.
pub fn patient() -> RunOptions {
    RunOptions { timeout: Some(Duration::from_secs(60)), ..RunOptions::default() }
}

/// `(mode, what differs)` for each mode in which the case disagrees.
pub fn check(case: &Case) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    let mut attempt =
        |mode: &'static str, run: &dyn Fn() -> Vec<String>| match std::panic::catch_unwind(AssertUnwindSafe(run)) {
            Ok(complaints) => found.extend(complaints.into_iter().map(|why| (mode, why))),
            Err(_) => found.push((mode, "panicked".to_owned())),
        };
    attempt("forward", &|| forward(case, &case.def, &[], false));
    if case.grad.is_some() {
        attempt("gradient", &|| gradient(case, &case.def, &[]));
    }
    if case.train.is_some() {
        attempt("train", &|| train::check(case));
    }
    if case.may_feed {
        match case.fed() {
            Ok((def, feeds)) => {
                attempt("fed", &|| forward(case, &def, &feeds, true));
                if case.grad.is_some() {
                    attempt("fed gradient", &|| gradient(case, &def, &feeds));
                }
            }
            Err(error) => attempt("fed", &|| vec![error.to_string()]),
        }
    }
    found
}

pub fn import(def: &GraphDef) -> Result<Graph> {
    let graph = kolo::graph();
    wire::graph::import(&graph, def, wire::graph::ImportOptions::default())?;
    Ok(graph)
}

pub fn session(graph: &Graph) -> Result<Session> {
    let config =
        SessionConfig { inter_op_parallelism_threads: 1, intra_op_parallelism_threads: 1, ..SessionConfig::default() };
    if on_gpu() {
        // One context for all cases: making one takes longer than most cases run.
        static HOST: OnceLock<Host> = OnceLock::new();
        let config = SessionConfig { allow_soft_placement: true, ..config };
        let gpu = GpuOptions { full_precision: true, ..GpuOptions::default() };
        let config = SessionConfig { gpu, device_count: [("GPU".to_owned(), 1)].into(), ..config };
        let host = HOST.get_or_init(|| Host::new(config).expect("a GPU was asked for"));
        return host.session_apart(graph);
    }
    Session::with_config(graph, SessionConfig { device_count: [("GPU".to_owned(), 0)].into(), ..config })
}

/// `KOLO_GOLDEN_DEVICE=gpu`: what has a kernel there runs on a GPU, and floats may differ a little more, since sums are
/// taken in another order.
pub fn on_gpu() -> bool {
    std::env::var("KOLO_GOLDEN_DEVICE").is_ok_and(|device| device == "gpu")
}

fn forward(case: &Case, def: &GraphDef, feeds: &[(String, Tensor)], is_fed: bool) -> Vec<String> {
    let folder = match Folder::new(case.has_folder) {
        Ok(folder) => folder,
        Err(error) => return vec![format!("no folder for its files: {error}")],
    };
    let made = folder
        .in_graph(def)
        .and_then(|def| import(&def))
        .and_then(|graph| session(&graph).map(|session| (graph, session)));
    if let Err(error) = &made
        && case.runs.iter().any(|run| run.error.as_ref().is_some_and(|code| is_code(error, code)))
    {
        // What TensorFlow refuses in a run, we may refuse before.
        return Vec::new();
    }
    let (mut complaints, mut results) = (Vec::new(), Vec::new());
    for (i, run) in case.runs.iter().enumerate() {
        let wanted = if is_fed { run.error_fed.as_deref().or(run.error.as_deref()) } else { run.error.as_deref() };
        if wanted == Some("OK") {
            results.push(Vec::new());
            continue;
        }
        let outcome = match &made {
            Ok((_, session)) => given(run, feeds, &results, &folder).and_then(|feeds| run_once(session, run, &feeds)),
            Err(error) => Err(error.clone()),
        };
        results.push(outcome.as_ref().map_or_else(|_| Vec::new(), Vec::clone));
        let outcome =
            outcome.and_then(|values| values.iter().map(|value| folder.take(value)).collect::<Result<Vec<_>>>());
        let before = complaints.len();
        match (outcome, wanted) {
            (Ok(values), None) => {
                for ((fetch, &at), value) in run.fetches.iter().zip(&run.expect).zip(&values) {
                    complaints.extend(judge(case, run, &case.expected[at], value).map(|why| format!("{fetch}: {why}")));
                    let Ok((graph, _)) = &made else { continue };
                    // A reference variable may have been given another shape than it was declared with.
                    let Ok(output) = graph.output(fetch) else { continue };
                    let inferred = output.shape();
                    if !output.is_ref() && !inferred.admits(value.shape()) {
                        complaints.push(format!("{fetch}: inferred {:?}, but it is {:?}", inferred, value.shape()));
                    }
                }
            }
            (Ok(values), Some(code)) => complaints.push(format!("should fail with {code}, got {values:?}")),
            (Err(error), None) => complaints.push(format!("{:?}: {error}", error.code())),
            (Err(error), Some(code)) if is_code(&error, code) => {}
            (Err(error), Some(code)) => {
                complaints.push(format!("should fail with {code}, got {:?}: {error}", error.code()))
            }
        }
        if case.runs.len() > 1 {
            complaints[before..].iter_mut().for_each(|why| *why = format!("run {i}: {why}"));
        }
    }
    complaints
}

fn is_code(error: &Error, name: &str) -> bool {
    let code: Code = error.code();
    format!("{code:?}").eq_ignore_ascii_case(&name.replace('_', ""))
}

/// All that a run is fed: the case's inputs, the run's own, and results of earlier runs.
fn given(
    run: &Run,
    feeds: &[(String, Tensor)],
    results: &[Vec<Tensor>],
    folder: &Folder,
) -> Result<Vec<(String, Tensor)>> {
    let mut all = Vec::new();
    for (name, value) in feeds.iter().chain(&run.feeds) {
        all.push((name.clone(), folder.put(value)?));
    }
    for (name, run, fetch) in &run.feed_results {
        let value = results.get(*run).and_then(|values| values.get(*fetch));
        let value = value.ok_or_else(|| Error::internal(format!("run {run} gave nothing to feed")))?;
        let value = value.resource().map_or_else(|_| value.clone(), |handle| Tensor::string(handle.name.to_string()));
        all.push((name.clone(), value));
    }
    Ok(all)
}

fn run_once(session: &Session, run: &Run, feeds: &[(String, Tensor)]) -> Result<Vec<Tensor>> {
    let fetches: Vec<&str> = run.fetches.iter().map(String::as_str).collect();
    let targets: Vec<&str> = run.targets.iter().map(String::as_str).collect();
    let feeds: Vec<(&str, Tensor)> = feeds.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let options = RunOptions { timeout: Some(Duration::from_millis(run.timeout_ms)), ..RunOptions::default() };
    for _ in 1..run.repeat {
        session.run_named_with(&options, &fetches, &feeds, &targets)?;
    }
    session.run_named_with(&options, &fetches, &feeds, &targets).map(|(values, _)| values)
}

/// What is wrong with a value, by the rule the run names.
fn judge(case: &Case, run: &Run, expected: &Tensor, got: &Tensor) -> Option<String> {
    match run.compare.as_str() {
        "shape" => ((expected.dtype(), expected.shape()) != (got.dtype(), got.shape()))
            .then(|| format!("expected {expected:?}, got {got:?}")),
        _ => difference(expected, got, case.tolerance),
    }
}

fn gradient(case: &Case, def: &GraphDef, feeds: &[(String, Tensor)]) -> Vec<String> {
    let grad = case.grad.as_ref().expect("asked only where there is one");
    let values = import(def).and_then(|graph| gradient_values(&graph, grad, feeds));
    let values = match values {
        Ok(values) => values,
        Err(error) => return vec![format!("{:?}: {error}", error.code())],
    };
    let mut complaints = Vec::new();
    for ((x, expect), value) in grad.xs.iter().zip(&grad.expect).zip(values) {
        match (expect, value) {
            (None, None) => {}
            // A gradient of zeros where TensorFlow gives none, or the other way round, trains the same.
            (None, Some(value)) if is_zero(&value) => {}
            (Some(at), None) if is_zero(&case.expected[*at]) => {}
            (None, Some(value)) => complaints.push(format!("by {x}: expected none, got {value:?}")),
            (Some(at), None) => complaints.push(format!("by {x}: expected {:?}, got none", case.expected[*at])),
            (Some(at), Some(value)) => complaints
                .extend(difference(&case.expected[*at], &value, case.tolerance).map(|why| format!("by {x}: {why}"))),
        }
    }
    complaints
}

fn gradient_values(graph: &Graph, grad: &GradCase, feeds: &[(String, Tensor)]) -> Result<Vec<Option<Tensor>>> {
    let outputs = |names: &[String]| names.iter().map(|name| graph.output(name)).collect::<Result<Vec<_>>>();
    let grad_ys = outputs(&grad.dys)?.into_iter().map(Some).collect();
    let options = GradientOptions { grad_ys, ..GradientOptions::default() };
    let grads = gradients_with(&outputs(&grad.ys)?, &outputs(&grad.xs)?, &options)?;
    let grads = grads.into_iter().map(|grad| grad.map(|grad| grad.dense()).transpose()).collect::<Result<Vec<_>>>()?;
    let feeds: Vec<_> =
        feeds.iter().map(|(name, value)| Ok((graph.output(name)?, value.clone()))).collect::<Result<_>>()?;
    let fetches: Vec<Output<'_>> = grads.iter().flatten().copied().collect();
    if fetches.is_empty() {
        return Ok(vec![None; grads.len()]);
    }
    let (values, _) = session(graph)?.run_with(&patient(), &fetches, &feeds, &[])?;
    let mut values = values.into_iter();
    Ok(grads.iter().map(|grad| grad.as_ref().and_then(|_| values.next())).collect())
}

fn is_zero(value: &Tensor) -> bool {
    value.host_bytes().is_ok_and(|bytes| bytes.iter().all(|&byte| byte == 0 || byte == 0x80))
}
