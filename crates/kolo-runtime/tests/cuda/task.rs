//! A task of a cluster on a GPU: its parts are fused and captured between what it receives and what it sends.

use std::collections::HashMap;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use kolo_core::{Error, Result, Tensor};
use kolo_graph::{Graph, OpBuilder, Output};
use kolo_ops::{Received, Rendezvous, RendezvousKey};
use kolo_runtime::{FrameIds, Host, LocalRendezvous, StepKind, StepRendezvous, TaskGraph, TaskSession};
use parking_lot::Mutex;

use super::*;

type Waiter = Box<dyn FnOnce(Result<Received>) + Send>;

/// Another task: gives what is asked for by name, and keeps what it is sent. What it does not know stays in this one.
struct Others {
    gives: HashMap<String, Tensor>,
    /// Given only once the other has been sent.
    after: HashMap<String, String>,
    kept: Mutex<HashMap<String, Tensor>>,
    /// Sent, and not flushed yet.
    buffered: Mutex<Vec<(String, Tensor)>>,
    waiting: Mutex<Vec<(String, Waiter)>>,
    local: LocalRendezvous,
}

impl Others {
    fn answer(&self) {
        let ready: Vec<(String, Waiter)> = {
            let (kept, mut waiting) = (self.kept.lock(), self.waiting.lock());
            let is_ready = |name: &str| self.after.get(name).is_none_or(|first| kept.contains_key(first));
            let (ready, rest) = waiting.drain(..).partition(|(name, _)| is_ready(name));
            *waiting = rest;
            ready
        };
        for (name, done) in ready {
            done(Ok(Received::value(self.gives[&name].clone())));
        }
    }
}

impl Rendezvous for Others {
    fn send(&self, key: RendezvousKey, value: Received) -> Result<()> {
        let name = key.part(3).to_owned();
        if name.starts_with("edge_") {
            return self.local.send(key, value);
        }
        self.buffered.lock().push((name, value.tensor));
        Ok(())
    }

    fn recv(&self, key: RendezvousKey, done: Waiter) {
        let name = key.part(3).to_owned();
        if !self.gives.contains_key(&name) {
            return self.local.recv(key, done);
        }
        self.waiting.lock().push((name, done));
        self.answer();
    }
}

impl StepRendezvous for Others {
    fn abort(&self, reason: Error) {
        self.local.abort(reason.clone());
        for (_, done) in self.waiting.lock().drain(..) {
            done(Err(reason.clone()));
        }
    }

    fn flush(&self) {
        let sent = std::mem::take(&mut *self.buffered.lock());
        self.kept.lock().extend(sent);
        self.answer();
    }
}

/// One end of a transfer with another task, as a master writes it.
fn end<'g>(g: &'g Graph, op: &str, name: &str, round: i64, (from, to): (&str, &str)) -> OpBuilder<'g> {
    let node = g.op(op).name(name).attr("tensor_name", name).attr("send_device", from).attr("recv_device", to);
    let node = node.attr("send_device_incarnation", 1i64).attr("client_terminated", false);
    node.attr("_kolo_round", round).attr("_kolo_conditional", false)
}

/// `x` from another task, some work, `half` to it; `back` from it, more work, `whole` to it.
fn there_and_back(host: &Host, task: &TaskSession) -> TaskGraph {
    let g = kolo_ops::graph();
    let devices = host.list_devices();
    let gpu = devices.iter().find(|device| &*device.name.kind == "GPU").unwrap().name.to_string();
    let other = "/job:ps/replica:0/task:0/device:CPU:0";
    g.device(gpu.as_str(), || {
        let recv =
            |name: &str, round| end(&g, "_Recv", name, round, (other, &gpu)).attr("tensor_type", DType::F32).out();
        let send = |name: &str, round, value: Output<'_>| {
            let value = Output::new(&g, value.endpoint());
            end(&g, "_Send", name, round, (&gpu, other)).input(value).build();
        };
        let work = |x: Output<'_>| {
            let x = Output::new(&g, x.endpoint());
            let mut y = g.op("Tanh").input(matmul(x, x)).out();
            for _ in 0..3 {
                y = relu(matmul(y, x)) + x;
            }
            y
        };
        let half = work(recv("x", 1));
        send("half", 1, half);
        let whole = work(recv("back", 3) + half);
        send("whole", 3, whole);
    });
    g.check().unwrap();
    task.compile(&g.snapshot(), FrameIds::default()).unwrap()
}

#[test]
fn a_task_captures_between_its_transfers() {
    on_gpu(|| {
        let steps = |options: GpuOptions| {
            let host = Host::new(config(GpuOptions { full_precision: true, ..options })).unwrap();
            let task = TaskSession::new(&host);
            let graph = there_and_back(&host, &task);
            let mut all = Vec::new();
            for step in 0..12u32 {
                let others = Arc::new(Others {
                    gives: [("x", step), ("back", step + 100)]
                        .map(|(name, seed)| (name.to_owned(), wavy(&[8, 8], seed)))
                        .into(),
                    // The second value depends on the first result: a segment with both would wait for itself.
                    after: [("back".to_owned(), "half".to_owned())].into(),
                    kept: Mutex::default(),
                    buffered: Mutex::default(),
                    waiting: Mutex::default(),
                    local: LocalRendezvous::default(),
                });
                let (ended, wait) = mpsc::channel();
                let on_end = Box::new(move |error| drop(ended.send(error)));
                if graph.count_run() {
                    graph.split();
                }
                let running = graph.start(u64::from(step), others.clone(), StepKind::Whole, on_end);
                let error = wait.recv_timeout(Duration::from_secs(60));
                assert_eq!(error.map(|error| error.map(|error| error.to_string())), Ok(None), "step {step}");
                drop(running);
                let kept = others.kept.lock();
                all.push(["half", "whole"].map(|name| kept[name].data::<f32>().unwrap().to_vec()));
            }
            (all, graph.captures())
        };
        let (plain, _) = steps(GpuOptions { no_capture: true, no_fusion: true, ..GpuOptions::default() });
        let (captured, report) = steps(GpuOptions::default());
        assert_eq!(report.segments.len(), 2, "{report:?}");
        assert!(report.segments.iter().all(Result::is_ok), "{report:?}");
        for (step, (plain, captured)) in plain.iter().zip(&captured).enumerate() {
            for (a, b) in plain.iter().flatten().zip(captured.iter().flatten()) {
                assert!((a - b).abs() <= 1e-3 * a.abs().max(1.0), "step {step}: {a} became {b}");
            }
        }
    });
}
