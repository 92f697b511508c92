//! Steps that no thread waits in, as tasks of a cluster run them.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Graph, OpBuilder};
use kolo_ops::{Received, Rendezvous, RendezvousKey};
use kolo_runtime::{FrameIds, Host, SessionConfig, StepKind, StepRendezvous, TaskGraph, TaskSession};
use parking_lot::Mutex;

type Waiter = Box<dyn FnOnce(Result<Received>) + Send>;

/// A value on its way back, and who waits for it.
type Echoed = (Waiter, Received);

/// Gives `start` at once, and what is sent as `ping` as `pong`, by another thread, as another task would.
struct Echo {
    met: Mutex<Met>,
    echo: mpsc::Sender<Echoed>,
}

/// Either may come first.
#[derive(Default)]
struct Met {
    ping: Option<Received>,
    pong: Option<Waiter>,
}

impl Echo {
    fn answer(&self, met: &mut Met) {
        match (met.pong.take(), met.ping.take()) {
            (Some(waiter), Some(value)) => self.echo.send((waiter, value)).expect("the echo listens"),
            (pong, ping) => *met = Met { ping, pong },
        }
    }
}

impl Rendezvous for Echo {
    fn send(&self, key: RendezvousKey, value: Received) -> Result<()> {
        if key.part(3) == "ping" {
            let mut met = self.met.lock();
            met.ping = Some(value);
            self.answer(&mut met);
        }
        Ok(())
    }

    fn recv(&self, key: RendezvousKey, done: Waiter) {
        if key.part(3) == "start" {
            return done(Ok(Received::value(Tensor::scalar(1.0f32))));
        }
        let mut met = self.met.lock();
        met.pong = Some(done);
        self.answer(&mut met);
    }
}

impl StepRendezvous for Echo {
    fn abort(&self, reason: Error) {
        if let Some(waiter) = self.met.lock().pong.take() {
            waiter(Err(reason));
        }
    }
}

/// One end of a transfer.
fn end<'g>(graph: &'g Graph, device: &str, op: &str, name: &str) -> OpBuilder<'g> {
    let node = graph.op(op).name(name).attr("tensor_name", name).attr("send_device", device);
    node.attr("recv_device", device).attr("send_device_incarnation", 1i64)
}

/// `start` → one node that takes longer than a runner's patience, and some that do not → `ping`; `pong` → a few → `end`.
fn there_and_back(host: &Host) -> TaskGraph {
    let graph = kolo_ops::graph();
    let device = host.list_devices()[0].name.to_string();
    graph.device(device.as_str(), || {
        for (from, to, n_elements) in [("start", "ping", 1 << 21), ("pong", "end", 1)] {
            let first = end(&graph, &device, "_Recv", from).attr("tensor_type", DType::F32).out();
            let many = graph.op("Fill").input(graph.constant([n_elements])).input(first).build();
            let one = graph.control_dependencies(&[many], || graph.op("Neg").input(first).out());
            let last = (0..80).fold(one, |value, _| graph.op("Neg").input(value).out());
            end(&graph, &device, "_Send", to).input(last).build();
        }
    });
    TaskSession::new(host).compile(&graph.snapshot(), FrameIds::Mixed).expect("the graph is whole")
}

/// A runner that has run for long hands over to a thread of its device. Whatever arrives at that moment must find somebody
/// to run it: several threads on few cores stop at every point of the hand-over sooner or later.
#[test]
fn what_arrives_while_a_runner_hands_over_is_run() {
    let host = Host::new(SessionConfig::default()).unwrap();
    let graph = Arc::new(there_and_back(&host));
    let (echo, echoed) = mpsc::channel::<Echoed>();
    let answering = std::thread::spawn(move || {
        for (waiter, value) in echoed {
            waiter(Ok(value));
        }
    });
    let running: Vec<_> = (0..4u64)
        .map(|thread| {
            let (graph, echo) = (graph.clone(), echo.clone());
            std::thread::spawn(move || {
                for step in 0..250 {
                    let (ended, end) = mpsc::channel();
                    let echo = Echo { met: Mutex::default(), echo: echo.clone() };
                    let on_end = Box::new(move |error| ended.send(error).expect("the test listens"));
                    let running = graph.start(thread << 32 | step, Arc::new(echo), StepKind::Whole, on_end);
                    let error = end.recv_timeout(Duration::from_secs(20)).unwrap_or_else(|_| {
                        let (tell, views) = mpsc::channel();
                        running.look(move |view| _ = tell.send(view.n_unattended));
                        let n: usize = views.iter().sum();
                        panic!("step {step} stands still: {n} nodes are ready and nobody runs them");
                    });
                    assert_eq!(error, None);
                }
            })
        })
        .collect();
    drop(echo);
    let n_failed = running.into_iter().map(|thread| thread.join()).filter(std::result::Result::is_err).count();
    assert_eq!(n_failed, 0, "threads whose step stood still");
    answering.join().expect("the echo has heard the last step");
}
