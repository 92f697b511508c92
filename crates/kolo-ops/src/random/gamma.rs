//! `RandomGamma`: gamma distributed numbers with given shapes (Marsaglia and Tsang, 2000). The draws are TensorFlow's to
//! the last bit of a double.

use half::f16;
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_graph::{Effects, Gradient, OpDef, Output};

use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_on};
use crate::random::distribution::Standard;
use crate::random::philox::Philox;
use crate::random::stream::{RESERVED_PER_OUTPUT, Stream};
use crate::{Cost, Kernel, KernelCtx, KernelInit, KernelMaker};

/// For each element of `alpha`, numbers of a gamma distribution with that shape and rate 1: `shape` of them.
#[track_caller]
pub fn random_gamma<'g>(shape: Output<'g>, alpha: Output<'g>, seed: Option<i64>) -> Output<'g> {
    let (seed, seed2) = shape.graph().op_seeds(seed);
    shape.graph().op("RandomGamma").inputs([shape, alpha]).attr("seed", seed).attr("seed2", seed2).out()
}

pub(crate) static RANDOM_GAMMA: Op = Op {
    def: OpDef {
        name: "RandomGamma",
        signature: "(shape:S, alpha:T) -> (output:T) ; seed:int=0, seed2:int=0, S:type{int32,int64}, \
                    T:type{half,float,double}",
        shape: |ctx| {
            let shape: PartialShape = match ctx.constant(0) {
                Some(shape) => Shape::from_signed(&shape.integers()?)?.into(),
                None => ctx.constant_as_shape(0),
            };
            Ok(vec![shape.concat(ctx.input(1))])
        },
        gradient: Gradient::Refused("RandomGammaGrad is not implemented"),
        stateful: true,
        effects: Effects::Random,
        ..OpDef::BASE
    },
    kernels: &[kernel::<f32>(), kernel::<f64>(), kernel::<f16>()],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

const fn kernel<T: Number>() -> KernelDef {
    cpu_on("T", &[T::DTYPE], KernelMaker::Object(make::<T>))
}

fn make<T: Number>(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
    Ok(Box::new(Gamma { stream: Stream::new(init)?, _element: std::marker::PhantomData::<fn() -> T> }))
}

/// How many numbers a task draws.
const PER_TASK: usize = 1024;

struct Gamma<T> {
    stream: Stream,
    _element: std::marker::PhantomData<fn() -> T>,
}

impl<T: Number> Kernel for Gamma<T> {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        if ctx.input(0)?.shape().rank() != 1 {
            return Err(Error::invalid_argument(format!("shape must be a vector, got {}", ctx.input(0)?.shape())));
        }
        let samples = Shape::from_signed(&ctx.integers(0)?)?;
        let shape = Shape::new(&[samples.dims(), ctx.input(1)?.shape().dims()].concat())?;
        let mut out = ctx.allocate(T::DTYPE, shape)?;
        let alphas = ctx.data::<T>(1)?;
        let (n_samples, n_alphas) = (samples.n_elements(), alphas.len());
        let start = self.stream.reserve_outputs(out.n_elements());
        if n_alphas > 0 {
            ctx.pool().for_each_chunk(out.data_mut::<T>()?, PER_TASK, |task, out| {
                for (k, y) in out.iter_mut().enumerate() {
                    let (sample, i) = ((task * PER_TASK + k) / n_alphas, (task * PER_TASK + k) % n_alphas);
                    let at = (i * n_samples + sample) as u64;
                    let draws = Draws::new(start.skip(at.wrapping_mul(RESERVED_PER_OUTPUT)));
                    *y = T::from_f64(gamma(alphas[i].to_f64(), draws));
                }
            });
        }
        ctx.set_output(0, out);
        Ok(())
    }
}

/// Normal and uniform numbers from one stream, each kind drawn two at a time and used from the last.
struct Draws {
    at: Philox,
    normals: Vec<f64>,
    uniforms: Vec<f64>,
}

impl Draws {
    fn new(at: Philox) -> Draws {
        Draws { at, normals: Vec::new(), uniforms: Vec::new() }
    }

    fn words(&mut self) -> [u32; 4] {
        let words = self.at.words();
        self.at = self.at.skip(1);
        words
    }

    fn normal(&mut self) -> f64 {
        match self.normals.pop() {
            Some(value) => value,
            None => {
                let [first, second, ..] = f64::normal(self.words());
                self.normals.push(first);
                second
            }
        }
    }

    fn uniform(&mut self) -> f64 {
        match self.uniforms.pop() {
            Some(value) => value,
            None => {
                let [first, second, ..] = f64::uniform(self.words());
                self.uniforms.push(first);
                second
            }
        }
    }
}

/// One number of a gamma distribution. A shape below 1 is reached from the shape above by a power of a uniform number.
fn gamma(alpha: f64, mut draws: Draws) -> f64 {
    if alpha == 1.0 {
        // Exponential.
        return -(-draws.uniform()).ln_1p();
    }
    // A shape of 0 gives zeros, as the power below makes them.
    if alpha.is_nan() || alpha < 0.0 {
        return f64::NAN;
    }
    let is_small = alpha < 1.0;
    let d = alpha + if is_small { 2.0 / 3.0 } else { -1.0 / 3.0 };
    let c = 1.0 / 3.0 / d.sqrt();
    loop {
        let x = draws.normal();
        let v = 1.0 + c * x;
        if v <= 0.0 {
            continue;
        }
        let v = v * v * v;
        let u = draws.uniform();
        // The first test is cheap and nearly always decides.
        if u < 1.0 - 0.0331 * (x * x) * (x * x) || u.ln() < 0.5 * x * x + d * (1.0 - v + v.ln()) {
            let result = d * v;
            return if is_small { result * draws.uniform().powf(1.0 / alpha) } else { result };
        }
    }
}

#[cfg(test)]
mod tests;
