//! Nodes that change device while their session lives.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{Code, DType, PartialShape, Tensor};
use kolo_graph::{PlacementRules, VariableKind};
use kolo_ops::queue::FifoQueue;
use kolo_runtime::{RunOptions, Session, SessionConfig};

fn cpus(n: usize) -> SessionConfig {
    SessionConfig { device_count: BTreeMap::from([("CPU".to_owned(), n)]), ..SessionConfig::default() }
}

fn rules(text: &str) -> PlacementRules {
    PlacementRules::parse(text, "pins.txt").expect("these rules are well-formed")
}

/// `CPU:1 from CPU:0`, or `CPU:1` for a node that never moved.
fn history(session: &Session, node: &str) -> String {
    let report = session.local().expect("it runs here").placement();
    let row = report.rows.iter().find(|row| row.node == node).unwrap_or_else(|| panic!("{node} was not placed"));
    let from = row.moved_from.as_ref().map_or(String::new(), |from| format!(" from {}:{}", from.kind, from.id));
    format!("{}:{}{from}", row.device.kind, row.device.id)
}

#[test]
fn a_changed_pin_moves_what_has_no_state() {
    for soft in [false, true] {
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None]);
        let y = g.device("/cpu:0", || g.op("Neg").name("y").input(x).out());
        let config = SessionConfig { allow_soft_placement: soft, ..cpus(2) };
        let session = Arc::new(Session::with_config(&g, config).unwrap());
        let callable = session.make_callable(&[x], &[y], &[]).unwrap();
        let value = Tensor::from([1.0f32, 2.0]);
        let expected = [Tensor::from([-1.0f32, -2.0])];
        assert_eq!(callable.call(&[&value]).unwrap(), expected);
        assert_eq!(history(&session, "y"), "CPU:0");
        session.local().unwrap().set_placement_rules(rules("! y -> /cpu:1")).unwrap();
        assert_eq!(session.run(&[y], &[(x, value.clone())], &[]).unwrap(), expected);
        assert_eq!(history(&session, "y"), "CPU:1 from CPU:0", "soft: {soft}");
        let text = session.local().unwrap().placement().to_string();
        assert!(text.contains("pinned, moved from /job:localhost/replica:0/task:0/device:CPU:0"), "{text}");
        assert!(text.contains("pins.txt:1"), "{text}");
        let (_, metadata) =
            callable.call_with(&RunOptions { trace: true, ..RunOptions::default() }, &[&value]).unwrap();
        assert!(metadata.trace.nodes.iter().all(|node| node.device.ends_with("CPU:1")), "a callable follows");
    }
}

#[test]
fn state_refuses_a_changed_pin_and_says_how_to_move_it() {
    let g = kolo_ops::graph();
    let v = g.variable("v", 3.0f32);
    let queue = FifoQueue::new(&g, "q", &[(DType::F32, PartialShape::scalar())], None);
    let size = queue.size();
    let init = g.global_variables_initializer();
    let session = Session::with_config(&g, cpus(2)).unwrap();
    session.run_op(init).unwrap();
    session.fetch(size).unwrap();
    let error = session.local().unwrap().set_placement_rules(rules("\nv -> /cpu:1")).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    for part in [
        "'v'",
        "'/device:CPU:1' (pinned at pins.txt:2)",
        "task:0/device:CPU:0",
        "session.local()?.move_node(\"v\", \"/device:CPU:1\")",
    ] {
        assert!(error.message().contains(part), "'{part}' is missing in: {error}");
    }
    let error = session.local().unwrap().set_placement_rules(rules("q -> /cpu:1")).unwrap_err();
    assert!(error.message().contains("a FIFOQueueV2 holds does not move"), "{error}");
    let error = session.local().unwrap().move_node("q", "/cpu:1").unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("only variables"), "{error}");
    // Nothing changed, and the session goes on.
    assert_eq!(session.fetch(v.read()).unwrap(), Tensor::scalar(3.0f32));
    assert_eq!(history(&session, "v"), "CPU:0");
}

#[test]
fn a_variable_moves_with_its_value_and_its_users() {
    for kind in [VariableKind::Resource, VariableKind::Reference] {
        let g = kolo_ops::graph();
        let v = g.device("/cpu:0", || g.new_variable("v", vec![1.0f32; 1000]).kind(kind).build());
        let ones = g.constant(vec![1.0f32; 1000]);
        let add = v.assign_add(ones);
        let init = g.global_variables_initializer();
        let session = Arc::new(Session::with_config(&g, cpus(2)).unwrap());
        session.run_op(init).unwrap();
        let callable = session.make_callable(&[], &[], &[add]).unwrap();
        callable.call(&[]).unwrap();
        session.local().unwrap().move_node("v", "/cpu:1").unwrap();
        callable.call(&[]).unwrap();
        session.run_op(add).unwrap();
        assert_eq!(session.fetch(v.read()).unwrap(), Tensor::from(vec![4.0f32; 1000]), "{kind:?}");
        assert_eq!(history(&session, "v"), "CPU:1 from CPU:0");
        assert_eq!(history(&session, &add.name()), "CPU:1 from CPU:0");
        assert_eq!(session.local().unwrap().memory_stats(0).unwrap().in_use, 0, "nothing of it stays behind");
        // The new place is its pin now; going on to describe the graph does not bring it back.
        let twice = v.read() * 2.0;
        session.extend(&g).unwrap();
        assert_eq!(session.fetch(twice).unwrap(), Tensor::from(vec![8.0f32; 1000]));
        session.local().unwrap().set_placement_rules(rules("! v -> /cpu:1")).unwrap();
        let error = session.local().unwrap().set_placement_rules(rules("! v -> /cpu:0")).unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        session.local().unwrap().move_node("v", "/cpu:0").unwrap();
        assert_eq!(session.fetch(twice).unwrap(), Tensor::from(vec![8.0f32; 1000]));
    }
}

#[test]
fn moves_to_nowhere_and_of_nobody_are_refused() {
    let g = kolo_ops::graph();
    let v = g.variable("v", 3.0f32);
    let init = g.global_variables_initializer();
    let session = Session::with_config(&g, cpus(2)).unwrap();
    session.run_op(init).unwrap();
    let error = session.local().unwrap().move_node("v", "/gpu:0").unwrap_err();
    assert!(error.message().contains("'/device:GPU:0'") && error.message().contains("device:CPU:1"), "{error}");
    assert_eq!(session.local().unwrap().move_node("vv", "/cpu:1").unwrap_err().code(), Code::NotFound);
    session.local().unwrap().move_node("v", "/cpu:0").unwrap();
    assert_eq!(session.fetch(v.read()).unwrap(), Tensor::scalar(3.0f32));
    // A node that no run has needed yet just gets its pin.
    let w = g.variable("w", 1.0f32);
    let init = w.initializer();
    session.extend(&g).unwrap();
    session.local().unwrap().move_node("w", "/cpu:1").unwrap();
    session.run_op(init).unwrap();
    assert_eq!(history(&session, "w"), "CPU:1");
}

#[test]
fn nothing_moves_while_a_run_is_in_flight() {
    let g = kolo_ops::graph();
    let v = g.variable("v", 3.0f32);
    let queue = FifoQueue::new(&g, "q", &[(DType::F32, PartialShape::scalar())], None);
    let taken = queue.dequeue()[0] + v.read();
    let init = g.global_variables_initializer();
    let session = Arc::new(Session::with_config(&g, cpus(2)).unwrap());
    session.run_op(init).unwrap();
    let run = session.partial_run(&[], &[taken], &[]).unwrap();
    let error = session.local().unwrap().move_node("v", "/cpu:1").unwrap_err();
    assert!(error.message().contains("1 runs are in flight"), "{error}");
    drop(run);
    session.local().unwrap().move_node("v", "/cpu:1").unwrap();
    let options = RunOptions { timeout: Some(Duration::from_millis(20)), ..RunOptions::default() };
    assert_eq!(session.run_with(&options, &[taken], &[], &[]).unwrap_err().code(), Code::DeadlineExceeded);
}
