//! The training library as programs use it: loops, checkpoints, supervisors, towers.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kolo::data::Dataset;
use kolo::optim::{Adam, Momentum, Optimizer, Sgd};
use kolo::parallel::{Tower, towers};
use kolo::train::hooks::{CheckpointSaver, StopAtStep};
use kolo::train::{
    self, Callback, Checkpoints, EarlyStopping, Every, Flow, Model, MonitoredTrainingSession, StepReport, Supervisor,
    Trainer, latest_checkpoint, summary,
};
use kolo::{Graph, Operation, Output, Result, Session, SessionConfig, Tensor, nn, ops};

/// A folder that is gone after the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("training-{name}-{}", std::process::id()));
        std::fs::remove_dir_all(&path).ok();
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Points of y = 2a - b + 1.
fn plane() -> Dataset {
    let x: Vec<f32> = (0..48).map(|i| ((i * 37) % 24) as f32 / 12.0 - 1.0).collect();
    let y: Vec<f32> = x.chunks(2).map(|x| 2.0 * x[0] - x[1] + 1.0).collect();
    Dataset::new([Tensor::from_vec([24, 2], x).unwrap(), Tensor::from_vec([24, 1], y).unwrap()])
}

/// A small network over the plane, and its loss.
fn network<'g>(x: Output<'g>, y: Output<'g>) -> Output<'g> {
    let hidden = nn::Dense::new(8).activation(nn::tanh).name("hidden").apply(x);
    ops::mean_all(ops::square(nn::dense(hidden, 1, "out") - y))
}

fn inputs(g: &Graph) -> [Output<'_>; 2] {
    [g.placeholder::<f32>("x", [None, Some(2)]), g.placeholder::<f32>("y", [None, Some(1)])]
}

fn model(g: &Graph) -> Model<'_> {
    g.set_seed(5);
    let [x, y] = inputs(g);
    let loss = network(x, y);
    let step = train::global_step_or_create(g).unwrap();
    let train_op = Adam::new(0.05).minimize(loss, Some(step)).unwrap();
    Model::new(&[x, y], loss, train_op).metric("twice", loss * 2.0)
}

/// All variables, by name.
fn weights(g: &Graph, session: &Session) -> BTreeMap<String, Tensor> {
    g.global_variables().iter().map(|v| (v.name(), session.fetch(v.read()).unwrap())).collect()
}

#[test]
fn fit_learns_and_evaluate_and_predict_see_it() {
    let g = kolo::graph();
    let model = model(&g);
    let mut trainer = Trainer::new(&g, model).build().unwrap();
    let before = trainer.evaluate(&plane().batch(7, false)).unwrap();
    assert_eq!(before.n_samples, 24);
    let report = trainer.fit(&plane().shuffle(1).batch(6, true).repeat(100), &mut []).unwrap();
    assert_eq!((report.n_steps, report.n_samples, report.step), (400, 2400, 400));
    let after = trainer.evaluate(&plane().batch(7, false)).unwrap();
    assert!(after.loss < before.loss / 50.0, "{before:?} {after:?}");
    assert_eq!(after.metrics[0].0, "twice");
    assert!((after.metrics[0].1 - 2.0 * after.loss).abs() < 1e-6);
    // The size of the last batch does not matter: the mean is over samples.
    let at_once = trainer.evaluate(&plane().batch(24, false)).unwrap();
    assert!((after.loss - at_once.loss).abs() < 1e-6, "{after:?} {at_once:?}");
    let out = g.output("out/BiasAdd").unwrap();
    let predicted = trainer.predict(&plane().batch(5, false), out).unwrap();
    assert_eq!(predicted.shape().dims(), [24, 1]);
}

#[test]
fn wrong_data_and_wild_losses_are_named() {
    let g = kolo::graph();
    let model = model(&g);
    let mut trainer = Trainer::new(&g, model).build().unwrap();
    let one = Dataset::new([Tensor::from([[1.0f32, 2.0]])]);
    let error = trainer.fit(&one, &mut []).unwrap_err();
    assert!(error.message().contains("1 columns; the model has 2 inputs"), "{error}");

    let g = kolo::graph();
    let [x, y] = inputs(&g);
    let loss = network(x, y);
    let train_op = Sgd::new(1e30).minimize(loss, Some(train::global_step_or_create(&g).unwrap())).unwrap();
    let mut trainer = Trainer::new(&g, Model::new(&[x, y], loss, train_op)).build().unwrap();
    let error = trainer.fit(&plane().batch(6, true).repeat(5), &mut []).unwrap_err();
    assert!(error.message().contains("smaller learning rate"), "{error}");
}

/// Stops at a step, as a person would with Ctrl-C.
struct Interrupt(i64, Arc<AtomicBool>);

impl Callback for Interrupt {
    fn on_step(&mut self, report: &StepReport<'_, '_>) -> Result<Flow> {
        self.1.fetch_or(report.step == self.0, Ordering::Relaxed);
        Ok(Flow::Continue)
    }
}

#[test]
fn an_interrupted_training_goes_on_bit_for_bit() {
    let folder = Folder::new("resume");
    let data = plane().shuffle(9).batch(5, false).repeat(6).prefetch(2);
    let undisturbed = {
        let g = kolo::graph();
        let model = model(&g);
        let dir = folder.0.join("whole");
        let checkpoints = Checkpoints { dir, every: Every::Steps(4), keep: 2 };
        let mut trainer = Trainer::new(&g, model).checkpoints(checkpoints).build().unwrap();
        trainer.fit(&data, &mut []).unwrap();
        weights(&g, trainer.session())
    };
    for (life, stop_at) in [3, 11, 12, 1000].into_iter().enumerate() {
        let g = kolo::graph();
        let model = model(&g);
        let dir = folder.0.join("cut");
        let stop = Arc::new(AtomicBool::new(false));
        let checkpoints = Checkpoints { dir: dir.clone(), every: Every::Steps(4), keep: 2 };
        let builder = Trainer::new(&g, model).checkpoints(checkpoints).resume(true).stop_flag(stop.clone());
        let mut trainer = builder.build().unwrap();
        assert_eq!(trainer.restored().is_some(), life > 0);
        let report = trainer.fit(&data, &mut [&mut Interrupt(stop_at, stop)]).unwrap();
        assert_eq!(report.stopped, stop_at < 1000);
        assert_eq!(report.step, stop_at.min(30));
        assert_eq!(
            latest_checkpoint(&dir).unwrap(),
            Some(dir.join(format!("model.ckpt-{}", report.step)).display().to_string())
        );
        if stop_at == 1000 {
            assert_eq!(weights(&g, trainer.session()), undisturbed);
        }
    }
}

#[test]
fn early_stopping_counts_epochs_without_progress() {
    let g = kolo::graph();
    let model = model(&g);
    let mut trainer = Trainer::new(&g, model).build().unwrap();
    let mut values = [3.0, 2.0, 2.5, 2.5, 0.0].into_iter();
    let mut stopping = EarlyStopping::new(2, |_| Ok(values.next().unwrap()));
    let report = trainer.fit(&plane().batch(12, true).repeat(10), &mut [&mut stopping]).unwrap();
    assert!(report.stopped);
    assert_eq!((report.n_steps, stopping.best()), (8, 2.0));
}

#[test]
fn towers_compute_what_one_device_computes() {
    let run = |n_devices: usize| {
        let g = kolo::graph();
        g.set_seed(5);
        let [x, y] = inputs(&g);
        let unused = g.variable("unused", [1.0f32, 2.0]);
        let optimizer = Momentum::new(0.05, 0.9);
        let (loss, update): (Output<'_>, Operation<'_>) = match n_devices {
            1 => {
                let loss = network(x, y);
                (loss, optimizer.minimize(loss, None).unwrap())
            }
            n => {
                let devices: Vec<String> = (0..n).map(|i| format!("/cpu:{i}")).collect();
                let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
                let built = towers(&g, &devices, "/cpu:0", &[x, y], |inputs| {
                    Ok(Tower { loss: network(inputs[0], inputs[1]), metrics: vec![] })
                })
                .unwrap();
                assert!(built.gradients.iter().any(|g| g.variable.name() == unused.name() && g.grad.is_none()));
                (built.loss, optimizer.apply_gradients(&built.gradients, None).unwrap())
            }
        };
        assert_eq!(g.trainable_variables().len(), 5);
        // The same first values, whatever the graphs' other random ops.
        let values = ["hidden/kernel", "out/kernel"].map(|name| {
            let variable = g.find_variable(name).unwrap();
            let dims: Vec<usize> = variable.shape().dims().unwrap().iter().map(|d| d.unwrap()).collect();
            let n = dims.iter().product::<usize>();
            let value =
                Tensor::from_vec(kolo::Shape::new(&dims).unwrap(), (0..n).map(|i| (i as f32 * 0.7).sin()).collect());
            variable.assign(g.constant(value.unwrap()))
        });
        let init = g.global_variables_initializer();
        let config =
            SessionConfig { device_count: BTreeMap::from([("CPU".to_owned(), n_devices)]), ..SessionConfig::default() };
        let session = Session::with_config(&g, config).unwrap();
        session.run_op(init).unwrap();
        session.run(&[], &[], &values).unwrap();
        let mut losses = Vec::new();
        for batch in plane().batch(12, true).repeat(5).batches().unwrap() {
            let batch = batch.unwrap();
            let feeds = [(x, batch.tensors[0].clone()), (y, batch.tensors[1].clone())];
            losses.push(session.run(&[loss], &feeds, &[update]).unwrap()[0].scalar_value::<f32>().unwrap());
        }
        let devices: std::collections::BTreeSet<String> = session
            .local()
            .unwrap()
            .placement()
            .rows
            .iter()
            .filter(|row| row.op == "Tanh")
            .map(|row| row.device.to_string())
            .collect();
        assert_eq!(devices.len(), n_devices);
        losses
    };
    let one = run(1);
    for n in [2, 3] {
        let many = run(n);
        assert!(one.iter().zip(&many).all(|(a, b)| (a - b).abs() < 1e-4 * a.abs().max(1.0)), "{one:?} {many:?}");
    }
    assert!(one[9] < one[0] / 2.0, "{one:?}");
}

/// Makes `w * w` small, summarised.
fn parabola(g: &Graph) -> Operation<'_> {
    let w = g.variable("w", 5.0f32);
    let loss = w.read() * w.read();
    summary::scalar("loss", loss);
    Sgd::new(0.1).minimize(loss, Some(train::global_step_or_create(g).unwrap())).unwrap()
}

#[test]
fn a_monitored_session_saves_and_restores() {
    let folder = Folder::new("monitored");
    let mut saved = Vec::new();
    for life in 1..=2i64 {
        let g = kolo::graph();
        let update = parabola(&g);
        let listened = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        let heard = listened.clone();
        let saver =
            CheckpointSaver::new(&folder.0, Every::Steps(3)).listener(move |step, _| heard.borrow_mut().push(step));
        let mut session = MonitoredTrainingSession::new(&g)
            .checkpoint_dir(&folder.0)
            .save_checkpoint(None)
            .chief_only_hook(saver)
            .hook(StopAtStep::after(5))
            .build()
            .unwrap();
        let mut n_runs = 0;
        while !session.should_stop() {
            session.run(&[], &[], &[update]).unwrap();
            n_runs += 1;
        }
        session.close().unwrap();
        assert_eq!((n_runs, session.global_step()), (5, Some(5 * life)));
        saved.push(listened.take());
    }
    // At the start, unless it was restored just so; every three steps, if the one before was written by then; at the end.
    let [first, second] = &saved[..] else { panic!("two lives") };
    assert!(first.first() == Some(&0) && first.last() == Some(&5), "{first:?}");
    assert!(!second.contains(&5) && second.last() == Some(&10), "{second:?}");
    assert!(first.iter().chain(second).all(|step| [0, 3, 4, 5, 8, 9, 10].contains(step)), "{saved:?}");
    let events = std::fs::read_dir(&folder.0).unwrap().flatten();
    assert!(events.into_iter().any(|file| file.file_name().to_string_lossy().contains("tfevents")));
}

#[test]
fn a_supervisor_saves_at_the_end_and_restores_at_the_start() {
    let folder = Folder::new("supervisor");
    for life in 1..=2i64 {
        let g = kolo::graph();
        let update = parabola(&g);
        let step = train::global_step(&g).unwrap();
        let supervisor =
            Supervisor::new(&g).logdir(&folder.0).save_model_secs(3600.0).save_summaries_secs(0.001).build().unwrap();
        supervisor
            .managed_session(|supervisor, session| {
                let mut n = 0;
                while !supervisor.should_stop() {
                    session.run_op(update)?;
                    n += 1;
                    if n == 20 {
                        supervisor.request_stop();
                    }
                }
                assert_eq!(session.fetch(step.read())?.scalar_value::<i64>()?, 20 * life);
                Ok(())
            })
            .unwrap();
        let latest = latest_checkpoint(&folder.0).unwrap().unwrap();
        assert!(latest.ends_with(&format!("model.ckpt-{}", 20 * life)), "{latest}");
    }
    // An error of the program comes out of it, and nothing is left running.
    let g = kolo::graph();
    parabola(&g);
    let supervisor = Supervisor::new(&g).build().unwrap();
    let error = supervisor.managed_session(|_, _| Err(kolo::Error::data_loss("bad record"))).unwrap_err();
    assert!(error.message().contains("bad record"), "{error}");
}

#[test]
fn a_checkpoint_folder_that_cannot_be_written_is_found_before_the_first_step() {
    let folder = Folder::new("unwritable");
    let file = folder.0.join("file");
    std::fs::write(&file, b"").unwrap();
    for dir in [file.join("sub"), file.clone(), PathBuf::from("/proc/foo")] {
        let g = kolo::graph();
        let checkpoints = Checkpoints { dir: dir.clone(), every: Every::Steps(1_000_000), keep: 5 };
        let error = Trainer::new(&g, model(&g)).checkpoints(checkpoints).build().err().unwrap();
        assert!(error.message().contains(&dir.display().to_string()), "{error}");
        let g = kolo::graph();
        parabola(&g);
        let hooks: Vec<Box<dyn train::SessionHook<'_>>> = vec![Box::new(CheckpointSaver::new(&dir, Every::Steps(10)))];
        let error = train::MonitoredSession::new(train::ChiefSessionCreator::new(&g), hooks).err().unwrap();
        assert!(error.message().contains(&dir.display().to_string()), "{error}");
    }
}

#[test]
fn a_folder_with_checkpoints_of_another_model_is_refused_before_the_first_step() {
    let folder = Folder::new("another-model");
    let checkpoints = || Checkpoints { dir: folder.0.clone(), every: Every::Steps(1_000_000), keep: 5 };
    let g = kolo::graph();
    let mut trainer = Trainer::new(&g, model(&g)).checkpoints(checkpoints()).build().unwrap();
    trainer.save().unwrap();
    for resumes in [false, true] {
        let g = kolo::graph();
        let [x, y] = inputs(&g);
        let loss = ops::mean_all(ops::square(nn::dense(x, 1, "out") - y));
        let step = train::global_step_or_create(&g).unwrap();
        let other = Model::new(&[x, y], loss, Sgd::new(0.1).minimize(loss, Some(step)).unwrap());
        let error = Trainer::new(&g, other).checkpoints(checkpoints()).resume(resumes).build().err().unwrap();
        assert!(error.message().contains("another model") && error.message().contains("'out/kernel'"), "{error}");
    }
    // The same model may.
    let g = kolo::graph();
    Trainer::new(&g, model(&g)).checkpoints(checkpoints()).build().unwrap();
}

#[test]
fn a_monitored_session_that_is_dropped_saves_and_closes() {
    let folder = Folder::new("dropped");
    let latest = || latest_checkpoint(&folder.0).unwrap().unwrap();
    let train = |n: usize| {
        let g = kolo::graph();
        let update = parabola(&g);
        let mut session = MonitoredTrainingSession::new(&g).checkpoint_dir(&folder.0).build().unwrap();
        for _ in 0..n {
            session.run(&[], &[], &[update]).unwrap();
        }
        assert!(n != 3, "a failure of the program");
    };
    train(60);
    assert!(latest().ends_with("model.ckpt-60"), "{}", latest());
    train(7);
    assert!(latest().ends_with("model.ckpt-67"), "{}", latest());
    // What a panic leaves behind may be half done.
    let panicked = std::panic::catch_unwind(|| train(3));
    assert!(panicked.is_err() && latest().ends_with("model.ckpt-67"), "{}", latest());
}
