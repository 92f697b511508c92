//! One session type for both: a backend that forwards by name to a local session must behave as the local session does.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kolo_core::{Code, DType, Error, PartialShape, Result, Tensor};
use kolo_device::DeviceAttributes;
use kolo_graph::wire::graph::{ExportOptions, ImportOptions, export, import};
use kolo_graph::wire::proto::GraphDef;
use kolo_graph::{Graph, Nodes, Output, PlacementRules};
use kolo_ops::CancelToken;
use kolo_ops::queue::FifoQueue;
use kolo_runtime::{Host, PartialRun, RemoteRun, RemoteSession, RunMetadata, RunOptions, Session, SessionConfig};
use parking_lot::Mutex;

/// The other process: knows nodes only as bytes would carry them.
struct Loopback {
    host: Host,
    graph: Mutex<GraphDef>,
    session: Mutex<Option<Arc<Session>>>,
    partial: Mutex<HashMap<String, PartialRun>>,
    /// The `first_new` of every call.
    extended: Mutex<Vec<usize>>,
    timeouts: Mutex<Vec<Option<Duration>>>,
    fails_to_extend: Mutex<Option<Error>>,
    n_closed: AtomicUsize,
}

impl Loopback {
    fn new() -> Arc<Loopback> {
        Arc::new(Loopback {
            host: Host::new(SessionConfig::default()).expect("a CPU"),
            graph: Mutex::default(),
            session: Mutex::default(),
            partial: Mutex::default(),
            extended: Mutex::default(),
            timeouts: Mutex::default(),
            fails_to_extend: Mutex::default(),
            n_closed: AtomicUsize::new(0),
        })
    }

    fn session(&self) -> Arc<Session> {
        self.session.lock().clone().expect("extend comes first")
    }

    /// The graph as the other process has it.
    fn graph(&self) -> Graph {
        let g = kolo_ops::graph();
        import(&g, &self.graph.lock(), ImportOptions::default()).expect("what was exported is imported");
        g
    }
}

impl RemoteSession for Loopback {
    fn target(&self) -> &str {
        "grpc://loopback:2222"
    }

    fn extend(&self, nodes: &Nodes, first_new: usize) -> Result<()> {
        self.extended.lock().push(first_new);
        if let Some(error) = self.fails_to_extend.lock().take() {
            return Err(error);
        }
        *self.graph.lock() = export(nodes, ExportOptions::default())?;
        let g = self.graph();
        let mut session = self.session.lock();
        match &*session {
            Some(session) => session.extend(&g),
            None => {
                *session = Some(Arc::new(self.host.session(&g)?));
                Ok(())
            }
        }
    }

    fn run(&self, run: &RemoteRun<'_>) -> Result<(Vec<Tensor>, RunMetadata)> {
        self.timeouts.lock().push(run.options.timeout);
        let fetches: Vec<&str> = run.fetches.iter().map(String::as_str).collect();
        let feeds: Vec<(&str, Tensor)> = run.feeds.iter().map(|(name, value)| (*name, (*value).clone())).collect();
        let targets: Vec<&str> = run.targets.iter().map(String::as_str).collect();
        self.session().run_named_with(run.options, &fetches, &feeds, &targets)
    }

    fn begin_partial(&self, feeds: &[String], fetches: &[String], targets: &[String]) -> Result<String> {
        let g = self.graph();
        let outputs =
            |names: &[String]| -> Result<Vec<Output<'_>>> { names.iter().map(|name| g.output(name)).collect() };
        let targets = targets.iter().map(|name| g.operation(name)).collect::<Result<Vec<_>>>()?;
        let run = self.session().partial_run(&outputs(feeds)?, &outputs(fetches)?, &targets)?;
        let handle = format!("p{}", self.partial.lock().len());
        self.partial.lock().insert(handle.clone(), run);
        Ok(handle)
    }

    fn run_partial(&self, handle: &str, run: &RemoteRun<'_>) -> Result<Vec<Tensor>> {
        let g = self.graph();
        let fetches = run.fetches.iter().map(|name| g.output(name)).collect::<Result<Vec<_>>>()?;
        let feeds = run.feeds.iter().map(|(name, value)| Ok((g.output(name)?, (*value).clone())));
        let feeds = feeds.collect::<Result<Vec<_>>>()?;
        self.partial.lock().get_mut(handle).expect("the handle was given out").run(&fetches, &feeds)
    }

    fn list_devices(&self) -> Result<Vec<DeviceAttributes>> {
        Ok(self.session().list_devices())
    }

    fn reset(&self, containers: &[String]) -> Result<()> {
        self.host.reset(containers);
        Ok(())
    }

    fn close(&self) {
        self.n_closed.fetch_add(1, Ordering::Relaxed);
        if let Some(session) = self.session.lock().take() {
            session.close();
        }
    }
}

fn connect(g: &Graph, config: SessionConfig) -> (Arc<Session>, Arc<Loopback>) {
    let there = Loopback::new();
    (Arc::new(Session::remote(g, there.clone(), config).expect("the graph is sound")), there)
}

#[test]
fn runs_fetch_feed_and_keep_state_over_there() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [None]);
    let v = g.variable("v", [1.0f32, 2.0]);
    let read = v.read();
    let y = x * read + 0.5;
    let add = v.assign_add(x);
    let init = g.global_variables_initializer();
    let (session, there) = connect(&g, SessionConfig::default());
    assert!(session.is_remote());
    session.run_op(init).unwrap();
    let one = Tensor::from([1.0f32, 1.0]);
    assert_eq!(session.run(&[y, x], &[(x, one.clone())], &[]).unwrap()[0], Tensor::from([1.5f32, 2.5]));
    session.run(&[], &[(x, one.clone())], &[add]).unwrap();
    assert_eq!(session.run_named(&[&read.name()], &[], &[]).unwrap(), [Tensor::from([2.0f32, 3.0])]);
    let callable = session.make_callable(&[x], &[y], &[]).unwrap();
    assert_eq!(callable.call(&[&one]).unwrap(), [Tensor::from([2.5f32, 3.5])]);
    assert_eq!(callable.call(&[]).unwrap_err().code(), Code::InvalidArgument);
    let traced = RunOptions { trace: true, ..RunOptions::default() };
    let (_, metadata) = callable.call_with(&traced, &[&one]).unwrap();
    assert!(metadata.trace.nodes.iter().any(|node| node.op == "Mul"), "the trace comes back");
    assert_eq!(session.list_devices().len(), 1);
    assert_eq!(*there.extended.lock(), [0]);
    // Another session on the same host finds the variable, until it is reset.
    session.try_reset(&[]).unwrap();
    assert_eq!(session.fetch(read).unwrap_err().code(), Code::FailedPrecondition);
}

#[test]
fn feeds_are_refused_before_they_travel() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("weights", [None, Some(2)]);
    let y = x * 2.0;
    let (session, there) = connect(&g, SessionConfig::default());
    for (value, text) in [
        (Tensor::from([1.0f32]), "Cannot feed value of shape [1]"),
        (Tensor::from([[1i32, 2]]), "Cannot feed value of type int32"),
    ] {
        let error = session.run(&[y], &[(x, value)], &[]).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.to_string().contains(text), "{error}");
    }
    let error = session.run_named(&["wieghts"], &[], &[]).unwrap_err();
    assert!(error.to_string().contains("did you mean 'weights'?"), "{error}");
    assert!(there.timeouts.lock().is_empty(), "nothing was sent");
    // What only the server can know comes back with its code and text.
    let error = session.fetch(y).unwrap_err();
    assert!(error.to_string().contains("You must feed a value for placeholder tensor 'weights'"), "{error}");
}

#[test]
fn only_new_nodes_are_sent_and_a_failed_extension_is_sent_again() {
    let g = kolo_ops::graph();
    let a = g.constant(2.0f32);
    let (session, there) = connect(&g, SessionConfig::default());
    session.extend(&g).unwrap();
    let n = g.nodes().len();
    let b = a * 3.0;
    assert_eq!(session.fetch(b).unwrap_err().code(), Code::NotFound);
    *there.fails_to_extend.lock() = Some(Error::unavailable("nobody there"));
    assert_eq!(session.extend(&g).unwrap_err().code(), Code::Unavailable);
    assert_eq!(session.fetch(b).unwrap_err().code(), Code::NotFound, "the client knows what the server knows");
    session.extend(&g).unwrap();
    assert_eq!(session.fetch(b).unwrap(), Tensor::scalar(6.0f32));
    assert_eq!(*there.extended.lock(), [0, n, n], "nothing new is not sent");
    let other = kolo_ops::graph();
    other.constant(1i32);
    assert_eq!(session.extend(&other).unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn partial_runs_go_by_handle() {
    let g = kolo_ops::graph();
    let a = g.placeholder::<f32>("a", PartialShape::scalar());
    let b = g.placeholder::<f32>("b", PartialShape::scalar());
    let (sum, product) = (a + 1.0, (a + 1.0) * b);
    let (session, _there) = connect(&g, SessionConfig::default());
    let mut run = session.partial_run(&[a, b], &[sum, product], &[]).unwrap();
    let error = run.run(&[product], &[(a, Tensor::scalar(1.0f32))]).unwrap_err();
    assert!(error.to_string().contains("depends on 'b:0'"), "{error}");
    assert_eq!(run.run(&[sum], &[(a, Tensor::scalar(1.0f32))]).unwrap(), [Tensor::scalar(2.0f32)]);
    assert_eq!(run.run(&[sum], &[]).unwrap_err().code(), Code::InvalidArgument, "taken already");
    assert_eq!(run.run(&[product], &[(b, Tensor::scalar(5.0f32))]).unwrap(), [Tensor::scalar(10.0f32)]);
}

#[test]
fn what_servers_decide_is_refused_with_where_the_session_runs() {
    let g = kolo_ops::graph();
    let (session, there) = connect(&g, SessionConfig::default());
    let error = session.local().err().expect("it is remote");
    assert_eq!(error.code(), Code::FailedPrecondition);
    for part in ["runs on grpc://loopback:2222", "kolo doctor", "log_device_placement"] {
        assert!(error.message().contains(part), "'{part}' is missing in: {error}");
    }
    // The process where it lives can be asked.
    assert_eq!(there.session().local().unwrap().threads().len(), session.list_devices().len());
}

#[test]
fn limits_rules_and_cancellation_travel() {
    let g = kolo_ops::graph();
    let queue = FifoQueue::new(&g, "q", &[(DType::F32, PartialShape::scalar())], Some(10));
    let wait = queue.dequeue()[0];
    g.placeholder::<f32>("pinned", PartialShape::scalar());
    let config = SessionConfig {
        placement_rules: PlacementRules::parse("pinned -> /cpu:0", "rules").unwrap(),
        operation_timeout: Some(Duration::from_millis(20)),
        ..SessionConfig::default()
    };
    let (session, there) = connect(&g, config);
    let sent = there.graph();
    assert_eq!(sent.nodes().node(sent.operation("pinned").unwrap().id()).device.to_string(), "/device:CPU:0");
    assert_eq!(session.fetch(wait).unwrap_err().code(), Code::DeadlineExceeded);
    let cancel = CancelToken::new();
    cancel.cancel(Error::cancelled("enough"));
    let options = RunOptions { timeout: Some(Duration::from_secs(60)), cancel: Some(cancel), ..RunOptions::default() };
    assert_eq!(session.run_with(&options, &[wait], &[], &[]).unwrap_err().code(), Code::Cancelled);
    assert_eq!(*there.timeouts.lock(), [Some(Duration::from_millis(20)), Some(Duration::from_secs(60))]);
}

#[test]
fn the_end_is_told_once() {
    let g = kolo_ops::graph();
    let a = g.constant(2.0f32);
    let (session, there) = connect(&g, SessionConfig::default());
    let callable = session.make_callable(&[], &[a], &[]).unwrap();
    session.close();
    session.close();
    for error in [session.fetch(a).unwrap_err(), callable.call(&[]).unwrap_err(), session.extend(&g).unwrap_err()] {
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.to_string().contains("closed"), "{error}");
    }
    drop((session, callable));
    assert_eq!(there.n_closed.load(Ordering::Relaxed), 1);
    // A session whose graph is refused is closed too.
    let there = Loopback::new();
    *there.fails_to_extend.lock() = Some(Error::invalid_argument("no such graph"));
    assert!(Session::remote(&g, there.clone(), SessionConfig::default()).is_err());
    assert_eq!(there.n_closed.load(Ordering::Relaxed), 1);
}
