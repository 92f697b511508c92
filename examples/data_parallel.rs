//! Four ranks train one model: each computes on its quarter of every batch, and all apply the mean of their gradients. Here they
//! are threads of one process; `kolo train mnist --ranks 4` makes them processes, with the same calls.
//!
//! ```text
//! rank 0: 200 steps, loss 0.0001
//! rank 1: 200 steps, loss 0.0001
//! rank 2: 200 steps, loss 0.0001
//! rank 3: 200 steps, loss 0.0001
//! all ranks have the same weights: y = 2.99 x + 1.00
//! ```

use kolo::data::Dataset;
use kolo::optim::{Momentum, Optimizer};
use kolo::parallel::{DataParallel, World};
use kolo::train::{Model, Trainer, global_step_or_create};
use kolo::{Result, SessionConfig, Tensor, nn, ops};

fn main() -> Result<()> {
    let worlds = World::threads(4)?;
    let lines = std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.iter().map(|world| scope.spawn(|| train(world))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect::<Result<Vec<_>>>()
    })?;
    for (rank, (steps, loss, _)) in lines.iter().enumerate() {
        println!("rank {rank}: {steps} steps, loss {loss:.4}");
    }
    let (_, _, line) = &lines[0];
    assert!(lines.iter().all(|(_, _, other)| other == line), "ranks differ");
    println!("all ranks have the same weights: y = {:.2} x + {:.2}", line[0], line[1]);
    Ok(())
}

/// The program of one rank. It is written as for one process; the lines about `world` are all that ranks add.
fn train(world: &World) -> Result<(i64, f64, Vec<f32>)> {
    let g = kolo::graph();
    let x = g.placeholder::<f32>("x", [None, Some(1)]);
    let y = g.placeholder::<f32>("y", [None, Some(1)]);
    let loss = ops::mean_all(ops::square(nn::dense(x, 1, "line") - y));
    let train_op = Momentum::new(0.05, 0.9).minimize(loss, Some(global_step_or_create(&g)?))?;
    let weights: Vec<_> = g.trainable_variables().iter().map(|variable| variable.read()).collect();

    // The session gets the passes that exchange gradients, and the group of all ranks.
    let config = DataParallel::new(world).configure(SessionConfig::default());
    let model = Model::new(&[x, y], loss, train_op);
    let mut trainer = Trainer::new(&g, model).source(config).world(world).build()?;

    // Every rank has all data; the trainer takes its rows of each batch.
    let xs: Vec<f32> = (0..64).map(|i| i as f32 / 32.0 - 1.0).collect();
    let ys: Vec<f32> = xs.iter().map(|x| 3.0 * x + 1.0).collect();
    let data = Dataset::new([Tensor::vector(xs), Tensor::vector(ys)]).reshape(0, &[1]).reshape(1, &[1]);
    let report = trainer.fit(&data.clone().shuffle(1).batch(32, true).repeat(100), &mut [])?;
    let loss = trainer.evaluate(&data.batch(16, false))?.loss;
    let weights = trainer.session().run(&weights, &[], &[])?;
    let weights = weights.iter().map(|value| Ok(value.data::<f32>()?[0])).collect::<Result<Vec<f32>>>()?;
    Ok((report.step, loss, weights))
}
