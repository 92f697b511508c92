//! `SegmentSum`, `Mean`, `Prod`, `Max`, `Min`: row `s` of the output brings together the rows of `data` whose segment id is
//! `s`; ids are in ascending order. `SparseSegmentSum`, `Mean`, `SqrtN`: the same of the rows that `indices` names, and
//! `…WithNumSegments` with as many rows as a fourth input says.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_device::cpu::looking_by;
use kolo_graph::{Grad, Gradient, HalfSafety, InferCtx, IntoOutput, OpDef, Operation, Output};

use crate::array::elements::integer;
use crate::math::binary::first;
use crate::math::elementwise::lanes;
use crate::math::number::{Number, Real};
use crate::math::reduce::extreme::{Max, Min};
use crate::math::reduce::prod::Prod;
use crate::math::reduce::sum::{Mean, Sum};
use crate::math::reduce::walk::Reducer;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

macro_rules! builders {
    ($($function:ident, $op:literal, $doc:literal;)*) => {
        $(#[doc = $doc]
        #[track_caller]
        pub fn $function<'g>(data: Output<'g>, segment_ids: Output<'g>) -> Output<'g> {
            data.graph().op($op).input(data).input(segment_ids).out()
        })*
    };
}

builders! {
    segment_sum, "SegmentSum", "Row `s` is the sum of the rows of `data` whose id is `s`; ids ascend.";
    segment_mean, "SegmentMean", "Row `s` is the mean of the rows of `data` whose id is `s`; ids ascend.";
    segment_max, "SegmentMax", "Row `s` is the largest of the rows of `data` whose id is `s`; ids ascend.";
    segment_min, "SegmentMin", "Row `s` is the smallest of the rows of `data` whose id is `s`; ids ascend.";
    segment_prod, "SegmentProd", "Row `s` is the product of the rows of `data` whose id is `s`; ids ascend.";
}

/// Row `s` is the sum of the rows `indices[i]` of `data` for which `segment_ids[i]` is `s`; ids ascend.
#[track_caller]
pub fn sparse_segment_sum<'g>(data: Output<'g>, indices: Output<'g>, segment_ids: Output<'g>) -> Output<'g> {
    data.graph().op("SparseSegmentSum").inputs([data, indices, segment_ids]).out()
}

/// Row `s` is the mean of the rows `indices[i]` of `data` for which `segment_ids[i]` is `s`; ids ascend.
#[track_caller]
pub fn sparse_segment_mean<'g>(data: Output<'g>, indices: Output<'g>, segment_ids: Output<'g>) -> Output<'g> {
    data.graph().op("SparseSegmentMean").inputs([data, indices, segment_ids]).out()
}

pub(crate) static SEGMENT_SUM: Op =
    sorted("SegmentSum", NUMBERS, SUM_KERNELS, Gradient::Rule(segment_gradient)).half(HalfSafety::Wide);
pub(crate) static SEGMENT_MEAN: Op =
    sorted("SegmentMean", NUMBERS, MEAN_KERNELS, Gradient::Rule(segment_gradient)).half(HalfSafety::Wide);
pub(crate) static SEGMENT_MAX: Op =
    sorted("SegmentMax", ORDERED, MAX_KERNELS, Gradient::Rule(extreme_gradient)).half(HalfSafety::Neutral);
pub(crate) static SEGMENT_MIN: Op =
    sorted("SegmentMin", ORDERED, MIN_KERNELS, Gradient::Rule(extreme_gradient)).half(HalfSafety::Neutral);
pub(crate) static SEGMENT_PROD: Op =
    sorted("SegmentProd", NUMBERS, PROD_KERNELS, Gradient::Rule(prod_gradient)).half(HalfSafety::Wide);
pub(crate) static SPARSE_SEGMENT_SUM: Op =
    sparse("SparseSegmentSum", ORDERED_ROWS, SPARSE_SUM_KERNELS).half(HalfSafety::Wide);
pub(crate) static SPARSE_SEGMENT_MEAN: Op =
    sparse("SparseSegmentMean", FLOAT_ROWS, SPARSE_MEAN_KERNELS).half(HalfSafety::Wide);
pub(crate) static SPARSE_SEGMENT_SQRT_N: Op =
    sparse("SparseSegmentSqrtN", FLOAT_ROWS, SPARSE_SQRT_N_KERNELS).half(HalfSafety::Wide);

pub(crate) static SPARSE_SEGMENT_SUM_WITH_NUM_SEGMENTS: Op =
    sparse_with_number("SparseSegmentSumWithNumSegments", ORDERED_ROWS_NUMBER, SPARSE_SUM_KERNELS);
pub(crate) static SPARSE_SEGMENT_MEAN_WITH_NUM_SEGMENTS: Op =
    sparse_with_number("SparseSegmentMeanWithNumSegments", FLOAT_ROWS_NUMBER, SPARSE_MEAN_KERNELS);
pub(crate) static SPARSE_SEGMENT_SQRT_N_WITH_NUM_SEGMENTS: Op =
    sparse_with_number("SparseSegmentSqrtNWithNumSegments", FLOAT_ROWS_NUMBER, SPARSE_SQRT_N_KERNELS);

const NUMBERS: &str = "(data:T, segment_ids:Tindices) -> (output:T) ; T:type{num}, Tindices:type{int32,int64}";
const ORDERED: &str = "(data:T, segment_ids:Tindices) -> (output:T) ; T:type{real}, Tindices:type{int32,int64}";
const ORDERED_ROWS: &str = "(data:T, indices:Tidx, segment_ids:Tsegmentids) -> (output:T) ; T:type{real}, \
    Tidx:type{int32,int64}=int32, Tsegmentids:type{int32,int64}=int32, sparse_gradient:bool=false";
const FLOAT_ROWS: &str = "(data:T, indices:Tidx, segment_ids:Tsegmentids) -> (output:T) ; \
    T:type{bfloat16,half,float,double}, Tidx:type{int32,int64}=int32, Tsegmentids:type{int32,int64}=int32, \
    sparse_gradient:bool=false";

const ORDERED_ROWS_NUMBER: &str = "(data:T, indices:Tidx, segment_ids:Tsegmentids, num_segments:Tnumsegments) -> \
    (output:T) ; T:type{real}, Tidx:type{int32,int64}=int32, Tnumsegments:type{int32,int64}=int32, \
    Tsegmentids:type{int32,int64}=int32, sparse_gradient:bool=false";
const FLOAT_ROWS_NUMBER: &str = "(data:T, indices:Tidx, segment_ids:Tsegmentids, num_segments:Tnumsegments) -> \
    (output:T) ; T:type{bfloat16,half,float,double}, Tidx:type{int32,int64}=int32, \
    Tnumsegments:type{int32,int64}=int32, Tsegmentids:type{int32,int64}=int32, sparse_gradient:bool=false";

const fn sorted(name: &'static str, signature: &'static str, kernels: &'static [KernelDef], gradient: Gradient) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: |ctx| {
                let ids = ctx.input_of_rank(1, 1)?;
                let front = ctx.input_of_rank_at_least(0, 1)?.dim(0);
                PartialShape::new(&[front]).merge(&ids).map_err(|_| length_error(ctx.input(0), &ids))?;
                rows_of_unknown_number(ctx)
            },
            gradient,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

const fn sparse(name: &'static str, signature: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: |ctx| {
                ctx.input_of_rank_at_least(0, 1)?;
                let (indices, ids) = (ctx.input_of_rank(1, 1)?, ctx.input_of_rank(2, 1)?);
                indices.merge(&ids).map_err(|_| length_error(&indices, &ids))?;
                rows_of_unknown_number(ctx)
            },
            gradient: Gradient::Rule(sparse_gradient),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

const fn sparse_with_number(name: &'static str, signature: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: |ctx| {
                let data = ctx.input_of_rank_at_least(0, 1)?;
                let (indices, ids) = (ctx.input_of_rank(1, 1)?, ctx.input_of_rank(2, 1)?);
                indices.merge(&ids).map_err(|_| length_error(&indices, &ids))?;
                ctx.input_of_rank(3, 0)?;
                let n = match ctx.constant_integers(3).as_deref() {
                    Some(&[n]) => Some(n_segments(n)?),
                    _ => None,
                };
                Ok(vec![match data.dims() {
                    Some([_, row @ ..]) => PartialShape::new(&[n]).concat(&PartialShape::new(row)),
                    _ => PartialShape::unknown(),
                }])
            },
            gradient: Gradient::Rule(|op, dy| {
                let mut grads = sparse_gradient(op, dy)?;
                grads.resize(4, None);
                Ok(grads)
            }),
            half: HalfSafety::Wide,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

fn n_segments(n: i64) -> Result<usize> {
    usize::try_from(n)
        .map_err(|_| Error::invalid_argument(format!("Cannot specify a negative value for num_segments: {n}")))
}

/// As many rows as the last id says, which is a value.
fn rows_of_unknown_number(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok(vec![match ctx.input(0).dims() {
        Some([_, row @ ..]) => PartialShape::new(&[None]).concat(&PartialShape::new(row)),
        _ => PartialShape::unknown(),
    }])
}

fn length_error(rows: &PartialShape, ids: &PartialShape) -> Error {
    Error::invalid_argument(format!("segment_ids should be the same size as dimension 0 of input: {rows} and {ids}"))
}

/// For each id, the row of `segments` it names.
fn rows<'g>(segments: Output<'g>, ids: Output<'g>) -> Output<'g> {
    let graph = segments.graph();
    graph.op("GatherV2").inputs([segments, ids, graph.constant(0i32)]).out()
}

/// How many rows each segment brings together, as a column that broadcasts against `like`, which has as many dimensions
/// as the output.
fn counts<'g>(ids: Output<'g>, like: Output<'g>) -> Output<'g> {
    let graph = ids.graph();
    let ones =
        graph.op("Fill").input(graph.op("Shape").input(ids).out()).input(1.0.into_output(graph, like.dtype())).out();
    let counts = segment_sum(ones, ids);
    let shape = match like.shape().rank() {
        Some(rank) => {
            let mut shape = vec![1i32; rank.max(1)];
            shape[0] = -1;
            graph.constant(shape)
        }
        None => {
            let rank = graph.op("Rank").input(like).out();
            let n = graph.op("Reshape").input(rank - 1).input(graph.constant([1i32])).out();
            let ones = graph.op("Fill").input(n).input(graph.constant(1i32)).out();
            graph.op("ConcatV2").inputs([graph.constant([-1i32]), ones, graph.constant(0i32)]).attr("N", 2i64).out()
        }
    };
    graph.op("Reshape").input(counts).input(shape).out()
}

fn segment_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (ids, dy) = (op.input(1), first(dy)?);
    // Ids that no row has count 0, but no row asks for them either.
    let each = if op.op() == "SegmentMean" { dy / counts(ids, dy) } else { dy };
    Ok(vec![Some(rows(each, ids).into())])
}

/// Elements that are equally extreme share the gradient of their segment.
fn extreme_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, ids, dy) = (op.graph(), op.input(1), first(dy)?);
    let is_chosen = graph.op("Equal").input(op.input(0)).input(rows(op.output(0), ids)).out();
    let is_chosen = graph.op("Cast").input(is_chosen).attr("DstT", dy.dtype()).out();
    let share = graph.op("DivNoNan").input(dy).input(segment_sum(is_chosen, ids)).out();
    Ok(vec![Some((is_chosen * rows(share, ids)).into())])
}

/// Each element's gradient is the product of the others of its segment: the product of all divided by it, or, if it is the
/// only 0, the product of those that are not 0.
fn prod_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, x, ids, dy) = (op.graph(), op.input(0), op.input(1), first(dy)?);
    let [zero, one] = [0.0, 1.0].map(|value: f64| value.into_output(graph, dy.dtype()));
    let select = |mask: Output<'g>, a: Output<'g>, b: Output<'g>| graph.op("SelectV2").inputs([mask, a, b]).out();
    let is_zero = graph.op("Equal").input(x).input(zero).out();
    let n_zeros = graph.op("Cast").input(is_zero).attr("DstT", dy.dtype()).out();
    let n_zeros = rows(segment_sum(n_zeros, ids), ids);
    let divisor = select(is_zero, one, x);
    let without_zeros = rows(segment_prod(divisor, ids), ids);
    let is_only_zero = graph.op("Equal").input(n_zeros).input(one).out();
    let beside_zero = select(is_only_zero, without_zeros, zero);
    let others = select(is_zero, beside_zero, rows(op.output(0), ids) / divisor);
    Ok(vec![Some((rows(dy, ids) * others).into())])
}

fn sparse_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, indices, ids, dy) = (op.graph(), op.input(1), op.input(2), first(dy)?);
    // The rows before they are divided: there may be more segments than ids count.
    let each = rows(dy, ids);
    let each = match op.op() {
        "SparseSegmentSum" | "SparseSegmentSumWithNumSegments" => each,
        "SparseSegmentMean" | "SparseSegmentMeanWithNumSegments" => each / rows(counts(ids, dy), ids),
        _ => each / graph.op("Sqrt").input(rows(counts(ids, dy), ids)).out(),
    };
    let shape = graph.op("Shape").input(op.input(0)).out();
    let [zero, one] = [0i32, 1].map(|i| graph.constant([i]));
    let n_rows = graph.op("StridedSlice").inputs([shape, zero, one, one]).attr("shrink_axis_mask", 1i64).out();
    Ok(vec![Some(graph.op("UnsortedSegmentSum").inputs([each, indices, n_rows]).out().into())])
}

/// The sum divided by the root of the number of rows.
#[derive(Clone, Copy)]
struct SqrtN;

impl<T: Real> Reducer<T> for SqrtN {
    const KEEPS_ONE: bool = false;
    type Acc = T;
    const START: T = T::ZERO;
    #[inline(always)]
    fn step(acc: T, x: T) -> T {
        acc + x
    }
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a + b
    }
    #[inline(always)]
    fn finish(acc: T, n: usize) -> T {
        acc / T::from_f64((n as f64).sqrt())
    }
}

/// Which rows belong to which segment.
struct Members {
    ids: Vec<i64>,
    picks: Option<Vec<i64>>,
    n_segments: usize,
    /// Elements in a row.
    row: usize,
    /// The shape of the output.
    shape: Shape,
}

impl Members {
    fn of(ctx: &KernelCtx<'_>) -> Result<Members> {
        // Ids are the last of two or three inputs, or before the number of segments.
        let last = (ctx.n_inputs() - 1).min(2);
        let shape = ctx.input(0)?.shape().clone();
        let Some((&n_rows, row)) = shape.split_first() else {
            return Err(Error::invalid_argument("data should have at least one dimension"));
        };
        let ids = ctx.integers(last)?;
        let picks = if last == 2 { Some(ctx.integers(1)?) } else { None };
        if ctx.input(last)?.shape().rank() != 1 || ids.len() != picks.as_ref().map_or(n_rows, Vec::len) {
            let rows = ctx.input(last - 1)?.shape();
            return Err(length_error(&rows.into(), &ctx.input(last)?.shape().into()));
        }
        if let Some(i) = picks.iter().flatten().position(|&pick| pick < 0 || pick >= n_rows as i64) {
            return Err(Error::invalid_argument(format!("indices[{i}] is out of range [0, {n_rows})")));
        }
        if ids.first().is_some_and(|&id| id < 0) {
            return Err(Error::invalid_argument("segment ids must be >= 0"));
        }
        if !ids.is_sorted() {
            return Err(Error::invalid_argument("segment ids are not increasing"));
        }
        let n_segments = match ids.last() {
            Some(&id) => usize::try_from(id).ok().and_then(|id| id.checked_add(1)),
            None => Some(0),
        };
        let mut n_segments = n_segments.ok_or_else(|| Error::invalid_argument("a segment id is too large"))?;
        if ctx.n_inputs() == 4 {
            let asked = ctx.input(3)?;
            if asked.shape().rank() != 0 {
                return Err(Error::invalid_argument(format!("num_segments should be a scalar, not {}", asked.shape())));
            }
            let asked = self::n_segments(integer(asked)?)?;
            if n_segments > asked {
                return Err(Error::invalid_argument(format!(
                    "Segment id {} out of range [0, {asked})",
                    n_segments - 1
                )));
            }
            n_segments = asked;
        }
        let shape = Shape::new(&[&[n_segments], row].concat())?;
        Ok(Members { ids, picks, n_segments, row: row.iter().product(), shape })
    }
}

/// Brings rows together by the ids in the last input; which rows is in input 1 if there are three inputs. `gap` fills the
/// rows of segments that have none.
fn by_segment<T: Number, R: Reducer<T>>(ctx: &mut KernelCtx<'_>, gap: T) -> Result<()> {
    let Members { ids, picks, n_segments, row, shape } = Members::of(ctx)?;
    let mut out = ctx.allocate(T::DTYPE, shape)?;
    let values = ctx.data::<T>(0)?;
    if row > 0 && n_segments > 0 {
        // Tasks of about 16 Ki elements, by the sizes alone.
        let per_task = (16_384 * n_segments / (ids.len() * row).max(1)).clamp(1, n_segments);
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, per_task * row, |task, out| {
            let mut acc = vec![R::START; row];
            for (i, out) in out.chunks_exact_mut(row).enumerate() {
                let id = (task * per_task + i) as i64;
                let members = ids.partition_point(|&other| other < id)..ids.partition_point(|&other| other <= id);
                if members.is_empty() {
                    out.fill(gap);
                    continue;
                }
                let n = members.len();
                acc.fill(R::START);
                lanes::<T, _>(
                    #[inline(always)]
                    || {
                        for member in looking_by(row * size_of::<T>(), members) {
                            let at = picks.as_ref().map_or(member, |picks| picks[member] as usize);
                            for (acc, &x) in acc.iter_mut().zip(&values[at * row..(at + 1) * row]) {
                                *acc = R::step(*acc, x);
                            }
                        }
                        out.iter_mut().zip(&acc).for_each(|(y, &acc)| *y = R::finish(acc, n));
                    },
                );
            }
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

macro_rules! kernels {
    ($($table:ident, $function:ident, $bound:ident, $reducer:ident, $gap:ident, ($($types:tt)*);)*) => {
        $(fn $function<T: $bound>(ctx: &mut KernelCtx<'_>) -> Result<()> {
            by_segment::<T, $reducer>(ctx, T::$gap)
        }
        const $table: &[KernelDef] = cpu_kernels!($function: $($types)*);)*
    };
}

// As in TensorFlow, a segment without rows is 0, and 1 for products.
kernels! {
    SUM_KERNELS, sum_kernel, Number, Sum, ZERO, (f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);
    MEAN_KERNELS, mean_kernel, Number, Mean, ZERO,
        (f32, f64, i32, i64, u64; f16, bf16, i8 as i64, i16 as i64, u8 as i64, u16 as i64, u32);
    MAX_KERNELS, max_kernel, Number, Max, ZERO, (f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);
    MIN_KERNELS, min_kernel, Number, Min, ZERO, (f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);
    PROD_KERNELS, prod_kernel, Number, Prod, ONE, (f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);
    SPARSE_SUM_KERNELS, sparse_sum_kernel, Number, Sum, ZERO, (f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);
    SPARSE_MEAN_KERNELS, sparse_mean_kernel, Real, Mean, ZERO, (f32, f64; f16, bf16);
    SPARSE_SQRT_N_KERNELS, sparse_sqrt_n_kernel, Real, SqrtN, ZERO, (f32, f64; f16, bf16);
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn segments() {
        let data = [[1.0f32, 5.0], [3.0, 4.0], [2.0, 6.0]];
        let test = |op: &str| check_op(op).input(data).input([0i32, 0, 2]);
        test("SegmentSum").gives([[4.0f32, 9.0], [0.0, 0.0], [2.0, 6.0]]);
        test("SegmentMean").gives([[2.0f32, 4.5], [0.0, 0.0], [2.0, 6.0]]);
        test("SegmentMax").gives([[3.0f32, 5.0], [0.0, 0.0], [2.0, 6.0]]);
        test("SegmentMin").gives([[1.0f32, 4.0], [0.0, 0.0], [2.0, 6.0]]);
        test("SegmentProd").gives([[3.0f32, 20.0], [1.0, 1.0], [2.0, 6.0]]);
        check_op("SegmentSum").input([1i64, 2, 3]).input([1i64, 1, 1]).gives([0i64, 6]);
        check_op("SegmentSum").input(tensor::<f32, 2>([0, 2], [])).input(tensor::<i32, 1>([0], [])).gives(tensor::<
            f32,
            2,
        >(
            [0, 2], []
        ));
    }

    #[test]
    fn bad_ids() {
        check_op("SegmentSum").input([1.0f32, 2.0]).input([1i32, 0]).fails("segment ids are not increasing");
        check_op("SegmentSum").input([1.0f32, 2.0]).input([-1i32, 0]).fails("segment ids must be >= 0");
        check_op("SegmentSum").input([1.0f32, 2.0]).input([0i32]).fails("should be the same size as dimension 0");
        check_op("SegmentSum").input([1.0f32, 2.0]).input([0i64, i64::MAX]).fails("too");
        check_op("SparseSegmentSum").input([1.0f32]).input([1i32]).input([0i32]).fails("indices[0] is out of range");
        check_op("SparseSegmentSum").input([1.0f32]).input([0i32, 0]).input([0i32]).fails("same size");
    }

    #[test]
    fn rows_by_index() {
        let data = [[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]];
        let test = |op: &str| check_op(op).input(data).input([2i32, 0, 2, 1]).input([0i64, 0, 0, 2]);
        test("SparseSegmentSum").gives([[11.0f32, 14.0], [0.0, 0.0], [3.0, 4.0]]);
        test("SparseSegmentMean").gives([[11.0f32 / 3.0, 14.0 / 3.0], [0.0, 0.0], [3.0, 4.0]]);
        let root = 3.0f32.sqrt();
        test("SparseSegmentSqrtN").gives([[11.0 / root, 14.0 / root], [0.0, 0.0], [3.0, 4.0]]);
    }

    #[test]
    fn the_number_of_segments_may_be_given() {
        let data = [[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]];
        let test = |op: &str, n: i32| check_op(op).input(data).input([2i32, 0]).input([0i64, 0]).input(n);
        test("SparseSegmentSumWithNumSegments", 3).gives([[6.0f32, 8.0], [0.0, 0.0], [0.0, 0.0]]);
        test("SparseSegmentMeanWithNumSegments", 1).gives([[3.0f32, 4.0]]);
        test("SparseSegmentSumWithNumSegments", 0).fails("Segment id 0 out of range [0, 0)");
        test("SparseSegmentSumWithNumSegments", -1).fails("negative value for num_segments");
        for op in ["Sum", "Mean", "SqrtN"] {
            let test = check_op(&format!("SparseSegment{op}WithNumSegments")).input(wavy([3, 2], 1));
            test.input([2i32, 0, 2, 1]).input([0i32, 0, 1, 1]).input(4i32).gradient();
        }
    }

    #[test]
    fn many_segments_are_shared_out_without_loss() {
        let (n, row) = (6000, 9);
        let data: Vec<f32> = (0..n * row).map(|i| (i % 10) as f32).collect();
        let ids: Vec<i32> = (0..n).map(|i| (i / 7) as i32).collect();
        let n_segments = ids[n - 1] as usize + 1;
        let mut expected = vec![0.0f32; n_segments * row];
        for (i, x) in data.iter().enumerate() {
            expected[ids[i / row] as usize * row + i % row] += x;
        }
        check_op("SegmentSum")
            .input(tensor([n, row], data))
            .input(ids)
            .gives(Tensor::from_vec([n_segments, row], expected).unwrap());
    }

    #[test]
    fn gradients() {
        for op in ["SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd"] {
            check_op(op).input(wavy([4, 2], 1)).input([0i32, 0, 2, 2]).gradient();
            check_op(op).input(wavy([3], 1)).input([0i64, 1, 1]).gradient();
        }
        for op in ["SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"] {
            check_op(op).input(wavy([3, 2], 1)).input([2i32, 0, 2, 1]).input([0i32, 0, 1, 1]).gradient();
        }
    }
}
