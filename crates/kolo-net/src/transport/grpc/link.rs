//! A connection to another task: opened on first use, shared by all calls, reopened when it is lost.
//!
//! | lock | held by |
//! | --- | --- |
//! | `state` | every call, briefly; never across an await |
//! | `turn` | the call that connects, so that concurrent calls open only one connection |
//!
//! `state` is locked after `turn`, never before it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, TE, USER_AGENT};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use kolo_core::{Code, Error, Result};
use parking_lot::Mutex;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::frame::{self, Intake, Outgoing, ReadError, Received};
use super::options::{CONNECTION_WINDOW, FRAME_BYTES, LinkOptions, ReceiveMemory, STREAM_WINDOW, set_up};
use super::status;
use crate::task::services::{Attempts, Size};
use crate::transport::tls::Token;

/// The backoff between attempts to connect. It starts short, so that a task that has just started is found quickly.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// When a call that waits for its task is first logged, and how often after that.
const FIRST_REPORT: Duration = Duration::from_millis(500);
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// How many times a repeatable call is sent at most if its connection is lost.
const REPEATS: usize = 2;

/// A connection to one task.
pub(super) struct Link {
    /// The task's name, for errors.
    name: String,
    /// `host:port`.
    address: String,
    options: LinkOptions,
    state: Mutex<LinkState>,
    turn: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct LinkState {
    sender: Option<SendRequest<Outgoing>>,
    /// The token for the server.
    token: Option<Token>,
    /// Counts connections, so that an error of an old one does not close its successor.
    generation: u64,
    /// Since when the task cannot be reached.
    down_since: Option<Instant>,
    /// Whether any response has come over this connection.
    has_answered: bool,
    /// Why the task cannot be reached, by the last attempt.
    why_not: Option<String>,
}

/// A sender, and the generation of its connection.
struct Sender {
    requests: SendRequest<Outgoing>,
    token: Option<Token>,
    generation: u64,
}

/// One method.
pub(super) struct Method {
    pub(super) path: &'static str,
    pub(super) size: Size,
    pub(super) attempts: Attempts,
}

/// Chooses how to receive a response, given memory for large tensors.
type ChooseIntake = for<'a> fn(Option<&'a ReceiveMemory>) -> Intake<'a>;

/// Why a call got no response.
enum Failure {
    /// There is no connection.
    Unreachable(String),
    /// The connection was lost; the task may have received the call.
    Lost(String),
    /// The task, or this side, refused the call.
    Refused(Error),
}

impl Link {
    pub(super) fn new(name: String, address: String, options: LinkOptions) -> Arc<Link> {
        let (state, turn) = (Mutex::default(), tokio::sync::Mutex::default());
        Arc::new(Link { name, address, options, state, turn })
    }

    pub(super) fn options(&self) -> &LinkOptions {
        &self.options
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Since when and why the task cannot be reached, if the last attempt failed.
    pub(super) fn trouble(&self) -> Option<(Instant, String)> {
        let state = self.state.lock();
        Some((state.down_since?, state.why_not.clone()?))
    }

    /// Calls a method, within `limit` if there is one. Only encoding and decoding are generic over the message types.
    pub(super) async fn call<Q, R>(&self, method: &Method, request: Q, limit: Option<Duration>) -> Result<R>
    where
        Q: Message + 'static,
        R: Message + Default + 'static,
    {
        let pieces = frame::write(&request, method.size.limit(&self.options.limits))
            .map_err(|error| error.context(self.call_name(method)))?;
        drop(request);
        let answer = self.exchange(method, pieces, |memory| Intake::of::<R>(memory), limit).await?;
        answer.decode().map_err(|error| self.wrong_protocol(format!("its answer cannot be read: {error}")))
    }

    async fn exchange(
        &self,
        method: &Method,
        pieces: VecDeque<Bytes>,
        intake: ChooseIntake,
        limit: Option<Duration>,
    ) -> Result<Received> {
        let began = Instant::now();
        let deadline = limit.and_then(|limit| began.checked_add(limit));
        let call = self.attempt(method, pieces, intake, deadline);
        let Some(deadline) = deadline else { return call.await };
        match tokio::time::timeout_at(deadline.into(), call).await {
            Ok(outcome) => outcome,
            Err(_) => Err(self.late(method, limit.unwrap_or_default())),
        }
    }

    /// Sends a call, with the retries that the method allows.
    async fn attempt(
        &self,
        method: &Method,
        pieces: VecDeque<Bytes>,
        intake: ChooseIntake,
        deadline: Option<Instant>,
    ) -> Result<Received> {
        let patience = Instant::now() + self.options.wait_for_peer;
        let mut next_report = Instant::now() + FIRST_REPORT;
        let mut pause = FIRST_PAUSE;
        let mut sent = 0;
        loop {
            let outcome = match self.connection().await {
                Ok(sender) => {
                    sent += 1;
                    self.send(sender, method, Outgoing::request(pieces.clone()), intake, deadline).await
                }
                Err(failure) => Err(failure),
            };
            let (lost, why) = match outcome {
                Ok(response) => return Ok(response),
                Err(Failure::Refused(error)) => return Err(error),
                Err(Failure::Unreachable(why)) => (false, why),
                Err(Failure::Lost(why)) => (true, why),
            };
            let again = match (method.attempts, lost) {
                (Attempts::Probe, _) | (Attempts::Open, false) => Instant::now() + pause < patience,
                (Attempts::Repeat, true) => sent < REPEATS,
                (Attempts::Repeat, false) | (Attempts::Open, true) | (Attempts::Once, _) => false,
            };
            if !again {
                return Err(self.unreachable(method, lost, &why));
            }
            if Instant::now() >= next_report {
                tracing::warn!("{} still waits: {why}{}", self.call_name(method), self.since());
                next_report = Instant::now() + REPORT_EVERY;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The connection; connects if there is none.
    async fn connection(&self) -> std::result::Result<Sender, Failure> {
        if let Some(sender) = self.state.lock().sender() {
            return Ok(sender);
        }
        let _turn = self.turn.lock().await;
        // Another call may have connected while this one waited for its turn.
        if let Some(sender) = self.state.lock().sender() {
            return Ok(sender);
        }
        let connected = match tokio::time::timeout(self.options.connect_timeout, self.connect()).await {
            Ok(connected) => connected,
            Err(_) => Err(format!("no connection within {:?}", self.options.connect_timeout)),
        };
        let mut state = self.state.lock();
        match connected {
            Ok((requests, token)) => {
                let generation = state.generation + 1;
                let sender = Some(requests.clone());
                *state = LinkState { sender, token: token.clone(), generation, ..LinkState::default() };
                Ok(Sender { requests, token, generation })
            }
            Err(why) => {
                state.down(&why);
                Err(Failure::Unreachable(why))
            }
        }
    }

    async fn connect(&self) -> std::result::Result<(SendRequest<Outgoing>, Option<Token>), String> {
        let stream = TcpStream::connect(&self.address).await.map_err(|error| explain(&error))?;
        set_up(&stream).map_err(|error| explain(&error))?;
        let server = stream.peer_addr().map_err(|error| explain(&error))?;
        let token = self.options.credentials.token_for(server).map_err(|error| error.message().to_owned())?;
        let Some(tls) = &self.options.tls else { return Ok((self.http(stream).await?, token)) };
        let name = tls.server_name(&self.address).map_err(|error| error.message().to_owned())?;
        let stream = tls.connector().connect(name, stream).await.map_err(|error| {
            format!("the TLS handshake failed: {error} (is it a server with TLS, and a certificate of the same CA?)")
        })?;
        Ok((self.http(stream).await?, token))
    }

    async fn http(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> std::result::Result<SendRequest<Outgoing>, String> {
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(FRAME_BYTES)
            .max_concurrent_reset_streams(1 << 12);
        if let Some((every, within)) = self.options.ping {
            builder.keep_alive_interval(every).keep_alive_timeout(within).keep_alive_while_idle(true);
        }
        let (sender, connection) = builder
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| format!("it does not speak HTTP/2: {}", whole(&error)))?;
        let name = self.address.clone();
        // Ends when the connection does, or when the last sender is dropped.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!("the connection to {name} ended: {}", whole(&error));
            }
        });
        Ok(sender)
    }

    async fn send(
        &self,
        mut sender: Sender,
        method: &Method,
        body: Outgoing,
        intake: ChooseIntake,
        deadline: Option<Instant>,
    ) -> std::result::Result<Received, Failure> {
        let request = self.request(method, body, sender.token.as_ref(), deadline).map_err(Failure::Refused)?;
        let failed = |error| self.failed(&error, sender.generation);
        sender.requests.ready().await.map_err(failed)?;
        let response = sender.requests.send_request(request).await.map_err(failed)?;
        let max_bytes = method.size.limit(&self.options.limits);
        self.read(response, max_bytes, intake, sender.generation).await.map_err(|failure| match failure {
            Failure::Refused(error) if error.code() == Code::Unimplemented && error.message().is_empty() => {
                Failure::Refused(Error::unimplemented(format!("{} does not do it", self.call_name(method))))
            }
            other => other,
        })
    }

    fn request(
        &self,
        method: &Method,
        body: Outgoing,
        token: Option<&Token>,
        deadline: Option<Instant>,
    ) -> Result<Request<Outgoing>> {
        let scheme = if self.options.tls.is_some() { "https" } else { "http" };
        let uri = Uri::builder().scheme(scheme).authority(self.address.as_str()).path_and_query(method.path).build();
        let uri = uri.map_err(|error| Error::invalid_argument(format!("the address '{}': {error}", self.address)))?;
        let mut request = Request::new(body);
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = uri;
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(TE, HeaderValue::from_static("trailers"));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("kolo/", env!("CARGO_PKG_VERSION"))));
        headers.insert(HeaderName::from_static("grpc-accept-encoding"), HeaderValue::from_static("identity,gzip"));
        if let Some(deadline) = deadline {
            headers.insert(HeaderName::from_static("grpc-timeout"), timeout_header(deadline));
        }
        if let Some(token) = token {
            headers.insert(AUTHORIZATION, token.header());
        }
        Ok(request)
    }

    async fn read(
        &self,
        response: Response<Incoming>,
        max_bytes: usize,
        intake: ChooseIntake,
        generation: u64,
    ) -> std::result::Result<Received, Failure> {
        self.state.lock().has_answered = true;
        let (parts, body) = response.into_parts();
        if parts.status != StatusCode::OK {
            let why = format!("it is an HTTP server, and not gRPC's: it answered {}", parts.status);
            return Err(Failure::Refused(self.wrong_protocol(why)));
        }
        if let Some(Err(error)) = status::outcome(&parts.headers) {
            return Err(Failure::Refused(error));
        }
        let read =
            frame::read(body, max_bytes, parts.headers.get("grpc-encoding"), intake(self.options.memory.as_ref()))
                .await;
        let (message, trailers) = match read {
            Ok(read) => read,
            Err(ReadError::Connection(error)) => return Err(self.failed(&error, generation)),
            Err(ReadError::Message(error)) => return Err(Failure::Refused(error.context(self.who()))),
        };
        match (status::outcome(&trailers), message) {
            (Some(Err(error)), _) => Err(Failure::Refused(error)),
            (Some(Ok(())), Some(message)) => Ok(message),
            (Some(Ok(())), None) => Err(Failure::Refused(self.wrong_protocol("an answer without a message".into()))),
            (None, _) => Err(Failure::Lost("the answer broke off".into())),
        }
    }

    /// Classifies an error of the connection.
    fn failed(&self, error: &hyper::Error, generation: u64) -> Failure {
        let h2 = source::<h2::Error>(error);
        if let Some(h2) = h2.filter(|h2| h2.is_reset() && h2.is_remote()) {
            let reason = h2.reason().unwrap_or(h2::Reason::INTERNAL_ERROR);
            let why = format!("{} ended the call: {reason}", self.who());
            return Failure::Refused(match reason {
                h2::Reason::CANCEL => Error::cancelled(why),
                h2::Reason::REFUSED_STREAM => return Failure::Unreachable(why),
                h2::Reason::ENHANCE_YOUR_CALM => Error::resource_exhausted(why),
                _ => Error::internal(why),
            });
        }
        let library = h2.filter(|h2| h2.is_library() && !h2.is_io());
        let why = match library {
            Some(h2) => format!("it does not speak HTTP/2 as it should: {h2}"),
            None => whole(error),
        };
        let mut state = self.state.lock();
        let why = match (state.has_answered, &self.options.tls) {
            (true, _) => why,
            (false, None) => format!("{why} (it has never answered anything: does it want TLS?)"),
            (false, Some(_)) => format!("{why} (it has never answered anything: is our certificate of its CA?)"),
        };
        if state.generation == generation {
            state.down(&why);
        }
        Failure::Lost(why)
    }

    fn wrong_protocol(&self, why: String) -> Error {
        Error::internal(format!("{}: wrong protocol: {why}", self.who()))
    }

    fn unreachable(&self, method: &Method, lost: bool, why: &str) -> Error {
        let what = if lost { "the connection was lost" } else { "cannot be reached" };
        Error::unavailable(format!("{}: {what}: {why}{}", self.call_name(method), self.since()))
    }

    fn late(&self, method: &Method, limit: Duration) -> Error {
        let why = match &self.state.lock().why_not {
            Some(why) => format!("cannot be reached: {why}"),
            None => "no answer".to_owned(),
        };
        Error::deadline_exceeded(format!("{}: {why}, within {limit:?}{}", self.call_name(method), self.since()))
    }

    fn since(&self) -> String {
        match self.state.lock().down_since {
            Some(since) => format!("; it has been so for {:.1} s", since.elapsed().as_secs_f64()),
            None => String::new(),
        }
    }

    fn call_name(&self, method: &Method) -> String {
        let name = method.path.rsplit('/').next().unwrap_or_default();
        format!("{name} of {}", self.who())
    }

    fn who(&self) -> impl fmt::Display {
        format!("{} at {}", self.name, self.address)
    }
}

impl LinkState {
    fn sender(&self) -> Option<Sender> {
        let requests = self.sender.clone().filter(|sender| !sender.is_closed())?;
        Some(Sender { requests, token: self.token.clone(), generation: self.generation })
    }

    fn down(&mut self, why: &str) {
        self.sender = None;
        self.down_since.get_or_insert_with(Instant::now);
        self.why_not = Some(why.to_owned());
    }
}

/// The remaining time, in the finest unit that fits into eight digits.
fn timeout_header(deadline: Instant) -> HeaderValue {
    const EIGHT_DIGITS: u128 = 99_999_999;
    let left = deadline.saturating_duration_since(Instant::now());
    let text = match left {
        left if left.as_micros() <= EIGHT_DIGITS => format!("{}u", left.as_micros()),
        left if left.as_millis() <= EIGHT_DIGITS => format!("{}m", left.as_millis()),
        left => format!("{}S", u128::from(left.as_secs()).min(EIGHT_DIGITS)),
    };
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("99999999S"))
}

/// Describes a connection error, with the likely cause.
pub(crate) fn explain(error: &std::io::Error) -> String {
    use std::io::ErrorKind::*;
    match error.kind() {
        ConnectionRefused => "connection refused (no server listens there, or not yet)".into(),
        HostUnreachable | NetworkUnreachable => format!("no route to it ({error})"),
        TimedOut => "timed out (is it up, and does a firewall let us through?)".into(),
        _ => format!("{error}"),
    }
}

/// An error's text with its causes.
fn whole(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    text
}

/// The cause of this type, if there is one.
fn source<'a, T: std::error::Error + 'static>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a T> {
    let mut error = Some(error);
    while let Some(found) = error {
        if let Some(found) = found.downcast_ref() {
            return Some(found);
        }
        error = found.source();
    }
    None
}
