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
        assert!(arena.stats().in_use < 10_000, "a little stays: {}", arena.stats().in_use);
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
fn a_batch_that_fits_is_taken_apart() {
    let (arena, charge) = memory();
    let (dtypes, shapes) = (vec![DType::F32], vec![[1000usize].into()]);
    let queue = Queue::new("q", QueueSpec { order: Order::Fifo, capacity: None, dtypes, shapes }, charge).unwrap();
    let (receiver, done) = pending();
    // More than half of the memory, which its rows take once.
    queue.enqueue_many(&[Tensor::zeros(DType::F32, [180, 1000]).unwrap()], &CancelToken::new(), done);
    receiver.recv().unwrap().unwrap();
    assert_eq!(queue.len(), 180);
    assert!(arena.stats().in_use > 180 * 4000);
}

/// A batch lies in memory of its own, which may not be there; then no element is lost.
#[test]
fn elements_stay_in_a_queue_if_there_is_no_memory_for_their_batch() {
    let token = CancelToken::new();
    let shuffle = Order::Shuffle { min_after_dequeue: 0, seeds: (1, 2) };
    for order in [Order::Fifo, Order::PaddingFifo, Order::Priority, shuffle] {
        let (arena, charge) = memory();
        let (dtypes, shapes) = (vec![DType::I64, DType::I64], vec![PartialShape::scalar(), [1000usize].into()]);
        let spec = QueueSpec { order: order.clone(), capacity: None, dtypes, shapes };
        let queue = Queue::new("q", spec, charge).unwrap();
        let (receiver, done) = pending();
        let values: Vec<i64> = (0..50).flat_map(|i| [i; 1000]).collect();
        let values = Tensor::from_vec([50, 1000], values).unwrap();
        queue.enqueue_many(&[Tensor::vector(vec![7i64; 50]), values], &token, done);
        receiver.recv().unwrap().unwrap();
        let take = |amount| {
            let (receiver, done) = pending();
            queue.dequeue(amount, &token, done);
            receiver.recv().unwrap()
        };
        let others = arena.charge(500_000, &"others".into()).unwrap();
        let in_use = arena.stats().in_use;
        for amount in [Amount::Many(50), Amount::UpTo(60), Amount::Many(49)] {
            if matches!(amount, Amount::UpTo(_)) {
                // It takes what there is once nothing more comes.
                queue.close(false).unwrap();
            }
            assert_eq!(take(amount).unwrap_err().code(), Code::ResourceExhausted);
            assert_eq!(queue.len(), 50, "{order:?}");
            assert!(arena.stats().in_use.abs_diff(in_use) < 16_384, "{} after {in_use}", arena.stats().in_use);
        }
        drop(others);
        let batch = take(Amount::Many(50)).unwrap().outputs.remove(1);
        let mut found: Vec<i64> = batch.data::<i64>().unwrap().iter().step_by(1000).copied().collect();
        if matches!(order, Order::Shuffle { .. }) {
            found.sort_unstable();
        }
        assert_eq!(found, (0..50).collect::<Vec<_>>(), "{order:?}");
    }
}

#[test]
fn gradients_stay_in_an_accumulator_if_there_is_no_memory_for_their_mean() {
    let token = CancelToken::new();
    let (arena, charge) = memory();
    let shape = PartialShape::unknown();
    let spec = AccumulatorSpec { form: Form::Sparse, dtype: DType::F32, shape, reduction: Reduction::Mean };
    let rows = Accumulator::new("r", spec, charge).unwrap();
    let indices: Vec<i64> = (0..66).collect();
    let add = |value: f32| {
        let values = Tensor::from_vec([66, 1000], vec![value; 66_000]).unwrap();
        rows.apply_sparse(0, &SparseGradient { indices: &indices, values: &values, shape: None }).unwrap();
    };
    let take = || {
        let (receiver, done) = pending();
        rows.take(1, &token, done);
        receiver.recv().unwrap()
    };
    add(1.0);
    add(2.0);
    let in_use = arena.stats().in_use;
    // What the rows took is not enough: the mean lies in one block, whose size is rounded up.
    let others = arena.charge((1 << 20) - in_use as usize, &"others".into()).unwrap();
    assert_eq!(take().unwrap_err().code(), Code::ResourceExhausted);
    assert_eq!((rows.n_accumulated(), arena.stats().in_use), (2, 1 << 20));
    drop(others);
    // The step is still the same.
    add(6.0);
    let mean = take().unwrap().outputs.remove(1);
    assert_eq!(mean.data::<f32>().unwrap(), [3.0; 66_000]);
    assert_eq!(rows.n_accumulated(), 0);
    drop(mean);
    assert_eq!(arena.stats().in_use, 0);
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
