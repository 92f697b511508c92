//! Kolo's own transport, used when both tasks are Kolo's: the same calls as over gRPC, on one TCP connection with or
//! without TLS. Tensors are written to the socket from their buffer and read from the socket into a buffer.
//!
//! A connection begins with a greeting in both directions. It distinguishes the connection from gRPC on the same port,
//! and detects tasks of different clusters. Then come messages:
//!
//! ```text
//!   kind u8 | method u8 | shared u8 | 0 u8 | head length u32 | call u64 | body length u64     24 bytes, little-endian
//!   head: a protobuf message                                                         head length bytes
//!   body: the elements of the tensor that the head describes                         body length bytes
//! ```
//!
//! Calls are numbered by the caller and answered in any order. A caller cancels a call with `Cancel`. One `Receive`
//! message requests all tensors that a task needs from another one in a step; each is sent as soon as it is available.
//! `EndStep` and `Release` have no response.

mod greeting;
mod link;
mod outbox;
#[cfg(test)]
mod outbox_tests;
mod peer;
mod read;
mod server;
mod shared;
mod stream;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use kolo_core::{Code, DType, Error, Result, Shape, Tensor};

pub(crate) use greeting::{HELLO, Identity};
pub(crate) use peer::{ConnectOptions, KoloMaster, KoloPeer};
pub(crate) use server::{Services, serve_connection};
pub(crate) use shared::sweep;
pub(crate) use stream::Stream;

/// The primitives of `outbox.rs`. `tests/interleavings.rs` compiles that file with shuttle's in their place.
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, Ordering};

    pub(super) use parking_lot::{Mutex, MutexGuard};
    pub(super) use tokio::spawn;
    pub(super) use tokio::sync::Notify;
    pub(super) use tokio::task::JoinHandle;
    pub(super) use tokio::time::timeout;

    /// After this many ticks without a deferred message, ticking stops.
    pub(super) const IDLE_TICKS: u32 = 200;
}

/// Allocates memory for an incoming tensor.
pub(crate) type Allocate = Arc<dyn Fn(DType, Shape) -> Result<Tensor> + Send + Sync>;

/// Bytes of a message's header.
const HEADER: usize = 24;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A call.
    Request = 1,
    /// The response to a call.
    Response = 2,
    /// The failure of a call; the head is a [`Failure`].
    Failure = 3,
    /// The caller cancels the call.
    Cancel = 4,
    /// The caller has dropped a tensor in shared memory; `call` is the file's number.
    Release = 5,
    /// Several calls of `RecvTensor` for one step, numbered from `call` on; the head is the step's number and [`Keys`].
    Receive = 6,
    /// The step whose number is `call` is over.
    EndStep = 7,
}

impl Kind {
    fn from_number(number: u8) -> Result<Kind> {
        use Kind::*;
        [Request, Response, Failure, Cancel, Release, Receive, EndStep]
            .into_iter()
            .find(|kind| *kind as u8 == number)
            .ok_or_else(|| Error::data_loss(format!("a message of unknown kind {number}")))
    }
}

/// The first bytes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    kind: Kind,
    method: u8,
    /// The body is in shared memory and not in the message.
    is_shared: bool,
    n_head: usize,
    call: u64,
    n_body: usize,
}

impl Header {
    fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend([self.kind as u8, self.method, u8::from(self.is_shared), 0]);
        bytes.extend((self.n_head as u32).to_le_bytes());
        bytes.extend(self.call.to_le_bytes());
        bytes.extend((self.n_body as u64).to_le_bytes());
    }

    fn read(bytes: &[u8; HEADER]) -> Result<Header> {
        let number = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let too_long = |_| Error::data_loss("a message is longer than this machine can address");
        Ok(Header {
            kind: Kind::from_number(bytes[0])?,
            method: bytes[1],
            is_shared: bytes[2] != 0,
            n_head: (number(0) >> 32) as usize,
            call: number(8),
            n_body: usize::try_from(number(16)).map_err(too_long)?,
        })
    }
}

/// An error, as it is sent.
#[derive(Clone, PartialEq, prost::Message)]
struct Failure {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(bool, tag = "3")]
    is_derived: bool,
}

impl Failure {
    fn of(error: &Error) -> Failure {
        let text = crate::transport::grpc::status::wire_text(error);
        // gRPC marks derived errors by a prefix; here there is a field for it.
        let message = text.strip_prefix(crate::transport::grpc::status::DERIVED).unwrap_or(&text).to_owned();
        Failure { code: error.code() as i32, message, is_derived: error.is_derived() }
    }

    fn into_error(self) -> Error {
        let error = Error::new(Code::from_number(self.code).unwrap_or(Code::Unknown), self.message);
        if self.is_derived { error.into_derived() } else { error }
    }
}

/// The rendezvous keys that a `Receive` requests.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Keys {
    #[prost(string, repeated, tag = "1")]
    pub key: Vec<String>,
}

/// Describes the tensor whose elements are a message's body.
#[derive(Clone, PartialEq, prost::Message)]
struct TensorHead {
    #[prost(int32, tag = "1")]
    dtype: i32,
    #[prost(uint64, repeated, tag = "2")]
    dims: Vec<u64>,
    #[prost(bool, tag = "3")]
    is_dead: bool,
    #[prost(int64, tag = "4")]
    send_start_micros: i64,
    /// The elements are in shared memory: the file's number, and its path if it is new.
    #[prost(uint32, tag = "5")]
    shared_id: u32,
    #[prost(string, tag = "6")]
    shared_path: String,
}
