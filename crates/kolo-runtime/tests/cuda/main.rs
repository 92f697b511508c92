//! Sessions on a real GPU. On a machine without one every test says that it was skipped, and why, with
//! a count.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kolo_core::{Code, DType, DeviceSpec, Tensor};
use kolo_graph::{Graph, Operation, Output, Variable, gradients};
use kolo_ops::math::matmul::matmul;
use kolo_ops::nn::conv2d::conv2d;
use kolo_ops::nn::max_pool::max_pool;
use kolo_ops::nn::relu::relu;
use kolo_ops::optim::adam::apply_adam;
use kolo_ops::optim::gradient_descent::apply_gradient_descent;
use kolo_runtime::{GpuOptions, RunOptions, Session, SessionConfig};

/// The body of a test, unless there is no GPU. A skipped test says so where the harness does not hide it.
fn on_gpu(test: impl FnOnce()) {
    static SKIPPED: AtomicUsize = AtomicUsize::new(0);
    match kolo_device::cuda::discover(None).absent {
        Some(why) => {
            let n = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
            let name = std::thread::current().name().unwrap_or("a test").to_owned();
            // Written past the harness, which shows what passing tests print only on request.
            let _ = writeln!(std::io::stderr(), "skipped ({n} GPU tests so far): {name}: {why}");
        }
        None => test(),
    }
}

fn config(gpu: GpuOptions) -> SessionConfig {
    SessionConfig { gpu, device_count: [("GPU".to_owned(), 8)].into(), ..SessionConfig::default() }
}

fn exact() -> GpuOptions {
    GpuOptions { full_precision: true, ..GpuOptions::default() }
}

fn spec(device: &str) -> DeviceSpec {
    DeviceSpec::parse(device).unwrap()
}

fn cpu_only() -> SessionConfig {
    SessionConfig { device_count: [("GPU".to_owned(), 0)].into(), ..SessionConfig::default() }
}

/// Numbers that look random and are the same everywhere.
fn wavy(dims: &[usize], seed: u32) -> Tensor {
    let n: usize = dims.iter().product();
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let values: Vec<f32> = (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        })
        .collect();
    Tensor::from_vec(kolo_core::Shape::new(dims).unwrap(), values).unwrap()
}

fn close(a: &Tensor, b: &Tensor, tolerance: f32) {
    assert_eq!((a.dtype(), a.shape()), (b.dtype(), b.shape()));
    let (a, b) = (a.data::<f32>().unwrap(), b.data::<f32>().unwrap());
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        assert!((x - y).abs() <= tolerance * (1.0 + x.abs()), "element {i}: {x} and {y}");
    }
}

struct Model<'g> {
    x: Output<'g>,
    y: Output<'g>,
    loss: Output<'g>,
    train: Operation<'g>,
    init: Operation<'g>,
}

/// Where a model's images and labels come from.
#[derive(Clone, Copy, PartialEq)]
enum Source {
    /// They are fed.
    Fed,
    /// So many of them lie on the device.
    Resident(usize),
}

/// A classifier, trained by gradient descent. `network` adds its variables to the list.
fn classifier<'g>(
    g: &'g Graph,
    width: usize,
    source: Source,
    network: impl FnOnce(Output<'g>, &mut Vec<Variable<'g>>) -> Output<'g>,
) -> Model<'g> {
    let (x, y) = match source {
        Source::Fed => (g.placeholder::<f32>("x", [None, Some(width)]), g.placeholder::<i64>("y", [None])),
        Source::Resident(n) => (g.variable("x", wavy(&[n, width], 5)).read(), g.variable("y", labels(n, 10)).read()),
    };
    let mut variables = Vec::new();
    let logits = network(x, &mut variables);
    let loss = g.op("SparseSoftmaxCrossEntropyWithLogits").input(logits).input(y).out();
    let loss = kolo_ops::math::reduce::sum::mean(loss, &[0]);
    let reads: Vec<Output<'g>> = variables.iter().map(|v| v.read()).collect();
    let grads = gradients(&[loss], &reads).unwrap();
    let lr = g.constant(0.1f32);
    let updates: Vec<Operation<'g>> = variables
        .iter()
        .zip(grads)
        .map(|(v, grad)| match grad {
            Some(kolo_graph::Grad::Dense(grad)) => apply_gradient_descent(v.handle(), lr, grad),
            _ => panic!("every variable has a dense gradient"),
        })
        .collect();
    let train = g.control_dependencies(&updates, || g.op("NoOp").name("train").build());
    let init = g.global_variables_initializer();
    g.check().unwrap();
    Model { x, y, loss, train, init }
}

/// `dims`, scaled for the number of inputs of each unit.
fn weights<'g>(g: &'g Graph, name: &str, dims: &[usize]) -> Variable<'g> {
    let inputs: usize = dims[..dims.len() - 1].iter().product();
    let scale = (2.0 / inputs as f32).sqrt();
    let seed = name.bytes().map(u32::from).sum();
    let start: Vec<f32> = wavy(dims, seed).data::<f32>().unwrap().iter().map(|x| x * scale).collect();
    g.variable(name, Tensor::from_vec(kolo_core::Shape::new(dims).unwrap(), start).unwrap())
}

fn biased<'g>(g: &'g Graph, x: Output<'g>, name: &str, n: usize, variables: &mut Vec<Variable<'g>>) -> Output<'g> {
    let b = g.variable(name, Tensor::zeros(DType::F32, [n]).unwrap());
    let y = g.op("BiasAdd").input(x).input(b.read()).out();
    variables.push(b);
    y
}

fn mlp<'g>(g: &'g Graph, widths: &[usize], source: Source) -> Model<'g> {
    classifier(g, widths[0], source, |mut at, variables| {
        for (i, pair) in widths.windows(2).enumerate() {
            let w = weights(g, &format!("w{i}"), pair);
            at = biased(g, matmul(at, w.read()), &format!("b{i}"), pair[1], variables);
            variables.push(w);
            if i + 2 < widths.len() {
                at = relu(at);
            }
        }
        at
    })
}

/// The LeNet of `kolo train mnist`.
fn lenet(g: &Graph, source: Source) -> Model<'_> {
    classifier(g, 784, source, |x, variables| {
        let mut x = g.op("Reshape").input(x).input(g.constant([-1i32, 28, 28, 1])).out();
        for (i, (before, after)) in [(1, 32), (32, 64)].into_iter().enumerate() {
            let w = weights(g, &format!("conv{i}"), &[5, 5, before, after]);
            x = biased(g, conv2d(x, w.read(), [1, 1], "SAME"), &format!("conv_b{i}"), after, variables);
            variables.push(w);
            x = max_pool(relu(x), [2, 2], [2, 2], "SAME");
        }
        x = g.op("Reshape").input(x).input(g.constant([-1i32, 7 * 7 * 64])).out();
        for (i, (before, after)) in [(7 * 7 * 64, 512), (512, 10)].into_iter().enumerate() {
            let w = weights(g, &format!("dense{i}"), &[before, after]);
            x = biased(g, matmul(x, w.read()), &format!("dense_b{i}"), after, variables);
            variables.push(w);
            if i == 0 {
                x = relu(x);
            }
        }
        x
    })
}

fn labels(n: usize, classes: i64) -> Tensor {
    Tensor::vector((0..n as i64).map(|i| i * 7 % classes).collect::<Vec<i64>>())
}

#[test]
fn a_gpu_and_a_cpu_learn_the_same() {
    on_gpu(|| {
        let losses = |config: SessionConfig| -> Vec<f32> {
            let g = kolo_ops::graph();
            let model = mlp(&g, &[20, 33, 10], Source::Fed);
            let session = Session::with_config(&g, config).unwrap();
            session.run_op(model.init).unwrap();
            let feeds = [(model.x, wavy(&[64, 20], 5)), (model.y, labels(64, 10))];
            (0..20)
                .map(|_| session.run(&[model.loss], &feeds, &[model.train]).unwrap()[0].scalar_value::<f32>().unwrap())
                .collect()
        };
        let (cpu, gpu) = (losses(cpu_only()), losses(config(exact())));
        println!("losses: cpu {:?}, gpu {:?}", &cpu[..3], &gpu[..3]);
        assert!(cpu[19] < cpu[0]);
        for (a, b) in cpu.iter().zip(&gpu) {
            assert!((a - b).abs() < 1e-4, "{cpu:?} and {gpu:?}");
        }
    });
}

#[test]
fn nodes_go_to_the_gpu_and_integers_stay_with_the_host() {
    on_gpu(|| {
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None, None]);
        let shape = g.op("Shape").input(x).out();
        let doubled = x * 2.0;
        let flat = g
            .op("Reshape")
            .input(doubled)
            .input(g.op("Prod").input(shape).input(g.constant([0i32])).attr("keep_dims", true).out())
            .out();
        let session = Session::with_config(&g, config(exact())).unwrap();
        let value = wavy(&[3, 4], 1);
        let found = session.run(&[flat, shape], &[(x, value.clone())], &[]).unwrap();
        let expected: Vec<f32> = value.data::<f32>().unwrap().iter().map(|x| x * 2.0).collect();
        assert_eq!(found, [Tensor::from(expected), Tensor::from([3i32, 4])]);
        let report = session.placement();
        assert!(report.rows.iter().all(|row| &*row.device.kind == "GPU"), "{report}");
    });
}

#[test]
fn values_cross_between_host_and_card() {
    on_gpu(|| {
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None]);
        let on = |device: &str, y: Output<'_>| {
            g.op("Mul")
                .name("m")
                .device(spec(device))
                .input(Output::new(&g, y.endpoint()))
                .input(g.constant(3.0f32))
                .out()
                .endpoint()
        };
        let mut y = x;
        for device in ["/gpu:0", "/cpu:0", "/gpu:0", "/cpu:0", "/gpu:0"] {
            y = Output::new(&g, on(device, y));
        }
        let session = Session::with_config(&g, config(exact())).unwrap();
        for n in [1usize, 5, 1000, 3_000_001] {
            let value = wavy(&[n], 3);
            let expected: Vec<f32> =
                value.data::<f32>().unwrap().iter().map(|x| x * 3.0 * 3.0 * 3.0 * 3.0 * 3.0).collect();
            close(&session.run(&[y], &[(x, value)], &[]).unwrap()[0], &Tensor::from(expected), 1e-6);
        }
    });
}

#[test]
fn int32_variables_are_refused_unless_placement_is_soft() {
    on_gpu(|| {
        let build = |g: &Graph| {
            let v = g
                .op("VarHandleOp")
                .name("v")
                .device(spec("/gpu:0"))
                .attr("dtype", DType::I32)
                .attr("shape", kolo_core::PartialShape::scalar())
                .out();
            let assign = g.op("AssignVariableOp").input(v).input(g.constant(3i32)).build();
            assign.name().to_string()
        };
        let g = kolo_ops::graph();
        let name = build(&g);
        let session = Session::with_config(&g, config(exact())).unwrap();
        let error = session.run_named(&[], &[], &[&name]).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        println!("{error}");
        let soft = SessionConfig { allow_soft_placement: true, ..config(exact()) };
        Session::with_config(&g, soft).unwrap().run_named(&[], &[], &[&name]).unwrap();
    });
}

#[test]
fn virtual_gpus_have_hard_limits_and_exchange_tensors() {
    on_gpu(|| {
        let mib = 1u64 << 20;
        let gpu = GpuOptions { virtual_devices: [(0, vec![64 * mib, 64 * mib, 64 * mib])].into(), ..exact() };
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [None]);
        let a = g.op("Mul").device(spec("/gpu:0")).input(x).input(g.constant(2.0f32)).out();
        let b = g.op("Mul").device(spec("/gpu:1")).input(a).input(g.constant(2.0f32)).out();
        let c = g.op("AddV2").device(spec("/gpu:2")).input(a).input(b).out();
        let session = Session::with_config(&g, config(gpu)).unwrap();
        let names: Vec<String> = session.list_devices().iter().map(|d| d.name.to_string()).collect();
        println!("{names:?}");
        let value = wavy(&[100_000], 9);
        let expected: Vec<f32> = value.data::<f32>().unwrap().iter().map(|x| x * 6.0).collect();
        close(&session.run(&[c], &[(x, value)], &[]).unwrap()[0], &Tensor::from(expected), 1e-6);
        let error = session.run(&[a], &[(x, Tensor::zeros(DType::F32, [17 << 20]).unwrap())], &[]).unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
        assert!(error.to_string().contains("limit of 67108864 bytes"), "{error}");
        println!("{error}");
    });
}

#[test]
fn a_fraction_that_the_card_does_not_have_is_refused() {
    on_gpu(|| {
        let share = |fraction: f64| {
            config(GpuOptions { per_process_gpu_memory_fraction: Some(fraction), allow_growth: Some(false), ..exact() })
        };
        let g = kolo_ops::graph();
        let x = g.constant(vec![1.0f32; 100]);
        let y = x * 2.0;
        let first = Session::with_config(&g, share(0.4)).unwrap();
        let second = Session::with_config(&g, share(0.4)).unwrap();
        let error = Session::with_config(&g, share(0.4)).err().expect("the card is full");
        assert_eq!(error.code(), Code::ResourceExhausted);
        println!("{error}");
        assert_eq!(first.fetch(y).unwrap(), second.fetch(y).unwrap());
        drop(first);
        Session::with_config(&g, share(0.4)).unwrap().fetch(y).unwrap();
    });
}

#[test]
fn a_loop_runs_with_its_state_on_the_card() {
    on_gpu(|| {
        let g = kolo_ops::graph();
        let x = g.constant(vec![1.0f32; 1000]);
        let found = g
            .while_loop(
                &[g.constant(0i32), x],
                |g, vars| g.op("Less").input(vars[0]).input(g.constant(10i32)).out(),
                |g, vars| vec![vars[0] + g.constant(1i32), vars[1] * 2.0],
                kolo_graph::WhileOptions::default(),
            )
            .unwrap();
        let session = Session::with_config(&g, config(exact())).unwrap();
        let outputs = session.run(&[found[1]], &[], &[]).unwrap();
        assert_eq!(outputs[0], Tensor::from(vec![1024.0f32; 1000]));
    });
}

#[test]
fn lenet_learns_the_same_on_a_gpu_and_on_a_cpu() {
    on_gpu(|| {
        let losses = |config: SessionConfig| -> Vec<f32> {
            let g = kolo_ops::graph();
            let model = lenet(&g, Source::Fed);
            let session = Session::with_config(&g, config).unwrap();
            session.run_op(model.init).unwrap();
            let feeds = [(model.x, wavy(&[16, 784], 5)), (model.y, labels(16, 10))];
            (0..10)
                .map(|_| session.run(&[model.loss], &feeds, &[model.train]).unwrap()[0].scalar_value::<f32>().unwrap())
                .collect()
        };
        let (cpu, gpu) = (losses(cpu_only()), losses(config(exact())));
        println!("losses: cpu {cpu:?}, gpu {gpu:?}");
        assert!(cpu[9] < cpu[0]);
        for (a, b) in cpu.iter().zip(&gpu) {
            assert!((a - b).abs() < 2e-3, "{cpu:?} and {gpu:?}");
        }
    });
}

#[test]
fn replays_give_what_plain_steps_give() {
    on_gpu(|| {
        let losses = |source: Source, no_capture: bool| -> Vec<u32> {
            let g = kolo_ops::graph();
            let model = mlp(&g, &[20, 33, 17, 10], source);
            let session = Session::with_config(&g, config(GpuOptions { no_capture, ..exact() })).unwrap();
            session.run_op(model.init).unwrap();
            let mut losses = Vec::new();
            for i in 0..40u32 {
                // Other values each time; another number of rows now and then; new variables in the middle.
                let n = if i % 13 == 12 { 40 } else { 64 };
                if i == 25 {
                    session.run_op(model.init).unwrap();
                }
                let feeds = match source {
                    Source::Fed => vec![(model.x, wavy(&[n, 20], i)), (model.y, labels(n, 10))],
                    Source::Resident(_) => Vec::new(),
                };
                let loss = session.run(&[model.loss], &feeds, &[model.train]).unwrap();
                losses.push(loss[0].scalar_value::<f32>().unwrap().to_bits());
            }
            let captures = session.captures();
            println!("captures: {captures:?}");
            assert_eq!(captures.iter().any(Result::is_ok), !no_capture, "{captures:?}");
            losses
        };
        // What the host sends depends on the shapes of feeds; resident data are shared with the constants they came from.
        for source in [Source::Fed, Source::Resident(64)] {
            // Afterwards the algorithms have been chosen, which make a difference in the last bits.
            losses(source, true);
            assert_eq!(losses(source, false), losses(source, true));
        }
    });
}

/// What stands in the middle of a network and cannot be captured.
type Middle = for<'g> fn(&'g Graph, Output<'g>) -> Output<'g>;

/// Nodes that split a step, and one of them.
const MIDDLES: [(&str, Middle, &str); 4] = [
    ("shown", |g, x| g.op("Print").input(x).attr("message", "shown").attr("first_n", 1i64).out(), "Print"),
    ("on the host", |g, x| g.op("Mul").device(spec("/cpu:0")).input(x).input(g.constant(0.5f32)).out(), "_Recv"),
    (
        "random",
        |g, x| {
            let shape = g.op("Shape").input(x).out();
            let uniform = g.op("RandomUniform").input(shape).attr("dtype", DType::F32).attr("seed", 7i64);
            x * uniform.attr("seed2", 8i64).out()
        },
        "RandomUniform",
    ),
    (
        "one of two",
        |g, x| {
            let mean = kolo_ops::math::reduce::sum::mean(x, &[0, 1]);
            let which = g.op("Greater").input(mean).input(g.constant(0.1f32)).out();
            g.cond(which, || vec![x * 0.5], || vec![x * 2.0]).unwrap()[0]
        },
        "Switch",
    ),
];

/// A network with something in the middle of it.
fn split_mlp<'g>(g: &'g Graph, middle: Middle) -> Model<'g> {
    // Of one width: each shape of a product takes a second to be timed.
    let widths = [32, 32, 32, 32, 32, 32, 32, 10];
    classifier(g, widths[0], Source::Fed, |mut at, variables| {
        for (i, pair) in widths.windows(2).enumerate() {
            let w = weights(g, &format!("w{i}"), pair);
            at = biased(g, matmul(at, w.read()), &format!("b{i}"), pair[1], variables);
            variables.push(w);
            if i + 2 < widths.len() {
                at = relu(at);
            }
            if i == 3 {
                at = middle(g, at);
            }
        }
        at
    })
}

/// The losses of forty steps, with other feeds each time, another number of rows now and then, and new variables in the middle.
fn split_losses(middle: Middle, splits: &str, config: SessionConfig) -> Vec<u32> {
    let no_capture = config.gpu.no_capture;
    let g = kolo_ops::graph();
    let model = split_mlp(&g, middle);
    let session = Session::with_config(&g, config).unwrap();
    session.run_op(model.init).unwrap();
    let mut losses = Vec::new();
    for i in 0..60u32 {
        let n = if i % 26 == 25 { 40 } else { 64 };
        if i == 35 {
            session.run_op(model.init).unwrap();
        }
        let feeds = [(model.x, wavy(&[n, 32], i)), (model.y, labels(n, 10))];
        let loss = session.run(&[model.loss], &feeds, &[model.train]).unwrap();
        losses.push(loss[0].scalar_value::<f32>().unwrap().to_bits());
    }
    let reports = session.capture_reports();
    let report = reports.iter().max_by_key(|report| report.segments.len()).unwrap();
    let n_replayed = report.segments.iter().filter(|segment| segment.is_ok()).count();
    println!("{splits}: {} of {} segments replayed: {report:?}", n_replayed, report.segments.len());
    match no_capture {
        true => assert_eq!(n_replayed, 0, "{report:?}"),
        false => {
            assert!(n_replayed >= 2 && n_replayed == report.segments.len(), "{report:?}");
            assert!(report.split_by.iter().any(|node| node.op == splits), "{report:?}");
        }
    }
    losses
}

#[test]
fn what_the_host_does_splits_a_step_into_segments() {
    on_gpu(|| {
        for (name, middle, splits) in MIDDLES {
            println!("{name}:");
            let losses = |no_capture| split_losses(middle, splits, config(GpuOptions { no_capture, ..exact() }));
            // Afterwards the algorithms have been chosen, which make a difference in the last bits.
            losses(true);
            assert_eq!(losses(false), losses(true), "{name}");
        }
    });
}

#[test]
fn fused_steps_learn_what_plain_ones_do() {
    on_gpu(|| {
        type Build<'a> = &'a dyn for<'g> Fn(&'g Graph) -> Model<'g>;
        let losses = |build: Build<'_>, width: usize, no_fusion: bool| -> Vec<f32> {
            let g = kolo_ops::graph();
            let model = build(&g);
            let session = Session::with_config(&g, config(GpuOptions { no_fusion, ..exact() })).unwrap();
            session.run_op(model.init).unwrap();
            // Few images and steps: the tools that look for races slow convolutions down a thousand times.
            let feeds = [(model.x, wavy(&[8, width], 5)), (model.y, labels(8, 10))];
            let options = RunOptions { trace: true, ..RunOptions::default() };
            let (_, metadata) = session.run_with(&options, &[model.loss], &feeds, &[model.train]).unwrap();
            let n_fused = metadata.trace.nodes.iter().filter(|node| node.op.starts_with("_Kolo")).count();
            assert_eq!(n_fused == 0, no_fusion);
            (0..6)
                .map(|_| session.run(&[model.loss], &feeds, &[model.train]).unwrap()[0].scalar_value::<f32>().unwrap())
                .collect()
        };
        let models: [(Build<'_>, usize, f32); 2] =
            [(&|g| mlp(g, &[21, 33, 18, 10], Source::Fed), 21, 1e-5), (&|g| lenet(g, Source::Fed), 784, 2e-3)];
        for (build, width, tolerance) in models {
            let (fused, plain) = (losses(build, width, false), losses(build, width, true));
            for (a, b) in fused.iter().zip(&plain) {
                assert!((a - b).abs() <= tolerance, "{fused:?} and {plain:?}");
            }
        }
    });
}

#[test]
fn fused_trees_compute_what_their_nodes_do() {
    on_gpu(|| {
        let cast = |x: Output<'static>, to: DType| x.graph().op("Cast").input(x).attr("DstT", to).out();
        let unary = |op: &str, x: Output<'static>| x.graph().op(op).input(x).out();
        let binary = |op: &str, x: Output<'static>, y: Output<'static>| x.graph().op(op).input(x).input(y).out();
        let values = |dtype: DType, shapes: &[&[usize]; 3], no_fusion: bool| -> Vec<Tensor> {
            // Kept for good: the closures above want graphs that do not end.
            let g: &'static Graph = Box::leak(Box::new(kolo_ops::graph()));
            let held: Vec<Output<'static>> = shapes
                .iter()
                .enumerate()
                .map(|(i, dims)| cast(g.variable(&format!("v{i}"), wavy(dims, i as u32 + 1)).read(), dtype))
                .collect();
            let (a, b, c) = (held[0], held[1], held[2]);
            let sum = unary("Tanh", a + b) * c;
            let less = binary("Less", sum, b);
            let chosen = g.op("SelectV2").input(less).input(sum).input(c * c).out();
            let leaky = g.op("LeakyRelu").input(a - c).attr("alpha", 0.25f32).out();
            let outputs = [
                unary("Sigmoid", sum) + unary("Abs", sum),
                cast(binary("Maximum", chosen, leaky), DType::F32),
                cast(cast(a * a + b, DType::F32) * cast(c, DType::F32), DType::F16),
                cast(unary("LogicalNot", less), DType::I64),
            ];
            let outputs: Vec<Output<'static>> = outputs.map(|x| cast(x, DType::F32)).to_vec();
            let init = g.global_variables_initializer();
            let session = Session::with_config(g, config(GpuOptions { no_fusion, ..exact() })).unwrap();
            session.run_op(init).unwrap();
            session.run(&outputs, &[], &[]).unwrap()
        };
        let shapes: [[&[usize]; 3]; 8] = [
            [&[1000], &[1000], &[1000]],
            [&[37, 64], &[64], &[37, 1]],
            [&[37, 63], &[63], &[1]],
            [&[5, 1, 7], &[3, 7], &[5, 3, 1]],
            [&[1], &[1], &[1]],
            [&[2, 0], &[1], &[2, 1]],
            [&[300, 700], &[700], &[300, 700]],
            [&[2, 3, 4, 5, 6], &[4, 1, 6], &[3, 1, 5, 1]],
        ];
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            for shapes in &shapes {
                let (fused, plain) = (values(dtype, shapes, false), values(dtype, shapes, true));
                for (i, (a, b)) in fused.iter().zip(&plain).enumerate() {
                    // The third has been through f16, in which a last bit of float may decide the rounding.
                    close(
                        a,
                        b,
                        if dtype == DType::BF16 {
                            1e-2
                        } else if i == 2 {
                            1e-3
                        } else {
                            1e-5
                        },
                    );
                }
            }
        }
    });
}

#[test]
fn products_on_top_of_a_residual_are_what_their_nodes_are() {
    on_gpu(|| {
        // Several runs, so that algorithms are timed and the step is captured; the residual is used again or dies.
        let values = |dtype: DType, (m, k, n): (usize, usize, usize), config: SessionConfig| -> (Vec<Tensor>, usize) {
            let g = kolo_ops::graph();
            let to = |x: Output<'_>, to: DType| {
                Output::new(&g, g.op("Cast").input(Output::new(&g, x.endpoint())).attr("DstT", to).out().endpoint())
            };
            let held = |name: &str, dims: &[usize], seed: u32| to(g.variable(name, wavy(dims, seed)).read(), dtype);
            let x = held("x", &[m, k], 1);
            let (w, wt, b) = (held("w", &[k, n], 2), held("wt", &[n, k], 3), held("b", &[n], 4));
            let plus = held("plus", &[m, n], 5);
            let product =
                |x: Output<'_>, w: Output<'_>| matmul(Output::new(&g, x.endpoint()), Output::new(&g, w.endpoint()));
            let bias = |x: Output<'_>| {
                Output::new(&g, g.op("BiasAdd").input(Output::new(&g, x.endpoint())).input(b).out().endpoint())
            };
            // On top of a value that dies with it, one that is seen too, and one in other dimensions.
            let dying = product(x, w) + g.op("Tanh").input(plus).out();
            let turned = g.op("MatMul").input(x).input(wt).attr("transpose_b", true).out();
            let biased = bias(turned) + plus;
            let clipped = relu(plus + bias(product(x, w)));
            let shape = g.constant([1i32, m as i32, n as i32]);
            let deep = g.op("Reshape").input(plus).input(shape).out();
            let deep = deep + g.op("Reshape").input(bias(product(x, w))).input(shape).out();
            let outputs: Vec<Output<'_>> = [dying, biased, clipped, deep].map(|y| to(y, DType::F32)).to_vec();
            let init = g.global_variables_initializer();
            let session = Session::with_config(&g, config).unwrap();
            session.run_op(init).unwrap();
            let options = RunOptions { trace: true, ..RunOptions::default() };
            let (_, metadata) = session.run_with(&options, &outputs, &[], &[]).unwrap();
            let n_fused = metadata.trace.nodes.iter().filter(|node| node.op == "_KoloFusedMatMulAdd").count();
            (0..5).for_each(|_| drop(session.run(&outputs, &[], &[]).unwrap()));
            (session.run(&outputs, &[], &[]).unwrap(), n_fused)
        };
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 4e-3), (DType::BF16, 3e-2), (DType::F64, 1e-6)] {
            for sizes in [(64, 32, 48), (7, 5, 3)] {
                let (fused, n_fused) = values(dtype, sizes, config(exact()));
                let (plain, none) = values(dtype, sizes, config(GpuOptions { no_fusion: true, ..exact() }));
                let (cpu, _) = values(dtype, sizes, cpu_only());
                assert_eq!((n_fused, none), (if dtype == DType::F64 { 0 } else { 4 }, 0), "{dtype}");
                for ((fused, plain), cpu) in fused.iter().zip(&plain).zip(&cpu) {
                    close(fused, plain, tolerance);
                    close(fused, cpu, tolerance);
                }
            }
        }
    });
}

#[test]
fn descent_within_a_product_learns_what_a_cpu_does() {
    on_gpu(|| {
        let losses = |config: SessionConfig, wants: bool| -> Vec<f32> {
            let g = kolo_ops::graph();
            let model = mlp(&g, &[64, 1024, 1024, 10], Source::Resident(48));
            let session = Session::with_config(&g, config).unwrap();
            session.run_op(model.init).unwrap();
            let options = RunOptions { trace: true, ..RunOptions::default() };
            let (_, metadata) = session.run_with(&options, &[], &[], &[model.train]).unwrap();
            assert_eq!(metadata.trace.nodes.iter().any(|node| node.op == "_KoloApplyProduct"), wants);
            (0..6)
                .map(|_| session.run(&[model.loss], &[], &[model.train]).unwrap()[0].scalar_value::<f32>().unwrap())
                .collect()
        };
        let (cpu, gpu) = (losses(cpu_only(), false), losses(config(exact()), true));
        println!("losses: cpu {cpu:?}, gpu {gpu:?}");
        assert!(cpu[5] < cpu[0]);
        for (a, b) in cpu.iter().zip(&gpu) {
            assert!((a - b).abs() < 1e-3, "{cpu:?} and {gpu:?}");
        }
    });
}

#[test]
fn narrow_products_agree_with_a_cpu() {
    on_gpu(|| {
        let values = |dtype: DType, (m, k, n): (usize, usize, usize), config: SessionConfig| -> Vec<Tensor> {
            let g = kolo_ops::graph();
            let to = |x: Output<'_>, to: DType| {
                Output::new(&g, g.op("Cast").input(Output::new(&g, x.endpoint())).attr("DstT", to).out().endpoint())
            };
            let held = |name: &str, dims: &[usize], seed: u32| to(g.variable(name, wavy(dims, seed)).read(), dtype);
            let mut outputs = Vec::new();
            for (i, (turned_a, turned_b)) in [(false, false), (false, true), (true, false)].into_iter().enumerate() {
                let a = held(&format!("a{i}"), &if turned_a { [k, m] } else { [m, k] }, 1);
                let b = held(&format!("b{i}"), &if turned_b { [n, k] } else { [k, n] }, 2);
                let product =
                    || g.op("MatMul").input(a).input(b).attr("transpose_a", turned_a).attr("transpose_b", turned_b);
                outputs.push(to(product().out(), DType::F32));
                let bias = held(&format!("bias{i}"), &[n], 3);
                let biased = g.op("BiasAdd").input(product().out()).input(bias).out();
                outputs.push(to(relu(biased), DType::F32));
            }
            let init = g.global_variables_initializer();
            let session = Session::with_config(&g, config).unwrap();
            session.run_op(init).unwrap();
            session.run(&outputs, &[], &[]).unwrap()
        };
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
            for sizes in [
                (1, 1, 1),
                (5, 33, 3),
                (100, 100, 10),
                (1030, 700, 10),
                (64, 512, 16),
                (300, 2050, 1),
                (37, 10, 100),
                (1024, 10, 513),
                (3, 16, 4096),
                (2, 1, 7),
            ] {
                let (gpu, cpu) = (values(dtype, sizes, config(exact())), values(dtype, sizes, cpu_only()));
                for (gpu, cpu) in gpu.iter().zip(&cpu) {
                    close(gpu, cpu, tolerance * (1.0 + sizes.1 as f32).sqrt().max(1.0));
                }
            }
        }
    });
}

#[test]
fn columns_are_summed_with_what_they_come_from() {
    on_gpu(|| {
        let sums = |rows: usize, columns: usize, no_fusion: bool| -> Vec<Tensor> {
            let g = kolo_ops::graph();
            let dy = g.variable("dy", wavy(&[rows, columns], 1)).read();
            let y = g.variable("y", wavy(&[rows, columns], 2)).read();
            let dx = g.op("ReluGrad").input(dy).input(y).out();
            let outputs = [dx, g.op("BiasAddGrad").input(dx).out(), g.op("BiasAddGrad").input(y).out()];
            let init = g.global_variables_initializer();
            let session = Session::with_config(&g, config(GpuOptions { no_fusion, ..exact() })).unwrap();
            session.run_op(init).unwrap();
            // Twice: the counters in the kernel must be zero again.
            session.run(&outputs, &[], &[]).unwrap();
            session.run(&outputs, &[], &[]).unwrap()
        };
        for (rows, columns) in [(1, 1), (3, 10), (100, 100), (1024, 4096), (70_000, 32), (50_000, 7), (5, 40_000)] {
            let (fused, plain) = (sums(rows, columns, false), sums(rows, columns, true));
            let (dy, y) = (wavy(&[rows, columns], 1), wavy(&[rows, columns], 2));
            let (dy, y) = (dy.data::<f32>().unwrap(), y.data::<f32>().unwrap());
            let expected: Vec<f32> = (0..columns)
                .map(|c| {
                    let column =
                        (0..rows).map(|r| r * columns + c).filter(|&at| y[at] > 0.0).map(|at| f64::from(dy[at]));
                    column.sum::<f64>() as f32
                })
                .collect();
            close(&fused[0], &plain[0], 0.0);
            let expected = Tensor::from_vec([columns], expected).unwrap();
            close(&fused[1], &expected, 1e-3);
            close(&plain[1], &expected, 1e-3);
            close(&fused[2], &plain[2], 0.0);
        }
    });
}

#[test]
fn variables_that_are_assigned_in_a_step_are_captured() {
    on_gpu(|| {
        let counts = |no_capture: bool| -> Vec<f32> {
            let g = kolo_ops::graph();
            let power = g.variable("power", Tensor::from(vec![1.0f32; 5]));
            let next = power.assign(power.read() * 0.5);
            let seen = g.control_dependencies(&[next], || power.read_now() + 0.0);
            let init = g.global_variables_initializer();
            let session = Session::with_config(&g, config(GpuOptions { no_capture, ..exact() })).unwrap();
            session.run_op(init).unwrap();
            let all = (0..20).map(|_| session.fetch(seen).unwrap().data::<f32>().unwrap()[4]).collect();
            let captures = session.captures();
            assert_eq!(captures.iter().any(Result::is_ok), !no_capture, "{captures:?}");
            all
        };
        let (captured, plain) = (counts(false), counts(true));
        assert_eq!(captured, plain);
        assert_eq!(captured[19], 0.5f32.powi(20));
    });
}

#[test]
fn adam_learns_the_same_weights_when_captured() {
    on_gpu(|| {
        let weights = |no_capture: bool, no_fusion: bool| -> Vec<Tensor> {
            let g = kolo_ops::graph();
            let zeros = |dims: &[usize]| Tensor::zeros(DType::F32, kolo_core::Shape::new(dims).unwrap()).unwrap();
            let (x, y) = (g.constant(wavy(&[30, 40], 1)), g.constant(wavy(&[30, 7], 2)));
            let variables = [g.variable("w", wavy(&[40, 7], 3)), g.variable("b", zeros(&[7]))];
            let error = g.op("BiasAdd").input(matmul(x, variables[0].read())).input(variables[1].read()).out() - y;
            let reads = variables.map(|v| v.read());
            let loss = kolo_ops::math::reduce::sum::mean(error * error, &[0, 1]);
            let powers =
                [g.variable("beta1_power", Tensor::from(0.9f32)), g.variable("beta2_power", Tensor::from(0.999f32))];
            let [lr, beta1, beta2, epsilon] = [0.01f32, 0.9, 0.999, 1e-8].map(|value| g.constant(value));
            let mut updates = Vec::new();
            for ((v, dims), grad) in
                variables.iter().zip([vec![40, 7], vec![7]]).zip(gradients(&[loss], &reads).unwrap())
            {
                let Some(kolo_graph::Grad::Dense(grad)) = grad else { panic!("every variable has a dense gradient") };
                let moments = ["m", "v"].map(|m| g.variable(&format!("{}_{m}", v.name()), zeros(&dims)).handle());
                let places = [v.handle(), moments[0], moments[1]];
                let powers = powers.map(|power| power.read());
                updates.push(apply_adam(places, powers, lr, [beta1, beta2], epsilon, grad, false));
            }
            let train = g.control_dependencies(&updates, || {
                let next = [powers[0].assign(powers[0].read() * beta1), powers[1].assign(powers[1].read() * beta2)];
                g.control_dependencies(&next, || g.op("NoOp").name("train").build())
            });
            let init = g.global_variables_initializer();
            let session = Session::with_config(&g, config(GpuOptions { no_capture, no_fusion, ..exact() })).unwrap();
            session.run_op(init).unwrap();
            (0..50).for_each(|_| session.run_op(train).unwrap());
            let captures = session.captures();
            assert_eq!(captures.iter().any(Result::is_ok), !no_capture, "{captures:?}");
            session.run(&[reads[0], reads[1], powers[0].read(), powers[1].read()], &[], &[]).unwrap()
        };
        // Afterwards the algorithms have been chosen, which make a difference in the last bits.
        weights(true, false);
        let (captured, plain) = (weights(false, false), weights(true, false));
        assert_eq!(captured, plain);
        for (a, b) in captured.iter().zip(&weights(true, true)) {
            close(a, b, 1e-4);
        }
        let power = captured[2].scalar_value::<f32>().unwrap();
        assert!((power - 0.9f32.powi(51)).abs() < 1e-5, "{power}");
    });
}

#[test]
fn a_trace_shows_kernels_and_copies_where_they_ran() {
    on_gpu(|| {
        let g = kolo_ops::graph();
        let (_, middle, _) = MIDDLES[0];
        let model = split_mlp(&g, middle);
        let session = Session::with_config(&g, config(exact())).unwrap();
        session.run_op(model.init).unwrap();
        let feeds = [(model.x, wavy(&[64, 32], 1)), (model.y, labels(64, 10))];
        let options = RunOptions { trace: true, ..RunOptions::default() };
        let run = || session.run_with(&options, &[model.loss], &feeds, &[model.train]).unwrap().1.trace;
        // Replays or not, a traced step shows every node.
        (0..20).for_each(|_| drop(session.run(&[model.loss], &feeds, &[model.train]).unwrap()));
        let trace = run();
        let ran =
            |op: &str, device: &str| trace.nodes.iter().any(|node| node.op == op && node.device.ends_with(device));
        for (op, device) in [
            ("_KoloFusedMatMul", "/device:GPU:0"),
            ("_KoloApplyAll", "/device:GPU:0"),
            ("_Copy", "/device:GPU:0"),
            ("_Send", "/device:GPU:0"),
            ("_Recv", "/device:GPU:0"),
            ("Print", "/device:CPU:0"),
        ] {
            assert!(ran(op, device), "{op} on {device}");
        }
        println!("trace: {}", trace.to_chrome_json());
        for row in session.placement().rows {
            println!("placement: {}", row.log_line());
        }
    });
}

#[test]
fn a_share_that_is_taken_at_once_has_room_for_captured_steps() {
    on_gpu(|| {
        let share = GpuOptions { memory_limits: [(0, 1 << 30)].into(), allow_growth: Some(false), ..exact() };
        let g = kolo_ops::graph();
        let model = mlp(&g, &[20, 33, 17, 10], Source::Fed);
        let session = Session::with_config(&g, config(share)).unwrap();
        session.run_op(model.init).unwrap();
        let feeds = [(model.x, wavy(&[64, 20], 1)), (model.y, labels(64, 10))];
        (0..8).for_each(|_| drop(session.run(&[model.loss], &feeds, &[model.train]).unwrap()));
        let captures = session.captures();
        assert!(captures.iter().any(Result::is_ok), "{captures:?}");
        let gpu = session.list_devices().iter().position(|device| &*device.name.kind == "GPU").unwrap();
        let stats = session.memory_stats(gpu).unwrap();
        assert!(stats.reserved == 1 << 30 && stats.in_use < 1 << 30, "{stats:?}");
    });
}

#[test]
fn what_depends_on_the_host_is_not_captured() {
    on_gpu(|| {
        let g = kolo_ops::graph();
        let n = g.placeholder::<i32>("n", [Some(1)]);
        let ones = g.op("Fill").input(n).input(g.constant(1.0f32)).out();
        let total = kolo_ops::math::reduce::sum::mean(ones + 1.0, &[0]);
        let random = g.op("RandomUniform").input(g.constant([4i32])).attr("dtype", DType::F32).attr("seed", 1i64).out();
        let session = Session::with_config(&g, config(exact())).unwrap();
        let mut seen = Vec::new();
        for i in 1..8i32 {
            let found = session.run(&[ones, total], &[(n, Tensor::from([i]))], &[]).unwrap();
            assert_eq!(found[0].shape().dims(), [i as usize]);
            seen.push(session.fetch(random).unwrap());
        }
        assert!(seen.windows(2).all(|pair| pair[0] != pair[1]), "{seen:?}");
        let captures = session.captures();
        assert!(captures.iter().all(Result::is_err), "{captures:?}");
        println!("{captures:?}");
    });
}

#[test]
fn how_long_steps_take() {
    on_gpu(|| {
        let time = |name: &str, build: &dyn for<'g> Fn(&'g Graph, Source) -> Model<'g>, batch: usize| {
            let mut line = format!("{name} batch {batch}:");
            for (label, source, no_capture) in [
                ("fed", Source::Fed, true),
                ("fed, captured", Source::Fed, false),
                ("resident", Source::Resident(batch), true),
                ("resident, captured", Source::Resident(batch), false),
            ] {
                let g = kolo_ops::graph();
                let model = build(&g, source);
                let session =
                    Session::with_config(&g, config(GpuOptions { no_capture, ..GpuOptions::default() })).unwrap();
                session.run_op(model.init).unwrap();
                let feeds = match source {
                    Source::Fed => vec![(model.x, wavy(&[batch, 784], 5)), (model.y, labels(batch, 10))],
                    Source::Resident(_) => Vec::new(),
                };
                for _ in 0..20 {
                    session.run(&[], &feeds, &[model.train]).unwrap();
                }
                session.run(&[model.loss], &feeds, &[]).unwrap();
                let (n, start) = (300, Instant::now());
                for _ in 0..n {
                    session.run(&[], &feeds, &[model.train]).unwrap();
                }
                session.run(&[model.loss], &feeds, &[]).unwrap();
                let us = start.elapsed().as_secs_f64() * 1e6 / f64::from(n);
                line += &format!(" {label} {us:.1} us;");
                if let Some(n) = session.captures().into_iter().flatten().max() {
                    line += &format!(" ({n} launches)");
                }
                if !no_capture && session.captures().iter().all(Result::is_err) {
                    line += &format!(" not captured: {:?}", session.captures());
                }
                if source == Source::Fed && no_capture {
                    let options = RunOptions { trace: true, ..RunOptions::default() };
                    let (_, metadata) = session.run_with(&options, &[], &feeds, &[model.train]).unwrap();
                    let names: Vec<&str> = metadata.trace.nodes.iter().map(|node| node.op).collect();
                    println!("{} nodes in the trace: {names:?}", names.len());
                }
            }
            println!("{line}");
        };
        time("MLP 784-100-10", &|g, source| mlp(g, &[784, 100, 10], source), 100);
        time("MLP 784-4096-4096-10", &|g, source| mlp(g, &[784, 4096, 4096, 10], source), 1024);
        time("LeNet", &lenet, 64);
        time("LeNet", &lenet, 1024);
    });
}
