use kolo_core::{DType, PartialShape, Tensor};
use kolo_graph::{Graph, Output};

use super::TensorArray;
use crate::testing::{evaluate, tensor};

fn array(g: &Graph, size: i32) -> TensorArray<'_> {
    TensorArray::new(g, DType::F32, g.constant(size), PartialShape::unknown())
}

#[track_caller]
fn fails(g: &Graph, fetch: Output<'_>, text: &str) {
    let error = evaluate(g, &[fetch], &[]).unwrap_err();
    assert!(error.message().contains(text), "{error}");
}

#[test]
fn elements_are_read_as_they_were_written() {
    let g = crate::graph();
    let [zero, one] = [0i32, 1].map(|i| g.constant(i));
    let written = array(&g, 2).write(one, g.constant([3.0f32, 4.0])).write(zero, g.constant(5.0f32));
    let values = evaluate(&g, &[written.read(zero), written.read(one), written.size()], &[]).unwrap();
    assert_eq!(values, [Tensor::scalar(5.0f32), [3.0f32, 4.0].into(), Tensor::scalar(2i32)]);
}

#[test]
fn an_element_is_written_once_and_read_once() {
    let g = crate::graph();
    let (zero, value) = (g.constant(0i32), g.constant([1.0f32, 2.0]));
    let written = array(&g, 1).write(zero, value);
    fails(&g, written.write(zero, value).flow(), "because it has already been written to");
    let twice = g.control_dependencies(&[written.read(zero).operation()], || written.read(zero));
    fails(&g, twice, "twice because it was cleared after a previous read");
    fails(&g, array(&g, 1).read(zero), "Could not read from TensorArray index 0");
    fails(&g, array(&g, 0).write(zero, value).flow(), "not resizeable and size is: 0");
    fails(&g, array(&g, 1).read(g.constant(-1i32)), "Tried to read from index -1 but array size is: 1");
    fails(&g, array(&g, 1).write(zero, g.constant(1i32)).flow(), "the value dtype is int32");
    fails(&g, array(&g, -1).flow(), "Size should be >= 0");
}

#[test]
fn an_array_of_known_shape_gives_zeros_and_refuses_others() {
    let g = crate::graph();
    let zero = g.constant(0i32);
    let known = TensorArray::new(&g, DType::F64, g.constant(1i32), [2usize]);
    assert_eq!(known.read(zero).shape(), PartialShape::from([2usize]));
    assert_eq!(evaluate(&g, &[known.read(zero)], &[]).unwrap(), [[0.0f64, 0.0].into()]);
    fails(
        &g,
        known.write(zero, g.constant([1.0f64])).flow(),
        "incompatible with the TensorArray's inferred element shape",
    );
}

#[test]
fn a_dynamic_array_grows() {
    let g = crate::graph();
    let two = g.constant(2i32);
    let grown = TensorArray::dynamic(&g, DType::Str, g.constant(0i32), PartialShape::unknown());
    let grown = grown.write(two, g.constant("x"));
    let values = evaluate(&g, &[grown.size(), grown.read(two)], &[]).unwrap();
    assert_eq!(values, [Tensor::scalar(3i32), "x".into()]);
}

#[test]
fn scatter_and_gather_are_inverse() {
    let g = crate::graph();
    let rows = g.constant(tensor([3, 2], [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]));
    let scattered = array(&g, 3).scatter(g.constant([2i32, 0, 1]), rows);
    let value = evaluate(&g, &[scattered.gather(g.constant([0i32, 1, 2]))], &[]).unwrap();
    assert_eq!(value, [tensor([3, 2], [3.0f32, 4.0, 5.0, 6.0, 1.0, 2.0])]);
    fails(&g, array(&g, 3).scatter(g.constant([0i32]), rows).flow(), "Expected len(indices) == values.shape[0]");
    fails(&g, array(&g, 3).scatter(g.constant([0i32]), g.constant(1.0f32)).flow(), "at least a vector");
    let none = g.constant(Tensor::vector(Vec::<i32>::new()));
    fails(&g, array(&g, 0).gather(none), "is not fully defined");
    let empty = TensorArray::new(&g, DType::F32, g.constant(0i32), [2usize]).gather(none);
    assert_eq!(evaluate(&g, &[empty], &[]).unwrap(), [tensor([0, 2], Vec::<f32>::new())]);
    let strings = TensorArray::new(&g, DType::Str, g.constant(2i32), PartialShape::unknown());
    let strings = strings.write(g.constant(0i32), g.constant("a")).write(g.constant(1i32), g.constant("b"));
    let joined = evaluate(&g, &[strings.gather(g.constant([1i32, 0]))], &[]).unwrap();
    assert_eq!(joined[0].strings().unwrap(), ["b", "a"]);
}

#[test]
fn concat_and_split_are_inverse() {
    let g = crate::graph();
    let rows = g.constant(tensor([3, 2], [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]));
    let cut = array(&g, 2).split(rows, g.constant([1i64, 2]));
    let joined = cut.concat();
    let values = evaluate(&g, &[joined, joined.operation().output(1)], &[]).unwrap();
    assert_eq!(values, [tensor([3, 2], [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]), [1i64, 2].into()]);
    let second = array(&g, 2).split(rows, g.constant([1i64, 2])).read(g.constant(1i32));
    assert_eq!(evaluate(&g, &[second], &[]).unwrap(), [tensor([2, 2], [3.0f32, 4.0, 5.0, 6.0])]);
    fails(&g, array(&g, 2).split(rows, g.constant([1i64, 1])).flow(), "sum of lengths");
    fails(&g, array(&g, 2).split(rows, g.constant([4i64, -1])).flow(), "length -1 is negative");
}

#[test]
fn gradients_follow_writes_and_reads() {
    let g = crate::graph();
    let x = g.placeholder::<f64>("x", [2usize]);
    let [zero, one] = [0i32, 1].map(|i| g.constant(i));
    let new = || TensorArray::new(&g, DType::F64, g.constant(2i32), PartialShape::unknown());
    // y = 3·x² by way of an array, read twice: once whole, once by element.
    let written = new().write(zero, x * x).write(one, x);
    let y = written.read(zero) * 3.0;
    let grad = kolo_graph::gradients(&[y], &[x]).unwrap()[0].unwrap().dense().unwrap();
    let feed = [(x, Tensor::from([2.0f64, -1.0]))];
    assert_eq!(evaluate(&g, &[grad], &feed).unwrap(), [[12.0f64, -6.0].into()]);
    // The same through scatter, gather, split and concat.
    let lengths = g.constant([1i64, 1]);
    for joined in
        [new().scatter(g.constant([0i32, 1]), x).gather(g.constant([1i32, 0])), new().split(x, lengths).concat()]
    {
        let weights = g.constant([1.0f64, 10.0]);
        let grad = kolo_graph::gradients(&[joined * weights], &[x]).unwrap()[0].unwrap().dense().unwrap();
        let expected = if joined.operation().op() == "TensorArrayGatherV3" { [10.0f64, 1.0] } else { [1.0, 10.0] };
        assert_eq!(evaluate(&g, &[grad], &feed).unwrap(), [expected.into()]);
    }
}

#[test]
fn a_closed_array_refuses() {
    let g = crate::graph();
    let array = array(&g, 1);
    let close = g.op("TensorArrayCloseV3").input(array.handle).build();
    let late = g.control_dependencies(&[close], || array.size());
    fails(&g, late, "has already been closed");
}

#[test]
fn gradients_of_several_reads_of_one_element_are_summed() {
    let g = crate::graph();
    let x = g.placeholder::<f64>("x", [2usize]);
    let zero = g.constant(0i32);
    let made = g.op("TensorArrayV3").input(g.constant(1i32)).attr("dtype", DType::F64).attr("clear_after_read", false);
    let made = made.build();
    let array = TensorArray { handle: made.output(0), flow: made.output(1), dtype: DType::F64 }.write(zero, x);
    let y = array.read(zero) + array.read(zero) * 10.0;
    let grad = kolo_graph::gradients(&[y], &[x]).unwrap()[0].unwrap().dense().unwrap();
    let feed = [(x, Tensor::from([2.0f64, -1.0]))];
    assert_eq!(evaluate(&g, &[grad], &feed).unwrap(), [[11.0f64, 11.0].into()]);
}
