//! Traces of steps: which node ran when, where and for how long; export as a Chrome/Perfetto trace.

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::DeviceName;
use kolo_graph::{CostModel, Node};
use kolo_ops::{KernelDef, KernelMaker, Value, find_op};
use parking_lot::Mutex;

/// One node's run.
#[derive(Clone, Debug)]
pub struct NodeTrace {
    /// The node's name.
    pub node: Arc<str>,
    /// Its op.
    pub op: &'static str,
    /// The device it ran on.
    pub device: Arc<str>,
    /// The thread it ran on.
    pub thread: String,
    /// When it began, after the start of the step.
    pub start: Duration,
    /// How long it took; for an asynchronous node, until it completed.
    pub duration: Duration,
    /// Bytes of its outputs.
    pub n_bytes: usize,
}

/// All nodes of a step.
#[derive(Clone, Debug, Default)]
pub struct StepTrace {
    /// In the order in which they ended.
    pub nodes: Vec<NodeTrace>,
}

impl StepTrace {
    /// Adds the times of this step's nodes to a cost model. Nodes that wait for others (transfers, queues) are skipped:
    /// their time is not their cost. A fused node counts for the last of its nodes.
    pub fn add_to(&self, costs: &mut CostModel) {
        let waits = |op: &str| {
            find_op(op).is_ok_and(|op| {
                let is_async = |kernel: &KernelDef| matches!(kernel.make, KernelMaker::Async(_));
                op.def.transfer.is_some() || op.kernels.iter().any(is_async)
            })
        };
        for node in self.nodes.iter().filter(|node| !waits(node.op)) {
            let kind = DeviceName::parse(&node.device).map(|name| name.kind);
            let kind = kind.as_deref().unwrap_or("CPU");
            costs.record(&node.node, node.op, kind, node.duration.as_secs_f64());
        }
    }

    /// The trace in Chrome's event format, which Perfetto reads too: one process per device, one row per thread.
    pub fn to_chrome_json(&self) -> String {
        let mut devices: Vec<&str> = self.nodes.iter().map(|node| &*node.device).collect();
        devices.sort_unstable();
        devices.dedup();
        let mut threads: Vec<&str> = self.nodes.iter().map(|node| node.thread.as_str()).collect();
        threads.sort_unstable();
        threads.dedup();
        let mut json = String::from("{\"traceEvents\":[");
        for (pid, device) in devices.iter().enumerate() {
            let _ = write!(
                json,
                "{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{pid},\"args\":{{\"name\":{}}}}},",
                quote(device)
            );
        }
        for node in &self.nodes {
            let pid = devices.binary_search(&&*node.device).unwrap_or(0);
            let tid = threads.binary_search(&node.thread.as_str()).unwrap_or(0);
            let _ = write!(
                json,
                "{{\"ph\":\"X\",\"name\":{},\"cat\":{},\"pid\":{pid},\"tid\":{tid},\"ts\":{:.3},\"dur\":{:.3},\"args\":{{\"bytes\":{},\"thread\":{}}}}},",
                quote(&node.node),
                quote(node.op),
                node.start.as_secs_f64() * 1e6,
                node.duration.as_secs_f64() * 1e6,
                node.n_bytes,
                quote(&node.thread)
            );
        }
        if json.ends_with(',') {
            json.pop();
        }
        json.push_str("]}");
        json
    }
}

/// A JSON string.
fn quote(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                quoted.push('\\');
                quoted.push(c);
            }
            c if c < ' ' => {
                let _ = write!(quoted, "\\u{:04x}", c as u32);
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// Collects the trace of a running step.
pub(crate) struct TraceSink {
    start: Instant,
    nodes: Mutex<Vec<NodeTrace>>,
}

impl TraceSink {
    pub fn new(start: Instant) -> TraceSink {
        TraceSink { start, nodes: Mutex::default() }
    }

    pub fn record(&self, node: &Node, device: &Arc<str>, start: Instant, outputs: &[Value]) {
        let n_bytes = outputs
            .iter()
            .map(|output| match output {
                Value::Tensor(tensor) => tensor.n_bytes(),
                Value::Reference(_) | Value::Empty => 0,
            })
            .sum();
        self.push(node.name.clone(), node.def.name, device, start, n_bytes);
    }

    /// A copy of a feed to a device or of a fetch from one. Other copies are nodes: `_Send` and `_Recv`.
    pub fn record_copy(&self, name: String, device: &Arc<str>, start: Instant, n_bytes: usize) {
        self.push(name.into(), "_Copy", device, start, n_bytes);
    }

    fn push(&self, node: Arc<str>, op: &'static str, device: &Arc<str>, start: Instant, n_bytes: usize) {
        let duration = start.elapsed();
        let thread = std::thread::current();
        let thread = thread.name().map_or_else(|| format!("{:?}", thread.id()), str::to_owned);
        let start = start.saturating_duration_since(self.start);
        self.nodes.lock().push(NodeTrace { node, op, device: device.clone(), thread, start, duration, n_bytes });
    }

    pub fn take(&self) -> Vec<NodeTrace> {
        std::mem::take(&mut self.nodes.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted() {
        let node = NodeTrace {
            node: "a\"b".into(),
            op: "Add",
            device: "/cpu:0".into(),
            thread: "main".into(),
            start: Duration::from_micros(5),
            duration: Duration::from_nanos(1500),
            n_bytes: 4,
        };
        let json = StepTrace { nodes: vec![node] }.to_chrome_json();
        assert!(json.contains(r#""name":"a\"b","cat":"Add","pid":0,"tid":0,"ts":5.000,"dur":1.500"#), "{json}");
        assert!(json.starts_with('{') && json.ends_with("]}"));
    }
}
