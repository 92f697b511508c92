//! Variables whose values are on the card. Handles and references are the CPU's; only updates compute.

use kolo_core::{Error, Result};

use super::gpu;
use super::map::{Expression, run};
use crate::KernelCtx;
use crate::state::handle::uninitialized;

pub(crate) const PLUS: Expression = Expression { name: "AddV2", text: "x0 + x1" };
pub(crate) const MINUS: Expression = Expression { name: "Sub", text: "x0 - x1" };

/// Sets the variable to an expression of itself and input 1, in place.
pub(crate) fn update(ctx: &mut KernelCtx<'_>, expression: Expression) -> Result<()> {
    let cell = ctx.variable(0)?;
    if !cell.is_initialized() {
        return Err(uninitialized(ctx, 0, &cell));
    }
    let (value, device) = (ctx.input(1)?, gpu(ctx)?);
    cell.update_on(device, |variable| {
        if variable.shape() != value.shape() {
            return Err(Error::invalid_argument(format!(
                "Cannot update variable with shape {} using a Tensor with shape {}, shapes must be equal.",
                variable.shape(),
                value.shape()
            )));
        }
        run(device, expression, &[None, Some(value)], variable, &[])
    })
}
