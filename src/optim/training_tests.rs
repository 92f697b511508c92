//! What optimizers say of the steps they add, and passes that use it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use kolo_core::{Result, Tensor};
use kolo_graph::rewrite::Rewriter;
use kolo_graph::{
    Attrs, Endpoint, GradParts, Graph, NodeId, Operation, Output, Pass, Region, Stage, Training, TrainingNodes,
    Variable, VariableKind, WhileOptions,
};
use kolo_runtime::{Session, SessionConfig};

use super::testing::{close, problem};
use super::{Accumulate, Adam, Clip, GradAndVar, MinimizeOptions, Momentum, Optimizer, Sgd};
use crate::cluster::{AsyncReplicas, HybridReplicas, ParameterAveraging, SyncReplicas};
use crate::{ops, train};

fn training(g: &Graph, op: Operation<'_>) -> Arc<Training> {
    g.training(op).unwrap()
}

fn names(training: &Training) -> Vec<&str> {
    training.variables.iter().map(|variable| &*variable.name).collect()
}

/// The output that is a variable's gradient in the only backward pass.
#[track_caller]
fn gradient<'g>(g: &'g Graph, training: &Training, variable: &str) -> Output<'g> {
    let [(0, grad)] = training.variable(variable).unwrap().gradients.as_slice() else { panic!("{training:#?}") };
    g.output(&grad.values().to_string()).unwrap()
}

/// `x · w1 · w2 · w3` with biases and tanh, the mean of its squares; everything named after its layer.
fn mlp(g: &Graph) -> Output<'_> {
    let mut x = g.constant([[1.0f32, -2.0]]);
    for layer in 1..=3 {
        x = g.name_scope(&format!("layer{layer}"), || {
            let w = g.variable("w", [[0.5f32, 0.25], [-0.5, 1.0]]);
            let b = g.variable("b", [0.5f32, -0.5]);
            ops::tanh(ops::bias_add(ops::matmul(x, w.read()), b.read()))
        });
    }
    ops::mean_all(ops::square(x))
}

#[test]
fn the_last_layers_gradients_are_ready_first() {
    let g = kolo_ops::graph();
    let loss = mlp(&g);
    let momentum = Momentum::new(0.1, 0.9);
    let step = train::global_step_or_create(&g).unwrap();
    let op = momentum.minimize(loss, Some(step)).unwrap();
    let training = training(&g, op);
    let layers: Vec<&str> = names(&training).iter().map(|name| &name[..6]).collect();
    assert_eq!(layers, ["layer3", "layer3", "layer2", "layer2", "layer1", "layer1"]);
    assert_eq!((&*training.op, &*training.update_op), ("Momentum", "Momentum"));

    let [start] = training.losses.as_slice() else { panic!("{:?}", training.losses) };
    assert_eq!((start.value.to_string(), start.pass), (loss.name(), 0));
    let start = g.output(&start.start.to_string()).unwrap();
    assert_eq!(Session::new(&g).unwrap().fetch(start).unwrap(), Tensor::scalar(1.0f32));

    let w2 = training.variable("layer2/w").unwrap();
    assert_eq!(w2.n_bytes, Some(16));
    assert_eq!(&*w2.update, "Momentum/update_layer2/w/ResourceApplyMomentum");
    let slots: Vec<(&str, &str)> = w2.slots.iter().map(|slot| (&*slot.slot, &*slot.variable)).collect();
    assert_eq!(slots, [("momentum", "layer2/w/Momentum")]);
    let GradParts::Dense(reads) = &w2.reads else { panic!("{w2:?}") };
    let [read] = reads.as_slice() else { panic!("{w2:?}") };
    let update = g.operation(&read.node).unwrap();
    assert_eq!((update.name(), update.input(read.input)), (w2.update.to_string(), gradient(&g, &training, "layer2/w")));
}

#[test]
fn backward_nodes_belong_to_the_nodes_they_undo() {
    let g = kolo_ops::graph();
    let loss = mlp(&g);
    let n_forward = g.nodes().len();
    let op = Sgd::new(0.1).minimize(loss, None).unwrap();
    let training = training(&g, op);
    for layer in 1..=3 {
        for (variable, forward) in [("w", "MatMul"), ("b", "BiasAdd")] {
            let grad = gradient(&g, &training, &format!("layer{layer}/{variable}"));
            let forward = format!("layer{layer}/{forward}");
            assert_eq!(training.forward_of(&grad.operation().name()).unwrap().as_ref(), forward);
            assert!(training.backward_of(&forward).iter().any(|name| ***name == grad.operation().name()));
        }
        let tanh = training.backward_of(&format!("layer{layer}/Tanh"));
        let tanh: Vec<&str> = tanh.iter().map(|name| g.operation(name).unwrap().op()).collect();
        assert_eq!(tanh, ["TanhGrad"]);
    }
    assert_eq!(training.forward_of("layer1/MatMul"), None);
    assert_eq!(training.forward_of(&op.name()), None);
    // All that gradients have added, and nothing else, belongs to a node that was there.
    let nodes = g.snapshot();
    for (id, node) in nodes.iter().filter(|(_, node)| !node.name.starts_with("GradientDescent")) {
        let forward = training.forward_of(&node.name);
        assert_eq!(forward.is_some(), id.index() >= n_forward, "{}", node.name);
        assert!(forward.is_none_or(|name| nodes.find(name).unwrap().index() < n_forward), "{}", node.name);
    }
}

/// The order follows from the edges, not from the order of description.
#[test]
fn a_short_branch_is_ready_before_a_long_one() {
    for short_first in [true, false] {
        let g = kolo_ops::graph();
        let branch = |name: &str, n: usize| {
            let mut x = g.variable(name, [0.5f32, 0.25]).read();
            for _ in 0..n {
                x = ops::tanh(x);
            }
            ops::sum_all(x)
        };
        let loss = match short_first {
            true => branch("short", 1) + branch("long", 5),
            false => branch("long", 5) + branch("short", 1),
        };
        let op = Sgd::new(0.1).minimize(loss, None).unwrap();
        assert_eq!(names(&training(&g, op)), ["short", "long"]);
    }
}

#[test]
fn a_shared_variable_is_ready_when_its_first_use_is_undone() {
    let g = kolo_ops::graph();
    let [tied, own] = ["tied", "own"].map(|name| g.variable(name, [[0.5f32, 0.25], [-0.5, 1.0]]));
    let x = ops::tanh(ops::matmul(g.constant([[1.0f32, 2.0]]), tied.read()));
    let x = ops::tanh(ops::matmul(x, own.read()));
    let loss = ops::sum_all(ops::matmul(x, tied.read()));
    let op = Sgd::new(0.1).minimize(loss, None).unwrap();
    let training = training(&g, op);
    assert_eq!(names(&training), ["own", "tied"]);
    let sum = gradient(&g, &training, "tied").operation();
    // Both uses read the variable once, so the sum belongs to the read.
    assert_eq!((sum.op(), training.forward_of(&sum.name()).unwrap().as_ref()), ("AddN", "tied/Read/ReadVariableOp"));
}

#[test]
fn rows_are_values_and_indices() {
    for kind in [VariableKind::Resource, VariableKind::Reference] {
        let g = kolo_ops::graph();
        let (_, _, loss) = problem(&g, kind);
        for op in [Sgd::new(0.1).minimize(loss, None), Adam::new(0.1).minimize(loss, None)] {
            let training = training(&g, op.unwrap());
            let rows = training.variable("e").unwrap();
            let [(0, GradParts::Slices { values, indices })] = rows.gradients.as_slice() else { panic!("{rows:?}") };
            assert_eq!(rows.n_bytes, Some(32));
            for (at, reads) in [(values, rows.reads.values()), (indices, rows.reads.indices().unwrap())] {
                assert!(!reads.is_empty(), "{rows:?}");
                for read in reads {
                    assert!(read.node.contains("/update_e/"), "{read:?}");
                    assert_eq!(g.operation(&read.node).unwrap().input(read.input).name(), at.to_string());
                }
            }
            assert!(training.variable("w").unwrap().gradients[0].1.indices().is_none());
        }
    }
}

#[test]
fn slots_and_scalars_are_the_optimizers() {
    let g = kolo_ops::graph();
    let w = g.variable("w", [1.0f32, 2.0]);
    let op = Adam::new(0.1).minimize(ops::sum_all(ops::square(w.read())), None).unwrap();
    let training = training(&g, op);
    let pairs = |slots: &[kolo_graph::Slot]| -> Vec<String> {
        slots.iter().map(|slot| format!("{}={}", slot.slot, slot.variable)).collect()
    };
    assert_eq!(pairs(&training.variables[0].slots), ["m=w/Adam", "v=w/Adam_1"]);
    assert_eq!(pairs(&training.scalars), ["beta1_power=beta1_power", "beta2_power=beta2_power"]);
}

#[test]
fn a_loops_gradient_belongs_to_its_nodes() {
    let g = kolo_ops::graph();
    let w = g.variable("w", [[0.5f32, 0.25], [-0.5, 1.0]]);
    let top = g.variable("top", [[0.5f32], [1.0]]);
    let out = g
        .while_loop(
            &[g.constant(0i32), g.constant([[1.0f32, 2.0]])],
            |g, v| g.op("Less").input(v[0]).input(g.constant(3i32)).out(),
            |_, v| vec![v[0] + 1, ops::tanh(ops::matmul(v[1], w.read()))],
            WhileOptions::default(),
        )
        .unwrap();
    let loss = ops::sum_all(ops::matmul(out[1], top.read()));
    let n_forward = g.nodes().len();
    let op = Sgd::new(0.1).minimize(loss, None).unwrap();
    let training = training(&g, op);
    assert_eq!(names(&training), ["top", "w"]);
    let nodes = g.snapshot();
    for (id, node) in nodes.iter().skip(n_forward).filter(|(_, node)| !node.name.starts_with("GradientDescent")) {
        let forward = training.forward_of(&node.name).unwrap_or_else(|| panic!("{} belongs to nothing", node.name));
        assert!(nodes.find(forward).unwrap().index() < n_forward, "{id:?} {} -> {forward}", node.name);
    }
    let ops_of = |forward: &str| -> HashSet<&'static str> {
        let backward = training.backward_of(forward);
        backward.iter().map(|name| g.operation(name).unwrap().op()).collect()
    };
    assert!(ops_of("while/Tanh").contains("TanhGrad") && !ops_of("while/Tanh").contains("MatMul"));
    assert!(ops_of("while/MatMul").contains("MatMul"));

    // The stacks run with the forward loop, the pops backward.
    let found = Arc::new(Mutex::new(Vec::new()));
    let regions = on_step(Stage::Graph, {
        let found = found.clone();
        move |graph, step| {
            for (id, node) in graph.iter() {
                let owner = step.forward_of(id).map(|id| graph.node(id).unwrap().name.to_string());
                found.lock().unwrap().push((node.def.name, node.name.to_string(), step.region(id), owner));
            }
            Ok(())
        }
    });
    train_with(&g, op, vec![regions]);
    let found = found.lock().unwrap();
    let of = |op: &str| found.iter().filter(|(of, ..)| *of == op).collect::<Vec<_>>();
    assert!(!of("StackPushV2").is_empty());
    for (_, name, region, owner) in of("StackPushV2") {
        assert_eq!(*region, Some(Region::Forward));
        let push = g.operation(name).unwrap();
        assert_eq!(owner.as_deref(), Some(push.input(1).operation().name().as_str()));
    }
    assert!(of("StackPopV2").iter().all(|(.., region, _)| *region == Some(Region::Backward)));
    assert!(of("TanhGrad").iter().all(|(.., owner)| owner.as_deref() == Some("while/Tanh")));
    assert!(of("Tanh").iter().all(|(.., region, owner)| *region == Some(Region::Forward) && owner.is_none()));
    assert!(of("ResourceApplyGradientDescent").iter().all(|(.., region, _)| *region == Some(Region::Update)));
}

#[test]
fn two_losses_are_two_steps_or_one() {
    let g = kolo_ops::graph();
    let w = g.variable("w", [1.0f32, 2.0]);
    let [one, two] = [ops::sum_all(ops::square(w.read())), ops::sum_all(ops::tanh(w.read()))];
    let sgd = Sgd::new(0.1);
    let [first, second] = [one, two].map(|loss| training(&g, sgd.minimize(loss, None).unwrap()));
    assert_eq!(g.trainings().len(), 2);
    assert_eq!((first.losses[0].value.to_string(), second.losses[0].value.to_string()), (one.name(), two.name()));
    let [a, b] = [&first, &second].map(|training| gradient(&g, training, "w"));
    assert_ne!(a, b);
    assert_eq!(first.forward_of(&b.operation().name()), None);

    // As towers do: one update with the mean of both.
    let mean = GradAndVar { grad: Some(((a + b) * 0.5).into()), variable: w };
    let both = training(&g, sgd.apply_gradients(&[mean], None).unwrap());
    let losses: Vec<(usize, String)> = both.losses.iter().map(|loss| (loss.pass, loss.value.to_string())).collect();
    assert_eq!(losses, [(0, one.name()), (1, two.name())]);
    let grads = &both.variables[0].gradients;
    let grads: Vec<(usize, String)> = grads.iter().map(|(pass, grad)| (*pass, grad.values().to_string())).collect();
    assert_eq!(grads, [(0, a.name()), (1, b.name())]);
    assert!(both.forward_of(&a.operation().name()).is_some() && both.forward_of(&b.operation().name()).is_some());

    // Differentiated together.
    let grads = kolo_graph::gradients(&[one, two], &[w.handle()]).unwrap();
    let sum = training(&g, sgd.apply_gradients(&[GradAndVar { grad: grads[0], variable: w }], None).unwrap());
    assert_eq!(sum.losses.iter().map(|loss| loss.pass).collect::<Vec<_>>(), [0, 0]);
    // What no call for gradients made has none.
    let given = GradAndVar { grad: Some(g.constant([1.0f32, 1.0]).into()), variable: w };
    let given = training(&g, sgd.apply_gradients(&[given], None).unwrap());
    assert!(given.losses.is_empty() && given.variables[0].gradients.is_empty());
    assert_eq!(given.variables[0].reads.values().len(), 1);
}

/// A pass that does something to every training step it finds.
fn on_step(
    stage: Stage,
    change: impl Fn(&mut Rewriter<'_>, &TrainingNodes) -> Result<()> + Send + Sync + 'static,
) -> Pass {
    Pass::new("on-step", stage, "a test", move |graph, _| {
        for training in graph.trainings().iter() {
            if let Some(step) = training.resolve(graph)? {
                change(graph, &step)?;
            }
        }
        Ok(())
    })
}

/// Multiplies `at` with a number, beside it.
fn scaled(graph: &mut Rewriter<'_>, at: Endpoint, factor: f32) -> Result<Endpoint> {
    let mut attrs = Attrs::default();
    attrs.set("value", Tensor::scalar(factor));
    attrs.set("dtype", kolo_core::DType::F32);
    let factor = Endpoint { node: graph.add("Const", "factor", &[], attrs)?, index: 0 };
    Ok(Endpoint { node: graph.add("Mul", "scaled", &[at, factor], Attrs::default())?, index: 0 })
}

/// Multiplies each gradient with `factor` between backward and the update.
fn scale_applied(factor: f32) -> Pass {
    on_step(Stage::Graph, move |graph, step| {
        for variable in &step.variables {
            let Some(applied) = &variable.applied else { continue };
            let scaled = scaled(graph, *applied.values(), factor)?;
            graph.redirect_inputs(variable.reads.values(), scaled)?;
        }
        Ok(())
    })
}

/// The values of all global variables after two steps of `op`, by a session with these passes.
fn train_with(g: &Graph, op: Operation<'_>, passes: Vec<Pass>) -> Vec<Tensor> {
    let init = g.global_variables_initializer();
    let session = Session::with_config(g, SessionConfig { passes, ..SessionConfig::default() }).unwrap();
    session.run_op(init).unwrap();
    session.run_op(op).unwrap();
    session.run_op(op).unwrap();
    let values: Vec<Output<'_>> = g.global_variables().iter().map(|variable| variable.read()).collect();
    session.run(&values, &[], &[]).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.data::<f32>().unwrap().to_vec()
}

/// One output is the gradient of both variables, and backward reads it too: what is done for one must not reach others.
#[test]
fn a_pass_scales_each_gradient_once_before_its_update() {
    let g = kolo_ops::graph();
    let [a, b, c] = ["a", "b", "c"].map(|name| g.variable(name, [1.0f32, 2.0]));
    let loss = ops::sum_all((a.read() + b.read() + ops::square(c.read())) * g.constant([3.0f32, 5.0]));
    let op = Sgd::new(0.1).minimize(loss, None).unwrap();
    let step = training(&g, op);
    assert_eq!(gradient(&g, &step, "a"), gradient(&g, &step, "b"));
    // Each step moves a and b by 0.1 · factor · (3, 5), and c by 0.1 · factor · 2c · (3, 5).
    for (passes, factor) in [(vec![], 1.0), (vec![scale_applied(0.5)], 0.5)] {
        let after = train_with(&g, op, passes);
        close(&after[0], &[1.0 - 0.6 * factor, 2.0 - factor], "a");
        close(&after[1], &[1.0 - 0.6 * factor, 2.0 - factor], "b");
        let fade = |c: f32, weight: f32| c * (1.0 - 0.2 * factor * weight).powi(2);
        close(&after[2], &[fade(1.0, 3.0), fade(2.0, 5.0)], "c");
    }
    // A later pass finds what an earlier one has left.
    let after = train_with(&g, op, vec![scale_applied(0.5), scale_applied(0.5)]);
    close(&after[0], &[1.0 - 0.15, 2.0 - 0.25], "a, scaled twice");
}

#[test]
fn rows_are_scaled_as_whole_gradients_are() {
    for kind in [VariableKind::Resource, VariableKind::Reference] {
        let train = |rate: f64, passes: Vec<Pass>| {
            let g = kolo_ops::graph();
            let (_, _, loss) = problem(&g, kind);
            let op = Momentum::new(rate, 0.9).minimize(loss, None).unwrap();
            let after = train_with(&g, op, passes);
            (values(&after[0]), values(&after[1]))
        };
        // With momentum and a constant rate, half the gradient is half the rate.
        let (w, e) = train(0.05, vec![]);
        let (scaled_w, scaled_e) = train(0.1, vec![scale_applied(0.5)]);
        for (found, expected) in scaled_w.iter().chain(&scaled_e).zip(w.iter().chain(&e)) {
            assert!((found - expected).abs() < 1e-6, "{scaled_w:?} {scaled_e:?} for {w:?} {e:?}");
        }
        assert_ne!(train(0.1, vec![]).1, e);
    }
}

/// Loss scaling: backward begins with 8 and updates see an eighth of what leaves it, before the clip.
#[test]
fn a_pass_scales_the_loss_and_unscales_what_leaves_backward() {
    let g = kolo_ops::graph();
    let loss = mlp(&g);
    let clip = MinimizeOptions { clip: Some(Clip::GlobalNorm(0.05)), ..MinimizeOptions::default() };
    let op = Momentum::new(0.1, 0.9).minimize_with(loss, &clip).unwrap();
    let step = training(&g, op);
    for variable in &step.variables {
        // What is applied is not what backward makes: the clip is between.
        let read = &variable.reads.values()[0];
        let applied = g.operation(&read.node).unwrap().input(read.input);
        assert_ne!(applied, gradient(&g, &step, &variable.name));
    }
    let scale = |unscale: f32| {
        on_step(Stage::Graph, move |graph, step| {
            for loss in &step.losses {
                let Some(start) = loss.start else { continue };
                let readers = graph.readers(start);
                let scaled = scaled(graph, start, 8.0)?;
                graph.redirect_inputs(&readers, scaled)?;
            }
            let grads = step.variables.iter().flat_map(|variable| &variable.gradients);
            let grads: HashSet<Endpoint> = grads.map(|(_, grad)| *grad.values()).collect();
            assert_eq!(grads.len(), 6);
            for grad in grads {
                let leaving = step.leaving(graph, grad);
                // The norm and the clipped gradient.
                assert_eq!(leaving.len(), 2);
                let scaled = scaled(graph, grad, unscale)?;
                graph.redirect_inputs(&leaving, scaled)?;
            }
            Ok(())
        })
    };
    let plain = train_with(&g, op, vec![]);
    let max = |after: &[Tensor]| {
        let far = |(a, b): (&Tensor, &Tensor)| {
            values(a).iter().zip(values(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
        };
        after.iter().zip(&plain).map(far).fold(0.0, f32::max)
    };
    assert_eq!(max(&train_with(&g, op, vec![scale(0.125)])), 0.0);
    // Clipped to a norm, a factor too many shows only if the norm is small enough.
    assert!(max(&train_with(&g, op, vec![scale(0.0001)])) > 1e-3);
}

/// A pass gets the order of the graph as earlier passes left it.
#[test]
fn a_pass_that_delays_a_gradient_changes_the_order() {
    let g = kolo_ops::graph();
    let [short, long] = ["short", "long"].map(|name| g.variable(name, [0.5f32, 0.25]));
    let loss = ops::sum_all(ops::tanh(short.read())) + ops::sum_all(ops::tanh(ops::tanh(long.read())));
    let op = Sgd::new(0.1).minimize(loss, None).unwrap();
    assert_eq!(names(&training(&g, op)), ["short", "long"]);
    let orders = Arc::new(Mutex::new(Vec::new()));
    let note = || {
        let orders = orders.clone();
        on_step(Stage::Graph, move |_, step| {
            let names: Vec<String> = step.variables.iter().map(|variable| variable.name.to_string()).collect();
            orders.lock().unwrap().push(names.join(" "));
            Ok(())
        })
    };
    let delay = on_step(Stage::Graph, |graph, step| {
        let (_, grad) = &step.variables[0].gradients[0];
        let maker = grad.values().node;
        let mut at = graph.node(maker).unwrap().inputs[1];
        for _ in 0..10 {
            at = Endpoint { node: graph.add("Identity", "delay", &[at], Attrs::default())?, index: 0 };
        }
        graph.redirect_inputs(&[(maker, 1)], at)
    });
    train_with(&g, op, vec![note(), delay, note()]);
    assert_eq!(*orders.lock().unwrap(), ["short long", "long short"]);
}

#[test]
fn a_part_has_its_share_of_a_step() {
    let g = kolo_ops::graph();
    let variables: Vec<Variable<'_>> =
        (0..2).map(|i| g.device(&format!("/cpu:{i}"), || g.variable(&format!("w{i}"), [1.0f32, 2.0]))).collect();
    let loss = ops::sum_all(ops::square(variables[0].read() * variables[1].read()));
    let op = Sgd::new(0.1).minimize(loss, None).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let pass = on_step(Stage::Part, {
        let seen = seen.clone();
        move |graph, step| {
            for variable in step.variables.iter().filter(|variable| variable.update.is_some()) {
                let (handle, applied) = (variable.handle.unwrap(), variable.applied.clone().unwrap());
                assert!([handle, applied.values().node].iter().all(|id: &NodeId| graph.node(*id).is_some()));
                seen.lock().unwrap().push((variable.name.to_string(), step.variables.len()));
            }
            Ok(())
        }
    });
    let device_count = [("CPU".to_owned(), 2), ("GPU".to_owned(), 0)].into();
    let config = SessionConfig { passes: vec![pass], device_count, ..SessionConfig::default() };
    let init = g.global_variables_initializer();
    let session = Session::with_config(&g, config).unwrap();
    session.run_op(init).unwrap();
    assert!(seen.lock().unwrap().is_empty(), "initializing is no training");
    session.run_op(op).unwrap();
    let mut seen = seen.lock().unwrap().clone();
    seen.sort();
    let names: Vec<&str> = seen.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["w0", "w1"]);
}

/// An optimizer around another one: the gradients are those of backward, what is applied is what the other one gets.
#[test]
fn optimizers_around_others_tell_the_truth() {
    let sgd = || Momentum::new(0.1, 0.9);
    let all: Vec<(Box<dyn Optimizer>, bool)> = vec![
        (Box::new(Accumulate::new(sgd(), 4)), true),
        (Box::new(SyncReplicas::new(sgd(), 2)), true),
        (Box::new(HybridReplicas::new(sgd(), 0, 2)), true),
        (Box::new(AsyncReplicas::new(sgd(), 0, 2)), false),
        (Box::new(ParameterAveraging::new(sgd(), 3, 0, 2)), false),
        (Box::new(SyncReplicas::new(Accumulate::new(sgd(), 4), 2)), true),
    ];
    for (i, (optimizer, is_indirect)) in all.iter().enumerate() {
        let g = kolo_ops::graph();
        let (w, e, loss) = problem(&g, VariableKind::Resource);
        let step = train::global_step_or_create(&g).unwrap();
        let op = optimizer.minimize(loss, Some(step)).unwrap();
        let training = training(&g, op);
        assert_eq!(g.trainings().len(), 1);
        assert_eq!(training.losses[0].value.to_string(), loss.name(), "{i}");
        assert_eq!(training.variables.len(), 2, "{i}");
        assert_eq!((*training.op == *training.update_op), i == 4, "{i}");
        for (variable, n_slots) in [w, e].map(|variable| (variable, if [0, 5].contains(&i) { 2 } else { 1 })) {
            let of = training.variable(&variable.name()).unwrap();
            let [(0, grad)] = of.gradients.as_slice() else { panic!("{i}: {of:?}") };
            assert!(training.forward_of(&grad.values().node).is_some(), "{i}: {of:?}");
            let read = &of.reads.values()[0];
            let applied = g.operation(&read.node).unwrap().input(read.input).name();
            assert_eq!(applied != grad.values().to_string(), *is_indirect, "{i}: {of:?}");
            assert_eq!(of.slots.len(), n_slots, "{i}: {of:?}");
            assert!(of.update.contains("update_"), "{i}: {of:?}");
        }
    }
    let g = kolo_ops::graph();
    let (_, _, loss) = problem(&g, VariableKind::Resource);
    let op = Accumulate::new(Sgd::new(0.1), 1).minimize(loss, None).unwrap();
    assert_eq!(training(&g, op).variables.len(), 2);
}

/// Accumulation still computes what it did if a pass changes what is applied.
#[test]
fn a_pass_scales_what_was_accumulated() {
    let g = kolo_ops::graph();
    let w = g.variable("w", [1.0f32, 2.0]);
    let loss = ops::sum_all(w.read() * g.constant([3.0f32, 5.0]));
    let op = Accumulate::new(Sgd::new(0.1), 2).minimize(loss, None).unwrap();
    let after = train_with(&g, op, vec![scale_applied(2.0)]);
    close(&after[0], &[1.0 - 0.6, 2.0 - 1.0], "w");
}
