//! `SpaceToBatchND`: blocks of a grid spread over the batch, after padding. `BatchToSpaceND`: put back, then cropped.

use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_graph::{Gradient, HalfSafety, InferCtx, OpDef, Output};

use super::elements::{IntoInts, integers, product};
use super::pad::{constant, padded};
use super::strided_slice::read_view;
use super::view::{View, strides};
use crate::cuda::PLAIN;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// `x` as [batch, grid…, rest…] padded with zeros, then every block of the grid spread over the batch.
#[track_caller]
pub fn space_to_batch<'g>(x: Output<'g>, block: impl IntoInts<'g>, paddings: &[[usize; 2]]) -> Output<'g> {
    let graph = x.graph();
    graph.op("SpaceToBatchND").inputs([x, block.into_ints(graph), constant(x, paddings)]).out()
}

/// The inverse of [`space_to_batch`].
#[track_caller]
pub fn batch_to_space<'g>(x: Output<'g>, block: impl IntoInts<'g>, crops: &[[usize; 2]]) -> Output<'g> {
    let graph = x.graph();
    graph.op("BatchToSpaceND").inputs([x, block.into_ints(graph), constant(x, crops)]).out()
}

pub(crate) static SPACE_TO_BATCH_ND: Op = Op {
    def: OpDef {
        name: "SpaceToBatchND",
        signature: "(input:T, block_shape:Tblock_shape, paddings:Tpaddings) -> (output:T) ; T:type, \
                    Tblock_shape:type{int32,int64}=int32, Tpaddings:type{int32,int64}=int32",
        shape: |ctx| infer(ctx, |spec, shape| spec.spread(shape)),
        gradient: Gradient::Rule(|op, dy| {
            let inputs = [first(dy)?, op.input(1), op.input(2)];
            Ok(vec![Some(op.graph().op("BatchToSpaceND").inputs(inputs).out().into()), None, None])
        }),
        half: HalfSafety::Neutral,
        host_args: &["block_shape", "paddings"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_space_to_batch)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward_space_to_batch)]),
    cost: Cost::Elements,
};

pub(crate) static BATCH_TO_SPACE_ND: Op = Op {
    def: OpDef {
        name: "BatchToSpaceND",
        signature: "(input:T, block_shape:Tblock_shape, crops:Tcrops) -> (output:T) ; T:type, \
                    Tblock_shape:type{int32,int64}=int32, Tcrops:type{int32,int64}=int32",
        shape: |ctx| infer(ctx, |spec, shape| spec.gather(shape)),
        gradient: Gradient::Rule(|op, dy| {
            let inputs = [first(dy)?, op.input(1), op.input(2)];
            Ok(vec![Some(op.graph().op("SpaceToBatchND").inputs(inputs).out().into()), None, None])
        }),
        half: HalfSafety::Neutral,
        host_args: &["block_shape", "crops"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_batch_to_space)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward_batch_to_space)]),
    cost: Cost::Elements,
};

/// The size of a block along each dimension of the grid, and the margin around the grid.
struct Spec {
    block: Vec<usize>,
    around: Vec<(usize, usize)>,
}

impl Spec {
    fn new(block: &[i64], margins: &[i64]) -> Result<Spec> {
        let block = block.iter().map(|&n| match usize::try_from(n) {
            Ok(n) if n > 0 => Ok(n),
            _ => Err(Error::invalid_argument(format!("block_shape must be positive, found {n}"))),
        });
        let block = block.collect::<Result<Vec<_>>>()?;
        let around = margins.chunks_exact(2).map(|pair| match (usize::try_from(pair[0]), usize::try_from(pair[1])) {
            (Ok(before), Ok(after)) => Ok((before, after)),
            _ => Err(Error::invalid_argument(format!("margins must be non-negative: {} {}", pair[0], pair[1]))),
        });
        let around = around.collect::<Result<Vec<_>>>()?;
        if around.len() != block.len() {
            return Err(Error::invalid_argument(format!(
                "there are {} margins for a block_shape of {}",
                around.len(),
                block.len()
            )));
        }
        // The product is the factor of the batch; a shape that exists has no such factors.
        Shape::new(&block)?;
        Ok(Spec { block, around })
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        if rank > self.block.len() {
            return Ok(());
        }
        Err(Error::invalid_argument(format!("input rank should be > {}, found {rank}", self.block.len())))
    }

    /// The sizes that SpaceToBatchND gives.
    fn spread(&self, dims: &[Dim]) -> Result<Vec<Dim>> {
        self.check_rank(dims.len())?;
        let mut out = dims.to_vec();
        out[0] = dims[0].and_then(|batch| batch.checked_mul(product(&self.block)));
        for (i, (&block, &(before, after))) in self.block.iter().zip(&self.around).enumerate() {
            let Some(size) = dims[i + 1] else { continue };
            let whole = size.saturating_add(before).saturating_add(after);
            if !whole.is_multiple_of(block) {
                return Err(Error::invalid_argument(format!(
                    "padded_shape[{i}]={whole} is not divisible by block_shape[{i}]={block}"
                )));
            }
            out[i + 1] = Some(whole / block);
        }
        Ok(out)
    }

    /// The sizes that BatchToSpaceND gives.
    fn gather(&self, dims: &[Dim]) -> Result<Vec<Dim>> {
        self.check_rank(dims.len())?;
        let mut out = dims.to_vec();
        let factor = product(&self.block);
        if let Some(batch) = dims[0] {
            if !batch.is_multiple_of(factor) {
                return Err(Error::invalid_argument(format!(
                    "Input batch dimension ({batch}) is not divisible by product of block sizes ({factor})"
                )));
            }
            out[0] = Some(batch / factor);
        }
        for (i, (&block, &(before, after))) in self.block.iter().zip(&self.around).enumerate() {
            let Some(size) = dims[i + 1] else { continue };
            let whole = size.saturating_mul(block);
            out[i + 1] = Some(whole.checked_sub(before.saturating_add(after)).ok_or_else(|| {
                Error::invalid_argument(format!(
                    "cropped_shape[{i}] must be non-negative: {whole} less {before} and {after}"
                ))
            })?);
        }
        Ok(out)
    }
}

fn infer(ctx: &InferCtx<'_>, sizes: impl Fn(&Spec, &[Dim]) -> Result<Vec<Dim>>) -> Result<Vec<PartialShape>> {
    let block = ctx.input_of_rank(1, 1)?;
    ctx.input_of_rank(2, 2)?.merge(&PartialShape::new(&[block.dim(0), Some(2)]))?;
    let Some(dims) = ctx.input(0).dims() else { return Ok(vec![PartialShape::unknown()]) };
    let (Some(block), Some(margins)) = (ctx.constant_integers(1), ctx.constant_integers(2)) else {
        return Ok(vec![PartialShape::of_rank(dims.len())]);
    };
    Ok(vec![PartialShape::new(&sizes(&Spec::new(&block, &margins)?, dims)?)])
}

fn read_spec(ctx: &KernelCtx<'_>) -> Result<Spec> {
    let margins = ctx.input(2)?;
    if margins.shape().rank() != 2 || margins.shape()[1] != 2 {
        return Err(Error::invalid_argument(format!("margins must be a matrix with 2 columns: {}", margins.shape())));
    }
    Spec::new(&integers(ctx.input(1)?)?, &integers(margins)?)
}

/// Sizes that are all known.
fn full(dims: Vec<Dim>) -> Result<Shape> {
    PartialShape::new(&dims).known().ok_or_else(|| Error::invalid_argument(format!("{dims:?} has too many elements")))
}

fn known(shape: &Shape) -> Vec<Dim> {
    shape.iter().map(|&dim| Some(dim)).collect()
}

/// Nothing to move; and beside a size of 0 the others may be too large to multiply.
fn set_empty(ctx: &mut KernelCtx<'_>, shape: Shape) -> Result<()> {
    let out = ctx.allocate(ctx.input(0)?.dtype(), shape)?;
    ctx.set_output(0, out);
    Ok(())
}

fn forward_space_to_batch(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let spec = read_spec(ctx)?;
    let input = ctx.input(0)?;
    let out = full(spec.spread(&known(input.shape()))?)?;
    if out.n_elements() == 0 {
        return set_empty(ctx, out);
    }
    let rank = input.shape().rank();
    let mut around = vec![(0, 0); rank];
    around[1..=spec.block.len()].copy_from_slice(&spec.around);
    let whole = padded(ctx, input, &around, None)?;
    let (dims, steps) = (whole.shape().clone(), strides(whole.shape()));
    let m = spec.block.len();
    // The place within the block comes first, then batch, blocks and the rest.
    let within = (0..m).map(|i| (spec.block[i], steps[i + 1]));
    let blocks = (0..m).map(|i| (dims[i + 1] / spec.block[i], steps[i + 1] * spec.block[i] as isize));
    let rest = (m + 1..rank).map(|i| (dims[i], steps[i]));
    let view = View::new(0, within.chain([(dims[0], steps[0])]).chain(blocks).chain(rest));
    let out = read_view(ctx, &whole, &view, out)?;
    ctx.set_output(0, out);
    Ok(())
}

fn forward_batch_to_space(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let spec = read_spec(ctx)?;
    let input = ctx.input(0)?;
    let out = full(spec.gather(&known(input.shape()))?)?;
    if out.n_elements() == 0 {
        return set_empty(ctx, out);
    }
    let (dims, steps) = (input.shape(), strides(input.shape()));
    let (m, rank) = (spec.block.len(), dims.rank());
    let batch = out[0];
    // The batch holds the place within the block, outermost first, and then the batch itself.
    let mut within = vec![0isize; m];
    let mut step = batch as isize * steps[0];
    for i in (0..m).rev() {
        within[i] = step;
        step *= spec.block[i] as isize;
    }
    let grid = (0..m).flat_map(|i| [(dims[i + 1], steps[i + 1]), (spec.block[i], within[i])]);
    let rest = (m + 1..rank).map(|i| (dims[i], steps[i]));
    let view = View::new(0, [(batch, steps[0])].into_iter().chain(grid).chain(rest));
    let mut whole = out.to_vec();
    for i in 0..m {
        whole[i + 1] = dims[i + 1].saturating_mul(spec.block[i]);
    }
    let whole = read_view(ctx, input, &view, Shape::new(&whole)?)?;
    let steps = strides(whole.shape());
    let start: usize = (0..m).map(|i| spec.around[i].0 * steps[i + 1] as usize).sum();
    let crop = View::new(start, out.iter().copied().zip(steps.iter().copied()));
    let out = read_view(ctx, &whole, &crop, out)?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn space_to_batch() {
        let case = |n: usize, pads: Tensor| {
            let input = tensor([1, n, 4, 1], (0..4 * n as i64).collect::<Vec<_>>());
            check_op("SpaceToBatchND").input(input).input([2i32, 2]).input(pads)
        };
        case(2, Tensor::from([[0i32, 0], [0, 0]])).gives(tensor([4, 1, 2, 1], [0i64, 2, 1, 3, 4, 6, 5, 7]));
        case(3, Tensor::from([[1i32, 0], [0, 0]]))
            .gives(tensor([4, 2, 2, 1], [0i64, 0, 4, 6, 0, 0, 5, 7, 0, 2, 8, 10, 1, 3, 9, 11]));
        case(3, Tensor::from([[0i32, 0], [0, 0]])).fails("padded_shape[0]=3 is not divisible by block_shape[0]=2");
        case(2, Tensor::from([[-1i32, 0], [0, 0]])).fails("margins must be non-negative");
        case(2, Tensor::from([[1i32, 0]])).fails("[");
        check_op("SpaceToBatchND")
            .input(tensor::<f32, 3>([1, 0, 2], []))
            .input([1i64 << 60])
            .input([[0i32, 0]])
            .gives(tensor::<f32, 3>([1 << 60, 0, 2], []));
        check_op("SpaceToBatchND")
            .input([1.0f32])
            .input([0i32])
            .input([[0i32, 0]])
            .fails("block_shape must be positive");
        check_op("SpaceToBatchND").input([1.0f32]).input([1i32]).input([[0i32, 0]]).fails("input rank should be > 1");
    }

    #[test]
    fn batch_to_space() {
        let input = || tensor([4, 1, 2, 1], [0i64, 2, 1, 3, 4, 6, 5, 7]);
        let case = |crops: Tensor| check_op("BatchToSpaceND").input(input()).input([2i32, 2]).input(crops);
        case(Tensor::from([[0i32, 0], [0, 0]])).gives(tensor([1, 2, 4, 1], (0..8).collect::<Vec<i64>>()));
        case(Tensor::from([[1i32, 0], [0, 2]])).gives(tensor([1, 1, 2, 1], [4i64, 5]));
        case(Tensor::from([[1i32, 2], [0, 2]])).fails("cropped_shape[0] must be non-negative");
        check_op("BatchToSpaceND").input(wavy([3, 1], 0)).input([2i32]).input([[0i32, 0]]).fails("not divisible");
    }

    #[test]
    fn gradients() {
        check_op("SpaceToBatchND").input(wavy([1, 3, 2], 0)).input([2i32]).input([[1i32, 0]]).gradient();
        check_op("BatchToSpaceND").input(wavy([2, 2, 2], 0)).input([2i32]).input([[1i32, 0]]).gradient();
    }
}
