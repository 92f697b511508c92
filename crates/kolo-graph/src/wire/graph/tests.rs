//! Import and export over a handful of ops made for the purpose; `kolo-ops` repeats the round trips with the real ones.

use std::sync::LazyLock;

use kolo_core::{Code, DType, PartialShape};

use super::*;
use crate::wire::proto::{GraphDef, NodeDef, VersionDef};
use crate::{Flow, Graph, OpDef, OpRegistry, Work, shape_fns};

const fn op(name: &'static str, signature: &'static str) -> OpDef {
    OpDef { name, signature, ..OpDef::BASE }
}

const fn flow(name: &'static str, signature: &'static str, flow: Flow) -> OpDef {
    OpDef { name, signature, flow, shape: shape_fns::same_as_input_0, ..OpDef::BASE }
}

static OPS: LazyLock<OpRegistry> = LazyLock::new(|| {
    let merge = |ctx: &crate::InferCtx<'_>| {
        let all = (1..ctx.n_inputs()).fold(ctx.input(0).clone(), |shape, i| shape.relax(ctx.input(i)));
        Ok(vec![all, PartialShape::scalar()])
    };
    OpRegistry::new([
        op("NoOp", "() -> ()"),
        OpDef { work: Work::Constant, ..op("Const", "() -> (output:dtype) ; value:tensor, dtype:type") },
        OpDef {
            shape: shape_fns::from_shape_attr,
            work: Work::Placeholder,
            ..op("Placeholder", "() -> (output:dtype) ; dtype:type, shape:shape=<unknown>")
        },
        OpDef { work: Work::PassesOn, ..flow("Identity", "(input:T) -> (output:T) ; T:type", Flow::Plain) },
        op("Add", "(x:T, y:T) -> (z:T) ; T:type{float,int32}"),
        op("Split", "(value:T) -> (output:N*T) ; N:int>=1, T:type"),
        op("Lists", "() -> () ; ints:list(int), types:list(type)=[float,int32], pad:string=\"SAME\", eps:float=0.5"),
        op("VariableV2", "() -> (ref:Ref(dtype)) ; shape:shape, dtype:type"),
        op("AssignAdd", "(ref:Ref(T), value:T) -> (output_ref:Ref(T)) ; T:type"),
        flow("Enter", "(data:T) -> (output:T) ; T:type, frame_name:string", Flow::Enter),
        flow("NextIteration", "(data:T) -> (output:T) ; T:type", Flow::NextIteration),
        OpDef {
            shape: merge,
            ..flow("Merge", "(inputs:N*T) -> (output:T, value_index:int32) ; T:type, N:int>=1", Flow::Merge)
        },
        // One row more.
        OpDef {
            shape: |ctx| Ok(vec![PartialShape::new(&[ctx.input(0).dim(0).map(|n| n + 1), ctx.input(0).dim(1)])]),
            ..op("Grow", "(x:T) -> (y:T) ; T:type")
        },
        // Columns as rows.
        OpDef {
            shape: |ctx| Ok(vec![PartialShape::new(&[ctx.input(0).dim(1), ctx.input(0).dim(0)])]),
            ..op("Transpose", "(x:T) -> (y:T) ; T:type")
        },
        OpDef {
            shape: |ctx| match ctx.input(0).dim(0) {
                Some(2) => Err(Error::invalid_argument("two rows")),
                _ => Ok(vec![ctx.input(0).clone()]),
            },
            ..op("NotTwo", "(x:T) -> (y:T) ; T:type")
        },
    ])
    .expect("the signatures are well-formed")
});

fn graph() -> Graph {
    Graph::new(&OPS)
}

#[track_caller]
fn parse(nodes: &str) -> GraphDef {
    text::parse(nodes).unwrap()
}

#[track_caller]
fn imported(nodes: &str) -> Graph {
    let graph = graph();
    import(&graph, &parse(nodes), ImportOptions::default()).unwrap();
    graph
}

/// The message cannot be imported, for a reason in which all of `parts` occur, and the graph is as it was.
#[track_caller]
fn refused(nodes: &str, code: Code, parts: &[&str]) {
    let graph = graph();
    import(&graph, &parse(r#"node { name: "before" op: "NoOp" }"#), ImportOptions::default()).unwrap();
    let error = import(&graph, &parse(nodes), ImportOptions::default()).unwrap_err();
    assert_eq!(error.code(), code, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "'{error}' does not contain '{part}'");
    }
    assert_eq!(graph.nodes().to_string(), "before = NoOp()\n");
    assert_eq!(graph.nodes().find("a"), None);
}

const X: &str = r#"node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }"#;

fn with_t(name: &str, op: &str, inputs: &[&str]) -> String {
    let inputs: String = inputs.iter().map(|input| format!("input: '{input}' ")).collect();
    format!("node {{ name: '{name}' op: '{op}' {inputs} attr {{ key: 'T' value {{ type: DT_FLOAT }} }} }}\n")
}

fn no_op(name: &str, rest: &str) -> String {
    format!("node {{ name: '{name}' op: 'NoOp' {rest} }}\n")
}

#[test]
fn nodes_may_come_in_any_order() {
    let nodes = [with_t("c", "Add", &["b", "x:0", "^d"]), with_t("b", "Identity", &["x"]), X.into(), no_op("d", "")];
    let graph = graph();
    let done = import(&graph, &parse(&nodes.concat()), ImportOptions::default()).unwrap();
    let expected = "x = Placeholder[dtype=float, shape=<unknown>]() -> float<unknown>\n\
                    b = Identity[T=float](x:0) -> float<unknown>\n\
                    d = NoOp()\n\
                    c = Add[T=float](b:0, x:0, ^d) -> float<unknown>\n";
    assert_eq!(graph.nodes().to_string(), expected);
    let names: Vec<_> = done.nodes.iter().map(|&id| graph.nodes().node(id).name.to_string()).collect();
    assert_eq!(names, ["c", "b", "x", "d"]);
}

#[test]
fn missing_attributes_take_their_defaults_and_strange_ones_are_dropped() {
    let graph = graph();
    let def = parse(
        r#"node { name: "a" op: "Lists"
             attr { key: "ints" value { } }
             attr { key: "new_option" value { b: true } }
             attr { key: "_class" value { list { s: "loc:@b" } } }
             attr { key: "_output_shapes" value { list { shape { dim { size: -1 } } } } }
             attr { key: "_ref" value { type: DT_FLOAT_REF } }
           }
           versions { producer: 1645 min_consumer: 12 }"#,
    );
    let done = import(&graph, &def, ImportOptions::default()).unwrap();
    assert_eq!(done.producer, 1645);
    let dropped: Vec<_> = done.dropped_attrs.iter().map(|d| format!("{}.{}: {}", d.node, d.attr, d.reason)).collect();
    let expected = [
        "a._ref: DT_FLOAT_REF is the type of a reference, which only an edge can have",
        "a.new_option: Lists has no such attribute",
    ];
    assert_eq!(dropped, expected);
    let expected = "a = Lists[_class=[\"loc:@b\"], _output_shapes=[[?]], eps=0.5, ints=[], pad=\"SAME\", \
                    types=[float, int32]]()\n";
    assert_eq!(graph.nodes().to_string(), expected);

    let written = export(&graph.nodes(), ExportOptions { strip_default_attrs: true, producer: 1645 }).unwrap();
    assert_eq!(written.versions, def.versions);
    let names: Vec<_> = written.node[0].attr.keys().collect();
    assert_eq!(names, ["_class", "_output_shapes", "ints"]);
    let written = export(&graph.nodes(), ExportOptions::default()).unwrap();
    assert_eq!(written.node[0].attr.len(), 6);
    assert_eq!(written.versions, Some(VersionDef { producer: 134, min_consumer: 12, bad_consumers: vec![] }));
}

#[test]
fn a_prefix_goes_before_names_inputs_and_groups() {
    let nodes = [
        X.to_owned(),
        with_t("y", "Identity", &["x"]),
        no_op("d", "input: '^y' attr { key: '_class' value { list { s: ['loc:@y', 'loc:@elsewhere'] } } }"),
    ];
    let graph = graph();
    for prefix in ["one", "two/"] {
        let options = ImportOptions { prefix: Some(prefix.into()), ..ImportOptions::default() };
        import(&graph, &parse(&nodes.concat()), options).unwrap();
    }
    let text = graph.nodes().to_string();
    assert!(text.contains("one/d = NoOp[_class=[\"loc:@one/y\", \"loc:@elsewhere\"]](^one/y)\n"), "{text}");
    assert!(text.contains("two/y = Identity[T=float](two/x:0)"), "{text}");
    // With a prefix, a message stands alone.
    let options = ImportOptions { prefix: Some("three".into()), ..ImportOptions::default() };
    let error = import(&graph, &parse(&with_t("z", "Identity", &["one/x"])), options).unwrap_err();
    assert!(error.message().contains("Unknown input node 'one/x'"), "{error}");
}

#[test]
fn a_second_message_may_build_on_the_first() {
    let graph = imported(X);
    import(&graph, &parse(&with_t("y", "Identity", &["x:0", "^x"])), ImportOptions::default()).unwrap();
    let x = graph.nodes().endpoint("x:0").unwrap();
    for key in ["in", "in:0"] {
        let options = ImportOptions {
            prefix: Some(format!("p{}", key.len())),
            input_map: [(key.to_owned(), x)].into(),
            ..ImportOptions::default()
        };
        import(&graph, &parse(&with_t("z", "Add", &["in", "in:0"])), options).unwrap();
    }
    let text = graph.nodes().to_string();
    assert!(text.contains("y = Identity[T=float](x:0, ^x)"), "{text}");
    assert!(text.contains("p2/z = Add[T=float](x:0, x:0)"), "{text}");
    let error = import(&graph, &parse(X), ImportOptions::default()).unwrap_err();
    assert!(error.message().contains("Duplicate node name in graph: 'x'"), "{error}");
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    use Code::{InvalidArgument, Unimplemented};
    let first = no_op("a", "");
    let bad = |code, rest: String, parts: &[&str]| refused(&format!("{first}{X}{rest}"), code, parts);
    bad(InvalidArgument, no_op("a", ""), &["Duplicate node name in graph: 'a'"]);
    bad(InvalidArgument, no_op("before", ""), &["Duplicate node name in graph: 'before'"]);
    bad(InvalidArgument, no_op("ñ", ""), &["'ñ' is not a valid node name"]);
    bad(InvalidArgument, no_op("", ""), &["not a valid node name"]);
    bad(InvalidArgument, no_op("b", "device: '/nowhere:3'"), &["NoOp 'b'", "Malformed device", "/nowhere:3"]);
    bad(InvalidArgument, no_op("b", "input: '^gone'"), &["NoOp 'b'", "Unknown input node 'gone'"]);
    bad(InvalidArgument, no_op("b", "input: 'x'"), &["NoOp 'b'", "takes 0 inputs, found 1"]);
    bad(InvalidArgument, with_t("b", "Identity", &["y"]), &["Identity 'b'", "Unknown input node 'y'"]);
    bad(InvalidArgument, with_t("b", "Identity", &[""]), &["Identity 'b'", "Unknown input node ''"]);
    bad(InvalidArgument, with_t("b", "Identity", &["x:99999999999"]), &["not the name of an output"]);
    bad(InvalidArgument, with_t("b", "Identity", &["x:1"]), &["invalid output 1 of source node x which has 1 outputs"]);
    bad(InvalidArgument, with_t("b", "Identity", &["^a", "x"]), &["Control dependencies must come after", "'x'"]);
    bad(InvalidArgument, with_t("b", "Add", &["x"]), &["Add 'b'", "input 'y' is missing"]);
    bad(InvalidArgument, with_t("b", "AssignAdd", &["x", "x"]), &["should be a reference"]);
    let attr =
        |value: &str| format!("node {{ name: 'b' op: 'Identity' input: 'x' attr {{ key: 'T' value {{ {value} }} }} }}");
    bad(InvalidArgument, attr("type: DT_FLOAT_REF"), &["Identity 'b'", "attribute 'T'", "DT_FLOAT_REF"]);
    bad(InvalidArgument, attr("i: 3"), &["Identity 'b'", "attribute 'T' should be a type, found int 3"]);
    bad(InvalidArgument, attr("type: DT_INT32"), &["Identity 'b'", "should be int32, found float"]);
    bad(InvalidArgument, attr(""), &["attribute 'T'", "no value"]);
    bad(Unimplemented, attr("type: DT_INT4"), &["DT_INT4 is not supported"]);
    let version = |rest: &str| format!("versions {{ producer: 9 {rest} }}");
    bad(InvalidArgument, version("min_consumer: 99999"), &["min consumer version 99999 above current version"]);
    bad(InvalidArgument, version("bad_consumers: 2474"), &["disallows consumer version 2474"]);
}

/// A node of an op that nobody knows, with attributes of kinds that have no value here either.
const FROB: &str = r#"node { name: "frob" op: "Frob" input: "x" input: "^x" device: "/job:w/replica:0/task:1"
    attr { key: "mode" value { s: "fast" } } attr { key: "empty" value { } }
    attr { key: "odd" value { type: DT_INT4 } } attr { key: "_class" value { list { s: "loc:@x" } } } }"#;

#[test]
fn nodes_of_unknown_ops_are_carried_through_and_written_as_they_came() {
    let reader = with_t("y", "Add", &["frob:2", "x"]);
    let graph = imported(&format!("{X}{FROB}{reader}"));
    let text = graph.nodes().to_string();
    assert!(text.contains("frob = Frob[_class=[\"loc:@x\"]](x:0, ^x)"), "{text}");
    // What reads an output says what it is.
    assert!(text.contains("-> variant<unknown>, variant<unknown>, float<unknown>"), "{text}");
    let written = export(&graph.nodes(), ExportOptions::default()).unwrap();
    assert_eq!(written.node[1].attr, parse(FROB).node[0].attr);
    assert_eq!((&*written.node[1].op, &*written.node[1].device), ("Frob", "/job:w/replica:0/task:1"));
    assert_eq!(written.node[1].input, ["x", "^x"]);
    let stripped = export(&graph.nodes(), ExportOptions { strip_default_attrs: true, ..ExportOptions::default() });
    assert_eq!(stripped.unwrap().node[1], written.node[1]);
    // A later message may read an output that nobody has read before, and says its dtype.
    import(&graph, &parse(&with_t("z", "Identity", &["frob:4"])), ImportOptions::default()).unwrap();
    let at = graph.nodes().endpoint("frob:4").unwrap();
    assert_eq!(graph.nodes().output(at).dtype, DType::F32);
    let error = import(&graph, &parse(&with_t("far", "Identity", &["frob:99999"])), ImportOptions::default());
    assert!(error.unwrap_err().message().contains("invalid output 99999 of source node frob"));
    let prefixed = ImportOptions { prefix: Some("p".into()), ..ImportOptions::default() };
    import(&graph, &parse(&format!("{X}{FROB}")), prefixed).unwrap();
    let written = export(&graph.nodes(), ExportOptions::default()).unwrap();
    let class = &written.node.iter().find(|node| node.name == "p/frob").unwrap().attr["_class"];
    assert_eq!(class, &parse("node { attr { key: 'c' value { list { s: 'loc:@p/x' } } } }").node[0].attr["c"]);
}

#[test]
fn attributes_list_the_outputs_of_unknown_ops() {
    let next = "node { name: 'next' op: 'Next' attr { key: 'output_types' value { list { type: DT_INT64 type: DT_STRING } } } }";
    let graph = imported(next);
    let nodes = graph.snapshot();
    let dtypes: Vec<DType> =
        nodes.iter().flat_map(|(_, node)| node.outputs.iter().map(|output| output.dtype)).collect();
    assert_eq!(dtypes, [DType::I64, DType::Str]);
    let error = nodes.endpoint("next:2").unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.message().contains("Op type not registered 'Next'"), "{error}");
}

#[test]
fn functions_may_use_unknown_ops() {
    let function = "library { function { signature { name: 'f' input_arg { name: 'a' type: DT_FLOAT } \
        output_arg { name: 'r' type: DT_FLOAT } output_arg { name: 's' type: DT_FLOAT } } \
        node_def { name: 'frob' op: 'Frob' input: 'a' attr { key: 'mode' value { s: 'fast' } } } \
        node_def { name: 'same' op: 'Identity' input: 'frob:r:0' attr { key: 'T' value { type: DT_FLOAT } } } \
        ret { key: 'r' value: 'same:output:0' } ret { key: 's' value: 'frob:q:1' } } }";
    let call = "node { name: 'call' op: 'PartitionedCall' input: 'x' attr { key: 'f' value { func { name: 'f' } } } \
        attr { key: 'Tin' value { list { type: DT_FLOAT } } } attr { key: 'Tout' value { list { type: DT_FLOAT type: DT_FLOAT } } } }";
    let graph = imported(&format!("{X}{call}{function}"));
    let text = graph.nodes().to_string();
    assert!(text.contains("call/frob = Frob(x:0)"), "{text}");
    assert!(text.contains("call/same = Identity[T=float](call/frob:0)"), "{text}");
    assert!(text.contains("call/frob:2"), "{text}");
    let written = export(&graph.nodes(), ExportOptions::default()).unwrap();
    assert_eq!(written.library, parse(function).library);
    let frob = written.node.iter().find(|node| node.op == "Frob").unwrap();
    assert_eq!(frob.attr, parse("node { attr { key: 'mode' value { s: 'fast' } } }").node[0].attr);
}

#[test]
fn calls_are_written_out_under_the_name_of_the_call() {
    let library = "library { function { signature { name: 'double' input_arg { name: 'a' type_attr: 'T' } \
                   output_arg { name: 'r' type_attr: 'T' } attr { name: 'T' type: 'type' } } \
                   node_def { name: 'sum' op: 'Add' input: 'a' input: 'a' attr { key: 'T' value { placeholder: 'T' } } } \
                   ret { key: 'r' value: 'sum:z:0' } } }";
    imported(&format!("{X}{library}"));
    let t = "attr { key: 'T' value { type: DT_FLOAT } }";
    for node in [
        format!("node {{ name: 'b' op: 'double' input: 'x' {t} }}"),
        format!(
            "node {{ name: 'b' op: 'PartitionedCall' input: 'x' attr {{ key: 'f' value {{ func {{ name: 'double' {t} }} }} }} }}"
        ),
    ] {
        let graph = imported(&format!("{X}{node}{library}"));
        let nodes = graph.snapshot();
        let names: Vec<&str> = nodes.iter().map(|(_, node)| &*node.name).collect();
        assert_eq!(names, ["x", "b/sum", "b"]);
        assert_eq!(nodes.output(nodes.endpoint("b").unwrap()).dtype, DType::F32);
        let written = export(&nodes, ExportOptions::default()).unwrap();
        assert_eq!(written.library, read_graph(library.as_bytes()).unwrap().library);
    }
    let missing = "node { name: 'b' op: 'PartitionedCall' attr { key: 'f' value { func { name: 'doubl' } } } }";
    refused(&format!("{missing}{library}"), Code::NotFound, &["'b'", "function 'doubl'", "did you mean 'double'?"]);
    let untyped = "node { name: 'b' op: 'double' input: 'x' }";
    refused(&format!("{X}{untyped}{library}"), Code::InvalidArgument, &["'sum'", "attribute 'T'", "does not give"]);
    let alone = format!("node {{ name: 'b' op: 'double' {t} }}");
    refused(&format!("{alone}{library}"), Code::InvalidArgument, &["'b'", "takes 1 inputs, found 0"]);
    let again = "library { function { signature { name: 'f' } node_def { name: 'g' op: 'f' } } }";
    refused(&format!("node {{ name: 'b' op: 'f' }}{again}"), Code::Unimplemented, &["'f' calls itself", "f calls f"]);
    // Nor does a derived gradient end that asks for itself, or one that lacks what it is given.
    let attrs = "attr { key: 'f' value { func { name: 'f' } } } attr { key: 'Tin' value { list { type: DT_FLOAT type: DT_FLOAT } } }";
    let again = format!(
        "library {{ function {{ signature {{ name: 'f' input_arg {{ name: 'a' type: DT_FLOAT }} output_arg {{ name: 'r' type: DT_FLOAT }} }} \
         node_def {{ name: 'g' op: 'SymbolicGradient' input: 'a' input: 'a' {attrs} \
         attr {{ key: 'Tout' value {{ list {{ type: DT_FLOAT }} }} }} }} ret {{ key: 'r' value: 'g:output:0' }} }} }}"
    );
    let gradient = |inputs: &str| format!("{X}node {{ name: 'b' op: 'SymbolicGradient' {inputs} {attrs} }}{again}");
    refused(&gradient("input: 'x' input: 'x'"), Code::Unimplemented, &["'f' calls itself"]);
    refused(
        &gradient("input: 'x'"),
        Code::InvalidArgument,
        &["the gradients of its 1 outputs, found 1 inputs of 2 types"],
    );
}

#[test]
fn functions_that_call_others_twice_do_not_fill_the_memory() {
    // 2^40 calls, even if nothing is in them.
    let mut text = "node { name: 'b' op: 'f0' } library { ".to_owned();
    for i in 0..40 {
        let call = |name: &str| format!("node_def {{ name: '{name}' op: 'f{}' }}", i + 1);
        text += &format!("function {{ signature {{ name: 'f{i}' }} {} {} }}", call("p"), call("q"));
    }
    text += "function { signature { name: 'f40' } } }";
    let options = ImportOptions { max_function_nodes: 1000, ..ImportOptions::default() };
    let error = import(&graph(), &parse(&text), options).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.message().contains("more than 1000 nodes"), "{error}");
}

#[test]
fn cycles_are_named() {
    let cycle = [with_t("a", "Identity", &["b"]), with_t("b", "Identity", &["c"]), with_t("c", "Identity", &["b"])];
    refused(&cycle.concat(), Code::InvalidArgument, &["'b' needs 'c' needs 'b'"]);
    refused(&no_op("a", "input: '^a'"), Code::InvalidArgument, &["'a' needs 'a'"]);
    // A merge is no excuse: only what comes from a NextIteration goes round.
    let merge = [X.into(), with_t("a", "Merge", &["x", "b"]), with_t("b", "Identity", &["a"])];
    let merge = merge.concat().replace("op: 'Merge'", "op: 'Merge' attr { key: 'N' value { i: 2 } }");
    refused(&merge, Code::InvalidArgument, &["'a' needs 'b' needs 'a'"]);
    let many: String = (0..20).map(|i| no_op(&format!("n{i}"), &format!("input: '^n{}'", (i + 1) % 20))).collect();
    refused(&many, Code::InvalidArgument, &["'n7' needs 12 more nodes"]);
}

/// A loop over a float of this shape: Enter, Merge, then `body`, NextIteration and back.
fn a_loop(shape: &str, body: &str) -> String {
    let shape = format!("op: \"Placeholder\" attr {{ key: 'shape' value {{ shape {{ {shape} }} }} }}");
    let nodes = [
        X.replace("op: \"Placeholder\"", &shape),
        with_t("enter", "Enter", &["x"]).replace("attr", "attr { key: 'frame_name' value { s: 'f' } } attr"),
        with_t("merge", "Merge", &["enter", "next"]).replace("attr", "attr { key: 'N' value { i: 2 } } attr"),
        with_t("body", body, &["merge"]),
        with_t("next", "NextIteration", &["body"]),
    ];
    nodes.concat()
}

const TWO_BY_THREE: &str = "dim { size: 2 } dim { size: 3 }";

#[test]
fn loops_are_closed() {
    let graph = imported(&a_loop(TWO_BY_THREE, "Identity"));
    let text = graph.nodes().to_string();
    assert!(text.contains("merge = Merge[N=2, T=float](enter:0, next:0) -> float[2,3], int32[]\n"), "{text}");
    let written = export(&graph.nodes(), ExportOptions::default()).unwrap();
    let merge = written.node.iter().find(|node| node.name == "merge").unwrap();
    assert_eq!(merge.input, ["enter", "next"]);
    let again = self::graph();
    import(&again, &written, ImportOptions::default()).unwrap();
    assert_eq!(again.nodes().to_string(), text);
}

#[test]
fn shapes_of_loops_hold_in_every_iteration() {
    let merge_shape = |shape: &str, body: &str| {
        let graph = imported(&a_loop(shape, body));
        let nodes = graph.nodes();
        let [merge, next] = ["merge:0", "next:0"].map(|name| nodes.output(nodes.endpoint(name).unwrap()).shape.clone());
        assert_eq!(merge.relax(&next), merge, "what comes round is of the merge's shape");
        merge.to_string()
    };
    assert_eq!(merge_shape(TWO_BY_THREE, "Identity"), "[2,3]");
    assert_eq!(merge_shape(TWO_BY_THREE, "Grow"), "[?,3]");
    assert_eq!(merge_shape(TWO_BY_THREE, "Transpose"), "[?,?]");
    assert_eq!(merge_shape("dim { size: 3 } dim { size: 3 }", "Transpose"), "[3,3]");
    // The guess is refused by the body, but the body may never run.
    assert_eq!(merge_shape(TWO_BY_THREE, "NotTwo"), "<unknown>");
}

#[test]
fn shapes_of_nested_loops_hold_in_every_iteration() {
    for (outer, inner) in [("Grow", "Transpose"), ("Transpose", "Grow"), ("Grow", "Grow"), ("Grow", "NotTwo")] {
        let merge =
            |name, inputs| with_t(name, "Merge", inputs).replace("attr", "attr { key: 'N' value { i: 2 } } attr");
        let nodes = a_loop(TWO_BY_THREE, outer).replace("input: 'body'", "input: 'inner'");
        let nodes = [
            nodes,
            merge("inner", &["body", "inner_next"]),
            with_t("inner_body", inner, &["inner"]),
            with_t("inner_next", "NextIteration", &["inner_body"]),
        ];
        let graph = imported(&nodes.concat());
        let nodes = graph.nodes();
        for name in ["merge", "inner"] {
            let merge = nodes.node(nodes.find(name).unwrap());
            for &input in &merge.inputs {
                let shape = &merge.outputs[0].shape;
                assert_eq!(shape.relax(&nodes.output(input).shape), *shape, "{outer} {inner}:\n{}", *nodes);
            }
        }
    }
}

#[test]
fn loops_that_cannot_be_closed_are_refused() {
    let good = a_loop(TWO_BY_THREE, "Identity");
    let bad = |from: &str, to: &str, parts: &[&str]| {
        assert!(good.contains(from));
        refused(&good.replace(from, to), Code::InvalidArgument, parts);
    };
    bad("input: 'enter' input: 'next'", "input: 'next' input: 'next'", &["Merge 'merge'", "none from outside"]);
    bad("input: 'next'", "input: 'next:1'", &["Merge 'merge'", "invalid output 1 of source node next"]);
    let int = "node { name: 'i' op: 'Placeholder' attr { key: 'dtype' value { type: DT_INT32 } } }";
    let next = with_t("next", "NextIteration", &["body"]);
    let other = next.replace("'body'", "'i'").replace("DT_FLOAT", "DT_INT32");
    bad(&next, &format!("{other}{int}"), &["Merge 'merge'", "input 1 should be float, found int32 from 'next'"]);
}

#[test]
fn references_and_many_outputs_come_back() {
    let nodes = [
        "node { name: 'v' op: 'VariableV2' device: '/job:ps/task:1' attr { key: 'dtype' value { type: DT_FLOAT } }
           attr { key: 'shape' value { shape { } } } }"
            .to_owned(),
        with_t("s", "Split", &["v"]).replace("attr", "attr { key: 'N' value { i: 3 } } attr"),
        with_t("add", "AssignAdd", &["v", "s:2", "^s"]),
    ];
    let def = parse(&nodes.concat());
    let graph = imported(&nodes.concat());
    let text = graph.nodes().to_string();
    assert!(text.contains("add = AssignAdd[T=float](v:0, s:2, ^s) -> float&<unknown>\n"), "{text}");
    assert_eq!(export(&graph.nodes(), ExportOptions::default()).unwrap().node, def.node);
}

#[test]
fn a_message_cannot_ask_for_much_in_small_portions() {
    let value = "attr { key: 'value' value { tensor { dtype: DT_FLOAT tensor_shape { dim { size: 100 } } } } }";
    let constant = |name| {
        format!("node {{ name: '{name}' op: 'Const' {value} attr {{ key: 'dtype' value {{ type: DT_FLOAT }} }} }}")
    };
    let def = parse(&[constant("a"), constant("b")].concat());
    let within =
        |max_filled_bytes| import(&graph(), &def, ImportOptions { max_filled_bytes, ..ImportOptions::default() });
    let done: Imported = within(800).unwrap();
    assert_eq!(done.nodes.len(), 2);
    let error = within(799).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().contains("Const 'b': attribute 'value': float[100] has 100 elements"), "{error}");
}

#[test]
fn a_constant_outlives_its_message() {
    let tensor = kolo_core::Tensor::from((0..5000i32).collect::<Vec<_>>());
    let graph = graph();
    graph.op("Const").name("c").attr("value", tensor.clone()).attr("dtype", DType::I32).build();
    graph.check().unwrap();
    let def = export(&graph.nodes(), ExportOptions::default()).unwrap();
    let again = self::graph();
    import(&again, &def, ImportOptions::default()).unwrap();
    drop((def, graph));
    let nodes = again.nodes();
    let value = nodes.node(nodes.find("c").unwrap()).attrs.tensor("value").unwrap().clone();
    // Not copied on the way there and back.
    assert_eq!(value.host_bytes().unwrap().as_ptr(), tensor.host_bytes().unwrap().as_ptr());
}

#[test]
fn both_forms_are_told_apart() {
    let node = NodeDef { name: "a".into(), op: "NoOp".into(), ..NodeDef::default() };
    let def = GraphDef { node: vec![node], ..GraphDef::default() };
    let printed = text::print(&def);
    for bytes in [write_graph(&def).unwrap(), printed.clone().into(), format!("\n\n# a graph\n{printed}").into()] {
        assert_eq!(read_graph(&bytes), Ok(def.clone()));
    }
    assert_eq!(read_graph(b""), Ok(GraphDef::default()));
    let check = |bytes: &[u8], why: &str| {
        let error = read_graph(bytes).unwrap_err();
        assert!(error.message().contains(why), "{error}");
    };
    check(b"node {\n  nam: \"a\"\n}\n", "not the text of a GraphDef: 2:3: ");
    check(b"\x0a\xff\x01", "neither a binary GraphDef nor text");
    check("\u{feff}node".as_bytes(), "1:1: ");
}

#[test]
fn what_protobuf_cannot_hold_is_not_written() {
    let node = |name: &str| NodeDef { name: name.into(), op: "NoOp".into(), ..NodeDef::default() };
    let def = GraphDef { node: vec![node("a"), node("large"), node("b")], ..GraphDef::default() };
    let n_bytes = def.encoded_len();
    assert!(write_graph_within(&def, n_bytes).is_ok());
    let error = write_graph_within(&def, n_bytes - 1).unwrap_err();
    assert!(error.message().contains("the largest node is 'large'"), "{error}");
}
