//! Serves calls to the tasks of this process.
//!
//! One accept loop; one async task per connection, all of which end before [`serve`] returns; one future per call,
//! dropped when its stream is reset or its deadline passes.

use std::any::Any;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use kolo_core::{Error, Result};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::frame::{self, Intake, Outgoing, ReadError, Received};
use super::opening::Opening;
use super::options::{CONNECTION_WINDOW, FRAME_BYTES, STREAM_WINDOW, ServerOptions, set_up};
use super::status;
use crate::task::services::{Answer, MasterService, Size, Unwound, WorkerService, master_methods, worker_methods};
use crate::transport::complaints::Complaints;
use crate::transport::connection::{self, ConnectionId};
use crate::transport::framed::Stream;
use crate::transport::user_token::is_of_own_user;
use crate::wire::proto::*;

/// The timeout of a TLS handshake, and of the first bytes of a connection.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The longest pause between two looks at a connection that has sent a part of its first bytes.
const LONGEST_PEEK_PAUSE: Duration = Duration::from_secs(1);

/// How HTTP/2 begins, and so gRPC.
pub(super) const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The pause after a connection could not be accepted, for lack of file descriptors for instance.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long connections may take to close after the last response.
const CLOSING: Duration = Duration::from_secs(1);

/// More than any cluster has concurrent calls: queue runners, and one RecvTensor for every edge.
const MAX_STREAMS: u32 = 1 << 16;

/// Cancelling a step resets all its streams at once, which must not be taken for an attack.
const MAX_PENDING_RESETS: usize = 1 << 12;

/// Serves calls until `shutdown` completes; then accepts no more, lets running calls continue for `options.grace`, and
/// fails the rest with `UNAVAILABLE`. Must run in a tokio runtime.
pub async fn serve(
    listener: TcpListener,
    worker: Arc<dyn WorkerService>,
    master: Arc<dyn MasterService>,
    options: ServerOptions,
    shutdown: impl Future<Output = ()>,
) {
    serve_with(listener, worker, master, options, None, shutdown).await;
}

/// Serves connections that begin with `hello` instead of HTTP/2, or that negotiated Kolo's own transport inside TLS.
pub(crate) struct OtherProtocol {
    /// The first bytes of a connection.
    pub hello: &'static [u8],
    /// Serves such a connection; its first bytes have not been read yet.
    pub serve: Box<dyn Fn(Stream) -> Serving + Send + Sync>,
}

/// A connection that is being served.
pub(crate) type Serving = Pin<Box<dyn Future<Output = ()> + Send>>;

/// [`serve`] with a second protocol on the same port.
pub(crate) async fn serve_with(
    listener: TcpListener,
    worker: Arc<dyn WorkerService>,
    master: Arc<dyn MasterService>,
    options: ServerOptions,
    other: Option<OtherProtocol>,
    shutdown: impl Future<Output = ()>,
) {
    let grace = options.grace;
    let (phase, phases) = watch::channel(Phase::Serving);
    let state = Arc::new(ServerState { worker, master, options, other, phases, complaints: Complaints::default() });
    let mut connections = JoinSet::new();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, state.clone()));
                }
                Err(error) => {
                    state.complaints.warn("a connection could not be accepted", error);
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
    drop(listener);
    // There may be no receivers left, if all connections have closed.
    phase.send_replace(Phase::Closing);
    let closed = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(grace, closed).await.is_err() {
        phase.send_replace(Phase::Stopped);
        let closed = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(CLOSING, closed).await.is_err() {
            connections.shutdown().await;
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serving,
    /// New calls are refused.
    Closing,
    /// Running calls are stopped.
    Stopped,
}

struct ServerState {
    worker: Arc<dyn WorkerService>,
    master: Arc<dyn MasterService>,
    options: ServerOptions,
    other: Option<OtherProtocol>,
    phases: watch::Receiver<Phase>,
    complaints: Complaints,
}

async fn connection(stream: TcpStream, state: Arc<ServerState>) {
    let from = stream.peer_addr();
    let refused = |why: &dyn std::fmt::Display| {
        let from = from.as_ref().map_or_else(|_| "somebody who left".to_owned(), ToString::to_string);
        state.complaints.warn("refused a connection", format_args!("{why} (from {from})"));
    };
    if let Err(error) = set_up(&stream) {
        tracing::debug!("a connection from {from:?} is not as it should be: {error}");
    }
    let Some(tls) = state.options.tls.clone() else {
        let hello = state.other.as_ref().map(|other| other.hello);
        return match (first_bytes(&stream, hello, state.options.first_bytes).await, &state.other) {
            (Some(FirstBytes::Other), Some(other)) => serve_other(other, Stream::Plain(stream), &state).await,
            (Some(_), _) => {
                let is_trusted = is_same_user(&stream, &state.options).await;
                http(stream, state.clone(), is_trusted).await;
            }
            (None, _) => tracing::debug!("a connection from {from:?} did not begin in time, or left"),
        };
    };
    if let Some(other) = &state.other
        && tls.is_offered_kolo(&stream).await
    {
        return match tls.accept(stream).await {
            Ok(stream) => serve_other(other, Stream::Tls(Box::new(stream)), &state).await,
            Err(error) => refused(&error),
        };
    }
    match tokio::time::timeout(HANDSHAKE, tls.acceptor().accept(stream)).await {
        Ok(Ok(stream)) => http(stream, state.clone(), false).await,
        Ok(Err(error)) => refused(&error),
        Err(_) => refused(&format_args!("no TLS handshake in {HANDSHAKE:?}")),
    }
}

async fn serve_other(other: &OtherProtocol, stream: Stream, state: &ServerState) {
    let mut phases = state.phases.clone();
    let stopped = phases.wait_for(|phase| *phase == Phase::Stopped);
    tokio::select! {
        () = (other.serve)(stream) => {}
        _ = stopped => {}
    }
}

/// What a connection begins with.
enum FirstBytes {
    /// The preface of HTTP/2, or something else that HTTP refuses.
    Http,
    /// The greeting of the other protocol.
    Other,
}

/// Waits until a connection has sent all bytes that tell its protocol. Peeks, so they can still be read. `None` if they do
/// not come within the deadline.
async fn first_bytes(stream: &TcpStream, hello: Option<&[u8]>, deadline: Duration) -> Option<FirstBytes> {
    let mut first = [0; HTTP2_PREFACE.len()];
    let peeked = async {
        let mut pause = Duration::from_millis(1);
        loop {
            let n = stream.peek(&mut first).await.ok().filter(|n| *n > 0)?;
            let begins = |whole: &[u8]| first[..n.min(whole.len())] == whole[..n.min(whole.len())];
            match hello {
                Some(hello) if begins(hello) && n >= hello.len() => return Some(FirstBytes::Other),
                Some(hello) if begins(hello) => {}
                _ if begins(HTTP2_PREFACE) && n < HTTP2_PREFACE.len() => {}
                _ => return Some(FirstBytes::Http),
            }
            // There is no event for more bytes. A greeting is sent in one write, so the rest comes at once or, from who does
            // not mean it, never.
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PEEK_PAUSE);
        }
    };
    tokio::time::timeout(deadline, peeked).await.ok().flatten()
}

/// Whether a connection needs no token because it is the server's own user's.
async fn is_same_user(stream: &TcpStream, options: &ServerOptions) -> bool {
    let (Ok(own), Ok(peer)) = (stream.local_addr(), stream.peer_addr()) else { return false };
    if options.token.is_none() || !options.same_user {
        return false;
    }
    // The kernel's table may be long.
    tokio::task::spawn_blocking(move || is_of_own_user(own, peer)).await.unwrap_or(false)
}

/// Serves gRPC. Calls on a connection that is trusted need no token.
async fn http(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, state: Arc<ServerState>, is_trusted: bool) {
    let mut phases = state.phases.clone();
    let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_BYTES)
        .max_concurrent_streams(MAX_STREAMS)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS);
    if let Some((every, within)) = state.options.ping {
        builder.keep_alive_interval(every).keep_alive_timeout(within);
    }
    let (stream, opening) = Opening::new(stream);
    let mut due = std::pin::pin!(tokio::time::sleep(state.options.first_bytes));
    let mut is_checked = false;
    let id = ConnectionId::new();
    let service = hyper::service::service_fn(move |request| {
        connection::on(id.clone(), respond(state.clone(), request, is_trusted))
    });
    let mut serving = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    loop {
        let phase = tokio::select! {
            result = &mut serving => {
                if let Err(error) = result {
                    tracing::debug!("a connection ended: {error:?}");
                }
                return;
            }
            () = &mut due, if !is_checked => {
                is_checked = true;
                match opening.is_open() {
                    true => continue,
                    false => return tracing::debug!("a connection did not open HTTP/2 in time"),
                }
            }
            phase = next_phase(&mut phases) => phase,
        };
        // The responses of stopped calls are still sent, so the connection closes by itself.
        if phase == Phase::Closing || phase == Phase::Stopped {
            serving.as_mut().graceful_shutdown();
        }
    }
}

/// The next phase; pending for ever if there is none.
async fn next_phase(phases: &mut watch::Receiver<Phase>) -> Phase {
    match phases.changed().await {
        Ok(()) => *phases.borrow_and_update(),
        Err(_) => std::future::pending().await,
    }
}

async fn respond(
    state: Arc<ServerState>,
    request: Request<Incoming>,
    is_trusted: bool,
) -> std::result::Result<Response<Outgoing>, Infallible> {
    if let Some(refusal) = refuse(&request) {
        return Ok(refusal);
    }
    let token = state.options.token.as_ref().filter(|_| !is_trusted);
    let outcome = match token.map_or(Ok(()), |token| token.check(request.headers())) {
        Ok(()) => answer(&state, request).await,
        Err(error) => Err(error),
    };
    let mut response = Response::new(Outgoing::default());
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    match outcome {
        Ok(pieces) => *response.body_mut() = Outgoing::response(pieces, status::trailers(Ok(()))),
        // A response without a message consists of the trailers alone, sent as headers.
        Err(error) => response.headers_mut().extend(status::trailers(Err(&error))),
    }
    Ok(response)
}

/// The response to a request that is not a gRPC call.
fn refuse(request: &Request<Incoming>) -> Option<Response<Outgoing>> {
    let content_type = request.headers().get("content-type").map(HeaderValue::as_bytes);
    let refusal = if request.method() != Method::POST {
        StatusCode::METHOD_NOT_ALLOWED
    } else if !content_type.is_some_and(|found| found.starts_with(b"application/grpc")) {
        StatusCode::UNSUPPORTED_MEDIA_TYPE
    } else {
        return None;
    };
    let mut response = Response::new(Outgoing::default());
    *response.status_mut() = refusal;
    Some(response)
}

type Pieces = VecDeque<Bytes>;

async fn answer(state: &Arc<ServerState>, request: Request<Incoming>) -> Result<Pieces> {
    let timeout = timeout(request.headers());
    let mut phases = state.phases.clone();
    let stopped = async {
        if phases.wait_for(|phase| *phase == Phase::Stopped).await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let late = async {
        match timeout {
            Some(timeout) => tokio::time::sleep(timeout).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        outcome = route(state, request) => outcome,
        () = stopped => Err(Error::unavailable("the server is shutting down")),
        () = late => Err(Error::deadline_exceeded("the call's deadline passed")),
    }
}

/// The caller's timeout, such as `100m` for a tenth of a second.
fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 {
        return None;
    }
    let amount: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(amount * 3600),
        "M" => Duration::from_secs(amount * 60),
        "S" => Duration::from_secs(amount),
        "m" => Duration::from_millis(amount),
        "u" => Duration::from_micros(amount),
        "n" => Duration::from_nanos(amount),
        _ => return None,
    })
}

type Pending = Pin<Box<dyn Future<Output = Result<Pieces>> + Send>>;

fn route(state: &ServerState, request: Request<Incoming>) -> Pending {
    let path = request.uri().path().to_owned();
    let unknown = || -> Pending {
        let error = Error::unimplemented(format!("there is no method {path} here"));
        Box::pin(std::future::ready(Err(error)))
    };
    let limits = state.options.limits;
    let call = |size: Size| IncomingCall { limit: size.limit(&limits), request };
    match path.strip_prefix('/').and_then(|path| path.split_once('/')) {
        Some((WORKER, method)) => route_worker(state.worker.clone(), method, call).unwrap_or_else(unknown),
        Some((MASTER, method)) => route_master(state.master.clone(), method, call).unwrap_or_else(unknown),
        _ => unknown(),
    }
}

const WORKER: &str = "tensorflow.WorkerService";
const MASTER: &str = "tensorflow.MasterService";

macro_rules! router {
    ($router:ident $trait:ident $service:literal; $(
        $(#[$doc:meta])* $method:ident $name:ident $request:ident $response:ident $size:ident $attempts:ident;
    )*) => {
        fn $router(
            service: Arc<dyn $trait>,
            method: &str,
            call: impl FnOnce(Size) -> IncomingCall,
        ) -> Option<Pending> {
            $(if method == stringify!($name) {
                return Some(call(Size::$size).answer(move |request: $request| service.$method(request)));
            })*
            None
        }
    };
}

worker_methods!(router route_worker);
master_methods!(router route_master);

/// A call whose message has not been read yet.
struct IncomingCall {
    limit: usize,
    request: Request<Incoming>,
}

impl IncomingCall {
    /// The received message and its URI.
    async fn message(self) -> Result<(Received, Uri)> {
        let (parts, body) = self.request.into_parts();
        match frame::read(body, self.limit, parts.headers.get("grpc-encoding"), Intake::Whole).await {
            Ok((Some(message), _)) => Ok((message, parts.uri)),
            Ok((None, _)) => Err(Error::invalid_argument("a call without a message")),
            Err(ReadError::Message(error)) => Err(error),
            Err(ReadError::Connection(error)) => Err(Error::cancelled(format!("the caller left: {error}"))),
        }
    }

    fn answer<Q, R>(self, handler: impl FnOnce(Q) -> Answer<R> + Send + 'static) -> Pending
    where
        Q: Message + Default + 'static,
        R: Message + 'static,
    {
        Box::pin(async move {
            let limit = self.limit;
            let (message, uri) = self.message().await?;
            let request: Q = message
                .decode()
                .map_err(|error| Error::invalid_argument(format!("{} cannot be read: {error}", uri.path())))?;
            let in_body = error_in_body(&request);
            match Unwound(handler(request)).await {
                Ok(response) => frame::write(&response, limit),
                Err(error) => match in_body {
                    Some(respond) => respond(&error),
                    None => Err(error),
                },
            }
        })
    }
}

/// A function that puts an error into the response's body, if the request asks for that.
fn error_in_body(request: &dyn Any) -> Option<fn(&Error) -> Result<Pieces>> {
    fn run_step(error: &Error) -> Result<Pieces> {
        let (status_code, status_error_message) = status::to_body(error);
        let response = RunStepResponse { status_code, status_error_message, ..RunStepResponse::default() };
        frame::write(&response, usize::MAX)
    }
    fn run_graph(error: &Error) -> Result<Pieces> {
        let (status_code, status_error_message) = status::to_body(error);
        let response = RunGraphResponse { status_code, status_error_message, ..RunGraphResponse::default() };
        frame::write(&response, usize::MAX)
    }
    if request.downcast_ref().is_some_and(|request: &RunStepRequest| request.store_errors_in_response_body) {
        return Some(run_step);
    }
    if request.downcast_ref().is_some_and(|request: &RunGraphRequest| request.store_errors_in_response_body) {
        return Some(run_graph);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_in_every_unit() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", HeaderValue::from_str(text).unwrap());
            timeout(&headers)
        };
        assert_eq!(read("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(read("100m"), Some(Duration::from_millis(100)));
        assert_eq!(read("7u"), Some(Duration::from_micros(7)));
        assert_eq!(read("99999999S"), Some(Duration::from_secs(99_999_999)));
        for bad in ["", "5", "m", "-1m", "999999999S", "1x", "ü"] {
            assert_eq!(bad.parse::<HeaderValue>().ok().and_then(|_| read(bad)), None, "{bad}");
        }
    }
}
