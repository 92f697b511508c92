//! Decodes a large tensor into its final memory while it arrives.
//!
//! A `RecvTensorResponse` ends with the tensor's elements, preceded by their dtype and shape. So the tensor can be
//! allocated from the beginning of the message, and each following chunk is copied into it and freed at once: a tensor
//! of a gigabyte needs a gigabyte, and the chunks, whose memory is reused, stay in the cache. A message of another form
//! is buffered and decoded as usual.

use bytes::Buf;
use kolo_core::{DType, Tensor};
use kolo_graph::wire::proto::TensorShapeProto;
use kolo_graph::wire::tensor::shape_from_proto;
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};

use super::frame::Chunks;
use super::options::ReceiveMemory;
use crate::wire::proto::RecvTensorResponse;
use crate::wire::tensor_wire::WireTensor;

/// Everything before the elements fits into this many bytes, unless the dimensions have names.
pub(super) const HEAD_BYTES: usize = 1024;

/// Smaller tensors are decoded as usual.
pub(super) const MIN_PLACED_BYTES: usize = 64 * 1024;

/// A response whose elements are still arriving.
pub(super) struct Placing {
    response: RecvTensorResponse,
    tensor: Tensor,
    filled: usize,
}

impl Placing {
    /// Starts a response that begins with `chunks` and is `n_bytes` long; `None` if it is of another form. Decoded
    /// bytes are consumed from `chunks`.
    pub(super) fn begin(chunks: &mut Chunks, n_bytes: usize, memory: Option<&ReceiveMemory>) -> Option<Placing> {
        let head = chunks.peek(HEAD_BYTES.min(n_bytes));
        let mut rest = &head[..];
        let (response, tensor) = read_head(&mut rest, n_bytes, memory)?;
        chunks.advance(head.len() - rest.len());
        let mut placing = Placing { response, tensor, filled: 0 };
        placing.take(chunks);
        Some(placing)
    }

    /// Copies the bytes that have arrived. Excess bytes stay in `chunks`.
    pub(super) fn take(&mut self, chunks: &mut Chunks) {
        let Some(place) = self.tensor.host_bytes_mut().ok().and_then(|bytes| bytes.get_mut(self.filled..)) else {
            return;
        };
        let n_bytes = place.len().min(chunks.remaining());
        chunks.copy_to_slice(&mut place[..n_bytes]);
        self.filled += n_bytes;
    }

    /// The response, if it is complete.
    pub(super) fn end(self) -> Option<RecvTensorResponse> {
        let complete = self.filled == self.tensor.n_bytes();
        complete.then(|| RecvTensorResponse { tensor: Some(WireTensor::from(self.tensor)), ..self.response })
    }
}

/// Reads up to the elements, which must be the rest of the message.
fn read_head(rest: &mut &[u8], n_bytes: usize, memory: Option<&ReceiveMemory>) -> Option<(RecvTensorResponse, Tensor)> {
    let head_len = rest.len();
    let mut response = RecvTensorResponse::default();
    loop {
        match decode_key(rest).ok()? {
            (1, WireType::LengthDelimited) => break,
            (2, WireType::Varint) => response.is_dead = decode_varint(rest).ok()? != 0,
            (3, WireType::Varint) => response.send_start_micros = decode_varint(rest).ok()? as i64,
            (5, WireType::Varint) => response.require_ack = decode_varint(rest).ok()? != 0,
            _ => return None,
        }
    }
    let left = |rest: &[u8]| (n_bytes - (head_len - rest.len())) as u64;
    if decode_varint(rest).ok()? != left(rest) {
        return None;
    }
    let (mut dtype, mut shape) = (None, TensorShapeProto::default());
    loop {
        match decode_key(rest).ok()? {
            (1, WireType::Varint) => dtype = DType::from_number(decode_varint(rest).ok()? as i32).ok(),
            (2, WireType::LengthDelimited) => {
                let length = usize::try_from(decode_varint(rest).ok()?).ok()?;
                let (encoded, after) = rest.split_at_checked(length)?;
                shape.merge(encoded).ok()?;
                *rest = after;
            }
            (4, WireType::LengthDelimited) => break,
            _ => return None,
        }
    }
    let length = decode_varint(rest).ok()?;
    // Not every byte is a valid bool; the usual decoder checks them.
    let dtype = dtype.filter(|&dtype| dtype != DType::Bool)?;
    let shape = shape_from_proto(&shape).ok()?.known()?;
    let needed = dtype.size()?.checked_mul(shape.n_elements())?;
    if length != left(rest) || length != needed as u64 || needed < MIN_PLACED_BYTES {
        return None;
    }
    let from_device = memory.and_then(|memory| memory.allocate(dtype, &shape));
    let tensor = from_device.or_else(|| Tensor::zeros(dtype, shape).ok())?;
    Some((response, tensor))
}
