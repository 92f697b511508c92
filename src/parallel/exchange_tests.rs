//! Ways to exchange gradients, on ranks that are threads. Where a loss is linear in the weights, what ranks learn in a step does not
//! depend on what they have learnt before, and sums over steps can be compared.

use std::path::{Path, PathBuf};

use kolo_core::{DType, Result, Tensor};
use kolo_graph::{Graph, Operation, Output, Variable};
use kolo_runtime::{Session, SessionConfig};

use crate::data::Dataset;
use crate::ops;
use crate::optim::{Adam, AdamW, Clip, MinimizeOptions, Momentum, Optimizer, Sgd};
use crate::parallel::{DataParallel, Exchange, OuterStep, World};
use crate::train::{Checkpoints, Every, FitReport, Model, Trainer, global_step_or_create};

fn on_ranks<R: Send>(n: usize, rank: impl Fn(World) -> R + Sync) -> Vec<R> {
    let worlds = World::threads(n).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| rank(world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

const SIDE: usize = 40;
const RATE: f32 = 0.5;

/// What a rank sees in a step: a matrix of rank 1, or of any.
fn seen(step: usize, rank: usize, is_flat: bool) -> Tensor {
    let number = |i: usize| ((i * 7919 + step * 104_729 + rank * 1301) % 101) as f32 / 50.0 - 1.0;
    let rows: [[f32; SIDE]; SIDE] = std::array::from_fn(|i| {
        std::array::from_fn(|j| if is_flat { number(i) * number(j + 1000) } else { number(i * SIDE + j) })
    });
    Tensor::from(rows)
}

struct Linear<'g> {
    x: Output<'g>,
    w: Variable<'g>,
    train: Operation<'g>,
}

/// The gradient of `w` is `x`, and that of the small `b` is 1.
fn linear<'g>(g: &'g Graph, optimizer: &dyn Optimizer) -> Linear<'g> {
    let x = g.placeholder::<f32>("x", [Some(SIDE), Some(SIDE)]);
    let w = g.variable("w", Tensor::from([[1.0f32; SIDE]; SIDE]));
    let b = g.variable("b", [0.0f32; 3]);
    let loss = ops::sum_all(w.read() * x) + ops::sum_all(b.read());
    Linear { x, w, train: optimizer.minimize(loss, None).unwrap() }
}

/// The weights after some steps, and what was not sent.
fn weights(
    world: &World,
    data_parallel: &DataParallel,
    optimizer: &dyn Optimizer,
    n_steps: usize,
    is_flat: bool,
) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
    let g = crate::graph();
    g.set_seed(5);
    let model = linear(&g, optimizer);
    let steps = data_parallel.steps(model.train)?;
    let (init, init_own) = (g.global_variables_initializer(), g.local_variables_initializer());
    let unsent = g.find_variable("w/unsent").ok().map(|unsent| unsent.read());
    let session = Session::with_config(&g, data_parallel.configure(SessionConfig::default()))?;
    session.run_op(init)?;
    session.run_op(init_own)?;
    for step in 0..n_steps {
        session.run(&[], &[(model.x, seen(step, world.rank(), is_flat))], &[steps.at(step as i64 + 1)])?;
    }
    world.check_variables(&g, &session)?;
    let unsent =
        unsent.map(|unsent| Ok::<_, crate::Error>(session.fetch(unsent)?.data::<f32>()?.to_vec())).transpose()?;
    Ok((session.fetch(model.w.read())?.data::<f32>()?.to_vec(), unsent))
}

fn farthest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// What was sent in all steps and the mean of what was not are the gradients of all steps.
#[test]
fn what_is_not_sent_now_is_sent_later() {
    for (exchange, n_ranks) in [(Exchange::TopK(0.02), 2), (Exchange::TopK(0.1), 3), (Exchange::PowerSgd(2), 2)] {
        let wanted = on_ranks(n_ranks, |world| {
            weights(&world, &DataParallel::new(&world), &Sgd::new(f64::from(RATE)), 30, false)
        });
        let wanted = wanted[0].as_ref().unwrap().0.clone();
        let found = on_ranks(n_ranks, |world| {
            let how = DataParallel::new(&world).exchange(exchange);
            weights(&world, &how, &Sgd::new(f64::from(RATE)), 30, false).unwrap()
        });
        let mut with_rest = found[0].0.clone();
        for (weights, unsent) in &found {
            assert_eq!(weights, &found[0].0, "{exchange}: ranks differ");
            for (weight, rest) in with_rest.iter_mut().zip(unsent.as_ref().unwrap()) {
                *weight -= RATE * rest / n_ranks as f32;
            }
        }
        let (without, with) = (farthest(&found[0].0, &wanted), farthest(&with_rest, &wanted));
        assert!(without > 0.1 && with < 1e-3, "{exchange} on {n_ranks}: {without} off, {with} with what was not sent");
    }
}

#[test]
fn the_same_ranks_give_the_same_bits() {
    for exchange in [Exchange::TopK(0.02), Exchange::PowerSgd(2), Exchange::OneBitAdam { warm_up: 4 }] {
        let run = || {
            on_ranks(3, |world| {
                let how = DataParallel::new(&world).exchange(exchange).bucket_bytes(1);
                weights(&world, &how, &Adam::new(0.01), 12, false).unwrap()
            })
        };
        assert_eq!(run(), run(), "{exchange}");
    }
}

/// Gradients of two ranks with a matrix of rank 1 each are one of rank 2.
#[test]
fn factors_of_a_sufficient_rank_are_exact() {
    let off = |rank: usize| {
        let found = on_ranks(2, |world| {
            let how = DataParallel::new(&world).exchange(Exchange::PowerSgd(rank));
            let found = weights(&world, &how, &Sgd::new(0.5), 1, true).unwrap().0;
            (found, weights(&world, &DataParallel::new(&world), &Sgd::new(0.5), 1, true).unwrap().0)
        });
        farthest(&found[0].0, &found[0].1)
    };
    let [exact, more, less] = [off(2), off(5), off(1)];
    assert!(exact < 1e-5 && more < 1e-5 && less > 0.01, "{exact}, {more} and {less} off");
}

#[test]
fn one_bit_adam_is_adam_until_its_warm_up_ends_and_then_stays_near() {
    type Make = fn() -> Box<dyn Optimizer>;
    let makes: [Make; 2] = [|| Box::new(Adam::new(0.01)), || Box::new(AdamW::new(0.01, 0.1))];
    for make in makes {
        let after = |n_steps: usize, warm_up: Option<u64>| {
            let found = on_ranks(2, |world| {
                let how = DataParallel::new(&world);
                let how = warm_up.map_or(how.clone(), |warm_up| how.exchange(Exchange::OneBitAdam { warm_up }));
                weights(&world, &how, &*make(), n_steps, false).unwrap().0
            });
            assert_eq!(found[0], found[1]);
            found[0].clone()
        };
        assert_eq!(after(8, Some(8)), after(8, None));
        let [compressed, plain, begin] = [after(60, Some(20)), after(60, None), after(20, None)];
        let (off, moved) = (farthest(&compressed, &plain), farthest(&plain, &begin));
        assert!(compressed != plain && off < moved, "{off} off after moving by {moved}");
    }
}

#[test]
fn ranks_that_meet_now_and_then_learn_what_they_learn_together() {
    let sgd = || Sgd::new(0.5);
    let all = |n: usize, how: &(dyn Fn(DataParallel) -> DataParallel + Sync), n_steps: usize| {
        let found =
            on_ranks(n, |world| weights(&world, &how(DataParallel::new(&world)), &sgd(), n_steps, false).unwrap().0);
        assert!(found.iter().all(|one| *one == found[0]));
        found[0].clone()
    };
    for n in [2, 3] {
        let together = all(n, &|how| how, 12);
        let apart = all(n, &|how| how.local_steps(4), 12);
        assert!(farthest(&together, &apart) < 1e-4, "{n} ranks: {}", farthest(&together, &apart));
        // An outer step that takes over what was learnt, and no more.
        let plain = OuterStep { rate: 1.0, momentum: 0.0 };
        assert!(farthest(&all(n, &move |how| how.outer_steps(4, plain), 12), &apart) < 1e-4);
    }
    // By the formula: the first meeting takes (1 + μ) times what was learnt, the second the same and μ² of the first.
    let (rate, momentum) = (0.7f32, 0.9f32);
    let [first, both] = [all(2, &|how| how.local_steps(2), 2), all(2, &|how| how.local_steps(2), 4)];
    let found =
        all(2, &|how| how.outer_steps(2, OuterStep { rate: f64::from(rate), momentum: f64::from(momentum) }), 4);
    for i in [0, 700, SIDE * SIDE - 1] {
        let learnt = [1.0 - first[i], first[i] - both[i]];
        let moved = rate * ((1.0 + momentum) * (learnt[0] + learnt[1]) + momentum * momentum * learnt[0]);
        assert!((found[i] - (1.0 - moved)).abs() < 1e-4, "weight {i}: {} and not {}", found[i], 1.0 - moved);
    }
}

#[test]
fn steps_that_were_not_prepared_are_refused() {
    let world = World::alone().unwrap();
    for how in [
        DataParallel::new(&world).exchange(Exchange::TopK(0.01)),
        DataParallel::new(&world).exchange(Exchange::OneBitAdam { warm_up: 1 }),
        DataParallel::new(&world).local_steps(3),
    ] {
        let g = crate::graph();
        let model = linear(&g, &Adam::new(0.1));
        let init = g.global_variables_initializer();
        let session = Session::with_config(&g, how.configure(SessionConfig::default())).unwrap();
        session.run_op(init).unwrap();
        let error = session.run(&[], &[(model.x, seen(0, 0, false))], &[model.train]).unwrap_err().to_string();
        assert!(error.contains("run the operations that `DataParallel::steps` returns"), "{error}");
    }
}

#[test]
fn what_does_not_go_together_is_refused_with_the_reason() {
    let world = World::alone().unwrap();
    let refused = |how: DataParallel, optimizer: &dyn Optimizer, says: &str| {
        let g = crate::graph();
        let error = how.steps(linear(&g, optimizer).train).err().unwrap().to_string();
        assert!(error.contains(says), "{error}");
    };
    let how = || DataParallel::new(&world);
    let top_k = Exchange::TopK(0.01);
    let adam = Adam::new(0.1);
    refused(how().exchange(top_k).atomic_updates(), &adam, "takes with it what it has not sent");
    refused(how().local_steps(4).atomic_updates(), &adam, "takes with it what it has learnt since");
    refused(how().local_steps(4).exchange(top_k), &adam, "leave out local steps, or top-k:0.01");
    refused(how().local_steps(4).synchronised_batch_norm(), &adam, "meets in every step");
    refused(how().local_steps(0), &adam, "ranks that never meet");
    refused(how().exchange_as(DType::I32), &adam, "as bfloat16 or half, not as int32");
    let one_bit = Exchange::OneBitAdam { warm_up: 0 };
    refused(how().exchange(one_bit), &Momentum::new(0.1, 0.9), "variable 'w' is updated by ResourceApplyMomentum");

    let g = crate::graph();
    let x = g.placeholder::<f32>("x", [Some(SIDE), Some(SIDE)]);
    let w = g.variable("w", seen(0, 0, false));
    let options = MinimizeOptions { clip: Some(Clip::GlobalNorm(1.0)), ..MinimizeOptions::default() };
    let train = adam.minimize_with(ops::sum_all(w.read() * x), &options).unwrap();
    let how = how().exchange(one_bit);
    let steps = how.steps(train).unwrap();
    let (init, init_own) = (g.global_variables_initializer(), g.local_variables_initializer());
    let session = Session::with_config(&g, how.configure(SessionConfig::default())).unwrap();
    session.run_op(init).unwrap();
    session.run_op(init_own).unwrap();
    let error = session.run(&[], &[(x, seen(0, 0, false))], &[steps.at(1)]).unwrap_err().to_string();
    assert!(error.contains("leave out clipping and accumulation"), "{error}");
}

/// A folder that goes with the test.
struct TempDir(PathBuf);

impl TempDir {
    fn new(name: &str) -> TempDir {
        let dir = std::env::temp_dir().join(format!("kolo-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        TempDir(dir)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What a training with checkpoints ends with.
fn fit(
    how: &DataParallel,
    dir: &Path,
    (n_batches, save_every): (usize, u64),
) -> Result<(FitReport, Vec<f32>, Option<Vec<f32>>)> {
    let g = crate::graph();
    g.set_seed(5);
    let x = g.placeholder::<f32>("x", [None, Some(SIDE)]);
    let w = g.variable("w", seen(3, 0, false));
    let loss = ops::mean_all(ops::square(ops::matmul(x, w.read()) - 1.0));
    let train = Adam::new(0.01).minimize(loss, Some(global_step_or_create(&g)?))?;
    let rows: Vec<f32> =
        (0..n_batches).flat_map(|i| seen(i, 7, false).data::<f32>().unwrap()[..12 * SIDE].to_vec()).collect();
    let rows = Tensor::vector(rows).reshaped(kolo_core::Shape::new(&[n_batches * 12, SIDE])?)?;
    let data = Dataset::new([rows]).batch(12, true);
    let mut trainer = Trainer::new(&g, Model::new(&[x], loss, train))
        .source(how.configure(SessionConfig::default()))
        .data_parallel(how)
        .checkpoints(Checkpoints { dir: dir.to_owned(), every: Every::Steps(save_every), keep: 2 })
        .resume(true)
        .build()?;
    let unsent = g.find_variable("w/unsent").ok();
    let begin = unsent.map(|unsent| trainer.session().fetch(unsent.read())).transpose()?;
    let report = trainer.fit(&data, &mut [])?;
    let weights = trainer.session().fetch(w.read())?.data::<f32>()?.to_vec();
    let begin = begin.map(|begin| Ok::<_, crate::Error>(begin.data::<f32>()?.to_vec())).transpose()?;
    Ok((report, weights, begin))
}

#[test]
fn what_is_not_sent_is_saved_and_restored() {
    let folder = TempDir::new("own-state");
    let run = |n_ranks: usize, exchange: Exchange, dir: &Path, n_batches: usize| {
        on_ranks(n_ranks, |world| fit(&DataParallel::new(&world).exchange(exchange), dir, (n_batches, 2)).unwrap())
    };
    for exchange in [Exchange::TopK(0.02), Exchange::PowerSgd(1), Exchange::OneBitAdam { warm_up: 3 }] {
        let dirs = ["undisturbed", "resumed"].map(|name| folder.0.join(format!("{name}-{exchange}")));
        let undisturbed = run(2, exchange, &dirs[0], 12);
        run(2, exchange, &dirs[1], 6);
        let resumed = run(2, exchange, &dirs[1], 12);
        assert_eq!(resumed[0].0.step, 12);
        assert_eq!(resumed[0].1, undisturbed[0].1, "{exchange}: not what an undisturbed training gives");
        let own: Vec<&Vec<f32>> = resumed.iter().map(|rank| rank.2.as_ref().unwrap()).collect();
        assert!(own[0] != own[1] && own[0].iter().any(|rest| *rest != 0.0), "{exchange}: each has its own");
        // Files beside checkpoints that are gone are gone, too.
        let beside = std::fs::read_dir(&dirs[1]).unwrap().flatten();
        let beside = beside.filter(|file| file.path().extension().is_some_and(|extension| extension == "ranks"));
        let n_beside = beside.count();
        assert!((1..=2).contains(&n_beside), "{exchange}: {n_beside} files for two checkpoints");
        // Others get the mean.
        let before = resumed.len();
        let others = run(3, exchange, &dirs[1], 14);
        let mean = others[0].2.as_ref().unwrap();
        assert!(
            before == 2 && others.iter().all(|rank| rank.2.as_ref() == Some(mean)),
            "{exchange}: three ranks have the mean"
        );
    }
}

#[test]
fn a_report_says_what_was_exchanged() {
    let dir = TempDir::new("exchanged");
    let exchanged = |name: &str, how: &(dyn Fn(DataParallel) -> DataParallel + Sync)| {
        let found = on_ranks(2, |world| fit(&how(DataParallel::new(&world)), &dir.0.join(name), (10, 1000)).unwrap());
        assert_eq!(found[0].1, found[1].1, "{name}: ranks end with the same weights");
        found[0].0.exchange.unwrap()
    };
    let whole = exchanged("whole", &|how| how);
    let gradient = (SIDE * SIDE * 4) as f64;
    assert_eq!(whole.whole_bytes_per_step, Some(gradient));
    assert!((gradient..gradient + 200.0).contains(&whole.bytes_per_step), "{whole:?}");
    let saved = |name: &str, exchange: Exchange| exchanged(name, &move |how| how.exchange(exchange)).saved().unwrap();
    let top_k = saved("top-k", Exchange::TopK(0.02));
    let power = saved("power", Exchange::PowerSgd(2));
    let half = saved("half", Exchange::As(DType::BF16));
    assert!(
        (0.93..0.97).contains(&top_k) && (0.85..0.92).contains(&power) && (0.46..0.51).contains(&half),
        "{top_k} {power} {half}"
    );
    // Three means of weights and slots in ten steps, the last one at the end.
    let local = exchanged("local", &|how| how.local_steps(4));
    assert!(local.bytes_per_step < gradient, "{local:?}");
}
