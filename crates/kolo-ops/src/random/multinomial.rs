//! `Multinomial`: samples of class numbers, with unnormalised log-probabilities.

use half::{bf16, f16};
use kolo_core::{DType, Dim, Element, Error, PartialShape, Result, Shape};
use kolo_device::cpu::{looking, pool};
use kolo_graph::{Effects, Gradient, OpDef, Output};
use num_traits::AsPrimitive;

use crate::op::{Gpu, KernelDef, Op, cpu_on};
use crate::random::distribution::uniform_f64;
use crate::random::philox::Words;
use crate::random::stream::Stream;
use crate::{Cost, Kernel, KernelCtx, KernelInit, KernelMaker};

/// `n_samples` class numbers (int64) for each row of `logits`.
#[track_caller]
pub fn multinomial(logits: Output<'_>, n_samples: i32, seed: Option<i64>) -> Output<'_> {
    let graph = logits.graph();
    let (seed, seed2) = graph.op_seeds(seed);
    let n_samples = graph.constant(n_samples);
    graph.op("Multinomial").input(logits).input(n_samples).attr("seed", seed).attr("seed2", seed2).out()
}

pub(crate) static MULTINOMIAL: Op = Op {
    def: OpDef {
        name: "Multinomial",
        signature: "(logits:T, num_samples:int32) -> (output:output_dtype) ; seed:int=0, seed2:int=0, \
                    T:type{float,double,int32,uint8,int16,int8,int64,bfloat16,uint16,half,uint32,uint64}, \
                    output_dtype:type{int32,int64}=int64",
        shape: |ctx| {
            let logits = ctx.input_of_rank(0, 2)?;
            ctx.input_of_rank(1, 0)?;
            let n_samples: Dim = ctx.constant_integers(1).and_then(|n| usize::try_from(*n.first()?).ok());
            Ok(vec![PartialShape::new(&[logits.dim(0), n_samples])])
        },
        gradient: Gradient::None("its values are integers"),
        stateful: true,
        effects: Effects::Random,
        ..OpDef::BASE
    },
    kernels: &[
        kernel::<f32>(),
        kernel::<f64>(),
        kernel::<f16>(),
        kernel::<bf16>(),
        kernel::<i8>(),
        kernel::<i16>(),
        kernel::<i32>(),
        kernel::<i64>(),
        kernel::<u8>(),
        kernel::<u16>(),
        kernel::<u32>(),
        kernel::<u64>(),
    ],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

const fn kernel<T: Element + AsPrimitive<f64>>() -> KernelDef {
    cpu_on(
        "T",
        &[T::DTYPE],
        KernelMaker::Object(|init: &KernelInit<'_>| {
            let (stream, narrow) = (Stream::new(init)?, init.attrs().dtype("output_dtype")? == DType::I32);
            Ok(Box::new(Multinomial::<T> { stream, narrow, logits: std::marker::PhantomData }))
        }),
    )
}

struct Multinomial<T> {
    stream: Stream,
    /// The output is int32.
    narrow: bool,
    logits: std::marker::PhantomData<T>,
}

impl<T: Element + AsPrimitive<f64>> Kernel for Multinomial<T> {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        match self.narrow {
            true => self.sample::<i32>(ctx),
            false => self.sample::<i64>(ctx),
        }
    }
}

impl<T: Element + AsPrimitive<f64>> Multinomial<T> {
    fn sample<U: Element>(&self, ctx: &mut KernelCtx<'_>) -> Result<()>
    where
        usize: AsPrimitive<U>,
    {
        let n_samples = ctx.scalar::<i32>(1)?;
        let n_samples = usize::try_from(n_samples)
            .map_err(|_| Error::invalid_argument(format!("num_samples should be nonnegative, got {n_samples}")))?;
        let &[n_rows, n_classes] = ctx.input(0)?.shape().dims() else {
            let shape = ctx.input(0)?.shape();
            return Err(Error::invalid_argument(format!("logits should be a matrix, got shape {shape}")));
        };
        if n_classes == 0 && n_rows > 0 && n_samples > 0 {
            return Err(Error::invalid_argument(format!("num_classes should be positive, got {n_classes}")));
        }
        let mut out = ctx.allocate(U::DTYPE, Shape::new(&[n_rows, n_samples])?)?;
        // Two words for each sample, and as much room as TensorFlow leaves.
        let start = self.stream.reserve_outputs(n_rows.wrapping_mul(n_samples.next_multiple_of(4)).wrapping_mul(2));
        let logits = ctx.data::<T>(0)?;
        if n_samples > 0 {
            let rows = (pool::grain(20.0) / (n_classes + n_samples)).max(1);
            ctx.pool().for_each_chunk(out.data_mut::<U>()?, rows * n_samples, |i, out| {
                let mut cdf = vec![0.0f64; n_classes];
                for (r, out) in out.chunks_mut(n_samples).enumerate() {
                    let row = i * rows + r;
                    let total = cumulate(&logits[row * n_classes..(row + 1) * n_classes], &mut cdf);
                    // Rows follow each other in the stream, as if one thread drew them all.
                    let n_before = 2 * row * n_samples;
                    let mut words = Words::new(start.skip((n_before / 4) as u64));
                    for _ in 0..n_before % 4 {
                        words.draw();
                    }
                    for sample in looking(out) {
                        let at = uniform_f64(words.draw(), words.draw()) * total;
                        *sample = cdf.partition_point(|&below| below <= at).as_();
                    }
                }
            });
        }
        ctx.set_output(0, out);
        Ok(())
    }
}

/// Sums of probabilities up to each class, not normalised; logits that are not finite count as probability zero.
fn cumulate<T: Element + AsPrimitive<f64>>(logits: &[T], cdf: &mut [f64]) -> f64 {
    let finite = |logit: &&T| -> bool {
        let logit: f64 = logit.as_();
        logit.is_finite()
    };
    let largest = logits.iter().filter(finite).fold(f64::MIN, |largest, logit| largest.max(logit.as_()));
    let mut total = 0.0;
    for (sum, logit) in cdf.iter_mut().zip(logits) {
        if finite(&logit) {
            total += (logit.as_() - largest).exp();
        }
        *sum = total;
    }
    total
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};

    use crate::random::testing::run_twice;
    use crate::testing::{check_op, tensor};

    #[test]
    fn samples_are_tensorflows() {
        let logits = [0.1f32, 0.5, -1.0, 2.0, 3.0, f32::NEG_INFINITY, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0];
        let seeds = [("seed", 8i64.into()), ("seed2", 1i64.into())];
        let found = run_twice("Multinomial", &seeds, &[tensor([3, 4], logits), Tensor::from(9i32)]);
        let expected: [i64; 27] = [3, 0, 0, 3, 3, 3, 3, 3, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 2, 3, 3, 2, 0];
        assert_eq!(found[0], tensor([3, 9], expected));
        let expected: [i64; 27] = [3, 1, 3, 3, 3, 3, 3, 3, 3, 2, 0, 0, 0, 0, 3, 3, 3, 0, 1, 1, 2, 3, 0, 2, 2, 2, 3];
        assert_eq!(found[1], tensor([3, 9], expected));
        let narrow = [("seed", 8i64.into()), ("seed2", 1i64.into()), ("output_dtype", DType::I32.into())];
        let found = run_twice("Multinomial", &narrow, &[tensor([3, 4], logits.map(f64::from)), Tensor::from(3i32)]);
        assert_eq!(found[0], tensor([3, 3], [3i32, 0, 0, 3, 0, 0, 3, 2, 1]));
    }

    #[test]
    fn bad_sizes() {
        check_op("Multinomial").input([[1.0f32]]).input(-1i32).fails("num_samples should be nonnegative, got -1");
        check_op("Multinomial").input([1.0f32]).input(1i32).fails("should have rank 2");
        check_op("Multinomial").input(tensor::<f32, 2>([2, 0], [])).input(1i32).fails("num_classes should be positive");
        check_op("Multinomial").input([[1.0f32]]).input(0i32).gives(tensor::<i64, 2>([1, 0], []));
    }
}
