//! Servers of one cluster in one process, each on a port of its own, talking over TCP as they would between machines.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Code, DType, PartialShape, Tensor};
use kolo_graph::WhileOptions;
use kolo_net::tls::Security;
use kolo_net::tls::cert::Authority;
use kolo_net::{ClusterSpec, Connect as _, Server, ServerConfig};
use kolo_ops::queue::FifoQueue;
use kolo_runtime::{RunOptions, Session, SessionConfig};

/// A cluster with these many tasks per job.
fn cluster(jobs: &[(&str, usize)], config: &ServerConfig) -> Vec<Server> {
    let mut listeners = Vec::new();
    let mut text = String::new();
    for &(job, n) in jobs {
        let mut addresses = Vec::new();
        for task in 0..n {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            addresses.push(listener.local_addr().unwrap().to_string());
            listeners.push((listener, job.to_owned(), task as u32));
        }
        text += &format!("{job}={};", addresses.join(","));
    }
    let spec = ClusterSpec::parse(text.trim_end_matches(';')).unwrap();
    listeners
        .into_iter()
        .map(|(listener, job, task)| Server::on(listener, &spec, &job, task, config.clone()).unwrap())
        .collect()
}

/// Reached by messages, not by the short way within this process.
fn connect(servers: &ServerConfig, server: &Server, graph: &kolo_graph::Graph, config: SessionConfig) -> Session {
    let port = server.address().port();
    Session::connect_secured(&format!("grpc://localhost:{port}"), graph, config, &servers.security).unwrap()
}

/// Kolo's own transport and gRPC, each with and without TLS.
fn all_transports(test: impl Fn(ServerConfig)) {
    let files = Authority::new(1).unwrap().issue("task", &["localhost".into(), "127.0.0.1".into()], 1).unwrap();
    for tls in [None, Some(files)] {
        for grpc_only in [false, true] {
            let security = Security { tls: tls.clone(), ..Security::default() };
            test(ServerConfig { grpc_only, security, ..ServerConfig::default() });
        }
    }
}

#[test]
fn nodes_run_where_they_are_pinned_and_values_travel() {
    all_transports(|config| {
        let servers = cluster(&[("ps", 1), ("worker", 2)], &config);
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None, Some(2)]);
        let w = g.device("/job:ps/task:0", || g.variable("w", [[1.0f32], [2.0]]));
        let y = g.device("/job:worker/task:1", || kolo_ops::math::matmul::matmul(x, w.read()));
        let init = g.global_variables_initializer();
        let session = connect(&config, &servers[1], &g, SessionConfig::default());
        session.run_op(init).unwrap();
        let out = session.run(&[y], &[(x, Tensor::from([[3.0f32, 4.0]]))], &[]).unwrap();
        assert_eq!(out, [Tensor::from([[11.0f32]])]);
        assert_eq!(session.list_devices().len(), 3);
        // Another client of another master sees the variable.
        let other = connect(&config, &servers[2], &g, SessionConfig::default());
        assert_eq!(other.fetch(w.read()).unwrap(), Tensor::from([[1.0f32], [2.0]]));
    });
}

/// A kind of device that the master has no kernels for is part of the cluster all the same.
#[test]
fn a_third_kind_of_device_is_listed_and_can_be_asked_for() {
    let name = kolo_core::DeviceName { job: "worker".into(), ..kolo_core::DeviceName::local("LAB", 0) };
    let lab = kolo_device::NullDevice::new(name, None, &[]);
    let session = SessionConfig { extra_devices: vec![lab], ..SessionConfig::default() };
    let config = ServerConfig { session, ..ServerConfig::default() };
    let servers = cluster(&[("worker", 1)], &config);
    let g = kolo_ops::graph();
    let a = g.constant(2.0f32);
    let session = connect(&config, &servers[0], &g, SessionConfig::default());
    let kinds: Vec<String> = session.list_devices().iter().map(|device| device.name.kind.to_string()).collect();
    assert!(kinds.contains(&"LAB".to_owned()), "{kinds:?}");
    assert_eq!(session.fetch(a).unwrap().scalar_value::<f32>().unwrap(), 2.0, "nothing is placed there by itself");
    // It is refused for want of a kernel, not as a device that is not there.
    g.device("/device:LAB:0", || g.op("Neg").name("pinned").input(a).build());
    let error = session.extend(&g).unwrap_err();
    assert!(error.message().contains("no supported kernel for LAB devices"), "{error}");
}

#[test]
fn a_loop_spans_tasks() {
    all_transports(|config| {
        let servers = cluster(&[("ps", 1), ("worker", 1)], &config);
        let g = kolo_ops::graph();
        let init = [g.constant(0i32), g.constant(1.0f32)];
        let out = g
            .while_loop(
                &init,
                |g, v| g.op("Less").input(v[0]).input(g.constant(5i32)).out(),
                |g, v| {
                    let doubled = g.device("/job:ps/task:0", || v[1] * 2.0);
                    let more = g.device("/job:worker/task:0", || doubled + 1.0);
                    vec![v[0] + 1i32, more]
                },
                WhileOptions::default(),
            )
            .unwrap();
        let session = connect(&config, &servers[1], &g, SessionConfig::default());
        for _ in 0..3 {
            assert_eq!(session.fetch(out[1]).unwrap().scalar_value::<f32>().unwrap(), 63.0);
        }
    });
}

#[test]
fn a_branch_that_is_not_taken_is_dead_on_other_tasks_too() {
    all_transports(|config| {
        let servers = cluster(&[("ps", 1), ("worker", 1)], &config);
        let g = kolo_ops::graph();
        let p = g.placeholder::<bool>("p", [] as [Option<usize>; 0]);
        let x = g.constant(3.0f32);
        let on_ps = || vec![g.device("/job:ps/task:0", || x * 2.0)];
        let on_worker = || vec![g.device("/job:worker/task:0", || x * 5.0)];
        let out = g.cond(p, on_ps, on_worker).unwrap();
        let session = connect(&config, &servers[1], &g, SessionConfig::default());
        for (which, wanted) in [(true, 6.0), (false, 15.0), (true, 6.0)] {
            let value = session.run(&[out[0]], &[(p, Tensor::scalar(which))], &[]).unwrap();
            assert_eq!(value[0].scalar_value::<f32>().unwrap(), wanted);
        }
    });
}

#[test]
fn an_error_names_its_task_and_node_and_the_session_stays_usable() {
    all_transports(|config| {
        let servers = cluster(&[("ps", 1), ("worker", 1)], &config);
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None]);
        let checked = g.device("/job:ps/task:0", || {
            g.op("CheckNumerics").name("checked").input(x).attr("message", "not a number").out()
        });
        let sum = g.device("/job:worker/task:0", || checked + 1.0);
        let session = connect(&config, &servers[1], &g, SessionConfig::default());
        let error = session.run(&[sum], &[(x, Tensor::from([f32::NAN]))], &[]).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().starts_with("From /job:ps/replica:0/task:0:\n"), "{error}");
        assert!(error.message().ends_with("\n\t [[{{node checked}}]]"), "{error}");
        let value = session.run(&[sum], &[(x, Tensor::from([1.0f32]))], &[]).unwrap();
        assert_eq!(value[0], Tensor::from([2.0f32]));
    });
}

/// One session fills a queue on ps, another waits for it there.
#[test]
fn queues_join_sessions_and_closing_wakes_those_who_wait() {
    all_transports(|config| {
        let servers = cluster(&[("ps", 1), ("worker", 2)], &config);
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [] as [Option<usize>; 0]);
        let queue = g.device("/job:ps/task:0", || {
            FifoQueue::shared(&g, "jobs", &[(DType::F32, PartialShape::scalar())], Some(10))
        });
        let enqueue = queue.enqueue(&[x]);
        let dequeue = queue.dequeue()[0];
        let waiting = Arc::new(connect(&config, &servers[1], &g, SessionConfig::default()));
        let filling = connect(&config, &servers[2], &g, SessionConfig::default());
        let name = dequeue.name();
        let waiter = {
            let (waiting, name) = (waiting.clone(), name.clone());
            std::thread::spawn(move || waiting.run_named(&[&name], &[], &[]))
        };
        filling.run(&[], &[(x, Tensor::scalar(7.0f32))], &[enqueue]).unwrap();
        assert_eq!(waiter.join().unwrap().unwrap()[0].scalar_value::<f32>().unwrap(), 7.0);

        let options = RunOptions { timeout: Some(Duration::from_millis(100)), ..RunOptions::default() };
        let error = waiting.run_named_with(&options, &[&name], &[], &[]).unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");

        let waiter = {
            let (waiting, name) = (waiting.clone(), name.clone());
            std::thread::spawn(move || waiting.run_named(&[&name], &[], &[]))
        };
        // The run may not have begun yet; either way it must end soon and say why.
        waiting.close();
        let start = Instant::now();
        let error = waiter.join().unwrap().unwrap_err();
        assert!([Code::Cancelled, Code::FailedPrecondition, Code::Aborted].contains(&error.code()), "{error:?}");
        assert!(start.elapsed() < Duration::from_secs(5));
        // What the first session gave up is left for others.
        filling.run(&[], &[(x, Tensor::scalar(8.0f32))], &[enqueue]).unwrap();
        assert_eq!(filling.fetch(dequeue).unwrap().scalar_value::<f32>().unwrap(), 8.0);
    });
}

#[test]
fn partial_runs_feed_and_fetch_in_parts() {
    all_transports(|config| {
        let servers = cluster(&[("ps", 1), ("worker", 1)], &config);
        let g = kolo_ops::graph();
        let a = g.placeholder::<f32>("a", [] as [Option<usize>; 0]);
        let b = g.placeholder::<f32>("b", [] as [Option<usize>; 0]);
        let r1 = g.device("/job:ps/task:0", || a * 2.0);
        let r2 = r1 + b;
        let session = Arc::new(connect(&config, &servers[1], &g, SessionConfig::default()));
        let mut run = session.partial_run(&[a, b], &[r1, r2], &[]).unwrap();
        assert_eq!(run.run(&[r1], &[(a, Tensor::scalar(3.0f32))]).unwrap()[0].scalar_value::<f32>().unwrap(), 6.0);
        assert_eq!(run.run(&[r2], &[(b, Tensor::scalar(1.0f32))]).unwrap()[0].scalar_value::<f32>().unwrap(), 7.0);
    });
}

#[test]
fn a_partial_run_without_a_feed_says_which() {
    all_transports(|config| {
        let servers = cluster(&[("ps", 1), ("worker", 1)], &config);
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [] as [Option<usize>; 0]);
        let here = g.device("/job:worker/task:0", || x * 2.0);
        let there = g.device("/job:ps/task:0", || here * 2.0);
        let session = Arc::new(connect(&config, &servers[1], &g, SessionConfig::default()));
        for fetch in [here, there] {
            let mut run = session.partial_run(&[], &[fetch], &[]).unwrap();
            let error = run.run(&[fetch], &[]).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{error}");
            assert!(error.to_string().contains("You must feed a value for placeholder tensor 'x'"), "{error}");
        }
    });
}

/// Sessions that say nothing of a timeout have the server's.
#[test]
fn the_timeout_of_a_server_holds_for_sessions_without_one() {
    let mut config = ServerConfig::default();
    config.defaults.operation_timeout_in_ms = 300;
    let servers = cluster(&[("worker", 1)], &config);
    let g = kolo_ops::graph();
    let q = FifoQueue::shared(&g, "q", &[(DType::I32, PartialShape::scalar())], None);
    let next = q.dequeue()[0];
    let session = connect(&config, &servers[0], &g, SessionConfig::default());
    let error = session.fetch(next).unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    let longer = SessionConfig { operation_timeout: Some(Duration::from_millis(900)), ..SessionConfig::default() };
    let session = connect(&config, &servers[0], &g, longer);
    let start = Instant::now();
    assert_eq!(session.fetch(next).unwrap_err().code(), Code::DeadlineExceeded);
    assert!(start.elapsed() >= Duration::from_millis(800), "{:?}", start.elapsed());
}

#[test]
fn state_outlives_sessions_until_it_is_reset_and_isolated_sessions_share_none() {
    all_transports(|config| {
        let servers = cluster(&[("ps", 1), ("worker", 1)], &config);
        let g = kolo_ops::graph();
        let v = g.device("/job:ps/task:0", || g.variable("v", 3.0f32));
        let init = g.global_variables_initializer();
        connect(&config, &servers[1], &g, SessionConfig::default()).run_op(init).unwrap();
        let session = connect(&config, &servers[1], &g, SessionConfig::default());
        assert_eq!(session.fetch(v.read()).unwrap().scalar_value::<f32>().unwrap(), 3.0);
        let alone = SessionConfig { isolate_session_state: true, ..SessionConfig::default() };
        let isolated = connect(&config, &servers[1], &g, alone);
        assert_eq!(isolated.fetch(v.read()).unwrap_err().code(), Code::FailedPrecondition);
        session.reset(&[]);
        let error = session.fetch(v.read()).unwrap_err();
        assert_eq!((error.code(), error.message().contains("is not found")), (Code::Aborted, true), "{error}");
        let after = connect(&config, &servers[1], &g, SessionConfig::default());
        assert_eq!(after.fetch(v.read()).unwrap_err().code(), Code::FailedPrecondition);
    });
}

#[test]
fn a_graph_grows_and_nodes_that_cannot_be_placed_are_named() {
    all_transports(|config| {
        let servers = cluster(&[("ps", 1), ("worker", 1)], &config);
        let g = kolo_ops::graph();
        let a = g.device("/job:ps/task:0", || g.constant(2.0f32));
        let session = connect(&config, &servers[1], &g, SessionConfig::default());
        assert_eq!(session.fetch(a).unwrap().scalar_value::<f32>().unwrap(), 2.0);
        let b = g.device("/job:worker/task:0", || a + 1.0);
        session.extend(&g).unwrap();
        assert_eq!(session.fetch(b).unwrap().scalar_value::<f32>().unwrap(), 3.0);
        let _ = g.device("/job:ps/task:7", || g.op("Neg").name("lost").input(a).out());
        let error = session.extend(&g).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("lost"), "{error}");
        assert_eq!(session.fetch(b).unwrap().scalar_value::<f32>().unwrap(), 3.0);
    });
}

#[test]
fn an_unknown_op_is_refused_where_it_is_run_and_nowhere_else() {
    let servers = cluster(&[("ps", 1), ("worker", 1)], &ServerConfig::default());
    let g = kolo_ops::graph();
    let x = g.device("/job:ps", || g.constant(2.0f32));
    let y = g.device("/job:worker", || x * 3.0);
    let name = x.name();
    let session = connect(&ServerConfig::default(), &servers[1], &g, SessionConfig::default());
    let text = format!(
        "node {{ name: 'odd' op: 'Odd' input: '{name}' device: '/job:ps' }}
         node {{ name: 'after' op: 'Neg' input: 'odd' attr {{ key: 'T' value {{ type: DT_FLOAT }} }} }}"
    );
    let def = kolo_graph::wire::graph::read_graph(text.as_bytes()).unwrap();
    kolo_graph::wire::graph::import(&g, &def, Default::default()).unwrap();
    session.extend(&g).unwrap();
    assert_eq!(session.fetch(y).unwrap(), Tensor::scalar(6.0f32));
    let error = session.run_named(&["after:0"], &[], &[]).unwrap_err();
    assert_eq!(error.code(), Code::NotFound, "{error}");
    assert!(error.to_string().contains("Op type not registered 'Odd'"), "{error}");
    let fed = session.run_named(&["after"], &[("odd:0", Tensor::scalar(3.0f32))], &[]).unwrap();
    assert_eq!(fed, [Tensor::scalar(-3.0f32)]);
    assert_eq!(session.fetch(y).unwrap(), Tensor::scalar(6.0f32));
}

#[test]
fn strings_and_large_tensors_travel() {
    all_transports(|config| {
        large_tensors(&ServerConfig { shared_memory: false, ..config.clone() });
        large_tensors(&config);
    });
}

fn large_tensors(config: &ServerConfig) {
    let servers = cluster(&[("ps", 1), ("worker", 1)], config);
    let g = kolo_ops::graph();
    let s = g.placeholder::<f32>("s", [None]);
    let large = g.device("/job:ps/task:0", || s * 2.0);
    let back = g.device("/job:worker/task:0", || large + 1.0);
    let words =
        g.device("/job:ps/task:0", || g.constant(Tensor::from_strings([2], vec!["a".into(), "bcd".into()]).unwrap()));
    let words = g.device("/job:worker/task:0", || g.op("Identity").input(words).out());
    let session = connect(config, &servers[1], &g, SessionConfig::default());
    let n = 2_000_003;
    let value = Tensor::from_vec([n], (0..n).map(|i| i as f32).collect()).unwrap();
    let out = session.run(&[back, words], &[(s, value)], &[]).unwrap();
    let data = out[0].data::<f32>().unwrap();
    assert!(data.len() == n && data.iter().enumerate().all(|(i, &x)| x == i as f32 * 2.0 + 1.0));
    assert_eq!(out[1].strings().unwrap()[1].as_ref(), b"bcd");
}

#[test]
fn a_trace_shows_all_tasks() {
    all_transports(|config| {
        let servers = cluster(&[("ps", 1), ("worker", 1)], &config);
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None]);
        let a = g.device("/job:ps/task:0", || x * 2.0);
        let b = g.device("/job:worker/task:0", || a + 1.0);
        let session = connect(&config, &servers[1], &g, SessionConfig::default());
        let options = RunOptions { trace: true, ..RunOptions::default() };
        let (_, metadata) = session.run_with(&options, &[b], &[(x, Tensor::from([1.0f32]))], &[]).unwrap();
        let ran = |op: &str, device: &str| {
            metadata.trace.nodes.iter().any(|node| node.op == op && node.device.starts_with(device))
        };
        assert!(ran("Mul", "/job:ps/") && ran("AddV2", "/job:worker/"), "{:?}", metadata.trace.nodes);
    });
}

/// The worker is gone; whoever needs it is told at once, and the others go on.
#[test]
fn a_task_that_ends_is_noticed_and_filters_leave_it_out() {
    all_transports(|config| {
        let config = ServerConfig { ready_deadline: Duration::from_millis(300), ..config };
        let mut servers = cluster(&[("ps", 1), ("worker", 2)], &config);
        let g = kolo_ops::graph();
        let v = g.device("/job:ps/task:0", || g.variable("v", 3.0f32));
        let y = g.device("/job:worker/task:1", || v.read() + 1.0);
        let init = g.global_variables_initializer();
        let session = connect(&config, &servers[1], &g, SessionConfig::default());
        session.run_op(init).unwrap();
        session.fetch(y).unwrap();
        drop(servers.pop());
        let error = session.fetch(y).unwrap_err();
        assert!([Code::Unavailable, Code::Aborted].contains(&error.code()), "{error:?}");
        assert_eq!(session.fetch(v.read()).unwrap().scalar_value::<f32>().unwrap(), 3.0);

        let target = format!("grpc://127.0.0.1:{}", servers[1].address().port());
        let graph = kolo_ops::graph();
        let refused = Session::connect_secured(&target, &graph, SessionConfig::default(), &config.security);
        let error = refused.err().unwrap();
        assert!([Code::Unavailable, Code::DeadlineExceeded].contains(&error.code()), "{error:?}");
        assert!(error.message().contains("/job:worker/replica:0/task:1"), "{error}");
        let g = kolo_ops::graph();
        let v = g.device("/job:ps/task:0", || g.variable("v", 3.0f32));
        let filters = vec!["/job:ps".to_owned(), "/job:worker/task:0".to_owned()];
        let session =
            connect(&config, &servers[1], &g, SessionConfig { device_filters: filters, ..SessionConfig::default() });
        assert_eq!(session.fetch(v.read()).unwrap().scalar_value::<f32>().unwrap(), 3.0);
    });
}

#[test]
fn hundreds_of_blocked_runs_hold_no_threads() {
    all_transports(|config| {
        let servers = cluster(&[("ps", 1)], &config);
        let g = kolo_ops::graph();
        let queue = FifoQueue::shared(&g, "q", &[(DType::F32, PartialShape::scalar())], None);
        let x = g.placeholder::<f32>("x", [None]);
        let fill = queue.enqueue_many(&[x]);
        let dequeue = queue.dequeue()[0].name();
        let session = Arc::new(connect(&config, &servers[0], &g, SessionConfig::default()));
        let runs: Vec<_> = (0..200)
            .map(|_| {
                let (session, dequeue) = (session.clone(), dequeue.clone());
                std::thread::spawn(move || session.run_named(&[&dequeue], &[], &[]).unwrap()[0].scalar_value::<f32>())
            })
            .collect();
        let values: Vec<f32> = (0..200).map(|i| i as f32).collect();
        session.run(&[], &[(x, Tensor::vector(values.clone()))], &[fill]).unwrap();
        let mut got: Vec<f32> = runs.into_iter().map(|run| run.join().unwrap().unwrap()).collect();
        got.sort_by(f32::total_cmp);
        assert_eq!(got, values);
    });
}
