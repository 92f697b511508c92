//! One program under four strategies: on one device, on two, on two ranks with two devices each, and with a parameter server and two
//! workers. The global batch is the same, and so are the weights.
//!
//! ```text
//! strategy one-device: the global batch is 32, 32 for each of 1 replica (1 process x 1 device)
//! strategy mirrored: the global batch is 32, 16 for each of 2 replicas (1 process x 2 devices)
//! strategy multi-worker-mirrored: the global batch is 32, 8 for each of 4 replicas (2 processes x 2 devices)
//! strategy parameter-server: the global batch is 32, 16 for each of 2 replicas (2 processes x 1 device)
//! all of them: y = 3.00 x + 1.00
//! ```

use std::net::TcpListener;
use std::thread::scope;

use kolo::data::Dataset;
use kolo::optim::Momentum;
use kolo::parallel::{ReduceOp, World};
use kolo::strategy::{Mirrored, MultiWorkerMirrored, OneDevice, ParameterServer, Strategy};
use kolo::train::{Model, Trainer, global_step_or_create};
use kolo::{ClusterSpec, Result, Tensor, nn, ops};

/// The program. It does not know which strategy it trains under.
fn train(strategy: &Strategy) -> Result<Vec<f32>> {
    let g = kolo::graph();
    g.set_seed(7);
    let x = g.placeholder::<f32>("x", [None, Some(1)]);
    let y = g.placeholder::<f32>("y", [None, Some(1)]);
    let model = strategy.scope(&g, |scope| {
        let step = global_step_or_create(&g)?;
        let losses = scope.run(&[scope.split(x)?, scope.split(y)?], |replica| {
            let line = nn::dense(replica.input(0), 1, "line");
            Ok(ops::mean_all(ops::square(line - replica.input(1))))
        })?;
        let train = scope.minimize(Momentum::new(0.05, 0.9), &losses, Some(step))?;
        Ok(Model::new(&[x, y], scope.reduce(ReduceOp::Mean, &losses)?, train))
    })?;
    let weights: Vec<_> = g.trainable_variables().iter().map(|variable| variable.read()).collect();
    let xs: Vec<f32> = (0..64).map(|i| i as f32 / 32.0 - 1.0).collect();
    let ys: Vec<f32> = xs.iter().map(|x| 3.0 * x + 1.0).collect();
    let data = Dataset::new([Tensor::vector(xs), Tensor::vector(ys)]).reshape(0, &[1]).reshape(1, &[1]);
    let mut trainer = Trainer::new(&g, model).strategy(strategy).build()?;
    trainer.fit(&data.shuffle(1).batch(32, true).repeat(100), &mut [])?;
    if strategy.mesh().process == 0 {
        println!("{}", strategy.describe(32));
    }
    trainer.session().run(&weights, &[], &[])?.iter().map(|weight| Ok(weight.data::<f32>()?[0])).collect()
}

fn main() -> Result<()> {
    let alone = train(&OneDevice::new("/cpu:0").build()?)?;
    let mut others = vec![train(&Mirrored::new(&["/cpu:0", "/cpu:1"]).build()?)?];
    // Two ranks; `kolo train --ranks` or torchrun would make them processes, and `World::from_env` would find them.
    let worlds = World::threads(2)?;
    let rank = |world: World| train(&MultiWorkerMirrored::new(&world).devices(&["/cpu:0", "/cpu:1"]).build()?);
    others.extend(scope(|s| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| s.spawn(move || rank(world))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect::<Result<Vec<_>>>()
    })?);
    // A cluster of three tasks, on ports that the system chose.
    let bind = || TcpListener::bind("127.0.0.1:0").expect("a free port");
    let listeners = [bind(), bind(), bind()];
    let [ps, a, b] = listeners.each_ref().map(|at| at.local_addr().expect("it is bound"));
    let cluster = ClusterSpec::parse(&format!("ps={ps};worker={a},{b}"))?;
    let [ps, a, b] = listeners;
    let place = |job: &str, task: u32, at| ParameterServer::new(&cluster, job, task).listener(at);
    let server = place("ps", 0, ps).serve()?;
    let worker = |task, at| train(&place("worker", task, at).mode("sync".parse()?).build()?);
    others.extend(scope(|s| {
        let second = s.spawn(|| worker(1, b));
        Ok::<_, kolo::Error>([worker(0, a)?, second.join().expect("a worker panicked")?])
    })?);
    drop(server);
    for weights in &others {
        assert!(weights.iter().zip(&alone).all(|(x, y)| (x - y).abs() < 1e-5), "{weights:?} {alone:?}");
    }
    println!("all of them: y = {:.2} x + {:.2}", alone[0], alone[1]);
    Ok(())
}
