//! One connection from the server's side: calls run independently, and responses are sent as they complete.
//!
//! A call is polled once on the reader's thread, and the responses to all calls of one read are flushed in one write.
//! Only a call that is then still pending is spawned as a task.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use kolo_core::{Error, Result};
use kolo_device::cpu::IntraPool;
use kolo_ops::{Received, RendezvousKey};
use parking_lot::Mutex;
use prost::Message;
use tokio::task::{AbortHandle, JoinHandle};

use super::greeting::{Identity, welcome};
use super::link::message;
use super::outbox::{Outbox, WireMessage};
use super::read::Reader;
use super::shared::{MIN_SHARED_BYTES, OutgoingFiles};
use super::stream::Stream;
use super::{Allocate, Failure, HEADER, Header, Keys, Kind, TensorHead};
use crate::task::services::{
    Answer, Delivery, Guard, MasterService, Unwound, WorkerService, master_methods, worker_methods,
};
use crate::transport::batch::Batch;
use crate::transport::connection::{self, ConnectionId};
use crate::wire::limits::{MessageLimits, no_room, room_for, too_long};
use crate::wire::proto::*;
use crate::wire::tensor_wire::WireTensor;

/// The first number of the master's methods; those below are the worker's.
const FIRST_OF_MASTER: u8 = 128;

/// The services that a connection may call.
#[derive(Clone)]
pub(crate) struct Services {
    pub worker: Arc<dyn WorkerService>,
    pub master: Arc<dyn MasterService>,
}

/// Responses below this size are deferred, to share a system call with others of their step; for larger ones a system
/// call costs little beside the transfer.
const SMALL: usize = 32 << 10;

/// How many distinct key lists of `Receive` requests a connection caches in parsed form. Training repeats a few.
const MAX_KNOWN_KEYS: usize = 64;

/// Serves one connection until the other side closes it. Calls that are still running then are cancelled.
pub(crate) async fn serve_connection(
    stream: Stream,
    services: Services,
    identity: &Identity,
    limits: MessageLimits,
    allocate: Allocate,
    pool: Arc<IntraPool>,
) -> Result<()> {
    let (peer, is_shared) = welcome(&stream, identity).await?;
    let stream = Arc::new(stream);
    let outbox = Arc::new(Outbox::new(stream.clone()));
    let mut connection = Connection {
        id: ConnectionId::new(),
        services,
        outbox: outbox.clone(),
        shared: is_shared.then(|| Arc::new(OutgoingFiles::new(pool))),
        running: Arc::default(),
        known_keys: HashMap::new(),
        steps: HashSet::new(),
        limit: limits.tensors,
    };
    let _guard = ServeGuard { outbox: outbox.clone(), writing: tokio::spawn(outbox.clone().drain()) };
    // Callers put nothing into shared memory.
    let mut reader = Reader::new(&stream, limits, allocate, Arc::new(|_| ()));
    loop {
        if !reader.has_message() {
            // The responses to the calls of one read are flushed together.
            outbox.release();
            connection.services.worker.flush();
        }
        match reader.next().await {
            Ok(Some(arrived)) => {
                outbox.hold();
                let _batch = Batch::open();
                match connection.handle(arrived.header, arrived.head) {
                    Ok(()) => {}
                    Err(error) => return Err(error.context(peer)),
                }
            }
            Ok(None) => return Ok(()),
            Err(error) => return Err(error.context(peer)),
        }
    }
}

/// Closes the connection when serving ends, also by a panic or an abort, so that the other side notices.
struct ServeGuard {
    outbox: Arc<Outbox>,
    writing: JoinHandle<()>,
}

impl Drop for ServeGuard {
    fn drop(&mut self) {
        match std::thread::panicking() {
            true => self.outbox.broke(&std::io::Error::other("internal error of this task")),
            false => self.outbox.close(Error::unavailable("the connection is closed")),
        }
        self.writing.abort();
    }
}

/// The state of a connection.
struct Connection {
    id: Arc<ConnectionId>,
    services: Services,
    outbox: Arc<Outbox>,
    shared: Option<Arc<OutgoingFiles>>,
    running: Arc<Mutex<HashMap<u64, RunningCall>>>,
    /// Parsed key lists of `Receive` requests, by their encoding.
    known_keys: HashMap<Bytes, Arc<[RendezvousKey]>>,
    /// Steps that were started over this connection. If it is lost, no `EndStep` will come for them.
    steps: HashSet<u64>,
    /// The maximum number of bytes of a response.
    limit: usize,
}

/// A pending call.
enum RunningCall {
    Task(AbortHandle),
    /// Waits for tensors; dropping the guard cancels that. `None` while the request is being registered.
    Tensors(Option<Guard>),
}

impl Drop for Connection {
    fn drop(&mut self) {
        let calls = std::mem::take(&mut *self.running.lock());
        for call in calls.into_values() {
            match call {
                RunningCall::Task(task) => task.abort(),
                RunningCall::Tensors(guard) => drop(guard),
            }
        }
        for &step in &self.steps {
            self.services.worker.end_step(step);
        }
    }
}

impl Connection {
    fn handle(&mut self, header: Header, head: Bytes) -> Result<()> {
        match header.kind {
            Kind::Request => self.start(header, head),
            Kind::Receive => self.receive(header, head)?,
            Kind::EndStep => {
                self.steps.remove(&header.call);
                self.services.worker.end_step(header.call);
            }
            Kind::Cancel => match self.running.lock().remove(&header.call) {
                Some(RunningCall::Task(task)) => task.abort(),
                Some(RunningCall::Tensors(_)) | None => {}
            },
            Kind::Release => {
                if let (Some(shared), Ok(id)) = (&self.shared, u32::try_from(header.call)) {
                    shared.release(id);
                }
            }
            Kind::Response | Kind::Failure => return Err(Error::data_loss("a response where a request was expected")),
        }
        Ok(())
    }

    /// Starts a call.
    fn start(&mut self, header: Header, head: Bytes) {
        let Header { method, call, .. } = header;
        let (services, shared, limit) = (self.services.clone(), self.shared.clone(), self.limit);
        let run_graph = (method == WorkerMethod::RunGraph.number()).then(|| RunGraphRequest::decode(head.clone()));
        let running: Answer<WireMessage> = match run_graph {
            Some(Ok(request)) => {
                self.steps.insert(request.step_id as u64);
                let answer = services.worker.run_graph(request);
                Box::pin(async move { answer.await.map(|response| response_message(method, call, &response, limit)) })
            }
            _ => Box::pin(async move {
                match method < FIRST_OF_MASTER {
                    true => worker_call(&*services.worker, method, call, head, (shared.as_deref(), limit)).await,
                    false => master_call(&*services.master, method, call, head, (shared.as_deref(), limit)).await,
                }
            }),
        };
        let mut answer = Box::pin(connection::on(self.id.clone(), async move {
            Unwound(running).await.unwrap_or_else(|error| message(Kind::Failure, method, call, &Failure::of(&error)))
        }));
        // Most calls complete without waiting. A pending one is polled again by its task, so no waker is needed here.
        if let Poll::Ready(answer) = answer.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            // If the connection is lost, so is the caller.
            let _ = self.outbox.push(answer);
            return;
        }
        let (outbox, ended) = (self.outbox.clone(), self.running.clone());
        // Locked until the call is registered, so that the task cannot remove it before.
        let mut running = self.running.lock();
        let task = tokio::spawn(async move {
            let answer = answer.await;
            ended.lock().remove(&call);
            // As above.
            let _ = outbox.push(answer);
        });
        running.insert(call, RunningCall::Task(task.abort_handle()));
    }

    /// Sends each of the requested tensors as soon as it is available.
    fn receive(&mut self, header: Header, head: Bytes) -> Result<()> {
        let (Some((step_id, _)), first) = (head.split_first_chunk::<8>(), header.call) else {
            return Err(Error::data_loss("a request for tensors without a step"));
        };
        let step_id = u64::from_le_bytes(*step_id);
        let keys = self.keys(head.slice(8..))?;
        if keys.is_empty() {
            return Ok(());
        }
        let (outbox, running, shared) = (self.outbox.clone(), self.running.clone(), self.shared.clone());
        let (n_left, limit) = (AtomicUsize::new(keys.len()), self.limit);
        let each = move |index: usize, received: Result<Received>| {
            let call = first.wrapping_add(index as u64);
            let method = WorkerMethod::RecvTensor.number();
            let answer = received.and_then(crate::task::worker::recv_response);
            let message = match answer {
                Ok(response) => tensor_message(method, call, response, shared.as_deref(), limit),
                Err(error) => message(Kind::Failure, method, call, &Failure::of(&error)),
            };
            let n_bytes = message.n_bytes();
            // If the connection is lost, so is the caller.
            let _ = if n_bytes < SMALL { outbox.push_later(message) } else { outbox.push(message) };
            if n_left.fetch_sub(1, Ordering::AcqRel) == 1 {
                let ended = running.lock().remove(&first);
                drop(ended);
            }
        };
        let flush = self.outbox.clone();
        let delivery = Delivery { each: Arc::new(each), flush: Arc::new(move || flush.flush_now()) };
        self.running.lock().insert(first, RunningCall::Tensors(None));
        let guard = self.services.worker.recv_tensors(step_id, &keys, delivery);
        // All tensors may have been delivered already.
        match self.running.lock().get_mut(&first) {
            Some(RunningCall::Tensors(place)) => *place = guard,
            Some(RunningCall::Task(_)) | None => drop(guard),
        }
        Ok(())
    }

    fn keys(&mut self, bytes: Bytes) -> Result<Arc<[RendezvousKey]>> {
        if let Some(keys) = self.known_keys.get(&bytes) {
            return Ok(keys.clone());
        }
        let parsed = Keys::decode(bytes.clone()).map_err(|error| Error::data_loss(format!("keys: {error}")))?;
        let keys: Arc<[RendezvousKey]> =
            parsed.key.iter().map(|key| RendezvousKey::parse(key)).collect::<Result<_>>()?;
        if self.known_keys.len() >= MAX_KNOWN_KEYS {
            self.known_keys.clear();
        }
        // A copy: a slice would keep the whole read buffer alive.
        self.known_keys.insert(Bytes::copy_from_slice(&bytes), keys.clone());
        Ok(keys)
    }
}

macro_rules! dispatch {
    (@message RecvTensor $method:ident $call:ident $response:ident $shared:ident $limit:ident) => {
        tensor_message($method, $call, $response, $shared, $limit)
    };
    (@message $name:ident $method:ident $call:ident $response:ident $shared:ident $limit:ident) => {
        response_message($method, $call, &$response, $limit)
    };
    ($function:ident $methods:ident $first:literal $trait:ident $service:literal; $(
        $(#[$doc:meta])* $method:ident $name:ident $request:ident $response:ident $size:ident $attempts:ident;
    )*) => {
        /// The methods, numbered by their position in the list.
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
            (shared, limit): (Option<&OutgoingFiles>, usize),
        ) -> Result<WireMessage> {
            let _ = shared;
            $(if method == $methods::$name.number() {
                let request = $request::decode(head)
                    .map_err(|error| Error::invalid_argument(format!("{}: {error}", stringify!($name))))?;
                let response = service.$method(request).await?;
                return Ok(dispatch!(@message $name method call response shared limit));
            })*
            Err(Error::unimplemented(format!("this task has no method {method}")))
        }
    };
}

worker_methods!(dispatch worker_call WorkerMethod 0);
master_methods!(dispatch master_call MasterMethod 128);

/// The response, or a failure if it is longer than `limit` or there is no memory for it: a graph decides how long it is.
fn response_message(method: u8, call: u64, response: &impl Message, limit: usize) -> WireMessage {
    let n_head = response.encoded_len();
    if n_head <= limit
        && let Ok(mut head) = room_for(HEADER + n_head)
    {
        Header { kind: Kind::Response, method, is_shared: false, n_head, call, n_body: 0 }.write(&mut head);
        response.encode_raw(&mut head);
        return WireMessage { head, body: None };
    }
    let error = if n_head > limit { too_long(n_head, limit) } else { no_room(n_head) };
    message(Kind::Failure, method, call, &Failure::of(&error))
}

/// The response with a tensor. Its elements are the message's body if the host's memory holds them in wire format.
pub(super) fn tensor_message(
    method: u8,
    call: u64,
    response: RecvTensorResponse,
    shared: Option<&OutgoingFiles>,
    limit: usize,
) -> WireMessage {
    let tensor = response.tensor.as_ref().and_then(WireTensor::as_tensor);
    let body =
        tensor.filter(|tensor| tensor.dtype().size().is_some() && tensor.host_bytes().is_ok_and(|b| !b.is_empty()));
    let Some(tensor) = body.cloned() else { return response_message(method, call, &response, limit) };
    let n_body = tensor.n_bytes();
    if n_body > limit {
        return message(Kind::Failure, method, call, &Failure::of(&too_long(n_body, limit)));
    }
    let put = match shared.filter(|_| n_body >= MIN_SHARED_BYTES) {
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
    WireMessage { head: bytes, body: (!is_shared).then_some(tensor) }
}
