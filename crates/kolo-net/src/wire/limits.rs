//! Limits on the memory that a peer can make us allocate.
//!
//! A message is read only if it is within the limit of its kind, and the memory for its contents is proportional to its
//! length. There are two exceptions: the fill rule of tensors (one value stands for all), which has a budget, and
//! decoded lists of small elements, which take tens of bytes for each encoded one; hence the lower limits for messages
//! that need not be large.

use kolo_core::{Error, Result};

/// The maximum number of bytes that [`into_tensor`](crate::wire::tensor_wire::WireTensor::into_tensor) adds by the fill rule.
/// TensorFlow's clients send values in full, so this is for small constants of other clients.
pub const MAX_FILL_BYTES: u64 = 1 << 26;

/// The maximum number of bytes in a tensor's lists of values. Larger tensors must use `tensor_content`, as TensorFlow
/// does.
pub const MAX_VALUES_BYTES: usize = 1 << 26;

/// The maximum number of files in shared memory, and of bytes in all of them together, that one connection may have. Both sides
/// check them: a sender sends what does not fit over the connection, a receiver refuses more. The receiver keeps the files
/// mapped, and a GPU locks their pages, so without a total one peer could lock 32 GiB of a worker's memory.
pub const MAX_SHARED_FILES: usize = 32;
/// See [`MAX_SHARED_FILES`].
pub const MAX_SHARED_BYTES: usize = 1 << 30;

/// Room for a message of `n_bytes`. A graph decides how long an answer is, and an allocation that fails would end the
/// process.
pub(crate) fn room_for(n_bytes: usize) -> Result<Vec<u8>> {
    let mut buffer = Vec::new();
    match buffer.try_reserve_exact(n_bytes) {
        Ok(()) => Ok(buffer),
        Err(_) => Err(no_room(n_bytes)),
    }
}

pub(crate) fn no_room(n_bytes: usize) -> Error {
    Error::resource_exhausted(format!("OOM when allocating {n_bytes} bytes for a message: the system refused"))
}

pub(crate) fn too_long(n_bytes: usize, limit: usize) -> Error {
    Error::resource_exhausted(format!("a message of {n_bytes} bytes or more; the limit is {limit}"))
}

/// The maximum number of bytes of each kind of message, in either direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageLimits {
    /// Messages with tensors: RunStep, RunCallable, RunGraph, RecvTensor, RecvBuf.
    pub tensors: usize,
    /// Messages with graphs: CreateSession, ExtendSession, RegisterGraph.
    pub graphs: usize,
    /// All others.
    pub others: usize,
}

impl Default for MessageLimits {
    /// TensorFlow's 2 GiB for tensors, 1 GiB for graphs, 16 MiB for others.
    fn default() -> MessageLimits {
        MessageLimits { tensors: i32::MAX as usize, graphs: 1 << 30, others: 1 << 24 }
    }
}
