//! `RandomUniformInt`: integers drawn evenly from [minval, maxval).

use kolo_core::{DType, Element, Error, Result};
use kolo_graph::{Effects, Gradient, OpDef, Output, shape_fns};

use crate::op::{Gpu, Op, cpu_on};
use crate::random::distribution::{Distribution, fill};
use crate::random::philox::Philox;
use crate::random::shape_in;
use crate::random::stream::Stream;
use crate::{Cost, Kernel, KernelCtx, KernelInit, KernelMaker};

/// Integers drawn evenly from `low` up to, not including, `high`, in the shape that integer vector `shape` holds.
#[track_caller]
pub fn random_uniform_int<'g>(shape: Output<'g>, low: Output<'g>, high: Output<'g>, seed: Option<i64>) -> Output<'g> {
    let (seed, seed2) = shape.graph().op_seeds(seed);
    shape.graph().op("RandomUniformInt").inputs([shape, low, high]).attr("seed", seed).attr("seed2", seed2).out()
}

pub(crate) static RANDOM_UNIFORM_INT: Op = Op {
    def: OpDef {
        name: "RandomUniformInt",
        signature: "(shape:T, minval:Tout, maxval:Tout) -> (output:Tout) ; seed:int=0, seed2:int=0, \
                    Tout:type{int32,int64}, T:type{int32,int64}",
        shape: |ctx| {
            ctx.input_of_rank(1, 0)?;
            ctx.input_of_rank(2, 0)?;
            shape_fns::from_shape_input(ctx)
        },
        gradient: Gradient::None("its values are integers"),
        stateful: true,
        effects: Effects::Random,
        ..OpDef::BASE
    },
    kernels: &[
        cpu_on("Tout", &[DType::I32], KernelMaker::Object(make::<i32>)),
        cpu_on("Tout", &[DType::I64], KernelMaker::Object(make::<i64>)),
    ],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

/// Integers between two bounds, by the remainder of random bits; slightly uneven for huge ranges, as TensorFlow's are.
struct Between<T> {
    low: T,
    /// `high - low`, at least 1.
    range: u64,
}

impl Distribution for Between<i32> {
    type Output = i32;
    const GROUP: usize = 4;
    const NS: f64 = 3.0;
    fn group(&self, words: [u32; 4], _: Philox) -> [i32; 4] {
        words.map(|word| self.low.wrapping_add((u64::from(word) % self.range) as i32))
    }
}

impl Distribution for Between<i64> {
    type Output = i64;
    const GROUP: usize = 2;
    const NS: f64 = 6.0;
    fn group(&self, [a, b, c, d]: [u32; 4], _: Philox) -> [i64; 4] {
        let value =
            |low: u32, high: u32| self.low.wrapping_add(((u64::from(low) | u64::from(high) << 32) % self.range) as i64);
        [value(a, b), value(c, d), 0, 0]
    }
}

struct RandomUniformInt<T> {
    stream: Stream,
    element: std::marker::PhantomData<T>,
}

fn make<T: Element + Into<i64>>(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>>
where
    Between<T>: Distribution<Output = T>,
{
    Ok(Box::new(RandomUniformInt::<T> { stream: Stream::new(init)?, element: std::marker::PhantomData }))
}

impl<T: Element + Into<i64>> Kernel for RandomUniformInt<T>
where
    Between<T>: Distribution<Output = T>,
{
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let shape = shape_in(ctx)?;
        let (low, high) = (ctx.scalar::<T>(1)?, ctx.scalar::<T>(2)?);
        let mut out = ctx.allocate(T::DTYPE, shape)?;
        let n = out.n_elements();
        if n > 0 {
            if low.into() >= high.into() {
                return Err(Error::invalid_argument(format!("Need minval < maxval, got {low} >= {high}")));
            }
            let range = high.into().wrapping_sub(low.into()) as u64;
            let start = self.stream.reserve_outputs(n);
            fill(ctx.pool(), &Between { low, range }, start, out.data_mut()?);
        }
        ctx.set_output(0, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::random::testing::run_twice;
    use crate::testing::check_op;

    #[test]
    fn integers_are_tensorflows() {
        let inputs = [Tensor::from([7i32]), Tensor::from(-5i32), Tensor::from(100i32)];
        let found = run_twice("RandomUniformInt", &[("seed", 5i64.into())], &inputs);
        assert_eq!(found[0], Tensor::from([17i32, 97, 83, 15, 10, 60, 52]));
        assert_eq!(found[1], Tensor::from([58i32, 0, -3, 15, 71, 67, -4]));
        let inputs = [Tensor::from([7i32]), Tensor::from(-5i64), Tensor::from(1_000_000_000_000i64)];
        let found = run_twice("RandomUniformInt", &[("seed2", 9i64.into())], &inputs);
        assert_eq!(
            found[0],
            Tensor::from([
                982663835134i64,
                761104413442,
                26491552580,
                700113500311,
                551800817738,
                456680484357,
                935739447143
            ])
        );
    }

    #[test]
    fn the_whole_range_and_empty_ones() {
        let whole = check_op("RandomUniformInt").input(vec![3i32]).input(i64::MIN).input(i64::MAX);
        assert_eq!(whole.run(false).unwrap()[0].n_elements(), 3);
        check_op("RandomUniformInt")
            .input(vec![2i32])
            .input(5i32)
            .input(5i32)
            .fails("Need minval < maxval, got 5 >= 5");
        check_op("RandomUniformInt").input(vec![0i32]).input(5i32).input(5i32).gives(Tensor::vector::<i32>(vec![]));
    }
}
