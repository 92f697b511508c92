//! `matmul`: matrix products through a session, one after the other.

use std::sync::Arc;

use crate::{Initializer, Result, Session, ops};

use super::measure::{Better, Report};

/// Name, M, K, N, whether A is stored transposed, products per run.
const CASES: &[(&str, usize, usize, usize, bool, usize)] = &[
    ("256", 256, 256, 256, false, 60),
    ("512", 512, 512, 512, false, 7),
    ("1024", 1024, 1024, 1024, false, 4),
    ("2048", 2048, 2048, 2048, false, 4),
    ("100x784x100", 100, 784, 100, false, 128),
    ("784x100x100-ta", 784, 100, 100, true, 128),
    ("100x100x10", 100, 100, 10, false, 200),
    ("1024x784x1024", 1024, 784, 1024, false, 4),
];

pub fn run(report: &Report) -> Result<()> {
    for &(case, m, k, n, transposed, n_products) in CASES {
        let g = crate::graph();
        let uniform = || Initializer::Uniform { low: -1.0, high: 1.0 };
        let shape_a = if transposed { [k, m] } else { [m, k] };
        let a = g.new_variable("a", uniform()).shape(shape_a).build().read();
        let b = g.new_variable("b", uniform()).shape([k, n]).build().read();
        let mut last = ops::matmul_with(a, b, transposed, false).operation();
        for _ in 1..n_products {
            last = g.control_dependencies(&[last], || ops::matmul_with(a, b, transposed, false).operation());
        }
        let init = g.global_variables_initializer();
        let session = Arc::new(Session::new(&g)?);
        session.run_op(init)?;
        let call = session.make_callable(&[], &[], &[last])?;
        let samples = report.sample(|| call.call(&[]).map(drop))?;
        let flops = 2.0 * (m * k * n * n_products) as f64;
        let rates: Vec<f64> = samples.iter().map(|seconds| flops / seconds / 1e9).collect();
        report.print("matmul", case, "GFLOP/s", Better::Higher, &rates)?;
    }
    Ok(())
}
