//! `HistogramFixedWidth`: how many values lie in each of some bins of the same width.

use kolo_core::{DType, Error, PartialShape, Result, Shape};
use kolo_device::cpu::looking;
use kolo_graph::{Gradient, HalfSafety, OpDef, Output};

use crate::array::elements::integer_tensor;
use crate::math::number::Number;
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// How many of `values` lie in each of `n_bins` bins between the two values of `range`; those outside count in the first and
/// the last.
#[track_caller]
pub fn histogram_fixed_width<'g>(values: Output<'g>, range: Output<'g>, n_bins: i32) -> Output<'g> {
    let graph = values.graph();
    graph.op("HistogramFixedWidth").inputs([values, range, graph.constant(n_bins)]).attr("dtype", DType::I32).out()
}

pub(crate) static HISTOGRAM_FIXED_WIDTH: Op = Op {
    def: OpDef {
        name: "HistogramFixedWidth",
        signature: "(values:T, value_range:T, nbins:int32) -> (out:dtype) ; T:type{int32,int64,float,double}, \
                    dtype:type{int32,int64}=int32",
        shape: |ctx| {
            ctx.input(1).merge(&PartialShape::from([2usize]))?;
            ctx.input_of_rank(2, 0)?;
            let n = match ctx.constant_integers(2).as_deref() {
                Some([n]) => Some(positive(*n)?),
                _ => None,
            };
            Ok(vec![PartialShape::new(&[n])])
        },
        gradient: Gradient::None("counting is piecewise constant"),
        half: HalfSafety::Wide,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: i32, i64, f32, f64),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn positive(n: i64) -> Result<usize> {
    usize::try_from(n)
        .ok()
        .filter(|&n| n > 0)
        .ok_or_else(|| Error::invalid_argument(format!("nbins should be a positive number, but got '{n}'")))
}

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = positive(i64::from(ctx.scalar::<i32>(2)?))?;
    let &[low, high] = ctx.data::<T>(1)? else {
        return Err(Error::invalid_argument(format!(
            "value_range should have 2 elements, found shape {}",
            ctx.input(1)?.shape()
        )));
    };
    if low >= high || low.partial_cmp(&high).is_none() {
        return Err(Error::invalid_argument(format!(
            "value_range should satisfy value_range[0] < value_range[1], but got '[{low}, {high}]'"
        )));
    }
    let step = high.sub(low).to_f64() / n as f64;
    let shape = Shape::new(&[n])?;
    // The number of bins is a value.
    let mut counts: Vec<i64> = Vec::new();
    counts
        .try_reserve_exact(n)
        .map_err(|_| Error::resource_exhausted(format!("OOM when allocating a histogram of {n} bins")))?;
    counts.resize(n, 0);
    for &value in looking(ctx.data::<T>(0)?) {
        if value.partial_cmp(&value).is_none() {
            return Err(Error::invalid_argument("Histogram values must not contain NaN"));
        }
        let place = if value > low { value.sub(low).to_f64() / step } else { 0.0 };
        counts[place.min((n - 1) as f64) as usize] += 1;
    }
    let out = integer_tensor(ctx.attrs().dtype("dtype")?, shape, counts)?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::DType;

    use crate::testing::{check_op, tensor};

    #[test]
    fn values_are_counted_in_bins() {
        // TensorFlow's values.
        let test = |values: &[f32]| check_op("HistogramFixedWidth").input(values.to_vec()).input([0.0f32, 5.0]);
        test(&[-1.0, 0.0, 1.5, 2.0, 5.0, 15.0]).input(5i32).gives([2i32, 1, 1, 0, 2]);
        check_op("HistogramFixedWidth")
            .attr("dtype", DType::I64)
            .input([-1i32, 0, 1, 2, 9])
            .input([0i32, 5])
            .input(3i32)
            .gives([3i64, 1, 1]);
        test(&[f32::NAN]).input(2i32).fails("must not contain NaN");
        test(&[]).input(2i32).gives([0i32, 0]);
        test(&[1.0]).input(0i32).fails("nbins should be a positive number, but got '0'");
        check_op("HistogramFixedWidth")
            .input(tensor::<f64, 1>([0], []))
            .input([5.0f64, 5.0])
            .input(3i32)
            .fails("value_range should satisfy value_range[0] < value_range[1], but got '[5, 5]'");
    }
}
