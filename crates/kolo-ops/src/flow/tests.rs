//! The graphs that `while_loop` and `cond` describe are TensorFlow's, node for node. The expected lines were printed by
//! TensorFlow 2.21 with `disable_control_flow_v2`.

use kolo_core::{DType, PartialShape};
use kolo_graph::{Flow, Graph, Output, WhileOptions};

/// `name = op(inputs)`, and for an `Enter` its frame; sorted.
fn lines(g: &Graph) -> Vec<String> {
    let nodes = g.snapshot();
    let mut lines: Vec<String> = nodes
        .iter()
        .map(|(_, node)| {
            let data = node.inputs.iter().map(|&at| nodes.endpoint_name(at).trim_end_matches(":0").to_owned());
            let control = node.control_inputs.iter().map(|&id| format!("^{}", nodes.node(id).name));
            let inputs: Vec<String> = data.chain(control).collect();
            let mut line = format!("{} = {}({})", node.name, node.op(), inputs.join(", "));
            if node.def.flow == Flow::Enter {
                let kind = if node.attrs.bool("is_constant").unwrap() { "constant " } else { "" };
                line += &format!(" -> {kind}{}", node.attrs.str("frame_name").unwrap());
            }
            line
        })
        .collect();
    lines.sort();
    lines
}

#[track_caller]
fn check(g: &Graph, expected: &str) {
    g.check().unwrap();
    let mut expected: Vec<&str> = expected.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    expected.sort_unstable();
    assert_eq!(lines(g), expected);
}

fn scalar<'g>(g: &'g Graph, name: &str, dtype: DType) -> Output<'g> {
    g.placeholder_of(name, dtype, &[])
}

#[test]
fn a_loop_is_tensorflows() {
    let g = crate::graph();
    let x = scalar(&g, "x", DType::F32);
    let init = [g.constant(0i32), x];
    g.while_loop(
        &init,
        |g, v| g.op("Less").input(v[0]).input(g.named_constant("Less/y", 3i32)).out(),
        |g, v| {
            let one = g.named_constant("Add/y", 1i32);
            vec![g.op("AddV2").name("Add").input(v[0]).input(one).out(), v[1] * x]
        },
        WhileOptions::default(),
    )
    .unwrap();
    check(
        &g,
        "
        x = Placeholder()
        Const = Const()
        while/Enter = Enter(Const) -> while/while_context
        while/Enter_1 = Enter(x) -> while/while_context
        while/Merge = Merge(while/Enter, while/NextIteration)
        while/Merge_1 = Merge(while/Enter_1, while/NextIteration_1)
        while/Less/y = Const(^while/Merge)
        while/Less = Less(while/Merge, while/Less/y)
        while/LoopCond = LoopCond(while/Less)
        while/Switch = Switch(while/Merge, while/LoopCond)
        while/Switch_1 = Switch(while/Merge_1, while/LoopCond)
        while/Identity = Identity(while/Switch:1)
        while/Identity_1 = Identity(while/Switch_1:1)
        while/Add/y = Const(^while/Identity)
        while/Add = AddV2(while/Identity, while/Add/y)
        while/Mul = Mul(while/Identity_1, while/Mul/Enter)
        while/Mul/Enter = Enter(x) -> constant while/while_context
        while/NextIteration = NextIteration(while/Add)
        while/NextIteration_1 = NextIteration(while/Mul)
        while/Exit = Exit(while/Switch)
        while/Exit_1 = Exit(while/Switch_1)
        ",
    );
}

#[test]
fn a_branch_is_tensorflows() {
    let g = crate::graph();
    let (x, p) = (scalar(&g, "x", DType::F32), scalar(&g, "p", DType::Bool));
    g.cond(p, || vec![x * x], || vec![g.constant(1.0f32)]).unwrap();
    check(
        &g,
        "
        x = Placeholder()
        p = Placeholder()
        cond/Switch = Switch(p, p)
        cond/switch_t = Identity(cond/Switch:1)
        cond/switch_f = Identity(cond/Switch)
        cond/pred_id = Identity(p)
        cond/Mul = Mul(cond/Mul/Switch:1, cond/Mul/Switch:1)
        cond/Mul/Switch = Switch(x, cond/pred_id)
        cond/Const = Const(^cond/switch_f)
        cond/Merge = Merge(cond/Const, cond/Mul)
        ",
    );
}

#[test]
fn a_branch_in_a_loop_is_tensorflows() {
    let g = crate::graph();
    let (x, p) = (scalar(&g, "x", DType::F32), scalar(&g, "p", DType::Bool));
    g.while_loop(
        &[x],
        |g, v| g.op("Less").input(v[0]).input(g.named_constant("Less/y", 3.0f32)).out(),
        |g, v| g.cond(p, || vec![v[0] * x], || vec![v[0]]).unwrap(),
        WhileOptions::default(),
    )
    .unwrap();
    check(
        &g,
        "
        x = Placeholder()
        p = Placeholder()
        while/Enter = Enter(x) -> while/while_context
        while/Merge = Merge(while/Enter, while/NextIteration)
        while/Less/y = Const(^while/Merge)
        while/Less = Less(while/Merge, while/Less/y)
        while/LoopCond = LoopCond(while/Less)
        while/Switch = Switch(while/Merge, while/LoopCond)
        while/Identity = Identity(while/Switch:1)
        while/cond/Switch = Switch(while/cond/Switch/Enter, while/cond/Switch/Enter, ^while/Identity)
        while/cond/Switch/Enter = Enter(p) -> constant while/while_context
        while/cond/switch_t = Identity(while/cond/Switch:1)
        while/cond/switch_f = Identity(while/cond/Switch)
        while/cond/pred_id = Identity(while/cond/Switch/Enter, ^while/Identity)
        while/cond/Mul = Mul(while/cond/Mul/Switch:1, while/cond/Mul/Switch_1:1)
        while/cond/Mul/Switch = Switch(while/Identity, while/cond/pred_id)
        while/cond/Mul/Enter = Enter(x) -> constant while/while_context
        while/cond/Mul/Switch_1 = Switch(while/cond/Mul/Enter, while/cond/pred_id)
        while/cond/Switch_1 = Switch(while/Identity, while/cond/pred_id)
        while/cond/Merge = Merge(while/cond/Switch_1, while/cond/Mul)
        while/NextIteration = NextIteration(while/cond/Merge)
        while/Exit = Exit(while/Switch)
        ",
    );
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let g = crate::graph();
    let (x, p) = (scalar(&g, "x", DType::F32), scalar(&g, "p", DType::Bool));
    let forever = |_: &Graph, _: &[Output<'_>]| p;
    let refused = |result: kolo_core::Result<Vec<Output<'_>>>, text: &str| {
        let error = result.unwrap_err();
        assert!(error.message().contains(text), "{error}");
    };
    let options = WhileOptions::default;
    refused(g.while_loop(&[], forever, |_, v| v.to_vec(), options()), "No loop variables provided");
    refused(g.while_loop(&[x], forever, |_, v| [v, v].concat(), options()), "2 values for 1 loop variables");
    refused(g.while_loop(&[x], forever, |g, _| vec![g.constant(1i32)], options()), "but int32 after one iteration");
    let none = WhileOptions { parallel_iterations: 0, ..options() };
    refused(g.while_loop(&[x], forever, |_, v| v.to_vec(), none), "must be a positive integer");
    let shape_invariants = vec![Some(PartialShape::from([2usize]))];
    let other = WhileOptions { shape_invariants, ..options() };
    refused(g.while_loop(&[x], forever, |_, v| v.to_vec(), other), "not compatible with the initial shape");
    refused(g.cond(p, || vec![x], Vec::new), "same number of outputs: 1 and 0");
    refused(g.cond(p, || vec![x], || vec![g.constant(1i32)]), "must have the same type: float, int32");
}
