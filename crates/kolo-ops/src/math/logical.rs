//! `LogicalAnd`, `LogicalOr`, `LogicalNot`: truth values, elementwise with NumPy's broadcasting.

use kolo_core::Result;
use kolo_graph::{Elements, Elementwise, Gradient, OpDef, Output, ShapeFn, shape_fns};

use crate::math::elementwise::{map, zip};
use crate::op::{Gpu, KernelDef, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// Whether `a` and `b` are both true, elementwise.
#[track_caller]
pub fn logical_and<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
    a.graph().op("LogicalAnd").input(a).input(b).out()
}

/// Whether `a` or `b` is true, elementwise.
#[track_caller]
pub fn logical_or<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
    a.graph().op("LogicalOr").input(a).input(b).out()
}

/// Whether `x` is false, elementwise.
#[track_caller]
pub fn logical_not(x: Output<'_>) -> Output<'_> {
    x.graph().op("LogicalNot").input(x).out()
}

const TWO: &str = "(x:bool, y:bool) -> (z:bool)";

pub(crate) static LOGICAL_AND: Op = logical("LogicalAnd", TWO, shape_fns::broadcast, &[cpu_any(and)])
    .elementwise(Elementwise::new("x0 && x1", Elements::Truths));
pub(crate) static LOGICAL_OR: Op = logical("LogicalOr", TWO, shape_fns::broadcast, &[cpu_any(or)])
    .elementwise(Elementwise::new("x0 || x1", Elements::Truths));
pub(crate) static LOGICAL_NOT: Op =
    logical("LogicalNot", "(x:bool) -> (y:bool)", shape_fns::same_as_input_0, &[cpu_any(not)])
        .elementwise(Elementwise::new("!x0", Elements::Truths));

const fn logical(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef { name, signature, shape, gradient: Gradient::None("truth values have no gradient"), ..OpDef::BASE },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

/// About what one element costs.
const NS: f64 = 0.2;

fn and(ctx: &mut KernelCtx<'_>) -> Result<()> {
    zip::<bool, bool>(
        ctx,
        NS,
        #[inline(always)]
        |a, b| a & b,
    )
}

fn or(ctx: &mut KernelCtx<'_>) -> Result<()> {
    zip::<bool, bool>(
        ctx,
        NS,
        #[inline(always)]
        |a, b| a | b,
    )
}

fn not(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map::<bool, bool>(
        ctx,
        NS,
        #[inline(always)]
        |x| !x,
    )
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor};

    #[test]
    fn truth_tables() {
        let (a, b) = ([false, false, true, true], [false, true, false, true]);
        check_op("LogicalAnd").input(a).input(b).gives([false, false, false, true]);
        check_op("LogicalOr").input(a).input(b).gives([false, true, true, true]);
        check_op("LogicalNot").input(a).gives([true, true, false, false]);
        check_op("LogicalAnd").input([[true], [false]]).input([true, false]).gives([[true, false], [false, false]]);
        check_op("LogicalOr").input(a).input(true).gives([true; 4]);
        check_op("LogicalNot").input(tensor::<bool, 1>([0], [])).gives(tensor::<bool, 1>([0], []));
        check_op("LogicalAnd").input(a).input([true, false]).fails("do not broadcast");
        check_op("LogicalAnd").input([1i32]).input([1i32]).fails("should be bool");
    }
}
