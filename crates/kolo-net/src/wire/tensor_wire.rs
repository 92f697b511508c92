//! Tensors in messages: a `TensorProto` that is decoded straight into a tensor's memory, and encoded straight from it.
//!
//! ```text
//!   field 1  dtype             always
//!   field 2  tensor_shape      before the content, so that a reader can allocate before the bytes come
//!   field 4  tensor_content    the elements, row-major and little-endian; strings as lengths, then bytes
//!   others   lists of values   accepted from other writers, never written (except handles)
//! ```
//!
//! Memory is bounded by a message's length: elements are allocated only when the content's bytes are known to be there,
//! lists of values stay encoded until [`WireTensor::into_tensor`], and what the fill rule adds is limited.

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
pub struct WireTensor(TensorState);

#[derive(Clone, Default)]
enum TensorState {
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
    /// Why the message is not a valid tensor, if that was found while decoding.
    refused: Option<Error>,
    /// The fields with lists of values, still encoded: decoded, they may take many times the memory.
    values: Vec<u8>,
}

#[derive(Clone, Default)]
enum Content {
    #[default]
    None,
    /// Bytes that came before dtype or shape, or that must be validated.
    Bytes(Bytes),
    /// Elements that were decoded into a tensor directly.
    Placed(Tensor),
}

impl WireTensor {
    /// A tensor to be sent. An error if it cannot be sent: it is in a device's memory, or a variant, such as a lock,
    /// that is only valid in its process.
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
        Ok(WireTensor(TensorState::Tensor(tensor)))
    }

    /// The tensor. The fill rule may add up to [`MAX_FILL_BYTES`](crate::wire::limits::MAX_FILL_BYTES); a request of many
    /// tensors should share a budget, with [`into_tensor_within`](WireTensor::into_tensor_within).
    pub fn into_tensor(self) -> Result<Tensor> {
        self.into_tensor_within(&mut crate::wire::limits::MAX_FILL_BYTES.clone())
    }

    /// The tensor; the bytes that the fill rule adds are taken from `budget`.
    pub fn into_tensor_within(self, budget: &mut u64) -> Result<Tensor> {
        match self.0 {
            TensorState::Tensor(tensor) => Ok(tensor),
            TensorState::Empty => Parts::default().into_tensor(budget),
            TensorState::Parts(parts) => parts.into_tensor(budget),
        }
    }

    /// The bytes of the elements, as far as they are known, for limits and reports.
    pub fn n_bytes(&self) -> usize {
        match &self.0 {
            TensorState::Empty => 0,
            TensorState::Tensor(tensor) => tensor.n_bytes(),
            TensorState::Parts(parts) => match &parts.content {
                Content::None => parts.values.len(),
                Content::Bytes(bytes) => bytes.len(),
                Content::Placed(tensor) => tensor.n_bytes(),
            },
        }
    }

    /// The tensor to be written, if this is one.
    pub(crate) fn as_tensor(&self) -> Option<&Tensor> {
        match &self.0 {
            TensorState::Tensor(tensor) => Some(tensor),
            TensorState::Empty | TensorState::Parts(_) => None,
        }
    }
}

/// Without the check of [`WireTensor::new`]: for tensors that are known to be on the host. Others are written without a
/// dtype, which every reader refuses.
impl From<Tensor> for WireTensor {
    fn from(tensor: Tensor) -> WireTensor {
        WireTensor(TensorState::Tensor(tensor))
    }
}

/// Messages are equal if they decode to equal tensors, or fail with the same error.
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
