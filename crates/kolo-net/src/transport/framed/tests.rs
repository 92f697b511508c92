//! Connections over loopback, with and without TLS, to services that do as a test wants and to peers that misbehave.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{Code, DType, Result, Tensor};
use kolo_device::cpu::IntraPool;
use prost::Message as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::greeting::welcome;
use super::link::Link;
use super::server::WorkerMethod;
use super::*;
use crate::task::peers::TaskName;
use crate::task::services::{Answer, MasterService, WorkerService};
use crate::transport::grpc::{self, GrpcMaster, GrpcPeer, LinkOptions, OtherProtocol, ServerOptions};
use crate::transport::tls::cert::Authority;
use crate::transport::tls::{Credentials, ServerTls, TlsFiles};
use crate::wire::limits::MessageLimits;
use crate::wire::proto::*;
use crate::wire::tensor_wire::WireTensor;

/// Long enough for a slow machine; a test that needs it has failed.
const LONG: Duration = Duration::from_secs(20);

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONG, future).await.expect("it does not hang")
}

fn floats(n: i64) -> Tensor {
    Tensor::from((0..n).map(|i| i as f32).collect::<Vec<_>>())
}

/// A task that does as its requests say.
struct Fake;

impl WorkerService for Fake {
    fn get_status(&self, _: GetStatusRequest) -> Answer<GetStatusResponse> {
        Box::pin(async { Ok(GetStatusResponse::default()) })
    }

    /// Returns as many floats as the step's number says.
    fn recv_tensor(&self, request: RecvTensorRequest) -> Answer<RecvTensorResponse> {
        let tensor = Some(WireTensor::from(floats(request.step_id)));
        Box::pin(async { Ok(RecvTensorResponse { tensor, ..RecvTensorResponse::default() }) })
    }

    fn cleanup_all(&self, _: CleanupAllRequest) -> Answer<CleanupAllResponse> {
        Box::pin(async {
            tokio::task::yield_now().await;
            panic!("a call of a test")
        })
    }

    fn run_graph(&self, _: RunGraphRequest) -> Answer<RunGraphResponse> {
        panic!("in the reader of a test")
    }
}

impl MasterService for Fake {
    /// Returns the feeds as fetches.
    fn run_step(&self, request: RunStepRequest) -> Answer<RunStepResponse> {
        Box::pin(async move { Ok(RunStepResponse { tensor: request.feed, ..RunStepResponse::default() }) })
    }
}

fn identity(job: &str, shares_memory: bool) -> Identity {
    Identity { own: TaskName::new(job, 0), cluster: None, token: None, shares_memory }
}

struct Served {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Served {
    /// A task that speaks both protocols, or gRPC alone.
    async fn new(files: Option<&TlsFiles>, is_grpc_only: bool) -> Served {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let tls = files.map(|files| files.server().unwrap());
        let options = ServerOptions { tls, grace: Duration::from_millis(1), ..ServerOptions::default() };
        let other = OtherProtocol {
            hello: HELLO,
            serve: Box::new(|stream| {
                Box::pin(async {
                    let services = Services { worker: Arc::new(Fake), master: Arc::new(Fake) };
                    let (identity, limits) = (identity("ps", true), MessageLimits::default());
                    // The test sees at the other end how the connection ends.
                    let _ = serve_connection(
                        stream,
                        services,
                        &identity,
                        limits,
                        Arc::new(Tensor::zeros),
                        IntraPool::new(1),
                    )
                    .await;
                })
            }),
        };
        let other = (!is_grpc_only).then_some(other);
        let shutdown = async {
            // Dropping the sender stops the server, too.
            let _ = stopped.await;
        };
        let serve = grpc::serve_with(listener, Arc::new(Fake), Arc::new(Fake), options, other, shutdown);
        Served { address, stop: Some(stop), task: tokio::spawn(serve) }
    }

    fn peer(&self, files: Option<&TlsFiles>, shares_memory: bool) -> KoloPeer {
        let (address, options) = (self.address.to_string(), connect_options(files, shares_memory));
        let grpc = GrpcPeer::new("ps", &*address, link_options(files), Handle::current());
        KoloPeer::new(TaskName::new("ps", 0), address, options, Arc::new(grpc))
    }

    async fn end(mut self) {
        self.stop.take();
        soon(self.task).await.unwrap();
    }
}

fn connect_options(files: Option<&TlsFiles>, shares_memory: bool) -> ConnectOptions {
    ConnectOptions {
        credentials: Credentials::Nothing,
        identity: identity("worker", shares_memory),
        tls: files.map(|files| files.client().unwrap()),
        limits: MessageLimits::default(),
        allocate: Arc::new(Tensor::zeros),
    }
}

fn link_options(files: Option<&TlsFiles>) -> LinkOptions {
    let tls = files.map(|files| files.client().unwrap());
    LinkOptions { tls, deadline: Some(LONG), wait_for_peer: Duration::from_millis(100), ..LinkOptions::default() }
}

fn files() -> TlsFiles {
    Authority::new(1).unwrap().issue("task", &["127.0.0.1".into()], 1).unwrap()
}

async fn fetch(peer: &dyn WorkerService, n: i64) -> Result<Tensor> {
    let request = RecvTensorRequest { step_id: n, ..RecvTensorRequest::default() };
    soon(peer.recv_tensor(request)).await?.tensor.unwrap().into_tensor()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_tensors_of_odd_sizes_travel_both_ways_with_and_without_tls() {
    let files = files();
    for tls in [None, Some(&files)] {
        let server = Served::new(tls, false).await;
        for shares_memory in [false, true] {
            let peer = server.peer(tls, shares_memory);
            for n in [0, 1, 4097, 250_000, 1_234_567, 3_000_001] {
                assert_eq!(fetch(&peer, n).await.unwrap(), floats(n), "{n}");
            }
            assert!(peer.has_greeted(), "not by gRPC");
        }
        let address = server.address.to_string();
        let grpc = GrpcMaster::new("ps", &*address, link_options(tls), Handle::current());
        let master = KoloMaster::new(address, connect_options(tls, false), Arc::new(grpc));
        for n in [3, 1_234_567] {
            let tensor = Some(WireTensor::from(floats(n)));
            let feed = vec![NamedTensorProto { name: "x".into(), tensor }];
            let request = RunStepRequest { feed, ..RunStepRequest::default() };
            let mut answer = soon(master.run_step(request)).await.unwrap();
            let back = answer.tensor.remove(0).tensor.unwrap().into_tensor().unwrap();
            assert_eq!(back, floats(n));
        }
        server.end().await;
    }
}

#[tokio::test]
async fn grpc_goes_on_over_tls() {
    let files = files();
    let server = Served::new(Some(&files), false).await;
    let peer = GrpcPeer::new("ps", server.address.to_string(), link_options(Some(&files)), Handle::current());
    assert_eq!(fetch(&peer, 100_000).await.unwrap(), floats(100_000));
    server.end().await;
    // A server that supports only gRPC, such as TensorFlow's or an older one of ours.
    let server = Served::new(Some(&files), true).await;
    let peer = server.peer(Some(&files), true);
    assert_eq!(fetch(&peer, 100_000).await.unwrap(), floats(100_000));
    assert!(!peer.has_greeted());
    server.end().await;
}

#[tokio::test]
async fn strangers_are_refused_and_told_why() {
    let (ours, theirs) = (files(), files());
    let server = Served::new(Some(&ours), false).await;
    let refused = async |files: Option<TlsFiles>, code: Code, why: &str| {
        let error = fetch(&server.peer(files.as_ref(), true), 1).await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(why), "{error}");
        assert!(error.message().contains(&server.address.to_string()), "{error}");
    };
    // We do not trust the server, it does not trust us, or we have no certificate.
    refused(Some(theirs.clone()), Code::Unauthenticated, "TLS handshake failed").await;
    let stranger = TlsFiles { ca: ours.ca.clone(), ..theirs };
    refused(Some(stranger), Code::Unauthenticated, "it refuses our certificate").await;
    refused(None, Code::Unavailable, "does it want TLS?").await;
    assert_eq!(fetch(&server.peer(Some(&ours), true), 1).await.unwrap(), floats(1));
    server.end().await;
    // A server without TLS.
    let server = Served::new(None, false).await;
    let error = fetch(&server.peer(Some(&ours), true), 1).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(error.message().contains("is it a server with TLS"), "{error}");
    server.end().await;
}

/// The next connection, after its greeting.
async fn greeted(listener: &TcpListener, tls: Option<ServerTls>) -> Stream {
    let tcp = listener.accept().await.unwrap().0;
    let stream = match tls {
        Some(tls) => Stream::Tls(Box::new(tls.accept(tcp).await.unwrap())),
        None => Stream::Plain(tcp),
    };
    welcome(&stream, &identity("ps", false)).await.unwrap();
    stream
}

#[tokio::test]
async fn a_connection_that_dies_in_a_tensor_fails_its_calls() {
    let files = files();
    for tls in [None, Some(&files)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let acceptor = tls.map(|files| files.server().unwrap());
        let server = tokio::spawn(async move {
            let stream = greeted(&listener, acceptor).await;
            let mut question = [0; HEADER];
            stream.read_exact(&mut question).await.unwrap();
            let call = Header::read(&question).unwrap().call;
            let head = TensorHead { dtype: DType::F32 as i32, dims: vec![1 << 20], ..TensorHead::default() };
            let head = head.encode_to_vec();
            let (n_head, n_body) = (head.len(), 4 << 20);
            let mut bytes = Vec::new();
            Header { kind: Kind::Response, method: 0, is_shared: false, n_head, call, n_body }.write(&mut bytes);
            bytes.extend(head);
            bytes.extend(vec![1; 1_000_001]);
            stream.write_all(&bytes).await.unwrap();
            // Whatever was read by then, the connection ends here.
            stream.shut_down();
        });
        let grpc = GrpcPeer::new("ps", &*address, link_options(tls), Handle::current());
        let peer = KoloPeer::new(TaskName::new("ps", 0), address, connect_options(tls, false), Arc::new(grpc));
        let error = fetch(&peer, 1 << 20).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        assert!(error.message().contains("the connection broke"), "{error}");
        soon(server).await.unwrap();
    }
}

#[tokio::test]
async fn a_connection_that_dies_while_much_is_sent_fails_its_calls() {
    let files = files();
    for tls in [None, Some(&files)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let acceptor = tls.map(|files| files.server().unwrap());
        let server = tokio::spawn(async move {
            let stream = greeted(&listener, acceptor).await;
            stream.read_exact(&mut [0; HEADER]).await.unwrap();
        });
        let grpc = GrpcMaster::new("ps", &*address, link_options(tls), Handle::current());
        let master = KoloMaster::new(address, connect_options(tls, false), Arc::new(grpc));
        let tensor = Some(WireTensor::from(floats(8 << 20)));
        let feed = vec![NamedTensorProto { name: "x".into(), tensor }];
        let error = soon(master.run_step(RunStepRequest { feed, ..RunStepRequest::default() })).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        soon(server).await.unwrap();
    }
}

#[tokio::test]
async fn what_makes_no_sense_inside_of_tls_ends_its_connection_alone() {
    let files = files();
    let server = Served::new(Some(&files), false).await;
    let address = server.address.to_string();
    let mut state = 7u64;
    for round in 0..40 {
        let bytes: Vec<u8> = (0..1 + round * 40)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as u8
            })
            .collect();
        let tcp = TcpStream::connect(&address).await.unwrap();
        let tls = files.client().unwrap().connect(tcp, &address).await.unwrap().unwrap();
        if round % 3 == 0 {
            tls.tcp().try_write(&bytes).unwrap();
        }
        let stream = Stream::Tls(Box::new(tls));
        if round % 3 == 1 {
            // After a valid greeting.
            soon(super::greeting::introduce(&stream, &identity("worker", false), None)).await.unwrap();
        }
        if round % 3 != 0 {
            // It may be refused before all of it is sent.
            let _ = stream.write_all(&bytes).await;
        }
        // Otherwise the server would wait for the rest of a message.
        drop(stream);
    }
    assert_eq!(fetch(&server.peer(Some(&files), false), 5).await.unwrap(), floats(5));
    server.end().await;
}

#[tokio::test]
async fn a_call_that_panics_is_answered_and_so_is_everybody_if_the_reader_panics() {
    let files = files();
    for tls in [None, Some(&files)] {
        let server = Served::new(tls, false).await;
        let peer = server.peer(tls, false);
        assert_eq!(fetch(&peer, 1).await.unwrap(), floats(1));
        let error = soon(peer.cleanup_all(CleanupAllRequest::default())).await.unwrap_err();
        assert_eq!(error.code(), Code::Internal, "{error}");
        assert!(peer.has_greeted(), "others have nothing to do with it");
        let error = soon(peer.run_graph(RunGraphRequest::default())).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        // The next call makes a new connection.
        assert_eq!(fetch(&peer, 2).await.unwrap(), floats(2));
        server.end().await;
    }
}

/// A link, and the raw stream at its other end.
async fn link(allocate: Allocate) -> (Arc<Link>, Stream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (here, there) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
    let link = Link::new(Stream::Plain(here.unwrap()), "ps:0".into(), MessageLimits::default(), allocate);
    (link, Stream::Plain(there.unwrap().0))
}

#[tokio::test]
async fn however_a_reader_ends_nobody_waits_for_ever() {
    for is_panic in [true, false] {
        let (link, there) = link(Arc::new(|_, _| panic!("no memory in this test"))).await;
        let (sender, mut answers) = mpsc::unbounded_channel();
        let each = Arc::new(move |index: usize, answer: Result<super::link::Reply>| {
            sender.send((index, answer.map(drop))).expect("the test listens");
            assert!(index != 0, "a callback that panics");
        });
        let guard = link.receive(1, b"", 3, each).unwrap();
        let (caller, method) = (link.clone(), WorkerMethod::GetStatus.number());
        let call = tokio::spawn(async move { caller.call(method, &GetStatusRequest {}).await.map(drop) });
        let mut question = [0; HEADER];
        soon(there.read_exact(&mut question)).await.unwrap();
        let code = match is_panic {
            true => {
                let head = TensorHead { dtype: DType::F32 as i32, dims: vec![1], ..TensorHead::default() };
                let mut bytes = Vec::new();
                let n_head = head.encoded_len();
                Header { kind: Kind::Response, method: 0, is_shared: false, n_head, call: 99, n_body: 4 }
                    .write(&mut bytes);
                bytes.extend(head.encode_to_vec());
                there.write_all(&bytes).await.unwrap();
                Code::Internal
            }
            false => {
                link.abort_reading();
                Code::Unavailable
            }
        };
        assert_eq!(soon(call).await.unwrap().unwrap_err().code(), code);
        let mut seen = Vec::new();
        for _ in 0..3 {
            let (index, answer) = soon(answers.recv()).await.unwrap();
            assert_eq!(answer.unwrap_err().code(), code);
            seen.push(index);
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2]);
        assert!(link.is_over());
        drop(guard);
        let refused: Result<_> = soon(link.call(method, &GetStatusRequest {})).await;
        assert_eq!(refused.map(drop).unwrap_err().code(), code);
    }
}

#[test]
fn headers_are_read_as_they_are_written() {
    let header = Header {
        kind: Kind::Failure,
        method: 7,
        is_shared: true,
        n_head: 0x1234_5678,
        call: u64::MAX - 3,
        n_body: 1 << 40,
    };
    let mut bytes = Vec::new();
    header.write(&mut bytes);
    let bytes: [u8; HEADER] = bytes.try_into().unwrap();
    assert_eq!(Header::read(&bytes).unwrap(), header);
    assert!(Header::read(&[9; HEADER]).is_err());
}

#[test]
fn errors_keep_code_text_and_whether_they_are_echoes() {
    let error = kolo_core::Error::aborted("gone").into_derived();
    let back = Failure::of(&error).into_error();
    assert_eq!((back.code(), back.message(), back.is_derived()), (Code::Aborted, "gone", true));
}
