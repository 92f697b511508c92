//! Training sessions: who initialises, who waits, what hooks see, and what happens when a session is lost.
#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use kolo::ops::{FifoQueue, count_up_to};
use kolo::optim::{Optimizer, Sgd};
use kolo::train::hooks::{FeedFn, FinalOps, NanGuard, StopAtStep};
use kolo::train::{
    self, ChiefSessionCreator, MonitoredSession, QueueRunner, RunArgs, RunContext, RunValues, Scaffold, SessionHook,
    SingularMonitoredSession, Start, WorkerSessionCreator,
};
use kolo::{
    Code, DType, Error, Graph, Host, Operation, Output, PartialShape, Result, SessionConfig, Tensor, VariableKind,
};

/// Makes `w * w` small; a step multiplies `w` by 0.8.
fn parabola(g: &Graph) -> (Output<'_>, Output<'_>, Operation<'_>) {
    let w = g.variable("w", 5.0f32);
    let loss = w.read() * w.read();
    let step = train::global_step_or_create(g).unwrap();
    let update = Sgd::new(0.1).minimize(loss, Some(step)).unwrap();
    (w.read(), loss, update)
}

fn number(value: &Tensor) -> f32 {
    value.scalar_value().unwrap()
}

#[test]
fn a_session_trains_until_a_hook_stops_it() {
    let g = kolo::graph();
    let (w, _, update) = parabola(&g);
    let last = FinalOps::new(&[w], &[]);
    let values = last.values();
    let hooks: Vec<Box<dyn SessionHook<'_>>> = vec![Box::new(StopAtStep::last(3)), Box::new(last)];
    let mut session = MonitoredSession::new(ChiefSessionCreator::new(&g), hooks).unwrap();
    let mut n_runs = 0;
    while !session.should_stop() {
        session.run(&[], &[], &[update]).unwrap();
        n_runs += 1;
    }
    session.close().unwrap();
    assert_eq!((n_runs, session.global_step()), (3, Some(3)));
    let w = number(&values.borrow().as_ref().unwrap()[0]);
    assert!((w - 5.0 * 0.8f32.powi(3)).abs() < 1e-5, "{w}");
    let error = session.run(&[], &[], &[update]).unwrap_err();
    assert!(error.message().contains("closed"), "{error}");
    assert_eq!(session.hook_times()[0].calls, 6);
}

#[test]
fn stopping_needs_a_global_step() {
    let g = kolo::graph();
    g.variable("w", 5.0f32);
    let error =
        MonitoredSession::new(ChiefSessionCreator::new(&g), vec![Box::new(StopAtStep::after(1))]).err().unwrap();
    assert!(error.message().contains("global_step_or_create"), "{error}");
}

#[test]
fn a_returning_chief_attaches_to_live_state() {
    let host = Host::new(SessionConfig::default()).unwrap();
    for (life, expected) in [(0, Start::Initialized), (1, Start::Attached)] {
        let g = kolo::graph();
        let (w, _, update) = parabola(&g);
        let seen = Rc::new(RefCell::new(None));
        let hooks: Vec<Box<dyn SessionHook<'_>>> = vec![Box::new(Began(seen.clone())), Box::new(StopAtStep::after(2))];
        let mut session = MonitoredSession::new(ChiefSessionCreator::new(&g).source(host.clone()), hooks).unwrap();
        session.drive(|session| session.run(&[], &[], &[update]).map(|_| ())).unwrap();
        assert_eq!(seen.borrow().clone(), Some(expected));
        assert_eq!(session.global_step(), Some(2 * (life + 1)));
        let left = number(&host.session(&g).unwrap().fetch(w).unwrap());
        assert!((left - 5.0 * 0.8f32.powi(2 * (life as i32 + 1))).abs() < 1e-5, "{left}");
    }
}

/// Notes how the session began.
struct Began(Rc<RefCell<Option<Start>>>);

impl<'g> SessionHook<'g> for Began {
    fn name(&self) -> &'static str {
        "Began"
    }

    fn after_create_session(&mut self, created: &train::CreatedContext<'_, 'g>) -> Result<()> {
        *self.0.borrow_mut() = Some(created.start.clone());
        Ok(())
    }
}

#[test]
fn a_worker_waits_for_the_chief_and_says_for_what() {
    let host = Host::new(SessionConfig::default()).unwrap();
    let g = kolo::graph();
    parabola(&g);
    let creator = WorkerSessionCreator::new(&g, host.clone()).max_wait(Duration::from_millis(30));
    let error = MonitoredSession::new(creator, vec![]).err().unwrap();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert!(error.message().contains("'w'") && error.message().contains("'global_step'"), "{error}");

    let (ready, is_waiting) = std::sync::mpsc::channel();
    let shared = host.clone();
    let worker = std::thread::spawn(move || {
        let g = kolo::graph();
        let (_, _, update) = parabola(&g);
        let source = move |graph: &Graph| {
            ready.send(()).ok();
            shared.session(graph).map(std::sync::Arc::new)
        };
        let creator = WorkerSessionCreator::new(&g, source).max_wait(Duration::from_secs(60));
        let mut session = MonitoredSession::new(creator, vec![]).unwrap();
        session.run(&[], &[], &[update]).unwrap();
        session.close().unwrap();
        session.global_step()
    });
    is_waiting.recv().unwrap();
    let g = kolo::graph();
    parabola(&g);
    let mut chief = MonitoredSession::new(ChiefSessionCreator::new(&g).source(host), vec![]).unwrap();
    assert_eq!(worker.join().unwrap(), Some(1));
    chief.close().unwrap();
    assert_eq!(chief.global_step(), Some(1));
}

/// Fails some runs as a lost server would.
struct Fails {
    at_run: Vec<usize>,
    n_runs: usize,
    error: Error,
}

impl<'g> SessionHook<'g> for Fails {
    fn name(&self) -> &'static str {
        "Fails"
    }

    fn before_run(&mut self, _context: &RunContext<'_, 'g>) -> Result<RunArgs<'g>> {
        self.n_runs += 1;
        match self.at_run.contains(&self.n_runs) {
            true => Err(self.error.clone()),
            false => Ok(RunArgs::default()),
        }
    }
}

#[test]
fn a_lost_session_is_replaced_and_the_loss_is_counted() {
    // A local session takes its variables with it; a host keeps them.
    let host = Host::new(SessionConfig::default()).unwrap();
    for (keeps, expected_lost, expected_start) in [(false, 2, Start::Initialized), (true, 0, Start::Attached)] {
        let g = kolo::graph();
        let (_, _, update) = parabola(&g);
        let fails = Fails { at_run: vec![4], n_runs: 0, error: Error::unavailable("the server is gone") };
        let creator = ChiefSessionCreator::new(&g);
        let creator = match keeps {
            true => creator.source(host.clone()),
            false => creator,
        };
        let hooks: Vec<Box<dyn SessionHook<'_>>> = vec![Box::new(fails), Box::new(StopAtStep::last(5))];
        let mut session = MonitoredSession::new(creator, hooks).unwrap();
        session.drive(|session| session.run(&[], &[], &[update]).map(|_| ())).unwrap();
        assert_eq!(session.global_step(), Some(5));
        let [recovery] = session.recoveries() else { panic!("{:?}", session.recoveries()) };
        assert_eq!(recovery.start, expected_start);
        // Three steps were made; the last of them may have been read before it was counted.
        let lost = recovery.steps_lost.unwrap();
        assert!(lost == expected_lost || lost == expected_lost + i64::from(!keeps), "{lost}");
    }
}

#[test]
fn a_server_that_is_lost_again_while_it_comes_back_is_waited_for() {
    let host = Host::new(SessionConfig::default()).unwrap();
    let n_opened = std::cell::Cell::new(0);
    let errors = [Error::unavailable("refused"), Error::deadline_exceeded("not up yet"), Error::aborted("lost again")];
    let open = |graph: &Graph| {
        n_opened.set(n_opened.get() + 1);
        match n_opened.get() {
            n @ 2..=4 => Err(errors[n - 2].clone()),
            _ => host.session(graph).map(std::sync::Arc::new),
        }
    };
    let g = kolo::graph();
    let (_, _, update) = parabola(&g);
    let fails = Fails { at_run: vec![4], n_runs: 0, error: Error::unavailable("the server is gone") };
    let hooks: Vec<Box<dyn SessionHook<'_>>> = vec![Box::new(fails), Box::new(StopAtStep::last(5))];
    let mut session = MonitoredSession::new(ChiefSessionCreator::new(&g).source(open), hooks).unwrap();
    session.drive(|session| session.run(&[], &[], &[update]).map(|_| ())).unwrap();
    assert_eq!((session.global_step(), n_opened.get()), (Some(5), 5));
    assert_eq!(session.recoveries().len(), 1);
}

#[test]
fn other_errors_end_training_and_a_singular_session_recovers_from_none() {
    let g = kolo::graph();
    let (_, _, update) = parabola(&g);
    let fails = Fails { at_run: vec![2], n_runs: 0, error: Error::data_loss("record 7") };
    let mut session = MonitoredSession::new(ChiefSessionCreator::new(&g), vec![Box::new(fails)]).unwrap();
    let error = session.drive(|session| session.run(&[], &[], &[update]).map(|_| ())).unwrap_err();
    assert_eq!(error.code(), Code::DataLoss);
    assert!(error.message().contains("Fails: record 7"), "{error}");
    assert!(session.should_stop());

    let g = kolo::graph();
    let (_, _, update) = parabola(&g);
    let fails = Fails { at_run: vec![1], n_runs: 0, error: Error::aborted("lost") };
    let mut session = SingularMonitoredSession::new(ChiefSessionCreator::new(&g), vec![Box::new(fails)]).unwrap();
    let error = session.run(&[], &[], &[update]).unwrap_err();
    assert_eq!(error.code(), Code::Aborted);
    assert!(error.message().contains("does not recover"), "{error}");
}

#[test]
fn the_end_of_the_input_is_a_normal_end() {
    let g = kolo::graph();
    let x = g.placeholder::<f32>("x", PartialShape::scalar());
    let total = g.variable("total", 0.0f32);
    let add = total.assign_add(x);
    let mut left = vec![3.0f32, 2.0, 1.0];
    let feed = FeedFn::new(move || match left.pop() {
        Some(value) => Ok(vec![(x, Tensor::scalar(value))]),
        None => Err(Error::out_of_range("no more numbers")),
    });
    let sum = FinalOps::new(&[total.read()], &[]);
    let values = sum.values();
    let mut session = MonitoredSession::new(ChiefSessionCreator::new(&g), vec![Box::new(feed), Box::new(sum)]).unwrap();
    session.drive(|session| session.run(&[], &[], &[add]).map(|_| ())).unwrap();
    assert_eq!(number(&values.borrow().as_ref().unwrap()[0]), 6.0);
}

#[test]
fn queue_runners_start_and_stop_with_the_session() {
    let g = kolo::graph();
    let queue = FifoQueue::new(&g, "numbers", &[(DType::I64, PartialShape::scalar())], Some(2));
    let counter = g.new_variable("counter", 0i64).kind(VariableKind::Reference).build();
    QueueRunner::new(&queue, &[queue.enqueue(&[count_up_to(counter.handle(), 4)])]).add_to(&g);
    let next = queue.dequeue()[0];
    let mut session = MonitoredSession::new(ChiefSessionCreator::new(&g), vec![]).unwrap();
    let mut seen = Vec::new();
    session
        .drive(|session| {
            seen.push(session.run(&[next], &[], &[])?[0].scalar_value::<i64>()?);
            Ok(())
        })
        .unwrap();
    assert_eq!(seen, [0, 1, 2, 3]);
}

#[test]
fn a_loss_that_is_not_finite_is_caught_at_its_step() {
    let g = kolo::graph();
    let w = g.variable("w", 1.0f32);
    let step = train::global_step_or_create(&g).unwrap();
    let grow = w.assign(w.read() * 1e30f32);
    let count = step.assign_add(g.constant(1i64));
    let loss = w.read() * 1.0f32;
    let mut session = MonitoredSession::new(ChiefSessionCreator::new(&g), vec![Box::new(NanGuard::new(loss))]).unwrap();
    let error = session.drive(|session| session.run(&[], &[], &[grow, count]).map(|_| ())).unwrap_err();
    assert!(error.message().contains("'mul_1:0'") || error.message().contains("loss"), "{error}");
    assert!(error.message().contains("smaller learning rate"), "{error}");
}

#[test]
fn hooks_share_what_they_fetch_and_may_not_feed_twice() {
    struct Watches<'g>(Output<'g>, Rc<RefCell<Vec<f32>>>);
    impl<'g> SessionHook<'g> for Watches<'g> {
        fn name(&self) -> &'static str {
            "Watches"
        }
        fn before_run(&mut self, _context: &RunContext<'_, 'g>) -> Result<RunArgs<'g>> {
            Ok(RunArgs::fetch([self.0]))
        }
        fn after_run(&mut self, _context: &RunContext<'_, 'g>, values: &RunValues<'_>) -> Result<()> {
            self.1.borrow_mut().push(values.values[0].scalar_value()?);
            Ok(())
        }
    }
    let g = kolo::graph();
    let x = g.placeholder::<f32>("x", PartialShape::scalar());
    let (y, z) = (x + 1.0, x + 2.0);
    let (a, b) = (Rc::new(RefCell::new(Vec::new())), Rc::new(RefCell::new(Vec::new())));
    let hooks: Vec<Box<dyn SessionHook<'_>>> = vec![Box::new(Watches(z, a.clone())), Box::new(Watches(y, b.clone()))];
    let creator = ChiefSessionCreator::new(&g).scaffold(Scaffold::new());
    let mut session = MonitoredSession::new(creator, hooks).unwrap();
    let out = session.run(&[y], &[(x, Tensor::scalar(1.0f32))], &[]).unwrap();
    assert_eq!(out, [Tensor::scalar(2.0f32)]);
    assert_eq!((a.take(), b.take()), (vec![3.0], vec![2.0]));
    session.close().unwrap();

    let feeds = FeedFn::new(move || Ok(vec![(x, Tensor::scalar(5.0f32))]));
    let mut session = MonitoredSession::new(ChiefSessionCreator::new(&g), vec![Box::new(feeds)]).unwrap();
    let error = session.run(&[y], &[(x, Tensor::scalar(1.0f32))], &[]).unwrap_err();
    assert!(error.message().contains("hook FeedFn feeds 'x:0', which is fed already"), "{error}");
}
