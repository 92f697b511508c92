//! One program under every strategy.

use std::net::TcpListener;
use std::path::Path;

use kolo_core::{Code, Result, Tensor};
use kolo_graph::{Initializer, Output};
use kolo_net::{ClusterSpec, ServerConfig};
use kolo_ops::io::FileAccess;

use super::*;
use crate::optim::{Adam, Momentum, Optimizer, Sgd};
use crate::parallel::{ReduceOp, World};
use crate::train::{Checkpoints, Every, Model, Trainer, global_step_or_create};
use crate::{nn, ops};

/// Samples of a global batch, and how many times the two batches are gone through.
const BATCH: usize = 16;
const N_EPOCHS: u64 = 3;

fn tensor(dims: &[usize], value: impl Fn(usize) -> f32) -> Tensor {
    let n = dims.iter().product();
    Tensor::from_vec(kolo_core::Shape::new(dims).unwrap(), (0..n).map(value).collect()).unwrap()
}

fn data() -> Dataset {
    let value = |i: usize| ((i * 37 + 11) % 23) as f32 / 23.0 - 0.5;
    let columns = [tensor(&[2 * BATCH, 3], value), tensor(&[2 * BATCH, 1], |i| value(i * 5))];
    Dataset::new(columns).shuffle(3).batch(BATCH, true).repeat(N_EPOCHS)
}

/// The program: a small network, trained by a trainer. Gives the weights, unless this process does not report.
fn train(strategy: &Strategy, optimizer: Box<dyn Optimizer>) -> Result<Vec<Tensor>> {
    train_with(strategy, optimizer, N_EPOCHS, None)
}

/// The same for so many epochs, going on from the checkpoints in a folder.
fn train_with(
    strategy: &Strategy,
    optimizer: Box<dyn Optimizer>,
    n_epochs: u64,
    dir: Option<&Path>,
) -> Result<Vec<Tensor>> {
    let g = crate::graph();
    let x = g.placeholder::<f32>("x", [None, Some(3)]);
    let y = g.placeholder::<f32>("y", [None, Some(1)]);
    let model = strategy.scope(&g, |scope| {
        let step = global_step_or_create(&g)?;
        let losses = scope.run(&[scope.split(x)?, scope.split(y)?], |replica| {
            let weights = |name: &str, dims: &[usize]| {
                g.variable(name, Initializer::Value(tensor(dims, |i| (i as f32 * 0.7).sin()))).read()
            };
            let hidden = ops::tanh(ops::matmul(replica.input(0), weights("a", &[3, 4])));
            let error = ops::matmul(hidden, weights("b", &[4, 1])) - replica.input(1);
            Ok(ops::mean_all(ops::square(error)))
        })?;
        let train = scope.minimize_boxed(optimizer, &losses, Some(step))?;
        Ok(Model::new(&[x, y], scope.reduce(ReduceOp::Mean, &losses)?, train))
    })?;
    let read: Vec<Output<'_>> = g.trainable_variables().iter().map(|variable| variable.read()).collect();
    let mut trainer = Trainer::new(&g, model).strategy(strategy);
    if let Some(dir) = dir {
        let checkpoints = Checkpoints { dir: dir.to_owned(), every: Every::Steps(100), keep: 1 };
        trainer = trainer.checkpoints(checkpoints).resume(true);
    }
    let mut trainer = trainer.build()?;
    let before = trainer.step()?;
    let report = trainer.fit(&data().repeat(n_epochs), &mut [])?;
    let n_steps = 2 * n_epochs as i64;
    assert_eq!((report.n_steps as i64, trainer.step()?), (n_steps - before, n_steps), "{}", strategy.name());
    trainer.session().run(&read, &[], &[])
}

/// What every rank of a world of `n` returns.
fn on_ranks<R: Send>(n: usize, program: impl Fn(World) -> R + Sync) -> Vec<R> {
    let worlds = World::threads(n).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| program(world))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Trains on `n` workers and two parameter servers, over loopback.
fn on_workers<R: Send>(n: usize, mode: &str, program: impl Fn(Strategy) -> R + Sync) -> Vec<R> {
    let listeners: Vec<TcpListener> = (0..n + 2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<String> = listeners.iter().map(|at| at.local_addr().unwrap().to_string()).collect();
    let (ps, workers) = addresses.split_at(2);
    let cluster = ClusterSpec::parse(&format!("ps={};worker={}", ps.join(","), workers.join(","))).unwrap();
    let place = |listener, job: &str, task: usize| {
        let place = ParameterServer::new(&cluster, job, task as u32).listener(listener).mode(mode.parse().unwrap());
        // A worker that waits in vain for another one fails.
        let mut config =
            ServerConfig { files: FileAccess::under(&[std::env::temp_dir()]).unwrap(), ..ServerConfig::default() };
        config.defaults.operation_timeout_in_ms = 60_000;
        place.server_config(config)
    };
    let mut listeners = listeners.into_iter();
    let servers: Vec<_> =
        listeners.by_ref().take(2).enumerate().map(|(task, at)| place(at, "ps", task).serve().unwrap()).collect();
    let results = std::thread::scope(|scope| {
        let (place, program) = (&place, &program);
        let worker = |(task, at)| scope.spawn(move || program(place(at, "worker", task).build().unwrap()));
        let threads: Vec<_> = listeners.enumerate().map(worker).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    drop(servers);
    results
}

fn assert_close(found: &[Tensor], expected: &[Tensor], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        for (x, y) in found.data::<f32>().unwrap().iter().zip(expected.data::<f32>().unwrap()) {
            assert!((x - y).abs() <= 1e-6 * y.abs().max(1.0), "{what}: {x} and {y}");
        }
    }
}

const CPUS: [&str; 4] = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"];

#[test]
fn the_same_global_batch_gives_the_same_weights_under_every_strategy_and_shape() {
    let optimizers: [fn() -> Box<dyn Optimizer>; 2] =
        [|| Box::new(Momentum::new(0.1, 0.9)), || Box::new(Adam::new(0.01))];
    for make in optimizers {
        // 1 x 1
        let alone = train(&OneDevice::new("/cpu:0").build().unwrap(), make()).unwrap();
        // 1 x N
        let mirrored = train(&Mirrored::new(&CPUS).build().unwrap(), make()).unwrap();
        assert_close(&mirrored, &alone, "mirrored");
        let central = train(&CentralStorage::new(&CPUS).build().unwrap(), make()).unwrap();
        assert_eq!(central, mirrored, "variables elsewhere, the same sums");
        for spread in Mirrored::new(&CPUS).spread(|strategy| train(&strategy, make())).unwrap() {
            assert_eq!(spread, mirrored, "a rank for each device makes the same sums");
        }
        // N x 1 and N x M
        for (n, devices) in [(4, &CPUS[..1]), (2, &CPUS[..2])] {
            let trained = on_ranks(n, |world| {
                let strategy = MultiWorkerMirrored::new(&world).devices(devices).build().unwrap();
                assert_eq!(strategy.num_replicas_in_sync(), 4);
                train(&strategy, make()).unwrap()
            });
            for weights in trained {
                assert_eq!(weights, mirrored, "{n} ranks of {} devices make the same sums", devices.len());
            }
        }
        for mode in ["sync", "hybrid timeout=60s,min=1"] {
            let served = on_workers(2, mode, |strategy| train(&strategy, make()).unwrap());
            served.iter().for_each(|weights| assert_close(weights, &alone, mode));
        }
    }
}

#[test]
fn workers_go_on_from_a_checkpoint_of_the_chief_in_the_data_as_well() {
    let dir = std::env::temp_dir().join(format!("kolo-strategy-resume-{}", std::process::id()));
    let make = || Box::new(Momentum::new(0.1, 0.9));
    let alone = train_with(&OneDevice::new("").build().unwrap(), make(), 5, None).unwrap();
    let part =
        |n_epochs| on_workers(2, "sync", |strategy| train_with(&strategy, make(), n_epochs, Some(&dir)).unwrap());
    part(2);
    part(5).iter().for_each(|weights| assert_close(weights, &alone, "resumed"));
    // A strategy of another shape goes on from it, too.
    let strategy = Mirrored::new(&CPUS[..2]).build().unwrap();
    let further = train_with(&strategy, make(), 6, Some(&dir)).unwrap();
    let alone = train_with(&OneDevice::new("").build().unwrap(), make(), 6, None).unwrap();
    assert_close(&further, &alone, "resumed on devices");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn mirrored_takes_all_gpus_or_the_cpu() {
    let gpu = |visible| crate::cuda::PhysicalGpu { visible, ..crate::cuda::PhysicalGpu::default() };
    let found = |gpus| crate::cuda::Discovery { gpus, ..crate::cuda::Discovery::default() };
    let devices = |found| Mirrored::on_gpus(&found).build().unwrap().mesh().devices.clone();
    assert_eq!(devices(found(vec![gpu(Some(0)), gpu(None), gpu(Some(1))])), ["/gpu:0", "/gpu:1"]);
    assert_eq!(devices(found(Vec::new())), ["/cpu:0"]);
}

#[test]
fn workers_that_are_not_in_sync_have_a_batch_each() {
    let found = on_workers(2, "async", |strategy| {
        assert_eq!((strategy.mesh().n_replicas(), strategy.num_replicas_in_sync()), (2, 1));
        assert!(strategy.describe(16).contains("that of one worker's update"), "{}", strategy.describe(16));
        let part = strategy.distribute(&data()).unwrap();
        part.batches().unwrap().map(|batch| batch.unwrap().len()).collect::<Vec<_>>()
    });
    // Half of the samples each, in whole batches.
    assert_eq!(found, [vec![BATCH; 3], vec![BATCH; 3]]);
}

#[test]
fn values_of_all_replicas_are_reduced_and_gathered() {
    let check = |strategy: &Strategy| {
        let g = crate::graph();
        let fetches = strategy
            .scope(&g, |scope| {
                let ids = scope.run(&[], |replica| Ok(g.constant([replica.id() as f32 + 1.0])))?;
                let ops = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod];
                let mut all = ops.iter().map(|op| scope.reduce(*op, &ids)).collect::<Result<Vec<_>>>()?;
                all.push(scope.gather(&ids.map(|id| *id * 2.0))?);
                Ok(all)
            })
            .unwrap();
        let values = strategy.session(&g).unwrap().run(&fetches, &[], &[]).unwrap();
        let expected = [vec![10.0f32], vec![2.5], vec![1.0], vec![4.0], vec![24.0], vec![2.0, 4.0, 6.0, 8.0]];
        assert_eq!(values, expected.map(Tensor::vector));
    };
    check(&Mirrored::new(&CPUS).build().unwrap());
    on_ranks(4, |world| check(&CollectiveAllReduce::new(&world).build().unwrap()));
    on_ranks(2, |world| check(&CollectiveAllReduce::new(&world).devices(&CPUS[..2]).build().unwrap()));
}

#[test]
fn a_replica_computes_on_its_device_and_variables_are_at_home() {
    let device_of = |strategy: &Strategy| {
        let g = crate::graph();
        let doubled = strategy
            .scope(&g, |scope| {
                let made = scope.run(&[], |replica| Ok(g.variable("w", 1.0f32).read() * replica.id() as f32))?;
                Ok(made
                    .local()
                    .iter()
                    .map(|out| out.operation().node().unwrap().device.to_string())
                    .collect::<Vec<_>>())
            })
            .unwrap();
        let home = g.find_variable("w").unwrap().handle().operation().node().unwrap().device.to_string();
        (home, doubled)
    };
    let devices = ["/cpu:2", "/cpu:1"];
    let (home, replicas) = device_of(&Mirrored::new(&devices).build().unwrap());
    assert_eq!(home, "/device:CPU:2");
    assert_eq!(replicas, ["/device:CPU:2", "/device:CPU:1"]);
    let (home, replicas) = device_of(&CentralStorage::new(&devices).build().unwrap());
    assert_eq!((home.as_str(), replicas.len()), ("/device:CPU:0", 2));
    let (home, replicas) = device_of(&OneDevice::new("").build().unwrap());
    assert_eq!((home.as_str(), &replicas[..]), ("", &[String::new()][..]));
}

#[test]
fn wrong_use_names_the_cure() {
    let strategy = Mirrored::new(&CPUS[..2]).build().unwrap();
    let g = crate::graph();
    let early = g.variable("early", 1.0f32);
    let fails = |text: &str, body: &dyn Fn(&Scope<'_, '_>) -> Result<()>| {
        let error = strategy.scope(&g, body).unwrap_err();
        assert!(error.message().contains(text), "{error}");
        assert!(matches!(error.code(), Code::FailedPrecondition | Code::InvalidArgument), "{error}");
    };
    fails("variable 'early' was made outside of the scope of strategy mirrored", &|scope| {
        let losses = scope.run(&[], |_| Ok(ops::square(g.find_variable("early")?.read())))?;
        scope.minimize(Sgd::new(0.1), &losses, None).map(drop)
    });
    fails("`reduce` was called in replica context", &|scope| {
        scope.run(&[], |_| scope.reduce(ReduceOp::Sum, &scope.same(g.constant(1.0f32)))).map(drop)
    });
    fails("call `run` on what `run` gives", &|scope| scope.run(&[], |_| scope.run(&[], |_| Ok(()))).map(drop));
    // An error in a replica's function does not leave the scope in it.
    fails("`gather` was given 1 values, and this process has 2 replicas", &|scope| {
        let failed = scope.run(&[], |_| Err::<(), _>(Error::invalid_argument("on purpose")));
        assert!(failed.is_err());
        scope.gather(&PerReplica::new(vec![early.read()])).map(drop)
    });
    fails("was given 1 inputs and asks for number 3", &|scope| {
        let inputs = [scope.same(g.constant(1.0f32))];
        scope.run(&inputs, |replica| Ok(replica.input(3))).map(drop)
    });
}

#[test]
fn meshes_and_batches_that_make_no_sense_are_refused() {
    let says = |strategy: Result<Strategy>, text: &str| {
        let error = strategy.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    says(Mirrored::new(&["/cpu:0", "/cpu:0"]).build(), "mirrored was given /cpu:0 twice");
    says(Mirrored::new(&[] as &[&str]).build(), "mirrored needs at least one device");
    says(CentralStorage::new(&["/cpu:x"]).build(), "cpu:x");
    let cluster = ClusterSpec::parse("ps=127.0.0.1:1;worker=127.0.0.1:2").unwrap();
    says(ParameterServer::new(&cluster, "ps", 0).build(), "ps:0 (127.0.0.1:1) does not train");
    says(
        ParameterServer::new(&cluster, "worker", 0).mode("average".parse().unwrap()).build(),
        "choose sync, async or hybrid",
    );
    let no_ps = ClusterSpec::parse("worker=127.0.0.1:2").unwrap();
    says(ParameterServer::new(&no_ps, "worker", 0).build(), "no job 'ps'");
    let strategy = Mirrored::new(&CPUS[..3]).build().unwrap();
    let error = strategy.distribute(&data()).unwrap_err().to_string();
    assert!(
        error.contains("16 cannot be shared equally by 3 replicas of strategy mirrored; batch the data by 18"),
        "{error}"
    );
    let g = crate::graph();
    let w = g.variable("w", 1.0f32);
    let model = Model::new(&[], w.read(), Sgd::new(1.0).minimize(w.read(), None).unwrap());
    let both = Trainer::new(&g, model).strategy(&strategy).source(SessionConfig::default());
    assert!(both.build().err().unwrap().to_string().contains("with_session_config"));
}

#[test]
fn a_chief_is_the_first_worker() {
    let cluster = ClusterSpec::parse("chief=a:1;ps=b:1,c:1;worker=d:1,e:1").unwrap();
    let seat = |job: &str, task| WorkerSeat::of(&cluster, job, task, "sync".parse().unwrap()).unwrap();
    assert_eq!((seat("chief", 0).worker(), seat("worker", 0).worker(), seat("worker", 1).worker()), (0, 1, 2));
    assert!(seat("chief", 0).is_chief() && !seat("worker", 0).is_chief());
    assert_eq!(seat("worker", 1).n_workers(), 3);
    let config = seat("chief", 0).session_config(&SessionConfig::default());
    assert_eq!(config.device_filters, ["/job:ps", "/job:chief/task:0"]);
}

#[test]
fn layers_that_update_beside_the_weights_work_in_a_scope() {
    let strategy = Mirrored::new(&CPUS[..2]).build().unwrap();
    let g = crate::graph();
    let x = g.placeholder::<f32>("x", [None, Some(3)]);
    let model = strategy
        .scope(&g, |scope| {
            let step = global_step_or_create(&g)?;
            let losses = scope.run(&[scope.split(x)?], |replica| {
                let normal = nn::batch_norm(replica.input(0), true, "norm");
                Ok(ops::mean_all(ops::square(nn::dense(normal, 1, "line"))))
            })?;
            let train = scope.minimize(Sgd::new(0.1), &losses, Some(step))?;
            Ok(Model::new(&[x], scope.reduce(ReduceOp::Mean, &losses)?, train))
        })
        .unwrap();
    let mean = g.find_variable("norm/moving_mean").unwrap().read();
    let dir = std::env::temp_dir().join(format!("kolo-strategy-{}", std::process::id()));
    let checkpoints = Checkpoints { dir: dir.clone(), every: Every::Steps(100), keep: 1 };
    let mut trainer = Trainer::new(&g, model).strategy(&strategy).checkpoints(checkpoints).build().unwrap();
    let rows = Dataset::new([tensor(&[8, 3], |i| i as f32)]).batch(4, true);
    trainer.fit(&rows, &mut []).unwrap();
    let moved = trainer.session().fetch(mean).unwrap();
    assert!(moved.data::<f32>().unwrap().iter().all(|x| *x > 0.0), "{moved:?}");
    std::fs::remove_dir_all(dir).unwrap();
}
