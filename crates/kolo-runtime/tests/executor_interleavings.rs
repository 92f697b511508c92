//! The executor under [shuttle](https://docs.rs/shuttle), which runs a test's threads under many random schedules and fails when
//! all of them wait: the inter-op pool, runners that join, leave and hand over, the caller, and the rendezvous.
//!
//! Run by `cargo test -p kolo-runtime --features shuttle --test executor_interleavings`. `SHUTTLE_SCHEDULES=N` runs N schedules of each
//! test. A failure prints the schedule; `shuttle::replay` runs it again.

use std::collections::BTreeMap;
use std::sync::Arc;

use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Graph, OpBuilder, Output, WhileOptions};
use kolo_ops::array::slice::slice;
use kolo_ops::math::matmul::matmul;
use kolo_ops::{CancelToken, Received, Rendezvous, RendezvousKey};
use kolo_runtime::{
    FrameIds, Host, InterPool, LocalRendezvous, RunOptions, Session, SessionConfig, StepKind, StepRendezvous,
    TaskGraph, TaskSession,
};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::sync::{Mutex, mpsc};
use shuttle::thread;

type Waiter = Box<dyn FnOnce(Result<Received>) + Send>;

/// Runs `model` under so many schedules of each of two kinds: all choices random, and few switches at random points.
fn check(n_schedules: usize, model: fn()) {
    let n_schedules = std::env::var("SHUTTLE_SCHEDULES").map_or(n_schedules, |n| n.parse().expect("a number"));
    let schedulers: [Box<dyn Scheduler + Send>; 2] =
        [Box::new(RandomScheduler::new(n_schedules)), Box::new(PctScheduler::new(3, n_schedules))];
    for scheduler in schedulers {
        let mut config = shuttle::Config::new();
        config.stack_size = 1 << 20;
        shuttle::Runner::new(scheduler, config).run(model);
    }
}

/// Every job that is taken runs, though the pool is resized meanwhile, and surplus threads end.
#[test]
fn a_pool_runs_every_job_and_its_surplus_threads_end() {
    check(2000, || {
        let pool = Arc::new(InterPool::new("test", 2));
        let n_run = Arc::new(AtomicUsize::new(0));
        let spawn = |pool: &InterPool, n_run: &Arc<AtomicUsize>| {
            let n_run = n_run.clone();
            usize::from(pool.spawn(move || {
                n_run.fetch_add(1, Ordering::SeqCst);
            }))
        };
        let other = {
            let (pool, n_run) = (pool.clone(), n_run.clone());
            thread::spawn(move || {
                let first = spawn(&pool, &n_run);
                pool.set_max_threads(1);
                let second = spawn(&pool, &n_run);
                pool.set_max_threads(0);
                first + second
            })
        };
        let n_taken = spawn(&pool, &n_run) + spawn(&pool, &n_run) + other.join().expect("it ends");
        // Shuttle fails a test that takes too many steps, so waiting in vain is found too.
        while pool.n_threads() > 0 {
            thread::yield_now();
        }
        assert_eq!(n_run.load(Ordering::SeqCst), n_taken);
    });
}

/// A job wakes an idle thread: nothing else would run it.
#[test]
fn an_idle_thread_hears_of_a_job() {
    check(2000, || {
        let pool = InterPool::new("test", 2);
        for _ in 0..3 {
            let (sender, receiver) = mpsc::channel();
            for _ in 0..2 {
                let sender = sender.clone();
                assert!(pool.spawn(move || sender.send(()).expect("the test listens")));
            }
            for _ in 0..2 {
                receiver.recv().expect("it runs");
            }
        }
    });
}

/// Whichever comes first, a receiver hears once, of the value or of the abort.
#[test]
fn a_receiver_hears_of_the_value_or_of_the_abort() {
    check(2000, || {
        let rendezvous = Arc::new(LocalRendezvous::default());
        let key = || RendezvousKey { edge: "edge".into(), frame_iteration: Default::default() };
        let sending = {
            let rendezvous = rendezvous.clone();
            thread::spawn(move || rendezvous.send(key(), Received::value(Tensor::scalar(1.0f32))).is_ok())
        };
        let aborting = {
            let rendezvous = rendezvous.clone();
            thread::spawn(move || rendezvous.abort(Error::cancelled("stop")))
        };
        let (sender, receiver) = mpsc::channel();
        rendezvous.recv(key(), Box::new(move |received| sender.send(received.is_ok()).expect("the test listens")));
        let was_sent = sending.join().expect("it ends");
        aborting.join().expect("it ends");
        let has_arrived = receiver.recv().expect("it hears");
        assert!(was_sent || !has_arrived);
        assert!(receiver.recv().is_err(), "it hears once");
    });
}

fn config(n_cpus: usize, n_inter: usize) -> SessionConfig {
    SessionConfig {
        device_count: BTreeMap::from([("CPU".to_owned(), n_cpus), ("GPU".to_owned(), 0)]),
        inter_op_parallelism_threads: n_inter,
        intra_op_parallelism_threads: 1,
        ..SessionConfig::default()
    }
}

/// A matrix whose products are worth a thread of their own.
fn matrix() -> Tensor {
    Tensor::from_vec([32, 32], vec![0.5f32; 32 * 32]).expect("it fits")
}

/// Towers on two devices, joined on the first: runners join and leave, values cross, the caller waits for both.
fn towers(graph: &Graph) -> Output<'_> {
    let x = graph.placeholder::<f32>("x", [Some(32), Some(32)]);
    let towers: Vec<_> = (0..4).map(|i| graph.device(&format!("/cpu:{}", i % 2), || matmul(matmul(x, x), x))).collect();
    towers.iter().skip(1).fold(towers[0], |sum, tower| sum + *tower)
}

#[test]
fn the_caller_hears_of_the_end() {
    check(150, || {
        let graph = kolo_ops::graph();
        let sum = towers(&graph).name();
        let session = Session::with_config(&graph, config(2, 2)).expect("the graph is whole");
        for _ in 0..2 {
            let result = session.run_named(&[&sum], &[("x", matrix())], &[]).expect("it runs");
            assert_eq!(result[0].data::<f32>().expect("floats")[0], 4.0 * 0.125 * 1024.0);
        }
    });
}

/// A cancelled step ends, whatever its threads do at that moment, and its error is the reason unless it was over before.
#[test]
fn a_cancelled_step_ends() {
    check(150, || {
        let graph = kolo_ops::graph();
        let sum = towers(&graph).name();
        let session = Session::with_config(&graph, config(2, 2)).expect("the graph is whole");
        let cancel = CancelToken::new();
        let cancelling = {
            let cancel = cancel.clone();
            thread::spawn(move || cancel.cancel(Error::cancelled("enough")))
        };
        let options = RunOptions { cancel: Some(cancel), ..RunOptions::default() };
        let result = session.run_named_with(&options, &[&sum], &[("x", matrix())], &[]);
        if let Err(error) = result {
            assert!(error.message().contains("enough"), "{error}");
        }
        cancelling.join().expect("it ends");
    });
}

/// A node fails on one device while another device waits for its value.
#[test]
fn a_failed_step_ends() {
    check(150, || {
        let graph = kolo_ops::graph();
        let x = graph.placeholder::<f32>("x", [Some(32), Some(32)]);
        let product = graph.device("/cpu:0", || matmul(x, x));
        let failed = graph.device("/cpu:1", || {
            let indices = graph.constant([99i32]);
            graph.op("Gather").input(matmul(x, x)).input(indices).out()
        });
        let sum = (product + failed).name();
        let session = Session::with_config(&graph, config(2, 2)).expect("the graph is whole");
        let error = session.run_named(&[&sum], &[("x", matrix())], &[]).expect_err("there is no row 99");
        assert!(error.message().contains("99"), "{error}");
    });
}

/// Gives `start` and `long` at once, and what is sent as `ping` as `pong`, by another thread, as another task would.
#[derive(Default)]
struct Echo(Mutex<Met>);

/// Either may come first.
#[derive(Default)]
struct Met {
    ping: Option<Received>,
    pong: Option<Waiter>,
    aborted: Option<Error>,
}

impl Echo {
    fn answer(&self, change: impl FnOnce(&mut Met)) {
        let (waiter, answer) = {
            let mut met = self.0.lock().expect("not poisoned");
            change(&mut met);
            match (met.pong.take(), met.ping.take(), met.aborted.clone()) {
                (Some(waiter), _, Some(reason)) => (waiter, Err(reason)),
                (Some(waiter), Some(value), None) => (waiter, Ok(value)),
                (pong, ping, aborted) => {
                    *met = Met { ping, pong, aborted };
                    return;
                }
            }
        };
        thread::spawn(move || waiter(answer));
    }
}

impl Rendezvous for Echo {
    fn send(&self, key: RendezvousKey, value: Received) -> Result<()> {
        if key.part(3) == "ping" {
            self.answer(|met| met.ping = Some(value));
        }
        Ok(())
    }

    fn recv(&self, key: RendezvousKey, done: Waiter) {
        if key.part(3) == "start" {
            return done(Ok(Received::value(Tensor::scalar(1.0f32))));
        }
        if key.part(3) == "long" {
            static LONG: std::sync::OnceLock<Tensor> = std::sync::OnceLock::new();
            let long = LONG.get_or_init(|| Tensor::zeros(DType::F32, [1 << 20]).expect("it fits"));
            return done(Ok(Received::value(long.clone())));
        }
        self.answer(|met| met.pong = Some(done));
    }
}

impl StepRendezvous for Echo {
    fn abort(&self, reason: Error) {
        self.answer(|met| met.aborted = Some(reason));
    }
}

/// One end of a transfer.
fn end<'g>(graph: &'g Graph, device: &str, op: &str, name: &str) -> OpBuilder<'g> {
    let node = graph.op(op).name(name).attr("tensor_name", name).attr("send_device", device);
    node.attr("recv_device", device).attr("send_device_incarnation", 1i64)
}

fn compile(host: &Host, describe: for<'g> fn(&'g Graph, &str)) -> TaskGraph {
    let graph = kolo_ops::graph();
    let device = host.list_devices()[0].name.to_string();
    graph.device(device.as_str(), || describe(&graph, &device));
    TaskSession::new(host).compile(&graph.snapshot(), FrameIds::Mixed).expect("the graph is whole")
}

/// `start` → `ping`, and a chain that is longer than a runner's patience; `pong` → products that are worth a thread → `end`. So
/// `pong` arrives while a runner hands over.
fn there_and_back(graph: &Graph, device: &str) {
    let start = end(graph, device, "_Recv", "start").attr("tensor_type", DType::F32).out();
    end(graph, device, "_Send", "ping").input(start).build();
    (0..70).fold(start, |value, _| graph.op("Neg").input(value).out());
    let pong = end(graph, device, "_Recv", "pong").attr("tensor_type", DType::F32).out();
    let many = graph.op("Fill").input(graph.constant([32, 32])).input(pong).out();
    end(graph, device, "_Send", "end").input(matmul(many, many) + matmul(many, many)).build();
}

/// One node that takes too long for a thread that starts steps.
fn long(graph: &Graph, device: &str) {
    let long = end(graph, device, "_Recv", "long").attr("tensor_type", DType::F32).out();
    end(graph, device, "_Send", "end").input(slice(long, &[1], &[1])).build();
}

/// A loop of nodes that are run with the lock held, longer than a slice, and values that arrive meanwhile.
fn turns<'g>(graph: &'g Graph, device: &str) {
    let start = end(graph, device, "_Recv", "start").attr("tensor_type", DType::F32).out();
    end(graph, device, "_Send", "ping").input(start).build();
    let first = graph.constant(0i32);
    let cond = |g: &'g Graph, v: &[Output<'g>]| g.op("Less").input(v[0]).input(g.constant(20i32)).out();
    let body = |_: &'g Graph, v: &[Output<'g>]| vec![v[0] + 1i32];
    let last = graph.while_loop(&[first], cond, body, WhileOptions::default()).expect("a loop")[0];
    end(graph, device, "_Send", "turns").input(last).build();
    let pong = end(graph, device, "_Recv", "pong").attr("tensor_type", DType::F32).out();
    end(graph, device, "_Send", "end").input(graph.op("Neg").input(pong).out()).build();
}

/// Whatever arrives while a runner leaves or hands over finds somebody to run it.
#[test]
fn what_arrives_while_a_runner_hands_over_is_run() {
    check(250, || run_detached(there_and_back));
}

/// A runner that leaves a node to others sees to it that there are some.
#[test]
fn what_a_runner_leaves_to_others_is_run() {
    check(100, || run_detached(long));
}

/// Two steps that give way to each other both end, on a pool of one thread.
#[test]
fn steps_that_give_way_to_each_other_end() {
    check(100, || {
        let host = Host::new(config(1, 1)).expect("a CPU");
        let graph = compile(&host, turns);
        let (ended, end) = mpsc::channel();
        for id in 1..3 {
            let ended = ended.clone();
            let on_end = Box::new(move |error| ended.send(error).expect("the test listens"));
            graph.start(id, Arc::new(Echo::default()), StepKind::Whole, on_end);
        }
        drop(ended);
        assert_eq!((end.recv().expect("it ends"), end.recv().expect("it ends")), (None, None));
        assert!(end.recv().is_err(), "each ends once");
    });
}

/// A loop that one thread stops and another reports on ends once; neither of them waits for its runner.
#[test]
fn a_loop_that_is_stopped_and_reported_on_ends_once() {
    check(100, || {
        let host = Host::new(config(1, 2)).expect("a CPU");
        let graph = compile(&host, turns);
        let (ended, end) = mpsc::channel();
        let on_end = Box::new(move |error| ended.send(error).expect("the test listens"));
        let step = graph.start(1, Arc::new(Echo::default()), StepKind::Whole, on_end);
        let reported = step.clone();
        let stopping = thread::spawn(move || step.fail(Error::aborted("enough")));
        let n_views = Arc::new(AtomicUsize::new(0));
        let reporting = {
            let n_views = n_views.clone();
            thread::spawn(move || {
                reported.look(move |_| {
                    n_views.fetch_add(1, Ordering::SeqCst);
                })
            })
        };
        let error: Option<Error> = end.recv().expect("it ends");
        assert!(error.is_none_or(|error| error.message().contains("enough")));
        stopping.join().expect("it ends");
        let n_asked = reporting.join().expect("it ends");
        assert!(end.recv().is_err(), "it ends once");
        assert!(n_views.load(Ordering::SeqCst) <= n_asked, "each part answers once");
    });
}

/// Gives every value by a thread of its own.
#[derive(Default)]
struct Crowd {
    n_sent: AtomicUsize,
}

impl Rendezvous for Crowd {
    fn send(&self, _: RendezvousKey, _: Received) -> Result<()> {
        self.n_sent.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn recv(&self, _: RendezvousKey, done: Waiter) {
        thread::spawn(move || done(Ok(Received::value(Tensor::scalar(1.0f32)))));
    }
}

impl StepRendezvous for Crowd {
    fn abort(&self, _: Error) {}
}

/// Values that are sent on, and one that is worth a thread.
fn crowded(graph: &Graph, device: &str) {
    for name in ["a", "b", "c"] {
        let value = end(graph, device, "_Recv", name).attr("tensor_type", DType::F32).out();
        end(graph, device, "_Send", &format!("{name}_back")).input(graph.op("Neg").input(value).out()).build();
    }
    let value = end(graph, device, "_Recv", "d").attr("tensor_type", DType::F32).out();
    let many = graph.op("Fill").input(graph.constant([32, 32])).input(value).out();
    end(graph, device, "_Send", "d_back").input(matmul(many, many)).build();
}

/// Threads that meet at a part leave to its holder what they have brought, and go. Nothing of it stays where it is.
#[test]
fn what_is_left_to_the_holder_of_a_part_is_taken_in() {
    check(500, || {
        let host = Host::new(config(1, 2)).expect("a CPU");
        let graph = compile(&host, crowded);
        let (ended, end) = mpsc::channel();
        let on_end = Box::new(move |error| ended.send(error).expect("the test listens"));
        let crowd = Arc::new(Crowd::default());
        let step = graph.start(1, crowd.clone(), StepKind::Whole, on_end);
        let (tell, views) = mpsc::channel();
        step.look(move |_| tell.send(()).expect("the test listens"));
        assert_eq!(end.recv().expect("it ends"), None);
        assert_eq!(crowd.n_sent.load(Ordering::SeqCst), 4);
        assert!(end.recv().is_err(), "it ends once");
        views.recv().expect("whoever holds the part answers");
        assert!(views.recv().is_err(), "it answers once");
    });
}

fn run_detached(describe: fn(&Graph, &str)) {
    let host = Host::new(config(1, 2)).expect("a CPU");
    let graph = compile(&host, describe);
    let (ended, end) = mpsc::channel();
    let on_end = Box::new(move |error| ended.send(error).expect("the test listens"));
    graph.start(1, Arc::new(Echo::default()), StepKind::Whole, on_end);
    assert_eq!(end.recv().expect("it ends"), None);
    assert!(end.recv().is_err(), "it ends once");
}

/// A detached step that another thread stops ends once.
#[test]
fn a_detached_step_that_is_stopped_ends_once() {
    check(250, || {
        let host = Host::new(config(1, 2)).expect("a CPU");
        let graph = compile(&host, there_and_back);
        let (ended, end) = mpsc::channel();
        let on_end = Box::new(move |error| ended.send(error).expect("the test listens"));
        let step = graph.start(1, Arc::new(Echo::default()), StepKind::Whole, on_end);
        let stopping = thread::spawn(move || step.fail(Error::aborted("enough")));
        let error: Option<Error> = end.recv().expect("it ends");
        assert!(error.is_none_or(|error| error.message().contains("enough")));
        stopping.join().expect("it ends");
        assert!(end.recv().is_err(), "it ends once");
    });
}
