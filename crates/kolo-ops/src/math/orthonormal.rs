//! `KoloOrthonormal`: the columns of a matrix, made perpendicular to each other and of length 1, from the first to the last (Gram and
//! Schmidt, twice, which is enough for perpendicularity up to rounding). A column that lies in the space of those before becomes zero.

use kolo_core::{Error, Result};
use kolo_device::cpu::looking_by;
use kolo_graph::{Gradient, HalfSafety, OpDef};
use num_traits::Float;

use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

pub(crate) static KOLO_ORTHONORMAL: Op = Op {
    def: OpDef {
        name: "KoloOrthonormal",
        signature: "(matrix:T) -> (columns:T) ; T:type{float,double}",
        shape: |ctx| Ok(vec![ctx.input_of_rank(0, 2)?]),
        gradient: Gradient::Refused("ranks compress gradients with it, which are not differentiated again"),
        half: HalfSafety::Wide,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(orthonormal: f32, f64),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn orthonormal<T: kolo_core::Element + Float + Into<f64>>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let &[n_rows, n_columns] = shape.dims() else {
        return Err(Error::invalid_argument(format!("matrix should have rank 2, found shape {shape}")));
    };
    let mut output = ctx.allocate(T::DTYPE, shape)?;
    if output.n_elements() == 0 {
        // However many columns there are.
        ctx.set_output(0, output);
        return Ok(());
    }
    // One column after the other.
    let mut columns = ctx.scratch(n_rows * n_columns, 0.0f64, "elements of columns")?;
    let matrix = ctx.data::<T>(0)?;
    for column in looking_by(n_rows * size_of::<f64>(), 0..n_columns) {
        let (before, own) = columns.split_at_mut(column * n_rows);
        let own = &mut own[..n_rows];
        own.iter_mut().enumerate().for_each(|(row, x)| *x = matrix[row * n_columns + column].into());
        let length = dot(own, own).sqrt();
        for _ in 0..2 {
            for before in looking_by(2 * n_rows * size_of::<f64>(), before.chunks_exact(n_rows)) {
                let along = dot(own, before);
                own.iter_mut().zip(before).for_each(|(x, before)| *x -= along * before);
            }
        }
        let left = dot(own, own).sqrt();
        // What rounding has left of a column is no direction.
        let by = if left > length * T::epsilon().into() { 1.0 / left } else { 0.0 };
        own.iter_mut().for_each(|x| *x *= by);
    }
    let elements = output.data_mut::<T>()?;
    for (column, own) in looking_by(n_rows * size_of::<f64>(), columns.chunks_exact(n_rows)).enumerate() {
        for (row, &x) in own.iter().enumerate() {
            elements[row * n_columns + column] = T::from(x).unwrap_or_else(T::nan);
        }
    }
    ctx.set_output(0, output);
    Ok(())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::f32::consts::FRAC_1_SQRT_2;

    use kolo_core::{DType, Tensor};

    use crate::testing::check_op;

    #[test]
    fn columns_are_perpendicular_and_of_length_one() {
        check_op("KoloOrthonormal").input([[3.0f32, 1.0], [4.0, 2.0]]).gives([[0.6f32, -0.8], [0.8, 0.6]]);
        let matrix: [[f64; 3]; 5] =
            std::array::from_fn(|i| std::array::from_fn(|j| ((i * 7 + j * 13) % 11) as f64 - 4.0));
        let found = check_op("KoloOrthonormal").input(matrix).run(false).unwrap().remove(0);
        let found = found.data::<f64>().unwrap();
        for a in 0..3 {
            for b in 0..3 {
                let product: f64 = (0..5).map(|row| found[row * 3 + a] * found[row * 3 + b]).sum();
                assert!((product - f64::from(u8::from(a == b))).abs() < 1e-12, "columns {a} and {b}: {product}");
            }
        }
    }

    #[test]
    fn a_column_that_adds_no_direction_becomes_zero() {
        let op = check_op("KoloOrthonormal").input([[1.0f32, 2.0, 0.0], [1.0, 2.0, 0.0]]);
        op.gives(Tensor::from([[FRAC_1_SQRT_2, 0.0, 0.0], [FRAC_1_SQRT_2, 0.0, 0.0]]));
        check_op("KoloOrthonormal").input([1.0f32]).fails("should have rank 2");
        // Columns without elements take nothing, however many there are.
        let none = || Tensor::zeros(DType::F32, [0, 1 << 40]).unwrap();
        check_op("KoloOrthonormal").input(none()).gives(none());
    }
}
