//! `OneHot`: numbers as vectors with one element set.

use kolo_core::{DType, Error, PartialShape, Result, Shape};
use kolo_device::cpu::IntraPool;
use kolo_device::cuda::{Args, Grid, ProgramKey};
use kolo_graph::shape_fns::resolve_axis;
use kolo_graph::{Gradient, IntoOutput, OpDef, Output};

use super::elements::{Item, Job, build, index_below, integer, integers, product};
use crate::cuda::view::bytes_type;
use crate::cuda::{PLAIN, c_type, gpu};
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// For each of `indices` a vector of `depth` elements, `on` at the index and `off` elsewhere. An index out of range gives
/// `off` throughout.
#[track_caller]
pub fn one_hot<'g>(indices: Output<'g>, depth: i32, on: Output<'g>, off: impl IntoOutput<'g>) -> Output<'g> {
    let graph = indices.graph();
    let off = off.into_output(graph, on.dtype());
    graph.op("OneHot").inputs([indices, graph.constant(depth), on, off]).out()
}

pub(crate) static ONE_HOT: Op = Op {
    def: OpDef {
        name: "OneHot",
        signature: "(indices:TI, depth:int32, on_value:T, off_value:T) -> (output:T) ; axis:int=-1, T:type, \
                    TI:type{uint8,int8,int32,int64}=int64",
        shape: |ctx| {
            (1..4).try_for_each(|i| ctx.input_of_rank(i, 0).map(drop))?;
            let Some(dims) = ctx.input(0).dims() else { return Ok(vec![PartialShape::unknown()]) };
            let depth = match ctx.constant_integers(1).as_deref() {
                Some([depth]) => Some(check_depth(*depth)?),
                _ => None,
            };
            let mut dims = dims.to_vec();
            dims.insert(place(ctx.attrs().int("axis")?, dims.len())?, depth);
            Ok(vec![PartialShape::new(&dims)])
        },
        gradient: Gradient::None("the result only changes in steps"),
        host_args: &["depth"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, on_gpu)]),
    cost: Cost::Elements,
};

fn check_depth(depth: i64) -> Result<usize> {
    usize::try_from(depth).map_err(|_| Error::invalid_argument(format!("depth must be non-negative, got: {depth}")))
}

/// Where the new dimension goes; −1 is last.
fn place(axis: i64, rank: usize) -> Result<usize> {
    resolve_axis(axis, rank + 1).map_err(|_| {
        Error::invalid_argument(format!("Expected axis to be -1 or between [0, {rank}).  But received: {axis}"))
    })
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, on, off) = (ctx.input(0)?, ctx.input(2)?, ctx.input(3)?);
    for (name, value) in [("on_value", on), ("off_value", off)] {
        if value.n_elements() != 1 {
            return Err(Error::invalid_argument(format!("{name} must be a scalar, but got: {}", value.shape())));
        }
    }
    let depth = check_depth(integer(ctx.input(1)?)?)?;
    let mut dims = indices.shape().to_vec();
    let axis = place(ctx.attrs().int("axis")?, dims.len())?;
    let inner = product(&dims[axis..]);
    dims.insert(axis, depth);
    let job = Mark { pool: ctx.pool(), indices: integers(indices)?, depth, inner };
    let out = build(ctx, on.dtype(), Shape::new(&dims)?, &[on, off], job)?;
    ctx.set_output(0, out);
    Ok(())
}

/// Marks the output, seen as [outer, depth, inner], where the indices, as [outer, inner], say.
struct Mark<'a> {
    pool: &'a IntraPool,
    indices: Vec<i64>,
    depth: usize,
    inner: usize,
}

impl Job for Mark<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        let [[on], [off]] = inputs else { return Err(Error::internal("OneHot takes two scalars")) };
        let (depth, inner) = (self.depth, self.inner);
        if out.is_empty() {
            return Ok(());
        }
        let blocks = E::fill_grain(out.len(), 0.2).div_ceil(depth * inner).max(1);
        E::fill_chunks(self.pool, out, blocks * depth * inner, &|task, out| {
            let blocks =
                out.chunks_exact_mut(depth * inner).zip(self.indices[task * blocks * inner..].chunks_exact(inner));
            for (block, indices) in blocks {
                block.fill(off.clone());
                for (i, &index) in indices.iter().enumerate() {
                    if let Some(index) = index_below(index, depth) {
                        block[index * inner + i] = on.clone();
                    }
                }
            }
        });
        Ok(())
    }
}

fn on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, on, off) = (ctx.input(0)?, ctx.input(2)?, ctx.input(3)?);
    for (name, value) in [("on_value", on), ("off_value", off)] {
        if value.n_elements() != 1 {
            return Err(Error::invalid_argument(format!("{name} must be a scalar, but got: {}", value.shape())));
        }
    }
    let depth = integer(ctx.input(1)?)?;
    let depth = usize::try_from(depth)
        .map_err(|_| Error::invalid_argument(format!("depth must be non-negative, got: {depth}")))?;
    let mut dims = indices.shape().to_vec();
    let axis = resolve_axis(ctx.attrs().int("axis")?, dims.len() + 1)?;
    let inner = product(&dims[axis..]);
    dims.insert(axis, depth);
    let (dtype, index, device) = (on.dtype(), indices.dtype(), gpu(ctx)?);
    let mut out = ctx.allocate(dtype, Shape::new(&dims)?)?;
    let n = out.n_elements();
    if n > 0 {
        let key = ProgramKey { family: "one_hot", op: "mark", dtypes: [Some(dtype), Some(index), None], variant: 0 };
        let kernel = device.function(&key, || source(dtype, index))?;
        let args = Args::new()
            .input(ctx.input(0)?)
            .input(ctx.input(2)?)
            .input(ctx.input(3)?)
            .output(&mut out)
            .size(n)
            .size(depth)
            .size(inner);
        device.launch(kernel, Grid::over(n), &args)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

fn source(dtype: DType, index: DType) -> String {
    format!(
        "typedef {} E;\ntypedef {} I;\n{}",
        bytes_type(dtype.size().unwrap_or(8)),
        c_type(index),
        include_str!("one_hot.cu")
    )
}

#[cfg(test)]
mod tests {
    use kolo_core::DType;
    use kolo_device::cuda::ProgramKey;

    use super::source;
    use crate::testing::{check_op, tensor};

    #[test]
    fn one_hot() {
        let case = |depth: i32| check_op("OneHot").input([0i64, 2, -1, 1]).input(depth).input(5.0f32).input(0.5f32);
        case(3).gives([[5.0f32, 0.5, 0.5], [0.5, 0.5, 5.0], [0.5, 0.5, 0.5], [0.5, 5.0, 0.5]]);
        case(1).gives([[5.0f32], [0.5], [0.5], [0.5]]);
        case(0).gives(tensor::<f32, 2>([4, 0], []));
        case(-1).fails("depth must be non-negative, got: -1");
        case(2).attr("axis", 0i64).gives([[5.0f32, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 5.0]]);
        case(2).attr("axis", 2i64).fails("Expected axis to be -1 or between");
        check_op("OneHot").input(1u8).input(2i32).input(true).input(false).gives([false, true]);
        check_op("OneHot")
            .input([[0i32, 1], [1, 5]])
            .input(2i32)
            .input(1i64)
            .input(0i64)
            .attr("axis", 1i64)
            .gives(tensor([2, 2, 2], [1i64, 0, 0, 1, 0, 0, 1, 0]));
        check_op("OneHot")
            .input(tensor::<i32, 1>([0], []))
            .input(2i32)
            .input(1i8)
            .input(0i8)
            .gives(tensor::<i8, 2>([0, 2], []));
        check_op("OneHot").input([0i32]).input(2i32).input([1i8]).input(0i8).fails("rank 0");
    }

    #[test]
    fn sources_compile() {
        let all = [DType::F32, DType::F64, DType::F16, DType::U8].map(|dtype| {
            let dtypes = [Some(dtype), Some(DType::I64), None];
            let key = ProgramKey { family: "one_hot", op: "mark", dtypes, variant: 0 };
            (key, source(dtype, DType::I64))
        });
        crate::cuda::tests::compiles(all);
    }
}
