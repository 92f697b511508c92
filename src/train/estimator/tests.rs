use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

use kolo_core::Code;

use super::*;
use crate::optim::Sgd;
use crate::parallel::RankPlace;
use crate::place::{Environment, Meeting, RankSeat, find};
use crate::strategy::Mirrored;
use crate::train::Every;
use crate::{nn, ops};

/// A folder of its own for each test, removed with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kolo-estimator-{name}-{}", std::process::id()));
        std::fs::remove_dir_all(&path).ok();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn rows(n_epochs: u64) -> Dataset {
    let xs: Vec<f32> = (0..64).map(|i| i as f32 / 32.0 - 1.0).collect();
    let ys: Vec<f32> = xs.iter().map(|x| 3.0 * x + 1.0).collect();
    let data = Dataset::new([Tensor::vector(xs), Tensor::vector(ys)]).reshape(0, &[1]).reshape(1, &[1]);
    data.shuffle(1).batch(16, true).repeat(n_epochs)
}

fn line<'g>(features: &[Output<'g>], labels: Option<Output<'g>>, mode: Mode) -> Result<EstimatorSpec<'g>> {
    assert_eq!(labels.is_none(), mode == Mode::Predict);
    let y = nn::dense(features[0], 1, "line");
    let spec = EstimatorSpec::new().prediction("y", y);
    let Some(labels) = labels else { return Ok(spec) };
    let error = ops::square(y - labels);
    let spec = spec.loss(ops::mean_all(error)).metric("worst", ops::max_all(error));
    Ok(if mode == Mode::Train { spec.minimize(Sgd::new(0.3)) } else { spec })
}

#[test]
fn what_is_trained_is_evaluated_used_and_trained_on() {
    let folder = Folder::new("local");
    let estimator = Estimator::new(RunConfig::local(&folder.0), line);
    let error = estimator.evaluate(|| Ok(rows(1))).unwrap_err();
    assert!(error.message().contains("there is no checkpoint in") && error.code() == Code::FailedPrecondition);
    assert_eq!(estimator.train(|| Ok(rows(50)), Some(20)).unwrap().step, 20);
    let early = estimator.evaluate(|| Ok(rows(1))).unwrap();
    // The same data goes on where it was.
    let report = estimator.train(|| Ok(rows(50)), Some(80)).unwrap();
    assert_eq!((report.step, report.n_steps), (80, 60));
    assert_eq!(estimator.train(|| Ok(rows(50)), Some(80)).unwrap().n_steps, 0);
    let late = estimator.evaluate(|| Ok(rows(1))).unwrap();
    assert_eq!((early.step, late.step, late.evaluation.metrics[0].0.as_str()), (20, 80, "worst"));
    assert!(late.evaluation.loss < early.evaluation.loss && late.evaluation.loss < 1e-6, "{late:?}");
    let two = Dataset::new([Tensor::from([[0.0f32], [1.0], [2.0]])]).batch(2, false);
    let predicted = estimator.predict(|| Ok(two.clone())).unwrap();
    let values = predicted[0].1.data::<f32>().unwrap();
    assert!(predicted[0].0 == "y" && (values[0] - 1.0).abs() < 1e-3 && (values[2] - 7.0).abs() < 1e-2, "{values:?}");
}

#[test]
fn a_strategy_is_one_setting_and_gives_the_same_weights() {
    let weights = |name: &str, strategy: Option<Strategy>| {
        let folder = Folder::new(name);
        let config = RunConfig::local(&folder.0);
        let config = strategy.iter().fold(config, |config, strategy| config.train_distribute(strategy));
        let estimator = Estimator::new(config, line);
        estimator.train(|| Ok(rows(5)), None).unwrap();
        estimator.evaluate(|| Ok(rows(1))).unwrap()
    };
    let (alone, mirrored) =
        (weights("alone", None), weights("mirrored", Some(Mirrored::new(&["/cpu:0", "/cpu:1"]).build().unwrap())));
    assert!((alone.evaluation.loss - mirrored.evaluation.loss).abs() < 1e-6, "{alone:?} {mirrored:?}");
    assert_eq!(alone.step, mirrored.step);
}

#[test]
fn model_functions_that_leave_something_out_are_told() {
    let folder = Folder::new("wrong");
    let says = |spec: for<'g> fn(Output<'g>) -> EstimatorSpec<'g>, strategy: Option<Strategy>, text: &str| {
        let config = RunConfig::local(&folder.0);
        let config = strategy.iter().fold(config, |config, strategy| config.train_distribute(strategy));
        fn bound<F>(model: F) -> F
        where
            F: for<'g> Fn(&[Output<'g>], Option<Output<'g>>, Mode) -> Result<EstimatorSpec<'g>>,
        {
            model
        }
        let estimator = Estimator::new(config, bound(move |features, _, _| Ok(spec(features[0]))));
        let error = estimator.train(|| Ok(rows(1)), None).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    says(
        |_| EstimatorSpec::new().minimize(Sgd::new(0.1)),
        None,
        "no loss to train with; say `EstimatorSpec::loss(..)`",
    );
    says(|x| EstimatorSpec::new().loss(ops::mean_all(x)), None, "nothing to train with");
    let two = Mirrored::new(&["/cpu:0", "/cpu:1"]).build().unwrap();
    says(
        |x| EstimatorSpec::new().loss(ops::mean_all(x)).train_op(x.operation()),
        Some(two),
        "updates from one replica's gradients alone",
    );
    let predict = Estimator::new(RunConfig::local(&folder.0), |_, _, _| Ok(EstimatorSpec::new()));
    assert!(predict.predict(|| Ok(rows(1))).unwrap_err().to_string().contains("no predictions"));
    let narrow = || Ok(Dataset::new([Tensor::from([1.0f32])]).batch(1, true));
    assert!(predict.train(narrow, None).unwrap_err().to_string().contains("labels as its last column"));
}

#[test]
fn alone_training_and_evaluation_take_turns() {
    let folder = Folder::new("turns");
    let estimator = Estimator::new(RunConfig::local(&folder.0), line);
    let (train, eval) = (TrainSpec::new(|| Ok(rows(50)), 50), EvalSpec::new(|| Ok(rows(1))).every(20));
    let found = train_and_evaluate(&estimator, &train, &eval).unwrap();
    assert_eq!(found.iter().map(|found| found.step).collect::<Vec<_>>(), [20, 40, 50]);
    // Data that ends before is no reason to go on for ever.
    let short = Folder::new("short");
    let estimator = Estimator::new(RunConfig::local(&short.0), line);
    let train = TrainSpec::new(|| Ok(rows(3)), 50);
    let found = train_and_evaluate(&estimator, &train, &eval).unwrap();
    assert_eq!(found.last().unwrap().step, 12);
}

#[test]
fn an_evaluator_sees_checkpoints_until_the_last_step_and_gives_up_on_a_training_that_stands_still() {
    let folder = Folder::new("evaluator");
    let evaluator = || Estimator::new(RunConfig::of(&folder.0, JobPart::Evaluator), line);
    let train = TrainSpec::new(|| Ok(rows(50)), 40);
    let found = std::thread::scope(|scope| {
        let looks_on = scope.spawn(|| {
            let eval = EvalSpec::new(|| Ok(rows(1))).give_up_after(Duration::from_secs(60));
            train_and_evaluate(&evaluator(), &TrainSpec::new(|| Ok(rows(50)), 40), &eval).unwrap()
        });
        let config = RunConfig::local(&folder.0).save_every(Every::Steps(10));
        let eval = EvalSpec::new(|| Ok(rows(1)));
        train_and_evaluate(&Estimator::new(config, line), &train, &eval).unwrap();
        looks_on.join().unwrap()
    });
    assert_eq!(found.last().unwrap().step, 40);
    let longer = TrainSpec::new(|| Ok(rows(50)), 41);
    let eval = EvalSpec::new(|| Ok(rows(1))).give_up_after(Duration::from_millis(1));
    let error = train_and_evaluate(&evaluator(), &longer, &eval).unwrap_err();
    assert!(
        error.code() == Code::DeadlineExceeded && error.message().contains("the last one was of step 40"),
        "{error}"
    );
}

/// The part that a value of `TF_CONFIG` gives.
fn of(tf_config: &str) -> kolo_core::Result<JobPart> {
    JobPart::of(find(&Environment::new([("TF_CONFIG", tf_config)]))?.place)
}

#[test]
fn tf_config_gives_every_process_its_part() {
    let part = |cluster: &str, task: &str| of(&format!(r#"{{"cluster": {cluster}, "task": {task}}}"#));
    let at = |place| JobPart::Rank(RankSeat { place, meeting: Meeting::Address("a:1".to_owned()) });
    let rank = |rank, size| at(RankPlace { rank, size, local_rank: 0, local_size: 1 });
    let ps = r#"{"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1", "d:1"]}"#;
    assert!(matches!(part(ps, r#"{"type": "chief", "index": 0}"#), Ok(JobPart::Worker(_, job, 0)) if job == "chief"));
    assert!(
        matches!(part(ps, r#"{"type": "worker", "index": "1"}"#), Ok(JobPart::Worker(_, job, 1)) if job == "worker")
    );
    assert!(matches!(part(ps, r#"{"type": "ps", "index": 0}"#), Ok(JobPart::Server(_, 0))));
    assert_eq!(part(ps, r#"{"type": "evaluator", "index": 0}"#).unwrap(), JobPart::Evaluator);
    let master = r#"{"master": ["a:1"], "worker": ["c:1", "d:1"]}"#;
    assert_eq!(part(master, r#"{"type": "master"}"#).unwrap(), rank(0, 3));
    assert_eq!(part(master, r#"{"type": "worker", "index": 1}"#).unwrap(), rank(2, 3));
    assert_eq!(part(r#"{"worker": ["a:1", "b:1"]}"#, r#"{"type": "worker", "index": 0}"#).unwrap(), rank(0, 2));
    let shared = part(r#"{"worker": ["a:1", "b:1", "b:2"]}"#, r#"{"type": "worker", "index": 2}"#).unwrap();
    let place = RankPlace { rank: 2, size: 3, local_rank: 1, local_size: 2 };
    assert_eq!(shared, at(place));
    assert_eq!(part(r#"{"worker": ["a:1"]}"#, r#"{"type": "worker", "index": 0}"#).unwrap(), JobPart::Alone);
    assert_eq!(of("").unwrap(), JobPart::Alone);
    assert_eq!(of("{}").unwrap(), JobPart::Alone);
    let odd = part(r#"{"worker": ["a:1"], "tpu": ["b:1"]}"#, r#"{"type": "tpu", "index": 0}"#).unwrap_err().to_string();
    assert!(odd.contains("job 'tpu' has no part in an estimator's job"), "{odd}");
    assert!(RunConfig::of("", part(ps, r#"{"type": "chief"}"#).unwrap()).is_chief());
    assert!(!RunConfig::of("", part(ps, r#"{"type": "worker"}"#).unwrap()).is_chief());
}

/// Addresses on which nobody listens. All of 127/8 is loopback on Linux, and nobody else's connections have ports there.
fn free_addresses(n: usize) -> Vec<String> {
    let pid = std::process::id();
    let host = if cfg!(target_os = "linux") {
        format!("127.{}.{}.9", 1 + pid / 250 % 250, 1 + pid % 250)
    } else {
        "127.0.0.1".to_owned()
    };
    let bound: Vec<TcpListener> = (0..n).map(|_| TcpListener::bind((host.as_str(), 0)).unwrap()).collect();
    bound.iter().map(|at| at.local_addr().unwrap().to_string()).collect()
}

/// Two ranks of a cluster without parameter servers, as two processes would be that were started with `TF_CONFIG`.
#[test]
fn ranks_of_a_cluster_train_one_model_and_the_first_evaluates_it() {
    let folder = Folder::new("ranks");
    let free = free_addresses(1).remove(0);
    let train = |index: usize| {
        let config = format!(
            r#"{{"cluster": {{"worker": ["{free}", "127.0.0.1:1"]}}, "task": {{"type": "worker", "index": {index}}}}}"#
        );
        let config = RunConfig::of(&folder.0, of(&config).unwrap());
        let train = TrainSpec::new(|| Ok(rows(50)), 40);
        let eval = EvalSpec::new(|| Ok(rows(1)));
        train_and_evaluate(&Estimator::new(config, line), &train, &eval).unwrap()
    };
    let (first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| train(1));
        (train(0), second.join().unwrap())
    });
    assert_eq!((first.len(), first[0].step, second.len()), (1, 40, 0));
    assert!(first[0].evaluation.loss < 1e-3, "{first:?}");
}

/// A chief, a worker and two parameter servers, which end with the job.
#[test]
fn the_tasks_of_a_cluster_do_what_their_parts_are_and_end() {
    for mode in ["sync", "async"] {
        let folder = Folder::new(&format!("cluster-{mode}"));
        let free = free_addresses(4);
        let [chief, a, b, worker] = &free[..] else { panic!("four were bound") };
        let cluster = format!(r#"{{"chief": ["{chief}"], "ps": ["{a}", "{b}"], "worker": ["{worker}"]}}"#);
        let task = |job: &str, index: usize| {
            let config = format!(r#"{{"cluster": {cluster}, "task": {{"type": "{job}", "index": {index}}}}}"#);
            let config = RunConfig::of(&folder.0, of(&config).unwrap()).mode(mode.parse().unwrap());
            let train = TrainSpec::new(|| Ok(rows(1000)), 60);
            let eval = EvalSpec::new(|| Ok(rows(1)));
            train_and_evaluate(&Estimator::new(config, line), &train, &eval).unwrap()
        };
        let found = std::thread::scope(|scope| {
            let others = [("ps", 0), ("ps", 1), ("worker", 0)].map(|(job, index)| {
                let task = &task;
                scope.spawn(move || task(job, index))
            });
            let found = task("chief", 0);
            others.into_iter().for_each(|other| assert!(other.join().unwrap().is_empty()));
            found
        });
        assert_eq!(found.len(), 1, "{mode}");
        assert!(found[0].step >= 60 && found[0].evaluation.loss < 1e-3, "{mode}: {found:?}");
    }
}
