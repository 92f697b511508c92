//! Tensors inside messages: a `TensorProto` that is read into a tensor's own memory, and written out of it.
//!
//! ```text
//!   field 1  dtype             always
//!   field 2  tensor_shape      before the content, so that a reader can allocate before the bytes come
//!   field 4  tensor_content    the elements, row-major and little-endian; strings as lengths, then bytes
//!   others   lists of values   read for other writers' sake, never written (but handles are)
//! ```
//!
//! What arrives is never believed beyond its own length: memory for elements is taken once the content is known to be
//! there, lists of values stay bytes until [`WireTensor::into_tensor`], and what the fill rule adds is limited.

mod decode;
mod encode;

use std::fmt;

use bytes::Bytes;
use kolo_core::{DType, Error, Result, Tensor, TensorData};
use kolo_graph::wire::proto::TensorShapeProto;

pub(crate) use encode::{Form, Layout};

/// A tensor in a message: `tensorflow.TensorProto`.
///
/// ```
/// use kolo_core::Tensor;
/// use kolo_net::tensor_wire::WireTensor;
/// use prost::Message as _;
///
/// let sent = WireTensor::new(Tensor::from([1.0f32, 2.0]))?;
/// let bytes = sent.encode_to_vec();
/// let received = WireTensor::decode(&bytes[..]).expect("it was just written");
/// assert_eq!(received.into_tensor()?, Tensor::from([1.0f32, 2.0]));
/// # Ok::<(), kolo_core::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct WireTensor(State);

#[derive(Clone, Default)]
enum State {
    /// A message without fields.
    #[default]
    Empty,
    /// A tensor to be written.
    Tensor(Tensor),
    /// A message that was read.
    Parts(Box<Parts>),
}

/// The fields of a message that was read.
#[derive(Clone, Default)]
struct Parts {
    dtype: i32,
    shape: Option<TensorShapeProto>,
    content: Content,
    /// Why the message cannot be a tensor, if that was seen on the way.
    refused: Option<Error>,
    /// The fields with lists of values, still encoded: decoded, they may take many times the memory.
    values: Vec<u8>,
}

#[derive(Clone, Default)]
enum Content {
    #[default]
    None,
    /// Bytes that came before dtype or shape, or that need a closer look.
    Bytes(Bytes),
    /// Elements that were read into a tensor at once.
    Placed(Tensor),
}

impl WireTensor {
    /// A tensor to be sent. An error if it cannot be: it is in a device's memory, or is a lock or another value that
    /// means nothing outside of its process.
    pub fn new(tensor: Tensor) -> Result<WireTensor> {
        match tensor.storage() {
            TensorData::Inline(_) | TensorData::Buffer { .. } => {
                tensor.host_bytes().map_err(|error| error.context("a tensor cannot be sent"))?;
            }
            TensorData::Handles(_) if tensor.dtype() == DType::Variant => {
                return Err(Error::unimplemented("a variant cannot be sent to another task"));
            }
            TensorData::Strings(_) | TensorData::Handles(_) => {}
        }
        Ok(WireTensor(State::Tensor(tensor)))
    }

    /// The tensor. The fill rule may add up to [`MAX_FILL_BYTES`](crate::limits::MAX_FILL_BYTES); a request of many
    /// tensors should share a budget, with [`into_tensor_within`](WireTensor::into_tensor_within).
    pub fn into_tensor(self) -> Result<Tensor> {
        self.into_tensor_within(&mut crate::limits::MAX_FILL_BYTES.clone())
    }

    /// The tensor; the bytes that the fill rule adds are taken from `budget`.
    pub fn into_tensor_within(self, budget: &mut u64) -> Result<Tensor> {
        match self.0 {
            State::Tensor(tensor) => Ok(tensor),
            State::Empty => Parts::default().into_tensor(budget),
            State::Parts(parts) => parts.into_tensor(budget),
        }
    }

    /// The bytes of the elements, as far as this is known, for limits and reports.
    pub fn n_bytes(&self) -> usize {
        match &self.0 {
            State::Empty => 0,
            State::Tensor(tensor) => tensor.n_bytes(),
            State::Parts(parts) => match &parts.content {
                Content::None => parts.values.len(),
                Content::Bytes(bytes) => bytes.len(),
                Content::Placed(tensor) => tensor.n_bytes(),
            },
        }
    }

    /// The tensor to be written, if this is one.
    pub(crate) fn as_tensor(&self) -> Option<&Tensor> {
        match &self.0 {
            State::Tensor(tensor) => Some(tensor),
            State::Empty | State::Parts(_) => None,
        }
    }
}

/// Without the check of [`WireTensor::new`]: for tensors that are known to be the host's. Others are written without a
/// dtype, which every reader refuses.
impl From<Tensor> for WireTensor {
    fn from(tensor: Tensor) -> WireTensor {
        WireTensor(State::Tensor(tensor))
    }
}

/// Equal are messages that stand for equal tensors, or fail in the same way.
impl PartialEq for WireTensor {
    fn eq(&self, other: &WireTensor) -> bool {
        self.clone().into_tensor() == other.clone().into_tensor()
    }
}

impl fmt::Debug for WireTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.clone().into_tensor() {
            Ok(tensor) => tensor.fmt(f),
            Err(error) => write!(f, "not a tensor: {}", error.message()),
        }
    }
}

#[cfg(test)]
mod tests;
