use kolo_core::TensorData;
use kolo_graph::AttrValue;

use super::*;
use crate::string::words;
use crate::testing::{OpTest, check_op, tensor};

/// As TensorFlow wrote it: a = [1, 2], b = [1.5], c = ["x", "yz"].
const FIRST: &str = "0a2c0a0b0a016112061a040a0201020a0d0a0162120812060a040000c03f0a0e0a016312090a070a01780a02797a";
/// b = [2.5, 3.5], c = ["q"].
const SECOND: &str = "0a1f0a110a0162120c120a0a0800002040000060400a0a0a016312050a030a0171";

fn bytes(hex: &str) -> Bytes {
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    hex.as_bytes().chunks(2).map(byte).collect::<Vec<u8>>().into()
}

fn example(list: &[(&str, proto::Kind)]) -> Bytes {
    let feature = |kind: &proto::Kind| proto::Feature { kind: Some(kind.clone()) };
    let feature = list.iter().map(|(key, kind)| (key.to_string(), feature(kind))).collect();
    proto::Example { features: Some(proto::Features { feature }) }.encode_to_vec().into()
}

fn ints(value: &[i64]) -> proto::Kind {
    proto::Kind::Ints(proto::Int64List { value: value.to_vec() })
}

fn floats(value: &[f32]) -> proto::Kind {
    proto::Kind::Floats(proto::FloatList { value: value.to_vec() })
}

fn texts(n: usize) -> proto::Kind {
    proto::Kind::Bytes(proto::BytesList { value: vec![Bytes::from_static(b"x"); n] })
}

fn shape(dims: &[Dim]) -> AttrValue {
    AttrValue::List(vec![PartialShape::new(dims).into()])
}

/// Sparse `a` and `c`, dense `b`.
fn parse(messages: &[Bytes], default: &[f32], dims: &[Dim]) -> OpTest {
    check_op("ParseExample")
        .attr("Nsparse", 2i64)
        .attr("Ndense", 1i64)
        .attr("sparse_types", vec![DType::I64, DType::Str])
        .attr("dense_shapes", shape(dims))
        .input(Tensor::from_strings([messages.len()], messages.to_vec()).unwrap())
        .input(words([]))
        .input("a")
        .input("c")
        .input("b")
        .input(Tensor::vector(default.to_vec()))
}

/// What lives on after the kernel counts as long as it does.
#[test]
fn outputs_are_counted() {
    let many = example(&[("a", ints(&[7; 100])), ("b", floats(&[0.5; 100])), ("c", texts(200))]);
    for dims in [[Some(100)], [None]] {
        let default: &[f32] = if dims[0].is_some() { &[] } else { &[0.0] };
        let outputs = parse(&[many.clone(), many.clone()], default, &dims).run(false).unwrap();
        for (i, output) in outputs.iter().enumerate() {
            match output.storage() {
                TensorData::Inline(_) => assert!(i == 4 || i == 5, "output {i}"),
                TensorData::Buffer { buffer, .. } => assert!(buffer.is_counted(), "output {i}"),
                TensorData::Strings(strings) => assert!(strings.is_list_counted(), "output {i}"),
                TensorData::Handles(_) => panic!("output {i} is a handle"),
            }
        }
    }
}

#[test]
fn features_become_tensors() {
    parse(&[bytes(FIRST)], &[], &[Some(1)]).gives_all([
        Tensor::from([[0i64, 0], [0, 1]]),
        Tensor::from([[0i64, 0], [0, 1]]),
        Tensor::from([1i64, 2]),
        words(["x", "yz"]),
        Tensor::from([1i64, 2]),
        Tensor::from([1i64, 2]),
        Tensor::from([[1.5f32]]),
    ]);
    // The first dimension of `b` varies: shorter rows are filled up.
    parse(&[bytes(FIRST), bytes(SECOND)], &[0.0], &[None]).gives_all([
        Tensor::from([[0i64, 0], [0, 1]]),
        Tensor::from([[0i64, 0], [0, 1], [1, 0]]),
        Tensor::from([1i64, 2]),
        words(["x", "yz", "q"]),
        Tensor::from([2i64, 2]),
        Tensor::from([2i64, 2]),
        Tensor::from([[1.5f32, 0.0], [2.5, 3.5]]),
    ]);
    parse(&[example(&[("a", ints(&[1]))])], &[4.0], &[Some(1)]).gives_all([
        Tensor::from([[0i64, 0]]),
        tensor::<i64, 2>([0, 2], []),
        Tensor::from([1i64]),
        words([]),
        Tensor::from([1i64, 1]),
        Tensor::from([1i64, 0]),
        Tensor::from([[4.0f32]]),
    ]);
    let none = parse(&[], &[], &[Some(1)]).run(false).unwrap();
    assert_eq!(none[4], Tensor::from([0i64, 0]));
    assert_eq!(none[6], tensor::<f32, 2>([0, 1], []));
}

#[test]
fn what_does_not_fit_is_named() {
    let one = Some(1);
    parse(&[example(&[("a", ints(&[1]))])], &[], &[one])
        .fails("Feature: b (data type: float) is required but could not be");
    parse(&[bytes(SECOND)], &[], &[one])
        .fails("Key: b, Index: 0.  Number of float values != expected.  Values size: 2");
    parse(&[example(&[("b", ints(&[1]))])], &[], &[one]).fails("Key: b, Index: 0.  Data types don't match.");
    parse(&[example(&[("b", floats(&[1.0])), ("a", floats(&[1.0]))])], &[], &[one])
        .fails("Key: a, Index: 0.  Data types don't match. Expected type: int64, Actual type: float");
    parse(&[Bytes::from_static(b"\xff\xff")], &[], &[one]).fails("Could not parse example input 0");
    parse(&[], &[1.0, 2.0], &[one]).fails("the default of 'b' has 2 elements");
    parse(&[], &[], &[one, None]).fails("may leave open its first dimension");
}

#[test]
fn one_example_has_no_batch() {
    let single = |message: Bytes, dims: &[Dim]| {
        check_op("ParseSingleExample")
            .attr("num_sparse", 2i64)
            .attr("sparse_keys", vec!["a", "c"])
            .attr("dense_keys", vec!["b"])
            .attr("sparse_types", vec![DType::I64, DType::Str])
            .attr("dense_shapes", shape(dims))
            .input(Tensor::string(message))
            .input(tensor::<f32, 1>([0], []))
    };
    single(bytes(FIRST), &[Some(1)]).gives_all([
        Tensor::from([[0i64], [1]]),
        Tensor::from([[0i64], [1]]),
        Tensor::from([1i64, 2]),
        words(["x", "yz"]),
        Tensor::from([2i64]),
        Tensor::from([2i64]),
        Tensor::from([1.5f32]),
    ]);
    let found = single(bytes(SECOND), &[None]).run(false).unwrap();
    assert_eq!(found[6], Tensor::from([2.5f32, 3.5]));
    single(example(&[("a", ints(&[1]))]), &[Some(1)]).fails("Feature: b (data type: float) is required");
}
