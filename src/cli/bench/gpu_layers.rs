//! `gpu`, single layers: pooling and batch norm, forward and backward, in the shapes of ResNet-50 and LeNet, in both
//! orders of dimensions. `bench/gpu/layers.py` times cuDNN on the same.

use std::sync::Arc;

use crate::{DType, Graph, Initializer, Operation, Output, Result, Session, SessionConfig};

use super::gpu::sample;
use super::measure::{Better, Report};

/// How often the layer is in the step that is timed.
const TIMES: usize = 10;

/// A layer's name, batch, side and channels.
type Case = (&'static str, usize, usize, usize);

const POOLS: &[(Case, i64, i64)] = &[
    (("pool-resnet50", 128, 112, 64), 3, 2),
    (("pool-lenet1-64", 64, 28, 32), 2, 2),
    (("pool-lenet2-64", 64, 14, 64), 2, 2),
    (("pool-lenet1-1024", 1024, 28, 32), 2, 2),
];

const NORMS: &[Case] = &[
    ("norm-112x64", 128, 112, 64),
    ("norm-56x64", 128, 56, 64),
    ("norm-56x256", 128, 56, 256),
    ("norm-28x512", 128, 28, 512),
    ("norm-14x1024", 128, 14, 1024),
    ("norm-7x2048", 128, 7, 2048),
];

/// All layers whose case is wanted.
pub fn run(report: &Report, config: &SessionConfig, wanted: &dyn Fn(&str) -> bool) -> Result<()> {
    for channels_first in [false, true] {
        for dtype in [DType::F32, DType::BF16] {
            let order = if channels_first { "nchw" } else { "nhwc" };
            let name = |case: &str, pass: &str| format!("{case}-{order}-{dtype}-{pass}");
            for pass in ["forward", "backward"] {
                for &(case, window, stride) in POOLS {
                    let label = name(case.0, pass);
                    if wanted(&label) {
                        let layer = Layer { case, channels_first, dtype };
                        layer.time(report, &label, config, |layer, g| layer.pool(g, [window, stride], pass))?;
                    }
                }
                for &case in NORMS {
                    let label = name(case.0, pass);
                    if wanted(&label) {
                        let layer = Layer { case, channels_first, dtype };
                        layer.time(report, &label, config, |layer, g| layer.norm(g, pass))?;
                    }
                }
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Layer {
    case: Case,
    channels_first: bool,
    dtype: DType,
}

/// What is run once, and what is timed.
type Steps<'g> = (Vec<Operation<'g>>, Operation<'g>);

impl Layer {
    fn shape(&self, side: usize) -> [usize; 4] {
        let (_, batch, _, channels) = self.case;
        if self.channels_first { [batch, channels, side, side] } else { [batch, side, side, channels] }
    }

    fn format(&self) -> &'static str {
        if self.channels_first { "NCHW" } else { "NHWC" }
    }

    /// A variable on the GPU, and what fills it with random numbers.
    fn held<'g>(&self, g: &'g Graph, name: &str, shape: [usize; 4]) -> (Output<'g>, Operation<'g>) {
        let start = g.new_variable(&format!("{name}_start"), Initializer::Uniform { low: -1.0, high: 1.0 });
        let start = start.shape(shape).build().read();
        let narrow = g.op("Cast").input(start).attr("DstT", self.dtype).out();
        let held = g.new_variable(name, Initializer::Zeros).shape(shape).dtype(self.dtype).build();
        (held.read(), g.op("AssignVariableOp").input(held.handle()).input(narrow).build())
    }

    fn pool<'g>(&self, g: &'g Graph, [window, stride]: [i64; 2], pass: &str) -> Steps<'g> {
        let side = self.case.2;
        let (x, fill) = self.held(g, "x", self.shape(side));
        let around = |size: i64| if self.channels_first { vec![1, 1, size, size] } else { vec![1, size, size, 1] };
        let attrs = |op: &str| {
            g.op(op)
                .attr("ksize", around(window))
                .attr("strides", around(stride))
                .attr("padding", "SAME")
                .attr("data_format", self.format())
        };
        if pass == "forward" {
            return (vec![fill], repeated(g, || attrs("MaxPool").input(x).build()));
        }
        let shape = self.shape(side.div_ceil(stride as usize));
        let (dy, fill_dy) = self.held(g, "dy", shape);
        let top = g.new_variable("top", Initializer::Zeros).shape(shape).dtype(self.dtype).build();
        let pooled = g.control_dependencies(&[fill], || attrs("MaxPool").input(x).out());
        let keep = g.op("AssignVariableOp").input(top.handle()).input(pooled).build();
        let top = top.read();
        (vec![fill, fill_dy, keep], repeated(g, || attrs("MaxPoolGrad").input(x).input(top).input(dy).build()))
    }

    fn norm<'g>(&self, g: &'g Graph, pass: &str) -> Steps<'g> {
        let (x, fill) = self.held(g, "x", self.shape(self.case.2));
        let vector = |name: &str| {
            let start = Initializer::Uniform { low: 0.5, high: 1.0 };
            g.new_variable(name, start).shape([self.case.3]).build().read()
        };
        let [scale, offset, mean, variance] = ["scale", "offset", "mean", "variance"].map(vector);
        if pass == "forward" {
            let norm = || {
                let inputs = [x, scale, offset, mean, variance];
                let op = g.op("FusedBatchNormV3").inputs(inputs).attr("data_format", self.format());
                op.attr("exponential_avg_factor", 0.9f32).attr("is_training", true).build()
            };
            return (vec![fill], repeated(g, norm));
        }
        let (dy, fill_dy) = self.held(g, "dy", self.shape(self.case.2));
        let norm = || {
            let inputs = [dy, x, scale, mean, variance, mean];
            g.op("FusedBatchNormGradV3").inputs(inputs).attr("data_format", self.format()).build()
        };
        (vec![fill, fill_dy], repeated(g, norm))
    }

    fn time(
        &self,
        report: &Report,
        label: &str,
        config: &SessionConfig,
        build: impl for<'g> Fn(&Layer, &'g Graph) -> Steps<'g>,
    ) -> Result<()> {
        let g = crate::graph();
        g.set_seed(1);
        let (fill, step) = build(self, &g);
        let probe = g.new_variable("probe", Initializer::Zeros).shape([1]).build().read() + 1.0;
        let init = g.global_variables_initializer();
        let session = Arc::new(Session::with_config(&g, config.clone())?);
        session.run_op(init)?;
        fill.into_iter().try_for_each(|op| session.run_op(op))?;
        let call = session.make_callable(&[], &[], &[step])?;
        let wait = session.make_callable(&[], &[probe], &[])?;
        let samples = sample(10, 3, || call.call(&[]).map(drop), || wait.call(&[]).map(drop))?;
        let micros: Vec<f64> = samples.iter().map(|seconds| seconds * 1e6 / TIMES as f64).collect();
        report.print("gpu", label, "us", Better::Lower, &micros)
    }
}

/// The same many times, one after the other.
fn repeated<'g>(g: &'g Graph, layer: impl Fn() -> Operation<'g>) -> Operation<'g> {
    let mut last = layer();
    for _ in 1..TIMES {
        last = g.control_dependencies(&[last], &layer);
    }
    g.group("step", &[last])
}
