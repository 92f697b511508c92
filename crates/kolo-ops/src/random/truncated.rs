//! `ParameterizedTruncatedNormal`: normal numbers with a mean and a standard deviation, within bounds, all of which may
//! differ from row to row.
//!
//! Each number is drawn from its own part of the stream, by whichever of three kinds of rejection (Robert, 1995) suits the
//! bounds. The distribution is TensorFlow's; the numbers themselves are not.

use half::{bf16, f16};
use kolo_core::{Error, Result, Shape};
use kolo_graph::{Effects, Gradient, OpDef, Output, shape_fns};

use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_on};
use crate::random::distribution::Standard;
use crate::random::philox::Philox;
use crate::random::stream::{RESERVED_PER_OUTPUT, Stream};
use crate::{Cost, Kernel, KernelCtx, KernelInit, KernelMaker};

/// Normal numbers within bounds, `shape` of them; the parameters are scalars or have one element per row.
#[track_caller]
pub fn parameterized_truncated_normal<'g>(
    shape: Output<'g>,
    mean: Output<'g>,
    stdev: Output<'g>,
    [least, greatest]: [Output<'g>; 2],
    seed: Option<i64>,
) -> Output<'g> {
    let (seed, seed2) = shape.graph().op_seeds(seed);
    let builder = shape.graph().op("ParameterizedTruncatedNormal").inputs([shape, mean, stdev, least, greatest]);
    builder.attr("seed", seed).attr("seed2", seed2).out()
}

pub(crate) static PARAMETERIZED_TRUNCATED_NORMAL: Op = Op {
    def: OpDef {
        name: "ParameterizedTruncatedNormal",
        signature: "(shape:T, means:dtype, stdevs:dtype, minvals:dtype, maxvals:dtype) -> (output:dtype) ; seed:int=0, \
                    seed2:int=0, dtype:type{half,bfloat16,float,double}, T:type{int32,int64}",
        shape: |ctx| {
            ctx.input_of_rank(0, 1)?;
            shape_fns::from_shape_input(ctx)
        },
        gradient: Gradient::None("random numbers are taken for constants"),
        stateful: true,
        effects: Effects::Random,
        ..OpDef::BASE
    },
    kernels: &[kernel::<f32>(), kernel::<f64>(), kernel::<f16>(), kernel::<bf16>()],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

const fn kernel<T: Number>() -> KernelDef {
    cpu_on("dtype", &[T::DTYPE], KernelMaker::Object(make::<T>))
}

fn make<T: Number>(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(Truncated { stream: Stream::new(init)?, _element: std::marker::PhantomData::<fn() -> T> }))
}

struct Truncated<T> {
    stream: Stream,
    _element: std::marker::PhantomData<fn() -> T>,
}

const NAMES: [&str; 4] = ["means", "stdevs", "minvals", "maxvals"];

impl<T: Number> Kernel for Truncated<T> {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        if ctx.input(0)?.shape().rank() != 1 {
            return Err(Error::invalid_argument(format!("shape must be a vector, got {}", ctx.input(0)?.shape())));
        }
        let shape = Shape::from_signed(&ctx.integers(0)?)?;
        let Some((&n_rows, row)) = shape.split_first() else {
            return Err(Error::invalid_argument("Shape tensor must not be empty, got a scalar shape"));
        };
        let row: usize = row.iter().product();
        for (i, name) in NAMES.iter().enumerate() {
            let given = ctx.input(i + 1)?;
            if given.shape().rank() > 1 || (given.n_elements() != 1 && given.n_elements() != n_rows) {
                return Err(Error::invalid_argument(format!(
                    "Input {name} must have length 1 or {n_rows}, got shape: {}",
                    given.shape()
                )));
            }
        }
        let mut out = ctx.allocate(T::DTYPE, shape)?;
        let start = self.stream.reserve_outputs(out.n_elements());
        let mut parameters: [Vec<f64>; 4] = Default::default();
        for (i, list) in parameters.iter_mut().enumerate() {
            *list = ctx.data::<T>(i + 1)?.iter().map(|x| x.to_f64()).collect();
        }
        for i in 0..n_rows {
            let [mean, stdev, low, high] = [0, 1, 2, 3].map(|p: usize| parameters[p][i.min(parameters[p].len() - 1)]);
            if !mean.is_finite() || !stdev.is_finite() || stdev <= 0.0 || low.is_nan() || high.is_nan() || low >= high {
                return Err(Error::invalid_argument(format!(
                    "Invalid parameters: row {i} has mean {mean}, standard deviation {stdev} and bounds {low} and {high}"
                )));
            }
        }
        if row > 0 && n_rows > 0 {
            ctx.pool().for_each_chunk(out.data_mut::<T>()?, row, |i, out| {
                let [mean, stdev, low, high] =
                    [0, 1, 2, 3].map(|p: usize| parameters[p][i.min(parameters[p].len() - 1)]);
                let bounds = Bounds::new((low - mean) / stdev, (high - mean) / stdev);
                for (k, y) in out.iter_mut().enumerate() {
                    let at = (i * row + k) as u64;
                    let mut draws = Draws(start.skip(at.wrapping_mul(RESERVED_PER_OUTPUT)));
                    *y = T::from_f64((bounds.draw(&mut draws) * stdev + mean).clamp(low, high));
                }
            });
        }
        ctx.set_output(0, out);
        Ok(())
    }
}

/// Numbers from one stream.
struct Draws(Philox);

impl Draws {
    fn words(&mut self) -> [u32; 4] {
        let words = self.0.words();
        self.0 = self.0.skip(1);
        words
    }

    fn uniforms(&mut self) -> [f64; 2] {
        let [a, b, ..] = f64::uniform(self.words());
        [a, b]
    }

    fn normal(&mut self) -> f64 {
        f64::normal(self.words())[0]
    }
}

/// Bounds in standard deviations from the mean, not both of them negative: a mirror image is drawn for those.
struct Bounds {
    low: f64,
    high: f64,
    mirrored: bool,
    method: Method,
}

enum Method {
    /// Draws normal numbers until one lies inside.
    Normal,
    /// Draws evenly between the bounds, and keeps what the density says.
    Uniform,
    /// Draws from an exponential tail with this rate.
    Exponential(f64),
}

impl Bounds {
    fn new(low: f64, high: f64) -> Bounds {
        let mirrored = high < 0.0 || -low > high;
        let (low, high) = if mirrored { (-high, -low) } else { (low, high) };
        // The rate that rejects least, and where even draws become better.
        let rate = (low + (low * low + 4.0).sqrt()) / 2.0;
        let reach = ((low * low - low * (low * low + 4.0).sqrt()) / 4.0 + 0.5).exp() / rate;
        let method = if low <= 0.0 {
            if high - low > 2.0 { Method::Normal } else { Method::Uniform }
        } else if high - low < reach {
            Method::Uniform
        } else {
            Method::Exponential(rate)
        };
        Bounds { low, high, mirrored, method }
    }

    fn draw(&self, draws: &mut Draws) -> f64 {
        let value = loop {
            let (value, accepted) = match self.method {
                Method::Normal => (draws.normal(), true),
                Method::Uniform => {
                    let [u, accept] = draws.uniforms();
                    let value = self.low + (self.high - self.low) * u;
                    // The density relative to its largest value between the bounds.
                    let peak = self.low.max(0.0);
                    (value, accept <= ((peak * peak - value * value) / 2.0).exp())
                }
                Method::Exponential(rate) => {
                    let [u, accept] = draws.uniforms();
                    let value = self.low - (-u).ln_1p() / rate;
                    (value, accept <= (-(value - rate) * (value - rate) / 2.0).exp())
                }
            };
            if accepted && (self.low..=self.high).contains(&value) {
                break value;
            }
        };
        if self.mirrored { -value } else { value }
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};

    use crate::random::testing::run_twice;
    use crate::testing::check_op;

    fn draw(n: i32, parameters: [f64; 4]) -> Vec<f64> {
        let attrs = [("dtype", DType::F64.into()), ("seed", 7i64.into()), ("seed2", 11i64.into())];
        let inputs: Vec<Tensor> =
            std::iter::once(Tensor::vector(vec![1i32, n])).chain(parameters.map(Tensor::scalar)).collect();
        let [first, second] = run_twice("ParameterizedTruncatedNormal", &attrs, &inputs);
        assert_ne!(first, second);
        first.data::<f64>().unwrap().to_vec()
    }

    /// The mean of a truncated standard normal distribution, by summing its density.
    fn mean_between(low: f64, high: f64) -> f64 {
        let n = 200_000;
        let x = |i: usize| low + (high - low) * (i as f64 + 0.5) / n as f64;
        let density = |x: f64| (-x * x / 2.0).exp();
        let (sum, weights) = (0..n).map(x).fold((0.0, 0.0), |(s, w), x| (s + x * density(x), w + density(x)));
        sum / weights
    }

    #[test]
    fn bounds_hold_and_means_are_right() {
        for [mean, stdev, low, high] in [
            [0.0, 1.0, -1.0, 1.0],
            [0.0, 1.0, -3.0, 5.0],
            [5.0, 2.0, 4.0, 4.5],
            [0.0, 1.0, 3.0, 9.0],
            [0.0, 1.0, 3.0, 3.1],
            [1.0, 0.5, -4.0, -1.0],
            [0.0, 1.0, -0.5, 30.0],
        ] {
            let n = 20_000;
            let values = draw(n, [mean, stdev, low, high]);
            assert!(values.iter().all(|x| (low..=high).contains(x)), "{low} {high}");
            let found = values.iter().sum::<f64>() / f64::from(n);
            let expected = mean_between((low - mean) / stdev, (high - mean) / stdev) * stdev + mean;
            // Four standard errors, of a deviation that is at most the normal one.
            let spread = stdev.min(high - low) * 4.0 / f64::from(n).sqrt();
            assert!((found - expected).abs() < spread, "{low}..{high}: {found}, expected {expected}");
        }
    }

    #[test]
    fn rows_have_their_own_parameters() {
        let attrs = [("dtype", DType::F32.into()), ("seed", 7i64.into())];
        let inputs = [
            Tensor::vector(vec![2i32, 50]),
            Tensor::from([0.0f32, 100.0]),
            Tensor::scalar(1.0f32),
            Tensor::from([-1.0f32, 99.0]),
            Tensor::from([1.0f32, 101.0]),
        ];
        let [out, _] = run_twice("ParameterizedTruncatedNormal", &attrs, &inputs);
        let values = out.data::<f32>().unwrap();
        assert!(values[..50].iter().all(|x| x.abs() <= 1.0) && values[50..].iter().all(|x| (x - 100.0).abs() <= 1.0));
        let bad = |stdev: f32, low: f32| {
            let test = check_op("ParameterizedTruncatedNormal").input([1i32, 2]).input(0.0f32).input(stdev);
            test.input(low).input(1.0f32).fails("Invalid parameters");
        };
        bad(-1.0, 0.0);
        bad(1.0, 2.0);
        bad(1.0, f32::NAN);
        check_op("ParameterizedTruncatedNormal")
            .input([2i32, 2])
            .input([0.0f32, 0.0, 0.0])
            .input(1.0f32)
            .input(0.0f32)
            .input(1.0f32)
            .fails("means must have length 1 or 2");
    }
}
