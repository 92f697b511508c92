//! Ranks against one process with the whole batch.

use std::collections::BTreeMap;

use kolo_core::{DType, Result, Tensor};
use kolo_graph::{Graph, Operation, Output};
use kolo_runtime::{Session, SessionConfig};

use super::{BucketSizes, DataParallel, ExchangePlace};
use crate::optim::{Accumulate, Adam, Clip, MinimizeOptions, Momentum, Optimizer, Sgd};
use crate::parallel::{Tower, World, towers};
use crate::{nn, ops};

/// What each rank returns, each on a thread of its own.
fn run<R: Send>(n: usize, rank: impl Fn(World) -> R + Sync) -> Vec<R> {
    let worlds = World::threads(n).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| rank(world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

const N_ROWS: usize = 8;

/// Eight examples that depend on the step.
fn batch(step: usize) -> [Tensor; 2] {
    let number = |i: usize| ((i * 7919 + step * 104_729) % 101) as f32 / 50.0 - 1.0;
    let x: [[f32; 3]; N_ROWS] = std::array::from_fn(|row| [0, 1, 2].map(|column| number(row * 3 + column)));
    let y: Vec<i32> = (0..N_ROWS).map(|row| ((row + step) % 4) as i32).collect();
    [Tensor::from(x), Tensor::from(y)]
}

fn rows(of: &Tensor, rank: usize, n_ranks: usize) -> Tensor {
    let n = N_ROWS / n_ranks;
    of.rows(rank * n, n).unwrap()
}

/// A step of training: two layers, and an embedding of the labels, whose gradient has rows.
struct Training<'g> {
    x: Output<'g>,
    y: Output<'g>,
    op: Operation<'g>,
}

fn model<'g>(g: &'g Graph, x: Output<'g>, y: Output<'g>) -> Output<'g> {
    let table = g.variable("table", [[0.1f32, 0.2, 0.3], [0.3, 0.1, 0.2], [-0.1, 0.2, -0.3], [0.0, 0.5, 0.1]]);
    let hidden = ops::tanh(nn::dense(x, 4, "hidden"));
    let guess = nn::dense(hidden, 3, "out");
    let truth = ops::gather(table.read(), y, 0);
    ops::mean_all(ops::square(guess - truth))
}

fn describe<'g>(g: &'g Graph, train: &dyn Fn(Output<'g>) -> Result<Operation<'g>>) -> Training<'g> {
    g.set_seed(3);
    let x = g.placeholder::<f32>("x", [None, Some(3)]);
    let y = g.placeholder::<i32>("y", [None]);
    let op = train(model(g, x, y)).unwrap();
    Training { x, y, op }
}

/// All variables after some steps, by name.
fn train_for(
    g: &Graph,
    training: &Training<'_>,
    config: SessionConfig,
    (rank, n_ranks): (usize, usize),
    n_steps: usize,
) -> Result<BTreeMap<String, Vec<f32>>> {
    let init = g.global_variables_initializer();
    let reads: Vec<(String, Output<'_>)> =
        g.global_variables().iter().map(|variable| (variable.name(), ops::cast(variable.read(), DType::F32))).collect();
    let session = Session::with_config(g, config)?;
    session.run_op(init)?;
    for step in 0..n_steps {
        let [x, y] = batch(step);
        let feeds = [(training.x, rows(&x, rank, n_ranks)), (training.y, rows(&y, rank, n_ranks))];
        session.run(&[], &feeds, &[training.op])?;
    }
    reads.into_iter().map(|(name, read)| Ok((name, session.fetch(read)?.data::<f32>()?.to_vec()))).collect()
}

/// The variables of each rank, with gradients in buckets of `bucket` bytes.
fn ranks(
    n_ranks: usize,
    bucket: usize,
    n_steps: usize,
    train: impl for<'g> Fn(&'g Graph) -> Training<'g> + Sync,
) -> Vec<BTreeMap<String, Vec<f32>>> {
    run(n_ranks, |world| {
        let g = crate::graph();
        let training = train(&g);
        let data_parallel = DataParallel::new(&world).bucket_bytes(bucket).first_bucket_bytes(bucket);
        let config = data_parallel.configure(SessionConfig::default());
        train_for(&g, &training, config, (world.rank(), n_ranks), n_steps).unwrap()
    })
}

fn alone(n_steps: usize, train: impl for<'g> Fn(&'g Graph) -> Training<'g>) -> BTreeMap<String, Vec<f32>> {
    let g = crate::graph();
    let training = train(&g);
    train_for(&g, &training, SessionConfig::default(), (0, 1), n_steps).unwrap()
}

fn assert_close(found: &BTreeMap<String, Vec<f32>>, wanted: &BTreeMap<String, Vec<f32>>, what: &str) {
    assert!(found.keys().eq(wanted.keys()), "{what}");
    for (name, wanted) in wanted {
        let far = found[name].iter().zip(wanted).map(|(a, b)| (a - b).abs() / b.abs().max(0.1)).fold(0.0, f32::max);
        assert!(far < 2e-6, "{what}: {name} is {:?}, not {wanted:?}", found[name]);
    }
}

fn minimize_with<'g>(g: &'g Graph, optimizer: &dyn Optimizer, clip: Option<Clip>) -> Training<'g> {
    let options = MinimizeOptions { clip, ..MinimizeOptions::default() };
    describe(g, &|loss| optimizer.minimize_with(loss, &options))
}

#[test]
fn ranks_do_what_one_process_does_with_the_whole_batch() {
    type Make = fn() -> Box<dyn Optimizer>;
    let cases: [(&str, Make, Option<Clip>); 4] = [
        ("sgd", || Box::new(Sgd::new(0.1)), None),
        ("clipped", || Box::new(Momentum::new(0.1, 0.9)), Some(Clip::GlobalNorm(0.05))),
        ("adam", || Box::new(Adam::new(0.01)), None),
        ("accumulated", || Box::new(Accumulate::new(Momentum::new(0.1, 0.9), 2)), None),
    ];
    for (what, make, clip) in cases {
        let wanted = alone(6, |g| minimize_with(g, &*make(), clip));
        for (n_ranks, bucket) in [(2, 1), (2, 1 << 20), (4, 64)] {
            for found in ranks(n_ranks, bucket, 6, |g| minimize_with(g, &*make(), clip)) {
                assert_close(&found, &wanted, &format!("{what} on {n_ranks} ranks"));
            }
        }
    }
}

#[test]
fn gradients_may_be_exchanged_as_halves() {
    let wanted = alone(6, |g| minimize_with(g, &Sgd::new(0.1), None));
    for wire in [DType::BF16, DType::F16] {
        let found = run(2, |world| {
            let g = crate::graph();
            let training = minimize_with(&g, &Sgd::new(0.1), None);
            let config = DataParallel::new(&world).exchange_as(wire).configure(SessionConfig::default());
            train_for(&g, &training, config, (world.rank(), 2), 6).unwrap()
        });
        assert_eq!(found[0], found[1]);
        let pairs =
            |name: &str| found[0][name].iter().zip(&wanted[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let far = wanted.keys().map(|name| pairs(name)).fold(0.0, f32::max);
        assert!(far > 0.0 && far < 3e-3, "{wire}: {far}");
    }
    let refused = run(2, |world| {
        let g = crate::graph();
        let training = minimize_with(&g, &Sgd::new(0.1), None);
        let config = DataParallel::new(&world).exchange_as(DType::I32).configure(SessionConfig::default());
        train_for(&g, &training, config, (world.rank(), 2), 1).unwrap_err().to_string()
    });
    assert!(refused[0].contains("exchanged as bfloat16 or half, not as int32"), "{refused:?}");
}

/// A step over a batch that is cut into parts, which are shared by some devices.
fn in_parts(g: &Graph, n_parts: usize, devices: usize) -> Training<'_> {
    fn build<'g>(inputs: &[Output<'g>]) -> Result<Tower<'g>> {
        Ok(Tower { loss: model(inputs[0].graph(), inputs[0], inputs[1]), metrics: vec![] })
    }
    g.set_seed(3);
    let x = g.placeholder::<f32>("x", [None, Some(3)]);
    let y = g.placeholder::<i32>("y", [None]);
    let names: Vec<String> = (0..n_parts).map(|i| format!("/cpu:{}", i * devices / n_parts)).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let trained = towers(g, &names, "/cpu:0", &[x, y], build).unwrap();
    Training { x, y, op: Adam::new(0.01).apply_gradients(&trained.gradients, None).unwrap() }
}

/// The same eight parts of each batch, whoever computes them.
#[test]
fn the_same_parts_give_the_same_bits_on_any_number_of_ranks() {
    let wanted = alone(20, |g| in_parts(g, 8, 1));
    for (n_ranks, bucket) in [(1, 100), (2, 100), (4, 1), (8, 1 << 20)] {
        for found in ranks(n_ranks, bucket, 20, |g| in_parts(g, 8 / n_ranks, 1)) {
            assert_eq!(found, wanted, "{n_ranks} ranks");
        }
    }
    // Two devices in each of two ranks.
    let found = run(2, |world| {
        let g = crate::graph();
        let training = in_parts(&g, 4, 2);
        let device_count = BTreeMap::from([("CPU".to_owned(), 2)]);
        let config = DataParallel::new(&world).configure(SessionConfig { device_count, ..SessionConfig::default() });
        train_for(&g, &training, config, (world.rank(), 2), 20).unwrap()
    });
    assert_eq!(found, [wanted.clone(), wanted]);
}

/// One exchange for each gradient, however many parts a batch is cut into: parts are summed first.
#[test]
fn what_is_exchanged_does_not_grow_with_the_parts() {
    let n_exchanges = |n_parts: usize, bucket: usize| {
        let world = World::alone().unwrap();
        let g = crate::graph();
        let op = in_parts(&g, n_parts, 1).op;
        let data_parallel = DataParallel::new(&world).bucket_bytes(bucket).first_bucket_bytes(bucket);
        let session = Session::with_config(&g, data_parallel.configure(SessionConfig::default())).unwrap();
        let report = session.local().unwrap().explain_passes(&[&op.name()], Some("order-collectives")).unwrap();
        report.text.unwrap().lines().filter(|line| line.contains("= KoloAllReduce")).count()
    };
    // Two layers' weights and biases; the rows of the table are gathered.
    assert_eq!([n_exchanges(1, 1), n_exchanges(4, 1), n_exchanges(4, 1 << 20)], [4, 4, 1]);
}

/// The first buckets are exchanged before backward has made the last gradients.
#[test]
fn buckets_follow_backward() {
    let world = World::alone().unwrap();
    let g = crate::graph();
    let x = g.placeholder::<f32>("x", [Some(8), Some(3)]);
    let loss = ops::mean_all(ops::square(nn::dense(ops::tanh(nn::dense(x, 4, "first")), 3, "last")));
    let op = Sgd::new(0.1).minimize(loss, None).unwrap();
    let data_parallel = DataParallel::new(&world).bucket_bytes(1).first_bucket_bytes(1);
    let session = Session::with_config(&g, data_parallel.configure(SessionConfig::default())).unwrap();
    let report = session.local().unwrap().explain_passes(&[&op.name()], Some("order-collectives")).unwrap();
    let text = report.text.unwrap();
    let order = |of: &str| {
        let waits = text.lines().find(|line| line.contains(&format!("data_parallel/{of} "))).unwrap();
        waits.to_owned()
    };
    // Each waits for the one before, and the first for none.
    assert!(!order("gradients_0").contains("^data_parallel"), "{text}");
    for i in 1..4 {
        assert!(order(&format!("gradients_{i}")).contains(&format!("^data_parallel/gradients_{}", i - 1)), "{text}");
    }
    let reads_last = |line: &str| line.contains("last");
    assert!(reads_last(&order("gradients_0")) && reads_last(&order("gradients_1")), "{text}");
}

#[test]
fn moving_averages_are_those_of_all_ranks() {
    let averages = run(2, |world| {
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [None, Some(1)]);
        let y = nn::BatchNorm::new().momentum(0.5).apply(x, true);
        let train = Sgd::new(0.1).minimize(ops::mean_all(ops::square(y - 1.0)), None).unwrap();
        let step = g.group("step", &[vec![train], nn::update_ops(&g)].concat());
        let init = g.global_variables_initializer();
        let average = g.find_variable("batch_normalization/moving_mean").unwrap().read();
        let config = DataParallel::new(&world).configure(SessionConfig::default());
        let session = Session::with_config(&g, config).unwrap();
        session.run_op(init).unwrap();
        let share = [Tensor::from([[1.0f32], [3.0]]), Tensor::from([[5.0f32], [7.0]])][world.rank()].clone();
        session.run(&[], &[(x, share)], &[step]).unwrap();
        world.check_variables(&g, &session).unwrap();
        session.fetch(average).unwrap()
    });
    // Half of the mean of 2 and 6.
    assert_eq!(averages, [Tensor::from([2.0f32]), Tensor::from([2.0f32])]);
}

/// All updates wait for all collectives, also those that an optimizer makes now and then, in a branch.
#[test]
fn atomic_updates_change_no_values() {
    type Make = fn() -> Box<dyn Optimizer>;
    let makes: [Make; 2] = [|| Box::new(Adam::new(0.01)), || Box::new(Accumulate::new(Momentum::new(0.1, 0.9), 2))];
    for make in makes {
        let wanted = alone(6, |g| minimize_with(g, &*make(), None));
        let found = run(2, |world| {
            let g = crate::graph();
            let training = minimize_with(&g, &*make(), None);
            let config = DataParallel::new(&world).atomic_updates().configure(SessionConfig::default());
            train_for(&g, &training, config, (world.rank(), 2), 6).unwrap()
        });
        found.iter().for_each(|found| assert_close(found, &wanted, "atomic"));
    }
}

#[test]
fn what_a_branch_writes_from_data_is_refused_by_name() {
    let world = World::alone().unwrap();
    let g = crate::graph();
    let x = g.placeholder::<f32>("x", [None]);
    let seen = g.new_variable("seen", 0.0f32).not_trainable().build();
    let loss = ops::mean_all(ops::square(x * g.variable("w", 1.0f32).read()));
    let train = Sgd::new(0.1).minimize(loss, None).unwrap();
    let is_large = ops::greater(ops::sum_all(x), g.constant(1.0f32));
    let note = || vec![g.control_dependencies(&[seen.assign(ops::sum_all(x))], || g.constant(1.0f32))];
    let noted = g.cond(is_large, note, || vec![g.constant(0.0f32)]).unwrap()[0].operation();
    let init = g.global_variables_initializer();
    let session = Session::with_config(&g, DataParallel::new(&world).configure(SessionConfig::default())).unwrap();
    session.run_op(init).unwrap();
    let error = session.run(&[], &[(x, Tensor::from([1.0f32]))], &[train, noted]).unwrap_err().to_string();
    assert!(error.contains("ranks cannot exchange what") && error.contains("it is in a branch or a loop"), "{error}");
}

#[test]
fn ranks_that_train_different_models_are_told_so() {
    let errors = run(2, |world| {
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [None, Some(3)]);
        let loss = ops::mean_all(nn::dense(x, 4 + world.rank(), "out"));
        let train = Sgd::new(0.1).minimize(loss, None).unwrap();
        let init = g.global_variables_initializer();
        let config = DataParallel::new(&world).configure(SessionConfig::default());
        let session = Session::with_config(&g, config).unwrap();
        session.run_op(init).unwrap();
        session.run(&[], &[(x, Tensor::from([[1.0f32, 2.0, 3.0]]))], &[train]).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("data_parallel/gradients_0"), "{error}");
        assert!(error.contains("rank 0 does") && error.contains("rank 1 does"), "{error}");
    }
}

#[test]
fn a_rank_that_leaves_ends_the_step_of_the_others_by_name() {
    let errors = run(3, |world| {
        let g = crate::graph();
        let w = g.variable("w", 1.0f32);
        let train = Sgd::new(0.1).minimize(ops::square(w.read()), None).unwrap();
        let init = g.global_variables_initializer();
        let config = DataParallel::new(&world).configure(SessionConfig::default());
        let session = Session::with_config(&g, config).unwrap();
        session.run_op(init).unwrap();
        let rank = world.rank();
        drop(world);
        let n_steps = if rank == 1 { 3 } else { usize::MAX };
        (0..n_steps).find_map(|_| session.run_op(train).err()).map(|error| error.to_string())
    });
    for error in [&errors[0], &errors[2]] {
        let error = error.as_ref().unwrap();
        assert!(error.contains("rank 1 has left the group"), "{error}");
    }
}

/// The passes for GPUs, on CPUs: nodes are where they belong, and mean the same.
#[test]
fn exchanges_between_devices_are_awaited_after_the_last_one_has_begun() {
    let trained = |place: ExchangePlace| {
        run(2, |world| {
            let g = crate::graph();
            let training = minimize_with(&g, &Adam::new(0.1), None);
            let data_parallel = DataParallel::new(&world).bucket_bytes(40).first_bucket_bytes(40);
            let mut config = world.configure(SessionConfig::default());
            config.passes.extend(data_parallel.passes_for(place, BucketSizes::usual(data_parallel.by_hand())));
            let session = Session::with_config(&g, config.clone()).unwrap();
            let op = training.op.name();
            let report = session.local().unwrap().explain_passes(&[op.as_str()], Some("average-gradients")).unwrap();
            let values = train_for(&g, &training, config, (world.rank(), 2), 3).unwrap();
            (values, report.text.unwrap())
        })
    };
    let (host, devices) = (trained(ExchangePlace::Host), trained(ExchangePlace::Devices));
    for ((on_host, _), (on_devices, text)) in host.iter().zip(&devices) {
        assert_eq!(on_host, on_devices);
        let awaits: Vec<&str> = text.lines().filter(|line| line.contains("= KoloAwaitExchange")).collect();
        let n_exchanges = text.lines().filter(|line| line.contains("= KoloAllReduce")).count();
        assert!(awaits.len() >= 2 && awaits.len() == n_exchanges, "{text}");
        let last = format!("^data_parallel/gradients_{}", n_exchanges - 1);
        let behind = |line: &&&str| line.contains(&last) || line.contains(&last[1..]);
        assert_eq!(awaits.iter().filter(behind).count(), awaits.len(), "{text}");
    }
    assert!(!host[0].1.contains("KoloAwaitExchange"));
}

/// The second part of a batch is normalised after the first has moved the averages on, so no exchange may wait for a later one.
#[test]
fn moving_averages_of_parts_are_awaited_one_after_the_other() {
    fn build<'g>(inputs: &[Output<'g>]) -> Result<Tower<'g>> {
        let hidden = nn::BatchNorm::new().momentum(0.5).apply(nn::dense(inputs[0], 2, "hidden"), true);
        Ok(Tower { loss: ops::mean_all(ops::square(hidden - 1.0)), metrics: vec![] })
    }
    let trained = |place: ExchangePlace| {
        run(2, |world| {
            let g = crate::graph();
            g.set_seed(3);
            let x = g.placeholder::<f32>("x", [None, Some(3)]);
            let y = g.placeholder::<i32>("y", [None]);
            let model = towers(&g, &["/cpu:0", "/cpu:0"], "/cpu:0", &[x], build).unwrap();
            let train = Sgd::new(0.1).apply_gradients(&model.gradients, None).unwrap();
            let op = g.group("step", &[vec![train], nn::update_ops(&g)].concat());
            let mut config = world.configure(SessionConfig::default());
            let data_parallel = DataParallel::new(&world);
            config.passes.extend(data_parallel.passes_for(place, BucketSizes::usual(data_parallel.by_hand())));
            train_for(&g, &Training { x, y, op }, config, (world.rank(), 2), 3).unwrap()
        })
    };
    let (host, devices) = (trained(ExchangePlace::Host), trained(ExchangePlace::Devices));
    assert_eq!(host, devices);
    // What the ranks' data has made of it is the same on both.
    let mean = "batch_normalization/moving_mean";
    assert_eq!(host[0][mean], host[1][mean]);
    assert!(host[0][mean].iter().all(|mean| *mean != 0.0), "{host:?}");
}
