//! `BatchMatMul`, `BatchMatMulV2`: products of matrices that lie in the last two dimensions; the second one broadcasts
//! the dimensions before them.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_graph::{Grad, Gradient, HalfSafety, InferCtx, OpDef, Operation, Output, SplitRule};

use crate::cuda::FLOATS;
use crate::math::binary::first;
use crate::math::elementwise::{Walk, broadcast_shape};
use crate::math::matmul::{MatrixElement, Sizes, misfit, product_gradients, rows_and_columns};
use crate::op::{Gpu, KernelDef, Op, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// Products of the matrices in the last two dimensions of `x` and `y`, the others broadcast.
#[track_caller]
pub fn batch_matmul<'g>(x: Output<'g>, y: Output<'g>) -> Output<'g> {
    batch_matmul_with(x, y, false, false)
}

/// [`batch_matmul`], each side's matrices transposed first if so asked.
#[track_caller]
pub fn batch_matmul_with<'g>(x: Output<'g>, y: Output<'g>, adj_x: bool, adj_y: bool) -> Output<'g> {
    product_of("BatchMatMulV2", x, y, adj_x, adj_y)
}

#[track_caller]
fn product_of<'g>(op: &str, x: Output<'g>, y: Output<'g>, adj_x: bool, adj_y: bool) -> Output<'g> {
    x.graph().op(op).input(x).input(y).attr("adj_x", adj_x).attr("adj_y", adj_y).out()
}

pub(crate) static BATCH_MATMUL: Op = batched(
    "BatchMatMul",
    "(x:T, y:T) -> (output:T) ; T:type{bfloat16,half,float,double,int32,int64,complex64,complex128}, \
     adj_x:bool=false, adj_y:bool=false",
    cpu_kernels!(forward: f32, f64, i32, i64; f16, bf16),
)
.half(HalfSafety::Faster)
.split(SplitRule::BatchProduct)
.gpu(&[gpu_kernel("T", FLOATS, crate::math::matmul::gpu::same_batch_matmul)]);
pub(crate) static BATCH_MATMUL_V2: Op = batched(
    "BatchMatMulV2",
    "(x:T, y:T) -> (output:T) ; T:type{bfloat16,half,float,double,int16,int32,int64,uint8,uint16,uint32,uint64,\
     complex64,complex128}, adj_x:bool=false, adj_y:bool=false",
    cpu_kernels!(forward: f32, f64, i32, i64, u64; f16, bf16, i16, u8, u16, u32),
)
.half(HalfSafety::Faster)
.split(SplitRule::BatchProduct)
.gpu(&[gpu_kernel("T", FLOATS, crate::math::matmul::gpu::batch_matmul)]);

const fn batched(name: &'static str, signature: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef { name, signature, shape, gradient: Gradient::Rule(gradient), ..OpDef::BASE },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Heavy,
    }
}

/// Only the second version repeats matrices.
fn broadcasts(op: &str) -> bool {
    op != "BatchMatMul"
}

fn shape(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let (x, y) = (ctx.input_of_rank_at_least(0, 2)?, ctx.input_of_rank_at_least(1, 2)?);
    let (m, left) = rows_and_columns(x, ctx.attrs().bool("adj_x")?);
    let (right, n) = rows_and_columns(y, ctx.attrs().bool("adj_y")?);
    if let (Some(left), Some(right)) = (left, right)
        && left != right
    {
        return Err(misfit(x, y, left, right));
    }
    let batch = |shape: &PartialShape| match shape.dims() {
        Some(dims) => PartialShape::new(&dims[..dims.len() - 2]),
        None => PartialShape::unknown(),
    };
    let batch = match broadcasts(ctx.op()) {
        true => batch(x).broadcast(&batch(y))?,
        false => batch(x).merge(&batch(y))?,
    };
    Ok(vec![batch.concat(&PartialShape::new(&[m, n]))])
}

fn gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, x, y, dy) = (op.graph(), op.input(0), op.input(1), first(dy)?);
    let (adj_x, adj_y) = op.attrs(|attrs| Ok::<_, Error>((attrs.bool("adj_x")?, attrs.bool("adj_y")?)))?;
    let (dx, dy) = product_gradients(x, y, dy, adj_x, adj_y, |a, b, ta, tb| product_of(op.op(), a, b, ta, tb));
    let batch = |of: Output<'g>| {
        let shape = of.shape().known()?;
        Some(shape[..shape.rank().saturating_sub(2)].to_vec())
    };
    let same = batch(x).is_some_and(|dims| Some(dims) == batch(y));
    if same || !broadcasts(op.op()) {
        return Ok(vec![Some(dx.into()), Some(dy.into())]);
    }
    let shapes = [x, y].map(|input| graph.op("Shape").input(input).out());
    // All but the last two sizes.
    let batches = shapes.map(|shape| {
        let [zero, minus_two, one] = [0i32, -2, 1].map(|i| graph.constant([i]));
        graph.op("StridedSlice").inputs([shape, zero, minus_two, one]).attr("begin_mask", 1i64).out()
    });
    let axes = graph.op("BroadcastGradientArgs").inputs(batches).build();
    let sum = |grad: Output<'g>, i: usize| {
        let sum = graph.op("Sum").input(grad).input(axes.output(i)).out();
        graph.op("Reshape").input(sum).input(shapes[i]).out()
    };
    Ok(vec![Some(sum(dx, 0).into()), Some(sum(dy, 1).into())])
}

/// Products of fewer multiplications than this are worth a task only together with others.
const SMALL: usize = 1 << 20;

fn forward<T: MatrixElement>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (x, y) = (ctx.input(0)?.shape().clone(), ctx.input(1)?.shape().clone());
    let (Some((batch_x, [x0, x1])), Some((batch_y, [y0, y1]))) = (x.split_last_chunk(), y.split_last_chunk()) else {
        return Err(Error::invalid_argument(format!("In[0] and In[1] must have ndims >= 2, found {x} and {y}")));
    };
    let (transpose_a, transpose_b) = (ctx.attrs().bool("adj_x")?, ctx.attrs().bool("adj_y")?);
    let (m, left) = if transpose_a { (*x1, *x0) } else { (*x0, *x1) };
    let (right, n) = if transpose_b { (*y1, *y0) } else { (*y0, *y1) };
    if left != right {
        return Err(misfit(&(&x).into(), &(&y).into(), left, right));
    }
    let (batch_x, batch_y) = (Shape::new(batch_x)?, Shape::new(batch_y)?);
    if !broadcasts(ctx.node.op()) && batch_x != batch_y {
        return Err(Error::invalid_argument(format!("In[0] and In[1] must have the same batch sizes: {x} vs. {y}")));
    }
    let batch = broadcast_shape(&batch_x, &batch_y)?;
    let mut out = ctx.allocate(T::DTYPE, Shape::new(&[&batch[..], &[m, n]].concat())?)?;
    let mut sizes = Sizes { m, n, k: left, transpose_a, transpose_b };
    let (a, b) = (ctx.data::<T>(0)?, ctx.data::<T>(1)?);
    let (pool, c) = (ctx.pool(), out.data_mut::<T>()?);
    let (size_a, size_b, size_c) = (m * left, left * n, m * n);
    if size_c == 0 || batch.n_elements() == 0 {
        // There is nothing to compute.
    } else if batch_y.n_elements() == 1 && !transpose_a {
        // All rows of all left matrices meet the same right one: one tall product.
        sizes.m *= batch_x.n_elements();
        T::multiply(pool, sizes, a, b, c)?;
    } else {
        let walk = Walk::new(&batch, &batch_x, &batch_y);
        let operands = |i: usize| {
            let (at_a, at_b) = walk.offsets(i / walk.run);
            let within = |moves: bool| if moves { i % walk.run } else { 0 };
            let (at_a, at_b) = (at_a + within(walk.inner.0), at_b + within(walk.inner.1));
            (&a[at_a * size_a..(at_a + 1) * size_a], &b[at_b * size_b..(at_b + 1) * size_b])
        };
        let work = size_c.saturating_mul(left.max(1));
        if work >= SMALL {
            for (i, c) in c.chunks_exact_mut(size_c).enumerate() {
                let (a, b) = operands(i);
                T::multiply(pool, sizes, a, b, c)?;
            }
        } else {
            let per_task = (SMALL / 4 / work).max(1);
            let failed = parking_lot::Mutex::new(None);
            pool.for_each_chunk(c, per_task * size_c, |task, c| {
                for (i, c) in c.chunks_exact_mut(size_c).enumerate() {
                    let (a, b) = operands(task * per_task + i);
                    if let Err(error) = T::multiply(pool, sizes, a, b, c) {
                        *failed.lock() = Some(error);
                    }
                }
            });
            if let Some(error) = failed.into_inner() {
                return Err(error);
            }
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn products() {
        let x = tensor([2, 1, 2], [1.0f32, 2.0, 3.0, 4.0]);
        let y = tensor([2, 2, 1], [5.0f32, 6.0, 7.0, 8.0]);
        for op in ["BatchMatMul", "BatchMatMulV2"] {
            check_op(op).input(x.clone()).input(y.clone()).gives(tensor([2, 1, 1], [17.0f32, 53.0]));
            check_op(op).input([[1i32, 2]]).input([[3i32], [4]]).gives([[11i32]]);
        }
        // One right matrix for all left ones, and the other way around.
        let one = tensor([1, 2, 1], [10.0f32, 1.0]);
        check_op("BatchMatMulV2").input(x.clone()).input(one).gives(tensor([2, 1, 1], [12.0f32, 34.0]));
        check_op("BatchMatMulV2").input([[1.0f32, 2.0]]).input(y.clone()).gives(tensor([2, 1, 1], [17.0f32, 23.0]));
        check_op("BatchMatMul").input([[1.0f32, 2.0]]).input(y.clone()).fails("not compatible");
        check_op("BatchMatMulV2").input(x.clone()).input([[1.0f32]]).fails("inner sizes differ: 2 and 1");
        check_op("BatchMatMulV2").input([1.0f32]).input([[1.0f32]]).fails("at least rank 2");
        check_op("BatchMatMulV2")
            .input(tensor::<f32, 3>([0, 2, 3], []))
            .input(wavy([3, 4], 1))
            .gives(tensor::<f32, 3>([0, 2, 4], []));
        check_op("BatchMatMulV2")
            .input(tensor::<f32, 3>([2, 1, 0], []))
            .input(tensor::<f32, 3>([2, 0, 1], []))
            .gives(tensor([2, 1, 1], [0.0f32, 0.0]));
    }

    /// The product, one sum at a time.
    fn naive(
        x: &Tensor,
        y: &Tensor,
        (bx, by): ([usize; 2], [usize; 2]),
        [m, n, k]: [usize; 3],
        adj: [bool; 2],
    ) -> Tensor {
        let (a, b) = (x.data::<f32>().unwrap(), y.data::<f32>().unwrap());
        let batch = [bx[0].max(by[0]), bx[1].max(by[1])];
        let mut out = Vec::new();
        for i in 0..batch[0] * batch[1] {
            let (i0, i1) = (i / batch[1], i % batch[1]);
            let at = |of: [usize; 2]| (i0 % of[0]) * of[1] + i1 % of[1];
            let (a, b) = (&a[at(bx) * m * k..], &b[at(by) * k * n..]);
            for (row, column) in (0..m * n).map(|j| (j / n, j % n)) {
                let left = |p: usize| if adj[0] { a[p * m + row] } else { a[row * k + p] };
                let right = |p: usize| if adj[1] { b[column * k + p] } else { b[p * n + column] };
                out.push((0..k).map(|p| left(p) * right(p)).sum::<f32>());
            }
        }
        Tensor::from_vec([batch[0], batch[1], m, n], out).unwrap()
    }

    #[test]
    fn batches_broadcast_and_transpose() {
        let [m, n, k] = [3, 2, 5];
        for (bx, by) in [([2, 3], [2, 3]), ([2, 1], [1, 3]), ([1, 1], [2, 3]), ([2, 3], [1, 1]), ([2, 3], [2, 1])] {
            for adj in [[false, false], [true, false], [false, true], [true, true]] {
                let x = if adj[0] { wavy([bx[0], bx[1], k, m], 1) } else { wavy([bx[0], bx[1], m, k], 1) };
                let y = if adj[1] { wavy([by[0], by[1], n, k], 2) } else { wavy([by[0], by[1], k, n], 2) };
                let expected = naive(&x, &y, (bx, by), [m, n, k], adj);
                check_op("BatchMatMulV2").attr("adj_x", adj[0]).attr("adj_y", adj[1]).input(x).input(y).gives(expected);
            }
        }
    }

    #[test]
    fn large_matrices_are_multiplied_one_by_one() {
        let [m, n, k] = [130, 120, 110];
        let (x, y) = (wavy([1, 2, m, k], 1), wavy([1, 2, k, n], 2));
        let expected = naive(&x, &y, ([1, 2], [1, 2]), [m, n, k], [false, false]);
        check_op("BatchMatMulV2").tolerance(1e-4).input(x).input(y).gives(expected);
    }

    #[test]
    fn gradients() {
        for adj in [[false, false], [true, false], [false, true], [true, true]] {
            let x = if adj[0] { wavy([2, 3, 2], 1) } else { wavy([2, 2, 3], 1) };
            let y = |batch: usize| if adj[1] { wavy([batch, 2, 3], 2) } else { wavy([batch, 3, 2], 2) };
            let test = |op: &str| check_op(op).attr("adj_x", adj[0]).attr("adj_y", adj[1]).input(x.clone());
            test("BatchMatMul").input(y(2)).gradient();
            test("BatchMatMulV2").input(y(2)).gradient();
            test("BatchMatMulV2").input(y(1)).gradient();
        }
        check_op("BatchMatMulV2").input(wavy([2, 3], 1)).input(wavy([2, 1, 3, 2], 2)).gradient();
    }
}
