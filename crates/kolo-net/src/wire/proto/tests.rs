//! Decoding arbitrary bytes never panics, for every message of both services.

use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::task::services::{master_methods, worker_methods};

/// Decodes bytes as a message; a decoded message survives a round trip.
fn read<M: Message + Default + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    if let Ok(message) = M::decode(bytes) {
        let written = message.encode_to_vec();
        assert_eq!(written.len(), message.encoded_len());
        // By bytes: a NaN in a tensor is not equal to itself.
        assert_eq!(M::decode(&written[..]).unwrap().encode_to_vec(), written);
    }
}

macro_rules! read_all {
    ($read:ident $trait:ident $service:literal; $(
        $(#[$doc:meta])* $method:ident $name:ident $request:ident $response:ident $size:ident $attempts:ident;
    )*) => {
        fn $read(bytes: &[u8]) {
            $(read::<$request>(bytes);
            read::<$response>(bytes);)*
        }
    };
}

worker_methods!(read_all read_worker);
master_methods!(read_all read_master);

/// Plausible fields: a small tag, a wire type, a value of that type, often nested.
fn field() -> impl Strategy<Value = Vec<u8>> {
    let leaf = prop_oneof![
        (1u8..20, any::<u64>()).prop_map(|(tag, value)| {
            let mut bytes = Vec::new();
            prost::encoding::uint64::encode(tag.into(), &value, &mut bytes);
            bytes
        }),
        (1u8..20, proptest::collection::vec(any::<u8>(), 0..12)).prop_map(|(tag, value)| delimited(tag, &value)),
        (1u8..20, any::<u64>()).prop_map(|(tag, value)| {
            let mut bytes = Vec::new();
            prost::encoding::fixed64::encode(tag.into(), &value, &mut bytes);
            bytes
        }),
    ];
    leaf.prop_recursive(4, 40, 5, |inner| {
        (1u8..20, proptest::collection::vec(inner, 0..5)).prop_map(|(tag, fields)| delimited(tag, &fields.concat()))
    })
}

fn delimited(tag: u8, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    prost::encoding::bytes::encode(tag.into(), &value.to_vec(), &mut bytes);
    bytes
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
        read_worker(&bytes);
        read_master(&bytes);
    }

    #[test]
    fn any_fields_are_read_or_refused(fields in proptest::collection::vec(field(), 0..6)) {
        let bytes = fields.concat();
        read_worker(&bytes);
        read_master(&bytes);
    }
}

/// Field numbers and types that are easy to get wrong.
#[test]
fn field_numbers_are_those_of_tensorflow() {
    let key = |message: &dyn Fn() -> Vec<u8>| message()[0] >> 3;
    assert_eq!(key(&|| ExtendSessionResponse { new_graph_version: 1 }.encode_to_vec()), 4);
    let request = RunGraphRequest { session_handle: "s".into(), ..RunGraphRequest::default() };
    assert_eq!(key(&|| request.encode_to_vec()), 8);
    let request = DeregisterGraphRequest { session_handle: "s".into(), ..DeregisterGraphRequest::default() };
    assert_eq!(key(&|| request.encode_to_vec()), 2);
    // Incarnations are of fixed length.
    let device = DeviceAttributes { incarnation: 1, ..DeviceAttributes::default() };
    assert_eq!(device.encode_to_vec(), [0x31, 1, 0, 0, 0, 0, 0, 0, 0]);
    let config = ConfigProto { device_count: [("CPU".to_owned(), 2)].into(), ..ConfigProto::default() };
    assert_eq!(config.encode_to_vec(), [0x0a, 7, 0x0a, 3, b'C', b'P', b'U', 0x10, 2]);
}
