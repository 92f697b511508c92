//! Variables whose values are on the card. Handles and references are the CPU's; only updates compute.

use kolo_core::{Error, Result};

use super::map::{Expression, run};
use super::{NUMBERS, PLAIN, Table, function, gpu, register};
use crate::state::handle::uninitialized;
use crate::{KernelCtx, find_op};

/// Ops whose CPU kernel never looks at elements, and the attribute that decides.
const SHARED: &[(&str, &str)] = &[
    ("VarHandleOp", "dtype"),
    ("ReadVariableOp", "dtype"),
    ("_ReadVariablesOp", ""),
    ("AssignVariableOp", "dtype"),
    ("VariableShape", ""),
    ("VariableV2", "dtype"),
    ("Variable", "dtype"),
    ("Assign", "T"),
    ("IsVariableInitialized", ""),
    ("TemporaryVariable", "dtype"),
    ("DestroyTemporaryVariable", "T"),
];

pub(super) fn add(table: &mut Table) {
    for &(op, attr) in SHARED {
        let Ok(found) = find_op(op) else { continue };
        if let Some(kernel) = found.kernels.iter().find(|kernel| kernel.device == "CPU") {
            register(table, op, attr, PLAIN, kernel.make);
        }
    }
    function(table, "AssignAddVariableOp", "dtype", NUMBERS, |ctx| update(ctx, PLUS));
    function(table, "AssignSubVariableOp", "dtype", NUMBERS, |ctx| update(ctx, MINUS));
    function(table, "AssignAdd", "T", NUMBERS, |ctx| update(ctx, PLUS).and_then(|()| ctx.forward(0, 0)));
    function(table, "AssignSub", "T", NUMBERS, |ctx| update(ctx, MINUS).and_then(|()| ctx.forward(0, 0)));
}

const PLUS: Expression = Expression { name: "AddV2", text: "x0 + x1" };
const MINUS: Expression = Expression { name: "Sub", text: "x0 - x1" };

/// Sets the variable to an expression of itself and input 1, in place.
fn update(ctx: &mut KernelCtx<'_>, expression: Expression) -> Result<()> {
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
