//! `RecvTensorResponse`, whose fields are written in the order of TensorFlow's workers.

use bytes::{Buf, BufMut};
use prost::encoding::{self, DecodeContext, WireType};
use prost::{DecodeError, Message};

use super::Any;
use crate::wire::tensor_wire::{Form, Layout, WireTensor};

/// `tensorflow.RecvTensorResponse`: a tensor that another task requested.
///
/// TensorFlow writes contiguous elements as the last bytes, after dtype and shape, so that a reader can allocate the
/// tensor first and decode into it. So does this; fields are accepted in any order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecvTensorResponse {
    /// The tensor. Meaningless, and perhaps of another dtype, if the value is dead.
    pub tensor: Option<WireTensor>,
    /// Whether the value is dead: it belongs to a branch that was not taken.
    pub is_dead: bool,
    /// When it was sent, in microseconds since 1970.
    pub send_start_micros: i64,
    /// For other transports than gRPC.
    pub transport_options: Option<Any>,
    /// Whether MarkRecvFinished must follow.
    pub require_ack: bool,
}

const TENSOR: u32 = 1;
const IS_DEAD: u32 = 2;
const SEND_START_MICROS: u32 = 3;
const TRANSPORT_OPTIONS: u32 = 4;
const REQUIRE_ACK: u32 = 5;

impl RecvTensorResponse {
    /// The tensor's layout if its elements come last, as bytes.
    pub(crate) fn layout_with_bytes(&self) -> Option<Layout<'_>> {
        let tensor = self.tensor.as_ref()?.as_tensor()?;
        Some(Layout::new(tensor, Form::Rendezvous)).filter(Layout::is_bytes)
    }

    /// Writes all fields but the tensor.
    pub(crate) fn write_flags(&self, buf: &mut impl BufMut) {
        if self.is_dead {
            encoding::bool::encode(IS_DEAD, &self.is_dead, buf);
        }
        if self.send_start_micros != 0 {
            encoding::int64::encode(SEND_START_MICROS, &self.send_start_micros, buf);
        }
        if let Some(options) = &self.transport_options {
            encoding::message::encode(TRANSPORT_OPTIONS, options, buf);
        }
        if self.require_ack {
            encoding::bool::encode(REQUIRE_ACK, &self.require_ack, buf);
        }
    }

    fn flags_len(&self) -> usize {
        let is_dead = if self.is_dead { encoding::bool::encoded_len(IS_DEAD, &true) } else { 0 };
        let start = match self.send_start_micros {
            0 => 0,
            micros => encoding::int64::encoded_len(SEND_START_MICROS, &micros),
        };
        let options =
            self.transport_options.as_ref().map_or(0, |any| encoding::message::encoded_len(TRANSPORT_OPTIONS, any));
        let require_ack = if self.require_ack { encoding::bool::encoded_len(REQUIRE_ACK, &true) } else { 0 };
        is_dead + start + options + require_ack
    }
}

impl Message for RecvTensorResponse {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        if let Some(layout) = self.layout_with_bytes() {
            self.write_flags(buf);
            encoding::encode_key(TENSOR, WireType::LengthDelimited, buf);
            encoding::encode_varint(layout.len() as u64, buf);
            layout.write(buf);
            return;
        }
        if let Some(tensor) = &self.tensor {
            encoding::message::encode(TENSOR, tensor, buf);
        }
        self.write_flags(buf);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        match tag {
            TENSOR => {
                encoding::message::merge(wire_type, self.tensor.get_or_insert_with(WireTensor::default), buf, ctx)
            }
            IS_DEAD => encoding::bool::merge(wire_type, &mut self.is_dead, buf, ctx),
            SEND_START_MICROS => encoding::int64::merge(wire_type, &mut self.send_start_micros, buf, ctx),
            TRANSPORT_OPTIONS => {
                encoding::message::merge(wire_type, self.transport_options.get_or_insert_with(Any::default), buf, ctx)
            }
            REQUIRE_ACK => encoding::bool::merge(wire_type, &mut self.require_ack, buf, ctx),
            tag => encoding::skip_field(wire_type, tag, buf, ctx),
        }
    }

    fn encoded_len(&self) -> usize {
        let tensor = match (self.layout_with_bytes(), &self.tensor) {
            (Some(layout), _) => 1 + encoding::encoded_len_varint(layout.len() as u64) + layout.len(),
            (None, Some(tensor)) => encoding::message::encoded_len(TENSOR, tensor),
            (None, None) => 0,
        };
        tensor + self.flags_len()
    }

    fn clear(&mut self) {
        *self = RecvTensorResponse::default();
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};

    use super::*;

    /// 1 700 000 000 000 000 µs, as a field.
    const MICROS: &str = "188080f9c0c1c48203";

    fn response(tensor: Tensor) -> RecvTensorResponse {
        let tensor = Some(WireTensor::from(tensor));
        RecvTensorResponse { tensor, send_start_micros: 1_700_000_000_000_000, ..RecvTensorResponse::default() }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[track_caller]
    fn check(response: RecvTensorResponse, expected: &str) {
        let bytes = response.encode_to_vec();
        assert_eq!(hex(&bytes), expected.replace("<micros>", MICROS));
        assert_eq!(bytes.len(), response.encoded_len());
        assert_eq!(RecvTensorResponse::decode(&bytes[..]).unwrap(), response);
    }

    /// Bytes that TensorFlow's workers sent.
    #[test]
    fn the_bytes_are_those_of_tensorflow() {
        let zeros = Tensor::zeros(DType::F32, [2, 3]).unwrap();
        check(response(zeros), &format!("<micros>0a260801120812020802120208032218{}", "00".repeat(24)));
        check(response(Tensor::scalar(7i32)), "<micros>0a080803220407000000");
        let control = response(Tensor::zeros(DType::F32, [0]).unwrap());
        check(control.clone(), "<micros>0a0a08011204120208002200");
        check(RecvTensorResponse { is_dead: true, ..control }, "1001<micros>0a0a08011204120208002200");
        let strings = Tensor::from(["a", "bb", ""]);
        check(response(strings), "0a1008071204120208032206010200616262<micros>");
        check(response(Tensor::from("str1")), "0a0b0807120022050473747231<micros>");
    }

    #[test]
    fn fields_come_in_any_order() {
        let mut bytes = vec![0x0a, 0x08, 0x22, 0x04, 7, 0, 0, 0, 0x08, 3];
        bytes.extend([0x28, 1, 0x10, 1]);
        let read = RecvTensorResponse::decode(&bytes[..]).unwrap();
        assert!(read.is_dead && read.require_ack);
        assert_eq!(read.tensor.unwrap().into_tensor(), Ok(Tensor::scalar(7i32)));
    }
}
