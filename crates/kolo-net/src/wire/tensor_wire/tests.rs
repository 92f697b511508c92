//! Every dtype survives a round trip; corrupt messages are refused without a panic and without excessive memory.

use bytes::{Buf as _, Bytes};
use kolo_core::{Buffer, Code, DType, Memory, ResourceHandle, Shape, Tensor, TensorData};
use kolo_graph::wire::proto::{ResourceHandleProto, TensorProto};
use kolo_graph::wire::tensor::{from_proto, to_proto};
use proptest::prelude::*;
use prost::Message as _;

use super::{Content, TensorState, WireTensor};

fn pattern(dtype: DType, dims: &[usize]) -> Tensor {
    let shape = Shape::new(dims).unwrap();
    let mut tensor = Tensor::zeros(dtype, shape).unwrap();
    if dtype == DType::Str {
        let strings = (0..tensor.n_elements()).map(|i| Bytes::from(vec![b'x'; i % 40 * 50])).collect();
        return Tensor::from_strings(tensor.shape().clone(), strings).unwrap();
    }
    for (i, byte) in tensor.host_bytes_mut().unwrap().iter_mut().enumerate() {
        *byte = if dtype == DType::Bool { (i % 3 == 1).into() } else { (i * 7 % 61) as u8 + 1 };
    }
    tensor
}

/// The same elements, bit by bit, where a dtype has no Rust type to compare.
#[track_caller]
fn assert_same(found: &Tensor, expected: &Tensor) {
    assert_eq!((found.dtype(), found.shape()), (expected.dtype(), expected.shape()));
    match expected.storage() {
        TensorData::Strings(strings) => assert_eq!(found.strings().unwrap(), &strings[..]),
        _ => assert_eq!(found.host_bytes().unwrap(), expected.host_bytes().unwrap()),
    }
}

#[test]
fn every_dtype_survives_in_one_piece_and_in_many() {
    for &dtype in DType::ALL.iter().filter(|dtype| !matches!(dtype, DType::Resource | DType::Variant)) {
        for dims in [&[][..], &[0], &[1], &[3], &[2, 0, 5], &[7, 11, 2], &[3000]] {
            let tensor = pattern(dtype, dims);
            let message = WireTensor::new(tensor.clone()).unwrap();
            let bytes = message.encode_to_vec();
            assert_eq!(bytes.len(), message.encoded_len());
            assert_same(&WireTensor::decode(&bytes[..]).unwrap().into_tensor().unwrap(), &tensor);
            let (left, right) = bytes.split_at(bytes.len() / 2);
            assert_same(&WireTensor::decode(left.chain(right)).unwrap().into_tensor().unwrap(), &tensor);
            // Compatible in both directions with Kolo's GraphDef code, and so with TensorFlow.
            assert_same(&from_proto(&TensorProto::decode(&bytes[..]).unwrap()).unwrap(), &tensor);
            let plain = to_proto(&tensor).unwrap().encode_to_vec();
            let read = WireTensor::decode(&plain[..]).unwrap();
            assert_same(&read.clone().into_tensor().unwrap(), &tensor);
            // A message can be encoded again without being decoded to a tensor.
            let again = read.encode_to_vec();
            assert_eq!(again.len(), read.encoded_len());
            assert_same(&WireTensor::decode(&again[..]).unwrap().into_tensor().unwrap(), &tensor);
        }
    }
}

#[test]
fn a_scalar_has_an_empty_shape_and_an_empty_tensor_no_content() {
    assert_eq!(WireTensor::from(Tensor::scalar(7i32)).encode_to_vec(), [8, 3, 0x12, 0, 0x22, 4, 7, 0, 0, 0]);
    let empty = WireTensor::from(Tensor::zeros(DType::F32, [0]).unwrap());
    assert_eq!(empty.encode_to_vec(), [8, 1, 0x12, 4, 0x12, 2, 8, 0]);
}

#[test]
fn elements_are_read_into_their_tensor_at_once() {
    let message = WireTensor::from(pattern(DType::F32, &[40]));
    let read = WireTensor::decode(&message.encode_to_vec()[..]).unwrap();
    assert!(matches!(&read.0, TensorState::Parts(parts) if matches!(parts.content, Content::Placed(_))));
    assert!(read.into_tensor().unwrap().is_unique());
}

#[test]
fn a_content_may_come_before_its_shape() {
    let mut bytes = vec![0x22, 8, 1, 0, 0, 0, 2, 0, 0, 0, 0x12, 4, 0x12, 2, 8, 2, 8, 3];
    assert_eq!(WireTensor::decode(&bytes[..]).unwrap().into_tensor(), Ok(Tensor::from([1i32, 2])));
    // A second shape would be for other elements.
    let message = WireTensor::from(Tensor::from([1i32, 2]));
    bytes = message.encode_to_vec();
    bytes.extend([8, 1]);
    let error = WireTensor::decode(&bytes[..]).unwrap().into_tensor().unwrap_err();
    assert!(error.message().contains("two dtypes"), "{error}");
}

#[test]
fn the_fill_rule_is_limited() {
    // float, shape [2^25], one value: 128 MiB.
    let bytes = [&[8, 1, 0x12, 7, 0x12, 5, 8, 0x80, 0x80, 0x80, 0x10][..], &[0x2a, 4, 0, 0, 0x80, 0x3f]].concat();
    let message = WireTensor::decode(&bytes[..]).unwrap();
    assert_eq!(message.clone().into_tensor().unwrap_err().code(), Code::ResourceExhausted);
    assert!(message.into_tensor_within(&mut (1 << 28)).is_ok());
    let small = TensorProto { float_val: vec![2.5], ..to_proto(&pattern(DType::F32, &[3])).unwrap() };
    let small = WireTensor::decode(&small.encode_to_vec()[..]).unwrap();
    let mut budget = 20;
    assert_eq!(small.clone().into_tensor_within(&mut budget), Ok(Tensor::from([2.5f32; 3])));
    assert_eq!(budget, 12);
}

#[test]
fn lists_of_values_are_limited() {
    let mut bytes = vec![8, 7, 0x12, 0];
    let large = vec![0u8; crate::wire::limits::MAX_VALUES_BYTES + 1];
    prost::encoding::bytes::encode(8, &large, &mut bytes);
    let error = WireTensor::decode(&bytes[..]).unwrap().into_tensor().unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    let dims = [0x12u8, 0].repeat(40_000);
    let mut bytes = vec![8, 1];
    prost::encoding::bytes::encode(2, &dims, &mut bytes);
    let error = WireTensor::decode(&bytes[..]).unwrap().into_tensor().unwrap_err();
    assert!(error.message().contains("not a shape"), "{error}");
}

#[test]
fn handles_are_their_names() {
    let handle = ResourceHandle { device: "d".into(), container: "c".into(), name: "n".into(), object: None };
    let message = WireTensor::new(Tensor::handle(handle.clone())).unwrap();
    let read = WireTensor::decode(&message.encode_to_vec()[..]).unwrap().into_tensor().unwrap();
    assert_eq!(format!("{:?}", read.resource().unwrap()), "c/n on d");
    // As TensorFlow may also write it.
    let proto = ResourceHandleProto { device: "d".into(), name: "n".into(), ..ResourceHandleProto::default() };
    let mut bytes = vec![8, 20, 0x12, 0];
    prost::encoding::bytes::encode(4, &proto.encode_length_delimited_to_vec(), &mut bytes);
    let read = WireTensor::decode(&bytes[..]).unwrap().into_tensor().unwrap();
    assert_eq!(format!("{:?}", read.resource().unwrap()), "/n on d");
    assert_eq!(WireTensor::new(Tensor::variant(handle)).unwrap_err().code(), Code::Unimplemented);
}

#[test]
fn what_the_host_cannot_read_is_not_sent() {
    struct Device;
    impl Buffer for Device {
        fn memory(&self) -> Memory {
            Memory::Device { kind: "TPU", ordinal: 0 }
        }
        fn n_bytes(&self) -> usize {
            400
        }
        fn host(&self) -> Option<&[u8]> {
            None
        }
        fn host_mut(&mut self) -> Option<&mut [u8]> {
            None
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }
    let tensor = Tensor::from_buffer(DType::F32, [100].into(), std::sync::Arc::new(Device)).unwrap();
    assert!(WireTensor::new(tensor.clone()).unwrap_err().message().contains("cannot be sent"));
    let bytes = WireTensor::from(tensor).encode_to_vec();
    assert!(WireTensor::decode(&bytes[..]).unwrap().into_tensor().is_err());
}

proptest! {
    /// Any bytes: an error or a tensor, and never more memory than they and the budget justify.
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(message) = WireTensor::decode(&bytes[..]) {
            prop_assert!(message.encoded_len() <= 2 * bytes.len() + 20);
            if let Ok(tensor) = message.into_tensor_within(&mut 1000) {
                prop_assert!(tensor.n_bytes() <= 1000 + 8 * bytes.len());
            }
        }
    }

    /// A tensor with a corrupt byte or truncated, which is more likely to get far.
    #[test]
    fn damaged_tensors_are_read_or_refused(
        dtype in proptest::sample::select(DType::ALL),
        dims in proptest::collection::vec(0usize..5, 0..4),
        as_values: bool,
        at: prop::sample::Index,
        byte: u8,
        end: prop::sample::Index,
    ) {
        prop_assume!(!matches!(dtype, DType::Resource | DType::Variant));
        let tensor = pattern(dtype, &dims);
        let mut bytes = match as_values {
            true => to_proto(&tensor).unwrap().encode_to_vec(),
            false => WireTensor::from(tensor).encode_to_vec(),
        };
        let at = at.index(bytes.len());
        bytes[at] = byte;
        bytes.truncate(end.index(2 * bytes.len()));
        if let Ok(message) = WireTensor::decode(&bytes[..])
            && let Ok(tensor) = message.clone().into_tensor_within(&mut 1000)
        {
            prop_assert!(tensor.n_bytes() <= 1000 + 8 * bytes.len());
            let again = WireTensor::decode(&message.encode_to_vec()[..]).unwrap().into_tensor_within(&mut 1000).unwrap();
            prop_assert_eq!(again.shape(), tensor.shape());
        }
    }
}
