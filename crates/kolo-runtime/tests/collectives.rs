//! Collectives over shared memory and over channels; groups, and nodes of graphs.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

#[path = "collective_cases/mod.rs"]
mod cases;

use std::sync::Arc;
use std::time::Duration;

use kolo_core::{DType, Error, Result, Tensor};
use kolo_ops::CancelToken;
use kolo_runtime::collective::{
    Algorithm, CollectiveCall, CollectiveGroup as _, CollectiveKind, Communicator, CommunicatorOptions, Group,
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
fn ranks_that_differ_all_learn_so_and_none_waits() {
    for connect in TRANSPORTS {
        cases::ranks_that_differ_all_learn_so_and_none_waits(connect, 0..500);
    }
}

#[test]
fn a_ring_and_direct_messages_send_no_byte_more_than_they_must() {
    for algorithm in [Algorithm::Ring, Algorithm::Direct, Algorithm::HalvingDoubling] {
        for n_ranks in [1usize, 2, 3, 4, 7, 8] {
            if algorithm == Algorithm::HalvingDoubling && !n_ranks.is_power_of_two() {
                continue;
            }
            for (n_elements, buffer_bytes) in [(n_ranks, 1), (n_ranks * 1001, 4096), (n_ranks * 5000, 1 << 20)] {
                let ends = InProcess::group(n_ranks);
                let sent: Vec<_> = ends.iter().map(InProcess::sent).collect();
                let options =
                    CommunicatorOptions { algorithm: Some(algorithm), deterministic: false, ..options(buffer_bytes) };
                let ends = ends.into_iter().map(|end| Communicator::over(Box::new(end), &options)).collect();
                let counts = run(ends, |mut end| {
                    // What ranks send to compare their calls.
                    end.barrier().unwrap();
                    let handshake = sent[end.rank()].n_bytes();
                    end.all_reduce(vec![cases::tensor(DType::F32, end.rank(), &[n_elements])], ReduceOp::Sum).unwrap();
                    sent[end.rank()].n_bytes() - 2 * handshake
                });
                let least = 2 * (n_ranks as u64 - 1) * (n_elements as u64 * 4) / n_ranks as u64;
                assert_eq!(counts, vec![least; n_ranks], "{algorithm}, {n_elements} elements");
            }
        }
    }
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
