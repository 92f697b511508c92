//! A task of another process: reached by Kolo's own transport if it speaks it, and by gRPC if not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use prost::Message as _;
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use super::Allocate;
use super::greeting::{Identity, introduce};
use super::link::{Link, Reply};
use super::server::Method;
use crate::limits::MessageLimits;
use crate::peers::TaskName;
use crate::proto::*;
use crate::services::{Answer, WorkerService, worker_methods};
use crate::tensor_wire::WireTensor;

/// How long one attempt to connect may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// How long to wait between attempts, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(250));

/// How often to say who is missing.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Another task.
pub(crate) struct KoloPeer {
    inner: Arc<Inner>,
}

struct Inner {
    task: TaskName,
    address: String,
    identity: Identity,
    limits: MessageLimits,
    allocate: Allocate,
    /// For a task that is TensorFlow's.
    grpc: Arc<dyn WorkerService>,
    state: Mutex<State>,
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
    pub fn new(
        task: TaskName,
        address: String,
        identity: Identity,
        limits: MessageLimits,
        allocate: Allocate,
        grpc: Arc<dyn WorkerService>,
    ) -> KoloPeer {
        let state = Mutex::default();
        KoloPeer { inner: Arc::new(Inner { task, address, identity, limits, allocate, grpc, state }) }
    }
}

impl Inner {
    /// The connection, made if there is none. One attempt at a time; the others wait for it.
    async fn way(&self) -> Result<Way> {
        let mut state = self.state.lock().await;
        match &*state {
            State::Kolo(link) if !link.is_over() => return Ok(Way::Kolo(link.clone())),
            State::Grpc => return Ok(Way::Grpc),
            State::Kolo(_) | State::NotConnected => {}
        }
        let place = |error: Error| error.context(format_args!("{} at {}", self.task, self.address));
        let connected = tokio::time::timeout(CONNECT_DEADLINE, TcpStream::connect(&self.address)).await;
        let mut stream = connected
            .map_err(|_| place(Error::unavailable(format!("no answer to the connection in {CONNECT_DEADLINE:?}"))))?
            .map_err(|error| place(Error::unavailable(error.to_string())))?;
        stream.set_nodelay(true).map_err(|error| place(Error::unavailable(error.to_string())))?;
        if !introduce(&mut stream, &self.identity).await.map_err(place)? {
            *state = State::Grpc;
            return Ok(Way::Grpc);
        }
        let peer = format!("{} at {}", self.task, self.address);
        let link = Link::new(stream, peer, self.limits, self.allocate.clone());
        *state = State::Kolo(link.clone());
        Ok(Way::Kolo(link))
    }

    /// The same, however long it takes the task to come up. Says every second who is missing and why.
    async fn wait_until_up(&self) -> Result<Way> {
        let start = Instant::now();
        let (mut pause, mut reported) = (PAUSES.0, start);
        loop {
            let error = match self.way().await {
                Ok(way) => return Ok(way),
                Err(error) if error.code() != Code::Unavailable => return Err(error),
                Err(error) => error,
            };
            if reported.elapsed() >= REPORT_EVERY {
                reported = Instant::now();
                tracing::warn!("still waiting for {error} (for {:.0?})", start.elapsed());
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }
}

macro_rules! peer {
    (@response RecvTensor $response:ident $reply:ident) => {
        recv_response($reply)
    };
    (@response $name:ident $response:ident $reply:ident) => {
        $response::decode($reply.head).map_err(|error| Error::data_loss(format!("{}: {error}", stringify!($name))))
    };
    (@way GetStatus $inner:ident) => {
        $inner.wait_until_up()
    };
    (@way $name:ident $inner:ident) => {
        $inner.way()
    };
    ($trait:ident $service:literal; $(
        $(#[$doc:meta])* $method:ident $name:ident $request:ident $response:ident $size:ident $repeat:ident;
    )*) => {
        impl $trait for KoloPeer {
            $(fn $method(&self, request: $request) -> Answer<$response> {
                let inner = self.inner.clone();
                Box::pin(async move {
                    match peer!(@way $name inner).await? {
                        Way::Kolo(link) => {
                            let reply = link.call(Method::$name as u8, &request).await?;
                            peer!(@response $name $response reply)
                        }
                        Way::Grpc => inner.grpc.$method(request).await,
                    }
                })
            })*
        }
    };
}

worker_methods!(peer);

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
