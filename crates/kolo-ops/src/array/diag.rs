//! `Diag` and `MatrixDiag`: values on a diagonal of zeros. `DiagPart` and `MatrixDiagPart`: a diagonal's values.
//! `MatrixBandPart`: zero but for a band around the diagonal.

use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_device::cpu::{IntraPool, pool};
use kolo_graph::shape_fns::same_as_input_0;
use kolo_graph::{Gradient, OpDef, Output};

use super::elements::{Item, Job, build, integer, product};
use super::fill::zeros_like;
use super::matrix_diag::matrix_set_diag;
use super::strided_slice::{read_view, write_view};
use super::view::View;
use crate::cuda::PLAIN;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// Zeros of twice the rank of `diagonal`, with it on the diagonal.
#[track_caller]
pub fn diag(diagonal: Output<'_>) -> Output<'_> {
    diagonal.graph().op("Diag").input(diagonal).out()
}

/// The diagonal of a tensor whose first half of dimensions equals the second.
#[track_caller]
pub fn diag_part(x: Output<'_>) -> Output<'_> {
    x.graph().op("DiagPart").input(x).out()
}

/// For every vector in the last dimension a square matrix with it on the diagonal.
#[track_caller]
pub fn matrix_diag(diagonal: Output<'_>) -> Output<'_> {
    diagonal.graph().op("MatrixDiag").input(diagonal).out()
}

/// The diagonal of every matrix in the last two dimensions.
#[track_caller]
pub fn matrix_diag_part(x: Output<'_>) -> Output<'_> {
    x.graph().op("MatrixDiagPart").input(x).out()
}

/// The matrices in the last two dimensions with all but `n_lower` diagonals below the main one and `n_upper` above it set
/// to zero; a negative number keeps all.
#[track_caller]
pub fn matrix_band_part(x: Output<'_>, n_lower: i64, n_upper: i64) -> Output<'_> {
    let graph = x.graph();
    graph.op("MatrixBandPart").inputs([x, graph.constant(n_lower), graph.constant(n_upper)]).out()
}

pub(crate) static DIAG: Op = Op {
    def: OpDef {
        name: "Diag",
        signature: "(diagonal:T) -> (output:T) ; T:type{bfloat16,half,float,double,int32,int64,complex64,complex128}",
        shape: |ctx| {
            let shape = ctx.input_of_rank_at_least(0, 1)?;
            Ok(vec![shape.concat(shape)])
        },
        gradient: Gradient::Rule(|_, dy| Ok(vec![Some(diag_part(first(dy)?).into())])),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let dims = ctx.input(0)?.shape().dims();
        if dims.is_empty() {
            return Err(Error::invalid_argument("Input must be at least rank 1, got 0"));
        }
        let n = product(dims);
        let shape = Shape::new(&[dims, dims].concat())?;
        set_diagonal(ctx, shape, 1, n)
    })],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, |ctx| {
        let dims = ctx.input(0)?.shape().dims();
        if dims.is_empty() {
            return Err(Error::invalid_argument("Input must be at least rank 1, got 0"));
        }
        let n = product(dims);
        let shape = Shape::new(&[dims, dims].concat())?;
        set_diagonal(ctx, shape, 1, n)
    })]),
    cost: Cost::Elements,
};

pub(crate) static DIAG_PART: Op = Op {
    def: OpDef {
        name: "DiagPart",
        signature: "(input:T) -> (diagonal:T) ; T:type{bfloat16,half,float,double,int32,int64,complex64,complex128}",
        shape: |ctx| {
            let Some(dims) = ctx.input(0).dims() else { return Ok(vec![PartialShape::unknown()]) };
            check_even(dims.len())?;
            let (a, b) = dims.split_at(dims.len() / 2);
            Ok(vec![PartialShape::new(a).merge(&PartialShape::new(b))?])
        },
        gradient: Gradient::Rule(|_, dy| Ok(vec![Some(diag(first(dy)?).into())])),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_diag_part)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward_diag_part)]),
    cost: Cost::Elements,
};

pub(crate) static MATRIX_DIAG: Op = Op {
    def: OpDef {
        name: "MatrixDiag",
        signature: "(diagonal:T) -> (output:T) ; T:type",
        shape: |ctx| {
            let shape = ctx.input_of_rank_at_least(0, 1)?;
            Ok(vec![shape.concat(&PartialShape::new(&[shape.dim(-1)]))])
        },
        gradient: Gradient::Rule(|_, dy| Ok(vec![Some(matrix_diag_part(first(dy)?).into())])),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let dims = ctx.input(0)?.shape().dims();
        let Some((&n, outer)) = dims.split_last() else {
            return Err(Error::invalid_argument("input must be at least 1-dim, received shape: []"));
        };
        let (shape, outer) = (Shape::new(&[dims, &[n]].concat())?, product(outer));
        set_diagonal(ctx, shape, outer, n)
    })],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, |ctx| {
        let dims = ctx.input(0)?.shape().dims();
        let Some((&n, outer)) = dims.split_last() else {
            return Err(Error::invalid_argument("input must be at least 1-dim, received shape: []"));
        };
        let (shape, outer) = (Shape::new(&[dims, &[n]].concat())?, product(outer));
        set_diagonal(ctx, shape, outer, n)
    })]),
    cost: Cost::Elements,
};

pub(crate) static MATRIX_DIAG_PART: Op = Op {
    def: OpDef {
        name: "MatrixDiagPart",
        signature: "(input:T) -> (diagonal:T) ; T:type",
        shape: |ctx| {
            let shape = ctx.input_of_rank_at_least(0, 2)?;
            let Some(dims) = shape.dims() else { return Ok(vec![PartialShape::unknown()]) };
            let mut out: Vec<Dim> = dims[..dims.len() - 2].to_vec();
            out.push(shape.dim(-1).zip(shape.dim(-2)).map(|(a, b)| a.min(b)));
            Ok(vec![PartialShape::new(&out)])
        },
        // What lies off the diagonal has no influence.
        gradient: Gradient::Rule(|op, dy| {
            let (shape, dy) = (op.input(0).shape(), first(dy)?);
            if shape.dim(-1).is_some() && shape.dim(-1) == shape.dim(-2) {
                return Ok(vec![Some(matrix_diag(dy).into())]);
            }
            Ok(vec![Some(matrix_set_diag(zeros_like(op.input(0)), dy).into())])
        }),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let input = ctx.input(0)?;
        let [outer @ .., rows, columns] = input.shape().dims() else {
            return Err(Error::invalid_argument(format!(
                "input must be at least 2-dim, received shape: {}",
                input.shape()
            )));
        };
        let n = *rows.min(columns);
        let view = View::new(0, [(product(outer), (rows * columns) as isize), (n, *columns as isize + 1)]);
        let out = read_view(ctx, input, &view, Shape::new(&[outer, &[n]].concat())?)?;
        ctx.set_output(0, out);
        Ok(())
    })],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, |ctx| {
        let input = ctx.input(0)?;
        let [outer @ .., rows, columns] = input.shape().dims() else {
            return Err(Error::invalid_argument(format!(
                "input must be at least 2-dim, received shape: {}",
                input.shape()
            )));
        };
        let n = *rows.min(columns);
        let view = View::new(0, [(product(outer), (rows * columns) as isize), (n, *columns as isize + 1)]);
        let out = read_view(ctx, input, &view, Shape::new(&[outer, &[n]].concat())?)?;
        ctx.set_output(0, out);
        Ok(())
    })]),
    cost: Cost::Elements,
};

pub(crate) static MATRIX_BAND_PART: Op = Op {
    def: OpDef {
        name: "MatrixBandPart",
        signature: "(input:T, num_lower:Tindex, num_upper:Tindex) -> (band:T) ; T:type, Tindex:type{int32,int64}=int64",
        shape: |ctx| {
            ctx.input_of_rank_at_least(0, 2)?;
            ctx.input_of_rank(1, 0)?;
            ctx.input_of_rank(2, 0)?;
            same_as_input_0(ctx)
        },
        gradient: Gradient::Rule(|op, dy| {
            let band = op.graph().op("MatrixBandPart").inputs([first(dy)?, op.input(1), op.input(2)]).out();
            Ok(vec![Some(band.into()), None, None])
        }),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_band)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

/// Output 0 is `n_outer` square matrices of zeros with input 0 on their diagonals.
fn set_diagonal(ctx: &mut KernelCtx<'_>, shape: Shape, n_outer: usize, n: usize) -> Result<()> {
    let input = ctx.input(0)?;
    // The shape exists, so n · n does not overflow.
    let view = View::new(0, [(n_outer, (n * n) as isize), (n, n as isize + 1)]);
    let out = write_view(ctx, input, &view, shape)?;
    ctx.set_output(0, out);
    Ok(())
}

fn check_even(rank: usize) -> Result<()> {
    if rank > 0 && rank.is_multiple_of(2) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("The rank of the tensor should be even and positive, got {rank}")))
}

fn forward_diag_part(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let shape = input.shape();
    check_even(shape.rank())?;
    let half = shape.rank() / 2;
    if let Some(i) = (0..half).find(|&i| shape[i] != shape[i + half]) {
        return Err(Error::invalid_argument(format!(
            "Invalid shape {shape}: dimensions {i} and {} do not match.",
            i + half
        )));
    }
    let n = product(&shape[..half]);
    let view = View::new(0, [(n, n as isize + 1)]);
    let out = read_view(ctx, input, &view, Shape::new(&shape[..half])?)?;
    ctx.set_output(0, out);
    Ok(())
}

fn forward_band(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let [.., rows, columns] = *input.shape().dims() else {
        return Err(Error::invalid_argument(format!(
            "input must be at least 2-dim, received shape: {}",
            input.shape()
        )));
    };
    let limit = |i: usize, name: &str, what: &str, most: usize| -> Result<usize> {
        let n = integer(ctx.input(i)?)?;
        if n > most as i64 {
            return Err(Error::invalid_argument(format!(
                "{name} must be negative or less or equal to number of {what} ({most}) got: {n}"
            )));
        }
        // Everything is within as many diagonals as there are rows or columns.
        Ok(usize::try_from(n).unwrap_or(most))
    };
    let lower = limit(1, "num_lower", "rows", rows)?;
    let upper = limit(2, "num_upper", "columns", columns)?;
    let job = Band { pool: ctx.pool(), rows, columns, lower, upper };
    let out = build(ctx, input.dtype(), input.shape().clone(), &[input], job)?;
    ctx.set_output(0, out);
    Ok(())
}

struct Band<'a> {
    pool: &'a IntraPool,
    rows: usize,
    columns: usize,
    lower: usize,
    upper: usize,
}

impl Job for Band<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let per_chunk = pool::grain(0.2).div_ceil(self.columns);
        self.pool.for_each_chunk(out, per_chunk * self.columns, |i, out| {
            for (k, out) in out.chunks_mut(self.columns).enumerate() {
                let at = (i * per_chunk + k) * self.columns;
                let row = (i * per_chunk + k) % self.rows;
                let begin = row.saturating_sub(self.lower).min(self.columns);
                let end = (row + self.upper + 1).min(self.columns);
                out[..begin].fill(E::default());
                out[begin..end].clone_from_slice(&inputs[0][at + begin..at + end]);
                out[end..].fill(E::default());
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn diagonals() {
        check_op("Diag").input([1i32, 2]).gives([[1i32, 0], [0, 2]]);
        check_op("DiagPart").input([[1i32, 5], [6, 2]]).gives([1i32, 2]);
        let four = tensor([2, 1, 2, 1], [1.0f32, 0.0, 0.0, 2.0]);
        check_op("Diag").input([[1.0f32], [2.0]]).gives(four.clone());
        check_op("DiagPart").input(four).gives([[1.0f32], [2.0]]);
        check_op("Diag").input(tensor::<f32, 1>([0], [])).gives(tensor::<f32, 2>([0, 0], []));
        check_op("Diag").input(1.0f32).fails("rank 1");
        check_op("DiagPart").input([1.0f32]).fails("The rank of the tensor should be even and positive");
        check_op("DiagPart").input(wavy([2, 3], 0)).fails("[");
        check_op("MatrixDiag").input([[1i8, 2], [3, 4]]).gives(tensor([2, 2, 2], [1i8, 0, 0, 2, 3, 0, 0, 4]));
        check_op("MatrixDiagPart").input([[1i8, 2, 3], [4, 5, 6]]).gives([1i8, 5]);
        check_op("MatrixDiagPart").input(tensor([2, 2, 1], [1i8, 2, 3, 4])).gives([[1i8], [3]]);
        check_op("MatrixDiagPart").input([1i8]).fails("at least");
    }

    #[test]
    fn bands() {
        let grid = || Tensor::from([[1i32, 2, 3], [4, 5, 6], [7, 8, 9]]);
        let case = |lower: i64, upper: i64| check_op("MatrixBandPart").input(grid()).input(lower).input(upper);
        case(1, 0).gives([[1i32, 0, 0], [4, 5, 0], [0, 8, 9]]);
        case(0, -1).gives([[1i32, 2, 3], [0, 5, 6], [0, 0, 9]]);
        case(-1, -1).gives(grid());
        case(0, 0).gives([[1i32, 0, 0], [0, 5, 0], [0, 0, 9]]);
        case(4, 0).fails("num_lower must be negative or less or equal to number of rows (3) got: 4");
        case(0, i64::MAX).fails("num_upper must be negative");
        // More rows than columns: the rows beyond the band are all zero.
        check_op("MatrixBandPart").input([[1.0f32], [2.0], [3.0]]).input(0i32).input(0i32).gives([
            [1.0f32],
            [0.0],
            [0.0],
        ]);
        check_op("MatrixBandPart")
            .input(tensor::<f32, 3>([0, 2, 2], []))
            .input(0i64)
            .input(0i64)
            .gives(tensor::<f32, 3>([0, 2, 2], []));
        check_op("MatrixBandPart").input([1.0f32]).input(0i64).input(0i64).fails("at least");
    }

    #[test]
    fn gradients() {
        check_op("Diag").input(wavy([3], 0)).gradient();
        check_op("DiagPart").input(wavy([3, 3], 0)).gradient();
        check_op("MatrixDiag").input(wavy([2, 2], 0)).gradient();
        check_op("MatrixDiagPart").input(wavy([2, 2, 2], 0)).gradient();
        check_op("MatrixDiagPart").input(wavy([2, 2, 3], 0)).gradient();
        check_op("MatrixBandPart").input(wavy([2, 3], 0)).input(1i64).input(0i64).gradient();
    }
}
