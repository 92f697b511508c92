//! `MatMul`: the product of two matrices, either of them transposed on the fly.

pub(crate) mod gpu;
pub(crate) mod narrow;

use half::{bf16, f16};
use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_device::cpu::IntraPool;
use kolo_device::cpu::gemm::{self, Gemm};
use kolo_device::cpu::{pool, vectorize};
use kolo_graph::{Grad, Gradient, HalfSafety, OpDef, Operation, Output, SplitRule};
use num_traits::{One, Zero};

use crate::cuda::FLOATS;
use crate::math::binary::first;
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The matrix product `a · b`.
#[track_caller]
pub fn matmul<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
    matmul_with(a, b, false, false)
}

/// The matrix product of `a` and `b`, each transposed first if so asked.
#[track_caller]
pub fn matmul_with<'g>(a: Output<'g>, b: Output<'g>, transpose_a: bool, transpose_b: bool) -> Output<'g> {
    let builder = a.graph().op("MatMul").input(a).input(b);
    builder.attr("transpose_a", transpose_a).attr("transpose_b", transpose_b).out()
}

pub(crate) static MATMUL: Op = Op {
    def: OpDef {
        name: "MatMul",
        signature: "(a:T, b:T) -> (product:T) ; transpose_a:bool=false, transpose_b:bool=false, \
                    T:type{bfloat16,half,float,double,int32,int64,uint8,uint16,uint32,uint64,complex64,complex128}",
        shape: |ctx| {
            let (a, b) = (ctx.input_of_rank(0, 2)?, ctx.input_of_rank(1, 2)?);
            let (m, left) = rows_and_columns(&a, ctx.attrs().bool("transpose_a")?);
            let (right, n) = rows_and_columns(&b, ctx.attrs().bool("transpose_b")?);
            match (left, right) {
                (Some(left), Some(right)) if left != right => Err(misfit(&a, &b, left, right)),
                _ => Ok(vec![PartialShape::new(&[m, n])]),
            }
        },
        gradient: Gradient::Rule(gradient),
        half: HalfSafety::Faster,
        split: SplitRule::Product,
        ..OpDef::BASE
    },
    kernels: KERNELS,
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, gpu::matmul)]),
    cost: Cost::Heavy,
};

/// The last two sizes of a shape, exchanged if it is used transposed.
pub(crate) fn rows_and_columns(shape: &PartialShape, transposed: bool) -> (Dim, Dim) {
    match transposed {
        false => (shape.dim(-2), shape.dim(-1)),
        true => (shape.dim(-1), shape.dim(-2)),
    }
}

pub(crate) fn misfit(a: &PartialShape, b: &PartialShape, left: usize, right: usize) -> Error {
    Error::invalid_argument(format!(
        "Matrix size-incompatible: In[0]: {a}, In[1]: {b}: inner sizes differ: {left} and {right}"
    ))
}

/// With `y = a · b`: `da = dy · bᵀ` and `db = aᵀ · dy`, and the same under transposition.
fn gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (a, b, dy) = (op.input(0), op.input(1), first(dy)?);
    let (ta, tb) = op.attrs(|attrs| Ok::<_, Error>((attrs.bool("transpose_a")?, attrs.bool("transpose_b")?)))?;
    let (da, db) = product_gradients(a, b, dy, ta, tb, matmul_with);
    Ok(vec![Some(da.into()), Some(db.into())])
}

/// The gradients of a product in terms of products, which `product` adds to the graph.
pub(crate) fn product_gradients<'g>(
    a: Output<'g>,
    b: Output<'g>,
    dy: Output<'g>,
    ta: bool,
    tb: bool,
    product: impl Fn(Output<'g>, Output<'g>, bool, bool) -> Output<'g>,
) -> (Output<'g>, Output<'g>) {
    let da = if ta { product(b, dy, tb, true) } else { product(dy, b, false, !tb) };
    let db = if tb { product(dy, a, true, ta) } else { product(a, dy, !ta, false) };
    (da, db)
}

/// The sizes of one product of dense matrices.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// Rows of the product.
    pub m: usize,
    /// Columns of the product.
    pub n: usize,
    /// The inner size.
    pub k: usize,
    /// The left matrix is stored transposed, k×m.
    pub transpose_a: bool,
    /// The right matrix is stored transposed, n×k.
    pub transpose_b: bool,
}

impl Sizes {
    /// The product, to be computed.
    pub(crate) fn call<'a, T: Zero + One>(self, a: &'a [T], b: &'a [T], c: &'a mut [T]) -> Gemm<'a, T> {
        let (op_a, op_b) = (stored(self.transpose_a), stored(self.transpose_b));
        Gemm::with_ops(self.m, self.n, self.k, (a, op_a), (b, op_b), c)
    }
}

/// Numbers that matrices are made of.
pub(crate) trait MatrixElement: Number {
    /// `c = a · b`. The slices have the lengths that the sizes say.
    fn multiply(pool: &IntraPool, sizes: Sizes, a: &[Self], b: &[Self], c: &mut [Self]) -> Result<()>;
}

macro_rules! gemm_elements {
    ($($ty:ty, $function:path;)*) => {
        $(impl MatrixElement for $ty {
            fn multiply(pool: &IntraPool, sizes: Sizes, a: &[$ty], b: &[$ty], c: &mut [$ty]) -> Result<()> {
                $function(pool, sizes.call(a, b, c)).map_err(Error::internal)
            }
        })*
    };
}

gemm_elements! {
    f32, gemm::gemm_f32;
    f64, gemm::gemm_f64;
}

fn stored(transposed: bool) -> gemm::Op {
    if transposed { gemm::Op::Transpose } else { gemm::Op::None }
}

macro_rules! integer_elements {
    ($($ty:ty),*) => {
        $(impl MatrixElement for $ty {
            fn multiply(pool: &IntraPool, sizes: Sizes, a: &[$ty], b: &[$ty], c: &mut [$ty]) -> Result<()> {
                multiply_integers(pool, sizes, a, b, c);
                Ok(())
            }
        })*
    };
}

integer_elements!(i32, i64, u64);

/// Row by row; integer matrices are rare and small.
fn multiply_integers<T: Number>(pool: &IntraPool, sizes: Sizes, a: &[T], b: &[T], c: &mut [T]) {
    let Sizes { m, n, k, transpose_a, transpose_b } = sizes;
    if n == 0 {
        return;
    }
    let rows_per_task = (pool::grain(0.5) / (n * k).max(1)).max(1);
    pool.for_each_chunk(c, rows_per_task * n, |task, rows| {
        for (i, row) in rows.chunks_mut(n).enumerate() {
            let i = task * rows_per_task + i;
            row.fill(T::ZERO);
            for p in 0..k {
                let x = if transpose_a { a[p * m + i] } else { a[i * k + p] };
                if transpose_b {
                    row.iter_mut().enumerate().for_each(|(j, y)| *y = y.add(x.mul(b[j * k + p])));
                } else {
                    let b = &b[p * n..(p + 1) * n];
                    vectorize(
                        #[inline(always)]
                        || row.iter_mut().zip(b).for_each(|(y, &b)| *y = y.add(x.mul(b))),
                    );
                }
            }
        }
    });
}

/// The sizes of the product of inputs `first` and the one after it.
pub(crate) fn sizes_of(ctx: &KernelCtx<'_>, first: usize) -> Result<Sizes> {
    let (a, b) = (ctx.input(first)?.shape(), ctx.input(first + 1)?.shape());
    for (i, shape) in [a, b].into_iter().enumerate() {
        if shape.rank() != 2 {
            return Err(Error::invalid_argument(format!("In[{i}] is not a matrix. Instead it has shape {shape}")));
        }
    }
    let transpose_a = ctx.attrs().bool("transpose_a")?;
    let transpose_b = ctx.attrs().bool("transpose_b")?;
    let (m, left) = if transpose_a { (a[1], a[0]) } else { (a[0], a[1]) };
    let (right, n) = if transpose_b { (b[1], b[0]) } else { (b[0], b[1]) };
    match left == right {
        true => Ok(Sizes { m, n, k: left, transpose_a, transpose_b }),
        false => Err(misfit(&a.into(), &b.into(), left, right)),
    }
}

fn forward<T: MatrixElement>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = sizes_of(ctx, 0)?;
    let mut out = ctx.allocate(T::DTYPE, Shape::new(&[sizes.m, sizes.n])?)?;
    T::multiply(ctx.pool(), sizes, ctx.data(0)?, ctx.data(1)?, out.data_mut()?)?;
    ctx.set_output(0, out);
    Ok(())
}

const KERNELS: &[KernelDef] = cpu_kernels!(forward: f32, f64, i32, i64, u64; f16, bf16, u8, u16, u32);

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn products() {
        let (a, b) = ([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]], [[7.0f32, 8.0], [9.0, 10.0], [11.0, 12.0]]);
        let expected = [[58.0f32, 64.0], [139.0, 154.0]];
        let (at, bt) = ([[1.0f32, 4.0], [2.0, 5.0], [3.0, 6.0]], [[7.0f32, 9.0, 11.0], [8.0, 10.0, 12.0]]);
        check_op("MatMul").input(a).input(b).gives(expected);
        check_op("MatMul").attr("transpose_a", true).input(at).input(b).gives(expected);
        check_op("MatMul").attr("transpose_b", true).input(a).input(bt).gives(expected);
        check_op("MatMul").attr("transpose_a", true).attr("transpose_b", true).input(at).input(bt).gives(expected);
        check_op("MatMul").input([[2.0f64]]).input([[3.0f64]]).gives([[6.0f64]]);
    }

    #[test]
    fn halves_and_integers() {
        for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
            let a: [[i32; 2]; 2] = if ta { [[1, 3], [2, 4]] } else { [[1, 2], [3, 4]] };
            let b: [[i32; 2]; 2] = if tb { [[5, 7], [6, 8]] } else { [[5, 6], [7, 8]] };
            let test = || check_op("MatMul").attr("transpose_a", ta).attr("transpose_b", tb);
            test().input(a).input(b).gives([[19i32, 22], [43, 50]]);
            let to_f16 = |rows: [[i32; 2]; 2]| rows.map(|row| row.map(|x| f16::from_f32(x as f32)));
            test().input(to_f16(a)).input(to_f16(b)).gives(to_f16([[19, 22], [43, 50]]));
            let to_bf16 = |rows: [[i32; 2]; 2]| rows.map(|row| row.map(|x| bf16::from_f32(x as f32)));
            test().input(to_bf16(a)).input(to_bf16(b)).gives(to_bf16([[19, 22], [43, 50]]));
        }
        check_op("MatMul").input([[200u8]]).input([[2u8]]).gives([[144u8]]);
    }

    #[test]
    fn sizes_of_zero() {
        let empty = |shape: [usize; 2]| tensor::<f32, 2>(shape, []);
        check_op("MatMul").input(empty([0, 3])).input(wavy([3, 2], 1)).gives(empty([0, 2]));
        check_op("MatMul").input(wavy([2, 3], 1)).input(empty([3, 0])).gives(empty([2, 0]));
        check_op("MatMul").input(empty([2, 0])).input(empty([0, 2])).gives([[0.0f32; 2]; 2]);
        check_op("MatMul").input(tensor::<i32, 2>([2, 0], [])).input(tensor::<i32, 2>([0, 1], [])).gives([[0i32]; 2]);
        check_op("MatMul").input(tensor::<i32, 2>([2, 1], [1, 2])).input(tensor::<i32, 2>([1, 0], [])).gives(tensor::<
            i32,
            2,
        >(
            [2, 0],
            [],
        ));
    }

    #[test]
    fn sizes_that_do_not_fit() {
        let test = |a: [usize; 2], b: [usize; 2]| check_op("MatMul").input(wavy(a, 1)).input(wavy(b, 2));
        test([2, 3], [4, 2]).fails("inner sizes differ: 3 and 4");
        test([2, 3], [3, 2]).attr("transpose_a", true).fails("inner sizes differ: 2 and 3");
        check_op("MatMul").input([1.0f32]).input([[1.0f32]]).fails("rank 2");
    }

    #[test]
    fn large_products_are_right_everywhere() {
        let (m, n, k) = (67, 129, 300);
        let (a, b) = (wavy([m, k], 1), wavy([k, n], 2));
        let (x, y) = (a.data::<f32>().unwrap(), b.data::<f32>().unwrap());
        let at = |i: usize, j: usize| (0..k).map(|p| f64::from(x[i * k + p]) * f64::from(y[p * n + j])).sum::<f64>();
        let expected: Vec<f32> = (0..m * n).map(|i| at(i / n, i % n) as f32).collect();
        check_op("MatMul")
            .tolerance(1e-4)
            .input(a.clone())
            .input(b.clone())
            .gives(Tensor::from_vec([m, n], expected).unwrap());
    }

    #[test]
    fn gradients() {
        for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
            let a = if ta { wavy([3, 2], 1) } else { wavy([2, 3], 1) };
            let b = if tb { wavy([4, 3], 2) } else { wavy([3, 4], 2) };
            check_op("MatMul").attr("transpose_a", ta).attr("transpose_b", tb).input(a).input(b).gradient();
        }
    }
}
