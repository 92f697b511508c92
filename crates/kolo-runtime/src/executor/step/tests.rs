//! What threads that may not wait for a part do while another thread holds it.
#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Graph, OpBuilder};
use kolo_ops::{Received, Rendezvous, RendezvousKey};
use parking_lot::Mutex;

use crate::executor::may_wait::MayWait;
use crate::executor::rendezvous::StepRendezvous;
use crate::{FrameIds, Host, SessionConfig, StepKind, TaskSession, TaskStep};

type Waiter = Box<dyn FnOnce(Result<Received>) + Send>;

/// Against hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// Another task, which has received nothing yet, and has sent nothing yet.
#[derive(Default)]
struct Other {
    waiters: Mutex<Vec<Waiter>>,
    n_sent: Mutex<usize>,
}

impl Rendezvous for Other {
    fn send(&self, _: RendezvousKey, _: Received) -> Result<()> {
        *self.n_sent.lock() += 1;
        Ok(())
    }

    fn recv(&self, _: RendezvousKey, done: Waiter) {
        self.waiters.lock().push(done);
    }
}

impl StepRendezvous for Other {
    fn abort(&self, reason: Error) {
        let waiters = std::mem::take(&mut *self.waiters.lock());
        waiters.into_iter().for_each(|waiter| waiter(Err(reason.clone())));
    }
}

const N_VALUES: usize = 5;

/// A step that sends back values that it receives.
struct Running {
    host: Host,
    other: Arc<Other>,
    step: TaskStep,
    ended: Receiver<Option<Error>>,
}

impl Running {
    fn new() -> Running {
        fn end<'g>(graph: &'g Graph, device: &str, op: &str, name: &str) -> OpBuilder<'g> {
            let node = graph.op(op).name(name).attr("tensor_name", name).attr("send_device", device);
            node.attr("recv_device", device).attr("send_device_incarnation", 1i64)
        }
        let host = Host::new(SessionConfig::default()).unwrap();
        let device = host.list_devices()[0].name.to_string();
        let graph = kolo_ops::graph();
        graph.device(device.as_str(), || {
            for i in 0..N_VALUES {
                let value = end(&graph, &device, "_Recv", &format!("there{i}")).attr("tensor_type", DType::F32).out();
                // It is not known to be short, so a network thread hands it over.
                let many = graph.op("Fill").input(graph.constant([1000i32])).input(value).out();
                let back = graph.op("Neg").input(if i == 0 { many } else { value }).out();
                end(&graph, &device, "_Send", &format!("back{i}")).input(back).build();
            }
        });
        let compiled = TaskSession::new(&host).compile(&graph.snapshot(), FrameIds::Mixed).unwrap();
        let (tell, ended) = channel();
        let other = Arc::new(Other::default());
        let on_end = Box::new(move |error| tell.send(error).expect("the test listens"));
        let step = compiled.start(1, other.clone(), StepKind::Whole, on_end);
        assert_eq!(other.waiters.lock().len(), N_VALUES);
        Running { host, other, step, ended }
    }

    fn deliver(&self) -> impl FnOnce() + Send + 'static {
        let waiters = std::mem::take(&mut *self.other.waiters.lock());
        move || waiters.into_iter().for_each(|waiter| waiter(Ok(Received::value(Tensor::scalar(1.0f32)))))
    }

    /// Asks for views, and counts them.
    fn look(&self) -> (impl FnOnce() + Send + 'static, Receiver<usize>) {
        let (step, (tell, views)) = (self.step.clone(), channel());
        (move || assert_eq!(step.look(move |view| tell.send(view.waits.len()).expect("the test listens")), 1), views)
    }

    /// Has a thread that may not wait do this, while this one holds the part.
    #[track_caller]
    fn while_held(&self, act: impl FnOnce() + Send + 'static) {
        let held = self.step.step.hold(0, MayWait::of_a_caller());
        let (done, is_done): (Sender<()>, _) = channel();
        let network = std::thread::spawn(move || {
            act();
            done.send(()).expect("the test listens");
        });
        is_done.recv_timeout(PATIENCE).expect("a network thread waits for a part");
        network.join().expect("it ends");
        assert!(self.ended.try_recv().is_err(), "its holder has not let go");
        // The work waits in the part, not in a thread.
        assert!(self.host.devices.units.iter().all(|unit| unit.pool.n_threads() == 0));
        drop(held);
    }
}

#[test]
fn network_threads_never_wait_for_a_part() {
    let running = Running::new();
    let (deliver, (look, views)) = (running.deliver(), running.look());
    running.while_held(|| {
        deliver();
        look();
    });
    assert_eq!(running.ended.recv_timeout(PATIENCE).unwrap(), None);
    assert_eq!(*running.other.n_sent.lock(), N_VALUES);
    assert_eq!(views.recv_timeout(PATIENCE).unwrap(), 0, "they all had come before");
    assert!(views.recv_timeout(PATIENCE).is_err(), "it answers once");
}

#[test]
fn a_thread_that_stops_a_step_never_waits_for_a_part() {
    let running = Running::new();
    let step = running.step.clone();
    running.while_held(move || step.fail(Error::aborted("enough")));
    let error = running.ended.recv_timeout(PATIENCE).unwrap().unwrap();
    assert!(error.message().contains("enough"), "{error}");
    assert_eq!(*running.other.n_sent.lock(), 0);
}

#[test]
fn a_question_is_answered_at_once_if_nobody_holds_the_part() {
    let running = Running::new();
    let (look, views) = running.look();
    look();
    assert_eq!(views.try_recv(), Ok(N_VALUES));
    running.deliver()();
    assert_eq!(running.ended.recv_timeout(PATIENCE).unwrap(), None);
}

#[test]
fn without_threads_in_the_pool_a_network_thread_runs_every_node_and_waits_for_nobody() {
    let running = Running::new();
    running.host.devices.units.iter().for_each(|unit| unit.pool.set_max_threads(0));
    let deliver = running.deliver();
    running.while_held(deliver);
    assert_eq!(running.ended.recv_timeout(PATIENCE).unwrap(), None);
    assert_eq!(*running.other.n_sent.lock(), N_VALUES);
}
