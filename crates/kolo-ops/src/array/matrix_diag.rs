//! Bands of diagonals of matrices: `MatrixDiagV2` and `V3` make matrices of them, `MatrixDiagPartV2` and `V3` read them,
//! `MatrixSetDiag`, `V2` and `V3` replace them.
//!
//! Diagonal `d` holds the elements in column `row + d`. A band of diagonals `lower ..= upper` is packed as rows, the uppermost first;
//! shorter diagonals lie at the left or right end of their row, as `align` says of those above and below the main one.

use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_device::cpu::{IntraPool, pool};
use kolo_graph::shape_fns::same_as_input_0;
use kolo_graph::{Attrs, Grad, Gradient, GradientFn, InferCtx, OpDef, Operation, Output, ShapeFn};

use super::diag::matrix_diag_part;
use super::elements::{Item, Job, build, integer, integers};
use super::fill::zeros_like;
use crate::math::binary::first;
use crate::op::{Gpu, KernelDef, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The matrices in the last two dimensions of `x` with `diagonal` in place of their main diagonals.
#[track_caller]
pub fn matrix_set_diag<'g>(x: Output<'g>, diagonal: Output<'g>) -> Output<'g> {
    x.graph().op("MatrixSetDiag").inputs([x, diagonal]).out()
}

macro_rules! align {
    ($text:literal) => {
        concat!($text, ", align:string{\"LEFT_RIGHT\",\"RIGHT_LEFT\",\"LEFT_LEFT\",\"RIGHT_RIGHT\"}=\"RIGHT_LEFT\"")
    };
}

pub(crate) static MATRIX_DIAG_V2: Op = banded(
    "MatrixDiagV2",
    "(diagonal:T, k:int32, num_rows:int32, num_cols:int32, padding_value:T) -> (output:T) ; T:type",
    infer_diag,
    &[cpu_any(forward_diag)],
    |op, dy| diag_gradient(op, dy, "MatrixDiagPartV2"),
);
pub(crate) static MATRIX_DIAG_V3: Op = banded(
    "MatrixDiagV3",
    align!("(diagonal:T, k:int32, num_rows:int32, num_cols:int32, padding_value:T) -> (output:T) ; T:type"),
    infer_diag,
    &[cpu_any(forward_diag)],
    |op, dy| diag_gradient(op, dy, "MatrixDiagPartV3"),
);
pub(crate) static MATRIX_DIAG_PART_V2: Op = banded(
    "MatrixDiagPartV2",
    "(input:T, k:int32, padding_value:T) -> (diagonal:T) ; T:type",
    infer_part,
    &[cpu_any(forward_part)],
    |op, dy| part_gradient(op, dy, "MatrixSetDiagV2"),
);
pub(crate) static MATRIX_DIAG_PART_V3: Op = banded(
    "MatrixDiagPartV3",
    align!("(input:T, k:int32, padding_value:T) -> (diagonal:T) ; T:type"),
    infer_part,
    &[cpu_any(forward_part)],
    |op, dy| part_gradient(op, dy, "MatrixSetDiagV3"),
);
pub(crate) static MATRIX_SET_DIAG: Op = banded(
    "MatrixSetDiag",
    "(input:T, diagonal:T) -> (output:T) ; T:type",
    infer_set,
    &[cpu_any(forward_set)],
    |op, dy| {
        let (dy, zeros) = (first(dy)?, zeros_like(op.input(1)));
        Ok(vec![Some(matrix_set_diag(dy, zeros).into()), Some(matrix_diag_part(dy).into())])
    },
);
pub(crate) static MATRIX_SET_DIAG_V2: Op = banded(
    "MatrixSetDiagV2",
    "(input:T, diagonal:T, k:int32) -> (output:T) ; T:type",
    infer_set,
    &[cpu_any(forward_set)],
    |op, dy| set_gradient(op, dy, "MatrixDiagPartV2"),
);
pub(crate) static MATRIX_SET_DIAG_V3: Op = banded(
    "MatrixSetDiagV3",
    align!("(input:T, diagonal:T, k:int32) -> (output:T) ; T:type"),
    infer_set,
    &[cpu_any(forward_set)],
    |op, dy| set_gradient(op, dy, "MatrixDiagPartV3"),
);

const fn banded(
    name: &'static str,
    signature: &'static str,
    shape: ShapeFn,
    kernels: &'static [KernelDef],
    gradient: GradientFn,
) -> Op {
    Op {
        def: OpDef { name, signature, shape, gradient: Gradient::Rule(gradient), ..OpDef::BASE },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

/// An op of the same version, with the `align` of this one if it has one.
fn like<'g>(op: Operation<'g>, name: &str, inputs: &[Output<'g>]) -> Output<'g> {
    let builder = op.graph().op(name).inputs(inputs.iter().copied());
    match op.attrs(|attrs| attrs.str("align").map(str::to_owned)) {
        Ok(align) => builder.attr("align", &align[..]).out(),
        Err(_) => builder.out(),
    }
}

/// 0 in the type of `x`: the padding of what is read.
fn zero(x: Output<'_>) -> Output<'_> {
    kolo_graph::IntoOutput::into_output(0.0f32, x.graph(), x.dtype())
}

fn diag_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>], part: &str) -> Result<Vec<Option<Grad<'g>>>> {
    let dy = first(dy)?;
    Ok(vec![Some(like(op, part, &[dy, op.input(1), zero(dy)]).into()), None, None, None, None])
}

fn part_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>], set: &str) -> Result<Vec<Option<Grad<'g>>>> {
    Ok(vec![Some(like(op, set, &[zeros_like(op.input(0)), first(dy)?, op.input(1)]).into()), None, None])
}

fn set_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>], part: &str) -> Result<Vec<Option<Grad<'g>>>> {
    let dy = first(dy)?;
    let kept = like(op, op.op(), &[dy, zeros_like(op.input(1)), op.input(2)]);
    Ok(vec![Some(kept.into()), Some(like(op, part, &[dy, op.input(2), zero(dy)]).into()), None])
}

/// The diagonals `lower ..= upper`.
#[derive(Clone, Copy)]
struct Diagonals {
    lower: i64,
    upper: i64,
}

impl Diagonals {
    const MAIN: Diagonals = Diagonals { lower: 0, upper: 0 };

    fn new(k: &[i64]) -> Result<Diagonals> {
        let (lower, upper) = match *k {
            [only] => (only, only),
            [lower, upper] => (lower, upper),
            _ => {
                return Err(Error::invalid_argument(format!(
                    "diag_index must have only one or two elements, received {} elements.",
                    k.len()
                )));
            }
        };
        if lower > upper {
            return Err(Error::invalid_argument(format!(
                "lower_diag_index must not be larger than upper_diag_index: {lower} > {upper}"
            )));
        }
        Ok(Diagonals { lower, upper })
    }

    /// How many there are.
    fn n(self) -> usize {
        usize::try_from(self.upper - self.lower).map_or(1, |n| n + 1)
    }

    fn check(self, rows: usize, columns: usize) -> Result<()> {
        for (name, d) in [("lower_diag_index", self.lower), ("upper_diag_index", self.upper)] {
            if d != 0 && (d <= -(rows as i64) || d >= columns as i64) {
                return Err(Error::invalid_argument(format!(
                    "{name} is out of bound: {d}. It must be between {} and {columns}",
                    -(rows as i64)
                )));
            }
        }
        Ok(())
    }

    /// The length of the longest.
    fn longest(self, rows: usize, columns: usize) -> usize {
        let (below, above) = ((-self.upper).max(0) as usize, self.lower.max(0) as usize);
        rows.saturating_sub(below).min(columns.saturating_sub(above))
    }

    /// The sizes of diagonals of so many rows and columns, when they are packed.
    fn packed(self, longest: Dim) -> Vec<Dim> {
        match self.n() {
            1 => vec![longest],
            n => vec![Some(n), longest],
        }
    }
}

/// Where the elements of a band lie among the packed ones.
struct Packing {
    diagonals: Diagonals,
    rows: usize,
    columns: usize,
    longest: usize,
    /// Diagonals above, and below, the main one begin at the left end of their row.
    left_above: bool,
    left_below: bool,
}

impl Packing {
    fn new(attrs: &Attrs, diagonals: Diagonals, rows: usize, columns: usize) -> Result<Packing> {
        let (left_above, left_below) = match attrs.str("align") {
            Ok("RIGHT_LEFT") => (false, true),
            Ok("LEFT_RIGHT") => (true, false),
            Ok("RIGHT_RIGHT") => (false, false),
            // Versions without the attribute pack to the left.
            Ok(_) | Err(_) => (true, true),
        };
        let longest = diagonals.longest(rows, columns);
        Ok(Packing { diagonals, rows, columns, longest, left_above, left_below })
    }

    /// How many elements all diagonals of a matrix take.
    fn len(&self) -> usize {
        self.diagonals.n() * self.longest
    }

    /// Where diagonal `d` begins in its row, and how long it is.
    fn span(&self, d: i64) -> (usize, usize) {
        let one = Diagonals { lower: d, upper: d };
        let len = one.longest(self.rows, self.columns);
        let left = (d >= 0 && self.left_above) || (d <= 0 && self.left_below);
        (if left { 0 } else { self.longest - len }, len)
    }

    /// The place of an element of the matrix, if it is in the band.
    fn place(&self, row: usize, column: usize) -> Option<usize> {
        let d = column as i64 - row as i64;
        if d < self.diagonals.lower || d > self.diagonals.upper {
            return None;
        }
        let line = (self.diagonals.upper - d) as usize;
        Some(line * self.longest + self.span(d).0 + row.min(column))
    }
}

fn constant_diagonals(ctx: &InferCtx<'_>, i: usize) -> Result<Option<Diagonals>> {
    if i >= ctx.n_inputs() {
        return Ok(Some(Diagonals::MAIN));
    }
    if ctx.input(i).rank().is_some_and(|rank| rank > 1) {
        return Err(Error::invalid_argument(format!(
            "diag_index must be a scalar or vector, received shape: {}",
            ctx.input(i)
        )));
    }
    ctx.constant_integers(i).map(|k| Diagonals::new(&k)).transpose()
}

fn read_diagonals(ctx: &KernelCtx<'_>, i: usize) -> Result<Diagonals> {
    if i >= ctx.n_inputs() {
        return Ok(Diagonals::MAIN);
    }
    let k = ctx.input(i)?;
    if k.shape().rank() > 1 {
        return Err(Error::invalid_argument(format!(
            "diag_index must be a scalar or vector, received shape: {}",
            k.shape()
        )));
    }
    Diagonals::new(&integers(k)?)
}

fn infer_part(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let diagonals = constant_diagonals(ctx, 1)?;
    let input = ctx.input_of_rank_at_least(0, 2)?;
    let (Some(diagonals), Some([outer @ .., rows, columns])) = (diagonals, input.dims()) else {
        return Ok(vec![PartialShape::unknown()]);
    };
    let longest = rows.zip(*columns).map(|(rows, columns)| {
        diagonals.check(rows, columns)?;
        Ok::<_, Error>(diagonals.longest(rows, columns))
    });
    let packed = diagonals.packed(longest.transpose()?);
    Ok(vec![PartialShape::new(&[outer, &packed].concat())])
}

fn infer_set(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let diagonals = constant_diagonals(ctx, 2)?;
    let input = ctx.input_of_rank_at_least(0, 2)?;
    ctx.input_of_rank_at_least(1, 1)?;
    if let (Some(diagonals), Some([outer @ .., rows, columns])) = (diagonals, input.dims()) {
        let longest = rows.zip(*columns).map(|(rows, columns)| {
            diagonals.check(rows, columns)?;
            Ok::<_, Error>(diagonals.longest(rows, columns))
        });
        ctx.input(1).merge(&PartialShape::new(&[outer, &diagonals.packed(longest.transpose()?)].concat()))?;
    }
    same_as_input_0(ctx)
}

fn infer_diag(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let diagonal = ctx.input_of_rank_at_least(0, 1)?;
    let (Some(diagonals), Some(dims)) = (constant_diagonals(ctx, 1)?, diagonal.dims()) else {
        return Ok(vec![PartialShape::unknown()]);
    };
    let n = diagonals.packed(None).len();
    if dims.len() < n {
        return Err(Error::invalid_argument("diagonal must be at least 2-dim for a band of several diagonals"));
    }
    let outer = &dims[..dims.len() - n];
    let sizes = match (ctx.constant_integers(2).as_deref(), ctx.constant_integers(3).as_deref(), dims.last()) {
        (Some(&[rows]), Some(&[columns]), Some(&Some(longest))) => {
            let (rows, columns) = matrix_sizes(diagonals, longest, rows, columns)?;
            [Some(rows), Some(columns)]
        }
        _ => [None, None],
    };
    Ok(vec![PartialShape::new(&[outer, &sizes].concat())])
}

/// The sizes of a matrix with such diagonals; −1 stands for the smallest that will do.
fn matrix_sizes(diagonals: Diagonals, longest: usize, rows: i64, columns: i64) -> Result<(usize, usize)> {
    let least_rows = longest as i64 - diagonals.upper.min(0);
    let least_columns = longest as i64 + diagonals.lower.max(0);
    if rows != -1 && rows < least_rows {
        return Err(Error::invalid_argument(format!("The number of rows is too small: {rows}, at least {least_rows}")));
    }
    if columns != -1 && columns < least_columns {
        return Err(Error::invalid_argument(format!(
            "The number of columns is too small: {columns}, at least {least_columns}"
        )));
    }
    let (rows, columns) = match (rows, columns) {
        (-1, -1) => (least_rows.max(least_columns), least_rows.max(least_columns)),
        (-1, columns) => (least_rows, columns),
        (rows, -1) => (rows, least_columns),
        given => given,
    };
    if rows != least_rows && columns != least_columns {
        return Err(Error::invalid_argument(
            "The number of rows or columns is not consistent with the specified d_lower, d_upper, and diagonal.",
        ));
    }
    Ok((rows as usize, columns as usize))
}

fn matrix_dims(shape: &Shape) -> Result<(&[usize], usize, usize)> {
    match shape.dims() {
        [outer @ .., rows, columns] => Ok((outer, *rows, *columns)),
        _ => Err(Error::invalid_argument(format!("input must be at least 2-dim, received shape: {shape}"))),
    }
}

fn packed_shape(outer: &[usize], packing: &Packing) -> Result<Shape> {
    let packed: Vec<usize> = packing.diagonals.packed(Some(packing.longest)).into_iter().flatten().collect();
    Shape::new(&[outer, &packed].concat())
}

fn forward_part(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (input, padding) = (ctx.input(0)?, ctx.input(2)?);
    let diagonals = read_diagonals(ctx, 1)?;
    let (outer, rows, columns) = matrix_dims(input.shape())?;
    diagonals.check(rows, columns)?;
    if padding.n_elements() != 1 {
        return Err(Error::invalid_argument(format!("padding_value must be a scalar, got {}", padding.shape())));
    }
    let packing = Packing::new(ctx.attrs(), diagonals, rows, columns)?;
    let shape = packed_shape(outer, &packing)?;
    let out = build(ctx, input.dtype(), shape, &[input, padding], Part { pool: ctx.pool(), packing })?;
    ctx.set_output(0, out);
    Ok(())
}

struct Part<'a> {
    pool: &'a IntraPool,
    packing: Packing,
}

impl Job for Part<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        let Packing { diagonals, rows, columns, longest, .. } = self.packing;
        let n = self.packing.len();
        if out.is_empty() {
            return Ok(());
        }
        let per_task = pool::grain(1.0).div_ceil(n);
        self.pool.for_each_chunk(out, per_task * n, |task, out| {
            for (i, out) in out.chunks_mut(n).enumerate() {
                let matrix = &inputs[0][(task * per_task + i) * rows * columns..][..rows * columns];
                for (out, d) in out.chunks_mut(longest).zip((diagonals.lower..=diagonals.upper).rev()) {
                    let (begin, len) = self.packing.span(d);
                    out[..begin].fill(inputs[1][0].clone());
                    out[begin + len..].fill(inputs[1][0].clone());
                    let from = (-d).max(0) as usize * columns + d.max(0) as usize;
                    for (j, out) in out[begin..begin + len].iter_mut().enumerate() {
                        *out = matrix[from + j * (columns + 1)].clone();
                    }
                }
            }
        });
        Ok(())
    }
}

fn forward_set(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (input, diagonal) = (ctx.input(0)?, ctx.input(1)?);
    let diagonals = read_diagonals(ctx, 2)?;
    let (outer, rows, columns) = matrix_dims(input.shape())?;
    diagonals.check(rows, columns)?;
    let packing = Packing::new(ctx.attrs(), diagonals, rows, columns)?;
    let expected = packed_shape(outer, &packing)?;
    if *diagonal.shape() != expected {
        return Err(Error::invalid_argument(format!(
            "The diagonals of an input of shape {} must have shape {expected}, but received diagonal shape: {}",
            input.shape(),
            diagonal.shape()
        )));
    }
    let job = Matrices { pool: ctx.pool(), packing, keeps: true };
    let out = build(ctx, input.dtype(), input.shape().clone(), &[input, diagonal], job)?;
    ctx.set_output(0, out);
    Ok(())
}

fn forward_diag(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (diagonal, padding) = (ctx.input(0)?, ctx.input(4)?);
    let diagonals = read_diagonals(ctx, 1)?;
    let dims = diagonal.shape().dims();
    let (outer, longest) = match (diagonals.n(), dims) {
        (1, [outer @ .., longest]) => (outer, *longest),
        (n, [outer @ .., lines, longest]) if n > 1 => {
            if *lines != n {
                return Err(Error::invalid_argument(format!(
                    "The number of diagonals provided in the input ({lines}) does not match the lower_diag_index and \
                     upper_diag_index range ({n})."
                )));
            }
            (outer, *longest)
        }
        _ => {
            return Err(Error::invalid_argument(format!(
                "diagonal must be at least 1-dim, and 2-dim for several diagonals, received shape: {}",
                diagonal.shape()
            )));
        }
    };
    let (rows, columns) = matrix_sizes(diagonals, longest, integer(ctx.input(2)?)?, integer(ctx.input(3)?)?)?;
    if padding.n_elements() != 1 {
        return Err(Error::invalid_argument(format!("padding_value must be a scalar, got {}", padding.shape())));
    }
    let packing = Packing { longest, ..Packing::new(ctx.attrs(), diagonals, rows, columns)? };
    let shape = Shape::new(&[outer, &[rows, columns]].concat())?;
    let job = Matrices { pool: ctx.pool(), packing, keeps: false };
    let out = build(ctx, diagonal.dtype(), shape, &[padding, diagonal], job)?;
    ctx.set_output(0, out);
    Ok(())
}

/// Matrices with diagonals from input 1; their other elements are those of input 0, or its only one.
struct Matrices<'a> {
    pool: &'a IntraPool,
    packing: Packing,
    keeps: bool,
}

impl Job for Matrices<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        let Packing { rows, columns, .. } = self.packing;
        if out.is_empty() {
            return Ok(());
        }
        let per_task = pool::grain(1.0).div_ceil(columns);
        self.pool.for_each_chunk(out, per_task * columns, |task, out| {
            for (i, out) in out.chunks_mut(columns).enumerate() {
                let line = task * per_task + i;
                let (matrix, row) = (line / rows, line % rows);
                if self.keeps {
                    out.clone_from_slice(&inputs[0][line * columns..][..columns]);
                } else {
                    out.fill(inputs[0][0].clone());
                }
                let packed = &inputs[1][matrix * self.packing.len()..];
                // The columns of this row that are within the band.
                let begin = (row as i64).saturating_add(self.packing.diagonals.lower).max(0) as usize;
                let end = (row as i64).saturating_add(self.packing.diagonals.upper).saturating_add(1).max(0) as usize;
                for (column, out) in out.iter_mut().enumerate().take(end).skip(begin) {
                    if let Some(at) = self.packing.place(row, column) {
                        *out = packed[at].clone();
                    }
                }
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    fn grid() -> Tensor {
        Tensor::from([[1i32, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6]])
    }

    #[test]
    fn bands_are_read() {
        // TensorFlow's examples.
        let part = |k: Tensor| check_op("MatrixDiagPartV3").input(grid()).input(k).input(0i32);
        part(Tensor::scalar(0i32)).gives([1i32, 6, 7]);
        part(Tensor::scalar(1i32)).gives([2i32, 7, 6]);
        part(Tensor::from([-1i32, 2])).gives([[0i32, 3, 8], [2, 7, 6], [1, 6, 7], [5, 8, 0]]);
        part(Tensor::from([-1i32, 2])).attr("align", "LEFT_RIGHT").gives([
            [3i32, 8, 0],
            [2, 7, 6],
            [1, 6, 7],
            [0, 5, 8],
        ]);
        part(Tensor::from([1i32, 3])).gives([[0i32, 0, 4], [0, 3, 8], [2, 7, 6]]);
        check_op("MatrixDiagPartV2").input(grid()).input([1i32, 3]).input(9i32).gives([
            [4i32, 9, 9],
            [3, 8, 9],
            [2, 7, 6],
        ]);
        part(Tensor::scalar(4i32)).fails("lower_diag_index is out of bound: 4");
        part(Tensor::from([1i32, 0])).fails("must not be larger");
        part(Tensor::from([1i32, 1, 1])).fails("only one or two elements");
    }

    #[test]
    fn bands_become_matrices() {
        let diag = |diagonal: Tensor, k: Tensor, rows: i32, columns: i32| {
            check_op("MatrixDiagV3").input(diagonal).input(k).input(rows).input(columns).input(7i32)
        };
        diag(Tensor::from([1i32, 2]), Tensor::scalar(1i32), -1, -1).gives([[7i32, 1, 7], [7, 7, 2], [7, 7, 7]]);
        diag(Tensor::from([1i32, 2]), Tensor::scalar(-1i32), 3, -1).gives([[7i32, 7], [1, 7], [7, 2]]);
        diag(Tensor::from([[0i32, 8, 9], [1, 2, 3], [4, 5, 0]]), Tensor::from([-1i32, 1]), -1, -1).gives([
            [1i32, 8, 7],
            [4, 2, 9],
            [7, 5, 3],
        ]);
        diag(Tensor::from([[8i32, 9], [1, 2]]), Tensor::from([-1i32, 1]), -1, -1).fails("does not match");
        diag(Tensor::from([1i32, 2]), Tensor::scalar(0i32), 1, -1).fails("The number of rows is too small");
        diag(Tensor::from([1i32, 2]), Tensor::scalar(0i32), 4, 5).fails("not consistent");
    }

    #[test]
    fn bands_are_replaced() {
        check_op("MatrixSetDiag").input([[7i32, 7, 7], [7, 7, 7]]).input([1i32, 2]).gives([[1i32, 7, 7], [7, 2, 7]]);
        check_op("MatrixSetDiag").input([[7i32, 7, 7], [7, 7, 7]]).input([1i32]).fails("");
        check_op("MatrixSetDiagV3")
            .input(tensor([1, 3, 3], [7i32; 9]))
            .input(tensor([1, 2, 3], [0i32, 8, 9, 1, 2, 3]))
            .input([0i32, 1])
            .gives(tensor([1, 3, 3], [1i32, 8, 7, 7, 2, 9, 7, 7, 3]));
        check_op("MatrixSetDiagV2")
            .input(tensor::<f32, 2>([0, 3], []))
            .input(tensor::<f32, 1>([0], []))
            .input(0i32)
            .gives(tensor::<f32, 2>([0, 3], []));
    }

    #[test]
    fn gradients() {
        let zero = || Tensor::scalar(0.0f32);
        check_op("MatrixDiagPartV3").input(wavy([3, 4], 0)).input([-1i32, 2]).input(zero()).gradient();
        check_op("MatrixSetDiag").input(wavy([2, 3], 0)).input(wavy([2], 1)).gradient();
        for align in ["LEFT_RIGHT", "RIGHT_LEFT"] {
            let set = check_op("MatrixSetDiagV3").attr("align", align);
            set.input(wavy([3, 3], 0)).input(wavy([2, 3], 1)).input([0i32, 1]).gradient();
        }
        check_op("MatrixDiagV2")
            .input(wavy([2, 3], 0))
            .input([0i32, 1])
            .input(-1i32)
            .input(-1i32)
            .input(zero())
            .gradient();
    }
}
