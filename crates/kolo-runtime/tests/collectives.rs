//! Collectives over shared memory and over channels; groups, and nodes of graphs.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

#[path = "collective_cases/mod.rs"]
mod cases;

use std::sync::Arc;
use std::time::Duration;

use kolo_core::{DType, Error, Result, Tensor};
use kolo_ops::CancelToken;
use kolo_runtime::collective::{
    Algorithm, CollectiveCall, CollectiveGroup as _, CollectiveKind, Communicator, CommunicatorOptions, Costs, Group,
    InProcess, ReduceOp,
};
use kolo_runtime::{Session, SessionConfig};

use cases::{Connect, options, run};

fn shared_memory(n_ranks: usize, options: &CommunicatorOptions) -> Vec<Communicator> {
    Communicator::in_process(n_ranks, options).unwrap()
}

fn channels(n_ranks: usize, options: &CommunicatorOptions) -> Vec<Communicator> {
    let ends = InProcess::group(n_ranks).into_iter();
    ends.map(|end| Communicator::over(Box::new(end), options)).collect()
}

/// Ranks that are on hosts of their own: those of a host share memory. The files of a host's memory are those of this process.
fn on_hosts(hosts: &[u64], options: &CommunicatorOptions) -> Vec<Communicator> {
    let ends = InProcess::group(hosts.len()).into_iter().zip(hosts);
    std::thread::scope(|scope| {
        let join = |(end, host): (InProcess, &u64)| {
            let host = *host;
            scope.spawn(move || Communicator::over_hosts(Box::new(end), host, options).unwrap())
        };
        let ranks: Vec<_> = ends.map(join).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Two ranks on each host.
fn in_pairs(n_ranks: usize, options: &CommunicatorOptions) -> Vec<Communicator> {
    on_hosts(&(0..n_ranks as u64).map(|rank| rank / 2).collect::<Vec<_>>(), options)
}

/// Ranks on three hosts in turns.
fn in_turns(n_ranks: usize, options: &CommunicatorOptions) -> Vec<Communicator> {
    on_hosts(&(0..n_ranks as u64).map(|rank| rank % 3).collect::<Vec<_>>(), options)
}

const TRANSPORTS: [Connect; 2] = [shared_memory, channels];

#[test]
fn every_rank_gets_what_all_reduce_means() {
    TRANSPORTS.into_iter().for_each(cases::every_rank_gets_what_all_reduce_means);
}

#[test]
fn rows_go_where_the_other_collectives_say() {
    TRANSPORTS.into_iter().for_each(cases::rows_go_where_the_other_collectives_say);
}

#[test]
fn a_sum_has_the_same_bits_whichever_way_it_goes() {
    cases::a_sum_has_the_same_bits_whichever_way_it_goes(shared_memory, &[None]);
    let all: Vec<_> = [None].into_iter().chain(Algorithm::ALL.map(Some)).collect();
    cases::a_sum_has_the_same_bits_whichever_way_it_goes(channels, &all);
}

#[test]
fn random_calls_mean_what_they_say() {
    cases::random_calls_mean_what_they_say(shared_memory, 0..150);
    cases::random_calls_mean_what_they_say(channels, 150..600);
}

#[test]
fn ranks_on_several_hosts_get_what_calls_mean() {
    cases::random_calls_mean_what_they_say(in_pairs, 600..800);
    cases::random_calls_mean_what_they_say(in_turns, 800..1000);
    cases::every_rank_gets_what_all_reduce_means(in_pairs);
    cases::ranks_that_differ_all_learn_so_and_none_waits(in_pairs, 500..600);
}

/// By two levels where that keeps the tree, and by something else where it does not.
#[test]
fn a_sum_has_the_same_bits_on_several_hosts() {
    let wanted = [None, Some(Algorithm::TwoLevel)];
    let blocks_of_4: Connect =
        |n_ranks, options| on_hosts(&(0..n_ranks as u64).map(|rank| rank / 4).collect::<Vec<_>>(), options);
    for connect in [in_pairs, in_turns, blocks_of_4] {
        cases::a_sum_has_the_same_bits_whichever_way_it_goes(connect, &wanted);
    }
}

/// What two levels send between hosts is what one rank of each would send: here, of two hosts, everything once for each host.
#[test]
fn two_levels_send_between_hosts_only() {
    let n = 4000;
    let options = CommunicatorOptions { algorithm: Some(Algorithm::TwoLevel), ..options(4096) };
    for (hosts, each) in [([1, 1, 1, 1, 2, 2, 2, 2].as_slice(), vec![n; 8]), (&[1, 1, 2], vec![4 * n, 0, 4 * n])] {
        let counts = run(on_hosts(hosts, &options), |mut end| {
            let sum = CollectiveKind::AllReduce(ReduceOp::Sum);
            assert_eq!(end.choice().choose(sum, Some(DType::F32), 4 * n), Algorithm::TwoLevel);
            let before = end.n_bytes_sent().unwrap();
            end.barrier().unwrap();
            let handshake = end.n_bytes_sent().unwrap() - before;
            end.all_reduce(vec![cases::tensor(DType::F32, end.rank(), &[n])], ReduceOp::Sum).unwrap();
            (end.n_bytes_sent().unwrap() - before - 2 * handshake) as usize
        });
        assert_eq!(counts, each, "{hosts:?}");
    }
}

#[test]
fn all_ranks_take_the_costs_of_the_first() {
    let ends = InProcess::group(3).into_iter().enumerate();
    let costs = |rank: usize| Costs { hop: Duration::from_micros(1 + rank as u64), ..Costs::default() };
    let found: Vec<Costs> = std::thread::scope(|scope| {
        let join = |(rank, end): (usize, InProcess)| {
            let options = CommunicatorOptions { costs: costs(rank), ..options(4096) };
            scope.spawn(move || *Communicator::over_hosts(Box::new(end), 0, &options).unwrap().choice().costs)
        };
        let ranks: Vec<_> = ends.map(join).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(found, [costs(0); 3]);
}

#[test]
fn ranks_that_differ_all_learn_so_and_none_waits() {
    for connect in TRANSPORTS {
        cases::ranks_that_differ_all_learn_so_and_none_waits(connect, 0..500);
    }
}

#[test]
fn a_ring_and_direct_messages_send_no_byte_more_than_they_must() {
    cases::no_byte_more_than_it_must_is_sent(channels, &[1, 2, 3, 4, 7, 8]);
}

#[test]
fn ranks_with_other_options_learn_so() {
    let ends = InProcess::group(2).into_iter().enumerate();
    let ends = ends.map(|(rank, end)| Communicator::over(Box::new(end), &options(4096 * (1 + rank)))).collect();
    let errors = run(ends, |mut end| end.barrier().unwrap_err().to_string());
    assert!(errors.iter().any(|error| error.contains("with other options")), "{errors:?}");
}

#[test]
fn wrong_arguments_are_named_on_the_rank_that_gave_them_and_end_the_others() {
    type Wrong = fn(&mut Communicator) -> Result<()>;
    let cases: [(Wrong, &str); 10] = [
        (|end| end.broadcast(vec![], 7).map(drop), "there is no rank 7: there are 2, from 0 on"),
        (|end| end.all_gather(Tensor::scalar(1.0f32)).map(drop), "needs rows, and a scalar has none"),
        (
            |end| end.all_to_all(Tensor::from([1.0f32, 2.0, 3.0])).map(drop),
            "cuts float[3] along its first axis, which 2 ranks do not divide",
        ),
        (|end| end.all_reduce(vec![Tensor::from("text")], ReduceOp::Sum).map(drop), "of a fixed size"),
        (|end| end.all_reduce(vec![Tensor::from([true, false])], ReduceOp::Sum).map(drop), "bool cannot be reduced"),
        (|end| end.all_gather_uneven(Tensor::scalar(1.0f32)).map(drop), "needs rows, and a scalar has none"),
        (
            |end| end.all_to_all_uneven(Tensor::from([1.0f32, 2.0, 3.0]), &[2, 2]).map(drop),
            "for the ranks, [2, 2], do not add up to the tensor's 3 rows",
        ),
        (
            |end| end.scatter_uneven(Tensor::from([1.0f32]), &[1], 0).map(drop),
            "takes the number of rows for each rank as int64[2], not as int64[1]",
        ),
        (|end| end.send_receive(Tensor::from([1.0f32]), Some(2), None).map(drop), "there is no rank 2: there are 2"),
        (|end| end.gather_uneven(Tensor::from([1.0f32]), 2).map(drop), "there is no rank 2: there are 2"),
    ];
    for ((wrong, text), connect) in cases.iter().flat_map(|case| TRANSPORTS.map(|connect| (case, connect))) {
        let errors: Vec<Error> = run(connect(2, &options(4096)), |mut end| match end.rank() {
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
fn uneven_calls_that_differ_in_more_than_their_rows_end_the_group() {
    let rows = |dims: [usize; 2], dtype| Tensor::zeros(dtype, dims).unwrap();
    type Call = fn(&mut Communicator, Tensor) -> Result<()>;
    let gather: Call = |end, tensor| end.all_gather_uneven(tensor).map(drop);
    let to_first: Call = |end, tensor| end.gather_uneven(tensor, 0).map(drop);
    let to_second: Call = |end, tensor| end.gather_uneven(tensor, 1).map(drop);
    let cases = [
        (gather, rows([4, 3], DType::F32), "uneven all-gather 'uneven all-gather' of float rows of 3 elements"),
        (gather, rows([4, 2], DType::F64), "of double rows of 2 elements"),
        (to_first, rows([4, 2], DType::F32), "uneven gather to rank 0 'uneven gather' of float rows of 2 elements"),
        (to_second, rows([4, 2], DType::F32), "uneven gather to rank 1"),
    ];
    for ((call, tensor, text), connect) in cases.iter().flat_map(|case| TRANSPORTS.map(|connect| (case, connect))) {
        let errors = run(connect(3, &options(4096)), |mut end| match end.rank() {
            2 => call(&mut end, tensor.clone()).unwrap_err().to_string(),
            rank => gather(&mut end, rows([rank, 2], DType::F32)).unwrap_err().to_string(),
        });
        for error in errors {
            assert!(error.contains("ranks do not do the same") && error.contains(text), "{text}: {error}");
        }
    }
}

#[test]
fn who_sends_to_a_rank_that_does_not_receive_is_named_on_all_ranks() {
    // What ranks 0, 1 and 2 do: to whom they send, and from whom they receive.
    type Peers = [(Option<usize>, Option<usize>); 3];
    let cases: [(Peers, &str); 3] = [
        ([(Some(1), None), (None, None), (None, None)], "rank 0 sends to rank 1, which receives from nobody"),
        (
            [(Some(1), None), (Some(2), Some(0)), (None, Some(0))],
            "rank 2 receives from rank 0, which does not send to it",
        ),
        ([(None, None), (None, Some(2)), (None, None)], "rank 1 receives from rank 2, which does not send to it"),
    ];
    for ((peers, text), connect) in cases.iter().flat_map(|case| TRANSPORTS.map(|connect| (case, connect))) {
        let errors = run(connect(3, &options(4096)), |mut end| {
            let (to, from) = peers[end.rank()];
            end.send_receive(Tensor::from([1i64, 2]), to, from).and_then(|_| end.barrier()).unwrap_err().to_string()
        });
        assert!(errors.iter().all(|error| error.contains(text)), "{text}: {errors:?}");
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
                deadline: None,
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
        deadline: None,
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

/// Every collective that has no kernel for devices, as a node.
#[test]
fn rows_of_uneven_numbers_and_of_one_rank_go_through_nodes() {
    let found = run(shared_memory(3, &options(4096)), |end| {
        let config = SessionConfig::default();
        let rank = end.rank();
        config.groups.insert("world", Group::new(end).unwrap());
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None, Some(1)]);
        let own = tensor_of(rank, rank + 1);
        let node = |op: &str| g.op(op).attr("group", "world");
        let reduced = node("KoloReduce").inputs([g.constant([rank as f32])]).attr("root", 1i64).build().output(0);
        let whole = g.constant([[rank as f32], [10.0], [20.0]]);
        let gathered = node("KoloGather").input(whole).attr("root", 2i64).build().output(0);
        let scattered = node("KoloScatter").input(whole).attr("root", 2i64).build().output(0);
        let all = node("KoloAllGatherUneven").input(x).build();
        let at_root = node("KoloGatherUneven").input(x).attr("root", 2i64).build();
        let counts = g.constant([0i64, 1, 2]);
        let shares = node("KoloScatterUneven").input(whole).input(counts).attr("root", 1i64).build().output(0);
        let exchanged = node("KoloAllToAllUneven").input(whole).input(counts).build();
        let next = g.constant([(rank as i64 + 1) % 3, (rank as i64 + 2) % 3]);
        let round = node("KoloSendReceive").input(x).input(next).build().output(0);
        let barrier = node("KoloGroupBarrier").build();
        assert_eq!(all.output(0).shape().dims(), Some(&[None, Some(1)][..]));
        let session = Session::with_config(&g, config).unwrap();
        let [all, at_root, exchanged] = [all, at_root, exchanged].map(|op| [op.output(0), op.output(1)]);
        let fetches = [
            reduced,
            gathered,
            scattered,
            all[0],
            all[1],
            at_root[0],
            at_root[1],
            shares,
            exchanged[0],
            exchanged[1],
            round,
        ];
        session.run(&fetches, &[(x, own)], &[barrier]).unwrap()
    });
    let column = |values: &[f32]| Tensor::vector(values.to_vec()).reshaped([values.len(), 1].into()).unwrap();
    for (rank, found) in found.into_iter().enumerate() {
        let own: Vec<f32> = vec![rank as f32; rank + 1];
        let wanted = [
            Tensor::from([if rank == 1 { 3.0f32 } else { rank as f32 }]),
            column(&match rank {
                2 => vec![0.0, 10.0, 20.0, 1.0, 10.0, 20.0, 2.0, 10.0, 20.0],
                _ => vec![rank as f32, 10.0, 20.0],
            }),
            column(&[[2.0, 10.0, 20.0][rank]]),
            column(&[0.0, 1.0, 1.0, 2.0, 2.0, 2.0]),
            Tensor::from([1i64, 2, 3]),
            column(if rank == 2 { &[0.0, 1.0, 1.0, 2.0, 2.0, 2.0] } else { &own }),
            Tensor::from(if rank == 2 { [1i64, 2, 3] } else { [0; 3] }),
            column([&[][..], &[1.0], &[10.0, 20.0]][rank]),
            column([&[][..], &[0.0, 1.0, 2.0], &[10.0, 20.0, 10.0, 20.0, 10.0, 20.0]][rank]),
            Tensor::from([rank as i64; 3]),
            column(&vec![((rank + 2) % 3) as f32; (rank + 2) % 3 + 1]),
        ];
        for (i, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            assert_eq!(found, wanted, "rank {rank}, fetch {i}");
        }
    }
}

/// So many rows of a rank's number.
fn tensor_of(rank: usize, rows: usize) -> Tensor {
    Tensor::vector(vec![rank as f32; rows]).reshaped([rows, 1].into()).unwrap()
}

#[test]
fn a_session_without_the_group_says_which_there_are() {
    let g = kolo_ops::graph();
    let sum = g.op("KoloAllReduce").inputs([g.constant(1.0f32)]).attr("group", "world").build().output(0);
    let error = Session::new(&g).unwrap().fetch(sum).unwrap_err().to_string();
    assert!(error.contains("no group of ranks 'world' (there are none)"), "{error}");
}
