//! Steps that are captured, whole or in segments, against the same steps node by node.

use super::*;

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
            let captures = session.local().unwrap().captures();
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
pub(super) type Middle = for<'g> fn(&'g Graph, Output<'g>) -> Output<'g>;

/// Nodes that split a step, and one of them.
pub(super) const MIDDLES: [(&str, Middle, &str); 4] = [
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
pub(super) fn split_mlp<'g>(g: &'g Graph, middle: Middle) -> Model<'g> {
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
    let reports = session.local().unwrap().capture_reports();
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
            let captures = session.local().unwrap().captures();
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
            let captures = session.local().unwrap().captures();
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
fn a_share_that_is_taken_at_once_has_room_for_captured_steps() {
    on_gpu(|| {
        let share = GpuOptions { memory_limits: [(0, 1 << 30)].into(), allow_growth: Some(false), ..exact() };
        let g = kolo_ops::graph();
        let model = mlp(&g, &[20, 33, 17, 10], Source::Fed);
        let session = Session::with_config(&g, config(share)).unwrap();
        session.run_op(model.init).unwrap();
        let feeds = [(model.x, wavy(&[64, 20], 1)), (model.y, labels(64, 10))];
        (0..8).for_each(|_| drop(session.run(&[model.loss], &feeds, &[model.train]).unwrap()));
        let captures = session.local().unwrap().captures();
        assert!(captures.iter().any(Result::is_ok), "{captures:?}");
        let gpu = session.list_devices().iter().position(|device| &*device.name.kind == "GPU").unwrap();
        let stats = session.local().unwrap().memory_stats(gpu).unwrap();
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
        let captures = session.local().unwrap().captures();
        assert!(captures.iter().all(Result::is_err), "{captures:?}");
        println!("{captures:?}");
    });
}

/// A step of about a second, all of it one replay.
#[test]
fn a_replay_ends_at_its_deadline_and_when_it_is_cancelled() {
    on_gpu(|| {
        const N: usize = 8192;
        let g = kolo_ops::graph();
        let x = g.new_variable("x", Initializer::Zeros).shape([N, N]).build();
        let init = g.global_variables_initializer();
        let mut product = x.read();
        for _ in 0..40 {
            product = matmul(product, x.read());
        }
        let sum = kolo_ops::math::reduce::sum::mean(product, &[0, 1]);
        let session = Session::with_config(&g, config(exact())).unwrap();
        session.run_op(init).unwrap();
        // Other tests may use the GPU meanwhile, so it takes at least so long.
        let mut took = Duration::MAX;
        for _ in 0..6 {
            let start = Instant::now();
            session.fetch(sum).unwrap();
            took = took.min(start.elapsed());
        }
        assert!(session.local().unwrap().captures().iter().any(Result::is_ok));
        let early = took / 10;

        let options = RunOptions { timeout: Some(early), ..RunOptions::default() };
        let error = session.run_with(&options, &[sum], &[], &[]).unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");

        let token = CancelToken::new();
        let options = RunOptions { cancel: Some(token.clone()), ..RunOptions::default() };
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(early);
                token.cancel(Error::cancelled("enough"));
            });
            session.run_with(&options, &[sum], &[], &[]).unwrap_err()
        });
        assert_eq!(error.code(), Code::Cancelled, "{error}");
        // What was stopped is still on the GPU, and the next run comes after it.
        assert_eq!(session.fetch(sum).unwrap().scalar_value::<f32>().unwrap(), 0.0);
    });
}
