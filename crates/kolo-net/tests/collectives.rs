//! TensorFlow's collectives between the tasks of a cluster: servers in one process, which talk over TCP as they would between machines.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use kolo_core::{Code, DType, PartialShape, Tensor};
use kolo_graph::{Graph, Output};
use kolo_net::{ClusterSpec, Connect as _, Server, ServerConfig};
use kolo_runtime::{RunOptions, Session, SessionConfig};

fn workers(n: usize, config: &ServerConfig) -> Vec<Server> {
    let listeners: Vec<TcpListener> = (0..n).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<String> = listeners.iter().map(|at| at.local_addr().unwrap().to_string()).collect();
    let spec = ClusterSpec::parse(&format!("worker={}", addresses.join(","))).unwrap();
    let server = |(task, listener)| Server::on(listener, &spec, "worker", task as u32, config.clone()).unwrap();
    listeners.into_iter().enumerate().map(server).collect()
}

fn connect(config: &ServerConfig, server: &Server, graph: &Graph) -> Session {
    let target = format!("grpc://localhost:{}", server.address().port());
    Session::connect_secured(&target, graph, SessionConfig::default(), &config.security).unwrap()
}

fn reduce<'g>(g: &'g Graph, x: Output<'g>, size: i64, instance: i64, ops: [&str; 2]) -> Output<'g> {
    let op = g.op("CollectiveReduce").input(x).attr("group_size", size).attr("group_key", 1i64);
    let op = op.attr("instance_key", instance).attr("merge_op", ops[0]).attr("final_op", ops[1]);
    op.attr("subdiv_offsets", vec![0i64]).out()
}

fn on_task<R>(g: &Graph, task: usize, body: impl FnOnce() -> R) -> R {
    g.device(&format!("/job:worker/task:{task}/cpu:0"), body)
}

/// One graph with devices of all tasks, as `tf.distribute` makes in one client.
#[test]
fn one_step_reduces_gathers_and_sends_over_several_tasks() {
    for grpc_only in [false, true] {
        let config = ServerConfig { grpc_only, ..ServerConfig::default() };
        let servers = workers(3, &config);
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [Some(2)]);
        let on = |i: usize| {
            on_task(&g, i, || {
                let mine = g.op("Mul").input(x).input(g.constant([i as f32, 1.0])).out();
                let group = || [3, 9, 4].map(|number| g.constant(number));
                let second = g.op("CollectiveReduceV2").input(mine).inputs(group());
                let second = second.attr("merge_op", "Max").attr("final_op", "Id").attr("Nordering_token", 0i64);
                let rows = g.op("CollectiveGatherV2").input(mine).inputs([3, 9, 5].map(|number| g.constant(number)));
                [reduce(&g, mine, 3, 1, ["Add", "Div"]), second.out(), rows.attr("Nordering_token", 0i64).out()]
            })
        };
        let mut all: Vec<Output<'_>> = (0..3).flat_map(on).collect();
        let common = |op: &str| {
            let op = g.op(op).attr("T", DType::F32).attr("group_size", 3i64).attr("group_key", 1i64);
            op.attr("instance_key", 2i64).attr("shape", PartialShape::from([2usize]))
        };
        all.push(on_task(&g, 1, || common("CollectiveBcastSend").input(x).out()));
        for task in [0, 2] {
            all.push(on_task(&g, task, || common("CollectiveBcastRecv").out()));
        }
        let session = connect(&config, &servers[1], &g);
        for scale in [1.0f32, 2.0, 3.0] {
            let sent = Tensor::from([1.0 * scale, 2.0 * scale]);
            let found = session.run(&all, &[(x, sent.clone())], &[]).unwrap();
            let [mean, max] = [[1.0 * scale, 2.0 * scale], [2.0 * scale, 2.0 * scale]].map(Tensor::from);
            let rows = Tensor::from([0.0, 2.0 * scale, 1.0 * scale, 2.0 * scale, 2.0 * scale, 2.0 * scale]);
            for task in found[..9].chunks(3) {
                assert_eq!(task, [mean.clone(), max.clone(), rows.clone()]);
            }
            assert_eq!(found[9..], [sent.clone(), sent.clone(), sent]);
        }
    }
}

/// Two programs, each with a session at its own task, as between-graph strategies have.
fn program(config: &ServerConfig, server: &Server, task: usize, run: impl FnOnce(&Session, Output<'_>, Output<'_>)) {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [None]);
    let sum = on_task(&g, task, || reduce(&g, x, 2, 1, ["Add", "Id"]));
    let session = connect(config, server, &g);
    run(&session, x, sum);
}

#[test]
fn sessions_of_several_tasks_meet_in_every_step() {
    let config = ServerConfig::default();
    let servers = workers(2, &config);
    std::thread::scope(|scope| {
        for (task, server) in servers.iter().enumerate() {
            let config = &config;
            scope.spawn(move || {
                program(config, server, task, |session, x, sum| {
                    for step in 0..30 {
                        let mine = Tensor::vector(vec![(step + task) as f32; 10_000]);
                        let found = session.run(&[sum], &[(x, mine)], &[]).unwrap();
                        assert_eq!(found, [Tensor::vector(vec![(2 * step + 1) as f32; 10_000])], "step {step}");
                    }
                });
            });
        }
    });
}

#[test]
fn members_that_differ_are_all_told() {
    let config = ServerConfig::default();
    let servers = workers(2, &config);
    std::thread::scope(|scope| {
        for (task, server) in servers.iter().enumerate() {
            let config = &config;
            scope.spawn(move || {
                program(config, server, task, |session, x, sum| {
                    let mine = Tensor::vector(vec![1.0f32; 2 + task]);
                    let error = session.run(&[sum], &[(x, mine)], &[]).unwrap_err().to_string();
                    assert!(error.contains("Shape mismatch in the collective: [2] and [3]"), "task {task}: {error}");
                });
            });
        }
    });
}

/// A step that is stopped takes its device away: those who come to the same instance later meet without it.
#[test]
fn a_step_that_ends_takes_its_device_away() {
    let config = ServerConfig::default();
    let servers = workers(2, &config);
    for leaves in [1, 0] {
        let alone = |session: &Session, x: Output<'_>, sum: Output<'_>| {
            let options = RunOptions { timeout: Some(Duration::from_millis(300)), ..RunOptions::default() };
            let feeds = [(x, Tensor::from([100.0f32]))];
            let error = session.run_with(&options, &[sum], &feeds, &[]).unwrap_err();
            assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
        };
        program(&config, &servers[leaves], leaves, alone);
        std::thread::scope(|scope| {
            for (task, server) in servers.iter().enumerate() {
                let config = &config;
                scope.spawn(move || {
                    program(config, server, task, |session, x, sum| {
                        let found = session.run(&[sum], &[(x, Tensor::from([1.0f32]))], &[]).unwrap();
                        assert_eq!(found, [Tensor::from([2.0f32])]);
                    });
                });
            }
        });
    }
}

/// Whoever dies after the group has met is named to those who wait for it.
#[test]
fn a_task_that_dies_is_named() {
    for dies in [1, 0] {
        let config = ServerConfig::default();
        let mut servers: Vec<Option<Server>> = workers(2, &config).into_iter().map(Some).collect();
        let [waiting, dying] = [servers[1 - dies].take().unwrap(), servers[dies].take().unwrap()];
        std::thread::scope(|scope| {
            let config = &config;
            let (met, has_met) = std::sync::mpsc::channel();
            scope.spawn(move || {
                program(config, &dying, dies, |session, x, sum| {
                    session.run(&[sum], &[(x, Tensor::from([1.0f32]))], &[]).unwrap();
                });
                has_met.recv().unwrap();
                drop(dying);
            });
            program(config, &waiting, 1 - dies, |session, x, sum| {
                session.run(&[sum], &[(x, Tensor::from([1.0f32]))], &[]).unwrap();
                met.send(()).unwrap();
                let began = Instant::now();
                let options = RunOptions { timeout: Some(Duration::from_secs(60)), ..RunOptions::default() };
                let feeds = [(x, Tensor::from([1.0f32]))];
                let error = session.run_with(&options, &[sum], &feeds, &[]).unwrap_err();
                let name = format!("/job:worker/replica:0/task:{dies}");
                let says = error.to_string();
                assert!(says.contains("Collective ops is aborted by: ") && says.contains(&name), "{says}");
                assert_eq!(error.code(), Code::Unavailable, "{says}");
                assert!(began.elapsed() < Duration::from_secs(50));
            });
        });
    }
}
