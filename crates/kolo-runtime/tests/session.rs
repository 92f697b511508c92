//! The local session, end to end: runs, errors, waiting, cancelling, threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Code, DType, Error, PartialShape, Tensor};
use kolo_graph::VariableKind;
use kolo_ops::CancelToken;
use kolo_ops::math::matmul::matmul;
use kolo_ops::queue::FifoQueue;
use kolo_runtime::{RunOptions, Session, SessionConfig};

#[test]
fn constants_feeds_and_chains() {
    let g = kolo_ops::graph();
    let c = g.constant(3.0f32);
    let x = g.placeholder::<f32>("x", [None]);
    let y = x * c + 1.0;
    let session = Session::new(&g).unwrap();
    assert_eq!(session.fetch(c).unwrap(), Tensor::scalar(3.0f32));
    let fed = session.run(&[y, x], &[(x, Tensor::from([1.0f32, 2.0]))], &[]).unwrap();
    assert_eq!(fed, [Tensor::from([4.0f32, 7.0]), Tensor::from([1.0f32, 2.0])]);
    let error = session.fetch(y).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.to_string().contains("You must feed a value for placeholder tensor 'x'"), "{error}");
    assert_eq!(session.run_named(&["x"], &[("x:0", Tensor::from([5.0f32]))], &[]).unwrap(), [Tensor::from([5.0f32])]);
}

/// A part that Kolo has no op for stops the runs that need it, and no others.
#[test]
fn an_unknown_op_is_refused_where_it_is_run_and_nowhere_else() {
    let t = "attr { key: 'T' value { type: DT_FLOAT } }";
    let text = format!(
        "node {{ name: 'x' op: 'Placeholder' attr {{ key: 'dtype' value {{ type: DT_FLOAT }} }} }}
         node {{ name: 'odd' op: 'MaxPool9D' input: 'x' attr {{ key: 'ksize' value {{ list {{ i: 1 }} }} }} }}
         node {{ name: 'lone' op: 'Odd' input: 'x' }}
         node {{ name: 'after' op: 'Neg' input: 'odd:1' {t} }}
         node {{ name: 'beside' op: 'Neg' input: 'x' {t} }}
         node {{ name: 'init' op: 'NoOp' input: '^beside' }}"
    );
    let g = kolo_ops::graph();
    let def = kolo_graph::wire::graph::read_graph(text.as_bytes()).unwrap();
    kolo_graph::wire::graph::import(&g, &def, Default::default()).unwrap();
    let session = Session::new(&g).unwrap();
    let x = || ("x:0", Tensor::scalar(2.0f32));
    assert_eq!(session.run_named(&["beside"], &[x()], &["init"]).unwrap(), [Tensor::scalar(-2.0f32)]);
    for (fetches, targets) in [(&["after:0"][..], &[][..]), (&["odd"], &[]), (&["odd:7"], &[]), (&[], &["odd"])] {
        let error = session.run_named(fetches, &[x()], targets).unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{error}");
        for part in ["Op type not registered 'MaxPool9D'", "'odd'", "feed its outputs"] {
            assert!(error.to_string().contains(part), "'{error}' does not contain '{part}'");
        }
    }
    let error = session.run_named(&["after", "lone"], &[x()], &[]).unwrap_err().to_string();
    assert!(error.contains("the nearest ops are MaxPool"), "{error}");
    assert!(error.contains("nor are 'Odd' registered"), "{error}");
    // A fed value takes the place of what cannot be computed.
    let fed = session.run_named(&["after"], &[("odd:1", Tensor::scalar(3.0f32))], &[]).unwrap();
    assert_eq!(fed, [Tensor::scalar(-3.0f32)]);
}

#[test]
fn bad_runs_are_refused_and_leave_the_session_usable() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("weights", [None, Some(2)]);
    let y = x * 2.0;
    let session = Session::new(&g).unwrap();
    let fails = |result: kolo_core::Result<Vec<Tensor>>, code: Code, text: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(text), "{error}");
    };
    fails(
        session.run(&[y], &[(x, Tensor::from([1.0f32]))], &[]),
        Code::InvalidArgument,
        "Cannot feed value of shape [1]",
    );
    fails(
        session.run(&[y], &[(x, Tensor::from([[1i32, 2]]))], &[]),
        Code::InvalidArgument,
        "Cannot feed value of type int32",
    );
    fails(session.run_named(&["wieghts"], &[], &[]), Code::NotFound, "did you mean 'weights'?");
    fails(session.run_named(&["weights:3"], &[], &[]), Code::InvalidArgument, "there is no 'weights:3'");
    fails(session.run(&[], &[], &[]), Code::InvalidArgument, "Must specify at least one target");
    let later = y + 1.0;
    fails(session.run(&[later], &[], &[]), Code::NotFound, "call session.extend");
    session.extend(&g).unwrap();
    let value = Tensor::from([[1.0f32, 2.0]]);
    assert_eq!(session.run(&[later], &[(x, value)], &[]).unwrap(), [Tensor::from([[3.0f32, 5.0]])]);
}

#[test]
fn describing_errors_name_the_line_and_the_shapes() {
    let g = kolo_ops::graph();
    let a = g.placeholder::<f32>("a", [Some(2), Some(3)]);
    let b = g.placeholder::<f32>("b", [Some(4), Some(5)]);
    let bad = kolo_ops::math::matmul::matmul(a, b);
    let after = bad + 1.0;
    assert!(!after.is_valid());
    let error = Session::new(&g).err().unwrap();
    for text in ["MatMul", "a:0 float[2,3]", "b:0 float[4,5]", "session.rs"] {
        assert!(error.to_string().contains(text), "'{text}' is missing in: {error}");
    }
    g.take_error();
    assert!(Session::new(&g).is_ok(), "the graph without what failed is usable");
}

#[test]
fn ten_thousand_adds_in_a_row_and_side_by_side() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", PartialShape::scalar());
    let one = g.constant(1.0f32);
    let y = (0..10_000).fold(x, |y, _| y + one);
    let v = g.variable("v", 0.0f32);
    let adds: Vec<_> = (0..1_000).map(|_| v.assign_add(one)).collect();
    let fan = g.group("fan", &adds);
    let init = g.global_variables_initializer();
    let session = Arc::new(Session::new(&g).unwrap());
    session.run_op(init).unwrap();
    let callable = session.make_callable(&[x], &[y], &[]).unwrap();
    for _ in 0..3 {
        assert_eq!(callable.call(&[&Tensor::scalar(1.0f32)]).unwrap(), [Tensor::scalar(10_001.0f32)]);
    }
    session.run_op(fan).unwrap();
    assert_eq!(session.fetch(v.read()).unwrap(), Tensor::scalar(1000.0f32));
}

#[test]
fn variables_of_both_families_keep_their_state_between_runs() {
    for kind in [VariableKind::Resource, VariableKind::Reference] {
        let g = kolo_ops::graph();
        let v = g.new_variable("v", [1.0f32, 2.0]).kind(kind).build();
        let add = v.assign_add(g.constant([10.0f32, 10.0]));
        let init = g.global_variables_initializer();
        let session = Session::new(&g).unwrap();
        let error = session.fetch(v.read()).unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        assert!(error.to_string().contains('v'), "{error}");
        session.run_op(init).unwrap();
        session.run_op(add).unwrap();
        session.run_op(add).unwrap();
        assert_eq!(session.fetch(v.read()).unwrap(), Tensor::from([21.0f32, 22.0]));
    }
}

#[test]
fn the_first_error_wins_and_names_node_op_and_device() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<i32>("x", [None]);
    let zero = g.constant(0i32);
    let bad = g.op("Div").name("divide").input(x).input(zero).out();
    let good = x + 1;
    let session = Session::new(&g).unwrap();
    let feed = Tensor::from([1i32, 2]);
    let error = session.run(&[good, bad], &[(x, feed.clone())], &[]).unwrap_err();
    let place = error.node().expect("the node is named");
    assert_eq!((place.node.as_str(), place.op.as_str()), ("divide", "Div"));
    assert!(place.device.ends_with("device:CPU:0"));
    assert_eq!(session.run(&[good], &[(x, feed)], &[]).unwrap(), [Tensor::from([2i32, 3])]);
}

#[test]
fn a_run_that_waits_for_a_queue_goes_on_when_another_run_fills_it() {
    let g = kolo_ops::graph();
    let queue = FifoQueue::new(&g, "q", &[(DType::F32, PartialShape::scalar())], Some(10));
    let x = g.placeholder::<f32>("x", PartialShape::scalar());
    let enqueue = queue.enqueue(&[x]);
    let dequeue = queue.dequeue()[0];
    let twice = dequeue * 2.0;
    let session = Arc::new(Session::new(&g).unwrap());
    let wait = session.make_callable(&[], &[twice], &[]).unwrap();
    std::thread::scope(|scope| {
        let waiting: Vec<_> =
            (0..8).map(|_| scope.spawn(|| wait.call(&[]).unwrap()[0].scalar_value::<f32>().unwrap())).collect();
        for i in 0..8 {
            session.run(&[], &[(x, Tensor::scalar(i as f32))], &[enqueue]).unwrap();
        }
        let mut values: Vec<f32> = waiting.into_iter().map(|thread| thread.join().unwrap()).collect();
        values.sort_by(f32::total_cmp);
        assert_eq!(values, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]);
    });
}

#[test]
fn a_timed_out_run_says_what_it_waited_for() {
    let g = kolo_ops::graph();
    let queue = FifoQueue::new(&g, "q", &[(DType::F32, PartialShape::scalar())], Some(10));
    let (dequeue, size) = (queue.dequeue()[0], queue.size());
    let session = Session::new(&g).unwrap();
    let options = RunOptions { timeout: Some(Duration::from_millis(50)), ..RunOptions::default() };
    let start = Instant::now();
    let error = session.run_with(&options, &[dequeue], &[], &[]).unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert!(
        error.to_string().contains("QueueDequeueV2 'q_dequeue'") || error.to_string().contains("QueueDequeue"),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(session.fetch(size).unwrap(), Tensor::scalar(0i32), "the session is usable");
}

#[test]
fn cancelling_and_closing_stop_runs_that_wait() {
    let g = kolo_ops::graph();
    let queue = FifoQueue::new(&g, "q", &[(DType::F32, PartialShape::scalar())], Some(10));
    let dequeue = queue.dequeue()[0];
    let session = Arc::new(Session::new(&g).unwrap());
    let wait = session.make_callable(&[], &[dequeue], &[]).unwrap();
    let token = CancelToken::new();
    let options = RunOptions { cancel: Some(token.clone()), ..RunOptions::default() };
    std::thread::scope(|scope| {
        let run = scope.spawn(|| wait.call_with(&options, &[]).unwrap_err());
        std::thread::sleep(Duration::from_millis(20));
        token.cancel(Error::cancelled("enough"));
        assert_eq!(run.join().unwrap().code(), Code::Cancelled);
        let run = scope.spawn(|| wait.call(&[]).unwrap_err());
        std::thread::sleep(Duration::from_millis(20));
        session.close();
        let error = run.join().unwrap();
        assert_eq!(error.code(), Code::Cancelled);
        assert!(error.to_string().contains("Session::Close()"), "{error}");
    });
    assert_eq!(session.fetch(dequeue).unwrap_err().code(), Code::FailedPrecondition);
}

/// A kernel that is running then still ends, and makes the next one ready, which nobody runs.
#[test]
fn cancelling_a_run_while_a_kernel_runs_stops_it() {
    let g = kolo_ops::graph();
    let queue = FifoQueue::new(&g, "q", &[(DType::F32, PartialShape::scalar())], Some(1));
    let (begin, begun) = (queue.enqueue(&[g.constant(1.0f32)]), queue.dequeue()[0]);
    let x = g.placeholder::<f32>("x", [Some(128), Some(128)]);
    let last = g.control_dependencies(&[begin], || (0..1000).fold(x, |product, _| matmul(product, x))).name();
    let session = Arc::new(Session::new(&g).unwrap());
    let token = CancelToken::new();
    let (ended, end) = std::sync::mpsc::channel();
    let (running, options) = (session.clone(), RunOptions { cancel: Some(token.clone()), ..RunOptions::default() });
    std::thread::spawn(move || {
        let value = Tensor::zeros(DType::F32, [128, 128]).unwrap();
        ended.send(running.run_named_with(&options, &[&last], &[("x", value)], &[]))
    });
    session.fetch(begun).unwrap();
    token.cancel(Error::cancelled("enough"));
    let error = end.recv_timeout(Duration::from_secs(20)).expect("it ends").expect_err("it was cancelled");
    assert_eq!(error.code(), Code::Cancelled, "{error}");
}

#[test]
fn partial_runs_take_feeds_and_fetches_in_turn() {
    let g = kolo_ops::graph();
    let a = g.placeholder::<f32>("a", PartialShape::scalar());
    let b = g.placeholder::<f32>("b", PartialShape::scalar());
    let first = a + 1.0;
    let second = first * b;
    let session = Arc::new(Session::new(&g).unwrap());
    let mut run = session.partial_run(&[a, b], &[first, second], &[]).unwrap();
    assert_eq!(run.run(&[first], &[(a, Tensor::scalar(1.0f32))]).unwrap(), [Tensor::scalar(2.0f32)]);
    let error = run.run(&[second], &[]).unwrap_err();
    assert!(error.to_string().contains("depends on 'b:0'"), "{error}");
    assert!(run.run(&[], &[(a, Tensor::scalar(1.0f32))]).is_err(), "a feed may be used once");
    assert_eq!(run.run(&[second], &[(b, Tensor::scalar(5.0f32))]).unwrap(), [Tensor::scalar(10.0f32)]);
}

#[test]
fn traces_tell_node_device_and_time() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [None]);
    let y = x * 2.0 + 1.0;
    let session = Session::new(&g).unwrap();
    let options = RunOptions { trace: true, ..RunOptions::default() };
    let feed = Tensor::zeros(DType::F32, [100]).unwrap();
    let (_, metadata) = session.run_with(&options, &[y], &[(x, feed)], &[]).unwrap();
    let names: Vec<&str> = metadata.trace.nodes.iter().map(|node| &*node.node).collect();
    assert_eq!(names, ["Mul", "AddV2"]);
    assert!(metadata.trace.nodes.iter().all(|node| node.n_bytes == 400 && node.device.ends_with("CPU:0")));
    assert!(metadata.trace.to_chrome_json().contains("\"name\":\"AddV2\""));
}

#[test]
fn thread_counts_are_hard_caps() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [Some(200), Some(200)]);
    let products: Vec<_> = (0..8).map(|_| kolo_ops::math::matmul::matmul(x, x).operation()).collect();
    let all = g.group("all", &products);
    for limit in [1, 3] {
        let config = SessionConfig {
            inter_op_parallelism_threads: limit,
            intra_op_parallelism_threads: 1,
            ..SessionConfig::default()
        };
        let session = Session::with_config(&g, config).unwrap();
        for _ in 0..5 {
            session.run(&[], &[(x, Tensor::zeros(DType::F32, [200, 200]).unwrap())], &[all]).unwrap();
            assert!(
                session.local().unwrap().n_inter_op_threads() < limit.max(2),
                "{} threads",
                session.local().unwrap().n_inter_op_threads()
            );
        }
    }
}

#[test]
fn many_threads_may_run_one_session() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", PartialShape::scalar());
    let y = (0..100).fold(x, |y, _| y + 1.0);
    let session = Session::new(&g).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let session = &session;
            let (x, y) = (x.name(), y.name());
            scope.spawn(move || {
                for i in 0..100 {
                    let value = (thread * 1000 + i) as f32;
                    let found = session.run_named(&[&y], &[(&x, Tensor::scalar(value))], &[]).unwrap();
                    assert_eq!(found, [Tensor::scalar(value + 100.0)]);
                }
            });
        }
    });
}

/// TensorFlow's `Identity` of a reference shares the variable's memory, and so does all else that has its kernel.
/// `SyncReplicasOptimizer` makes its tokens of such a read, after an update that the read does not wait for.
#[test]
fn reading_a_reference_gives_the_value_of_the_moment_it_is_used() {
    for op in ["Identity", "StopGradient", "PreventGradient"] {
        let g = kolo_ops::graph();
        let v = g.op("VariableV2").name("v").attr("dtype", DType::F32).attr("shape", PartialShape::scalar()).out();
        let init = g.op("Assign").input(v).input(g.constant(1.0f32)).out();
        let read = g.op(op).name("v/read").input(v).out();
        let more =
            g.control_dependencies(&[read.operation()], || g.op("AssignAdd").input(v).input(g.constant(10.0f32)).out());
        let used = g.control_dependencies(&[more.operation()], || g.op("Neg").input(read).out());
        let session = Session::new(&g).unwrap();
        assert_eq!(session.fetch(read).unwrap_err().code(), Code::FailedPrecondition);
        session.run_op(init.operation()).unwrap();
        assert_eq!(session.fetch(used).unwrap(), Tensor::scalar(-11.0f32), "{op}");
        assert_eq!(session.fetch(read).unwrap(), Tensor::scalar(11.0f32), "{op}");
    }
}
