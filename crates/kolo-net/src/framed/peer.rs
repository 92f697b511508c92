//! A task of another process, as worker or as master: reached by Kolo's own transport if it speaks it, and by gRPC if not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use prost::Message as _;
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use super::Allocate;
use super::greeting::{Identity, Introduced, introduce};
use super::link::{Link, Reply};
use super::server::{MasterMethod, WorkerMethod};
use super::stream::Stream;
use crate::grpc;
use crate::limits::MessageLimits;
use crate::peers::TaskName;
use crate::proto::*;
use crate::services::{Answer, Each, Group, Guard, MasterService, WorkerService, master_methods, worker_methods};
use crate::tensor_wire::WireTensor;
use crate::tls::ClientTls;

/// How long one attempt to connect may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// How long to wait between attempts, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(250));

/// When to say who is missing: soon, and then now and again.
const FIRST_REPORT: Duration = Duration::from_millis(500);
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// Another task as a worker.
pub(crate) struct KoloPeer {
    inner: Arc<Inner>,
    /// For a task that is TensorFlow's.
    grpc: Arc<dyn WorkerService>,
}

/// Another task as a master.
pub(crate) struct KoloMaster {
    inner: Arc<Inner>,
    /// For a task that is TensorFlow's.
    grpc: Arc<dyn MasterService>,
}

struct Inner {
    /// What messages call it.
    name: String,
    address: String,
    how: How,
    state: Mutex<State>,
    /// The connection, if there is one, for calls that need not make one.
    current: parking_lot::Mutex<Option<Arc<Link>>>,
    /// Why the last attempt to connect failed.
    trouble: parking_lot::Mutex<Option<String>>,
}

/// How connections are made.
#[derive(Clone)]
pub(crate) struct How {
    pub identity: Identity,
    /// TLS; `None` is plain text.
    pub tls: Option<ClientTls>,
    pub limits: MessageLimits,
    pub allocate: Allocate,
}

#[derive(Clone, Default)]
enum State {
    #[default]
    NotConnected,
    Kolo(Arc<Link>),
    /// It does not speak our transport.
    Grpc,
}

/// How a call is to be made.
enum Way {
    Kolo(Arc<Link>),
    Grpc,
}

impl KoloPeer {
    pub fn new(task: TaskName, address: String, how: How, grpc: Arc<dyn WorkerService>) -> KoloPeer {
        KoloPeer { inner: Inner::new(task.to_string(), address, how), grpc }
    }
}

impl KoloMaster {
    pub fn new(address: String, how: How, grpc: Arc<dyn MasterService>) -> KoloMaster {
        KoloMaster { inner: Inner::new("the server".to_owned(), address, how), grpc }
    }
}

impl Inner {
    fn new(name: String, address: String, how: How) -> Arc<Inner> {
        let (state, current, trouble) = (Mutex::default(), Default::default(), Default::default());
        Arc::new(Inner { name, address, how, state, current, trouble })
    }

    /// The connection, if there is one.
    fn link(&self) -> Option<Arc<Link>> {
        self.current.lock().clone().filter(|link| !link.is_over())
    }

    /// The connection, made if there is none. One attempt at a time; the others wait for it.
    async fn way(&self) -> Result<Way> {
        if let Some(link) = self.link() {
            return Ok(Way::Kolo(link));
        }
        let mut state = self.state.lock().await;
        match &*state {
            State::Kolo(link) if !link.is_over() => return Ok(Way::Kolo(link.clone())),
            State::Grpc => return Ok(Way::Grpc),
            State::Kolo(_) | State::NotConnected => {}
        }
        let connected = self.connect().await;
        *self.trouble.lock() = connected.as_ref().err().map(|error| error.message().to_owned());
        let connected = connected.map_err(|error| error.context(format_args!("{} at {}", self.name, self.address)))?;
        let stream = match connected {
            (Some(stream), Introduced::Kolo) => stream,
            (None, _) | (_, Introduced::Other) => {
                *state = State::Grpc;
                return Ok(Way::Grpc);
            }
            // Who knows what it will be when it comes back: this call alone goes by gRPC.
            (_, Introduced::HungUp) => return Ok(Way::Grpc),
        };
        let peer = format!("{} at {}", self.name, self.address);
        let link = Link::new(stream, peer, self.how.limits, self.how.allocate.clone());
        *state = State::Kolo(link.clone());
        *self.current.lock() = Some(link.clone());
        Ok(Way::Kolo(link))
    }

    /// A connection, and who is at its other end.
    async fn connect(&self) -> Result<(Option<Stream>, Introduced)> {
        let connected = tokio::time::timeout(CONNECT_DEADLINE, TcpStream::connect(&self.address)).await;
        let tcp = connected
            .map_err(|_| Error::unavailable(format!("no answer to the connection in {CONNECT_DEADLINE:?}")))?
            .map_err(|error| Error::unavailable(grpc::explain(&error)))?;
        grpc::set_up(&tcp).map_err(|error| Error::unavailable(error.to_string()))?;
        let stream = match &self.how.tls {
            None => Stream::Plain(tcp),
            Some(tls) => match tls.connect(tcp, &self.address).await? {
                Some(stream) => Stream::Tls(Box::new(stream)),
                None => return Ok((None, Introduced::Other)),
            },
        };
        let introduced = introduce(&stream, &self.how.identity).await?;
        Ok((Some(stream), introduced))
    }

    /// The same, however long it takes the task to come up. Says every second who is missing and why.
    async fn wait_until_up(&self) -> Result<Way> {
        let start = Instant::now();
        let (mut pause, mut next_report) = (PAUSES.0, start + FIRST_REPORT);
        loop {
            let error = match self.way().await {
                Ok(way) => return Ok(way),
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
                each(index, reply.and_then(recv_response).and_then(crate::peers::received));
            };
            // A connection that has just been lost is noticed by whoever asks one by one.
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
    (@way Probe $inner:ident) => {
        $inner.wait_until_up()
    };
    (@way Open $inner:ident) => {
        $inner.wait_until_up()
    };
    (@way $attempts:ident $inner:ident) => {
        $inner.way()
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
                    match peer!(@way $attempts inner).await? {
                        Way::Kolo(link) => {
                            let reply = link.call($methods::$name.number(), &request).await?;
                            peer!(@response $name $response reply)
                        }
                        Way::Grpc => grpc.$method(request).await,
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
