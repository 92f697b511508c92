//! Whatever bytes a stranger or a broken peer sends, a server that runs answers or hangs up, and goes on.
//!
//! `PROPTEST_CASES=100000 cargo test -p kolo-net --test hostile` looks for longer.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kolo_core::{Result, Tensor};
use kolo_graph::Graph;
use kolo_graph::wire::graph::{ExportOptions, export};
use kolo_graph::wire::proto::GraphDef;
use kolo_net::grpc::{GrpcMaster, LinkOptions};
use kolo_net::proto::*;
use kolo_net::services::MasterService as _;
use kolo_net::tensor_wire::WireTensor;
use kolo_net::tls::Security;
use kolo_net::{ClusterSpec, Connect as _, Server, ServerConfig};
use kolo_ops::io::FileAccess;
use kolo_runtime::{Session, SessionConfig};
use proptest::prelude::*;
use prost::Message;
use tokio::runtime::Runtime;

const HELLO: &[u8] = b"KOLO/1\r\n";
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// No answer takes longer; a server that gives none in this time hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// Cases of each test; more if the environment asks for them.
fn cases(usual: u32) -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok());
    ProptestConfig {
        cases: asked.unwrap_or(usual),
        max_shrink_iters: 50,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// Panics anywhere in this process: a server's tasks catch theirs, and nobody would see them otherwise.
static PANICS: AtomicUsize = AtomicUsize::new(0);

/// The server that has to bear it all, alone in its cluster.
struct Victim {
    server: Server,
    cluster: ClusterSpec,
    runtime: Runtime,
}

fn victim() -> &'static Victim {
    static VICTIM: OnceLock<Victim> = OnceLock::new();
    VICTIM.get_or_init(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            usual(panic);
        }));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let cluster = ClusterSpec::parse(&format!("ps={}", listener.local_addr().unwrap())).unwrap();
        let nowhere: [&str; 0] = [];
        let files = FileAccess::under(nowhere).unwrap();
        let security = Security { insecure_loopback: true, ..Security::default() };
        let config =
            ServerConfig { files, security, ready_deadline: Duration::from_secs(5), ..ServerConfig::default() };
        let server = Server::on(listener, &cluster, "ps", 0, config).unwrap();
        Victim { server, cluster, runtime: Runtime::new().unwrap() }
    })
}

/// The server works for a client that means well.
fn still_works() {
    let g = kolo_ops::graph();
    let y = g.constant(2.0f32) * 3.0;
    let target = format!("grpc://localhost:{}", victim().server.address().port());
    let config = SessionConfig { operation_timeout: Some(PATIENCE), ..SessionConfig::default() };
    let session = Session::connect_with(&target, &g, config).unwrap();
    assert_eq!(session.fetch(y).unwrap().scalar_value::<f32>().unwrap(), 6.0);
    assert_eq!(PANICS.load(Ordering::Relaxed), 0, "something panicked");
}

/// Sends bytes, says that no more will come, and reads until the server hangs up.
fn send(bytes: &[u8]) {
    let mut stream = TcpStream::connect(victim().server.address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // The server may hang up before it has all.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut sink = [0; 4096];
    loop {
        match stream.read(&mut sink) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                panic!("the server neither answers nor hangs up")
            }
            Err(_) => return,
        }
    }
}

/// Sends a greeting and frames, and reads until so many were answered, or the server hung up, or was silent for a moment.
/// Gives the kinds of answers by call.
fn ask(frames: &[u8], n_answers: usize) -> BTreeMap<u64, u8> {
    let mut stream = TcpStream::connect(victim().server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let _ = stream.write_all(&[&greeting(), frames].concat());
    let mut answers = BTreeMap::new();
    let mut read = |n: usize| {
        let mut bytes = vec![0; n];
        stream.read_exact(&mut bytes).ok().map(|()| bytes)
    };
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte));
    let Some(hello) = read(HELLO.len() + 4) else { return answers };
    if read(number(&hello[HELLO.len()..]) as usize).is_none() {
        return answers;
    }
    while answers.len() < n_answers {
        let Some(header) = read(24) else { break };
        answers.insert(number(&header[8..16]), header[0]);
        if read((number(&header[4..8]) + number(&header[16..24])) as usize).is_none() {
            break;
        }
    }
    answers
}

/// A greeting as a task of the same cluster sends it.
#[derive(Clone, PartialEq, prost::Message)]
struct Greeting {
    #[prost(string, tag = "1")]
    job: String,
    #[prost(uint32, tag = "2")]
    task: u32,
    #[prost(message, optional, tag = "3")]
    cluster: Option<ClusterDef>,
}

fn greeting() -> Vec<u8> {
    let greeting = Greeting { job: "ps".into(), task: 0, cluster: Some(victim().cluster.to_def()) }.encode_to_vec();
    let mut bytes = HELLO.to_vec();
    bytes.extend((greeting.len() as u32).to_le_bytes());
    bytes.extend(greeting);
    bytes
}

fn frame(kind: u8, method: u8, call: u64, head: &[u8], n_body: u64) -> Vec<u8> {
    let mut bytes = vec![kind, method, 0, 0];
    bytes.extend((head.len() as u32).to_le_bytes());
    bytes.extend(call.to_le_bytes());
    bytes.extend(n_body.to_le_bytes());
    bytes.extend(head);
    bytes
}

/// A graph with several types, a loop of references and things to get wrong, none of which makes large tensors.
fn graph_def() -> GraphDef {
    let g: Graph = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [None, Some(2)]);
    let w = g.variable("w", [[1.0f32, 2.0], [3.0, 4.0]]);
    let y = kolo_ops::math::matmul::matmul(x, w.read());
    let _ = g.op("Reshape").name("r").input(y).input(g.constant([-1i32])).out();
    let _ = g.op("Concat").name("c").input(g.constant(0i32)).inputs([y, y]).out();
    let _ = g.constant(Tensor::from_strings([2], vec!["a".into(), "b".into()]).unwrap());
    let mut def = export(&g.snapshot(), ExportOptions::default()).unwrap();
    for node in &mut def.node {
        node.device = "/job:ps/replica:0/task:0/device:CPU:0".to_owned();
    }
    def
}

/// Requests that a task would take, encoded: method number and head. The last one ends the step that others wait in.
fn requests() -> &'static Vec<(u8, Vec<u8>)> {
    static REQUESTS: OnceLock<Vec<(u8, Vec<u8>)>> = OnceLock::new();
    REQUESTS.get_or_init(|| {
        let device = "/job:ps/replica:0/task:0/device:CPU:0";
        let incarnation = victim().server.devices()[0].incarnation;
        let key = format!("{device};{incarnation:016x};{device};edge_1_x;0:0");
        let tensor = WireTensor::new(Tensor::from([[1.0f32, 2.0]])).unwrap();
        let named = NamedTensorProto { name: key.clone(), tensor: Some(tensor) };
        let register = RegisterGraphRequest { graph_def: Some(graph_def()), ..RegisterGraphRequest::default() };
        let run = RunGraphRequest {
            graph_handle: "0000000000000001".into(),
            send: vec![named],
            recv_key: vec![key.clone()],
            step_id: 5,
            ..RunGraphRequest::default()
        };
        let recv = RecvTensorRequest { rendezvous_key: key, step_id: 7, ..RecvTensorRequest::default() };
        let session =
            CreateWorkerSessionRequest { session_handle: "s".into(), ..CreateWorkerSessionRequest::default() };
        vec![
            (0, Vec::new()),
            (1, session.encode_to_vec()),
            (3, register.encode_to_vec()),
            (5, run.encode_to_vec()),
            (8, recv.encode_to_vec()),
            (16, KoloReportRequest::default().encode_to_vec()),
            (128, create_request(graph_def()).encode_to_vec()),
            (131, run_step().encode_to_vec()),
            (6, CleanupGraphRequest { step_id: 7 }.encode_to_vec()),
        ]
    })
}

/// A change of some bytes: overwritten, cut out, repeated.
#[derive(Clone, Debug)]
enum Change {
    Set(usize, u8),
    Cut(usize, usize),
    Repeat(usize, usize),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        4 => (any::<usize>(), any::<u8>()).prop_map(|(at, byte)| Change::Set(at, byte)),
        1 => (any::<usize>(), 1usize..20).prop_map(|(at, n)| Change::Cut(at, n)),
        1 => (any::<usize>(), 1usize..40).prop_map(|(at, n)| Change::Repeat(at, n)),
    ];
    proptest::collection::vec(change, 0..6)
}

fn changed(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    for change in changes {
        if bytes.is_empty() {
            break;
        }
        let n = bytes.len();
        match *change {
            Change::Set(at, byte) => bytes[at % n] = byte,
            Change::Cut(at, length) => drop(bytes.drain(at % n..(at % n + length).min(n))),
            Change::Repeat(at, length) => {
                let piece = bytes[at % n..(at % n + length).min(n)].to_vec();
                bytes.splice(at % n..at % n, piece);
            }
        }
    }
    bytes
}

fn master() -> GrpcMaster {
    let victim = victim();
    let options = LinkOptions { deadline: Some(PATIENCE), ..LinkOptions::default() };
    GrpcMaster::new("ps", victim.server.address().to_string(), options, victim.runtime.handle().clone())
}

/// Opens a session over what is left of a graph, and runs whatever it has.
fn create_and_run(def: GraphDef, run: RunStepRequest) -> Result<()> {
    let (master, runtime) = (master(), &victim().runtime);
    let config = ConfigProto { operation_timeout_in_ms: 500, ..ConfigProto::default() };
    let request =
        CreateSessionRequest { graph_def: Some(def), config: Some(config), ..CreateSessionRequest::default() };
    let made = runtime.block_on(master.create_session(request))?;
    let options = run.options.map(|options| RunOptions { timeout_in_ms: 500, ..options });
    let run = RunStepRequest { session_handle: made.session_handle.clone(), options, ..run };
    let ran = runtime.block_on(master.run_step(run)).map(drop);
    let close = CloseSessionRequest { session_handle: made.session_handle };
    runtime.block_on(master.close_session(close)).unwrap();
    ran
}

fn create_request(def: GraphDef) -> CreateSessionRequest {
    let config = ConfigProto { operation_timeout_in_ms: 500, ..ConfigProto::default() };
    CreateSessionRequest { graph_def: Some(def), config: Some(config), ..CreateSessionRequest::default() }
}

fn run_step() -> RunStepRequest {
    let tensor = WireTensor::new(Tensor::from([[1.0f32, 2.0]])).unwrap();
    RunStepRequest {
        feed: vec![NamedTensorProto { name: "x:0".into(), tensor: Some(tensor) }],
        fetch: vec!["r:0".into(), "c:0".into()],
        target: vec!["w/Assign".into()],
        options: Some(RunOptions::default()),
        ..RunStepRequest::default()
    }
}

/// What is changed below means something to begin with.
#[test]
fn without_changes_it_works() {
    create_and_run(graph_def(), run_step()).unwrap();
    let frames: Vec<Vec<u8>> =
        requests().iter().enumerate().map(|(call, (method, head))| frame(1, *method, call as u64, head, 0)).collect();
    let answers = ask(&frames.concat(), requests().len());
    // A graph that was never registered cannot run, a session that was never made neither, and a step that ended sends
    // nothing; all else is answered.
    assert_eq!(answers.into_values().collect::<Vec<_>>(), [2, 2, 2, 3, 3, 2, 2, 3, 2]);
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn any_bytes(prefix in 0usize..4, bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let prefix = [&b""[..], HELLO, HTTP2, b"\x16\x03\x01\x02\0"][prefix];
        send(&[prefix, &bytes].concat());
        still_works();
    }

    #[test]
    fn greetings_with_changes(changes in changes()) {
        send(&changed(greeting(), &changes));
        still_works();
    }

    #[test]
    fn frames_with_changes(which in any::<usize>(), changes in changes(), of_frame in changes(), n_body in any::<u64>()) {
        let mut bytes = Vec::new();
        for (call, (method, head)) in requests().iter().enumerate() {
            let head = if call == which % requests().len() { changed(head.clone(), &changes) } else { head.clone() };
            bytes.extend(frame(1, *method, call as u64, &head, 0));
        }
        ask(&bytes, requests().len());
        // Then frames that are wrong in themselves.
        bytes.extend(changed(frame(1, 8, 99, &requests()[4].1, 0), &of_frame));
        bytes.extend(frame(1, 8, 100, &[], n_body));
        send(&[greeting(), bytes].concat());
        still_works();
    }

    #[test]
    fn graphs_with_changes(changes in changes()) {
        let Ok(def) = GraphDef::decode(&changed(graph_def().encode_to_vec(), &changes)[..]) else { return Ok(()) };
        if let Err(error) = create_and_run(def, run_step()) {
            prop_assert!(!error.message().contains("panicked"), "{}", error);
        }
        still_works();
    }

    #[test]
    fn runs_with_changes(changes in changes()) {
        let Ok(run) = RunStepRequest::decode(&changed(run_step().encode_to_vec(), &changes)[..]) else { return Ok(()) };
        if let Err(error) = create_and_run(graph_def(), run) {
            prop_assert!(!error.message().contains("panicked"), "{}", error);
        }
        still_works();
    }
}
