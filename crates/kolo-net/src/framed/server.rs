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
use super::shared::{LEAST, Outgoing};
use super::{Allocate, Failure, HEADER, Header, Kind, TensorHead};
use crate::limits::MessageLimits;
use crate::proto::*;
use crate::services::{MasterService, WorkerService, master_methods, worker_methods};
use crate::tensor_wire::WireTensor;

/// The first number of the master's methods; those below are the worker's.
const FIRST_OF_MASTER: u8 = 128;

/// What a connection may call.
#[derive(Clone)]
pub(crate) struct Services {
    pub worker: Arc<dyn WorkerService>,
    pub master: Arc<dyn MasterService>,
}

/// Serves one connection until the other side closes it. The calls that run then are given up.
pub(crate) async fn serve_connection(
    mut stream: TcpStream,
    services: Services,
    identity: &Identity,
    limits: MessageLimits,
    allocate: Allocate,
) -> Result<()> {
    let (peer, is_shared) = welcome(&mut stream, identity).await?;
    let shared = is_shared.then(|| Arc::new(Outgoing::default()));
    let stream = Arc::new(stream);
    let outbox = Arc::new(Outbox::new(stream.clone()));
    let writing = tokio::spawn(outbox.clone().drain());
    let running: Arc<Mutex<HashMap<u64, AbortHandle>>> = Arc::default();
    let mut reader = Reader::new(&stream, limits, allocate);
    let result = loop {
        match reader.next().await {
            Ok(Some(arrived)) => match arrived.header.kind {
                Kind::Request => start(&services, arrived.header, arrived.head, &outbox, &running, shared.as_ref()),
                Kind::Cancel => {
                    if let Some(call) = running.lock().remove(&arrived.header.call) {
                        call.abort();
                    }
                }
                Kind::Release => {
                    if let (Some(shared), Ok(id)) = (&shared, u32::try_from(arrived.header.call)) {
                        shared.release(id);
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
    services: &Services,
    header: Header,
    head: Bytes,
    outbox: &Arc<Outbox>,
    running: &Arc<Mutex<HashMap<u64, AbortHandle>>>,
    shared: Option<&Arc<Outgoing>>,
) {
    let shared = shared.cloned();
    let Header { method, call, .. } = header;
    let (services, outbox, ended) = (services.clone(), outbox.clone(), running.clone());
    // Held until the call is noted, so that it cannot end before.
    let mut running = running.lock();
    let task = tokio::spawn(async move {
        let answer = match method < FIRST_OF_MASTER {
            true => worker_call(&*services.worker, method, call, head, shared.as_deref()).await,
            false => master_call(&*services.master, method, call, head, shared.as_deref()).await,
        };
        let answer = answer.unwrap_or_else(|error| frame(Kind::Failure, method, call, &Failure::of(&error)));
        ended.lock().remove(&call);
        // If the connection is gone, so is whoever asked.
        let _ = outbox.push(answer);
    });
    running.insert(call, task.abort_handle());
}

macro_rules! dispatch {
    (@frame RecvTensor $method:ident $call:ident $response:ident $shared:ident) => {
        tensor_frame($method, $call, $response, $shared)
    };
    (@frame $name:ident $method:ident $call:ident $response:ident $shared:ident) => {
        frame(Kind::Response, $method, $call, &$response)
    };
    ($function:ident $methods:ident $first:literal $trait:ident $service:literal; $(
        $(#[$doc:meta])* $method:ident $name:ident $request:ident $response:ident $size:ident $attempts:ident;
    )*) => {
        /// The methods by their places in the list.
        #[derive(Clone, Copy)]
        #[allow(clippy::enum_variant_names)]
        pub(super) enum $methods {
            $($name),*
        }

        impl $methods {
            /// Its number on the wire.
            pub(super) const fn number(self) -> u8 {
                $first + self as u8
            }
        }

        async fn $function(
            service: &dyn $trait,
            method: u8,
            call: u64,
            head: Bytes,
            shared: Option<&Outgoing>,
        ) -> Result<Frame> {
            let _ = shared;
            $(if method == $methods::$name.number() {
                let request = $request::decode(head)
                    .map_err(|error| Error::invalid_argument(format!("{}: {error}", stringify!($name))))?;
                let response = service.$method(request).await?;
                return Ok(dispatch!(@frame $name method call response shared));
            })*
            Err(Error::unimplemented(format!("this task has no method {method}")))
        }
    };
}

worker_methods!(dispatch worker_call WorkerMethod 0);
master_methods!(dispatch master_call MasterMethod 128);

/// A tensor's answer: its elements are the frame's body, if they lie in memory as they travel.
pub(super) fn tensor_frame(method: u8, call: u64, response: RecvTensorResponse, shared: Option<&Outgoing>) -> Frame {
    let tensor = response.tensor.as_ref().and_then(WireTensor::as_tensor);
    let body =
        tensor.filter(|tensor| tensor.dtype().size().is_some() && tensor.host_bytes().is_ok_and(|b| !b.is_empty()));
    let Some(tensor) = body.cloned() else { return frame(Kind::Response, method, call, &response) };
    let n_body = tensor.n_bytes();
    let put = match shared.filter(|_| n_body >= LEAST) {
        Some(shared) => tensor.host_bytes().ok().and_then(|bytes| shared.put(bytes)),
        None => None,
    };
    let is_shared = put.is_some();
    let (shared_id, shared_path) = put.map_or((0, String::new()), |put| (put.id, put.path));
    let head = TensorHead {
        shared_id,
        shared_path,
        dtype: tensor.dtype() as i32,
        dims: tensor.shape().dims().iter().map(|&dim| dim as u64).collect(),
        is_dead: response.is_dead,
        send_start_micros: response.send_start_micros,
    };
    let n_head = head.encoded_len();
    let mut bytes = Vec::with_capacity(HEADER + n_head);
    Header { kind: Kind::Response, method, is_shared, n_head, call, n_body }.write(&mut bytes);
    head.encode_raw(&mut bytes);
    Frame { head: bytes, body: (!is_shared).then_some(tensor) }
}
