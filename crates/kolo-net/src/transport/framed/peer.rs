//! A task in another process, as worker or as master: reached by Kolo's own transport if it supports it, otherwise by
//! gRPC.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use prost::Message as _;
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use super::Allocate;
use super::greeting::{Identity, PeerProtocol, introduce};
use super::link::{Link, Reply};
use super::server::{MasterMethod, WorkerMethod};
use super::stream::Stream;
use crate::task::peers::TaskName;
use crate::task::services::{Answer, Each, Group, Guard, MasterService, WorkerService, master_methods, worker_methods};
use crate::transport::grpc;
use crate::transport::tls::{ClientTls, Credentials};
use crate::wire::limits::MessageLimits;
use crate::wire::proto::*;
use crate::wire::tensor_wire::WireTensor;

/// The timeout of one attempt to connect.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// The first and the longest backoff between attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(250));

/// When to log first that a task is missing, and how often after that.
const FIRST_REPORT: Duration = Duration::from_millis(500);
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// Another task as a worker.
pub(crate) struct KoloPeer {
    inner: Arc<Inner>,
    /// For a TensorFlow task.
    grpc: Arc<dyn WorkerService>,
}

/// Another task as a master.
pub(crate) struct KoloMaster {
    inner: Arc<Inner>,
    /// For a TensorFlow task.
    grpc: Arc<dyn MasterService>,
}

struct Inner {
    /// Its name in error messages.
    name: String,
    address: String,
    options: ConnectOptions,
    state: Mutex<ConnectionState>,
    /// The connection, if there is one, for calls that do not connect.
    current: parking_lot::Mutex<Option<Arc<Link>>>,
    /// Why the last attempt to connect failed.
    trouble: parking_lot::Mutex<Option<String>>,
}

/// Options of connections to other tasks.
#[derive(Clone)]
pub(crate) struct ConnectOptions {
    pub identity: Identity,
    /// TLS; `None` is plain text.
    pub tls: Option<ClientTls>,
    pub credentials: Credentials,
    pub limits: MessageLimits,
    pub allocate: Allocate,
}

#[derive(Clone, Default)]
enum ConnectionState {
    #[default]
    NotConnected,
    Kolo(Arc<Link>),
    /// It does not support our transport.
    Grpc,
}

/// The transport of a call.
enum Transport {
    Kolo(Arc<Link>),
    Grpc,
}

impl KoloPeer {
    pub fn new(task: TaskName, address: String, options: ConnectOptions, grpc: Arc<dyn WorkerService>) -> KoloPeer {
        KoloPeer { inner: Inner::new(task.to_string(), address, options), grpc }
    }
}

impl KoloMaster {
    pub fn new(address: String, options: ConnectOptions, grpc: Arc<dyn MasterService>) -> KoloMaster {
        KoloMaster { inner: Inner::new("the server".to_owned(), address, options), grpc }
    }
}

impl Inner {
    fn new(name: String, address: String, options: ConnectOptions) -> Arc<Inner> {
        let (state, current, trouble) = (Mutex::default(), Default::default(), Default::default());
        Arc::new(Inner { name, address, options, state, current, trouble })
    }

    /// The connection, if there is one.
    fn link(&self) -> Option<Arc<Link>> {
        self.current.lock().clone().filter(|link| !link.is_over())
    }

    /// The transport; connects if there is no connection. One attempt at a time; other callers wait for it.
    async fn transport(&self) -> Result<Transport> {
        if let Some(link) = self.link() {
            return Ok(Transport::Kolo(link));
        }
        let mut state = self.state.lock().await;
        match &*state {
            ConnectionState::Kolo(link) if !link.is_over() => return Ok(Transport::Kolo(link.clone())),
            ConnectionState::Grpc => return Ok(Transport::Grpc),
            ConnectionState::Kolo(_) | ConnectionState::NotConnected => {}
        }
        let connected = self.connect().await;
        *self.trouble.lock() = connected.as_ref().err().map(|error| error.message().to_owned());
        let connected = connected.map_err(|error| error.context(format_args!("{} at {}", self.name, self.address)))?;
        let stream = match connected {
            (Some(stream), PeerProtocol::Kolo) => stream,
            (None, _) | (_, PeerProtocol::Other) => {
                *state = ConnectionState::Grpc;
                return Ok(Transport::Grpc);
            }
            // It may be another program when it comes back, so only this call uses gRPC.
            (_, PeerProtocol::HungUp) => return Ok(Transport::Grpc),
        };
        let peer = format!("{} at {}", self.name, self.address);
        let link = Link::new(stream, peer, self.options.limits, self.options.allocate.clone());
        *state = ConnectionState::Kolo(link.clone());
        *self.current.lock() = Some(link.clone());
        Ok(Transport::Kolo(link))
    }

    /// Connects, and finds out which protocol the peer speaks.
    async fn connect(&self) -> Result<(Option<Stream>, PeerProtocol)> {
        let connected = tokio::time::timeout(CONNECT_DEADLINE, TcpStream::connect(&self.address)).await;
        let tcp = connected
            .map_err(|_| Error::unavailable(format!("no answer to the connection in {CONNECT_DEADLINE:?}")))?
            .map_err(|error| Error::unavailable(grpc::explain(&error)))?;
        grpc::set_up(&tcp).map_err(|error| Error::unavailable(error.to_string()))?;
        let server = tcp.peer_addr().map_err(|error| Error::unavailable(grpc::explain(&error)))?;
        let token = self.options.credentials.token_for(server)?;
        let stream = match &self.options.tls {
            None => Stream::Plain(tcp),
            Some(tls) => match tls.connect(tcp, &self.address).await? {
                Some(stream) => Stream::Tls(Box::new(stream)),
                None => return Ok((None, PeerProtocol::Other)),
            },
        };
        let protocol = introduce(&stream, &self.options.identity, token.as_ref()).await?;
        Ok((Some(stream), protocol))
    }

    /// Like [`Inner::transport`], but retries with backoff until the task is up. Logs that the task is missing, and
    /// why, after [`FIRST_REPORT`] and then every [`REPORT_EVERY`].
    async fn wait_until_up(&self) -> Result<Transport> {
        let start = Instant::now();
        let (mut pause, mut next_report) = (PAUSES.0, start + FIRST_REPORT);
        loop {
            let error = match self.transport().await {
                Ok(transport) => return Ok(transport),
                Err(error) if error.code() != Code::Unavailable => return Err(error),
                Err(error) => error,
            };
            if Instant::now() >= next_report {
                next_report = Instant::now() + REPORT_EVERY;
                tracing::warn!("still waiting for {error} (for {:.1} s)", start.elapsed().as_secs_f64());
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }
}

macro_rules! peer {
    (@more WorkerService) => {
        fn ask_tensors(&self, step_id: u64, group: &Group, each: Each) -> Option<Guard> {
            let link = self.inner.link()?;
            let answered = move |index, reply: Result<Reply>| {
                each(index, reply.and_then(recv_response).and_then(crate::task::peers::received));
            };
            // If the connection has just been lost, the caller falls back to single requests, which report it.
            link.receive(step_id, &group.wire, group.keys.len(), Arc::new(answered)).ok()
        }

        fn flush(&self) {
            if let Some(link) = self.inner.link() {
                link.flush();
            }
        }

        fn has_greeted(&self) -> bool {
            self.inner.link().is_some()
        }

        fn end_step(&self, step_id: u64) -> bool {
            self.inner.link().is_some_and(|link| link.end_step(step_id).is_ok())
        }
    };
    (@more MasterService) => {};
    (@response RecvTensor $response:ident $reply:ident) => {
        recv_response($reply)
    };
    (@response $name:ident $response:ident $reply:ident) => {
        $response::decode($reply.head).map_err(|error| Error::data_loss(format!("{}: {error}", stringify!($name))))
    };
    (@transport Probe $inner:ident) => {
        $inner.wait_until_up()
    };
    (@transport Open $inner:ident) => {
        $inner.wait_until_up()
    };
    (@transport $attempts:ident $inner:ident) => {
        $inner.transport()
    };
    ($type:ident $methods:ident $trait:ident $service:literal; $(
        $(#[$doc:meta])* $method:ident $name:ident $request:ident $response:ident $size:ident $attempts:ident;
    )*) => {
        impl $trait for $type {
            fn trouble(&self) -> Option<String> {
                self.inner.trouble.lock().clone().or_else(|| self.grpc.trouble())
            }

            peer!(@more $trait);

            $(fn $method(&self, request: $request) -> Answer<$response> {
                let (inner, grpc) = (self.inner.clone(), self.grpc.clone());
                Box::pin(async move {
                    match peer!(@transport $attempts inner).await? {
                        Transport::Kolo(link) => {
                            let reply = link.call($methods::$name.number(), &request).await?;
                            peer!(@response $name $response reply)
                        }
                        Transport::Grpc => grpc.$method(request).await,
                    }
                })
            })*
        }
    };
}

worker_methods!(peer KoloPeer WorkerMethod);
master_methods!(peer KoloMaster MasterMethod);

fn recv_response(reply: Reply) -> Result<RecvTensorResponse> {
    match reply.tensor {
        Some((head, tensor)) => Ok(RecvTensorResponse {
            tensor: Some(WireTensor::new(tensor)?),
            is_dead: head.is_dead,
            send_start_micros: head.send_start_micros,
            ..RecvTensorResponse::default()
        }),
        None => {
            RecvTensorResponse::decode(reply.head).map_err(|error| Error::data_loss(format!("RecvTensor: {error}")))
        }
    }
}
