//! `StridedSlice`: Python's `x[begin:end:stride, …]` with all its forms. `StridedSliceGrad`: zeros, but for the part that
//! a slice shows.

use kolo_core::{DType, Dim, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::IntraPool;
use kolo_graph::{Attrs, Gradient, HalfSafety, HostRule, InferCtx, OpDef, Operation, Output};

use super::cast::cast;
use super::elements::{Item, Job, build, integers, is_in_buffer};
use super::view::{View, strides};
use crate::cuda::PLAIN;
use crate::cuda::view::is_on_gpu;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// One entry of an index: what `x[…]` may hold between commas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// `:`, the whole dimension.
    All,
    /// One element, which removes the dimension; negative counts from the end.
    Index(i64),
    /// `begin:end`; negative counts from the end, `None` goes all the way.
    Range(Option<i64>, Option<i64>),
    /// `begin:end:step`; the step may be negative.
    Step(Option<i64>, Option<i64>, i64),
    /// A new dimension of size 1.
    NewAxis,
    /// `...`, as many whole dimensions as are left. At most once.
    Rest,
}

/// The part of `x` that an index shows: `slice_at(x, &[At::All, At::Index(-1)])` is Python's `x[:, -1]`.
#[track_caller]
pub fn slice_at<'g>(x: Output<'g>, index: &[At]) -> Output<'g> {
    let (mut begin, mut end, mut steps) = (Vec::new(), Vec::new(), Vec::new());
    let mut masks = [0i64; 5];
    // An index too long for the masks is refused by the op itself.
    let bit = |i: usize| 1i64.checked_shl(i as u32).unwrap_or(0);
    for (i, at) in index.iter().enumerate() {
        let (mut first, mut last, mut step) = (Some(0), Some(0), 1);
        match *at {
            At::All => (first, last) = (None, None),
            At::Index(index) => {
                // The end only matters where it is not worked out from the index.
                (first, last) = (Some(index), Some(index.saturating_add(1)));
                masks[SHRINK] |= bit(i);
            }
            At::Range(from, to) => (first, last) = (from, to),
            At::Step(from, to, by) => (first, last, step) = (from, to, by),
            At::NewAxis => masks[NEW_AXIS] |= bit(i),
            At::Rest => masks[ELLIPSIS] |= bit(i),
        }
        for (mask, value, list) in [(BEGIN, first, &mut begin), (END, last, &mut end)] {
            if value.is_none() {
                masks[mask] |= bit(i);
            }
            list.push(value.unwrap_or(0));
        }
        steps.push(step);
    }
    let graph = x.graph();
    let inputs = if [&begin, &end, &steps].into_iter().flatten().all(|&value| i32::try_from(value).is_ok()) {
        [begin, end, steps].map(|list| graph.constant(list.into_iter().map(|value| value as i32).collect::<Vec<_>>()))
    } else {
        [begin, end, steps].map(|list| graph.constant(list))
    };
    let builder = graph.op("StridedSlice").input(x).inputs(inputs);
    MASKS.iter().zip(masks).fold(builder, |builder, (name, mask)| builder.attr(name, mask)).out()
}

const MASKS: [&str; 5] = ["begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"];
const BEGIN: usize = 0;
const END: usize = 1;
const ELLIPSIS: usize = 2;
const NEW_AXIS: usize = 3;
const SHRINK: usize = 4;

pub(crate) static STRIDED_SLICE: Op = Op {
    def: OpDef {
        name: "StridedSlice",
        signature: "(input:T, begin:Index, end:Index, strides:Index) -> (output:T) ; T:type, \
                    Index:type{int16,int32,int64}, begin_mask:int=0, end_mask:int=0, ellipsis_mask:int=0, \
                    new_axis_mask:int=0, shrink_axis_mask:int=0",
        shape: infer,
        gradient: Gradient::Rule(|op, dy| {
            let graph = op.graph();
            // The gradient op has no int16 form.
            let index = if op.input(1).dtype() == DType::I64 { DType::I64 } else { DType::I32 };
            let shape = graph.op("Shape").input(op.input(0)).attr("out_type", index).out();
            let spec = [1, 2, 3].map(|i| cast(op.input(i), index));
            let builder = graph.op("StridedSliceGrad").input(shape).inputs(spec).input(first(dy)?);
            Ok(vec![Some(with_masks_of(op, builder)?.into()), None, None, None])
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["begin", "end", "strides"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward)]),
    cost: Cost::Elements,
};

pub(crate) static STRIDED_SLICE_GRAD: Op = Op {
    def: OpDef {
        name: "StridedSliceGrad",
        signature: "(shape:Index, begin:Index, end:Index, strides:Index, dy:T) -> (output:T) ; T:type, \
                    Index:type{int32,int64}, begin_mask:int=0, end_mask:int=0, ellipsis_mask:int=0, \
                    new_axis_mask:int=0, shrink_axis_mask:int=0",
        shape: kolo_graph::shape_fns::from_shape_input,
        gradient: Gradient::Rule(|op, dy| {
            let spec = [1, 2, 3].map(|i| op.input(i));
            let builder = op.graph().op("StridedSlice").input(first(dy)?).inputs(spec);
            Ok(vec![None, None, None, None, Some(with_masks_of(op, builder)?.into())])
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["shape", "begin", "end", "strides"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(backward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, backward)]),
    cost: Cost::Elements,
};

fn with_masks_of<'g>(op: Operation<'g>, builder: kolo_graph::OpBuilder<'g>) -> Result<Output<'g>> {
    let masks = op.attrs(masks)?;
    Ok(MASKS.iter().zip(masks).fold(builder, |builder, (name, mask)| builder.attr(name, mask)).out())
}

fn masks(attrs: &Attrs) -> Result<[i64; 5]> {
    let mut masks = [0; 5];
    for (mask, name) in masks.iter_mut().zip(MASKS) {
        *mask = attrs.int(name)?;
    }
    Ok(masks)
}

/// What becomes of one dimension, in the order of the output.
enum Entry {
    /// Input dimension as it is.
    Whole(usize),
    /// A new dimension of size 1.
    New,
    /// Input dimension `dim`, as entry `i` of begin, end and strides says.
    Part { dim: usize, i: usize },
}

/// Sorts out ellipsis and new dimensions for an index of `n` entries over `rank` dimensions.
fn entries(n: usize, rank: usize, masks: &[i64; 5]) -> Result<Vec<Entry>> {
    if n > 32 {
        return Err(Error::invalid_argument(format!("a slice of {n} entries; at most 32 are possible")));
    }
    let bit = |mask: usize, i: usize| masks[mask] >> i & 1 != 0;
    let ellipses = (0..n).filter(|&i| bit(ELLIPSIS, i)).count();
    if ellipses > 1 {
        return Err(Error::invalid_argument("Multiple ellipses in slice spec not allowed"));
    }
    let taken = (0..n).filter(|&i| !bit(ELLIPSIS, i) && !bit(NEW_AXIS, i)).count();
    if taken > rank {
        return Err(Error::invalid_argument(format!(
            "Index out of range using input dim {rank}; input has only {rank} dims"
        )));
    }
    let mut list = Vec::with_capacity(n + rank);
    let mut dim = 0;
    for i in 0..n {
        if bit(ELLIPSIS, i) {
            list.extend((dim..dim + rank - taken).map(Entry::Whole));
            dim += rank - taken;
        } else if bit(NEW_AXIS, i) {
            list.push(Entry::New);
        } else {
            list.push(Entry::Part { dim, i });
            dim += 1;
        }
    }
    list.extend((dim..rank).map(Entry::Whole));
    Ok(list)
}

/// Begin, step and number of the elements that one entry takes from a dimension of `size`.
struct Taken {
    begin: usize,
    step: i64,
    n: usize,
    /// The dimension disappears.
    shrinks: bool,
}

fn take(size: usize, dim: usize, i: usize, begin: i64, end: i64, step: i64, masks: &[i64; 5]) -> Result<Taken> {
    let bit = |mask: usize| masks[mask] >> i & 1 != 0;
    let size = size as i64;
    if step == 0 {
        return Err(Error::invalid_argument(format!("strides[{i}] must be non-zero")));
    }
    let from_start = |at: i64| if at < 0 { at.saturating_add(size) } else { at };
    if bit(SHRINK) {
        if step < 0 {
            return Err(Error::invalid_argument("only stride 1 allowed on non-range indexing."));
        }
        let at = from_start(begin);
        if !(0..size).contains(&at) {
            return Err(Error::invalid_argument(format!("slice index {begin} of dimension {dim} out of bounds.")));
        }
        return Ok(Taken { begin: at as usize, step: 1, n: 1, shrinks: true });
    }
    // The ends of what may be visited: one before the first element, or one after the last.
    let (low, high) = if step > 0 { (0, size) } else { (-1, size - 1) };
    let begin = match bit(BEGIN) {
        true => {
            if step > 0 {
                low
            } else {
                high
            }
        }
        false => from_start(begin).clamp(low, high),
    };
    let end = match bit(END) {
        true => {
            if step > 0 {
                high
            } else {
                low
            }
        }
        false => from_start(end).clamp(low, high),
    };
    let length = if step > 0 { end - begin } else { begin - end };
    let n = if length <= 0 { 0 } else { (length as u64).div_ceil(step.unsigned_abs()) as usize };
    Ok(Taken { begin: if n == 0 { 0 } else { begin as usize }, step, n, shrinks: false })
}

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let masks = masks(ctx.attrs())?;
    let mut length = PartialShape::of_rank(1);
    for i in 1..4 {
        length = length.merge(ctx.input(i))?;
    }
    let (Some(n), Some(dims)) = (length.dim(0), ctx.input(0).dims()) else {
        return Ok(vec![PartialShape::unknown()]);
    };
    let constants = [1, 2, 3].map(|i| ctx.constant(i).and_then(|tensor| integers(tensor).ok()));
    let value = |input: usize, i: usize| constants[input].as_ref().and_then(|values| values.get(i).copied());
    let mut out: Vec<Dim> = Vec::new();
    for entry in entries(n, dims.len(), &masks)? {
        match entry {
            Entry::Whole(dim) => out.push(dims[dim]),
            Entry::New => out.push(Some(1)),
            Entry::Part { dim, i } => {
                let bit = |mask: usize| masks[mask] >> i & 1 != 0;
                // A masked end needs no value.
                let begin = if bit(BEGIN) && !bit(SHRINK) { Some(0) } else { value(0, i) };
                let end = if bit(END) || bit(SHRINK) { Some(0) } else { value(1, i) };
                match (dims[dim], begin, end, value(2, i)) {
                    (Some(size), Some(begin), Some(end), Some(step)) => {
                        let taken = take(size, dim, i, begin, end, step, &masks)?;
                        if !taken.shrinks {
                            out.push(Some(taken.n));
                        }
                    }
                    _ if bit(SHRINK) => {}
                    _ => out.push(None),
                }
            }
        }
    }
    Ok(vec![PartialShape::new(&out)])
}

/// The part of a tensor of `shape` that inputs `at..at + 3` show, as a view and as a shape.
pub(crate) fn resolve(ctx: &KernelCtx<'_>, shape: &Shape, at: usize) -> Result<(View, Shape)> {
    let masks = masks(ctx.attrs())?;
    let (begin, end, step) = (ctx.input(at)?, ctx.input(at + 1)?, ctx.input(at + 2)?);
    let n = begin.n_elements();
    if [begin, end, step].iter().any(|input| input.shape().rank() != 1 || input.n_elements() != n) {
        return Err(Error::invalid_argument(format!(
            "Expected begin, end, and strides to be 1D equal size tensors, but got shapes {}, {}, and {} instead.",
            begin.shape(),
            end.shape(),
            step.shape()
        )));
    }
    let (begin, end, step) = (integers(begin)?, integers(end)?, integers(step)?);
    let steps = strides(shape);
    let (mut start, mut walk, mut dims) = (0, Vec::new(), Vec::new());
    for entry in entries(n, shape.rank(), &masks)? {
        match entry {
            Entry::Whole(dim) => {
                walk.push((shape[dim], steps[dim]));
                dims.push(shape[dim]);
            }
            Entry::New => dims.push(1),
            Entry::Part { dim, i } => {
                let taken = take(shape[dim], dim, i, begin[i], end[i], step[i], &masks)?;
                start += taken.begin * steps[dim] as usize;
                if !taken.shrinks {
                    // A step beyond the dimension takes one element, and then how far it goes does not matter.
                    let by = if taken.n > 1 { taken.step as isize * steps[dim] } else { 0 };
                    walk.push((taken.n, by));
                    dims.push(taken.n);
                }
            }
        }
    }
    Ok((View::new(start, walk), Shape::new(&dims)?))
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let (view, shape) = resolve(ctx, input.shape(), 1)?;
    if shape.n_elements() == input.n_elements() && view.contiguous() == Some(0) {
        let out = ctx.take_input(0)?.reshaped(shape)?;
        ctx.set_output(0, out);
        return Ok(());
    }
    let out = read_view(ctx, input, &view, shape)?;
    ctx.set_output(0, out);
    Ok(())
}

/// What `view` shows of `input`, as a tensor of `shape`. Whole ranges share the input's buffer.
pub(crate) fn read_view(ctx: &KernelCtx<'_>, input: &Tensor, view: &View, shape: Shape) -> Result<Tensor> {
    let n = shape.n_elements();
    if let Some(start) = view.contiguous()
        && n > 0
        && is_in_buffer(input)
    {
        return input.clone().reshaped(Shape::new(&[input.n_elements()])?)?.rows(start, n)?.reshaped(shape);
    }
    if is_on_gpu(input) {
        return crate::cuda::view::read_view(ctx, input, view, shape);
    }
    if input.dtype().size() == Some(4)
        && let Ok(words) = bytemuck::try_cast_slice(input.host_bytes()?)
    {
        let mut out = ctx.allocate(input.dtype(), shape)?;
        view.read_words(ctx.pool(), bytemuck::cast_slice_mut(out.host_bytes_mut()?), words);
        return Ok(out);
    }
    build(ctx, input.dtype(), shape, &[input], ReadView { pool: ctx.pool(), view })
}

struct ReadView<'a> {
    pool: &'a IntraPool,
    view: &'a View,
}

impl Job for ReadView<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        self.view.read(self.pool, out, inputs[0]);
        Ok(())
    }
}

fn backward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = Shape::from_signed(&ctx.integers(0)?)?;
    let (view, sliced) = resolve(ctx, &shape, 1)?;
    let dy = ctx.input(4)?;
    if dy.shape() != &sliced {
        return Err(Error::invalid_argument(format!("shape of dy was {} instead of {sliced}", dy.shape())));
    }
    let out = write_view(ctx, dy, &view, shape)?;
    ctx.set_output(0, out);
    Ok(())
}

/// Zeros of `shape`, with `input` written where `view` says.
pub(crate) fn write_view(ctx: &KernelCtx<'_>, input: &Tensor, view: &View, shape: Shape) -> Result<Tensor> {
    if is_on_gpu(input) {
        return crate::cuda::view::write_view(ctx, shape, input, view);
    }
    build(ctx, input.dtype(), shape, &[input], WriteView(view))
}

/// Zeros, with the input written where a view says.
struct WriteView<'a>(&'a View);

impl Job for WriteView<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        out.fill(E::default());
        self.0.write(out, inputs[0]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, evaluate, tensor, wavy};

    /// 0, 1, 2, … in shape [2, 3, 4].
    fn counting() -> Tensor {
        tensor([2, 3, 4], (0..24).collect::<Vec<i32>>())
    }

    #[track_caller]
    fn check(input: Tensor, index: &[At], expected: Tensor) {
        let g = crate::graph();
        let shape: Vec<Dim> = input.shape().iter().map(|&dim| Some(dim)).collect();
        let x = g.placeholder_of("x", input.dtype(), &shape);
        let y = slice_at(x, index);
        g.check().unwrap();
        assert_eq!(y.shape().known().as_ref(), Some(expected.shape()), "inferred {}", y.shape());
        assert_eq!(evaluate(&g, &[y], &[(x, input)]).unwrap(), vec![expected]);
    }

    #[test]
    fn slices_follow_python() {
        use At::*;
        check(counting(), &[Index(1)], tensor([3, 4], (12..24).collect::<Vec<i32>>()));
        check(counting(), &[Index(-1), Index(-2), Index(3)], Tensor::from(19i32));
        check(counting(), &[All, Index(0), Range(Some(1), Some(3))], Tensor::from([[1i32, 2], [13, 14]]));
        check(counting(), &[Index(0), Step(None, None, -1), Index(0)], Tensor::from([8i32, 4, 0]));
        check(counting(), &[Index(0), Index(0), Step(Some(-1), Some(-5), -2)], Tensor::from([3i32, 1]));
        check(counting(), &[Index(0), Index(0), Step(Some(0), None, 3)], Tensor::from([0i32, 3]));
        check(counting(), &[Rest, Index(1)], Tensor::from([[1i32, 5, 9], [13, 17, 21]]));
        check(counting(), &[Index(0), Rest, NewAxis, Index(2)], tensor([3, 1], [2i32, 6, 10]));
        check(counting(), &[Index(1), Rest, Index(0), Range(Some(100), None)], tensor::<i32, 1>([0], []));
        check(counting(), &[NewAxis, Index(0), Index(0), NewAxis], tensor([1, 1, 4], [0i32, 1, 2, 3]));
        check(counting(), &[Range(Some(1), Some(0))], tensor::<i32, 3>([0, 3, 4], []));
        check(Tensor::from([1i64, 2, 3]), &[Step(None, None, i64::MIN)], Tensor::from([3i64]));
        check(Tensor::from([1i64, 2, 3]), &[Range(Some(i64::MIN), Some(i64::MAX))], Tensor::from([1i64, 2, 3]));
        check(Tensor::from([true, false, true]), &[Step(None, None, 2)], Tensor::from([true, true]));
        let words = |list: &[&'static str]| {
            Tensor::from_strings([list.len()], list.iter().map(|&word| word.into()).collect()).unwrap()
        };
        check(words(&["a", "b", "c"]), &[Range(Some(1), None)], words(&["b", "c"]));
        check(Tensor::from(5.0f32), &[NewAxis], Tensor::from([5.0f32]));
    }

    #[test]
    fn int16_indices_and_unknown_values_work() {
        check_op("StridedSlice")
            .input([1.0f32, 2.0, 3.0])
            .input([1i16])
            .input([3i16])
            .input([1i16])
            .gives([2.0f32, 3.0]);
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [4usize, 5]);
        let [begin, end] = ["b", "e"].map(|name| g.placeholder::<i32>(name, [2usize]));
        let y = g.op("StridedSlice").inputs([x, begin, end, g.constant([1i32, 1])]);
        assert_eq!(y.attr("shrink_axis_mask", 2i64).out().shape().to_string(), "[?]");
    }

    #[test]
    fn bad_slices_are_named() {
        let case = |begin: i32, end: i32, step: i32| {
            check_op("StridedSlice").input([1.0f32, 2.0]).input([begin]).input([end]).input([step])
        };
        case(0, 1, 0).fails("strides[0] must be non-zero");
        case(2, 3, 1).attr("shrink_axis_mask", 1i64).fails("slice index 2 of dimension 0 out of bounds.");
        case(-3, 3, 1).attr("shrink_axis_mask", 1i64).fails("slice index -3 of dimension 0 out of bounds.");
        case(0, 1, -1).attr("shrink_axis_mask", 1i64).fails("only stride 1 allowed on non-range indexing.");
        let two = || check_op("StridedSlice").input([1.0f32]).input([0i32, 0]).input([1i32, 1]).input([1i32, 1]);
        two().fails("Index out of range using input dim 1; input has only 1 dims");
        two().attr("ellipsis_mask", 3i64).fails("Multiple ellipses in slice spec not allowed");
        check_op("StridedSlice").input([1.0f32]).input([0i32]).input([1i32, 1]).input([1i32]).fails("[");
    }

    #[test]
    fn the_gradient_is_zero_outside_the_slice() {
        let spec = |op| check_op(op).attr("shrink_axis_mask", 1i64);
        spec("StridedSlice").input(wavy([3, 4], 0)).input([1i32, -1]).input([2i32, 0]).input([1i32, -2]).gradient();
        check_op("StridedSlice")
            .attr("begin_mask", 1i64)
            .attr("new_axis_mask", 2i64)
            .input(wavy([4], 0))
            .input([0i16, 0])
            .input([3i16, 0])
            .input([2i16, 1])
            .gradient();
        let grad = || check_op("StridedSliceGrad").input([2i32, 3]).input([0i32, 1]).input([2i32, 3]).input([1i32, 1]);
        grad().input([[1.0f32, 2.0], [3.0, 4.0]]).gives([[0.0f32, 1.0, 2.0], [0.0, 3.0, 4.0]]);
        grad().input(wavy([2, 2], 0)).gradient();
        grad().input([[1.0f32, 2.0]]).fails("shape of dy was [1,2] instead of [2,2]");
    }
}
