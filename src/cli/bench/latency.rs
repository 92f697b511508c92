//! `run-latency`: the cost of a run that computes next to nothing.

use std::sync::Arc;

use crate::{PartialShape, Result, Session, Tensor};

use super::measure::{Better, Report};

pub fn run(report: &Report) -> Result<()> {
    let g = crate::graph();
    let constant = g.constant(1.0f32);
    let x = g.placeholder::<f32>("x", PartialShape::scalar());
    let sum = x + constant;
    let session = Arc::new(Session::new(&g)?);
    let one = Tensor::scalar(1.0f32);
    let show = |case: &str, samples: Vec<f64>| {
        let micros: Vec<f64> = samples.iter().map(|seconds| seconds * 1e6).collect();
        report.print("run-latency", case, "us", Better::Lower, &micros)
    };
    show("constant", report.sample(|| session.run(&[constant], &[], &[]).map(drop))?)?;
    show("feed-add", report.sample(|| session.run(&[sum], &[(x, one.clone())], &[]).map(drop))?)?;
    let call = session.make_callable(&[], &[constant], &[])?;
    show("constant-callable", report.sample(|| call.call(&[]).map(drop))?)?;
    let call = session.make_callable(&[x], &[sum], &[])?;
    show("feed-add-callable", report.sample(|| call.call(&[&one]).map(drop))?)
}
