//! `CheckNumerics`: the same value, or an error if it holds a NaN or an infinity.

use half::{bf16, f16};
use kolo_core::{Element, Error, Result};
use kolo_device::cpu::vectorize;
use kolo_graph::{Effects, Gradient, HalfSafety, OpDef, Output, shape_fns};
use num_traits::Float;

use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// `x`, if every element is finite; otherwise the step fails with `message`.
#[track_caller]
pub fn check_numerics<'g>(x: Output<'g>, message: &str) -> Output<'g> {
    x.graph().op("CheckNumerics").input(x).attr("message", message).out()
}

pub(crate) static CHECK_NUMERICS: Op = Op {
    def: OpDef {
        name: "CheckNumerics",
        signature: "(tensor:T) -> (output:T) ; T:type{bfloat16,half,float,double}, message:string",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::Rule(|op, dy| {
            let message = op.attrs(|attrs| attrs.str("message").map(str::to_owned))?;
            let message = format!("Not a number (NaN) or infinity (Inf) values detected in gradient. {message}");
            Ok(vec![Some(check_numerics(first(dy)?, &message).into())])
        }),
        // Its effect is the error: it must not be folded away.
        stateful: true,
        effects: Effects::Outside,
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64, f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn forward<T: Element + Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let values = ctx.data::<T>(0)?;
    // Chunks without a branch inside, so that the usual case runs many elements at a time.
    let finite = |chunk: &[T]| chunk.iter().fold(true, |finite, x| finite & x.is_finite());
    let all_finite = vectorize(
        #[inline(always)]
        || values.chunks(64).all(finite),
    );
    if !all_finite {
        let nan = values.iter().any(|x| x.is_nan());
        let inf = values.iter().any(|x| x.is_infinite());
        let found = match (inf, nan) {
            (true, true) => "Inf and NaN",
            (true, false) => "Inf",
            _ => "NaN",
        };
        let message = ctx.attrs().str("message")?;
        return Err(Error::invalid_argument(format!("{message} : Tensor had {found} values")));
    }
    ctx.forward(0, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn only_finite_values_pass() {
        let case = || check_op("CheckNumerics").attr("message", "loss");
        case().input(wavy([5], 0)).gives(wavy([5], 0)).gradient();
        case().input([f32::MAX, f32::MIN, -0.0]).gives([f32::MAX, f32::MIN, -0.0]);
        case().input(tensor::<f64, 1>([0], [])).gives(tensor::<f64, 1>([0], []));
        case().input([1.0, f32::NAN]).fails("loss : Tensor had NaN values");
        case().input([f64::NEG_INFINITY]).fails("loss : Tensor had Inf values");
        case().input([f32::INFINITY, f32::NAN]).fails("Inf and NaN");
        case().input([f16::INFINITY]).fails("Inf");
        case().input([bf16::NAN]).fails("NaN");
    }
}
