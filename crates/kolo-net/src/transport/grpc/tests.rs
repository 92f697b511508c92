//! Servers and peers over loopback, with fake services.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{Code, Error, Tensor};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::*;
use crate::task::services::{Answer, MasterService, WorkerService};
use crate::transport::tls::cert::Authority;
use crate::transport::tls::{Credentials, TlsFiles, Token};
use crate::wire::limits::MessageLimits;
use crate::wire::proto::*;
use crate::wire::tensor_wire::WireTensor;

/// Long enough for a slow machine; a test that needs it has failed.
const LONG: Duration = Duration::from_secs(20);

/// A task that does as its requests say.
struct Fake {
    /// Is sent `true` when a handler begins and `false` when one is dropped before its end.
    events: mpsc::UnboundedSender<bool>,
}

struct Guard(Option<mpsc::UnboundedSender<bool>>);

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(events) = self.0.take() {
            let _ = events.send(false);
        }
    }
}

impl WorkerService for Fake {
    fn get_status(&self, _: GetStatusRequest) -> Answer<GetStatusResponse> {
        let cpu = DeviceAttributes { name: "cpu".into(), incarnation: u64::MAX, ..DeviceAttributes::default() };
        Box::pin(async { Ok(GetStatusResponse { device_attributes: vec![cpu] }) })
    }

    /// Returns as many floats as the step's number says.
    fn recv_tensor(&self, request: RecvTensorRequest) -> Answer<RecvTensorResponse> {
        let tensor = Tensor::from((0..request.step_id).map(|i| i as f32).collect::<Vec<_>>());
        let tensor = Some(WireTensor::from(tensor));
        Box::pin(async { Ok(RecvTensorResponse { tensor, ..RecvTensorResponse::default() }) })
    }

    /// Fails with the code in `step_id` and the text in `graph_handle`.
    fn run_graph(&self, request: RunGraphRequest) -> Answer<RunGraphResponse> {
        let code = Code::from_number(request.step_id as i32).unwrap_or(Code::Internal);
        Box::pin(async move { Err(Error::new(code, request.graph_handle).into_derived()) })
    }

    /// Never ends.
    fn cleanup_graph(&self, _: CleanupGraphRequest) -> Answer<CleanupGraphResponse> {
        let _ = self.events.send(true);
        let guard = Guard(Some(self.events.clone()));
        Box::pin(async move {
            let _guard = guard;
            pending().await
        })
    }

    fn cleanup_all(&self, _: CleanupAllRequest) -> Answer<CleanupAllResponse> {
        Box::pin(async { panic!("a test's own") })
    }

    fn register_graph(&self, request: RegisterGraphRequest) -> Answer<RegisterGraphResponse> {
        Box::pin(async move { Err(Error::not_found(request.session_handle)) })
    }
}

impl MasterService for Fake {
    /// Returns the feeds as fetches.
    fn run_step(&self, request: RunStepRequest) -> Answer<RunStepResponse> {
        Box::pin(async move { Ok(RunStepResponse { tensor: request.feed, ..RunStepResponse::default() }) })
    }
}

struct Served {
    address: SocketAddr,
    events: mpsc::UnboundedReceiver<bool>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Served {
    async fn new(options: ServerOptions) -> Served {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Served::on(listener, options)
    }

    fn on(listener: TcpListener, options: ServerOptions) -> Served {
        let address = listener.local_addr().unwrap();
        let (sender, events) = mpsc::unbounded_channel();
        let fake = Arc::new(Fake { events: sender });
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(serve(listener, fake.clone(), fake, options, async {
            let _ = stopped.await;
        }));
        Served { address, events, stop: Some(stop), task }
    }

    fn peer(&self, options: LinkOptions) -> GrpcPeer {
        GrpcPeer::new("/job:ps/replica:0/task:0", self.address.to_string(), options, Handle::current())
    }

    async fn event(&mut self) -> bool {
        tokio::time::timeout(LONG, self.events.recv()).await.unwrap().unwrap()
    }

    async fn end(mut self) {
        self.stop.take();
        tokio::time::timeout(LONG, self.task).await.unwrap().unwrap();
    }
}

/// Options with deadlines, so that a failing test ends.
fn quick() -> LinkOptions {
    LinkOptions { deadline: Some(LONG), ..LinkOptions::default() }
}

#[tokio::test]
async fn calls_are_answered() {
    let server = Served::new(ServerOptions::default()).await;
    let peer = server.peer(quick());
    let status = peer.get_status(GetStatusRequest {}).await.unwrap();
    assert_eq!(status.device_attributes[0].incarnation, u64::MAX);
    for n in [0, 1, 5000, 3_000_000] {
        let request = RecvTensorRequest { step_id: n, ..RecvTensorRequest::default() };
        let tensor = peer.recv_tensor(request).await.unwrap().tensor.unwrap().into_tensor().unwrap();
        assert_eq!(tensor, Tensor::from((0..n).map(|i| i as f32).collect::<Vec<_>>()));
    }
    // The same into reused memory.
    let device =
        kolo_device::CpuDevice::new(kolo_core::DeviceName::local("CPU", 0), &kolo_device::CpuConfig::default());
    let memory = Some(ReceiveMemory::of(device.clone()));
    let peer = server.peer(LinkOptions { memory, ..quick() });
    for _ in 0..3 {
        let request = RecvTensorRequest { step_id: 300_000, ..RecvTensorRequest::default() };
        let tensor = peer.recv_tensor(request).await.unwrap().tensor.unwrap().into_tensor().unwrap();
        assert_eq!(tensor, Tensor::from((0..300_000).map(|i| i as f32).collect::<Vec<_>>()));
        assert!(kolo_device::Device::memory_stats(&*device).in_use >= 1_200_000);
    }
    assert_eq!(kolo_device::Device::memory_stats(&*device).n_system_allocations, 1);
    let master = GrpcMaster::new("master", server.address.to_string(), quick(), Handle::current());
    let feed = |n: usize| NamedTensorProto {
        name: format!("x{n}:0"),
        tensor: Some(WireTensor::from(Tensor::from(vec![n as i64; n]))),
    };
    let feed: Vec<_> = [0, 1, 200_000].map(feed).to_vec();
    let response = master.run_step(RunStepRequest { feed: feed.clone(), ..RunStepRequest::default() }).await.unwrap();
    assert_eq!(response.tensor, feed);
    server.end().await;
}

#[tokio::test]
async fn errors_keep_code_text_and_origin() {
    let server = Served::new(ServerOptions::default()).await;
    let peer = server.peer(quick());
    let text = "x".repeat(10_000);
    for code in 1..=16 {
        let request = RunGraphRequest { step_id: code, graph_handle: text.clone(), ..RunGraphRequest::default() };
        let error = peer.run_graph(request).await.unwrap_err();
        assert_eq!((error.code() as i64, error.message()), (code, text.as_str()));
        assert!(error.is_derived());
    }
    let request = RegisterGraphRequest { session_handle: text.clone(), ..RegisterGraphRequest::default() };
    let error = peer.register_graph(request).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.message().ends_with("x ... [truncated]") && error.message().len() < 3100);
    let error = peer.cleanup_all(CleanupAllRequest::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::Internal);
    let error = peer.tracing(TracingRequest::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    assert!(error.message().contains("tensorflow.WorkerService/Tracing"), "{error}");
    server.end().await;
}

#[tokio::test]
async fn dropping_an_answer_cancels_the_call() {
    let mut server = Served::new(ServerOptions::default()).await;
    let peer = server.peer(LinkOptions::default());
    let call = tokio::spawn(peer.cleanup_graph(CleanupGraphRequest::default()));
    assert!(server.event().await);
    call.abort();
    assert!(!server.event().await);
    server.end().await;
}

#[tokio::test]
async fn a_deadline_ends_the_call_at_both_ends() {
    let mut server = Served::new(ServerOptions::default()).await;
    let peer = server.peer(LinkOptions::default()).with_deadline(Some(Duration::from_millis(50)));
    let error = peer.cleanup_graph(CleanupGraphRequest::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert!(error.message().contains("CleanupGraph of /job:ps/replica:0/task:0 at 127.0.0.1"), "{error}");
    assert!(server.event().await);
    assert!(!server.event().await);
    server.end().await;
}

#[tokio::test]
async fn many_blocked_calls_do_not_block_others() {
    let mut server = Served::new(ServerOptions::default()).await;
    let peer = server.peer(LinkOptions::default());
    let calls: Vec<_> = (0..500).map(|_| tokio::spawn(peer.cleanup_graph(CleanupGraphRequest::default()))).collect();
    for _ in &calls {
        assert!(server.event().await);
    }
    peer.with_deadline(Some(LONG)).get_status(GetStatusRequest {}).await.unwrap();
    calls.iter().for_each(JoinHandle::abort);
    for _ in &calls {
        assert!(!server.event().await);
    }
    // Cancelling this many calls at once has not closed the connection.
    peer.with_deadline(Some(LONG)).get_status(GetStatusRequest {}).await.unwrap();
    server.end().await;
}

#[tokio::test]
async fn an_absent_task_is_named_with_the_reason() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let peer = GrpcPeer::new("/job:ps/replica:0/task:0", address.to_string(), quick(), Handle::current());
    let error = peer.register_graph(RegisterGraphRequest::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    for part in
        ["RegisterGraph", "/job:ps/replica:0/task:0", &address.to_string(), "connection refused", "it has been so"]
    {
        assert!(error.message().contains(part), "{error}");
    }
    assert!(peer.trouble().unwrap().1.contains("connection refused"));
    let patient = peer.with_deadline(Some(Duration::from_millis(100)));
    let error = patient.get_status(GetStatusRequest {}).await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert!(error.message().contains("connection refused"), "{error}");
    // `wait_for_peer` limits the wait of a call without a deadline.
    let options = LinkOptions { wait_for_peer: Duration::from_millis(50), ..LinkOptions::default() };
    let peer = GrpcPeer::new("ps", address.to_string(), options, Handle::current());
    let error = peer.get_status(GetStatusRequest {}).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    let nowhere = GrpcPeer::new("ps", "no-such-host.invalid:1", quick(), Handle::current());
    let error = nowhere.register_graph(RegisterGraphRequest::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("no-such-host.invalid:1"), "{error}");
}

#[tokio::test]
async fn a_task_that_starts_later_is_found() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let peer = GrpcPeer::new("ps", address.to_string(), quick(), Handle::current());
    let call = tokio::spawn(peer.get_status(GetStatusRequest {}));
    // The first attempt has failed once this one, which comes after it, has.
    let error = peer.register_graph(RegisterGraphRequest::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    let server = Served::on(TcpListener::bind(address).await.unwrap(), ServerOptions::default());
    tokio::time::timeout(LONG, call).await.unwrap().unwrap().unwrap();
    server.end().await;
}

#[tokio::test]
async fn a_lost_connection_is_noticed_at_once_and_made_anew() {
    let mut server = Served::new(ServerOptions { grace: Duration::ZERO, ..ServerOptions::default() }).await;
    let address = server.address;
    let peer = server.peer(LinkOptions::default());
    let call = tokio::spawn(peer.cleanup_graph(CleanupGraphRequest::default()));
    assert!(server.event().await);
    server.end().await;
    let error = tokio::time::timeout(LONG, call).await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    let server = Served::on(TcpListener::bind(address).await.unwrap(), ServerOptions::default());
    peer.with_deadline(Some(LONG)).get_status(GetStatusRequest {}).await.unwrap();
    server.end().await;
}

/// A server that does `then` with its first connection.
async fn raw_server<F: Future<Output = ()> + Send>(
    then: impl FnOnce(tokio::net::TcpStream) -> F + Send + 'static,
) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        drop(listener);
        then(stream).await;
    });
    (address, task)
}

#[tokio::test]
async fn a_connection_that_breaks_in_the_middle_is_unavailable() {
    let (address, task) = raw_server(|mut stream| async move {
        let mut preface = [0; 24];
        stream.read_exact(&mut preface).await.unwrap();
    })
    .await;
    let peer = GrpcPeer::new("ps", address.to_string(), quick(), Handle::current());
    let error = peer.run_graph(RunGraphRequest::default()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("the connection was lost"), "{error}");
    assert!(peer.trouble().is_some());
    task.await.unwrap();
}

/// A connection that does not speak HTTP/2, or gRPC, is closed, and others are unaffected.
#[tokio::test]
async fn noise_does_not_disturb_a_server() {
    let server = Served::new(ServerOptions::default()).await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let frames: [&[u8]; 4] =
        [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00", b"\xff\xff\xff\x00\x00\x00\x00\x00\x01", b""];
    for noise in frames.iter().flat_map(|frame| [frame.to_vec(), [preface, *frame].concat()]) {
        let mut stream = tokio::net::TcpStream::connect(server.address).await.unwrap();
        let _ = stream.write_all(&noise).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(LONG, stream.read_to_end(&mut answer)).await.unwrap();
    }
    server.peer(quick()).get_status(GetStatusRequest {}).await.unwrap();
    server.end().await;
}

/// A client that begins HTTP/2 and goes no further is dropped at the deadline; one that opens it and then is silent, by pings.
#[tokio::test]
async fn clients_that_fall_silent_are_dropped() {
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let settings = [preface, &[0, 0, 0, 4, 0, 0, 0, 0, 0][..]].concat();
    let short = Duration::from_millis(300);
    let by_deadline = ServerOptions { first_bytes: short, ping: None, ..ServerOptions::default() };
    let by_ping = ServerOptions { ping: Some((short, short)), ..ServerOptions::default() };
    for (options, bytes) in [(by_deadline, &preface[..]), (by_ping, &settings[..])] {
        let server = Served::new(options).await;
        let mut stream = tokio::net::TcpStream::connect(server.address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let mut answer = Vec::new();
        let closed = tokio::time::timeout(LONG, stream.read_to_end(&mut answer)).await;
        assert!(closed.is_ok(), "after {} bytes and silence the connection is still open", bytes.len());
        // Who has opened HTTP/2 in time stays.
        let peer = server.peer(quick());
        peer.get_status(GetStatusRequest {}).await.unwrap();
        tokio::time::sleep(3 * short).await;
        assert!(peer.trouble().is_none());
        peer.get_status(GetStatusRequest {}).await.unwrap();
        server.end().await;
    }
}

#[tokio::test]
async fn another_protocol_is_named() {
    let (address, task) = raw_server(|mut stream| async move {
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        let mut sink = Vec::new();
        let _ = stream.read_to_end(&mut sink).await;
    })
    .await;
    let peer = GrpcPeer::new("ps", address.to_string(), quick(), Handle::current());
    let error = peer.run_graph(RunGraphRequest::default()).await.unwrap_err();
    assert!(error.message().contains("does not speak HTTP/2"), "{error}");
    drop(peer);
    task.await.unwrap();
}

#[tokio::test]
async fn a_task_that_accepts_and_never_answers_costs_no_more_than_the_deadline() {
    let (address, task) = raw_server(|mut stream| async move {
        let mut sink = Vec::new();
        let _ = stream.read_to_end(&mut sink).await;
    })
    .await;
    let options = LinkOptions { deadline: Some(Duration::from_millis(100)), ..LinkOptions::default() };
    let peer = GrpcPeer::new("ps", address.to_string(), options, Handle::current());
    let error = peer.get_status(GetStatusRequest {}).await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    drop(peer);
    tokio::time::timeout(LONG, task).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_stopping_server_lets_calls_end_and_then_ends_them() {
    let mut server = Served::new(ServerOptions { grace: Duration::from_millis(50), ..ServerOptions::default() }).await;
    let peer = server.peer(LinkOptions::default());
    let call = tokio::spawn(peer.run_graph(RunGraphRequest::default()));
    call.await.unwrap().unwrap_err();
    let call = tokio::spawn(peer.cleanup_graph(CleanupGraphRequest::default()));
    assert!(server.event().await);
    server.stop.take();
    assert!(!server.event().await);
    // A repeatable call is sent a second time, which finds no server.
    let error = tokio::time::timeout(LONG, call).await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    server.end().await;
}

#[tokio::test]
async fn limits_hold_for_requests_and_responses() {
    let small = MessageLimits { tensors: 100_000, graphs: 1000, others: 10 };
    let server = Served::new(ServerOptions { limits: small, ..ServerOptions::default() }).await;
    let peer = server.peer(quick());
    let request = RegisterGraphRequest { session_handle: "x".repeat(1001), ..RegisterGraphRequest::default() };
    assert_eq!(peer.register_graph(request).await.unwrap_err().code(), Code::ResourceExhausted);
    let request = RecvTensorRequest { step_id: 25_000, ..RecvTensorRequest::default() };
    assert_eq!(peer.recv_tensor(request).await.unwrap_err().code(), Code::ResourceExhausted);
    let strict = server.peer(LinkOptions { limits: MessageLimits { tensors: 1000, ..small }, ..quick() });
    let request = RecvTensorRequest { step_id: 1000, ..RecvTensorRequest::default() };
    let error = strict.recv_tensor(request).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.message().contains("the limit is 1000"), "{error}");
    server.end().await;
}

fn certificates(authority: &Authority) -> TlsFiles {
    authority.issue("task", &["127.0.0.1".into()], 1).unwrap()
}

#[tokio::test]
async fn tls_lets_in_who_has_a_certificate_of_the_same_authority() {
    let authority = Authority::new(1).unwrap();
    let tls = Some(certificates(&authority).server().unwrap());
    let server = Served::new(ServerOptions { tls, ..ServerOptions::default() }).await;
    let with = |files: TlsFiles| server.peer(LinkOptions { tls: Some(files.client().unwrap()), ..quick() });
    with(certificates(&authority)).get_status(GetStatusRequest {}).await.unwrap();
    // An authority that was saved and loaded again is the same.
    let again = Authority::open(authority.certificate(), &authority.key()).unwrap();
    let peer = with(certificates(&again));
    let request = RecvTensorRequest { step_id: 300_000, ..RecvTensorRequest::default() };
    assert_eq!(peer.recv_tensor(request).await.unwrap().tensor.unwrap().n_bytes(), 1_200_000);

    let check = |result: kolo_core::Result<RegisterGraphResponse>, why: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable);
        assert!(error.message().contains(why), "{error}");
    };
    let request = RegisterGraphRequest::default;
    // We do not trust the server, it does not trust us, or its certificate is for another host.
    let stranger = certificates(&Authority::new(1).unwrap());
    check(with(stranger.clone()).register_graph(request()).await, "TLS handshake failed");
    let ca = authority.certificate().as_bytes().to_vec();
    check(with(TlsFiles { ca, ..stranger }).register_graph(request()).await, "is our certificate of its CA?");
    check(server.peer(quick()).register_graph(request()).await, "does it want TLS?");
    server.end().await;

    let elsewhere = authority.issue("task", &["elsewhere.example".into()], 1).unwrap();
    let tls = Some(elsewhere.server().unwrap());
    let server = Served::new(ServerOptions { tls, ..ServerOptions::default() }).await;
    let tls = Some(certificates(&authority).client().unwrap());
    check(server.peer(LinkOptions { tls, ..quick() }).register_graph(request()).await, "TLS handshake failed");
    server.end().await;
}

#[tokio::test]
async fn a_token_lets_in_who_has_it() {
    let token = Token::new("a-secret-of-some-length").unwrap();
    let server = Served::new(ServerOptions { token: Some(token.clone()), ..ServerOptions::default() }).await;
    let with = |token| server.peer(LinkOptions { credentials: Credentials::Token(token), ..quick() });
    with(token).get_status(GetStatusRequest {}).await.unwrap();
    let error = server.peer(quick()).get_status(GetStatusRequest {}).await.unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated);
    let other = Token::new("another-secret-of-some-length").unwrap();
    let error = with(other).get_status(GetStatusRequest {}).await;
    assert_eq!(error.unwrap_err().code(), Code::Unauthenticated);
    server.end().await;
}

/// An answer can be awaited on a thread without a tokio runtime.
#[test]
fn answers_need_no_runtime_around_them() {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = runtime.block_on(Served::new(ServerOptions::default()));
    let peer = GrpcPeer::new("ps", server.address.to_string(), quick(), runtime.handle().clone());
    let outcome = Arc::new(Mutex::new(None));
    let seen = outcome.clone();
    std::thread::spawn(move || {
        let waker = Arc::new(Unpark(std::thread::current())).into();
        let mut cx = std::task::Context::from_waker(&waker);
        let mut answer = peer.get_status(GetStatusRequest {});
        loop {
            match answer.as_mut().poll(&mut cx) {
                std::task::Poll::Ready(answer) => break *seen.lock() = Some(answer),
                std::task::Poll::Pending => std::thread::park(),
            }
        }
    })
    .join()
    .unwrap();
    assert!(outcome.lock().take().unwrap().is_ok());
    runtime.block_on(server.end());
}
