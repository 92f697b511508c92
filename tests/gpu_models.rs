//! The ops of large models on a real GPU, against the CPU: in all their precisions, in sizes that fit tiles and in sizes that do not;
//! and whole steps of small models. On a machine without a GPU every test says that it was skipped, and why, with a count.

mod support;

use kolo::optim::{AdamW, Momentum, Optimizer};
use kolo::recipes::{gpt2, resnet};
use kolo::{DType, GpuOptions, Graph, Output, Session, SessionConfig, Shape, Tensor, gradients, nn, ops};

use support::on_gpu;

fn config(n_gpus: usize) -> SessionConfig {
    let gpu = GpuOptions { full_precision: true, ..GpuOptions::default() };
    SessionConfig { gpu, device_count: [("GPU".to_owned(), n_gpus)].into(), ..SessionConfig::default() }
}

/// Numbers that look random and are the same everywhere.
fn wavy(dims: &[usize], seed: u32) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let values: Vec<f32> = (0..dims.iter().product())
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_vec(Shape::new(dims).expect("a small shape"), values).expect("as many as the shape has")
}

/// How much two tensors differ at most, as a part of the largest value.
fn difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.shape(), b.shape());
    let (a, b) = (a.data::<f32>().expect("float"), b.data::<f32>().expect("float"));
    // Where all are nearly zero, what is left of sums that cancel is as good as zero.
    let largest = b.iter().fold(1e-4f32, |most, x| most.max(x.abs()));
    a.iter().zip(b).fold(0.0, |most: f32, (x, y)| if x == y { most } else { most.max((x - y).abs() / largest) })
}

/// `build` gets float inputs of these shapes and gives an output; it and the gradients by all inputs must agree.
fn agree(
    what: &str,
    dtype: DType,
    shapes: &[&[usize]],
    build: impl for<'g> Fn(&'g Graph, &[Output<'g>]) -> Output<'g>,
) {
    let run = |config: SessionConfig| -> Vec<Tensor> {
        let g = kolo::graph();
        let sources: Vec<Output<'_>> =
            shapes.iter().enumerate().map(|(i, dims)| g.constant(wavy(dims, 7 + i as u32))).collect();
        let inputs: Vec<Output<'_>> = sources.iter().map(|&x| ops::cast(x, dtype)).collect();
        let y = ops::cast(build(&g, &inputs), DType::F32);
        let shape = y.shape().known().expect("shapes are known");
        let loss = ops::sum_all(y * g.constant(wavy(&shape, 99)));
        let mut outputs = vec![y];
        for grad in gradients(&[loss], &sources).expect("has a gradient").into_iter().flatten() {
            outputs.push(grad.dense().expect("dense"));
        }
        Session::with_config(&g, config).expect("a session").run(&outputs, &[], &[]).expect("runs")
    };
    let (cpu, gpu) = (run(config(0)), run(config(1)));
    assert_eq!(cpu.len(), gpu.len());
    let tolerance = match dtype {
        DType::BF16 => 2e-2,
        DType::F16 => 4e-3,
        _ => 2e-5,
    };
    for (i, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
        let found = difference(gpu, cpu);
        println!("{what} {dtype} {shapes:?} output {i}: {found:.2e}");
        assert!(found <= tolerance, "{what} of {dtype}, output {i}: they differ by {found}");
    }
}

#[test]
fn attention_agrees() {
    on_gpu(|| {
        for (batch, length, heads, size) in [
            (2, 64, 2, 64),
            (1, 200, 3, 64),
            (1, 65, 2, 64),
            (2, 129, 1, 32),
            (1, 70, 2, 128),
            (1, 77, 1, 80),
            (2, 33, 2, 20),
            (1, 1, 1, 64),
        ] {
            for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
                for causal in [true, false] {
                    agree("attention", dtype, &[&[batch, length, 3 * heads * size]], |_, x| {
                        ops::attention(x[0], heads, causal)
                    });
                }
            }
        }
    });
}

/// The same again in a process of its own, in which everything is cuDNN's that it takes: attentions as small as these are
/// otherwise left to kernels of ours.
#[test]
fn attention_by_cudnn_agrees() {
    on_gpu(|| {
        let program = std::env::current_exe().expect("a path");
        let mut again = std::process::Command::new(program);
        again.args(["--exact", "attention_agrees", "--nocapture"]).env("KOLO_ATTENTION", "cudnn");
        let done = again.output().expect("it starts");
        let text = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&done.stderr));
    });
}

/// How far `a` is from `b`, as a part of `b`: of columns `part` of `n_parts` together.
fn distance(a: &Tensor, b: &Tensor, part: usize, n_parts: usize) -> f64 {
    let row = b.shape().dims().last().copied().expect("rows");
    let (a, b) = (a.data::<f32>().expect("float"), b.data::<f32>().expect("float"));
    let (mut apart, mut size) = (0.0, 0.0);
    for (i, (x, y)) in a.iter().zip(b).enumerate().filter(|(i, _)| i % row * n_parts / row == part) {
        assert!(x.is_finite(), "number {i} is {x}");
        apart += f64::from(x - y).powi(2);
        size += f64::from(*y).powi(2);
    }
    (apart / size).sqrt()
}

/// A long attention, step after step: by kernels of ours, then by those that were found to be faster, then captured.
#[test]
fn long_attention_stays_the_same() {
    on_gpu(|| {
        for (batch, length, heads, size, causal, dtype, far) in [
            (8, 1000, 5, 64, true, DType::BF16, 1e-2),
            (4, 1024, 8, 128, false, DType::F16, 2e-3),
            (2, 400, 4, 80, true, DType::BF16, 1e-2),
        ] {
            let g = kolo::graph();
            let x = g.constant(wavy(&[batch, length, 3 * heads * size], 5));
            let y = ops::cast(ops::attention(ops::cast(x, dtype), heads, causal), DType::F32);
            let loss = ops::sum_all(y * g.constant(wavy(&[batch, length, heads * size], 99)));
            let grad = gradients(&[loss], &[x]).expect("has a gradient").remove(0).expect("a path");
            let outputs = [y, grad.dense().expect("dense")];
            let session = Session::with_config(&g, config(1)).expect("a session");
            let first = session.run(&outputs, &[], &[]).expect("runs");
            for step in 0..8 {
                let again = session.run(&outputs, &[], &[]).expect("runs");
                let parts: Vec<f64> = (0..3).map(|part| distance(&again[1], &first[1], part, 3)).collect();
                let values = distance(&again[0], &first[0], 0, 1);
                println!("{length} x {size}, step {step}: {values:.1e}, gradients {parts:.5?}");
                assert!(values <= far && parts.iter().all(|&part| part <= far), "{values} and {parts:?} are too far");
            }
        }
    });
}

#[test]
fn layer_norm_agrees() {
    on_gpu(|| {
        for (rows, n) in [(100, 768), (33, 8), (7, 1000), (3, 5), (1, 4096), (2000, 256)] {
            for dtype in [DType::BF16, DType::F16, DType::F32] {
                agree("layer norm", dtype, &[&[rows, n], &[n], &[n]], |_, x| ops::layer_norm(x[0], x[1], x[2], 1e-5));
            }
        }
    });
}

#[test]
fn batch_norm_agrees() {
    on_gpu(|| {
        let small = [[4, 7, 7, 64], [2, 9, 5, 24], [8, 3, 3, 2048], [3, 4, 4, 5]];
        let small = small.into_iter().flat_map(|dims| [DType::BF16, DType::F16, DType::F32].map(|dtype| (dims, dtype)));
        // The last is more than a GPU's multiprocessors hold.
        for (dims, dtype) in small.chain([([15, 28, 28, 520], DType::F32)]) {
            agree("batch norm", dtype, &[&dims], |g, x| {
                let channels = dims[3];
                let (scale, offset) = (g.constant(wavy(&[channels], 3)), g.constant(wavy(&[channels], 4)));
                ops::batch_norm_training(x[0], scale, offset, 1e-3).y
            });
        }
    });
}

/// Images whose channels come first give what they give when they come last, and so do their gradients.
#[test]
fn channels_first_agree_with_channels_last() {
    on_gpu(|| {
        type Layer = for<'g> fn(&'g Graph, Output<'g>, &[Output<'g>], &str) -> Output<'g>;
        let layers: [(&str, Layer); 4] = [
            ("norm", |g, x, vectors, format| {
                let op = g.op("FusedBatchNormV3").input(x).inputs(vectors.iter().copied()).attr("data_format", format);
                op.attr("epsilon", 1e-3f32).out()
            }),
            ("max 3, 2", |g, x, _, format| pool(g, "MaxPool", x, [3, 2], format)),
            ("max 2, 2", |g, x, _, format| pool(g, "MaxPool", x, [2, 2], format)),
            ("avg 3, 2", |g, x, _, format| pool(g, "AvgPool", x, [3, 2], format)),
        ];
        for dims in [[4, 12, 12, 16], [2, 7, 7, 40], [3, 9, 5, 3], [2, 1, 1, 5], [3, 7, 7, 1064]] {
            for dtype in [DType::BF16, DType::F16, DType::F32] {
                let g = kolo::graph();
                let vectors: Vec<Output<'_>> =
                    (0..4).map(|i| g.constant(wavy(&[dims[3]], 3 + i)) * 0.5 + 1.0).collect();
                let source = g.constant(wavy(&dims, 7));
                let turned = |x: Output<'_>, by: [i32; 4]| {
                    let x = Output::new(&g, x.endpoint());
                    Output::new(&g, g.op("Transpose").input(x).input(g.constant(by)).out().endpoint())
                };
                let x = ops::cast(source, dtype);
                let mut outputs = Vec::new();
                for (_, layer) in layers {
                    let last = layer(&g, x, &vectors, "NHWC");
                    let first = turned(layer(&g, turned(x, [0, 3, 1, 2]), &vectors, "NCHW"), [0, 2, 3, 1]);
                    let weights = g.constant(wavy(&last.shape().known().expect("shapes are known"), 99));
                    for y in [last, first] {
                        let y = ops::cast(y, DType::F32);
                        let grad =
                            gradients(&[ops::sum_all(y * weights)], &[source]).expect("has a gradient").remove(0);
                        outputs.extend([y, grad.expect("a path").dense().expect("dense")]);
                    }
                }
                let session = Session::with_config(&g, config(1)).expect("a session");
                let found = session.run(&outputs, &[], &[]).expect("runs");
                let tolerance = if dtype == DType::F32 { 2e-5 } else { 2e-2 };
                for ((name, _), found) in layers.iter().zip(found.chunks(4)) {
                    for i in 0..2 {
                        let apart = difference(&found[i + 2], &found[i]);
                        assert!(apart <= tolerance, "{name} {dtype} {dims:?}, output {i}: they differ by {apart}");
                    }
                }
            }
        }
    });
}

fn pool<'g>(g: &'g Graph, op: &str, x: Output<'g>, [window, stride]: [i64; 2], format: &str) -> Output<'g> {
    let around = |size: i64| if format == "NCHW" { vec![1, 1, size, size] } else { vec![1, size, size, 1] };
    let op = g.op(op).input(x).attr("ksize", around(window)).attr("strides", around(stride));
    op.attr("padding", "SAME").attr("data_format", format).out()
}

#[test]
fn class_loss_agrees() {
    on_gpu(|| {
        for (rows, n) in [(10, 50304), (64, 1000), (5, 3), (1, 1)] {
            for dtype in [DType::BF16, DType::F16, DType::F32] {
                agree("class loss", dtype, &[&[rows, n]], |g, x| {
                    let labels: Vec<i64> = (0..rows as i64).map(|i| i * 7919 % n as i64).collect();
                    ops::class_loss(x[0], g.constant(Tensor::from(labels)))
                });
            }
        }
    });
}

#[test]
fn convolutions_agree() {
    on_gpu(|| {
        for dtype in [DType::F32, DType::BF16] {
            for (stride, side, channels) in [(1, 3, 16), (2, 3, 16), (1, 1, 16), (2, 1, 16), (2, 7, 3)] {
                agree("convolution", dtype, &[&[2, 14, 14, channels], &[side, side, channels, 32]], |_, x| {
                    ops::conv2d_explicit(x[0], x[1], [stride, stride], [side as i64 / 2; 4])
                });
            }
        }
    });
}

#[test]
fn pools_agree() {
    on_gpu(|| {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            for dims in [[2, 12, 12, 16], [1, 7, 9, 3], [2, 5, 4, 24]] {
                for (window, stride) in [(3, 2), (2, 2), (3, 1), (2, 3), (4, 4)] {
                    for padding in [nn::Padding::Same, nn::Padding::Valid] {
                        // Rounded, so that windows have several largest values; with and without a Relu, which is fused.
                        for relu in [false, true] {
                            agree("max pool", dtype, &[&dims], |_, x| {
                                let x = (x[0] - ops::stop_gradient(x[0])) + ops::round(x[0] * 3.0);
                                let x = if relu { ops::relu(x) } else { x };
                                nn::max_pool(x, [window, window], [stride, stride], padding)
                            });
                        }
                    }
                }
            }
        }
    });
}

/// The losses of some steps.
fn losses(
    config: SessionConfig,
    steps: usize,
    build: impl for<'g> Fn(&'g Graph) -> (Output<'g>, kolo::Operation<'g>),
) -> Vec<f32> {
    let g = kolo::graph();
    g.set_seed(1);
    let (loss, train) = build(&g);
    let init = g.global_variables_initializer();
    let session = Session::with_config(&g, config).expect("a session");
    session.run_op(init).expect("initialises");
    let step = || session.run(&[loss], &[], &[train]).expect("runs")[0].scalar_value::<f32>().expect("a float");
    (0..steps).map(|_| step()).collect()
}

fn same_course(what: &str, (cpu, gpu): (Vec<f32>, Vec<f32>), tolerance: f32) {
    println!("{what}: cpu {cpu:?}, gpu {gpu:?}");
    assert!(cpu.last() < cpu.first() && gpu.last() < gpu.first(), "{what} does not learn");
    for (a, b) in cpu.iter().zip(&gpu) {
        assert!((a - b).abs() <= tolerance * (1.0 + a.abs()), "{what}: {cpu:?} and {gpu:?}");
    }
}

#[test]
fn a_small_gpt2_learns_as_on_a_cpu() {
    on_gpu(|| {
        for (compute, tolerance) in [(DType::F32, 2e-4), (DType::BF16, 2e-2)] {
            let size = gpt2::Size { vocabulary: 96, context: 48, width: 128, layers: 2, heads: 2, compute };
            let run = |config| {
                losses(config, 8, |g| {
                    let tokens = gpt2::synthetic_tokens(4 * 48 + 1, 96, 1);
                    let window = |from: usize| {
                        let part: Vec<i64> = tokens[from..from + 4 * 48].iter().map(|&token| token.into()).collect();
                        let value = Tensor::from_vec([4, 48], part).expect("as many as the shape has");
                        g.new_variable("tokens", value).not_trainable().build().read()
                    };
                    let loss = gpt2::parts(gpt2::logits(window(0), &size), window(1)).loss;
                    (loss, AdamW::new(1e-3, 0.1).minimize(loss, None).expect("has gradients"))
                })
            };
            same_course("gpt2", (run(config(0)), run(config(1))), tolerance);
        }
    });
}

#[test]
fn a_small_resnet_learns_as_on_a_cpu() {
    on_gpu(|| {
        for (compute, tolerance) in [(DType::F32, 1e-3), (DType::BF16, 0.15)] {
            let size = resnet::Size { side: 32, classes: 8, width: 8, blocks: [1, 2, 1, 1], compute };
            let run = |config| {
                losses(config, 3, |g| {
                    let data = resnet::synthetic(16, &size, 1).expect("images").batch(16, true).all().expect("images");
                    let labels = Tensor::from(data[1].integers().expect("whole numbers"));
                    let held = |name: &str, value: Tensor| g.new_variable(name, value).not_trainable().build().read();
                    let logits = resnet::logits(held("images", data[0].clone()), &size);
                    let loss = resnet::parts(logits, held("labels", labels)).loss;
                    let updates = nn::update_ops(g);
                    // Few and small steps: where the last bits decide a maximum, the courses part by a ten-thousandth, and a
                    // step later by percents. A CPU alone takes either course when its images change by a ten-millionth.
                    let train = g.control_dependencies(&updates, || Momentum::new(0.0005, 0.9).minimize(loss, None));
                    (loss, train.expect("has gradients"))
                })
            };
            same_course("resnet", (run(config(0)), run(config(1))), tolerance);
        }
    });
}
