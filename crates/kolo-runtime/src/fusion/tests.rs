//! Which nodes are fused, and which are not.

use std::collections::HashMap;

use kolo_core::DType;
use kolo_graph::{
    DeviceInfo, Ends, Granularity, Graph, ImplicitCopies, KernelSupport, LoopControl, Operation, Output, Partition,
    PlaceOptions, PlanRequest, Request, gradients, pipeline, plan,
};
use kolo_ops::math::matmul::matmul;
use kolo_ops::math::reduce::sum::mean;
use kolo_ops::nn::bias_add::bias_add;
use kolo_ops::nn::cross_entropy::softmax_cross_entropy;
use kolo_ops::nn::max_pool::max_pool;
use kolo_ops::nn::relu::relu;
use kolo_ops::optim::gradient_descent::apply_gradient_descent;

use super::*;

/// The whole graph as one part of a GPU, fused; unused nodes are included.
fn fused_part(g: &Graph, fetches: &[Output<'_>]) -> Partition {
    fused_for("GPU", g, fetches)
}

fn fused_for(kind: &str, g: &Graph, fetches: &[Output<'_>]) -> Partition {
    g.check().unwrap();
    let nodes = g.snapshot();
    let request = Request {
        fetches: fetches.iter().map(|output| output.endpoint()).collect(),
        targets: nodes.iter().map(|(id, _)| id).collect(),
        ..Request::default()
    };
    let devices = [DeviceInfo { name: DeviceName::local(kind, 0), incarnation: 1 }];
    let request = PlanRequest {
        nodes: &nodes,
        request: &request,
        connections: &[],
        registry: kolo_ops::registry(),
        devices: &devices,
        support: &Everywhere,
        earlier: &HashMap::new(),
        place: &PlaceOptions::default(),
        copies: ImplicitCopies::Allowed,
        granularity: Granularity::Device,
        loops: LoopControl::Add,
        ends: Ends::Caller,
        passes: &pipeline(&passes()),
        show_after: None,
    };
    let mut fresh = 0;
    let plan = plan(&request, &mut || {
        fresh += 1;
        fresh
    });
    let fused = plan.unwrap().parts.remove(0);
    for (id, node) in fused.nodes.iter() {
        let earlier = node.inputs.iter().map(|at| at.node).chain(node.control_inputs.iter().copied());
        assert!(earlier.into_iter().all(|before| before < id), "{} is before its inputs", node.name);
    }
    fused
}

/// All nodes run on all devices, and all memory is the same.
struct Everywhere;

impl KernelSupport for Everywhere {
    fn has_kernel(&self, _: &Node, _: &DeviceName) -> bool {
        true
    }

    fn kernels(&self, _: &Node) -> Vec<String> {
        Vec::new()
    }
}

fn count(part: &Partition, op: &str) -> usize {
    part.nodes.iter().filter(|(_, node)| node.op() == op).count()
}

fn program<'a>(part: &'a Partition, name: &str) -> &'a str {
    let id = part.nodes.find(name).unwrap();
    part.nodes.node(id).attrs.str("program").unwrap()
}

fn input<'g>(g: &'g Graph, name: &str, dims: &[usize]) -> Output<'g> {
    g.placeholder::<f32>(name, kolo_core::Shape::new(dims).unwrap())
}

#[test]
fn trees_become_one_node_and_what_others_see_stays() {
    let g = kolo_ops::graph();
    let (a, b) = (input(&g, "a", &[4, 3]), input(&g, "b", &[3]));
    let seen = a * b;
    let root = g.op("Tanh").input(relu(seen + a) * seen).name("root").out();
    let part = fused_part(&g, &[root, seen]);
    assert_eq!((count(&part, "Mul"), count(&part, "_KoloFusedMap")), (1, 1));
    assert_eq!(program(&part, "root"), "AddV2,float,-,i0 i1;Relu,float,-,v0;Mul,float,-,v1 i0;Tanh,float,-,v2");
    // Its value is not used outside: it is fused too, though it is used twice.
    let part = fused_part(&g, &[root]);
    assert_eq!(count(&part, "Mul"), 0);
    // A scalar is not computed again for each element.
    let g = kolo_ops::graph();
    let (a, s) = (input(&g, "a", &[4, 3]), input(&g, "s", &[]));
    let root = g.op("Mul").input(a).input(g.op("Exp").input(s).out()).out();
    assert_eq!(count(&fused_part(&g, &[root]), "_KoloFusedMap"), 0);
}

#[test]
fn nodes_that_others_wait_for_stay() {
    let g = kolo_ops::graph();
    let a = input(&g, "a", &[4]);
    let first = relu(a);
    let root = g.op("Neg").input(first).out();
    let after = g.control_dependencies(&[first.operation()], || g.op("NoOp").name("after").build());
    let _ = after;
    assert_eq!(count(&fused_part(&g, &[root]), "Relu"), 1);
}

#[test]
fn a_training_step_of_a_dense_layer_has_few_nodes_left() {
    let g = kolo_ops::graph();
    let (x, y) = (input(&g, "x", &[8, 4]), input(&g, "y", &[8, 3]));
    let variable = |name: &str, dims: &[usize]| {
        g.variable(name, kolo_core::Tensor::zeros(DType::F32, kolo_core::Shape::new(dims).unwrap()).unwrap())
    };
    let variables = [variable("w", &[4, 5]), variable("b", &[5]), variable("v", &[5, 3]), variable("c", &[3])];
    let [w, b, v, c] = variables.map(|variable| variable.read());
    let hidden = relu(bias_add(matmul(x, w), b));
    let loss = mean(softmax_cross_entropy(bias_add(matmul(hidden, v), c), y), &[0]);
    let rate = g.constant(0.1f32);
    let grads = gradients(&[loss], &[w, b, v, c]).unwrap();
    let updates: Vec<Operation<'_>> = variables
        .iter()
        .zip(grads)
        .map(|(variable, grad)| apply_gradient_descent(variable.handle(), rate, grad.unwrap().dense().unwrap()))
        .collect();
    let train = g.control_dependencies(&updates, || g.op("NoOp").name("train").build());
    let part = fused_part(&g, &[loss]);
    assert_eq!(count(&part, "_KoloFusedMatMul"), 2);
    assert_eq!(count(&part, "_KoloFusedCrossEntropy"), 1);
    assert_eq!(count(&part, "_KoloFusedMapAndSum"), 1, "the gradient of Relu and its bias");
    assert_eq!(count(&part, "_KoloApplyAll"), 1);
    for op in ["BiasAdd", "Relu", "ReluGrad", "ResourceApplyGradientDescent", "SoftmaxCrossEntropyWithLogits"] {
        assert_eq!(count(&part, op), 0, "{op}");
    }
    let end = part.nodes.find(&train.name()).unwrap();
    let waits = &part.nodes.node(end).control_inputs;
    assert_eq!(waits.len(), 1, "for all updates at once");
    assert_eq!(part.nodes.node(waits[0]).attrs.int("N").unwrap(), 4);
}

#[test]
fn updates_take_narrow_gradients_as_they_are() {
    let g = kolo_ops::graph();
    let variables = ["a", "b"].map(|name| g.variable(name, kolo_core::Tensor::zeros(DType::F32, [3]).unwrap()));
    let rate = g.constant(0.1f32);
    for (variable, name) in variables.iter().zip(["da", "db"]) {
        let narrow = g.op("Placeholder").name(name).attr("dtype", DType::BF16).out();
        let grad = g.op("Cast").input(narrow).attr("DstT", DType::F32).out();
        apply_gradient_descent(variable.handle(), rate, grad);
    }
    let part = fused_part(&g, &[]);
    let all = part.nodes.iter().find(|(_, node)| node.op() == "_KoloApplyAll").unwrap().1;
    assert_eq!(all.attrs.dtype("Tgrad").unwrap(), DType::BF16);
    assert_eq!((all.attrs.int("N").unwrap(), all.inputs.len()), (2, 5));
}

#[test]
fn updates_that_depend_on_each_other_stay_apart() {
    let g = kolo_ops::graph();
    let variable = |name: &str| g.variable(name, kolo_core::Tensor::zeros(DType::F32, [3]).unwrap());
    let (a, b, c) = (variable("a"), variable("b"), variable("c"));
    let (rate, grad) = (g.constant(0.1f32), input(&g, "grad", &[3]));
    let first = apply_gradient_descent(a.handle(), rate, grad);
    let second = g.control_dependencies(&[first], || apply_gradient_descent(b.handle(), rate, b.read()));
    let again = apply_gradient_descent(a.handle(), rate, grad);
    let third = apply_gradient_descent(c.handle(), rate, grad);
    let _ = (second, again, third);
    let part = fused_part(&g, &[]);
    assert_eq!(count(&part, "_KoloApplyAll"), 1);
    assert_eq!(count(&part, "ResourceApplyGradientDescent"), 2);
}

#[test]
fn thousands_of_updates_are_fused_at_once() {
    const N: usize = 5_000;
    let g = kolo_ops::graph();
    let (rate, grad) = (g.constant(0.1f32), input(&g, "grad", &[3]));
    let zero = kolo_core::Tensor::zeros(DType::F32, [3]).unwrap();
    let updates: Vec<Operation<'_>> = (0..N)
        .map(|i| {
            let handle = g
                .op("VarHandleOp")
                .name(&format!("v{i}"))
                .attr("dtype", DType::F32)
                .attr("shape", kolo_core::PartialShape::from(zero.shape()));
            apply_gradient_descent(handle.out(), rate, grad)
        })
        .collect();
    g.control_dependencies(&updates, || g.op("NoOp").name("train").build());
    let start = std::time::Instant::now();
    let part = fused_part(&g, &[]);
    let took = start.elapsed();
    let train = part.nodes.node(part.nodes.find("train").unwrap());
    assert_eq!((count(&part, "_KoloApplyAll"), train.control_inputs.len()), (1, 1));
    // Half a second in a debug build; 20 s when a group was copied for each update.
    assert!(took < std::time::Duration::from_secs(8), "{took:?}");
}

#[test]
fn what_goes_around_a_norm_is_added_in_its_gradient() {
    let g = kolo_ops::graph();
    let (x, scale, offset) = (input(&g, "x", &[4, 8]), input(&g, "scale", &[8]), input(&g, "offset", &[8]));
    let y = kolo_ops::nn::layer_norm::layer_norm(x, scale, offset, 1e-5) + x;
    let grads = gradients(&[y], &[x, scale]).unwrap();
    let fetches: Vec<Output<'_>> = grads.into_iter().map(|grad| grad.unwrap().dense().unwrap()).collect();
    let part = fused_part(&g, &fetches);
    assert_eq!((count(&part, "_KoloFusedLayerNormGrad"), count(&part, "AddN")), (1, 0));
    let at: Vec<u32> = part.fetches.iter().map(|(_, at)| at.index).collect();
    assert_eq!(at, [0, 1]);
}

#[test]
fn a_pool_after_relu_takes_its_gradient_along() {
    let g = kolo_ops::graph();
    let x = input(&g, "x", &[2, 4, 4, 3]);
    let pooled = max_pool(relu(x), [2, 2], [2, 2], "SAME");
    let grad = gradients(&[pooled], &[x]).unwrap()[0].unwrap().dense().unwrap();
    let part = fused_part(&g, &[grad]);
    assert_eq!((count(&part, "_KoloFusedMaxPoolGradRelu"), count(&part, "ReluGrad")), (1, 0));
}

#[test]
fn a_pool_takes_its_bias_and_relu_along_both_ways() {
    let g = kolo_ops::graph();
    let (x, b) = (input(&g, "x", &[2, 4, 4, 3]), input(&g, "b", &[3]));
    let pooled = max_pool(relu(bias_add(x, b)), [2, 2], [2, 2], "SAME");
    let grads = gradients(&[pooled], &[x, b]).unwrap();
    let grads: Vec<Output<'_>> = grads.into_iter().map(|grad| grad.unwrap().dense().unwrap()).collect();
    let part = fused_part(&g, &[pooled, grads[0], grads[1]]);
    assert_eq!((count(&part, "_KoloFusedBiasReluPool"), count(&part, "_KoloFusedBiasReluPoolGrad")), (1, 1));
    for op in ["BiasAdd", "Relu", "MaxPool", "MaxPoolGrad", "ReluGrad", "BiasAddGrad"] {
        assert_eq!(count(&part, op), 0, "{op}");
    }
    let at: Vec<i64> = part.fetches.iter().map(|(_, at)| i64::from(at.index)).collect();
    assert_eq!(at, [0, 0, 1]);
    assert_eq!(part.fetches[1].1.node, part.fetches[2].1.node);
}

#[test]
fn what_is_pooled_stays_if_it_is_wanted_elsewhere() {
    let g = kolo_ops::graph();
    let (x, b) = (input(&g, "x", &[2, 4, 4, 3]), input(&g, "b", &[3]));
    let seen = relu(bias_add(x, b));
    let pooled = max_pool(seen, [2, 2], [2, 2], "SAME");
    let part = fused_part(&g, &[pooled, seen]);
    assert_eq!((count(&part, "_KoloFusedBiasReluPool"), count(&part, "MaxPool")), (0, 1));
    let g = kolo_ops::graph();
    let (x, b) = (input(&g, "x", &[2, 4, 4, 3]), input(&g, "b", &[3]));
    let overlapping = max_pool(relu(bias_add(x, b)), [3, 3], [2, 2], "SAME");
    let part = fused_part(&g, &[overlapping]);
    assert_eq!(count(&part, "_KoloFusedBiasReluPool"), 0);
}

#[test]
fn a_product_is_computed_on_top_of_what_goes_around_it() {
    let g = kolo_ops::graph();
    let (x, w, b) = (input(&g, "x", &[6, 4]), input(&g, "w", &[4, 4]), input(&g, "b", &[4]));
    let plain = x + matmul(x, w);
    let biased = relu(bias_add(matmul(plain, w), b) + plain);
    // Three dimensions, as for batches of sequences; and a batch of unknown size.
    let wide = input(&g, "wide", &[2, 3, 4]);
    let shaped = g.op("Reshape").input(bias_add(matmul(x, w), b)).input(g.constant([2i32, 3, 4])).out() + wide;
    let open = g.placeholder::<f32>("open", [None, Some(4)]);
    let grown = g.op("AddN").inputs([matmul(open, w), open]).out();
    let part = fused_part(&g, &[biased, shaped, grown]);
    assert_eq!(count(&part, "_KoloFusedMatMulAdd"), 4);
    for op in ["MatMul", "BiasAdd", "Relu", "Reshape", "AddV2", "AddN", "_KoloFusedMatMul"] {
        assert_eq!(count(&part, op), 0, "{op}");
    }
    // A row that is added to all rows, and a product with other consumers.
    let g = kolo_ops::graph();
    let (x, w, row) = (input(&g, "x", &[6, 4]), input(&g, "w", &[4, 4]), input(&g, "row", &[1, 4]));
    let seen = matmul(x, w);
    let part = fused_part(&g, &[matmul(x, w) + row, seen + x, seen]);
    assert_eq!((count(&part, "_KoloFusedMatMulAdd"), count(&part, "MatMul")), (0, 2));
}

#[test]
fn gradient_descent_of_large_weights_is_part_of_their_product() {
    let g = kolo_ops::graph();
    let (x, dy) = (input(&g, "x", &[8, 1024]), input(&g, "dy", &[8, 1024]));
    let held = |name: &str| g.variable(name, kolo_core::Tensor::zeros(DType::F32, [1024, 1024]).unwrap());
    let grad = || g.op("MatMul").input(x).input(dy).attr("transpose_a", true).out();
    let (constant, open) = (g.constant(0.5f32), input(&g, "rate", &[]));
    apply_gradient_descent(held("a").handle(), constant, grad());
    // A rate that may change, and a gradient with other consumers.
    apply_gradient_descent(held("b").handle(), open, grad());
    let seen = grad();
    apply_gradient_descent(held("c").handle(), constant, seen);
    let part = fused_part(&g, &[seen]);
    let list: Vec<&Node> =
        part.nodes.iter().map(|(_, node)| &**node).filter(|node| node.op() == "_KoloApplyProduct").collect();
    assert_eq!((list.len(), count(&part, "ResourceApplyGradientDescent")), (1, 2));
    assert_eq!(list[0].attrs.float("rate").unwrap(), 0.5);
    assert!(list[0].attrs.bool("transpose_a").unwrap());
}

#[test]
fn on_a_cpu_products_take_bias_activation_and_descent_with_them() {
    let g = kolo_ops::graph();
    let x = input(&g, "x", &[8, 4]);
    let variable = |name: &str, dims: &[usize]| {
        g.variable(name, kolo_core::Tensor::zeros(DType::F32, kolo_core::Shape::new(dims).unwrap()).unwrap())
    };
    let (w, b) = (variable("w", &[4, 5]), variable("b", &[5]));
    let hidden = g.op("Sigmoid").input(bias_add(matmul(x, w.read()), b.read())).name("hidden").out();
    let loss = mean(hidden, &[0, 1]);
    let grad = gradients(&[loss], &[w.handle()]).unwrap().remove(0).unwrap().dense().unwrap();
    let update = apply_gradient_descent(w.handle(), g.constant(0.5f32), grad);
    let part = fused_for("CPU", &g, &[loss]);
    // The remaining product is the gradient of x, which has no consumer.
    assert_eq!((count(&part, "MatMul"), count(&part, "BiasAdd"), count(&part, "Sigmoid")), (1, 0, 0));
    let node = part.nodes.node(part.nodes.find("hidden").unwrap());
    assert_eq!((node.op(), node.attrs.str("activation").unwrap()), ("_KoloFusedDense", "sigmoid"));
    let node = part.nodes.node(part.nodes.find(&update.name()).unwrap());
    assert_eq!((node.op(), node.attrs.bool("transpose_a").unwrap()), ("_KoloApplyDescent", true));
    // A gradient that is fetched is computed.
    let part = fused_for("CPU", &g, &[loss, grad]);
    assert_eq!((count(&part, "MatMul"), count(&part, "_KoloApplyDescent")), (2, 0));
}

#[test]
fn on_a_cpu_a_large_variable_is_not_locked_for_a_product() {
    for (width, n_fused) in [(512, 1), (513, 0)] {
        let g = kolo_ops::graph();
        let (x, dy) = (input(&g, "x", &[512, 8]), input(&g, "dy", &[8, width]));
        let zeros = kolo_core::Tensor::zeros(DType::F32, [512, width]).unwrap();
        let _ = apply_gradient_descent(g.variable("w", zeros).handle(), g.constant(0.5f32), matmul(x, dy));
        assert_eq!(count(&fused_for("CPU", &g, &[]), "_KoloApplyDescent"), n_fused, "{width}");
    }
}

#[test]
fn on_a_cpu_a_sum_is_a_bias_only_if_the_shapes_say_so() {
    for (dims, is_bias) in [(&[5usize][..], true), (&[8, 5], false), (&[1, 5], false), (&[1], false), (&[], false)] {
        let g = kolo_ops::graph();
        let (x, w, b) = (input(&g, "x", &[8, 4]), input(&g, "w", &[4, 5]), input(&g, "b", dims));
        let sums = [matmul(x, w) + b, b + matmul(x, w)];
        let part = fused_for("CPU", &g, &sums);
        assert_eq!(count(&part, "_KoloFusedDense"), if is_bias { 2 } else { 0 }, "{dims:?}");
    }
}
