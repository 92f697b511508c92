//! One connection from the server's side: calls come in, each runs by itself, answers go out as they are ready.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use kolo_core::{Error, Result};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;

use super::greeting::{Identity, welcome};
use super::link::frame;
use super::outbox::{Frame, Outbox};
use super::read::Reader;
use super::{Allocate, Failure, HEADER, Header, Kind, TensorHead};
use crate::limits::MessageLimits;
use crate::proto::*;
use crate::services::{WorkerService, worker_methods};
use crate::tensor_wire::WireTensor;

/// Serves one connection until the other side closes it. The calls that run then are given up.
pub(crate) async fn serve_connection(
    mut stream: TcpStream,
    worker: Arc<dyn WorkerService>,
    identity: &Identity,
    limits: MessageLimits,
    allocate: Allocate,
) -> Result<()> {
    let peer = welcome(&mut stream, identity).await?;
    let stream = Arc::new(stream);
    let outbox = Arc::new(Outbox::new(stream.clone()));
    let writing = tokio::spawn(outbox.clone().drain());
    let running: Arc<Mutex<HashMap<u64, AbortHandle>>> = Arc::default();
    let mut reader = Reader::new(&stream, limits, allocate);
    let result = loop {
        match reader.next().await {
            Ok(Some(arrived)) => match arrived.header.kind {
                Kind::Request => start(&worker, arrived.header, arrived.head, &outbox, &running),
                Kind::Cancel => {
                    if let Some(call) = running.lock().remove(&arrived.header.call) {
                        call.abort();
                    }
                }
                Kind::Response | Kind::Failure => {
                    break Err(Error::data_loss(format!("{peer} answers what nobody asked")));
                }
            },
            Ok(None) => break Ok(()),
            Err(error) => break Err(error.context(peer)),
        }
    };
    outbox.close(Error::unavailable("the connection is closed"));
    let calls = std::mem::take(&mut *running.lock());
    calls.values().for_each(AbortHandle::abort);
    writing.abort();
    result
}

/// Starts a call.
fn start(
    worker: &Arc<dyn WorkerService>,
    header: Header,
    head: Bytes,
    outbox: &Arc<Outbox>,
    running: &Arc<Mutex<HashMap<u64, AbortHandle>>>,
) {
    let Header { method, call, .. } = header;
    let (worker, outbox, ended) = (worker.clone(), outbox.clone(), running.clone());
    // Held until the call is noted, so that it cannot end before.
    let mut running = running.lock();
    let task = tokio::spawn(async move {
        let answer = dispatch(&*worker, method, call, head).await;
        let answer = answer.unwrap_or_else(|error| frame(Kind::Failure, method, call, &Failure::of(&error)));
        ended.lock().remove(&call);
        // If the connection is gone, so is whoever asked.
        let _ = outbox.push(answer);
    });
    running.insert(call, task.abort_handle());
}

macro_rules! dispatch {
    (@frame RecvTensor $method:ident $call:ident $response:ident) => {
        tensor_frame($method, $call, $response)
    };
    (@frame $name:ident $method:ident $call:ident $response:ident) => {
        frame(Kind::Response, $method, $call, &$response)
    };
    ($trait:ident $service:literal; $(
        $(#[$doc:meta])* $method:ident $name:ident $request:ident $response:ident $size:ident $repeat:ident;
    )*) => {
        /// The numbers of methods on the wire: their places in the list.
        #[derive(Clone, Copy)]
        #[allow(clippy::enum_variant_names)]
        pub(super) enum Method {
            $($name),*
        }

        async fn dispatch(worker: &dyn $trait, method: u8, call: u64, head: Bytes) -> Result<Frame> {
            $(if method == Method::$name as u8 {
                let request = $request::decode(head)
                    .map_err(|error| Error::invalid_argument(format!("{}: {error}", stringify!($name))))?;
                let response = worker.$method(request).await?;
                return Ok(dispatch!(@frame $name method call response));
            })*
            Err(Error::unimplemented(format!("this task has no method {method}")))
        }
    };
}

worker_methods!(dispatch);

/// A tensor's answer: its elements are the frame's body, if they lie in memory as they travel.
pub(super) fn tensor_frame(method: u8, call: u64, response: RecvTensorResponse) -> Frame {
    let tensor = response.tensor.as_ref().and_then(WireTensor::as_tensor);
    let body =
        tensor.filter(|tensor| tensor.dtype().size().is_some() && tensor.host_bytes().is_ok_and(|b| !b.is_empty()));
    let Some(tensor) = body.cloned() else { return frame(Kind::Response, method, call, &response) };
    let head = TensorHead {
        dtype: tensor.dtype() as i32,
        dims: tensor.shape().dims().iter().map(|&dim| dim as u64).collect(),
        is_dead: response.is_dead,
        send_start_micros: response.send_start_micros,
    };
    let n_head = head.encoded_len();
    let mut bytes = Vec::with_capacity(HEADER + n_head);
    Header { kind: Kind::Response, method, n_head, call, n_body: tensor.n_bytes() }.write(&mut bytes);
    head.encode_raw(&mut bytes);
    Frame { head: bytes, body: Some(tensor) }
}
