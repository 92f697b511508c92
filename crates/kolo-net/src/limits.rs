//! What a peer may make us allocate.
//!
//! A message is read only if it is not longer than its kind may be, and what is made of it stays in proportion to its
//! length. Two things are not: the fill rule of tensors (one value stands for all), which draws on a budget, and decoded
//! lists of small parts, which take tens of bytes for each encoded one; hence the lower limits for messages that need not
//! be large.

/// The most bytes that [`into_tensor`](crate::tensor_wire::WireTensor::into_tensor) adds by the fill rule. TensorFlow's
/// clients send values in full, so this is for others' small constants.
pub const MAX_FILL_BYTES: u64 = 1 << 26;

/// The most bytes of lists of values in a tensor. Larger tensors must use `tensor_content`, as TensorFlow does.
pub const MAX_VALUES_BYTES: usize = 1 << 26;

/// The most bytes of each kind of message, in either direction.
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
