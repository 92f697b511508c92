//! Ranks that train together by all-reduce, as processes that `kolo train --ranks` starts, and as threads with a `Trainer` each.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kolo::data::Dataset;
use kolo::optim::{Optimizer, Sgd};
use kolo::parallel::{DataParallel, SlowCause, World};
use kolo::train::{Callback, FitReport, Flow, Model, StepReport, Trainer, global_step_or_create};
use kolo::{Result, SessionConfig, Tensor, ops};
use serde_json::Value;
use support::{Folder, Process, kolo, one_at_a_time};

const SMALL: [&str; 9] =
    ["train", "linear", "--json", "--batch-size", "40", "--log-every", "1", "--micro-batches", "4"];

fn train(flags: &[&str]) -> Value {
    let args = [&SMALL[..], flags].concat();
    let (is_well, text) = kolo(&args);
    assert!(is_well, "{args:?}: {text}");
    last(&text)
}

fn last(text: &str) -> Value {
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut ends: Vec<Value> = events.filter(|event| event["event"] == "end").collect();
    assert_eq!(ends.len(), 1, "{text}");
    ends.remove(0)
}

/// Half a batch of two images has its own mean and variance; together, ranks see what one process sees. Two steps: the second one's
/// loss shows what the first one has learned.
#[test]
fn batch_normalisation_sees_all_ranks_if_it_is_told_to() {
    let loss = |flags: &[&str]| {
        let size = ["--side", "32", "--width", "2", "--classes", "4", "--precision", "f32", "--batch-size", "4"];
        let args = [&["train", "resnet50", "--json", "--max-steps", "2", "--seed", "4"], &size[..], flags].concat();
        let (is_well, text) = kolo(&args);
        assert!(is_well, "{args:?}: {text}");
        last(&text)["final_cost"].as_f64().unwrap()
    };
    let (alone, apart) = (loss(&[]), loss(&["--ranks", "2"]));
    let together = loss(&["--ranks", "2", "--sync-batch-norm"]);
    // Sums in another order, through fifty layers.
    assert!((together - alone).abs() < 0.02 * alone, "alone {alone}, together {together}");
    assert!((apart - alone).abs() > 0.1 * alone, "alone {alone}, apart {apart}");
}

/// The processes that a launcher has started and that are still there.
fn children(launcher: &Process) -> Vec<u32> {
    let path = format!("/proc/{0}/task/{0}/children", launcher.pid());
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn is_there(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// The weights after 60 steps are the same to the bit on one process, two, four, more than there are cores, and when training is
/// interrupted and goes on with another number.
#[test]
fn the_number_of_ranks_may_change_and_the_weights_do_not() {
    let _turn = one_at_a_time();
    let folder = Folder::new("ranks-resize");
    // A checkpoint holds the place in the data, too.
    let dirs = ["whole", "1", "2", "4", "ckpt"].map(|name| folder.path(name));
    let whole = train(&["--max-steps", "60", "--checkpoint-dir", &dirs[0]]);
    for (n, dir) in ["1", "2", "4"].iter().zip(&dirs[1..]) {
        let ranks = train(&["--max-steps", "60", "--ranks", n, "--checkpoint-dir", dir]);
        assert_eq!((&ranks["weights"], &ranks["step"]), (&whole["weights"], &whole["step"]), "{n} ranks: {ranks}");
    }
    let saved = ["--checkpoint-dir", dirs[4].as_str(), "--resume"];
    for (n, until) in [("2", "13"), ("4", "31"), ("1", "40"), ("2", "60")] {
        let end = train(&[&saved[..], &["--ranks", n, "--max-steps", until]].concat());
        assert_eq!(end["step"].to_string(), until, "{end}");
        if until == "60" {
            assert_eq!(end["weights"], whole["weights"], "{end}");
        }
    }
}

/// Rank 0 alone writes where it is in the data; the others are not compared with that.
#[test]
fn saving_makes_no_rank_differ() {
    let _turn = one_at_a_time();
    let folder = Folder::new("ranks-saving");
    let dir = folder.path("ckpt");
    let often =
        ["--checkpoint-every", "5", "--check-weights-every", "7", "--max-steps", "60", "--checkpoint-dir", &dir];
    train(&[&often[..], &["--ranks", "2"]].concat());
    assert!(std::path::Path::new(&folder.path("ckpt/model.ckpt-60.index")).is_file());
}

#[test]
fn a_rank_that_is_killed_is_named_at_once_and_training_goes_on_from_its_checkpoint() {
    let _turn = one_at_a_time();
    let folder = Folder::new("ranks-killed");
    let dir = folder.path("ckpt");
    let flags = ["--ranks", "4", "--checkpoint-dir", &dir, "--checkpoint-every", "10", "--epochs", "100000"];
    let args = [&SMALL[..], &flags].concat();
    let mut launcher = Process::start("launcher", &args);
    launcher.wait_for_step(0, |step| step > 40);
    let ranks = children(&launcher);
    assert_eq!(ranks.len(), 4);
    let victim = ranks[2].to_string();
    assert!(std::process::Command::new("kill").args(["-9", &victim]).status().unwrap().success());
    let killed = Instant::now();
    let line = launcher.wait_for("rank 2 has");
    assert!(line.at - killed < Duration::from_millis(1500), "{:?} later: {line:?}", line.at - killed);
    assert!(!launcher.wait().success());
    let text = launcher.text();
    assert!(text.contains("rank 2 of 4 failed: signal: 9 (SIGKILL)"), "{text}");
    assert!(ranks.iter().all(|pid| !is_there(*pid)), "{ranks:?}");
    // What was saved before is whole: the same steps lead to the same weights.
    let step: i64 =
        support::step_of(text.lines().rev().find(|line| support::step_of(line).is_some()).unwrap()).unwrap();
    let until = (step + 20).to_string();
    let flags = ["--epochs", "100000", "--max-steps", &until, "--checkpoint-dir"];
    let resumed = train(&[&flags[..], &[&dir, "--ranks", "2", "--resume"]].concat());
    let undisturbed = train(&[&flags[..], &[&folder.path("undisturbed")]].concat());
    assert_eq!(resumed["weights"], undisturbed["weights"], "{resumed}");
}

/// Ranks are killed one after the other, rank 0 and two at a time included. The others go on within two seconds, and the weights
/// are those of an undisturbed training, to the bit. Old checkpoints go as they would without the deaths.
#[test]
fn an_elastic_training_goes_on_without_the_dead() {
    let _turn = one_at_a_time();
    let folder = Folder::new("ranks-elastic");
    let dirs = ["disturbed", "undisturbed"].map(|name| folder.path(name));
    let flags = ["--epochs", "100000", "--max-steps", "1500", "--checkpoint-every", "20", "--keep", "3"];
    let args = [&SMALL[..], &flags, &["--ranks", "4", "--elastic", "--checkpoint-dir", &dirs[0]]].concat();
    let mut launcher = Process::start("launcher", &args);
    let mut n_lines = 0;
    let mut slowest = Duration::ZERO;
    for (round, victims) in [&[2][..], &[0], &[1, 3], &[0, 2]].iter().enumerate() {
        launcher.wait_for_step(n_lines, |step| step > 40 + 60 * round as i64);
        let ranks = ranks_of(&launcher);
        assert_eq!(ranks.len(), 4, "{ranks:?}");
        for victim in *victims {
            let pid = ranks[victim].to_string();
            assert!(std::process::Command::new("kill").args(["-9", &pid]).status().unwrap().success());
        }
        let killed = Instant::now();
        let line = launcher.wait_until("recovery", n_lines, |line| line.text.contains("recovered"));
        n_lines = launcher.lines().len();
        slowest = slowest.max(line.at - killed);
    }
    assert!(launcher.wait().success(), "{}", launcher.text());
    let text = launcher.text();
    let end = last(&text);
    let undisturbed = train(&[&flags[..], &["--ranks", "1", "--checkpoint-dir", &dirs[1]]].concat());
    let is_index = |name: &std::ffi::OsString| name.to_string_lossy().ends_with(".index");
    let n_saved = std::fs::read_dir(&dirs[0]).unwrap().filter(|file| is_index(&file.as_ref().unwrap().file_name()));
    // Rank 0 was killed twice, each time perhaps after it had written a checkpoint and before it had listed it: that one stays.
    let n_saved = n_saved.count();
    assert!((3..=5).contains(&n_saved), "{n_saved} checkpoints");
    let listed = std::fs::read_to_string(format!("{}/checkpoint", dirs[0])).unwrap();
    assert_eq!(listed.matches("all_model_checkpoint_paths").count(), 3, "{listed}");
    assert_eq!((&end["step"], &end["weights"]), (&undisturbed["step"], &undisturbed["weights"]), "{text}");
    assert!(
        text.contains("kolo: rank 2 died (signal: 9 (SIGKILL)); the others go on with a new one in its place"),
        "{text}"
    );
    // No step is counted twice, and none is left out.
    let steps = launcher.steps();
    let n_again = steps.windows(2).filter(|pair| pair[1] <= pair[0]).count();
    assert!(n_again <= 4, "{n_again} steps again: {steps:?}");
    assert!(slowest < Duration::from_secs(20), "{slowest:?}");
}

/// The process of each rank, by its environment.
fn ranks_of(launcher: &Process) -> std::collections::BTreeMap<usize, u32> {
    let rank = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let text = String::from_utf8_lossy(&environment).into_owned();
        text.split('\0').find_map(|variable| variable.strip_prefix("RANK=")?.parse::<usize>().ok())
    };
    children(launcher).into_iter().filter_map(|pid| Some((rank(&pid)?, pid))).collect()
}

#[test]
fn all_ranks_stop_after_the_same_step() {
    let _turn = one_at_a_time();
    let folder = Folder::new("ranks-stop");
    let dir = folder.path("ckpt");
    let flags = ["--ranks", "3", "--batch-size", "48", "--epochs", "100000", "--checkpoint-dir", &dir];
    let args = [&["train", "linear", "--json", "--log-every", "1"], &flags[..]].concat();
    let mut launcher = Process::start("launcher", &args);
    launcher.wait_for_step(0, |step| step > 5);
    let ranks = children(&launcher);
    launcher.signal("INT");
    assert!(launcher.wait().success(), "{}", launcher.text());
    launcher.wait_for("\"event\":\"end\"");
    let end = last(&launcher.text());
    assert_eq!(end["stopped"], true, "{end}");
    assert!(ranks.iter().all(|pid| !is_there(*pid)), "{ranks:?}");
    let saved = std::fs::read_to_string(folder.path("ckpt/checkpoint")).unwrap();
    assert!(saved.contains(&format!("model.ckpt-{}\"", end["step"])), "{saved} for {end}");
}

/// As `torchrun` would start them, on this machine: the ranks meet over TCP, and the weights are those of one process.
#[test]
fn ranks_of_another_launcher_meet_over_tcp() {
    let _turn = one_at_a_time();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let args = [&SMALL[..], &["--max-steps", "30"]].concat();
    let start = |rank: usize, token: &str| {
        let rank = rank.to_string();
        let place =
            [("RANK", rank.as_str()), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
        Process::start_with(&format!("rank {rank}"), &args, &[&place[..], &[("KOLO_TOKEN", token)]].concat())
    };
    let mut ranks: Vec<Process> = (0..4).map(|rank| start(rank, "a-token-that-the-ranks-share")).collect();
    for rank in &mut ranks {
        assert!(rank.wait().success(), "{}", rank.text());
    }
    ranks[0].wait_for("\"event\":\"end\"");
    let end = last(&ranks[0].text());
    assert_eq!(end["weights"], train(&["--max-steps", "30"])["weights"], "{end}");
}

/// Each way sends less, learns, and gives the same weights when it is asked again; and a run that is cut in two gives those of a whole
/// one.
#[test]
fn ranks_may_exchange_less_than_whole_gradients() {
    let _turn = one_at_a_time();
    let folder = Folder::new("ranks-exchange");
    let mnist = |flags: &[&str]| {
        let args = [&["train", "mnist", "--ranks", "2", "--json", "--seed", "3"], flags].concat();
        let (is_well, text) = kolo(&args);
        assert!(is_well, "{args:?}: {text}");
        last(&text)
    };
    let cases: [(&[&str], std::ops::Range<f64>); 6] = [
        (&["--exchange", "whole"], 0.99..1.01),
        (&["--exchange", "bf16"], 0.49..0.51),
        (&["--exchange", "top-k:0.02"], 0.03..0.06),
        (&["--exchange", "power-sgd:2"], 0.01..0.05),
        // Half of the steps are a warm-up.
        (&["--exchange", "1-bit-adam:12"], 0.5..0.55),
        // Six meetings, in which three times as much is averaged.
        (&["--local-steps", "4", "--outer", "0.7:0.9"], 0.7..0.8),
    ];
    for (i, (flags, sent)) in cases.into_iter().enumerate() {
        // With a checkpoint, which holds the place in the data, too.
        let [whole_dir, dir] = ["whole", "cut"].map(|name| folder.path(&format!("{name}-{i}")));
        let whole = mnist(&[flags, &["--checkpoint-dir", &whole_dir, "--max-steps", "24"]].concat());
        let number = |name: &str| whole[name].as_f64().unwrap();
        let found = number("bytes_per_step") / number("whole_bytes_per_step");
        assert!(sent.contains(&found), "{flags:?}: {found} of the bytes: {whole}");
        assert!(number("test_accuracy") > 0.6, "{flags:?}: {whole}");
        let cut = [flags, &["--checkpoint-dir", &dir, "--resume", "--max-steps"]].concat();
        mnist(&[&cut[..], &["12"]].concat());
        assert_eq!(mnist(&[&cut[..], &["24"]].concat())["weights"], whole["weights"], "{flags:?}");
    }
}

#[test]
fn ways_to_exchange_that_do_not_go_together_are_refused_before_any_rank_is_started() {
    for (flags, says) in [
        (&["--elastic", "--exchange", "top-k"][..], "atomic updates (`--elastic`) promise that nothing is lost"),
        (&["--elastic", "--local-steps", "4"], "leave out local steps"),
        (&["--local-steps", "4", "--exchange", "bf16"], "leave out local steps, or bf16"),
        (&["--local-steps", "0"], "ranks that never meet do not train together"),
        (&["--exchange", "zip"], "'zip' is no way to exchange gradients"),
        (&["--local-steps", "2", "--outer", "0"], "'0' is no outer step"),
        (&["--exchange", "1-bit-adam", "--optimizer", "momentum"], "1-bit Adam is for the optimizers Adam and AdamW"),
    ] {
        let (is_well, said) = kolo(&[&["train", "mnist", "--ranks", "2", "--max-steps", "2"], flags].concat());
        assert!(!is_well && said.contains(says), "{flags:?}: {said}");
    }
}

#[test]
fn a_model_without_batch_normalisation_has_none_to_synchronise() {
    let (is_well, said) = kolo(&["train", "linear", "--ranks", "2", "--sync-batch-norm"]);
    assert!(!is_well && said.contains("--sync-batch-norm: this model has no batch normalisation"), "{said}");
}

#[test]
fn what_ranks_cannot_share_is_refused_before_any_is_started() {
    let says = |flags: &[&str], text: &str| {
        let (is_well, said) = kolo(&[&["train", "linear"], flags].concat());
        assert!(!is_well && said.contains(text), "{flags:?}: {said}");
        assert!(!said.contains("rank 1"), "{said}");
    };
    says(&["--ranks", "3", "--batch-size", "100"], "--batch-size 100 cannot be shared equally by 3 ranks; try 102");
    says(
        &["--ranks", "4", "--micro-batches", "6"],
        "--micro-batches 6 cannot be shared equally by 4 ranks of 1 devices; try 8",
    );
    says(&["--ranks", "0"], "--ranks 0: give 1 to 256");
    says(&["--micro-batches", "1000000000000"], "--micro-batches 1000000000000: give 1 to 4096");
    says(&["--ranks", "2", "--resume", "--workers", "2", "--checkpoint-dir", "x"], "--ranks starts processes");
    // A launcher that says too little, or flags that start others once more.
    let launched = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")];
    for (flags, text) in [
        (&[][..], "MASTER_PORT say where they meet"),
        (&["--ranks", "2"], "--ranks starts or joins other processes"),
        (&["--elastic"], "neither MASTER_ADDR and MASTER_PORT nor KOLO_LISTEN say where it listens"),
        (&["--min", "2"], "--min is about ranks that come and go; add --elastic"),
    ] {
        let mut process = Process::start_with("rank", &[&["train", "linear"], flags].concat(), &launched);
        assert!(!process.wait().success());
        process.wait_for(text);
    }
    let world = [("KOLO_WORLD", "/proc/nothing"), ("RANK", "0"), ("WORLD_SIZE", "2")];
    let mut process = Process::start_with("rank", &["train", "linear"], &world);
    assert!(!process.wait().success());
    process.wait_for("KOLO_WORLD: the file of a world, /proc/nothing, cannot be opened");
}

/// What each rank returns, each on a thread of its own.
fn run<R: Send>(n: usize, rank: impl Fn(World) -> R + Sync) -> Vec<R> {
    let worlds = World::threads(n).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| rank(world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// `y = 3x`, and a trainer that learns it as one of the ranks.
fn fit(world: &World, stop: Arc<AtomicBool>, callback: &mut dyn Callback) -> Result<(FitReport, f64, usize)> {
    let g = kolo::graph();
    let x = g.placeholder::<f32>("x", [None, Some(1)]);
    let y = g.placeholder::<f32>("y", [None, Some(1)]);
    // Every rank begins elsewhere; rank 0 decides.
    let w = g.variable("w", [[world.rank() as f32]]);
    let loss = ops::mean_all(ops::square(ops::matmul(x, w.read()) - y));
    let train_op = Sgd::new(0.05).minimize(loss, Some(global_step_or_create(&g)?))?;
    let config = DataParallel::new(world).configure(SessionConfig::default());
    let model = Model::new(&[x, y], loss, train_op);
    let mut trainer = Trainer::new(&g, model).source(config).world(world).check_every(3).stop_flag(stop).build()?;
    let column = |factor: f32| Tensor::vector((1..=7).map(|i| factor * i as f32 / 4.0).collect::<Vec<f32>>());
    let data = Dataset::new([column(1.0).reshaped([7, 1].into())?, column(3.0).reshaped([7, 1].into())?]);
    let report = trainer.fit(&data.clone().batch(6, true).shuffle(1).repeat(20), &mut [callback])?;
    // Seven samples among the ranks: each counts once.
    let evaluation = trainer.evaluate(&data.batch(2, false))?;
    Ok((report, evaluation.loss, evaluation.n_samples))
}

struct Nothing;

impl Callback for Nothing {}

#[test]
fn a_trainer_on_ranks_reports_what_one_on_the_whole_data_does() {
    let alone = run(1, |world| fit(&world, Arc::default(), &mut Nothing).unwrap()).remove(0);
    assert!(alone.1 < 0.1, "it learns: {alone:?}");
    for n in [2, 3] {
        let ranks = run(n, |world| fit(&world, Arc::default(), &mut Nothing).unwrap());
        for (report, loss, n_samples) in &ranks {
            assert_eq!((report.step, report.n_samples, *n_samples), (20, 120, 7));
            assert!((report.last_loss - alone.0.last_loss).abs() < 1e-6, "{report:?} for {alone:?}");
            assert!((loss - alone.1).abs() < 1e-6, "{loss} for {alone:?}");
        }
    }
    let (report, _, _) = &run(2, |world| {
        let g = kolo::graph();
        let x = g.placeholder::<f32>("x", [None]);
        let loss = ops::mean_all(x * g.variable("w", 1.0f32).read());
        let train_op = Sgd::new(0.05).minimize(loss, Some(global_step_or_create(&g).unwrap())).unwrap();
        let config = DataParallel::new(&world).configure(SessionConfig::default());
        let trainer = Trainer::new(&g, Model::new(&[x], loss, train_op)).source(config).world(&world).build();
        let data = Dataset::new([Tensor::from([1.0f32; 5])]).batch(5, true);
        (trainer.unwrap().fit(&data, &mut []).unwrap_err().to_string(), (), ())
    })[0];
    assert!(report.contains("batches of 5 cannot be shared equally by 2 ranks; batch the data by 6"), "{report}");
}

/// A rank whose input is slow is named, by all, with the cause.
#[test]
fn a_slow_rank_is_named_with_its_cause() {
    let reports = run(3, |world| {
        let g = kolo::graph();
        let x = g.placeholder::<f32>("x", [None]);
        let loss = ops::mean_all(x * g.variable("w", 1.0f32).read());
        let train_op = Sgd::new(0.05).minimize(loss, Some(global_step_or_create(&g).unwrap())).unwrap();
        let config = DataParallel::new(&world).configure(SessionConfig::default());
        let trainer = Trainer::new(&g, Model::new(&[x], loss, train_op)).source(config).world(&world).build();
        let is_slow = world.rank() == 1;
        let data = Dataset::new([Tensor::from([1.0f32; 6])]).batch(6, true).repeat(30).map(move |columns| {
            std::thread::sleep(Duration::from_millis(if is_slow { 15 } else { 0 }));
            Ok(columns)
        });
        trainer.unwrap().fit(&data, &mut []).unwrap()
    });
    for report in reports {
        let [slow] = report.slow_ranks[..] else { panic!("{report:?}") };
        assert_eq!((slow.rank, slow.cause), (1, SlowCause::Input), "{report:?}");
    }
}

/// One rank is asked to stop: all of them stop after the same step.
#[test]
fn ranks_agree_on_when_to_stop() {
    struct StopAt(i64, Arc<AtomicBool>);
    impl Callback for StopAt {
        fn on_step(&mut self, report: &StepReport<'_, '_>) -> Result<Flow> {
            if report.step == self.0 {
                self.1.store(true, Ordering::Relaxed);
            }
            Ok(Flow::Continue)
        }
    }
    let reports = run(3, |world| {
        let stop: Arc<AtomicBool> = Arc::default();
        let at = if world.rank() == 1 { 5 } else { i64::MAX };
        fit(&world, stop.clone(), &mut StopAt(at, stop)).unwrap().0
    });
    for report in reports {
        assert_eq!((report.step, report.stopped), (6, true), "{report:?}");
    }
}
