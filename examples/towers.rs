//! Towers: the same model on two devices, each with its share of the batch; gradients averaged and applied once. One
//! variable is not used by the model, so its gradient is missing, and that is fine.
//!
//! ```text
//! $ cargo run --example towers
//! unused has no gradient
//! step  0: loss 3.7500
//! step 20: loss 0.0979
//! step 40: loss 0.0092
//! w = float[2,1] [1.9709897, -0.95306045]
//! ```

use std::collections::BTreeMap;

use kolo::{Grad, Initializer, Output, Result, Session, SessionConfig, Tensor, gradients, ops};

const TOWERS: usize = 2;

fn main() -> Result<()> {
    let g = kolo::graph();
    let x = g.placeholder::<f32>("x", [Some(4), Some(2)]);
    let y = g.placeholder::<f32>("y", [Some(4), Some(1)]);
    let variables = g.device("/cpu:0", || {
        [
            g.new_variable("w", Initializer::Zeros).shape([2, 1]).build(),
            g.new_variable("unused", Initializer::Zeros).shape([3]).build(),
        ]
    });
    let handles = variables.map(|variable| variable.handle());
    let (shards_x, shards_y) = (ops::split(x, TOWERS, 0), ops::split(y, TOWERS, 0));
    let mut losses = Vec::new();
    let mut tower_grads: Vec<Vec<Option<Grad<'_>>>> = Vec::new();
    for tower in 0..TOWERS {
        g.device(&format!("/cpu:{tower}"), || -> Result<()> {
            let prediction = ops::matmul(shards_x[tower], variables[0].read());
            let loss = ops::mean_all(ops::squared_difference(prediction, shards_y[tower]));
            tower_grads.push(gradients(&[loss], &handles)?);
            losses.push(loss);
            Ok(())
        })?;
    }
    let rate = g.constant(0.1f32);
    let mut updates = Vec::new();
    for (i, variable) in variables.iter().enumerate() {
        let grads: Vec<Output<'_>> =
            tower_grads.iter().filter_map(|grads| grads[i]).map(|grad| grad.dense()).collect::<Result<_>>()?;
        if grads.is_empty() {
            println!("{} has no gradient", variable.name());
            continue;
        }
        let average = ops::add_n(&grads)? / grads.len() as f32;
        updates.push(ops::apply_gradient_descent(variable.handle(), rate, average));
    }
    let train = g.group("train", &updates);
    let loss = ops::add_n(&losses)? / TOWERS as f32;
    let init = g.global_variables_initializer();

    let config =
        SessionConfig { device_count: BTreeMap::from([("CPU".to_owned(), TOWERS)]), ..SessionConfig::default() };
    let session = Session::with_config(&g, config)?;
    session.run_op(init)?;
    // y = 2 a - b
    let inputs = Tensor::from([[1.0f32, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]);
    let labels = Tensor::from([[2.0f32], [-1.0], [1.0], [3.0]]);
    for step in 0..60 {
        let value = session.run(&[loss], &[(x, inputs.clone()), (y, labels.clone())], &[train])?;
        if step % 20 == 0 {
            println!("step {step:2}: loss {:.4}", value[0].scalar_value::<f32>()?);
        }
    }
    println!("w = {:?}", session.fetch(variables[0].read())?);
    Ok(())
}
