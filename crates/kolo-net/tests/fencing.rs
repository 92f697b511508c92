//! A task that was restarted is another one: what was meant for its former life is refused.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use kolo_graph::wire::graph::{ExportOptions, export};
use kolo_net::grpc::{GrpcPeer, LinkOptions};
use kolo_net::proto::*;
use kolo_net::services::WorkerService as _;
use kolo_net::tls::Security;
use kolo_net::{ClusterSpec, Connect as _, Server, ServerConfig};
use kolo_runtime::Session;
use tokio::runtime::Runtime;

/// Accepts clients without a token.
fn open() -> ServerConfig {
    let security = Security { insecure_loopback: true, ..Security::default() };
    ServerConfig { security, ..ServerConfig::default() }
}

/// Listens where another server has just ended.
fn listen(address: &str) -> TcpListener {
    let began = Instant::now();
    loop {
        match TcpListener::bind(address) {
            Ok(listener) => return listener,
            Err(error) => assert!(began.elapsed() < Duration::from_secs(20), "{address}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn what_was_meant_for_a_former_life_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let spec = ClusterSpec::parse(&format!("ps={address}")).unwrap();
    let first = Server::on(listener, &spec, "ps", 0, open()).unwrap();
    let runtime = Runtime::new().unwrap();
    let options = LinkOptions { deadline: Some(Duration::from_secs(20)), ..LinkOptions::default() };
    let peer = GrpcPeer::new("/job:ps/replica:0/task:0", &address, options, runtime.handle().clone());
    let incarnation = || {
        let status = runtime.block_on(peer.get_status(GetStatusRequest {})).unwrap();
        status.device_attributes[0].incarnation
    };
    let g = kolo_ops::graph();
    let _ = g.device("/job:ps/replica:0/task:0/device:CPU:0", || g.constant(1.0f32));
    let graph = export(&g.snapshot(), ExportOptions::default()).unwrap();
    let register = |session: &str| -> Result<String> {
        let request = RegisterGraphRequest {
            session_handle: session.to_owned(),
            create_worker_session_called: !session.is_empty(),
            graph_def: Some(graph.clone()),
            ..RegisterGraphRequest::default()
        };
        runtime.block_on(peer.register_graph(request)).map(|response| response.graph_handle)
    };
    let run = |session: &str, graph: &str, step_id: i64| {
        let request = RunGraphRequest {
            session_handle: session.to_owned(),
            create_worker_session_called: !session.is_empty(),
            graph_handle: graph.to_owned(),
            step_id,
            request_id: step_id,
            ..RunGraphRequest::default()
        };
        runtime.block_on(peer.run_graph(request)).map(drop)
    };
    let recv = |incarnation: u64, step_id: i64| -> Error {
        let device = "/job:ps/replica:0/task:0/device:CPU:0";
        let rendezvous_key = format!("{device};{incarnation:016x};{device};edge_1_x;0:0");
        let request =
            RecvTensorRequest { rendezvous_key, step_id, request_id: step_id, ..RecvTensorRequest::default() };
        runtime.block_on(peer.recv_tensor(request)).unwrap_err()
    };

    let before = incarnation();
    let announced = CreateWorkerSessionRequest { session_handle: "s".into(), ..CreateWorkerSessionRequest::default() };
    runtime.block_on(peer.create_worker_session(announced)).unwrap();
    let (of_session, of_none) = (register("s").unwrap(), register("").unwrap());
    assert_eq!(run("s", &of_session, 11), Ok(()));
    assert_eq!(run("", &of_none, 12), Ok(()));
    drop(first);

    let _second = Server::on(listen(&address), &spec, "ps", 0, open()).unwrap();
    assert_ne!(incarnation(), before);
    // Masters that do not announce their sessions share one, where a handle of somebody else must not be met by chance.
    register("").unwrap();
    for refused in [run("s", &of_session, 21), run("", &of_none, 22), register("s").map(drop), Err(recv(before, 23))] {
        let error = refused.unwrap_err();
        assert_eq!(error.code(), Code::Aborted, "{error}");
        assert!(error.message().contains("restarted"), "{error}");
    }
}

#[test]
fn a_session_on_a_task_that_was_restarted_ends_and_the_next_one_finds_no_values() {
    let listeners: Vec<TcpListener> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<String> = listeners.iter().map(|l| l.local_addr().unwrap().to_string()).collect();
    let spec = ClusterSpec::parse(&format!("ps={};worker={}", addresses[0], addresses[1])).unwrap();
    let mut listeners = listeners.into_iter();
    let ps = Server::on(listeners.next().unwrap(), &spec, "ps", 0, open()).unwrap();
    let worker = Server::on(listeners.next().unwrap(), &spec, "worker", 0, open()).unwrap();
    let g = kolo_ops::graph();
    let v = g.device("/job:ps/task:0", || g.variable("v", 3.0f32));
    let y = g.device("/job:worker/task:0", || v.read() + 1.0);
    let init = g.global_variables_initializer();
    let session = Session::connect(&worker.target(), &g).unwrap();
    session.run_op(init).unwrap();
    assert_eq!(session.fetch(y).unwrap().scalar_value::<f32>().unwrap(), 4.0);
    drop(ps);
    let _ps = Server::on(listen(&addresses[0]), &spec, "ps", 0, open()).unwrap();
    for _ in 0..3 {
        let error = session.fetch(y).unwrap_err();
        assert!([Code::Aborted, Code::Unavailable].contains(&error.code()), "{error:?}");
    }
    let session = Session::connect(&worker.target(), &g).unwrap();
    assert_eq!(session.fetch(y).unwrap_err().code(), Code::FailedPrecondition);
    session.run_op(init).unwrap();
    assert_eq!(session.fetch(y).unwrap().scalar_value::<f32>().unwrap(), 4.0);
}
