//! GraphDefs that TensorFlow wrote (`kolo-graph/tests/data`), through the real op table: what goes in comes out, and
//! nothing that can be made of them by damage does harm.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::collections::BTreeSet;
use std::path::Path;

use kolo_core::{Code, Tensor};
use kolo_graph::wire::graph::{
    Calls, DroppedAttr, ExportOptions, ImportOptions, Imported, export, import, read_graph, write_graph,
};
use kolo_graph::wire::proto::{AttrValue, GraphDef, NodeDef, Value};
use kolo_graph::wire::{tensor, text};
use kolo_graph::{Graph, VariableKind, WhileOptions, gradients};
use kolo_ops::{graph, registry};
use proptest::prelude::*;

/// Fixtures that TensorFlow would run.
const GRAPHS: &[&str] =
    &["consts", "lists", "placeholders", "ref_variables", "resource_variables", "strings", "while_v1"];

/// Fixtures that no op table makes a graph of.
const NO_GRAPHS: &[&str] = &["floats", "strings_by_hand", "variants"];

/// Fixtures that call functions.
const FUNCTIONS: &[&str] = &["functions"];

fn read(name: &str) -> GraphDef {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kolo-graph/tests/data").join(name);
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    read_graph(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[track_caller]
fn imported(def: &GraphDef) -> (Graph, Imported) {
    let graph = graph();
    let done = import(&graph, def, ImportOptions::default()).unwrap_or_else(|error| panic!("{error}"));
    (graph, done)
}

#[test]
fn graphs_survive_node_for_node() {
    for fixture in GRAPHS {
        let def = read(&format!("{fixture}.pb"));
        let (graph, done) = imported(&def);
        let written = export(&graph.nodes(), ExportOptions::default()).unwrap();
        assert_eq!(written.node.len(), def.node.len(), "{fixture}");
        for original in &def.node {
            let found = written.node.iter().find(|node| node.name == original.name);
            assert_same_node(found.expect("no node is lost"), original, &done.dropped_attrs);
        }
        assert_same_after_a_round_trip(&graph);
    }
}

/// The same, but for what the importer said it drops, and for defaults that the message left out.
#[track_caller]
fn assert_same_node(found: &NodeDef, original: &NodeDef, dropped: &[DroppedAttr]) {
    let Ok((_, signature)) = registry().find(&original.op) else {
        return assert_eq!(found, original);
    };
    let mut found = found.clone();
    let mut expected = NodeDef { experimental_debug_info: None, experimental_type: None, ..original.clone() };
    for drop in dropped.iter().filter(|drop| drop.node == original.name) {
        assert!(expected.attr.remove(&drop.attr).is_some(), "{drop:?} was never there");
        assert!(signature.attr(&drop.attr).is_none(), "{drop:?} is an attribute of {}", original.op);
    }
    expected.attr.values_mut().for_each(rewrite_tensor);
    found.attr.retain(|name, _| {
        let has_default = signature.attr(name).is_some_and(|attr| attr.default.is_some());
        expected.attr.contains_key(name) || !has_default
    });
    assert_eq!(found, expected);
}

/// The same tensor may be written in several ways; this is ours.
fn rewrite_tensor(attr: &mut AttrValue) {
    if let Some(Value::Tensor(value)) = &mut attr.value {
        **value = tensor::to_proto(&tensor::from_proto(value).unwrap()).unwrap();
    }
}

/// Written and read again, as bytes, as text and without defaults, the graph is the same.
#[track_caller]
fn assert_same_after_a_round_trip(graph: &Graph) {
    let expected = graph.nodes().to_string();
    let def = export(&graph.nodes(), ExportOptions::default()).unwrap();
    let stripped = export(&graph.nodes(), ExportOptions { strip_default_attrs: true, ..ExportOptions::default() });
    let forms = [write_graph(&def).unwrap(), text::print(&def).into_bytes(), write_graph(&stripped.unwrap()).unwrap()];
    for bytes in forms {
        let (again, done) = imported(&read_graph(&bytes).unwrap());
        assert_eq!(done.dropped_attrs, []);
        assert_eq!(again.nodes().to_string(), expected);
    }
}

#[test]
fn what_is_no_graph_of_ours_is_refused_by_name() {
    let refused = |fixture: &str, code: Code, parts: &[&str]| {
        assert!(NO_GRAPHS.contains(&fixture));
        let graph = graph();
        let error = import(&graph, &read(&format!("{fixture}.pb")), ImportOptions::default()).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        for part in parts {
            assert!(error.to_string().contains(part), "'{error}' does not contain '{part}'");
        }
        assert!(graph.nodes().is_empty());
    };
    refused("floats", Code::InvalidArgument, &["Const '", "the dtype is missing"]);
    refused("strings_by_hand", Code::InvalidArgument, &["'ñandú' is not a valid node name"]);
    refused("variants", Code::InvalidArgument, &["PartitionedCall 'call'", "function 'f' takes 1 inputs, found 0"]);
}

#[test]
fn calls_survive_where_they_are_kept_and_run_as_plain_nodes_elsewhere() {
    for fixture in FUNCTIONS {
        let def = read(&format!("{fixture}.pb"));
        let kept = graph();
        let options = ImportOptions { calls: Calls::Keep, ..ImportOptions::default() };
        let done = import(&kept, &def, options).unwrap_or_else(|error| panic!("{error}"));
        let written = export(&kept.nodes(), ExportOptions::default()).unwrap();
        assert_eq!(written.library, def.library);
        for original in &def.node {
            let found = written.node.iter().find(|node| node.name == original.name);
            assert_same_node(found.expect("no node is lost"), original, &done.dropped_attrs);
        }
        let (lowered, done) = imported(&def);
        assert_eq!(done.nodes.len(), def.node.len());
        let nodes = lowered.snapshot();
        assert!(nodes.iter().all(|(_, node)| !node.op().contains("Call")), "{nodes}");
        assert_eq!(export(&nodes, ExportOptions::default()).unwrap().library, def.library);
        assert_same_after_a_round_trip(&lowered);
    }
}

#[test]
fn both_forms_of_a_file_are_the_same_graph() {
    for fixture in GRAPHS.iter().chain(NO_GRAPHS).chain(FUNCTIONS) {
        let [bytes, text] = ["pb", "pbtxt"].map(|form| write_graph(&read(&format!("{fixture}.{form}"))).unwrap());
        assert!(bytes == text, "{fixture}");
    }
}

#[test]
fn a_graph_described_here_comes_back() {
    let g = graph();
    g.set_seed(7);
    let x = g.placeholder::<f32>("x", [None, Some(3)]);
    let large = g.constant(Tensor::from_vec([3, 100], (0..300).map(|i| i as f32).collect()).unwrap());
    let (w, v) = g.device("/job:ps/task:0", || {
        (g.variable("w", [1.0f32, 2.0, 3.0]), g.new_variable("v", [1.0f32; 3]).kind(VariableKind::Reference).build())
    });
    let y = g.name_scope("model", || g.device("/gpu:0", || x * w.read() + v.read() * 2.0 - 0.5));
    let axes = g.constant([0i32, 1]);
    let loss = g.op("Sum").input(y).input(axes).attr("keep_dims", true).out();
    let grad = gradients(&[y], &[w.handle()]).unwrap()[0].unwrap().dense().unwrap();
    let step = g.control_dependencies(&[loss.operation()], || w.assign_sub(grad * 0.1));
    g.group("train", &[step, v.assign_add(v.read()), large.operation()]);
    g.global_variables_initializer();
    g.check().unwrap();
    assert_same_after_a_round_trip(&g);
}

#[test]
fn a_loop_described_here_comes_back() {
    let g = graph();
    let init = [g.constant(0i32), g.constant([[1.0f32, 2.0]])];
    let limit = g.constant(10i32);
    let last = g.while_loop(
        &init,
        |g, vars| g.op("Less").input(vars[0]).input(limit).out(),
        |_, vars| vec![vars[0] + 1, vars[1] * 2.0],
        WhileOptions::default(),
    );
    let last = last.unwrap();
    assert_eq!(last[1].shape().to_string(), "[1,2]");
    g.check().unwrap();
    assert_same_after_a_round_trip(&g);
}

/// Sixteen packs of one another, each ten times, have 10^16 ways to their root.
#[test]
fn deep_shape_arithmetic_does_not_explode() {
    for op in ["Pack", "ConcatV2"] {
        let g = graph();
        let mut value = g.constant([1i32]);
        let axis = g.constant(0i32);
        for _ in 0..16 {
            let many = g.op(op).inputs([value; 10]);
            value = if op == "Pack" { many.out() } else { many.input(axis).out() };
        }
        // Whether this can be made is not the question, but how long it takes.
        let _ = g.op("Fill").input(value).input(g.constant(1.0f32)).try_build();
    }
}

/// One change to a graph: at a node, an input or attribute replaced by one from elsewhere in the graph, or removed.
#[derive(Clone, Debug)]
struct Change {
    what: u8,
    node: prop::sample::Index,
    slot: prop::sample::Index,
    from_node: prop::sample::Index,
    from_slot: prop::sample::Index,
    number: i64,
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let number = prop_oneof![-3..6_i64, Just(i64::MAX), Just(i64::MIN), Just(1 << 31), Just(1 << 40), Just(1 << 62)];
    let index = any::<prop::sample::Index>;
    let change = (any::<u8>(), index(), index(), index(), index(), number).prop_map(
        |(what, node, slot, from_node, from_slot, number)| Change { what, node, slot, from_node, from_slot, number },
    );
    prop::collection::vec(change, 1..5)
}

fn apply(def: &mut GraphDef, change: &Change) {
    let n_nodes = def.node.len();
    let from = def.node[change.from_node.index(n_nodes)].clone();
    let node = &mut def.node[change.node.index(n_nodes)];
    let slot = |n: usize| change.slot.index(n.max(1));
    let key = node.attr.keys().nth(slot(node.attr.len())).cloned();
    match (change.what % 8, key) {
        (0, _) if !node.input.is_empty() => {
            let slot = slot(node.input.len());
            node.input[slot] = format!("{}:{}", from.name, change.number.rem_euclid(3));
        }
        (1, _) if !node.input.is_empty() => drop(node.input.remove(slot(node.input.len()))),
        (2, _) => node.input.push(from.name),
        (3, _) => node.op = from.op,
        (4 | 5, Some(key)) if !from.attr.is_empty() => {
            let value = from.attr.into_values().nth(change.from_slot.index(n_nodes) % 3);
            node.attr.insert(key, value.unwrap_or_default());
        }
        (6, Some(key)) => drop(node.attr.remove(&key)),
        _ => node.attr.values_mut().for_each(|attr| renumber(attr, change)),
    }
}

/// Puts another number wherever there is one.
fn renumber(attr: &mut AttrValue, change: &Change) {
    let number = change.number;
    match &mut attr.value {
        Some(Value::I(value)) => *value = number,
        Some(Value::Shape(shape)) if !shape.dim.is_empty() => {
            let slot = change.slot.index(shape.dim.len());
            shape.dim[slot].size = number;
        }
        Some(Value::Tensor(tensor)) => {
            tensor.int_val.iter_mut().for_each(|value| *value = number as i32);
            if let Some(dim) = tensor.tensor_shape.as_mut().and_then(|shape| shape.dim.first_mut())
                && change.from_slot.index(2) == 0
            {
                dim.size = number;
            }
        }
        Some(Value::List(list)) => list.i.iter_mut().for_each(|value| *value = number),
        _ => {}
    }
}

/// Whatever the message says, it is refused or it makes a graph, and one that survives a round trip.
fn check(def: &GraphDef) -> Result<(), TestCaseError> {
    let within = |max_filled_bytes| ImportOptions { max_filled_bytes, ..ImportOptions::default() };
    let first = graph();
    if import(&first, def, within(1 << 20)).is_err() {
        prop_assert!(first.nodes().is_empty());
        return Ok(());
    }
    let written = export(&first.nodes(), ExportOptions::default()).unwrap();
    let second = graph();
    // Equal elements are written as one, so more is filled in the second time.
    let done = import(&second, &written, within(1 << 24)).map_err(|error| TestCaseError::fail(error.to_string()))?;
    prop_assert_eq!(&done.dropped_attrs, &vec![]);
    prop_assert_eq!(second.nodes().to_string(), first.nodes().to_string());
    Ok(())
}

/// A fixture, less the nodes whose ops are missing and all that need them.
fn what_is_readable(fixture: &str) -> GraphDef {
    let mut def = read(&format!("{fixture}.pb"));
    loop {
        let names: BTreeSet<String> = def.node.iter().map(|node| node.name.clone()).collect();
        let known = |input: &String| {
            let name = input.trim_start_matches('^');
            names.contains(name.split(':').next().unwrap_or(name))
        };
        let n_before = def.node.len();
        def.node.retain(|node| registry().find(&node.op).is_ok() && node.input.iter().all(known));
        if def.node.len() == n_before {
            return def;
        }
    }
}

proptest! {
    #[test]
    fn damaged_bytes_do_no_harm(
        fixture in prop::sample::select([GRAPHS, NO_GRAPHS, FUNCTIONS].concat()),
        changes in prop::collection::vec(
            (any::<prop::sample::Index>(), 0..4_usize, prop::collection::vec(any::<u8>(), 0..3)), 1..6),
    ) {
        let mut bytes = write_graph(&what_is_readable(fixture)).unwrap();
        for (at, n_taken, put) in changes {
            let at = at.index(bytes.len() + 1);
            let end = bytes.len().min(at + n_taken);
            bytes.splice(at..end, put);
        }
        if let Ok(def) = read_graph(&bytes) {
            check(&def)?;
        }
    }

    #[test]
    fn scrambled_graphs_do_no_harm(fixture in prop::sample::select([GRAPHS, FUNCTIONS].concat()), changes in changes()) {
        let mut def = what_is_readable(fixture);
        for change in &changes {
            apply(&mut def, change);
        }
        check(&def)?;
    }
}
