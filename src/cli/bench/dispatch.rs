//! `dispatch`: what the executor costs per tiny node.

use std::sync::Arc;

use crate::{Result, Session};

use super::measure::{Better, Report};

const N: usize = 10_000;

pub fn run(report: &Report) -> Result<()> {
    let g = crate::graph();
    let x = g.variable("x", 0.0f32).read();
    let one = g.constant(1.0f32);
    let chain = (0..N).fold(x, |y, _| y + one).operation();
    let adds: Vec<_> = (0..N).map(|_| (x + one).operation()).collect();
    let fan = g.group("fan", &adds);
    let init = g.global_variables_initializer();
    let session = Arc::new(Session::new(&g)?);
    session.run_op(init)?;
    for (case, target) in [("chain", chain), ("fan", fan)] {
        let call = session.make_callable(&[], &[], &[target])?;
        let samples = report.sample(|| call.call(&[]).map(drop))?;
        let per_node: Vec<f64> = samples.iter().map(|seconds| seconds * 1e9 / N as f64).collect();
        report.print("dispatch", case, "ns/node", Better::Lower, &per_node)?;
    }
    Ok(())
}
