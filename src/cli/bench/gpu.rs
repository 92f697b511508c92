//! `gpu`: the work of `bench/gpu/run` on GPU 0: a large matrix product, and training steps whose data lies on the GPU,
//! with and without capture, in this process and through a server in another one.

use std::sync::Arc;
use std::time::Instant;

use crate::{DType, GpuOptions, Graph, Initializer, Output, Result, Session, SessionConfig, Tensor, gradients, ops};

use super::cluster::Servers;
use super::measure::{Better, Report};
use super::networks::{batches, dense, lenet_logits};
use super::{gpu_layers, gpu_models};

fn config(no_capture: bool, no_fusion: bool) -> SessionConfig {
    SessionConfig {
        device_count: [("GPU".to_owned(), 1)].into(),
        gpu: GpuOptions { no_capture, no_fusion, ..GpuOptions::default() },
        ..SessionConfig::default()
    }
}

/// Two virtual GPUs.
fn halves() -> SessionConfig {
    const EACH: u64 = 32 << 30;
    let config = config(false, false);
    let gpu = GpuOptions { virtual_devices: [(0, vec![EACH; 2])].into(), ..config.gpu };
    SessionConfig { gpu, device_count: [("GPU".to_owned(), 2)].into(), ..config }
}

/// Where a case runs.
pub(super) enum Target {
    /// In this process.
    Here(SessionConfig),
    /// In a server of its own, with its variables.
    Served(Servers),
    /// In this process, on two halves of GPU 0.
    Halves(SessionConfig),
}

impl Target {
    /// The GPUs that share the work.
    pub fn gpus(&self) -> &[&str] {
        match self {
            Target::Here(_) | Target::Served(_) => &["/gpu:0"],
            Target::Halves(_) => &["/gpu:0", "/gpu:1"],
        }
    }

    pub fn session(&self, g: &Graph) -> Result<Arc<Session>> {
        match self {
            Target::Here(config) | Target::Halves(config) => Session::with_config(g, config.clone()).map(Arc::new),
            Target::Served(servers) => servers.connect(g),
        }
    }
}

pub fn run(report: &Report, only: &[String]) -> Result<()> {
    let wanted = |case: &str| only.is_empty() || only.iter().any(|start| case.starts_with(start.as_str()));
    if wanted("matmul-8192-bf16") {
        matmul(report)?;
    }
    // Only when asked for: there are many.
    let is_asked_for = |case: &str| !only.is_empty() && wanted(case);
    gpu_layers::run(report, &config(false, false), &is_asked_for)?;
    let here = |no_capture: bool, no_fusion: bool| move || Ok(Target::Here(config(no_capture, no_fusion)));
    let served = || Servers::start(0, 1).map(Target::Served);
    let ways: [(&str, &dyn Fn() -> Result<Target>); 5] = [
        ("", &here(false, false)),
        ("-no-capture", &here(true, false)),
        ("-no-fusion", &here(false, true)),
        ("-neither", &here(true, true)),
        ("-serve", &served),
    ];
    if wanted("gpt2-towers") {
        gpu_models::gpt2(report, "gpt2-towers", &Target::Halves(halves()))?;
    }
    for (label, target) in ways {
        for (name, model) in MODELS {
            let case = format!("{name}{label}");
            if wanted(&case) {
                model(report, &case, &target()?)?;
            }
        }
        for (name, batch, model) in CASES {
            let case = format!("{name}{label}");
            if wanted(&case) {
                train(report, &case, *batch, &target()?, *model)?;
            }
        }
    }
    Ok(())
}

type LargeModel = fn(&Report, &str, &Target) -> Result<()>;

const MODELS: &[(&str, LargeModel)] = &[("resnet50", gpu_models::resnet50), ("gpt2", gpu_models::gpt2)];

type Model = for<'g> fn(&'g Graph, Output<'g>) -> Output<'g>;

const CASES: &[(&str, usize, Model)] = &[
    ("mlp-100", 100, |g, x| {
        let hidden = ops::relu(dense(g, x, "hidden", 784, 100));
        dense(g, hidden, "out", 100, 10)
    }),
    ("mlp-4096", 1024, |g, x| {
        let first = ops::relu(dense(g, x, "first", 784, 4096));
        let second = ops::relu(dense(g, first, "second", 4096, 4096));
        dense(g, second, "out", 4096, 10)
    }),
    ("lenet-64", 64, lenet_logits),
    ("lenet-1024", 1024, lenet_logits),
];

fn matmul(report: &Report) -> Result<()> {
    const N: usize = 8192;
    const PRODUCTS: usize = 20;
    let g = crate::graph();
    let uniform = || Initializer::Uniform { low: -1.0, high: 1.0 };
    let whole = |name: &str| g.new_variable(name, uniform()).shape([N, N]).build().read();
    let narrow = |x: Output<'_>| g.op("Cast").input(Output::new(&g, x.endpoint())).attr("DstT", DType::BF16).out();
    let start = [whole("a"), whole("b")].map(narrow);
    let held =
        ["na", "nb"].map(|name| g.new_variable(name, Initializer::Zeros).shape([N, N]).dtype(DType::BF16).build());
    let fill: Vec<_> = held
        .iter()
        .zip(start)
        .map(|(to, from)| g.op("AssignVariableOp").input(to.handle()).input(from).build())
        .collect();
    let (a, b) = (held[0].read(), held[1].read());
    let mut product = ops::matmul(a, b);
    for _ in 1..PRODUCTS {
        product = g.control_dependencies(&[product.operation()], || ops::matmul(a, b));
    }
    let probe = g.new_variable("probe", Initializer::Zeros).shape([1]).build().read() + 1.0;
    let init = g.global_variables_initializer();
    let session = Arc::new(Session::with_config(&g, config(false, false))?);
    session.run_op(init)?;
    for op in fill {
        session.run_op(op)?;
    }
    let call = session.make_callable(&[], &[], &[product.operation()])?;
    let wait = session.make_callable(&[], &[probe], &[])?;
    let samples = sample(10, 3, || call.call(&[]).map(drop), || wait.call(&[]).map(drop))?;
    let flops = 2.0 * (N * N * N * PRODUCTS) as f64;
    let rates: Vec<f64> = samples.iter().map(|seconds| flops / seconds / 1e12).collect();
    report.print("gpu", "matmul-8192-bf16", "TFLOP/s", Better::Higher, &rates)
}

fn train(report: &Report, case: &str, batch: usize, target: &Target, model: Model) -> Result<()> {
    let g = crate::graph();
    g.set_seed(1);
    let (images, labels) = batches(batch)?.swap_remove(0);
    let resident = |name: &str, value: Tensor| g.new_variable(name, value).not_trainable().build().read();
    let (x, labels) = (resident("images", images), resident("labels", labels));
    let loss = ops::mean_all(ops::softmax_cross_entropy(model(&g, x), labels));
    let handles: Vec<Output<'_>> = g.trainable_variables().iter().map(|variable| variable.handle()).collect();
    let rate = g.constant(0.01f32);
    let mut updates = Vec::new();
    for (&handle, grad) in handles.iter().zip(gradients(&[loss], &handles)?) {
        if let Some(grad) = grad {
            updates.push(ops::apply_gradient_descent(handle, rate, grad.dense()?));
        }
    }
    let step = g.group("train", &updates);
    let init = g.global_variables_initializer();
    let session = target.session(&g)?;
    session.run_op(init)?;
    let call = session.make_callable(&[], &[], &[step])?;
    let wait = session.make_callable(&[], &[loss], &[])?;
    let samples = sample(200, 10, || call.call(&[]).map(drop), || wait.call(&[]).map(drop))?;
    let micros: Vec<f64> = samples.iter().map(|seconds| seconds * 1e6).collect();
    report.print("gpu", case, "us/step", Better::Lower, &micros)
}

/// Seconds per call, in samples of `n` calls that are enqueued one after the other and then waited for.
pub(super) fn sample(
    n: u32,
    n_samples: usize,
    mut call: impl FnMut() -> Result<()>,
    mut wait: impl FnMut() -> Result<()>,
) -> Result<Vec<f64>> {
    let mut samples = Vec::new();
    for i in 0..=n_samples {
        let start = Instant::now();
        for _ in 0..n {
            call()?;
        }
        wait()?;
        // The first warms up.
        if i > 0 {
            samples.push(start.elapsed().as_secs_f64() / f64::from(n));
        }
    }
    Ok(samples)
}
