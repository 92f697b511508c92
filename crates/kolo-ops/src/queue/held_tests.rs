//! What queues, tables and accumulators hold counts against a device's memory, and is given back.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use kolo_core::{Code, DType, PartialShape, Result, Tensor};
use kolo_device::cpu::IntraPool;
use kolo_device::{Arena, Charge};

use super::accumulator::{Accumulator, AccumulatorSpec, Form, Reduction};
use super::sparse::SparseGradient;
use super::{Amount, Order, Queue, QueueSpec};
use crate::string::words;
use crate::table::{Table, TableSpec};
use crate::{CancelToken, Done, Outcome};

fn memory() -> (Arc<Arena>, Charge) {
    let arena = Arena::new("cpu", Some(1 << 20));
    let charge = arena.charge(0, &"the object".into()).unwrap();
    (arena, charge)
}

fn pending() -> (Receiver<Result<Outcome>>, Done) {
    let (sender, receiver) = channel();
    (receiver, Done::new(move |outcome| sender.send(outcome).unwrap_or_default()))
}

fn put(queue: &Arc<Queue>, n: i64, cancel: &Arc<CancelToken>) -> Receiver<Result<Outcome>> {
    let (receiver, done) = pending();
    queue.enqueue_many(&[Tensor::vector((0..n).collect::<Vec<i64>>())], cancel, done);
    receiver
}

#[test]
fn elements_of_a_queue_count_until_they_are_handed_out() {
    let token = CancelToken::new();
    let shuffle = Order::Shuffle { min_after_dequeue: 0, seeds: (1, 2) };
    for order in [Order::Fifo, Order::PaddingFifo, Order::Priority, shuffle] {
        let (arena, charge) = memory();
        let spec = QueueSpec { order, capacity: None, dtypes: vec![DType::I64], shapes: vec![PartialShape::scalar()] };
        let queue = Queue::new("q", spec.clone(), charge).unwrap();
        put(&queue, 500, &token).recv().unwrap().unwrap();
        assert!(arena.stats().in_use > 500 * 100, "{}", arena.stats().in_use);
        let error = (0..100).find_map(|_| put(&queue, 500, &token).recv().unwrap().err()).expect("there is a limit");
        assert_eq!(error.code(), Code::ResourceExhausted);
        assert!(error.message().contains("'the object'"), "{error}");
        assert_eq!(queue.len() % 500, 0, "all of a batch or nothing");
        let (receiver, done) = pending();
        queue.dequeue(Amount::Many(queue.len()), &token, done);
        drop(receiver.recv().unwrap().unwrap());
        assert_eq!(arena.stats().in_use, 0);
        // Those that wait for room count, too, until they are given up.
        let full =
            Queue::new("q", QueueSpec { capacity: Some(1), ..spec }, arena.charge(0, &"b".into()).unwrap()).unwrap();
        let own = CancelToken::new();
        let waiting = put(&full, 500, &own);
        assert!(waiting.try_recv().is_err());
        let with_waiting = arena.stats().in_use;
        own.cancel(kolo_core::Error::cancelled("enough"));
        assert!(waiting.recv().unwrap().is_err());
        assert!(arena.stats().in_use < with_waiting / 5, "{} of {with_waiting}", arena.stats().in_use);
        drop((queue, full));
        assert_eq!(arena.stats().in_use, 0);
    }
}

#[test]
fn entries_of_a_table_count_and_a_value_that_is_replaced_does_not() {
    let (arena, charge) = memory();
    let table = Table::new("t", TableSpec { key: DType::I64, value: DType::Str, mutable: true }, charge).unwrap();
    let keys = |n: i64, from: i64| Tensor::vector((from..from + n).collect::<Vec<i64>>());
    let values = |n: usize| Tensor::from_strings([n], vec!["0123456789".repeat(10).into(); n]).unwrap();
    table.insert(&keys(500, 0), &values(500)).unwrap();
    let once = arena.stats().in_use;
    assert!(once > 500 * 200, "{once}");
    for _ in 0..20 {
        table.insert(&keys(500, 0), &values(500)).unwrap();
    }
    assert!(arena.stats().in_use < once * 2, "{} after {once}", arena.stats().in_use);
    // The same key many times is one entry.
    table.insert(&Tensor::vector(vec![1000i64; 500]), &values(500)).unwrap();
    assert_eq!(table.len(), 501);
    let (n, error) = (1..).find_map(|i| table.insert(&keys(500, i * 500), &values(500)).err().map(|e| (i, e))).unwrap();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(n > 1 && table.len() < 500 * (n as usize) + 2, "what is refused changes nothing");
    table.import(&keys(1, 0), &values(1)).unwrap();
    assert!(arena.stats().in_use < once, "what was replaced is given back");
    drop(table);
    assert_eq!(arena.stats().in_use, 0);
    let table =
        Table::new("t", TableSpec { key: DType::Str, value: DType::I64, mutable: false }, Charge::NONE).unwrap();
    table.initialize(&words(["a", "b", "a"]), &Tensor::from([1i64, 2, 1])).unwrap();
    assert_eq!(table.find(&words(["a", "c"]), &Tensor::scalar(-1i64)).unwrap(), Tensor::from([1i64, -1]));
}

#[test]
fn sums_of_gradients_count_until_they_are_taken() {
    let token = CancelToken::new();
    let (arena, charge) = memory();
    let shape = PartialShape::unknown();
    let spec = AccumulatorSpec { form: Form::Dense, dtype: DType::F32, shape, reduction: Reduction::Mean };
    let sparse = AccumulatorSpec { form: Form::Sparse, ..spec.clone() };
    let dense = Accumulator::new("d", spec, charge.another(0).unwrap()).unwrap();
    let pool = IntraPool::new(1);
    // A value that no device counts.
    dense.apply(0, Tensor::zeros(DType::F32, [10_000]).unwrap(), &pool).unwrap();
    assert!(arena.stats().in_use >= 40_000);
    assert!(dense.apply(0, Tensor::zeros(DType::F32, [10_001]).unwrap(), &pool).is_err());
    let (receiver, done) = pending();
    dense.take(1, &token, done);
    drop(receiver.recv().unwrap().unwrap());
    assert_eq!(arena.stats().in_use, 0);

    let rows = Accumulator::new("r", sparse, charge).unwrap();
    let values = Tensor::zeros(DType::F32, [100, 8]).unwrap();
    let add = |from: i64| {
        let indices: Vec<i64> = (from..from + 100).collect();
        rows.apply_sparse(0, &SparseGradient { indices: &indices, values: &values, shape: None })
    };
    add(0).unwrap();
    let once = arena.stats().in_use;
    assert!(once > 100 * 100, "{once}");
    for _ in 0..20 {
        add(0).unwrap();
    }
    assert_eq!(arena.stats().in_use, once, "the same rows take no more");
    let before = rows.n_accumulated();
    let error = (1..).find_map(|i| add(i * 100).err()).unwrap();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(rows.n_accumulated() > before);
    let (receiver, done) = pending();
    rows.take(1, &token, done);
    drop(receiver.recv().unwrap());
    assert_eq!(arena.stats().in_use, 0);
}
