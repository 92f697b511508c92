//! Model parallelism by hand: one layer on each of two devices. The activations cross forwards, their gradients back.
//!
//! ```text
//! $ cargo run --example model_parallel
//! step  0: loss 1.0000
//! step 50: loss 0.0260
//! bytes that cross in a step: 104
//! ```

use std::collections::BTreeMap;

use kolo::{GradientOptions, Initializer, Result, Session, SessionConfig, Tensor, gradients_with, ops};

fn main() -> Result<()> {
    let g = kolo::graph();
    g.set_seed(3);
    let x = g.placeholder::<f32>("x", [Some(4), Some(2)]);
    let y = g.placeholder::<f32>("y", [Some(4), Some(1)]);
    let (first, hidden) = g.device("/cpu:0", || {
        let w = g.new_variable("first", Initializer::GlorotUniform).shape([2, 3]).build();
        (w, ops::tanh(ops::matmul(x, w.read())))
    });
    let (second, loss) = g.device("/cpu:1", || {
        let w = g.new_variable("second", Initializer::Zeros).shape([3, 1]).build();
        let prediction = ops::matmul(hidden, w.read());
        (w, ops::mean_all(ops::squared_difference(prediction, y)))
    });
    // Each gradient is computed where its op is.
    let options = GradientOptions { colocate_with_ops: true, ..GradientOptions::default() };
    let handles = [first.handle(), second.handle()];
    let rate = g.constant(0.3f32);
    let mut updates = Vec::new();
    for (handle, grad) in handles.into_iter().zip(gradients_with(&[loss], &handles, &options)?) {
        let grad = grad.expect("both layers are used").dense()?;
        updates.push(ops::apply_gradient_descent(handle, rate, grad));
    }
    let train = g.group("train", &updates);
    let init = g.global_variables_initializer();

    let config = SessionConfig { device_count: BTreeMap::from([("CPU".to_owned(), 2)]), ..SessionConfig::default() };
    let session = Session::with_config(&g, config)?;
    session.run_op(init)?;
    let inputs = Tensor::from([[1.0f32, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]]);
    let labels = Tensor::from([[1.0f32], [-1.0], [1.0], [-1.0]]);
    for step in 0..100 {
        let value = session.run(&[loss], &[(x, inputs.clone()), (y, labels.clone())], &[train])?;
        if step % 50 == 0 {
            println!("step {step:2}: loss {:.4}", value[0].scalar_value::<f32>()?);
        }
    }
    let moved: usize = session.local()?.placement().rows.iter().filter_map(|row| row.n_bytes_moved).sum();
    println!("bytes that cross in a step: {moved}");
    Ok(())
}
