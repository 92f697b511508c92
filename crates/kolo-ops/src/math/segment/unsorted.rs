//! `UnsortedSegmentSum`, `Prod`, `Max`, `Min`: row `s` of the output brings together the rows of `data` whose segment id
//! is `s`, in any order. Rows with a negative id are dropped.

use half::{bf16, f16};
use kolo_core::{DType, Error, PartialShape, Result, Shape};
use kolo_device::cpu::looking;
use kolo_graph::{Grad, Gradient, HalfSafety, InferCtx, IntoOutput, OpDef, Operation, Output};
use smallvec::SmallVec;

use crate::array::elements::product;
use crate::cuda::scatter::{Join, Places, combine, fill_text};
use crate::cuda::{FLOATS, gpu, zeros};
use crate::math::binary::first;
use crate::math::elementwise::lanes;
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels, gpu_kernel};
use crate::widened::finite_range;
use crate::{Cost, KernelCtx};

/// Row `s` is the sum of the rows of `data` whose id is `s`; rows with a negative id are dropped.
#[track_caller]
pub fn unsorted_segment_sum<'g>(data: Output<'g>, segment_ids: Output<'g>, num_segments: Output<'g>) -> Output<'g> {
    data.graph().op("UnsortedSegmentSum").inputs([data, segment_ids, num_segments]).out()
}

/// Row `s` is the largest of the rows of `data` whose id is `s`, elementwise; the least number if there is none.
#[track_caller]
pub fn unsorted_segment_max<'g>(data: Output<'g>, segment_ids: Output<'g>, num_segments: Output<'g>) -> Output<'g> {
    data.graph().op("UnsortedSegmentMax").inputs([data, segment_ids, num_segments]).out()
}

/// Row `s` is the smallest of the rows of `data` whose id is `s`, elementwise; the greatest number if there is none.
#[track_caller]
pub fn unsorted_segment_min<'g>(data: Output<'g>, segment_ids: Output<'g>, num_segments: Output<'g>) -> Output<'g> {
    data.graph().op("UnsortedSegmentMin").inputs([data, segment_ids, num_segments]).out()
}

/// Row `s` is the product of the rows of `data` whose id is `s`.
#[track_caller]
pub fn unsorted_segment_prod<'g>(data: Output<'g>, segment_ids: Output<'g>, num_segments: Output<'g>) -> Output<'g> {
    data.graph().op("UnsortedSegmentProd").inputs([data, segment_ids, num_segments]).out()
}

pub(crate) static UNSORTED_SEGMENT_SUM: Op =
    unsorted("UnsortedSegmentSum", SUM_TYPES, SUM_KERNELS, Gradient::Rule(sum_gradient))
        .half(HalfSafety::Wide)
        .host_args(&["num_segments"])
        .gpu(&[gpu_kernel("T", FLOATS, |ctx| on_gpu(ctx, Join::Add))]);
pub(crate) static UNSORTED_SEGMENT_MAX: Op =
    unsorted("UnsortedSegmentMax", ORDERED, MAX_KERNELS, Gradient::Rule(extreme_gradient))
        .half(HalfSafety::Neutral)
        .host_args(&["num_segments"])
        .gpu(&[gpu_kernel("T", FLOATS, |ctx| on_gpu(ctx, Join::Max))]);
pub(crate) static UNSORTED_SEGMENT_MIN: Op =
    unsorted("UnsortedSegmentMin", ORDERED, MIN_KERNELS, Gradient::Rule(extreme_gradient))
        .half(HalfSafety::Neutral)
        .host_args(&["num_segments"])
        .gpu(&[gpu_kernel("T", FLOATS, |ctx| on_gpu(ctx, Join::Min))]);
pub(crate) static UNSORTED_SEGMENT_PROD: Op =
    unsorted("UnsortedSegmentProd", NUMBERS, PROD_KERNELS, Gradient::Rule(prod_gradient))
        .half(HalfSafety::Wide)
        .host_args(&["num_segments"])
        .gpu(&[gpu_kernel("T", FLOATS, |ctx| on_gpu(ctx, Join::Mul))]);

const SUM_TYPES: &str = "(data:T, segment_ids:Tindices, num_segments:Tnumsegments) -> (output:T) ; \
    T:type{num}, Tindices:type{int16,int32,int64}, Tnumsegments:type{int32,int64}=int32";
const NUMBERS: &str = "(data:T, segment_ids:Tindices, num_segments:Tnumsegments) -> (output:T) ; \
    T:type{num}, Tindices:type{int32,int64}, Tnumsegments:type{int32,int64}=int32";
const ORDERED: &str = "(data:T, segment_ids:Tindices, num_segments:Tnumsegments) -> (output:T) ; \
    T:type{real}, Tindices:type{int32,int64}, Tnumsegments:type{int32,int64}=int32";

const fn unsorted(
    name: &'static str,
    signature: &'static str,
    kernels: &'static [KernelDef],
    gradient: Gradient,
) -> Op {
    Op {
        def: OpDef { name, signature, shape: unsorted_shape, gradient, ..OpDef::BASE },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

fn unsorted_shape(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let n_segments = match ctx.constant_integers(2).as_deref() {
        Some([n]) => Some(usize::try_from(*n).map_err(|_| negative_count(*n))?),
        _ => None,
    };
    let (Some(data), Some(ids)) = (ctx.input(0).dims(), ctx.input(1).dims()) else {
        return Ok(vec![PartialShape::unknown()]);
    };
    if data.len() < ids.len() {
        return Err(prefix_error(ctx.input(0), ctx.input(1)));
    }
    let (front, row) = data.split_at(ids.len());
    PartialShape::new(front).merge(ctx.input(1)).map_err(|_| prefix_error(ctx.input(0), ctx.input(1)))?;
    Ok(vec![PartialShape::new(&[n_segments]).concat(&PartialShape::new(row))])
}

fn negative_count(n: i64) -> Error {
    Error::invalid_argument(format!("Input num_segments == {n} must not be negative."))
}

fn prefix_error(data: &PartialShape, ids: &PartialShape) -> Error {
    Error::invalid_argument(format!("data.shape = {data} does not start with segment_ids.shape = {ids}"))
}

fn sum_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let picked = Picked::of(op);
    Ok(vec![Some(picked.or_zero(picked.rows(first(dy)?)).into())])
}

/// Elements that are equally extreme share the gradient of their segment.
fn extreme_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, dy, picked) = (op.graph(), first(dy)?, Picked::of(op));
    let is_chosen = graph.op("Equal").input(op.input(0)).input(picked.rows(op.output(0))).out();
    let is_chosen = graph.op("LogicalAnd").input(is_chosen).input(picked.is_kept).out();
    let n_chosen = graph.op("Cast").input(is_chosen).attr("DstT", dy.dtype()).out();
    let n_chosen = graph.op("UnsortedSegmentSum").inputs([n_chosen, op.input(1), op.input(2)]).out();
    let zero = 0.0.into_output(graph, dy.dtype());
    let share = picked.rows(dy / n_chosen);
    Ok(vec![Some(graph.op("SelectV2").inputs([is_chosen, share, zero]).out().into())])
}

/// Each element's gradient is the product of the others of its segment: the product of all divided by it, or, if it is the
/// only 0, the product of those that are not 0.
fn prod_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, x, dy, picked) = (op.graph(), op.input(0), first(dy)?, Picked::of(op));
    let [zero, one] = [0.0, 1.0].map(|value: f64| value.into_output(graph, dy.dtype()));
    let select = |mask: Output<'g>, a: Output<'g>, b: Output<'g>| graph.op("SelectV2").inputs([mask, a, b]).out();
    let by_segment = |name: &str, of: Output<'g>| graph.op(name).inputs([of, op.input(1), op.input(2)]).out();
    let is_zero = graph.op("Equal").input(x).input(zero).out();
    let n_zeros = graph.op("Cast").input(is_zero).attr("DstT", dy.dtype()).out();
    let n_zeros = picked.rows(by_segment("UnsortedSegmentSum", n_zeros));
    let divisor = select(is_zero, one, x);
    let without_zeros = picked.rows(by_segment("UnsortedSegmentProd", divisor));
    let is_only_zero = graph.op("Equal").input(n_zeros).input(one).out();
    let beside_zero = select(is_only_zero, without_zeros, zero);
    let others = select(is_zero, beside_zero, picked.rows(op.output(0)) / divisor);
    Ok(vec![Some(picked.or_zero(picked.rows(dy) * others).into())])
}

/// Which rows of the output the rows of `data` went to.
struct Picked<'g> {
    op: Operation<'g>,
    /// The ids, with 0 for those that are dropped.
    ids: Output<'g>,
    /// Whether each element of `data` is not dropped; ready to broadcast against `data`.
    is_kept: Output<'g>,
}

impl<'g> Picked<'g> {
    fn of(op: Operation<'g>) -> Picked<'g> {
        let (graph, ids) = (op.graph(), op.input(1));
        let zero = 0.into_output(graph, ids.dtype());
        let is_kept = graph.op("GreaterEqual").input(ids).input(zero).out();
        // One size of 1 per dimension of a row.
        let ones = match (op.input(0).shape().rank(), ids.shape().rank()) {
            (Some(data), Some(ids)) => graph.constant(vec![1i32; data.saturating_sub(ids)]),
            _ => {
                let rank = |of: Output<'g>| graph.op("Rank").input(of).out();
                let n = rank(op.input(0)) - rank(ids);
                let n = graph.op("Reshape").input(n).input(graph.constant([1i32])).out();
                graph.op("Fill").input(n).input(graph.constant(1i32)).out()
            }
        };
        let shape = graph.op("Shape").input(ids).out();
        let shape = graph.op("ConcatV2").inputs([shape, ones, graph.constant(0i32)]).attr("N", 2i64).out();
        Picked {
            op,
            ids: graph.op("Maximum").input(ids).input(zero).out(),
            is_kept: graph.op("Reshape").input(is_kept).input(shape).out(),
        }
    }

    /// For each row of `data`, the row of `segments` that it went to.
    fn rows(&self, segments: Output<'g>) -> Output<'g> {
        let graph = self.op.graph();
        graph.op("GatherV2").inputs([segments, self.ids, graph.constant(0i32)]).out()
    }

    /// `value` where rows are kept, 0 where they are dropped.
    fn or_zero(&self, value: Output<'g>) -> Output<'g> {
        let graph = self.op.graph();
        let zero = 0.into_output(graph, value.dtype());
        graph.op("SelectV2").inputs([self.is_kept, value, zero]).out()
    }
}

/// Segments are shared out over at most this many tasks, each of which looks at all ids.
const MAX_TASKS: usize = 16;

/// Which rows belong to which segment.
struct Members {
    ids: Vec<i64>,
    n_segments: usize,
    /// Elements in a row.
    row: usize,
    /// The shape of the output.
    shape: Shape,
}

impl Members {
    fn of(ctx: &KernelCtx<'_>) -> Result<Members> {
        let (data, ids) = (ctx.input(0)?.shape().clone(), ctx.input(1)?.shape().clone());
        let n_segments = match ctx.integers(2)?.as_slice() {
            [n] => usize::try_from(*n).map_err(|_| negative_count(*n))?,
            _ => return Err(Error::invalid_argument("num_segments should be a scalar")),
        };
        let Some(row) = data.strip_prefix(ids.dims()) else {
            return Err(prefix_error(&data.into(), &ids.into()));
        };
        let shape = Shape::new(&[&[n_segments], row].concat())?;
        let row: usize = row.iter().product();
        let ids = segment_ids(ctx, 1)?;
        if let Some(i) = ids.iter().position(|&id| id >= n_segments as i64) {
            return Err(Error::invalid_argument(format!(
                "segment_ids[{i}] = {} is out of range [0, {n_segments})",
                ids[i]
            )));
        }
        Ok(Members { ids, n_segments, row, shape })
    }
}

/// Output 0 brings together rows of input 0 by the ids in input 1, for as many segments as input 2 says.
fn gather_up<T: Number>(ctx: &mut KernelCtx<'_>, start: T, join: impl Fn(T, T) -> T + Sync) -> Result<()> {
    let Members { ids, n_segments, row, shape } = Members::of(ctx)?;
    let mut out = ctx.allocate(T::DTYPE, shape)?;
    let values = ctx.data::<T>(0)?;
    // Every task reads all ids, which pays only if rows are long.
    let n_tasks = if row < 16 { 1 } else { (values.len() / 16_384).clamp(1, MAX_TASKS) };
    let per_task = n_segments.div_ceil(n_tasks).max(1);
    if row > 0 {
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, per_task * row, |task, out| {
            out.fill(start);
            let first = task * per_task;
            let mine = first..first + out.len() / row;
            for (values, &id) in looking(values.chunks_exact(row).zip(&ids)) {
                // Negative ids wrap to numbers above any segment's.
                let id = id as usize;
                if mine.contains(&id) {
                    let out = &mut out[(id - first) * row..][..row];
                    lanes::<T, _>(
                        #[inline(always)]
                        || out.iter_mut().zip(values).for_each(|(a, &b)| *a = join(*a, b)),
                    );
                }
            }
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

/// The values of an int16, int32 or int64 input.
pub(crate) fn segment_ids(ctx: &KernelCtx<'_>, i: usize) -> Result<Vec<i64>> {
    match ctx.input(i)?.dtype() {
        DType::I16 => Ok(ctx.data::<i16>(i)?.iter().map(|&id| i64::from(id)).collect()),
        _ => ctx.integers(i),
    }
}

fn sum_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    gather_up(
        ctx,
        T::ZERO,
        #[inline(always)]
        |a: T, b| a.add(b),
    )
}

fn max_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    gather_up(
        ctx,
        finite_range(ctx.attrs().dtype("T")?).0,
        #[inline(always)]
        |a: T, b| a.max(b),
    )
}

fn min_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    gather_up(
        ctx,
        finite_range(ctx.attrs().dtype("T")?).1,
        #[inline(always)]
        |a: T, b| a.min(b),
    )
}

fn prod_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    gather_up(
        ctx,
        T::ONE,
        #[inline(always)]
        |a: T, b| a.mul(b),
    )
}

const SUM_KERNELS: &[KernelDef] = cpu_kernels!(sum_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);
const MAX_KERNELS: &[KernelDef] = cpu_kernels!(max_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);
const MIN_KERNELS: &[KernelDef] = cpu_kernels!(min_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);
const PROD_KERNELS: &[KernelDef] = cpu_kernels!(prod_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);

fn on_gpu(ctx: &mut KernelCtx<'_>, join: Join) -> Result<()> {
    let (data, ids) = (ctx.input(0)?, ctx.input(1)?);
    let n_segments = match ctx.integers(2)?.as_slice() {
        &[n] if n >= 0 => n as usize,
        [n] => return Err(Error::invalid_argument(format!("num_segments is {n}, below 0"))),
        _ => return Err(Error::invalid_argument("num_segments should be a scalar")),
    };
    let Some(row) = data.shape().strip_prefix(ids.shape().dims()) else {
        return Err(Error::invalid_argument(format!(
            "data.shape = {} does not start with segment_ids.shape = {}",
            data.shape(),
            ids.shape()
        )));
    };
    let shape = Shape::new(&[&[n_segments], row].concat())?;
    let inner = product(row);
    let (dtype, device) = (data.dtype(), gpu(ctx)?);
    let mut out = match join {
        Join::Add => zeros(ctx, dtype, shape)?,
        _ => {
            let text = match join {
                Join::Max => "-LARGEST",
                Join::Min => "LARGEST",
                _ => "(Wide<U>::type)1",
            };
            let mut out = ctx.allocate(dtype, shape)?;
            // The largest finite number of each type, so that a segment without rows is what it is on a CPU.
            let largest = match dtype {
                DType::F64 => format!("{:e}", f64::MAX),
                DType::F16 => "65504.0f".to_owned(),
                DType::BF16 => "3.3895313892515355e38f".to_owned(),
                _ => format!("{:e}f", f32::MAX),
            };
            fill_text(device, &mut out, join.name(), &text.replace("LARGEST", &largest))?;
            out
        }
    };
    let places = Places {
        indices: ids,
        n: ids.n_elements(),
        inner,
        depth: 1,
        dims: SmallVec::from_slice(&[n_segments as i64]),
        steps: SmallVec::from_slice(&[1]),
        single: false,
    };
    combine(device, &mut out, &places, data, join)?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn sum() {
        let data = [[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]];
        check_op("UnsortedSegmentSum").input(data).input([2i32, 0, 2]).input(3i32).gives([
            [3.0f32, 4.0],
            [0.0, 0.0],
            [6.0, 8.0],
        ]);
        check_op("UnsortedSegmentSum").input(data).input([-1i64, 0, 0]).input(1i64).gives([[8.0f32, 10.0]]);
        check_op("UnsortedSegmentSum").input(data).input([[0i16, 1], [1, 1], [0, 0]]).input(2i32).gives([12.0f32, 9.0]);
        check_op("UnsortedSegmentSum").input(7i32).input(1i32).input(2i32).gives([0i32, 7]);
        check_op("UnsortedSegmentSum")
            .input(tensor::<f32, 2>([0, 2], []))
            .input(tensor::<i32, 1>([0], []))
            .input(1i32)
            .gives([[0.0f32, 0.0]]);
        check_op("UnsortedSegmentSum")
            .input(tensor::<f32, 2>([2, 0], []))
            .input([0i32, 1])
            .input(2i32)
            .gives(tensor::<f32, 2>([2, 0], []));
        check_op("UnsortedSegmentSum")
            .input(data)
            .input([0i32, 1, 2])
            .input(2i32)
            .fails("segment_ids[2] = 2 is out of");
        check_op("UnsortedSegmentSum").input(data).input([0i32, 1]).input(2i32).fails("does not start with");
        check_op("UnsortedSegmentSum").input(data).input([0i32, 1, 2]).input(-2i32).fails("must not be negative");
    }

    #[test]
    fn extremes_and_products() {
        let data = [[1.0f32, 5.0], [3.0, 4.0], [2.0, 6.0]];
        let test = |op: &str| check_op(op).input(data).input([1i32, 1, -1]).input(2i32);
        test("UnsortedSegmentMax").gives([[f32::MIN, f32::MIN], [3.0, 5.0]]);
        test("UnsortedSegmentMin").gives([[f32::MAX, f32::MAX], [1.0, 4.0]]);
        test("UnsortedSegmentProd").gives([[1.0f32, 1.0], [3.0, 20.0]]);
        check_op("UnsortedSegmentMax").input([7i32]).input([1i32]).input(2i32).gives([i32::MIN, 7]);
    }

    #[test]
    fn many_rows_are_shared_out_without_loss() {
        let (n, row, n_segments) = (5000, 33, 77);
        let data: Vec<f32> = (0..n * row).map(|i| (i % 10) as f32).collect();
        let ids: Vec<i32> = (0..n).map(|i| (i * 31 % n_segments) as i32).collect();
        let mut expected = vec![0.0f32; n_segments * row];
        for (i, x) in data.iter().enumerate() {
            expected[ids[i / row] as usize * row + i % row] += x;
        }
        check_op("UnsortedSegmentSum")
            .input(tensor([n, row], data))
            .input(ids)
            .input(n_segments as i32)
            .gives(Tensor::from_vec([n_segments, row], expected).unwrap());
    }

    #[test]
    fn gradients() {
        for op in ["UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"] {
            check_op(op).input(wavy([4, 2], 1)).input([1i32, -1, 0, 1]).input(2i32).gradient();
            check_op(op).input(wavy([2, 2], 1)).input([[1i64, -1], [0, 1]]).input(2i32).gradient();
        }
    }

    #[test]
    fn the_gradient_of_a_product_survives_zeros() {
        check_op("UnsortedSegmentProd")
            .input([2.0f32, 0.0, 3.0, 0.0, 0.0, 5.0, 4.0])
            .input([0i32, 0, 0, 1, 1, 1, 2])
            .input(3i32)
            .gradient();
    }
}
