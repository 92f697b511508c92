//! What the layers' tests share: running a graph once, and gradients against differences.

use kolo_core::Tensor;
use kolo_graph::{Graph, Output, gradients};
use kolo_runtime::Session;

/// The values of `fetches` in a fresh session, after all variables got their first values.
#[track_caller]
pub fn run(g: &Graph, fetches: &[Output<'_>], feeds: &[(Output<'_>, Tensor)]) -> Vec<Tensor> {
    let init = g.global_variables_initializer();
    let session = Session::new(g).expect("a whole graph");
    session.run_op(init).expect("init");
    session.run(fetches, feeds, &[]).expect("a run")
}

/// Floats that are equal but for rounding.
#[track_caller]
pub fn close(found: &Tensor, expected: &[f32]) {
    let values = found.data::<f32>().expect("floats");
    let far = |(a, b): (&f32, &f32)| (a - b).abs() > 2e-6 * b.abs().max(1.0);
    let bad = values.len() != expected.len() || values.iter().zip(expected).any(far);
    assert!(!bad, "{found:?} is not {expected:?}");
}

/// The gradients of `loss`, a `double`, with respect to all trainable variables are those of differences.
#[track_caller]
pub fn check_gradients(g: &Graph, loss: Output<'_>) {
    let variables = g.trainable_variables();
    let handles: Vec<Output<'_>> = variables.iter().map(|variable| variable.handle()).collect();
    let grads: Vec<Output<'_>> = gradients(&[loss], &handles)
        .expect("gradients")
        .into_iter()
        .zip(&variables)
        .map(|(grad, variable)| grad.unwrap_or_else(|| panic!("no gradient for {}", variable.name())))
        .map(|grad| grad.dense().expect("dense"))
        .collect();
    let assigns: Vec<_> = variables
        .iter()
        .map(|variable| {
            let value = g.op("Placeholder").attr("dtype", variable.dtype()).attr("shape", variable.shape()).out();
            (value, variable.assign(value))
        })
        .collect();
    let init = g.global_variables_initializer();
    let session = Session::new(g).expect("a whole graph");
    session.run_op(init).expect("init");
    let analytic = session.run(&grads, &[], &[]).expect("gradients run");
    let step = 1e-5;
    for ((variable, (value, assign)), analytic) in variables.iter().zip(&assigns).zip(&analytic) {
        let at = session.fetch(variable.read()).expect("a value");
        let data = at.data::<f64>().expect("doubles").to_vec();
        let expected = analytic.data::<f64>().expect("doubles");
        let set = |data: &[f64]| {
            let tensor = Tensor::from_vec(at.shape().clone(), data.to_vec()).expect("as many");
            session.run(&[], &[(*value, tensor)], &[*assign]).expect("assign");
        };
        for i in 0..data.len() {
            let loss_at = |delta: f64| {
                let mut moved = data.clone();
                moved[i] += delta;
                set(&moved);
                session.fetch(loss).expect("a loss").scalar_value::<f64>().expect("a double")
            };
            let difference = (loss_at(step) - loss_at(-step)) / (2.0 * step);
            let close = (difference - expected[i]).abs() <= 1e-6 * expected[i].abs().max(1.0);
            assert!(close, "{}[{i}]: the gradient is {}, the difference {difference}", variable.name(), expected[i]);
        }
        set(&data);
    }
}
