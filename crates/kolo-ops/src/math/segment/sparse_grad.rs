//! `SparseSegmentSumGrad`, `SparseSegmentMeanGrad`, `SparseSegmentSqrtNGrad`: row `indices[i]` of the output gains row
//! `segment_ids[i]` of the gradient, divided by what the forward op divided that segment by.

use half::{bf16, f16};
use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_graph::{Gradient, HalfSafety, OpDef};

use crate::math::number::Real;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

pub(crate) static SPARSE_SEGMENT_SUM_GRAD: Op = grad("SparseSegmentSumGrad", KERNELS).half(HalfSafety::Wide);
pub(crate) static SPARSE_SEGMENT_MEAN_GRAD: Op = grad("SparseSegmentMeanGrad", KERNELS).half(HalfSafety::Wide);
pub(crate) static SPARSE_SEGMENT_SQRT_N_GRAD: Op = grad("SparseSegmentSqrtNGrad", KERNELS).half(HalfSafety::Wide);

const fn grad(name: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(grad:T, indices:Tidx, segment_ids:Tsegmentids, output_dim0:int32) -> (output:T) ; \
                        T:type{bfloat16,half,float,double}, Tidx:type{int32,int64}=int32, \
                        Tsegmentids:type{int32,int64}=int32",
            shape: |ctx| {
                let grad = ctx.input_of_rank_at_least(0, 1)?;
                ctx.input_of_rank(1, 1)?.merge(&ctx.input_of_rank(2, 1)?)?;
                ctx.input_of_rank(3, 0)?;
                let n: Dim = ctx
                    .constant_integers(3)
                    .and_then(|n| n.first().copied())
                    .map(|n| usize::try_from(n).map_err(|_| Error::invalid_argument("output_dim0 must be >= 0")))
                    .transpose()?;
                Ok(vec![match grad.dims() {
                    Some([_, row @ ..]) => PartialShape::new(&[n]).concat(&PartialShape::new(row)),
                    _ => PartialShape::unknown(),
                }])
            },
            gradient: Gradient::Refused("the gradient of a sparse segment's gradient is not implemented"),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

const KERNELS: &[KernelDef] = cpu_kernels!(backward: f32, f64; f16, bf16);

fn backward<T: Real>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let Some((&n_segments, row)) = shape.split_first() else {
        return Err(Error::invalid_argument("grad should have at least one dimension"));
    };
    let (indices, ids) = (ctx.integers(1)?, ctx.integers(2)?);
    if indices.len() != ids.len() {
        return Err(Error::invalid_argument("segment_ids and indices should have same size."));
    }
    let n = ctx.scalar::<i32>(3)?;
    let n_rows =
        usize::try_from(n).map_err(|_| Error::invalid_argument(format!("output_dim0 must be >= 0, found {n}")))?;
    let mut counts = ctx.scratch(n_segments, 0usize, "segments")?;
    for (&index, &id) in indices.iter().zip(&ids) {
        let Some(count) = usize::try_from(id).ok().and_then(|id| counts.get_mut(id)) else {
            return Err(Error::invalid_argument(format!("Segment id {id} out of range [0, {n_segments}).")));
        };
        *count += 1;
        if usize::try_from(index).is_ok_and(|index| index < n_rows) {
            continue;
        }
        return Err(Error::invalid_argument(format!("Index {index} out of range [0, {n_rows}).")));
    }
    let divisor = |count: usize| match ctx.node.op() {
        "SparseSegmentSumGrad" => 1.0,
        "SparseSegmentMeanGrad" => count as f64,
        _ => (count as f64).sqrt(),
    };
    let mut scale = ctx.scratch(n_segments, T::from_f64(0.0), "segments")?;
    scale.iter_mut().zip(&counts[..]).for_each(|(scale, &n)| *scale = T::from_f64(1.0 / divisor(n.max(1))));
    let mut out = ctx.allocate_zeroed(T::DTYPE, Shape::new(&[&[n_rows], row].concat())?)?;
    let len: usize = row.iter().product();
    let grad = ctx.data::<T>(0)?;
    let sums = out.data_mut::<T>()?;
    if len > 0 {
        for (&index, &id) in indices.iter().zip(&ids) {
            // Both were found in range.
            let (index, id) = (index as usize, id as usize);
            let to = &mut sums[index * len..(index + 1) * len];
            for (sum, &x) in to.iter_mut().zip(&grad[id * len..(id + 1) * len]) {
                *sum = *sum + x * scale[id];
            }
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor};

    #[test]
    fn rows_gain_their_segments_share() {
        let test = |op: &str| {
            check_op(op).input([[6.0f32, 3.0], [1.0, 2.0]]).input([2i32, 0, 2, 1]).input([0i32, 0, 0, 1]).input(4i32)
        };
        test("SparseSegmentSumGrad").gives([[6.0f32, 3.0], [1.0, 2.0], [12.0, 6.0], [0.0, 0.0]]);
        test("SparseSegmentMeanGrad").gives([[2.0f32, 1.0], [1.0, 2.0], [4.0, 2.0], [0.0, 0.0]]);
        let root = 3.0f32.sqrt();
        test("SparseSegmentSqrtNGrad").gives([
            [6.0 / root, 3.0 / root],
            [1.0, 2.0],
            [12.0 / root, 6.0 / root],
            [0.0, 0.0],
        ]);
        check_op("SparseSegmentMeanGrad")
            .input(tensor::<f64, 2>([0, 2], []))
            .input(tensor::<i64, 1>([0], []))
            .input(tensor::<i64, 1>([0], []))
            .input(2i32)
            .gives([[0.0f64, 0.0], [0.0, 0.0]]);
        check_op("SparseSegmentSumGrad")
            .input([1.0f32])
            .input([1i32])
            .input([0i32])
            .input(1i32)
            .fails("Index 1 out of range [0, 1).");
        check_op("SparseSegmentSumGrad")
            .input([1.0f32])
            .input([0i32])
            .input([1i32])
            .input(1i32)
            .fails("Segment id 1 out of range [0, 1)");
    }
}
