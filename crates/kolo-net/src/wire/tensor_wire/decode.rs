//! Decoding: fields in any order, then a tensor.

use bytes::{Buf, Bytes};
use kolo_core::{DType, Error, ResourceHandle, Result, Shape, Tensor};
use kolo_graph::wire::proto::{ResourceHandleProto, TensorProto, TensorShapeProto};
use kolo_graph::wire::tensor::{dtype_from_number, from_proto_within, shape_from_proto};
use prost::encoding::{DecodeContext, WireType, check_wire_type, decode_varint, encode_key, encode_varint, skip_field};
use prost::{DecodeError, Message};

use super::{Content, Parts, TensorState, WireTensor};
use crate::wire::limits::MAX_VALUES_BYTES;

/// More than the shape of any tensor takes, even with a name for every dimension.
const MAX_SHAPE_BYTES: u64 = 1 << 16;

pub(super) const DTYPE: u32 = 1;
pub(super) const SHAPE: u32 = 2;
pub(super) const CONTENT: u32 = 4;
/// The first and last of the fields with lists of values.
const VALUES: std::ops::RangeInclusive<u32> = 5..=18;

impl WireTensor {
    /// Decodes one field, for [`prost::Message`].
    pub(super) fn merge(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        if !matches!(self.0, TensorState::Parts(_)) {
            self.0 = TensorState::Parts(Box::default());
        }
        let TensorState::Parts(parts) = &mut self.0 else { return Ok(()) };
        match tag {
            DTYPE => prost::encoding::int32::merge(wire_type, &mut parts.dtype, buf, ctx),
            SHAPE => parts.merge_shape(wire_type, buf),
            CONTENT => parts.merge_content(wire_type, buf),
            tag if VALUES.contains(&tag) => parts.merge_values(tag, wire_type, buf, ctx),
            tag => skip_field(wire_type, tag, buf, ctx),
        }
    }
}

impl Parts {
    fn merge_shape(&mut self, wire_type: WireType, buf: &mut impl Buf) -> Result<(), DecodeError> {
        let n_bytes = length(wire_type, buf)?;
        if n_bytes as u64 > MAX_SHAPE_BYTES {
            buf.advance(n_bytes);
            self.refuse(Error::invalid_argument(format!("not a shape: {n_bytes} bytes")));
            return Ok(());
        }
        self.shape.get_or_insert_with(TensorShapeProto::default).merge(buf.take(n_bytes))
    }

    /// Copies the elements into a tensor if dtype and shape are known; otherwise keeps them encoded.
    fn merge_content(&mut self, wire_type: WireType, buf: &mut impl Buf) -> Result<(), DecodeError> {
        let n_bytes = length(wire_type, buf)?;
        self.content = match self.place_for(n_bytes) {
            Some(mut tensor) => match tensor.host_bytes_mut() {
                Ok(place) => {
                    buf.copy_to_slice(place);
                    Content::Placed(tensor)
                }
                Err(_) => Content::Bytes(buf.copy_to_bytes(n_bytes)),
            },
            None => Content::Bytes(buf.copy_to_bytes(n_bytes)),
        };
        Ok(())
    }

    /// A new tensor of exactly this many bytes, if dtype and shape have been decoded and agree. Not for bools, since
    /// not every byte is a valid one, nor for a scalar without a shape field.
    fn place_for(&self, n_bytes: usize) -> Option<Tensor> {
        let dtype = DType::from_number(self.dtype).ok()?;
        let shape = shape_from_proto(self.shape.as_ref()?).ok()?.known()?;
        let needed = dtype.size()?.checked_mul(shape.n_elements())?;
        (needed == n_bytes && dtype != DType::Bool).then(|| Tensor::zeros(dtype, shape).ok())?
    }

    /// Keeps a list of values encoded.
    fn merge_values(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        let fixed = match wire_type {
            WireType::Varint => {
                let value = decode_varint(buf)?;
                encode_key(tag, wire_type, &mut self.values);
                encode_varint(value, &mut self.values);
                0
            }
            WireType::ThirtyTwoBit => 4,
            WireType::SixtyFourBit => 8,
            WireType::LengthDelimited => {
                let n_bytes = length(wire_type, buf)?;
                if self.values.len().saturating_add(n_bytes) > MAX_VALUES_BYTES {
                    buf.advance(n_bytes);
                } else {
                    encode_key(tag, wire_type, &mut self.values);
                    encode_varint(n_bytes as u64, &mut self.values);
                    put(&mut self.values, buf, n_bytes);
                    return Ok(());
                }
                0
            }
            WireType::StartGroup | WireType::EndGroup => return skip_field(wire_type, tag, buf, ctx),
        };
        if fixed > buf.remaining() {
            return Err(cut_off());
        }
        if fixed > 0 {
            encode_key(tag, wire_type, &mut self.values);
            put(&mut self.values, buf, fixed);
        }
        if self.values.len() > MAX_VALUES_BYTES || wire_type == WireType::LengthDelimited {
            self.values = Vec::new();
            self.refuse(Error::resource_exhausted(format!(
                "a tensor with more than {MAX_VALUES_BYTES} bytes of values; large tensors must use tensor_content"
            )));
        }
        Ok(())
    }

    fn refuse(&mut self, error: Error) {
        self.refused.get_or_insert(error);
    }

    /// The tensor that the fields describe.
    pub(super) fn into_tensor(self, budget: &mut u64) -> Result<Tensor> {
        if let Some(error) = self.refused {
            return Err(error);
        }
        let content = match self.content {
            Content::None => Bytes::new(),
            Content::Bytes(bytes) => bytes,
            Content::Placed(tensor) => {
                let shape = shape_from_proto(&self.shape.unwrap_or_default())?.known();
                return match tensor.dtype() as i32 == self.dtype && Some(tensor.shape()) == shape.as_ref() {
                    true => Ok(tensor),
                    false => Err(Error::invalid_argument("a tensor with two dtypes or two shapes")),
                };
            }
        };
        let dtype = dtype_from_number(self.dtype)?;
        if dtype == DType::Resource && !content.is_empty() {
            return handle_from_content(&self.shape.unwrap_or_default(), &content);
        }
        let values = TensorProto::decode(&self.values[..])
            .map_err(|error| Error::invalid_argument(format!("a tensor's values: {error}")))?;
        let proto = TensorProto { dtype: self.dtype, tensor_shape: self.shape, tensor_content: content, ..values };
        from_proto_within(&proto, budget)
    }
}

/// A resource scalar whose handle is in `tensor_content`: its length, then its bytes.
fn handle_from_content(shape: &TensorShapeProto, content: &Bytes) -> Result<Tensor> {
    let damaged = || Error::invalid_argument("tensor_content of a resource tensor is not one handle");
    if shape_from_proto(shape)?.known() != Some(Shape::scalar()) {
        return Err(Error::unimplemented("only a scalar resource tensor can be received"));
    }
    let mut rest = &content[..];
    let n_bytes = decode_varint(&mut rest).map_err(|_| damaged())?;
    if n_bytes != rest.len() as u64 {
        return Err(damaged());
    }
    let handle = ResourceHandleProto::decode(rest).map_err(|_| damaged())?;
    Ok(Tensor::handle(ResourceHandle {
        device: handle.device.into(),
        container: handle.container.into(),
        name: handle.name.into(),
        object: None,
    }))
}

/// The length of a length-delimited field; an error if it exceeds the remaining bytes.
fn length(wire_type: WireType, buf: &mut impl Buf) -> Result<usize, DecodeError> {
    check_wire_type(WireType::LengthDelimited, wire_type)?;
    let n_bytes = decode_varint(buf)?;
    match usize::try_from(n_bytes) {
        Ok(n_bytes) if n_bytes <= buf.remaining() => Ok(n_bytes),
        _ => Err(cut_off()),
    }
}

/// The error of a field that is longer than the remaining bytes. Only prost can construct one, so it decodes an empty
/// buffer.
fn cut_off() -> DecodeError {
    decode_varint(&mut &[][..]).expect_err("there is nothing to read")
}

fn put(bytes: &mut Vec<u8>, buf: &mut impl Buf, n_bytes: usize) {
    bytes.reserve(n_bytes);
    let mut part = buf.take(n_bytes);
    while part.has_remaining() {
        let chunk = part.chunk();
        let n_bytes = chunk.len();
        bytes.extend_from_slice(chunk);
        part.advance(n_bytes);
    }
}
