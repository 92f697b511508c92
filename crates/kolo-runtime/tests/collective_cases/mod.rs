//! Collectives against their definitions, for ranks that are threads of this process. Each transport's tests run all of them: the files
//! in which it is tested include this one, and say how a group is made.

use std::time::{Duration, Instant};

use kolo_core::{Code, DType, Result, Shape, Tensor};
use kolo_device::cpu::reduce;
use kolo_runtime::collective::{
    Algorithm, CollectiveCall, CollectiveKind, Communicator, CommunicatorOptions, ReduceOp, Root,
};

/// Makes a group.
pub type Connect = fn(usize, &CommunicatorOptions) -> Vec<Communicator>;

pub fn options(buffer_bytes: usize) -> CommunicatorOptions {
    CommunicatorOptions { buffer_bytes, timeout: Duration::from_secs(20), ..CommunicatorOptions::default() }
}

/// What each rank gets, on a thread of its own.
pub fn run<R: Send>(ranks: Vec<Communicator>, rank: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|end| scope.spawn(|| rank(end))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The same numbers every time, small enough that sums of halves are exact.
fn numbers(seed: usize, n: usize) -> impl Iterator<Item = i32> {
    (0..n).map(move |i| ((seed * 7919 + i * 104_729) % 17) as i32 - 5)
}

pub fn tensor(dtype: DType, seed: usize, dims: &[usize]) -> Tensor {
    let n = dims.iter().product();
    let shape = Shape::new(dims).unwrap();
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

pub fn every_rank_gets_what_all_reduce_means(connect: Connect) {
    for n_ranks in [1, 2, 3, 5] {
        for buffer_bytes in [1, 70_000] {
            run(connect(n_ranks, &options(buffer_bytes)), |mut rank| {
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

pub fn rows_go_where_the_other_collectives_say(connect: Connect) {
    for n_ranks in [1, 2, 3, 4] {
        for (buffer_bytes, rows) in [(1, 2), (1, 700), (1 << 16, 700)] {
            run(connect(n_ranks, &options(buffer_bytes)), |mut end| {
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

/// Numbers whose sums depend on the order.
fn vector(rank: usize, n: usize) -> Vec<f64> {
    let number = |i: usize| match i % 5 {
        // The smaller one of two zeros is the second.
        0 => [0.0, -0.0][(rank + i / 5) % 2],
        _ => ((i * 31 + rank * 17) as f64).sin() * 10f64.powi((i % 7) as i32 - 3),
    };
    (0..n).map(number).collect()
}

fn rounded(dtype: DType, values: &[f64]) -> Tensor {
    match dtype {
        DType::F32 => Tensor::vector(values.iter().map(|x| *x as f32).collect::<Vec<_>>()),
        DType::F16 => Tensor::vector(values.iter().map(|x| half::f16::from_f64(*x)).collect::<Vec<_>>()),
        DType::BF16 => Tensor::vector(values.iter().map(|x| half::bf16::from_f64(*x)).collect::<Vec<_>>()),
        _ => Tensor::vector(values.to_vec()),
    }
}

/// However a sum is cut and whichever way it goes, it has the bits of the fixed tree over ranks.
pub fn a_sum_has_the_same_bits_whichever_way_it_goes(connect: Connect, algorithms: &[Option<Algorithm>]) {
    for n_ranks in [2, 3, 4, 6, 8] {
        for &algorithm in algorithms {
            for (buffer_bytes, n) in [(1, 500), (5000, 8_000), (1 << 20, 8_000)] {
                let options = CommunicatorOptions { algorithm, ..options(buffer_bytes) };
                run(connect(n_ranks, &options), |mut end| {
                    for (dtype, op) in [
                        (DType::F32, ReduceOp::Sum),
                        (DType::F64, ReduceOp::Mean),
                        (DType::F16, ReduceOp::Mean),
                        (DType::BF16, ReduceOp::Sum),
                        (DType::F32, ReduceOp::Min),
                    ] {
                        let all: Vec<Tensor> = (0..n_ranks).map(|rank| rounded(dtype, &vector(rank, n))).collect();
                        let bytes: Vec<&[u8]> = all.iter().map(|one| one.host_bytes().unwrap()).collect();
                        let mut wanted = Tensor::zeros(dtype, [n]).unwrap();
                        reduce::reduce(dtype, op, &bytes, wanted.host_bytes_mut().unwrap()).unwrap();
                        let mine = all[end.rank()].clone();
                        let found = end.all_reduce(vec![mine.clone()], op).unwrap().remove(0);
                        assert!(
                            found.host_bytes() == wanted.host_bytes(),
                            "{n_ranks} ranks, {dtype}, {op:?}, {algorithm:?}"
                        );
                        let found = end.reduce(vec![mine], op, 1).unwrap().remove(0);
                        assert!(end.rank() != 1 || found.host_bytes() == wanted.host_bytes());
                    }
                });
            }
        }
    }
}

/// What an all-reduce of S bytes on N ranks sends is counted where it goes out: exactly 2(N-1)/N·S bytes by each rank if N divides the
/// elements. If not, slices differ by one element at most, and so do ranks by what they send of each; all together send 2(N-1)·S.
pub fn no_byte_more_than_it_must_is_sent(connect: Connect, numbers_of_ranks: &[usize]) {
    for algorithm in [Algorithm::Ring, Algorithm::Direct, Algorithm::HalvingDoubling] {
        for &n_ranks in numbers_of_ranks {
            if algorithm == Algorithm::HalvingDoubling && !n_ranks.is_power_of_two() {
                continue;
            }
            let sizes =
                [(n_ranks, 1), (n_ranks * 1001, 4096), (n_ranks * 5000, 1 << 20), (n_ranks * 1001 + 1, 4096), (1, 1)];
            for (n_elements, buffer_bytes) in sizes {
                let options =
                    CommunicatorOptions { algorithm: Some(algorithm), deterministic: false, ..options(buffer_bytes) };
                let counts = run(connect(n_ranks, &options), |mut end| {
                    // What ranks send to compare their calls.
                    let before = end.n_bytes_sent().unwrap();
                    end.barrier().unwrap();
                    let handshake = end.n_bytes_sent().unwrap() - before;
                    end.all_reduce(vec![tensor(DType::F32, end.rank(), &[n_elements])], ReduceOp::Sum).unwrap();
                    end.n_bytes_sent().unwrap() - before - 2 * handshake
                });
                let (n, bytes) = (n_ranks as u64, n_elements as u64 * 4);
                let about = format!("{algorithm}, {n_elements} elements on {n_ranks} ranks: {counts:?}");
                assert_eq!(counts.iter().sum::<u64>(), 2 * (n - 1) * bytes, "{about}");
                let (share, steps) = (2 * (n - 1) * bytes / n, 2 * (n - 1) * 4);
                match n_elements % n_ranks {
                    0 => assert!(counts.iter().all(|count| *count == share), "{about}"),
                    _ => assert!(counts.iter().all(|count| count.abs_diff(share) <= steps), "{about}"),
                }
            }
        }
    }
}

/// Numbers that are the same for one seed on every rank, by splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// Random calls with random options, each against its definition.
pub fn random_calls_mean_what_they_say(connect: Connect, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let random = &mut Random(seed);
        let n_ranks = 1 + random.below(6);
        let algorithms = [None, Some(random.of(&Algorithm::ALL))];
        let options = CommunicatorOptions {
            algorithm: random.of(&algorithms),
            deterministic: random.below(2) == 0,
            ..options(random.of(&[1, 300, 4096, 70_000]))
        };
        let calls: Vec<u64> = (0..4).map(|_| random.below(usize::MAX) as u64).collect();
        run(connect(n_ranks, &options), |mut end| {
            for call in &calls {
                random_call(&mut Random(*call), &mut end, &format!("seed {seed}: {n_ranks} ranks, {options:?}"));
            }
        });
    }
}

fn random_call(random: &mut Random, end: &mut Communicator, about: &str) {
    let (rank, n_ranks) = (end.rank(), end.n_ranks());
    let dtype = random.of(&[DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I64]);
    let op = match random.of(&ReduceOp::ALL) {
        ReduceOp::Mean if !dtype.is_float() => ReduceOp::Sum,
        op => op,
    };
    let (kind, root) = (random.below(14), random.below(n_ranks));
    let sizes: Vec<usize> = (0..1 + random.below(3)).map(|_| random.of(&[0, 1, 5, 63, 1000, 5001])).collect();
    let rows = random.of(&[0, 1, 7, 400]);
    let dims = [rows * n_ranks, 1 + random.below(3)];
    let many = |rank: usize| -> Vec<Tensor> {
        sizes.iter().enumerate().map(|(i, n)| tensor(dtype, rank * 10 + i, &[*n])).collect()
    };
    let one = |rank: usize| tensor(dtype, rank, &dims);
    let all: Vec<Tensor> = (0..n_ranks).map(one).collect();
    let joined = |parts: &[Tensor]| parts.iter().flat_map(values).collect::<Vec<f64>>();
    let share = |of: &Tensor, rank: usize| of.rows(rank * rows, rows).unwrap();
    let own = rank * rows * dims[1]..(rank + 1) * rows * dims[1];
    // Partial products of halves are rounded more than once if that is allowed.
    let tolerance = if matches!(dtype, DType::F16 | DType::BF16) { 0.04 } else { 1e-6 };
    let about = format!("{about}, {kind} {dtype} {op:?} to {root}, of {sizes:?} or {dims:?}");
    let same = |found: &[f64], wanted: &[f64]| {
        assert_eq!(found.len(), wanted.len(), "{about}");
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((found - wanted).abs() <= tolerance * wanted.abs(), "{about}: {found} {wanted}");
        }
    };
    // Of what is uneven: how many rows each rank gives each other.
    let table: Vec<Vec<usize>> =
        (0..n_ranks).map(|_| (0..n_ranks).map(|_| random.of(&[0, 0, 1, 6, 300])).collect()).collect();
    let rows_of = |rank: usize, rows: usize| tensor(dtype, 50 + rank, &[rows, dims[1]]);
    // Each rank sends to another one, or to nobody.
    let shift = random.below(n_ranks);
    let is_silent: Vec<bool> = (0..n_ranks).map(|_| random.below(3) == 0).collect();
    let columns = |i: usize| reduced(op, &(0..n_ranks).map(|rank| many(rank).remove(i)).collect::<Vec<_>>());
    match kind {
        0 => {
            let found = end.all_reduce(many(rank), op).unwrap();
            (0..sizes.len()).for_each(|i| same(&values(&found[i]), &columns(i)));
        }
        1 => {
            let found = end.reduce(many(rank), op, root).unwrap();
            let kept = many(rank);
            for i in 0..sizes.len() {
                same(&values(&found[i]), &if rank == root { columns(i) } else { values(&kept[i]) });
            }
        }
        2 => assert_eq!(end.broadcast(many(rank), root).unwrap(), many(root), "{about}"),
        3 => same(&values(&end.reduce_scatter(one(rank), op).unwrap()), &reduced(op, &all)[own]),
        4 => same(&values(&end.all_gather(one(rank)).unwrap()), &joined(&all)),
        5 => {
            let wanted = if rank == root { joined(&all) } else { values(&one(rank)) };
            same(&values(&end.gather(one(rank), root).unwrap()), &wanted);
        }
        6 => assert_eq!(end.scatter(one(rank), root).unwrap(), share(&one(root), rank), "{about}"),
        7 => {
            let shares: Vec<Tensor> = all.iter().map(|of| share(of, rank)).collect();
            same(&values(&end.all_to_all(one(rank)).unwrap()), &joined(&shares));
        }
        8 => end.barrier().unwrap(),
        9 => {
            let (found, counts) = end.all_gather_uneven(rows_of(rank, table[rank][0])).unwrap();
            let all: Vec<Tensor> = (0..n_ranks).map(|rank| rows_of(rank, table[rank][0])).collect();
            same(&values(&found), &joined(&all));
            assert_eq!(counts, table.iter().map(|of| of[0]).collect::<Vec<_>>(), "{about}");
        }
        10 => {
            let (found, counts) = end.gather_uneven(rows_of(rank, table[rank][0]), root).unwrap();
            let all: Vec<Tensor> = (0..n_ranks).map(|rank| rows_of(rank, table[rank][0])).collect();
            same(&values(&found), &if rank == root { joined(&all) } else { values(&all[rank]) });
            let of = |of: &Vec<usize>| if rank == root { of[0] } else { 0 };
            assert_eq!(counts, table.iter().map(of).collect::<Vec<_>>(), "{about}");
        }
        11 => {
            let n_rows = if rank == root { table[root].iter().sum() } else { table[rank][0] };
            let found = end.scatter_uneven(rows_of(rank, n_rows), &table[rank], root).unwrap();
            let all = rows_of(root, table[root].iter().sum());
            let wanted = all.rows(table[root][..rank].iter().sum(), table[root][rank]).unwrap();
            assert_eq!(found, wanted, "{about}");
        }
        12 => {
            let of = |rank: usize| rows_of(rank, table[rank].iter().sum());
            let (found, counts) = end.all_to_all_uneven(of(rank), &table[rank]).unwrap();
            let share = |from: usize| of(from).rows(table[from][..rank].iter().sum(), table[from][rank]).unwrap();
            same(&values(&found), &joined(&(0..n_ranks).map(share).collect::<Vec<_>>()));
            assert_eq!(counts, table.iter().map(|of| of[rank]).collect::<Vec<_>>(), "{about}");
        }
        _ => {
            let (to, from) = ((rank + shift) % n_ranks, (rank + n_ranks - shift) % n_ranks);
            let sends = |rank: usize| !is_silent[rank];
            let mine = rows_of(rank, table[rank][0]);
            let found = end.send_receive(mine, sends(rank).then_some(to), sends(from).then_some(from)).unwrap();
            let wanted = rows_of(from, if sends(from) { table[from][0] } else { 0 });
            assert_eq!(found, wanted, "{about}");
        }
    }
}

/// A call that depends on its number, and may differ on one rank.
pub fn call(kind: usize, tensors: Vec<Tensor>, name: &str) -> CollectiveCall {
    let kind = match kind % 6 {
        0 => CollectiveKind::AllReduce(ReduceOp::Sum),
        1 => CollectiveKind::AllReduce(ReduceOp::Max),
        2 => CollectiveKind::AllGather,
        3 => CollectiveKind::Broadcast(Root(0)),
        4 => CollectiveKind::Broadcast(Root(1)),
        _ => CollectiveKind::AllToAll,
    };
    CollectiveCall { kind, name: name.into(), tensors, cancel: None, deadline: None }
}

/// One rank does something else than the others, in one of nine ways.
pub fn ranks_that_differ_all_learn_so_and_none_waits(connect: Connect, seeds: std::ops::Range<usize>) {
    let (mut longest, began) = (Duration::ZERO, Instant::now());
    let n_seeds = seeds.len();
    for seed in seeds {
        let random = &mut Random(seed as u64);
        let (n_ranks, how) = (2 + random.below(3), seed % 9);
        let (culprit, at) = (random.below(n_ranks), random.below(7));
        let sizes: Vec<usize> = (0..10).map(|_| random.of(&[1, 2, 30, 300, 3000])).collect();
        let buffer_bytes = random.of(&[1, 4096, 1 << 20]);
        let results: Vec<(Result<()>, Duration)> = run(connect(n_ranks, &options(buffer_bytes)), |mut end| {
            let rank = end.rank();
            let mut began = Instant::now();
            let mut go = || {
                for (i, size) in sizes.iter().enumerate() {
                    let (mut kind, mut dims, mut dtype, mut name) = (i + seed, vec![size * 12], DType::F32, "a");
                    let mut n_tensors = 1;
                    if rank == culprit && i == at {
                        match how {
                            0 => kind += 1,
                            1 => dims = vec![size * 12 + 12],
                            2 => dims = vec![size * 6, 2],
                            3 => dtype = DType::I32,
                            4 => name = "b",
                            5 => (kind, n_tensors) = (kind / 6 * 6, 2),
                            6 => kind += 3,
                            // It skips a call, or stops early.
                            7 => continue,
                            _ => return Ok(()),
                        }
                    } else if how == 5 && i == at {
                        kind = kind / 6 * 6;
                    }
                    began = Instant::now();
                    let tensors = (0..n_tensors).map(|_| tensor(dtype, rank, &dims)).collect();
                    end.run(call(kind, tensors, name))?;
                }
                Ok(())
            };
            (go(), began.elapsed())
        });
        for (rank, (result, waited)) in results.into_iter().enumerate() {
            longest = longest.max(waited);
            let has_left = how >= 7 && rank == culprit;
            let Err(error) = result else {
                assert!(has_left, "seed {seed}: rank {rank} noticed nothing");
                continue;
            };
            let text = error.to_string();
            assert_ne!(error.code(), Code::DeadlineExceeded, "seed {seed}, rank {rank}: {text}");
            let is_shown = text.contains("ranks do not do the same")
                && text.contains(&format!("rank {culprit} does"))
                && text.matches(" does call ").count() >= 2;
            assert!(is_shown || how >= 7, "seed {seed}, rank {rank}: {text}");
            let says = ["ranks do not do the same", "has left the group", "has ended the group"];
            assert!(says.iter().any(|says| text.contains(says)), "seed {seed}, rank {rank}: {text}");
        }
    }
    println!("{n_seeds} mismatches in {:?}; the longest wait for an error was {longest:?}", began.elapsed());
}
