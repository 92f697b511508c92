//! Elementwise functions of one number.

use half::{bf16, f16};
use kolo_core::Result;
use kolo_graph::{Grad, Gradient, GradientFn, OpDef, Output, shape_fns};

use crate::math::binary::first;
use crate::math::elementwise::map;
use crate::math::number::Number;
use crate::op::{KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// `-x`; the operator `-` does the same.
#[track_caller]
pub fn neg(x: Output<'_>) -> Output<'_> {
    -x
}

pub(crate) static NEG: Op = unary("Neg", "(x:T) -> (y:T) ; T:type{num}", NEG_KERNELS, |_, dy| only(-first(dy)?));

const fn unary(name: &'static str, signature: &'static str, kernels: &'static [KernelDef], gradient: GradientFn) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: shape_fns::same_as_input_0,
            gradient: Gradient::Rule(gradient),
            ..OpDef::BASE
        },
        kernels,
        cost: Cost::Elements,
    }
}

fn only(dx: Output<'_>) -> Result<Vec<Option<Grad<'_>>>> {
    Ok(vec![Some(dx.into())])
}

fn neg_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map::<T, T>(
        ctx,
        0.3,
        #[inline(always)]
        |x| T::ZERO.sub(x),
    )
}

const NEG_KERNELS: &[KernelDef] = cpu_kernels!(neg_kernel: f32, f64, f16, bf16, i8, i16, i32, i64);

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, wavy};

    #[test]
    fn neg() {
        check_op("Neg").input([1.0f32, -2.0]).gives([-1.0f32, 2.0]);
        check_op("Neg").input([1i32, i32::MIN]).gives([-1i32, i32::MIN]);
        check_op("Neg").input(wavy([3], 1)).gradient();
    }
}
