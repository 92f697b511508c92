//! A large tensor that is put where it belongs while it arrives.
//!
//! A `RecvTensorResponse` ends with the tensor's elements, and says before them what they are. So the beginning of the
//! message is enough to make the tensor, and each piece that follows is copied into it and given up at once: a tensor of a
//! gigabyte needs a gigabyte, and the pieces, whose memory is used again, stay in the cache. What is not of this form is
//! left to the ordinary way.

use bytes::Buf;
use kolo_core::{DType, Tensor};
use kolo_graph::wire::proto::TensorShapeProto;
use kolo_graph::wire::tensor::shape_from_proto;
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};

use super::frame::Chunks;
use super::options::ReceiveMemory;
use crate::proto::RecvTensorResponse;
use crate::tensor_wire::WireTensor;

/// All that comes before the elements fits into this many bytes, unless somebody names the dimensions.
pub(super) const HEAD_BYTES: usize = 1024;

/// Smaller tensors are not worth the trouble.
pub(super) const MIN_PLACED_BYTES: usize = 64 * 1024;

/// A response whose elements are still on their way.
pub(super) struct Placing {
    response: RecvTensorResponse,
    tensor: Tensor,
    filled: usize,
}

impl Placing {
    /// The response that begins with `chunks` and is `n_bytes` long; `None` if it is of another form. What was understood is
    /// taken from `chunks`.
    pub(super) fn begin(chunks: &mut Chunks, n_bytes: usize, memory: Option<&ReceiveMemory>) -> Option<Placing> {
        let head = chunks.peek(HEAD_BYTES.min(n_bytes));
        let mut rest = &head[..];
        let (response, tensor) = read_head(&mut rest, n_bytes, memory)?;
        chunks.advance(head.len() - rest.len());
        let mut placing = Placing { response, tensor, filled: 0 };
        placing.take(chunks);
        Some(placing)
    }

    /// Copies what has arrived. More than there should be is left where it is.
    pub(super) fn take(&mut self, chunks: &mut Chunks) {
        let Some(place) = self.tensor.host_bytes_mut().ok().and_then(|bytes| bytes.get_mut(self.filled..)) else {
            return;
        };
        let n_bytes = place.len().min(chunks.remaining());
        chunks.copy_to_slice(&mut place[..n_bytes]);
        self.filled += n_bytes;
    }

    /// The response, if all of it has come.
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
    // Not every byte is a bool; those are looked at in the ordinary way.
    let dtype = dtype.filter(|&dtype| dtype != DType::Bool)?;
    let shape = shape_from_proto(&shape).ok()?.known()?;
    let needed = dtype.size()?.checked_mul(shape.n_elements())?;
    if length != left(rest) || length != needed as u64 || needed < MIN_PLACED_BYTES {
        return None;
    }
    let used_before = memory.and_then(|memory| memory.allocate(dtype, &shape));
    let tensor = used_before.or_else(|| Tensor::zeros(dtype, shape).ok())?;
    Some((response, tensor))
}
