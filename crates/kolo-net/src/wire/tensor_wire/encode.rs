//! Encoding: the length first, as protobuf requires, then the fields straight from the tensor's memory.

use bytes::{Buf, BufMut};
use kolo_core::{DType, Tensor, TensorData};
use kolo_graph::wire::proto::ResourceHandleProto;
use prost::encoding::{DecodeContext, WireType, encode_key, encode_varint, encoded_len_varint};
use prost::{DecodeError, Message};

use super::decode::{CONTENT, DTYPE, SHAPE};
use super::{Content, Parts, TensorState, WireTensor};

/// The field of a list of handles.
const HANDLES: u32 = 14;

/// The two encodings that TensorFlow uses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// As the protobuf library writes it: a scalar has an empty shape, no elements means no content.
    Plain,
    /// As in a worker's response to RecvTensor: a scalar has no shape, and the content is present even if it is empty.
    /// Strings and handles are encoded as in `Plain`.
    Rendezvous,
}

/// A tensor to be encoded, with the lengths that precede its fields.
pub(crate) struct Layout<'a> {
    dtype: i32,
    dims: &'a [usize],
    /// Bytes of the shape's message; `None` leaves the field out.
    shape_len: Option<usize>,
    elements: Elements<'a>,
}

enum Elements<'a> {
    None,
    Bytes(&'a [u8]),
    Strings(&'a [bytes::Bytes]),
    Handles(Vec<ResourceHandleProto>),
}

impl<'a> Layout<'a> {
    pub(crate) fn new(tensor: &'a Tensor, form: Form) -> Layout<'a> {
        let dims = tensor.shape().dims();
        let shape_len = dims.iter().map(|&dim| 2 + dim_len(dim)).sum();
        let mut layout =
            Layout { dtype: tensor.dtype() as i32, dims, shape_len: Some(shape_len), elements: Elements::None };
        match tensor.storage() {
            TensorData::Inline(_) | TensorData::Buffer { .. } => match tensor.host_bytes() {
                Ok(bytes) if form == Form::Rendezvous => {
                    layout.elements = Elements::Bytes(bytes);
                    layout.shape_len = layout.shape_len.filter(|_| !dims.is_empty());
                }
                Ok([]) => {}
                Ok(bytes) => layout.elements = Elements::Bytes(bytes),
                // Not on the host: without a dtype, so that a reader does not take it for zeros.
                Err(_) => layout.dtype = 0,
            },
            TensorData::Strings(strings) if strings.is_empty() => {}
            TensorData::Strings(strings) => layout.elements = Elements::Strings(strings),
            TensorData::Handles(_) if tensor.dtype() == DType::Variant => layout.dtype = 0,
            TensorData::Handles(handles) => {
                layout.elements = Elements::Handles(
                    handles
                        .iter()
                        .map(|handle| ResourceHandleProto {
                            device: handle.device.to_string(),
                            container: handle.container.to_string(),
                            name: handle.name.to_string(),
                            ..ResourceHandleProto::default()
                        })
                        .collect(),
                );
            }
        }
        layout
    }

    /// Bytes of the whole message.
    pub(crate) fn len(&self) -> usize {
        self.head_len()
            + match &self.elements {
                Elements::None => 0,
                Elements::Bytes(bytes) => delimited_len(bytes.len()),
                Elements::Strings(strings) => delimited_len(strings_len(strings)),
                Elements::Handles(handles) => handles.iter().map(|handle| delimited_len(handle.encoded_len())).sum(),
            }
    }

    fn head_len(&self) -> usize {
        let dtype = if self.dtype == 0 { 0 } else { 1 + encoded_len_varint(self.dtype as u64) };
        dtype + self.shape_len.map_or(0, delimited_len)
    }

    /// Writes the whole message.
    pub(crate) fn write(&self, buf: &mut impl BufMut) {
        self.write_head(buf);
        match &self.elements {
            Elements::None => {}
            Elements::Bytes(bytes) => buf.put_slice(bytes),
            Elements::Strings(strings) => {
                strings.iter().for_each(|string| encode_varint(string.len() as u64, buf));
                strings.iter().for_each(|string| buf.put_slice(string));
            }
            Elements::Handles(handles) => {
                handles.iter().for_each(|handle| prost::encoding::message::encode(HANDLES, handle, buf));
            }
        }
    }

    /// Writes everything before the elements, which ends with their key and length.
    pub(crate) fn write_head(&self, buf: &mut impl BufMut) {
        if self.dtype != 0 {
            prost::encoding::int32::encode(DTYPE, &self.dtype, buf);
        }
        if let Some(shape_len) = self.shape_len {
            encode_key(SHAPE, WireType::LengthDelimited, buf);
            encode_varint(shape_len as u64, buf);
            for &dim in self.dims {
                encode_key(2, WireType::LengthDelimited, buf);
                encode_varint(dim_len(dim) as u64, buf);
                encode_key(1, WireType::Varint, buf);
                encode_varint(dim as u64, buf);
            }
        }
        let content_len = match &self.elements {
            Elements::None | Elements::Handles(_) => return,
            Elements::Bytes(bytes) => bytes.len(),
            Elements::Strings(strings) => strings_len(strings),
        };
        encode_key(CONTENT, WireType::LengthDelimited, buf);
        encode_varint(content_len as u64, buf);
    }

    /// True if the elements are contiguous in the tensor's memory.
    pub(crate) fn is_bytes(&self) -> bool {
        matches!(self.elements, Elements::Bytes(_))
    }
}

impl Parts {
    fn encoded_len(&self) -> usize {
        let dtype = if self.dtype == 0 { 0 } else { prost::encoding::int32::encoded_len(DTYPE, &self.dtype) };
        let shape = self.shape.as_ref().map_or(0, |shape| prost::encoding::message::encoded_len(SHAPE, shape));
        dtype + shape + self.content().map_or(0, |bytes| delimited_len(bytes.len())) + self.values.len()
    }

    fn write(&self, buf: &mut impl BufMut) {
        if self.dtype != 0 {
            prost::encoding::int32::encode(DTYPE, &self.dtype, buf);
        }
        if let Some(shape) = &self.shape {
            prost::encoding::message::encode(SHAPE, shape, buf);
        }
        if let Some(bytes) = self.content() {
            encode_key(CONTENT, WireType::LengthDelimited, buf);
            encode_varint(bytes.len() as u64, buf);
            buf.put_slice(bytes);
        }
        buf.put_slice(&self.values);
    }

    fn content(&self) -> Option<&[u8]> {
        match &self.content {
            Content::None => None,
            Content::Bytes(bytes) => Some(bytes),
            Content::Placed(tensor) => tensor.host_bytes().ok(),
        }
    }
}

impl Message for WireTensor {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        match &self.0 {
            TensorState::Empty => {}
            TensorState::Tensor(tensor) => Layout::new(tensor, Form::Plain).write(buf),
            TensorState::Parts(parts) => parts.write(buf),
        }
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        self.merge(tag, wire_type, buf, ctx)
    }

    fn encoded_len(&self) -> usize {
        match &self.0 {
            TensorState::Empty => 0,
            TensorState::Tensor(tensor) => Layout::new(tensor, Form::Plain).len(),
            TensorState::Parts(parts) => parts.encoded_len(),
        }
    }

    fn clear(&mut self) {
        self.0 = TensorState::Empty;
    }
}

/// Bytes of a field of this length, with its key (below 16) and its length.
fn delimited_len(n_bytes: usize) -> usize {
    1 + encoded_len_varint(n_bytes as u64) + n_bytes
}

/// Bytes of a dimension's message. The size is written even if it is 0, as TensorFlow's workers do.
fn dim_len(dim: usize) -> usize {
    1 + encoded_len_varint(dim as u64)
}

fn strings_len(strings: &[bytes::Bytes]) -> usize {
    strings.iter().map(|string| encoded_len_varint(string.len() as u64) + string.len()).sum()
}
