//! What happens to a tile of C while it is still in cache: bias, then activation.

use std::ops::Range;

use super::kernel::Real;
use crate::cpu::vectorize;

/// An elementwise function applied to the finished product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// Leave it.
    #[default]
    None,
    /// `max(x, 0)`.
    Relu,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
}

/// What to do to C after the product: add biases, then apply an activation.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a, T> {
    /// Added to every row; one value per column.
    pub column_bias: Option<&'a [T]>,
    /// Added to every column; one value per row.
    pub row_bias: Option<&'a [T]>,
    /// Applied last.
    pub activation: Activation,
}

impl<T> Default for Epilogue<'_, T> {
    fn default() -> Self {
        Epilogue { column_bias: None, row_bias: None, activation: Activation::None }
    }
}

impl<T> Epilogue<'_, T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.column_bias.is_none() && self.row_bias.is_none() && self.activation == Activation::None
    }

    pub(crate) fn check(&self, m: usize, n: usize) -> Result<(), String> {
        match (self.column_bias, self.row_bias) {
            (Some(bias), _) if bias.len() != n => Err(format!("bias has {} values for {n} columns", bias.len())),
            (_, Some(bias)) if bias.len() != m => Err(format!("bias has {} values for {m} rows", bias.len())),
            _ => Ok(()),
        }
    }
}

/// Applies `epilogue` to the tile at `c`, whose place in C is `rows` and `cols`.
///
/// # Safety
/// `c` must be valid for reads and writes of the tile, by this call alone.
pub(crate) unsafe fn apply<T: Real>(
    epilogue: &Epilogue<'_, T>,

    c: *mut T,
    ldc: usize,
    rows: Range<usize>,
    cols: Range<usize>,
) {
    if epilogue.is_empty() {
        return;
    }
    let column_bias = epilogue.column_bias.map(|bias| &bias[cols.clone()]);
    let relu = epilogue.activation == Activation::Relu;
    for (i, row) in rows.enumerate() {
        // SAFETY: row `i` of the tile, guaranteed by the caller.
        let x = unsafe { std::slice::from_raw_parts_mut(c.add(i * ldc), cols.len()) };
        let row_bias = epilogue.row_bias.map_or(T::ZERO, |bias| bias[row]);
        vectorize(
            #[inline(always)]
            || match (column_bias, relu) {
                (Some(bias), true) => {
                    for (x, &b) in x.iter_mut().zip(bias) {
                        *x = x.plus(b.plus(row_bias)).relu();
                    }
                }
                (Some(bias), false) => {
                    for (x, &b) in x.iter_mut().zip(bias) {
                        *x = x.plus(b.plus(row_bias));
                    }
                }
                (None, true) => x.iter_mut().for_each(|x| *x = x.plus(row_bias).relu()),
                (None, false) => x.iter_mut().for_each(|x| *x = x.plus(row_bias)),
            },
        );
        if epilogue.activation == Activation::Sigmoid {
            T::sigmoid(x);
        }
    }
}
