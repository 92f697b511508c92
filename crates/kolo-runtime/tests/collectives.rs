//! Collectives against their definitions, for ranks that are threads of this process.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{DType, Error, Result, Tensor};
use kolo_ops::CancelToken;
use kolo_runtime::collective::{
    CollectiveCall, CollectiveGroup as _, CollectiveKind, Communicator, CommunicatorOptions, Group, ReduceOp, Root,
};
use kolo_runtime::{Session, SessionConfig};

fn options(buffer_bytes: usize) -> CommunicatorOptions {
    CommunicatorOptions { buffer_bytes, timeout: Duration::from_secs(20) }
}

/// What each rank gets, on a thread of its own.
fn run<R: Send>(n_ranks: usize, options: &CommunicatorOptions, rank: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let ranks = Communicator::in_process(n_ranks, options).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|end| scope.spawn(|| rank(end))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The same numbers every time, small enough that sums of halves are exact.
fn numbers(seed: usize, n: usize) -> impl Iterator<Item = i32> {
    (0..n).map(move |i| ((seed * 7919 + i * 104_729) % 17) as i32 - 5)
}

fn tensor(dtype: DType, seed: usize, dims: &[usize]) -> Tensor {
    let n = dims.iter().product();
    let shape = kolo_core::Shape::new(dims).unwrap();
    let made = match dtype {
        DType::F32 => Tensor::vector(numbers(seed, n).map(|x| x as f32).collect::<Vec<_>>()),
        DType::F64 => Tensor::vector(numbers(seed, n).map(f64::from).collect::<Vec<_>>()),
        DType::F16 => Tensor::vector(numbers(seed, n).map(|x| half::f16::from_f32(x as f32)).collect::<Vec<_>>()),
        DType::BF16 => Tensor::vector(numbers(seed, n).map(|x| half::bf16::from_f32(x as f32)).collect::<Vec<_>>()),
        DType::I32 => Tensor::vector(numbers(seed, n).collect::<Vec<_>>()),
        DType::I64 => Tensor::vector(numbers(seed, n).map(i64::from).collect::<Vec<_>>()),
        DType::U8 => Tensor::vector(numbers(seed, n).map(|x| x as u8).collect::<Vec<_>>()),
        other => panic!("{other}"),
    };
    made.reshaped(shape).unwrap()
}

/// A reduction by its definition: one element after the other, in double precision.
fn reduced(op: ReduceOp, tensors: &[Tensor]) -> Vec<f64> {
    let all: Vec<Vec<f64>> = tensors.iter().map(values).collect();
    (0..all[0].len())
        .map(|i| {
            let column = all.iter().map(|one| one[i]);
            match op {
                ReduceOp::Sum => column.sum(),
                ReduceOp::Mean => column.sum::<f64>() / tensors.len() as f64,
                ReduceOp::Min => column.fold(f64::INFINITY, f64::min),
                ReduceOp::Max => column.fold(f64::NEG_INFINITY, f64::max),
                ReduceOp::Prod => column.product(),
            }
        })
        .collect()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    match tensor.dtype() {
        DType::F32 => tensor.data::<f32>().unwrap().iter().map(|x| f64::from(*x)).collect(),
        DType::F64 => tensor.data::<f64>().unwrap().to_vec(),
        DType::F16 => tensor.data::<half::f16>().unwrap().iter().map(|x| x.to_f64()).collect(),
        DType::BF16 => tensor.data::<half::bf16>().unwrap().iter().map(|x| x.to_f64()).collect(),
        DType::I32 => tensor.data::<i32>().unwrap().iter().map(|x| f64::from(*x)).collect(),
        DType::I64 => tensor.data::<i64>().unwrap().iter().map(|x| *x as f64).collect(),
        DType::U8 => tensor.data::<u8>().unwrap().iter().map(|x| f64::from(*x)).collect(),
        other => panic!("{other}"),
    }
}

const SIZES: [usize; 6] = [0, 1, 7, 1000, 9000, 40_001];

#[test]
fn every_rank_gets_what_all_reduce_means() {
    for n_ranks in [1, 2, 3, 5] {
        for buffer_bytes in [1, 70_000] {
            run(n_ranks, &options(buffer_bytes), |mut rank| {
                for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I64] {
                    for (n, op) in SIZES.into_iter().zip(ReduceOp::ALL.into_iter().cycle()) {
                        if op == ReduceOp::Mean && !dtype.is_float() {
                            continue;
                        }
                        let mine = |rank: usize| tensor(dtype, rank, &[n]);
                        // Two tensors at once, of which others hold one.
                        let other = tensor(dtype, 100 + rank.rank(), &[3, 5]);
                        let found = rank.all_reduce(vec![mine(rank.rank()), other.clone()], op).unwrap();
                        let all: Vec<Tensor> = (0..n_ranks).map(mine).collect();
                        let others: Vec<Tensor> = (0..n_ranks).map(|rank| tensor(dtype, 100 + rank, &[3, 5])).collect();
                        for (found, all) in found.iter().zip([all, others]) {
                            assert_eq!((found.dtype(), found.shape()), (dtype, all[0].shape()));
                            let tolerance = if matches!(dtype, DType::F16 | DType::BF16) { 0.01 } else { 1e-6 };
                            for (found, wanted) in values(found).iter().zip(reduced(op, &all)) {
                                assert!(
                                    (found - wanted).abs() <= tolerance * wanted.abs(),
                                    "{dtype} {op:?} {found} {wanted}"
                                );
                            }
                        }
                        assert_eq!(other, tensor(dtype, 100 + rank.rank(), &[3, 5]));
                    }
                }
            });
        }
    }
}

#[test]
fn rows_go_where_the_other_collectives_say() {
    for n_ranks in [1, 2, 3, 4] {
        for (buffer_bytes, rows) in [(1, 2), (1, 700), (1 << 16, 700)] {
            run(n_ranks, &options(buffer_bytes), |mut end| {
                let (rank, root) = (end.rank(), n_ranks - 1);
                let dims = [rows * n_ranks, 3];
                let mine = |rank: usize| tensor(DType::F32, rank, &dims);
                let all: Vec<Tensor> = (0..n_ranks).map(mine).collect();
                let share = |of: &Tensor, rank: usize| of.rows(rank * rows, rows).unwrap();
                let joined = |parts: &[Tensor]| parts.iter().flat_map(values).collect::<Vec<f64>>();

                assert_eq!(values(&end.all_gather(mine(rank)).unwrap()), joined(&all));
                let gathered = end.gather(mine(rank), root).unwrap();
                assert_eq!(values(&gathered), if rank == root { joined(&all) } else { values(&mine(rank)) });
                let copy = end.broadcast(vec![mine(rank), mine(rank + 50)], root).unwrap();
                assert_eq!(copy, [mine(root), mine(root + 50)]);
                let reduced_rows = end.reduce_scatter(mine(rank), ReduceOp::Sum).unwrap();
                let sum = reduced(ReduceOp::Sum, &all);
                assert_eq!(values(&reduced_rows), sum[rank * rows * 3..(rank + 1) * rows * 3]);
                let at_root = end.reduce(vec![mine(rank)], ReduceOp::Max, root).unwrap();
                let most = reduced(ReduceOp::Max, &all);
                assert_eq!(values(&at_root[0]), if rank == root { most } else { values(&mine(rank)) });
                assert_eq!(end.scatter(mine(rank), root).unwrap(), share(&mine(root), rank));
                let shares: Vec<Tensor> = all.iter().map(|of| share(of, rank)).collect();
                assert_eq!(values(&end.all_to_all(mine(rank)).unwrap()), joined(&shares));
                end.barrier().unwrap();
            });
        }
    }
}

#[test]
fn a_sum_has_the_same_bits_however_it_is_cut() {
    let vector = |rank: usize| -> Vec<f32> { (0..30_000).map(|i| ((i * 31 + rank * 17) as f32).sin() * 1e3).collect() };
    for n_ranks in [2, 3, 8] {
        let sums: Vec<Tensor> = [1, 5000, 1 << 20]
            .into_iter()
            .map(|buffer_bytes| {
                let sums = run(n_ranks, &options(buffer_bytes), |mut end| {
                    let mine = Tensor::vector(vector(end.rank()));
                    end.all_reduce(vec![mine], ReduceOp::Sum).unwrap().remove(0)
                });
                assert!(sums.iter().all(|sum| *sum == sums[0]));
                sums[0].clone()
            })
            .collect();
        assert!(sums.iter().all(|sum| *sum == sums[0]), "{n_ranks} ranks");
    }
}

/// A random call, which may differ between ranks.
fn call(kind: usize, n: usize, dtype: DType, name: &str, rank: usize) -> CollectiveCall {
    let kind = match kind % 5 {
        0 => CollectiveKind::AllReduce(ReduceOp::Sum),
        1 => CollectiveKind::AllReduce(ReduceOp::Max),
        2 => CollectiveKind::AllGather,
        3 => CollectiveKind::Broadcast(Root(0)),
        _ => CollectiveKind::AllToAll,
    };
    CollectiveCall { kind, name: name.into(), tensors: vec![tensor(dtype, rank, &[n * 12])], cancel: None }
}

#[test]
fn ranks_that_differ_all_learn_so_and_none_waits() {
    let began = Instant::now();
    for seed in 0..100usize {
        let n_ranks = 2 + seed % 3;
        let (culprit, at) = (seed % n_ranks, seed % 7);
        let results: Vec<Result<()>> = run(n_ranks, &options(4096), |mut end| {
            let rank = end.rank();
            for i in 0..10 {
                let (mut kind, mut n, mut dtype, mut name) = (i + seed, 1 + (i * seed) % 300, DType::F32, "a");
                if rank == culprit && i == at {
                    match seed % 6 {
                        0 => kind += 1,
                        1 => n += 1,
                        2 => dtype = DType::I32,
                        3 => name = "b",
                        // It skips a call, or stops early.
                        4 => continue,
                        _ => return Ok(()),
                    }
                }
                end.run(call(kind, n, dtype, name, rank))?;
            }
            Ok(())
        });
        for (rank, result) in results.into_iter().enumerate() {
            let left = seed % 6 >= 4 && rank == culprit;
            let Err(error) = result else {
                assert!(left, "seed {seed}: rank {rank} noticed nothing");
                continue;
            };
            let text = error.to_string();
            let says = ["ranks do not do the same", "has left the group", "has ended the group"];
            assert!(says.iter().any(|says| text.contains(says)), "seed {seed}, rank {rank}: {text}");
        }
    }
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}

#[test]
fn wrong_arguments_are_named_on_the_rank_that_gave_them_and_end_the_others() {
    type Wrong = fn(&mut Communicator) -> Result<()>;
    let cases: [(Wrong, &str); 5] = [
        (|end| end.broadcast(vec![], 7).map(drop), "there is no rank 7: there are 2, from 0 on"),
        (|end| end.all_gather(Tensor::scalar(1.0f32)).map(drop), "needs rows, and a scalar has none"),
        (
            |end| end.all_to_all(Tensor::from([1.0f32, 2.0, 3.0])).map(drop),
            "cuts float[3] along its first axis, which 2 ranks do not divide",
        ),
        (|end| end.all_reduce(vec![Tensor::from("text")], ReduceOp::Sum).map(drop), "of a fixed size"),
        (|end| end.all_reduce(vec![Tensor::from([true, false])], ReduceOp::Sum).map(drop), "bool cannot be reduced"),
    ];
    for (wrong, text) in cases {
        let errors: Vec<Error> = run(2, &options(4096), |mut end| match end.rank() {
            0 => wrong(&mut end).unwrap_err(),
            _ => {
                let error = end.barrier().and_then(|()| end.barrier()).unwrap_err();
                assert!(end.barrier().unwrap_err().is_derived());
                error
            }
        });
        assert!(errors[0].to_string().contains(text), "{}", errors[0]);
        // The other one learns why, or that it does something else.
        let other = errors[1].to_string();
        assert!(other.contains(text) || other.contains("ranks do not do the same"), "{other}");
    }
}

#[test]
fn a_group_runs_calls_in_order_beside_the_caller_and_stops_when_it_is_cancelled() {
    let ends = Communicator::in_process(2, &options(4096)).unwrap();
    let groups: Vec<Arc<Group>> = ends.into_iter().map(|end| Group::new(end).unwrap()).collect();
    let (sender, results) = std::sync::mpsc::channel();
    for i in 0..20 {
        for group in &groups {
            let tensors = vec![Tensor::from([i as f32 + group.rank() as f32])];
            let call = CollectiveCall {
                kind: CollectiveKind::AllReduce(ReduceOp::Sum),
                name: "sum".into(),
                tensors,
                cancel: None,
            };
            let sender = sender.clone();
            group.start(call, Box::new(move |result| sender.send((i, result)).unwrap()));
        }
    }
    for _ in 0..40 {
        let (i, result) = results.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(result.unwrap(), [Tensor::from([2.0 * i as f32 + 1.0])]);
    }
    // Only one rank begins: it waits until it is stopped, and the other learns why.
    let cancel = CancelToken::new();
    let barrier = |cancel: Option<Arc<CancelToken>>| CollectiveCall {
        kind: CollectiveKind::Barrier,
        name: "alone".into(),
        tensors: Vec::new(),
        cancel,
    };
    let sent = sender.clone();
    groups[0].start(barrier(Some(cancel.clone())), Box::new(move |result| sent.send((0, result)).unwrap()));
    assert!(results.recv_timeout(Duration::from_millis(50)).is_err());
    cancel.cancel(Error::cancelled("enough"));
    let (_, result) = results.recv_timeout(Duration::from_secs(5)).unwrap();
    assert!(result.unwrap_err().to_string().contains("the step was stopped: enough"));
    groups[1].start(barrier(None), Box::new(move |result| sender.send((1, result)).unwrap()));
    let (_, result) = results.recv_timeout(Duration::from_secs(5)).unwrap();
    let error = result.unwrap_err().to_string();
    assert!(error.contains("rank 0 has ended the group") && error.contains("enough"), "{error}");
    // What is under way does not keep a group from ending.
    drop(groups);
}

#[test]
fn nodes_of_a_graph_meet_those_of_other_sessions() {
    let ends = Communicator::in_process(2, &options(4096)).unwrap();
    let found: Vec<Vec<Tensor>> = std::thread::scope(|scope| {
        let rank = |end: Communicator| {
            move || {
                let config = SessionConfig::default();
                let rank = end.rank() as f32;
                config.groups.insert("world", Group::new(end).unwrap());
                let g = kolo_ops::graph();
                let x = g.placeholder::<f32>("x", [Some(2)]);
                let y = g.placeholder::<f32>("y", [Some(1), Some(1)]);
                let mean = g.op("KoloAllReduce").inputs([x, x * 2.0]).attr("group", "world").attr("reduction", "mean");
                let mean = mean.build();
                let rows = g.control_dependencies(&[mean], || {
                    g.op("KoloAllGather").input(y).attr("group", "world").build().output(0)
                });
                let session = Session::with_config(&g, config).unwrap();
                let feeds = [(x, Tensor::from([rank, 1.0])), (y, Tensor::from([[rank]]))];
                let mut last = Vec::new();
                for _ in 0..50 {
                    last = session.run(&[mean.output(0), mean.output(1), rows], &feeds, &[]).unwrap();
                }
                last
            }
        };
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(rank(end))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for found in found {
        assert_eq!(found, [Tensor::from([0.5f32, 1.0]), Tensor::from([1.0f32, 2.0]), Tensor::from([[0.0f32], [1.0]])]);
    }
}

#[test]
fn a_session_without_the_group_says_which_there_are() {
    let g = kolo_ops::graph();
    let sum = g.op("KoloAllReduce").inputs([g.constant(1.0f32)]).attr("group", "world").build().output(0);
    let error = Session::new(&g).unwrap().fetch(sum).unwrap_err().to_string();
    assert!(error.contains("no group of ranks 'world' (there are none)"), "{error}");
}
