//! TensorFlow's collectives between the devices of one process.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::collections::BTreeMap;
use std::time::Duration;

use kolo_core::{Code, DType, PartialShape, Tensor};
use kolo_graph::{Graph, Output};
use kolo_runtime::{Host, RunOptions, Session, SessionConfig};

fn config(n: usize) -> SessionConfig {
    SessionConfig { device_count: BTreeMap::from([("CPU".to_owned(), n)]), ..SessionConfig::default() }
}

fn reduce<'g>(g: &'g Graph, x: Output<'g>, size: i64, instance: i64, ops: [&str; 2], timeout: f32) -> Output<'g> {
    let op = g.op("CollectiveReduce").input(x).attr("group_size", size).attr("group_key", 1i64);
    let op = op.attr("instance_key", instance).attr("merge_op", ops[0]).attr("final_op", ops[1]);
    op.attr("subdiv_offsets", vec![0i64]).attr("timeout_seconds", timeout).out()
}

/// What each of three devices gets, of `[device, 1]`, `[device, 2]`, … in steps of one session.
#[test]
fn devices_get_what_the_reduction_of_all_is() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [None]);
    for (instance, (ops, wanted)) in [
        (["Add", "Id"], [3.0f32, 6.0]),
        (["Add", "Div"], [1.0, 2.0]),
        (["Mul", "Id"], [0.0, 8.0]),
        (["Max", "Id"], [2.0, 2.0]),
        (["Min", "Id"], [0.0, 2.0]),
    ]
    .into_iter()
    .enumerate()
    {
        let on = |i: usize| {
            g.device(&format!("/cpu:{i}"), || {
                let mine = g.op("Mul").input(x).input(g.constant([i as f32, 1.0])).out();
                reduce(&g, mine, 3, instance as i64, ops, 0.0)
            })
        };
        let all: Vec<Output<'_>> = (0..3).map(on).collect();
        let session = Session::with_config(&g, config(3)).unwrap();
        for _ in 0..3 {
            let found = session.run(&all, &[(x, Tensor::from([1.0f32, 2.0]))], &[]).unwrap();
            assert_eq!(found, vec![Tensor::from(wanted); 3], "{ops:?}");
        }
    }
}

#[test]
fn rows_are_gathered_in_the_order_of_devices_and_one_sends_to_all() {
    let g = kolo_ops::graph();
    let gathered: Vec<Output<'_>> = [1, 0]
        .into_iter()
        .map(|i| {
            g.device(&format!("/cpu:{i}"), || {
                let mine = g.constant([[i, 10 + i]]);
                let op =
                    g.op("CollectiveGatherV2").inputs([mine, g.constant(2i32), g.constant(7i32), g.constant(1i32)]);
                op.attr("Nordering_token", 0i64).out()
            })
        })
        .collect();
    let common = |op: &str| {
        let op =
            g.op(op).attr("T", DType::F32).attr("group_size", 2i64).attr("group_key", 7i64).attr("instance_key", 2i64);
        op.attr("shape", PartialShape::from([2usize]))
    };
    let sent = g.device("/cpu:0", || common("CollectiveBcastSend").input(g.constant([5.0f32, 6.0])).out());
    let received = g.device("/cpu:1", || common("CollectiveBcastRecv").out());
    let group = [2, 7, 3].map(|number| g.constant(number));
    let second =
        g.device("/cpu:1", || g.op("CollectiveBcastSendV2").input(g.constant([[7i64], [8]])).inputs(group).out());
    let second_received = g.device("/cpu:0", || {
        let op = g.op("CollectiveBcastRecvV2").inputs(group).input(g.constant([2i32, 1]));
        op.attr("T", DType::I64).out()
    });
    let session = Session::with_config(&g, config(2)).unwrap();
    let found = session.run(&[gathered[0], gathered[1], sent, received], &[], &[]).unwrap();
    let other = session.run(&[second, second_received], &[], &[]).unwrap();
    assert_eq!(other, vec![Tensor::from([[7i64], [8]]); 2]);
    assert_eq!(found[..2], vec![Tensor::from([[0i32, 10], [1, 11]]); 2]);
    assert_eq!(found[2..], vec![Tensor::from([5.0f32, 6.0]); 2]);
}

/// Replicas with a session each, in steps of their own.
#[test]
fn sessions_of_one_host_meet() {
    let host = Host::new(config(2)).unwrap();
    let sums: Vec<Vec<Tensor>> = std::thread::scope(|scope| {
        let replica = |i: usize| {
            let host = &host;
            move || {
                let g = kolo_ops::graph();
                let sum = g.device(&format!("/cpu:{i}"), || {
                    let op = g.op("CollectiveReduceV2").attr("merge_op", "Add").attr("final_op", "Id");
                    let group = [2, 9, 4].map(|number| g.constant(number));
                    op.input(g.constant([i as f32 + 1.0])).inputs(group).attr("Nordering_token", 0i64).out()
                });
                let session = host.session(&g).unwrap();
                (0..50).map(|_| session.fetch(sum).unwrap()).collect::<Vec<Tensor>>()
            }
        };
        let threads = [scope.spawn(replica(0)), scope.spawn(replica(1))];
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(sums, vec![vec![Tensor::from([3.0f32]); 50]; 2]);
}

#[test]
fn members_that_differ_or_do_not_come_are_named() {
    let g = kolo_ops::graph();
    let x = g.constant([1.0f32]);
    let on = |i: usize, ops: [&str; 2], instance: i64, timeout: f32| {
        g.device(&format!("/cpu:{i}"), || reduce(&g, x, 2, instance, ops, timeout))
    };
    let differ = [on(0, ["Add", "Id"], 1, 0.0), on(1, ["Max", "Id"], 1, 0.0)];
    let alone = on(0, ["Add", "Id"], 2, 0.1);
    let forever = on(0, ["Add", "Id"], 3, 0.0);
    let session = Session::with_config(&g, config(2)).unwrap();
    let error = session.run(&differ, &[], &[]).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    for text in ["collective group 1, instance 1", "merge: Sum", "merge: Max", "device:CPU:0", "device:CPU:1"] {
        assert!(error.message().contains(text), "{text} in {error}");
    }
    let error = session.fetch(alone).unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert!(error.message().contains("1 of 2 came: /job:localhost/replica:0/task:0/device:CPU:0"), "{error}");
    // A run that is given up leaves nobody behind for the next one to meet.
    let options = RunOptions { timeout: Some(Duration::from_millis(100)), ..RunOptions::default() };
    for _ in 0..2 {
        let error = session.run_with(&options, &[forever], &[], &[]).unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    }
}
