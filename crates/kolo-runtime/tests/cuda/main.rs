//! Sessions on a real GPU. On a machine without one every test says that it was skipped, and why, with
//! a count.

#![allow(clippy::unwrap_used)] // Helpers of tests may fail as tests do.

mod capture;
mod fusion;
mod moving;
mod task;

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kolo_core::{Code, DType, DeviceSpec, Error, Tensor};
use kolo_graph::{Graph, Initializer, Operation, Output, Variable, gradients};
use kolo_ops::CancelToken;
use kolo_ops::math::matmul::matmul;
use kolo_ops::nn::conv2d::conv2d;
use kolo_ops::nn::max_pool::max_pool;
use kolo_ops::nn::relu::relu;
use kolo_ops::optim::adam::apply_adam;
use kolo_ops::optim::gradient_descent::apply_gradient_descent;
use kolo_runtime::{GpuOptions, RunOptions, Session, SessionConfig};

use capture::{MIDDLES, split_mlp};

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
        let report = session.local().unwrap().placement();
        assert!(report.rows.iter().all(|row| &*row.device.kind == "GPU"), "{report}");
    });
}

#[test]
fn values_cross_between_host_and_gpu() {
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
        let error = Session::with_config(&g, share(0.4)).err().expect("the GPU is full");
        assert_eq!(error.code(), Code::ResourceExhausted);
        println!("{error}");
        assert_eq!(first.fetch(y).unwrap(), second.fetch(y).unwrap());
        drop(first);
        Session::with_config(&g, share(0.4)).unwrap().fetch(y).unwrap();
    });
}

#[test]
fn a_loop_runs_with_its_state_on_the_gpu() {
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
        for row in session.local().unwrap().placement().rows {
            println!("placement: {}", row.log_line());
        }
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
                if let Some(n) = session.local().unwrap().captures().into_iter().flatten().max() {
                    line += &format!(" ({n} launches)");
                }
                if !no_capture && session.local().unwrap().captures().iter().all(Result::is_err) {
                    line += &format!(" not captured: {:?}", session.local().unwrap().captures());
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
