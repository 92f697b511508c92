//! Graphs with functions that TensorFlow made (`conformance/functions/make.py`), run here; and what must be refused.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use kolo::data::npy;
use kolo::saved_model::SavedModel;
use kolo::wire::graph::{Calls, ExportOptions, ImportOptions, export, import, read_graph};
use kolo::{Code, DType, Graph, Session, SessionConfig, Tensor, wire};

fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/functions")).join(name)
}

fn message(name: &str) -> wire::proto::GraphDef {
    read_graph(&std::fs::read(path(name)).expect("the fixture is there")).expect("TensorFlow wrote it")
}

/// The arrays of a fixture: for each step or signature (`""` if there is one), feeds and results by name.
fn steps(name: &str) -> BTreeMap<String, [Vec<(String, Tensor)>; 2]> {
    let mut steps: BTreeMap<String, [Vec<(String, Tensor)>; 2]> = BTreeMap::new();
    for (key, value) in npy::read_npz(path(name)).expect("the fixture is there") {
        let (step, side, name) = match key.split_once("feed/") {
            Some((step, name)) => (step, 0, name),
            None => {
                let (step, name) = key.split_once("fetch/").expect("feeds and fetches are all there is");
                (step, 1, name)
            }
        };
        steps.entry(step.trim_end_matches('/').to_owned()).or_default()[side].push((name.to_owned(), value));
    }
    steps
}

#[track_caller]
fn assert_close(what: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!((found.dtype(), found.shape()), (expected.dtype(), expected.shape()), "{what}");
    if found.dtype() != DType::F32 {
        assert_eq!(found, expected, "{what}");
        return;
    }
    let pairs = found.data::<f32>().expect("it is float").iter().zip(expected.data::<f32>().expect("it is float"));
    for (found, expected) in pairs {
        let close = (found - expected).abs() <= 1e-5 * expected.abs().max(1.0);
        assert!(close, "{what}: {found} should be {expected}");
    }
}

/// Runs a fixture step by step and compares every fetch.
#[track_caller]
fn check(name: &str) -> Graph {
    let graph = kolo::graph();
    import(&graph, &message(&format!("{name}.pb")), ImportOptions::default()).expect("it can be imported");
    let session = Session::new(&graph).expect("the graph is sound");
    if graph.operation("init").is_ok() {
        session.run_named(&[], &[], &["init"]).expect("it should work");
    }
    for (step, [feeds, expected]) in steps(&format!("{name}.npz")) {
        let feeds: Vec<(&str, Tensor)> = feeds.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        let fetches: Vec<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        let values = session.run_named(&fetches, &feeds, &[]).unwrap_or_else(|error| panic!("{name} {step}: {error}"));
        for (value, (fetch, expected)) in values.iter().zip(&expected) {
            assert_close(&format!("{name} {step} {fetch}"), value, expected);
        }
    }
    graph
}

#[test]
fn calls_give_what_tensorflow_gives() {
    let graph = check("calls");
    // The calls themselves can be fetched, and keep their number of outputs.
    let session = Session::new(&graph).unwrap();
    let x = Tensor::from([[1.0f32, 2.0, 3.0]]);
    let values = session.run_named(&["PartitionedCall", "PartitionedCall_1:1"], &[("x", x)], &[]).unwrap();
    assert_eq!(values, [Tensor::from([[2.0f32, 4.0, 6.0]]), Tensor::scalar(6.0f32)]);
    check("nested");
    check("defun");
    check("frozen");
}

#[test]
fn branches_and_loops_give_what_tensorflow_gives() {
    check("cond");
    check("case");
    check("loop");
    check("loops_in_loops");
}

#[test]
fn updates_of_variables_happen_in_order_and_only_in_the_branch_that_is_taken() {
    check("stateful");
}

#[test]
fn gradients_that_tensorflow_took_run() {
    check("gradient");
}

#[test]
fn parts_of_functions_run_on_several_devices() {
    for name in ["calls", "cond", "loop", "stateful"] {
        let mut def = message(&format!("{name}.pb"));
        // Every other node of every body goes to the second device.
        for function in def.library.iter_mut().flat_map(|library| &mut library.function) {
            for node in function.node_def.iter_mut().skip(1).step_by(2).filter(|node| !node.op.contains("Variable")) {
                node.device = "/device:CPU:1".into();
            }
        }
        let graph = kolo::graph();
        import(&graph, &def, ImportOptions::default()).unwrap();
        let config = SessionConfig {
            device_count: [("CPU".to_owned(), 2)].into(),
            allow_soft_placement: true,
            ..SessionConfig::default()
        };
        let session = Session::with_config(&graph, config).unwrap();
        if graph.operation("init").is_ok() {
            session.run_named(&[], &[], &["init"]).unwrap();
        }
        for (step, [feeds, expected]) in steps(&format!("{name}.npz")) {
            let feeds: Vec<(&str, Tensor)> = feeds.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
            for (fetch, expected) in &expected {
                if name == "stateful" && fetch != "total:0" {
                    continue;
                }
                let values = session.run_named(&[fetch], &feeds, &[]).unwrap();
                assert_close(&format!("{name} {step} {fetch}"), &values[0], expected);
            }
        }
        let placement = session.local().unwrap().placement();
        assert!(placement.rows.iter().any(|row| row.device.to_string().ends_with("CPU:1")), "{name} used one device");
    }
}

#[test]
fn our_gradients_go_through_calls() {
    let graph = kolo::graph();
    import(&graph, &message("gradient.pb"), ImportOptions::default()).unwrap();
    let (x, w, loss) = (graph.output("x").unwrap(), graph.output("w").unwrap(), graph.output("loss").unwrap());
    let gradients = kolo::gradients(&[loss], &[x, w]).unwrap();
    let session = Session::new(&graph).unwrap();
    let all = steps("gradient.npz");
    let [feeds, expected] = &all[""];
    let value = |list: &[(String, Tensor)], name: &str| list.iter().find(|(found, _)| found == name).unwrap().1.clone();
    let feeds = [(x, value(feeds, "x")), (w, value(feeds, "w"))];
    for (gradient, name) in gradients.into_iter().zip(["dx:0", "dw:0"]) {
        let Some(kolo::Grad::Dense(gradient)) = gradient else { panic!("there is a gradient") };
        assert_close(name, &session.run(&[gradient], &feeds, &[]).unwrap()[0], &value(expected, name));
    }
}

/// The gradient of the sum of `y` for `x`, with these feeds.
fn gradient_of(file: &str, y: &str, feeds: &[(&str, Tensor)]) -> Tensor {
    let graph = kolo::graph();
    import(&graph, &message(file), ImportOptions::default()).expect("it can be imported");
    let x = graph.output("x").expect("it should work");
    let gradients = kolo::gradients(&[graph.output(y).expect("it should work")], &[x]).expect("it should work");
    let Some(kolo::Grad::Dense(gradient)) = gradients[0] else { panic!("there is a gradient") };
    graph.check().expect("it should work");
    Session::new(&graph)
        .expect("the graph is sound")
        .run_named(&[&gradient.name()], feeds, &[])
        .expect("it should work")
        .remove(0)
}

#[test]
fn our_gradients_go_through_branches_and_loops_of_functions() {
    let y = Tensor::from([[4.0f32, 5.0, 6.0]]);
    for (p, x, expected) in [
        (true, [[1.0f32, 2.0, 3.0]], [[4.0f32, 5.0, 6.0]]),
        (true, [[-1.0, -2.0, -3.0]], [[1.0, 1.0, 1.0]]),
        (false, [[1.0, 2.0, 3.0]], [[0.0, 0.0, 0.0]]),
    ] {
        let feeds = [("p", Tensor::scalar(p)), ("x", Tensor::from(x)), ("y", y.clone())];
        assert_eq!(gradient_of("cond.pb", "r", &feeds), Tensor::from(expected));
    }
    // x is added j times for each j < i < 5 with an even i + j: once for (3, 1), twice for (4, 2).
    let feeds = [("n", Tensor::scalar(5i32)), ("x", Tensor::from([1.0f32, 2.0]))];
    assert_eq!(gradient_of("loops_in_loops.pb", "total", &feeds), Tensor::from([3.0f32, 3.0]));
}

#[test]
fn a_graph_that_is_kept_is_written_as_it_was_and_says_why_it_does_not_run() {
    for name in ["calls", "nested", "cond", "case", "loop", "stateful"] {
        let def = message(&format!("{name}.pb"));
        let graph = kolo::graph();
        let options = ImportOptions { calls: Calls::Keep, ..ImportOptions::default() };
        import(&graph, &def, options).unwrap();
        let written = export(&graph.snapshot(), ExportOptions::default()).unwrap();
        assert_eq!(written.library, def.library, "{name}");
        let heads = |def: &wire::proto::GraphDef| -> BTreeMap<String, (String, Vec<String>)> {
            def.node.iter().map(|node| (node.name.clone(), (node.op.clone(), node.input.clone()))).collect()
        };
        assert_eq!(heads(&written), heads(&def), "{name}");
        let call = def.node.iter().find(|node| node.op.contains("Call")).expect("a tf.function is called");
        let error = Session::new(&graph).unwrap().run_named(&[], &[], &[&call.name]).unwrap_err();
        assert_eq!(error.code(), Code::Unimplemented);
        assert!(error.message().contains(&call.name) && error.message().contains("Calls::Lower"), "{error}");
    }
}

#[test]
fn what_was_written_out_can_be_written_and_read_again() {
    let graph = kolo::graph();
    let def = message("loop.pb");
    import(&graph, &def, ImportOptions::default()).unwrap();
    let written = export(&graph.snapshot(), ExportOptions::default()).unwrap();
    assert_eq!(written.library, def.library);
    let again = kolo::graph();
    import(&again, &written, ImportOptions::default()).unwrap();
    let session = Session::new(&again).unwrap();
    let all = steps("loop.npz");
    let [feeds, expected] = &all["step3"];
    let feeds: Vec<(&str, Tensor)> = feeds.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    for (fetch, expected) in expected {
        assert_close(fetch, &session.run_named(&[fetch], &feeds, &[]).unwrap()[0], expected);
    }
    // The same functions may come twice into one graph.
    let options = ImportOptions { prefix: Some("twice".into()), ..ImportOptions::default() };
    import(&again, &def, options).unwrap();
    let session = Session::new(&again).unwrap();
    let feeds: Vec<(String, Tensor)> =
        feeds.into_iter().map(|(name, value)| (format!("twice/{name}"), value)).collect();
    let feeds: Vec<(&str, Tensor)> = feeds.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let i = session.run_named(&["twice/i"], &feeds, &[]).unwrap();
    assert_eq!(i, [Tensor::scalar(5i32)]);
}

#[test]
fn the_outputs_of_a_call_with_several_cannot_be_fed() {
    let graph = kolo::graph();
    import(&graph, &message("calls.pb"), ImportOptions::default()).unwrap();
    let nodes = graph.snapshot();
    let call = nodes.iter().find(|(_, node)| node.op() == "IdentityN").expect("stats has three outputs").1.name.clone();
    let session = Session::new(&graph).unwrap();
    let output = format!("{call}:1");
    let error = session.run_named(&["top"], &[(&output, Tensor::scalar(1.0f32))], &[]).unwrap_err();
    assert!(error.message().contains("output of a call"), "{error}");
}

const DEVICES: &str = "
    node { name: 'x' op: 'Placeholder' attr { key: 'dtype' value { type: DT_FLOAT } } }
    node { name: 'before' op: 'NoOp' }
    node { name: 'call' op: 'f' device: '/job:localhost/device:CPU:1' input: 'x' input: '^before' }
    node { name: 'after' op: 'NoOp' input: '^call' }
    library { function {
      signature { name: 'f' input_arg { name: 'a' type: DT_FLOAT } output_arg { name: 'r' type: DT_FLOAT } }
      node_def { name: 'one' op: 'Const' attr { key: 'dtype' value { type: DT_FLOAT } }
                 attr { key: 'value' value { tensor { dtype: DT_FLOAT tensor_shape {} float_val: 1 } } } }
      node_def { name: 'side' op: 'Neg' input: 'a' device: '/device:CPU:0' attr { key: 'T' value { type: DT_FLOAT } } }
      node_def { name: 'sum' op: 'Add' input: 'a' input: 'one:output:0' attr { key: 'T' value { type: DT_FLOAT } }
                 attr { key: '_class' value { list { s: 'loc:@one' } } } }
      ret { key: 'r' value: 'sum:z:0' } control_ret { key: 'c' value: 'side' } } }";

#[test]
fn devices_are_merged_and_a_call_begins_and_ends_as_a_whole() {
    let graph = kolo::graph();
    import(&graph, &read_graph(DEVICES.as_bytes()).unwrap(), ImportOptions::default()).unwrap();
    let nodes = graph.snapshot();
    let node = |name: &str| nodes.node(nodes.require(name).unwrap());
    let waits = |name: &str| -> Vec<String> {
        node(name).control_inputs.iter().map(|&id| nodes.node(id).name.to_string()).collect()
    };
    assert_eq!(node("call/sum").device.to_string(), "/job:localhost/device:CPU:1");
    assert_eq!(node("call/side").device.to_string(), "/job:localhost/device:CPU:0");
    assert_eq!(node("call/sum").colocation_groups().collect::<Vec<_>>(), ["call/one"]);
    assert_eq!(waits("call/begin"), ["before"]);
    assert_eq!(waits("call/input_0"), ["call/begin"]);
    assert_eq!(waits("call/one"), ["call/begin"]);
    assert_eq!(waits("call/output_0"), ["call/side"]);
    assert_eq!(waits("call"), ["call/side"]);
    assert_eq!(waits("after"), ["call"]);
}

/// `if`, `while` and the ends of bodies, in forms that TensorFlow's Python does not write today.
const RARE: &str = "
    node { name: 'p' op: 'Placeholder' attr { key: 'dtype' value { type: DT_BOOL } } }
    node { name: 'x' op: '_Arg' attr { key: 'T' value { type: DT_FLOAT } } attr { key: 'index' value { i: 0 } } }
    node { name: 'branch' op: 'If' input: 'x' input: 'x' attr { key: 'Tcond' value { type: DT_FLOAT } }
           attr { key: 'Tin' value { list { type: DT_FLOAT } } } attr { key: 'Tout' value { list { type: DT_FLOAT } } }
           attr { key: 'then_branch' value { func { name: 'double' } } }
           attr { key: 'else_branch' value { func { name: 'same' attr { key: 'T' value { type: DT_FLOAT } } } } } }
    node { name: 'loop' op: 'While' input: 'p' attr { key: 'T' value { list { type: DT_BOOL } } }
           attr { key: 'cond' value { func { name: 'same' attr { key: 'T' value { type: DT_BOOL } } } } }
           attr { key: 'body' value { func { name: 'same' attr { key: 'T' value { type: DT_BOOL } } } } } }
    node { name: 'y' op: '_Retval' input: 'branch' attr { key: 'T' value { type: DT_FLOAT } }
           attr { key: 'index' value { i: 0 } } }
    library {
      function { signature { name: 'double' input_arg { name: 'a' type: DT_FLOAT } output_arg { name: 'r' type: DT_FLOAT } }
        node_def { name: 'arg' op: '_Arg' attr { key: 'T' value { type: DT_FLOAT } } attr { key: 'index' value { i: 0 } } }
        node_def { name: 'sum' op: 'AddN' input: 'arg:output:0' input: 'a' attr { key: 'N' value { i: 2 } } }
        node_def { name: 'end' op: '_Retval' input: 'sum:sum' attr { key: 'index' value { i: 0 } } }
        ret { key: 'r' value: 'sum:sum:0' } }
      function { signature { name: 'same' input_arg { name: 'a' type_attr: 'T' } output_arg { name: 'r' type_attr: 'T' }
                             attr { name: 'T' type: 'type' } } ret { key: 'r' value: 'a' } } }";

#[test]
fn rare_forms_run_too() {
    let graph = kolo::graph();
    import(&graph, &read_graph(RARE.as_bytes()).unwrap(), ImportOptions::default()).unwrap();
    let session = Session::new(&graph).unwrap();
    for (x, y) in [(3.0f32, 6.0f32), (0.0, 0.0), (-0.5, -1.0)] {
        assert_eq!(session.run_named(&["y"], &[("x", Tensor::scalar(x))], &[]).unwrap(), [Tensor::scalar(y)]);
    }
    let never = [("p", Tensor::scalar(false))];
    assert_eq!(session.run_named(&["loop"], &never, &[]).unwrap(), [Tensor::scalar(false)]);
}

#[test]
fn a_gradient_that_is_not_in_the_library_is_derived() {
    let call = "node { name: 'g' op: 'SymbolicGradient' input: 'x' input: 'x' \
                attr { key: 'f' value { func { name: 'double' } } } \
                attr { key: 'Tin' value { list { type: DT_FLOAT type: DT_FLOAT } } } \
                attr { key: 'Tout' value { list { type: DT_FLOAT } } } }";
    let graph = kolo::graph();
    import(&graph, &read_graph(format!("{call}{RARE}").as_bytes()).unwrap(), ImportOptions::default()).unwrap();
    let found = Session::new(&graph).unwrap().run_named(&["g"], &[("x", Tensor::scalar(3.0f32))], &[]);
    assert_eq!(found.unwrap(), [Tensor::scalar(6.0f32)]);
}

#[test]
fn saved_models_of_both_versions_run() {
    for (name, signatures) in [("saved_v2", vec!["scale", "serving_default"]), ("saved_v1", vec!["serving_default"])] {
        let model = SavedModel::load(path(name)).unwrap();
        assert_eq!(model.signatures().keys().collect::<Vec<_>>(), signatures);
        for (signature, [feeds, expected]) in steps(&format!("{name}.npz")) {
            let feeds: Vec<(&str, Tensor)> = feeds.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
            let outputs = model.run(&signature, &feeds).unwrap();
            assert_eq!(outputs.len(), expected.len());
            for (output, expected) in &expected {
                assert_close(&format!("{name} {signature} {output}"), &outputs[output], expected);
            }
        }
        let error = model.run("serve", &[]).unwrap_err();
        assert!(error.message().contains("no signature 'serve'") && error.message().contains("'serving_default'"));
        let input = if name == "saved_v2" { "x" } else { "images" };
        let error = model.run("serving_default", &[(input, Tensor::from([1.0f32]))]).unwrap_err();
        assert!(error.message().contains(&format!("input '{input}' should be float[?,3], found float[1]")), "{error}");
        let error = model.run("serving_default", &[]).unwrap_err();
        assert!(error.message().contains(&format!("needs input '{input}'")), "{error}");
    }
    let error = SavedModel::load(path("nothing")).err().expect("there is none");
    assert_eq!(error.code(), Code::NotFound);
}
