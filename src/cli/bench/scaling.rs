//! `scaling`: two independent towers on two CPU devices against one.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::{Graph, Initializer, Operation, Result, Session, SessionConfig, ops};

use super::measure::{Better, Report, median};

pub fn run(report: &Report) -> Result<()> {
    let g = crate::graph();
    let first = tower(&g, "/cpu:0");
    let second = tower(&g, "/cpu:1");
    let both = g.group("both", &[first, second]);
    let init = g.global_variables_initializer();
    let config = SessionConfig {
        device_count: BTreeMap::from([("CPU".to_owned(), 2)]),
        intra_op_parallelism_threads: 1,
        inter_op_parallelism_threads: 2,
        ..SessionConfig::default()
    };
    let session = Arc::new(Session::with_config(&g, config)?);
    session.run_op(init)?;
    let one = session.make_callable(&[], &[], &[first])?;
    let two = session.make_callable(&[], &[], &[both])?;
    let alone = median(&report.sample(|| one.call(&[]).map(drop))?);
    let samples = report.sample(|| two.call(&[]).map(drop))?;
    let speedups: Vec<f64> = samples.iter().map(|together| 2.0 * alone / together).collect();
    report.print("scaling", "towers", "speedup", Better::Higher, &speedups)
}

/// Twenty chained products of 512 × 512.
fn tower<'g>(g: &'g Graph, device: &str) -> Operation<'g> {
    g.device(device, || {
        let small = Initializer::Uniform { low: -0.05, high: 0.05 };
        let w = g.new_variable("w", small.clone()).shape([512, 512]).build().read();
        let x = g.new_variable("x", small).shape([512, 512]).build().read();
        (0..20).fold(x, |y, _| ops::matmul(y, w)).operation()
    })
}
