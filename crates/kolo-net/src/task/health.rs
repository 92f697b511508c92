//! Answers the probes of Kubernetes and others over HTTP: `/startupz`, `/livez` and `/readyz`, 200 or 503 with the reason as text.
//!
//! - started: the task serves on its port.
//! - live: its network threads answer, which is all that this needs; a task that waits for a step is live.
//! - ready: it has its variables, restored from a journal or a replica if there is one, and was not asked to stop.
//!
//! Nothing else is told and nothing can be asked for, so probes need no token.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body::Frame;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use kolo_core::{Error, Result};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use super::worker::Worker;

/// So many probes are answered at once; others wait.
const MOST: usize = 32;

/// How long a connection may take to ask.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is looked at.
#[derive(Clone)]
pub(super) struct Probed {
    pub worker: Arc<Worker>,
    pub stop: watch::Receiver<bool>,
}

/// Listens there, for as long as the runtime lives in which this is called. Returns the address.
pub(super) async fn listen(address: SocketAddr, probed: Probed) -> Result<SocketAddr> {
    let listener = TcpListener::bind(address).await;
    let listener =
        listener.map_err(|error| Error::unavailable(format!("probes cannot be answered at {address}: {error}")))?;
    let address = listener.local_addr().map_err(|error| Error::unavailable(error.to_string()))?;
    tokio::spawn(async move {
        let permits = Arc::new(Semaphore::new(MOST));
        loop {
            let Ok(permit) = permits.clone().acquire_owned().await else { return };
            let Ok((tcp, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let probed = probed.clone();
            tokio::spawn(async move {
                let service = service_fn(|request| {
                    let answer = answer(&request, &probed);
                    async { Ok::<_, Infallible>(answer) }
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(PATIENCE)
                    .keep_alive(false)
                    .serve_connection(TokioIo::new(tcp), service);
                // Who hangs up is not waited for.
                let _ = tokio::time::timeout(PATIENCE, connection).await;
                drop(permit);
            });
        }
    });
    Ok(address)
}

fn answer(request: &Request<Incoming>, probed: &Probed) -> Response<Text> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/livez" | "/startupz" | "/healthz") => (StatusCode::OK, "ok\n"),
        (&Method::GET | &Method::HEAD, "/readyz") => match () {
            () if *probed.stop.borrow() => (StatusCode::SERVICE_UNAVAILABLE, "stopping\n"),
            () if !probed.worker.has_variables() => {
                (StatusCode::SERVICE_UNAVAILABLE, "fetching its variables from its replica\n")
            }
            () => (StatusCode::OK, "ok\n"),
        },
        (&Method::GET | &Method::HEAD, _) => (StatusCode::NOT_FOUND, "/livez, /readyz and /startupz are here\n"),
        _ => (StatusCode::METHOD_NOT_ALLOWED, "only GET\n"),
    };
    let mut response = Response::new(Text(Some(Bytes::from_static(text.as_bytes()))));
    *response.status_mut() = status;
    response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("text/plain"));
    response
}

/// A body of one piece.
struct Text(Option<Bytes>);

impl http_body::Body for Text {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        std::task::Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(self.0.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}
