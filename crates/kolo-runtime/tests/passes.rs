//! Every pass, and all of them together, on random graphs with loops, branches, variables and several devices: what is
//! computed stays the same. On a machine with a GPU its passes are tried there.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use kolo_core::{Code, Tensor};
use kolo_graph::{Endpoint, Graph, Operation, Output, Pass, Stage, WhileOptions};
use kolo_ops::math::matmul::matmul;
use kolo_ops::nn::bias_add::bias_add;
use kolo_ops::nn::relu::relu;
use kolo_ops::optim::gradient_descent::apply_gradient_descent;
use kolo_runtime::testing::{Run, check_rewrite};
use kolo_runtime::{Session, SessionConfig, fusion_passes};

/// Square matrices, so that everything fits everything.
const N: usize = 4;

/// A small generator of numbers; the same everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    fn matrix(&mut self, dims: &[usize]) -> Tensor {
        let shape = kolo_core::Shape::new(dims).unwrap();
        let values: Vec<f32> = (0..shape.n_elements()).map(|_| self.roll(2000) as f32 / 1000.0 - 1.0).collect();
        Tensor::from_vec(shape, values).unwrap()
    }
}

struct Made<'g> {
    init: Operation<'g>,
    fetches: Vec<Output<'g>>,
    feeds: Vec<(Output<'g>, Tensor)>,
    targets: Vec<Operation<'g>>,
}

/// A graph of about thirty nodes over what is bounded: values stay small.
fn random_graph<'g>(g: &'g Graph, dice: &mut Dice, devices: &[&str]) -> Made<'g> {
    let x = g.placeholder::<f32>("x", [Some(N), Some(N)]);
    let feeds = vec![(x, dice.matrix(&[N, N]))];
    let (w, b) = (g.variable("w", dice.matrix(&[N, N])), g.variable("b", dice.matrix(&[N])));
    let mut values = vec![x, w.read(), g.constant(dice.matrix(&[N, N]))];
    let mut targets = Vec::new();
    for _ in 0..12 + dice.roll(16) {
        let (a, other) = (values[dice.roll(values.len())], values[dice.roll(values.len())]);
        let kind = dice.roll(13);
        let seed = dice.roll(1 << 20) as u64;
        let made = g.device(devices[dice.roll(devices.len())], || match kind {
            0 | 1 => g.op("Tanh").input(matmul(a, other)).out(),
            2 => g.op("Tanh").input(a + other).out(),
            3 => relu(a * other),
            4 => relu(bias_add(matmul(a, other), b.read())),
            5 => g.op("Tanh").input(matmul(a, w.read()) + other).out(),
            6 => g.op("Sigmoid").input(bias_add(a, b.read())).out(),
            7 => g.op("Identity").input(a).out(),
            8 => g.op("TanhGrad").input(g.op("Tanh").input(a).out()).input(other).out() * 0.5,
            9 => {
                let total = g.op("Sum").input(a).input(g.constant([0i32, 1])).out();
                let is_large = g.op("Greater").input(total).input(g.constant(0.0f32)).out();
                g.cond(is_large, || vec![g.op("Tanh").input(other).out()], || vec![relu(other)]).unwrap()[0]
            }
            10 => {
                let limit = g.constant(1 + (seed % 3) as i32);
                let body = |g: &'g Graph, v: &[Output<'g>]| {
                    vec![v[0] + g.constant(1i32), g.op("Tanh").input(matmul(v[1], other)).out()]
                };
                let less = |g: &'g Graph, v: &[Output<'g>]| g.op("Less").input(v[0]).input(limit).out();
                g.while_loop(&[g.constant(0i32), a], less, body, WhileOptions::default()).unwrap()[1]
            }
            11 => g.control_dependencies(&[other.operation()], || g.op("Neg").input(a).out()),
            _ => g.op("Tanh").input(g.op("AddN").inputs([a, other, x]).out()).out(),
        });
        values.push(made);
    }
    let gradient = g.op("Tanh").input(matmul(*values.last().unwrap(), x)).out();
    let update = apply_gradient_descent(w.handle(), g.constant(0.01f32), gradient);
    targets.push(update);
    let fetches = vec![*values.last().unwrap(), values[dice.roll(values.len())], gradient];
    Made { init: g.global_variables_initializer(), fetches, feeds, targets }
}

fn check_seed(seed: u64, devices: &[&str], passes: &[Pass], config: &SessionConfig) {
    let g = kolo_ops::graph();
    let made = random_graph(&g, &mut Dice(seed), devices);
    g.check().unwrap();
    let run = Run { init: Some(made.init), fetches: &made.fetches, feeds: &made.feeds, targets: &made.targets };
    let names: Vec<&str> = passes.iter().map(Pass::name).collect();
    if let Err(error) = check_rewrite(&g, run, passes, config) {
        panic!("seed {seed}, passes {names:?} on {devices:?}: {error}\n{}", g.snapshot());
    }
}

/// A pass that is no fusion: values take a way round, which nothing may notice.
fn detour(stage: Stage) -> Pass {
    Pass::new("detour", stage, "a test", |graph, _| {
        for id in graph.ids() {
            let Some(node) = graph.node(id).filter(|node| node.op() == "Tanh") else { continue };
            let at = Endpoint { node: id, index: 0 };
            let name = format!("{}/detour", node.name);
            let identity = graph.add("Identity", &name, &[at], kolo_graph::Attrs::default())?;
            graph.splice(at, identity)?;
        }
        Ok(())
    })
}

fn cpus(n: usize) -> SessionConfig {
    SessionConfig { device_count: [("CPU".to_owned(), n), ("GPU".to_owned(), 0)].into(), ..SessionConfig::default() }
}

#[test]
fn all_passes_keep_what_random_graphs_compute() {
    let mut passes = fusion_passes();
    passes.extend([detour(Stage::Graph)]);
    for seed in 0..40 {
        check_seed(seed, &["/cpu:0"], &passes, &cpus(1));
        check_seed(seed + 1000, &["/cpu:0", "/cpu:1"], &passes, &cpus(2));
    }
}

#[test]
fn each_pass_keeps_what_random_graphs_compute() {
    let others = [detour(Stage::Graph), detour(Stage::Part)];
    for (i, pass) in fusion_passes().into_iter().chain(others).enumerate() {
        for seed in 0..6 {
            check_seed(seed + 100 * i as u64, &["/cpu:0", "/cpu:1", ""], std::slice::from_ref(&pass), &cpus(2));
        }
    }
}

#[test]
fn passes_of_gpus_keep_what_random_graphs_compute() {
    if let Some(why) = kolo_device::cuda::discover(None).absent {
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "skipped: passes_of_gpus_keep_what_random_graphs_compute: {why}");
        return;
    }
    let config = SessionConfig { device_count: [("CPU".to_owned(), 2)].into(), ..SessionConfig::default() };
    for seed in 0..30 {
        check_seed(seed, &[""], &fusion_passes(), &config);
        check_seed(seed + 1000, &["", "/cpu:0", "/cpu:1", "/gpu:0"], &fusion_passes(), &config);
    }
    for (i, pass) in fusion_passes().into_iter().enumerate() {
        for seed in 0..3 {
            check_seed(seed + 10_000 * i as u64, &["", "/cpu:1"], std::slice::from_ref(&pass), &config);
        }
    }
}

/// Were it not so, the tests above would hold anything.
#[test]
fn a_pass_that_changes_values_is_noticed() {
    let wrong = Pass::new("wrong", Stage::Graph, "a test", |graph, _| {
        for id in graph.ids() {
            if let Some(node) = graph.node(id).filter(|node| node.op() == "Add" || node.op() == "AddV2") {
                let mut other = kolo_graph::Node::clone(node);
                other.def = kolo_ops::find_op("Mul")?.def;
                graph.replace(id, other);
            }
        }
        Ok(())
    });
    let g = kolo_ops::graph();
    let sum = g.constant(3.0f32) + g.constant(4.0f32);
    let run = Run { init: None, fetches: &[sum], feeds: &[], targets: &[] };
    let error = check_rewrite(&g, run, &[wrong], &cpus(1)).unwrap_err();
    assert!(error.message().contains("differs in step 0"), "{error}");
}

#[test]
fn a_pass_of_the_users_own_is_listed_run_and_blamed() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [Some(2)]);
    let y = g.op("Neg").name("y").input(g.op("Neg").name("inner").input(x).out()).out();
    let double_negation = Pass::new("double-negation", Stage::Graph, "-(-x) is x", |graph, _| {
        for id in graph.ids() {
            let Some(outer) = graph.node(id).filter(|node| node.op() == "Neg") else { continue };
            let Some(inner) = graph.node(outer.inputs[0].node).filter(|node| node.op() == "Neg") else { continue };
            let x = inner.inputs[0];
            let identity = graph.add("Identity", "same", &[x], kolo_graph::Attrs::default())?;
            graph.redirect(Endpoint { node: id, index: 0 }, Endpoint { node: identity, index: 0 })?;
        }
        graph.remove_dead();
        Ok(())
    });
    let config = SessionConfig { passes: vec![double_negation], ..cpus(1) };
    let session = Session::with_config(&g, config).unwrap();
    let value = Tensor::from([1.0f32, -2.0]);
    assert_eq!(session.run(&[y], &[(x, value.clone())], &[]).unwrap(), [value]);
    let report = session.local().unwrap().explain_passes(&["y"], Some("double-negation")).unwrap();
    let record = report.log.iter().find(|record| record.pass == "double-negation").unwrap();
    assert!(record.has_changed);
    assert!(
        report.text.as_ref().is_some_and(|text| text.contains("same = Identity") && !text.contains("Neg")),
        "{report}"
    );
    let names: Vec<&str> = report.passes.iter().map(Pass::name).collect();
    let at = |name: &str| names.iter().position(|other| *other == name).unwrap();
    assert!(at("prune") < at("double-negation") && at("double-negation") < at("place"), "{names:?}");

    let error = session.local().unwrap().explain_passes(&["y"], Some("double-negative")).unwrap_err();
    assert_eq!(error.code(), Code::NotFound);

    let broken = Pass::new("broken", Stage::Graph, "a test", |graph, _| {
        let (inner, y) = (graph.find("inner"), graph.find("y"));
        graph.merge(inner.unwrap(), y.unwrap());
        Ok(())
    });
    let session = Session::with_config(&g, SessionConfig { passes: vec![broken], ..cpus(1) }).unwrap();
    let error = session.run(&[y], &[(x, Tensor::from([1.0f32, 2.0]))], &[]).unwrap_err();
    assert!(error.to_string().contains("pass 'broken'"), "{error}");
}

#[test]
fn an_optional_pass_that_fails_leaves_the_part_alone() {
    let g = kolo_ops::graph();
    let x = g.placeholder::<f32>("x", [Some(2)]);
    let y = g.op("Neg").name("y").input(g.op("Neg").name("inner").input(x).out()).out();
    let broken = Pass::new("broken", Stage::Part, "a test", |graph, _| {
        let (inner, y) = (graph.find("inner"), graph.find("y"));
        graph.merge(inner.unwrap(), y.unwrap());
        Ok(())
    });
    let session = |pass: Pass| Session::with_config(&g, SessionConfig { passes: vec![pass], ..cpus(1) }).unwrap();
    let value = Tensor::from([1.0f32, -2.0]);
    let run = |session: &Session| session.run(&[y], &[(x, value.clone())], &[]);
    assert!(run(&session(broken.clone())).is_err());

    let optional = session(broken.clone().optional());
    assert_eq!(run(&optional).unwrap(), std::slice::from_ref(&value));
    let report = optional.local().unwrap().explain_passes(&["y"], None).unwrap();
    let record = report.log.iter().find(|record| record.pass == "broken").unwrap();
    assert!(record.undone.as_ref().is_some_and(|why| why.contains("'y'")), "{record:?}");

    // For another kind of device it never runs.
    assert_eq!(run(&session(broken.on_kind("GPU"))).unwrap(), std::slice::from_ref(&value));
}
