//! `NextAfter`: the neighbour of a float in the direction of another.

use kolo_core::Result;
use kolo_graph::{Gradient, HalfSafety, OpDef, Output, shape_fns};

use crate::array::fill::zeros_like;
use crate::math::binary::{first, reduced};
use crate::math::elementwise::zip;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// The float next to each of `x` in the direction of `towards`, with NumPy's broadcasting.
#[track_caller]
pub fn next_after<'g>(x: Output<'g>, towards: Output<'g>) -> Output<'g> {
    x.graph().op("NextAfter").inputs([x, towards]).out()
}

pub(crate) static NEXT_AFTER: Op = Op {
    def: OpDef {
        name: "NextAfter",
        signature: "(x1:T, x2:T) -> (output:T) ; T:type{double,float}=float",
        shape: shape_fns::broadcast,
        // A step to the neighbour is as long wherever one stands, but for rounding.
        gradient: Gradient::Rule(|op, dz| {
            let dz = first(dz)?;
            reduced(op, dz, zeros_like(dz))
        }),
        half: HalfSafety::Never,
        ..OpDef::BASE
    },
    kernels: KERNELS,
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

/// A float that knows its neighbours.
trait Neighbours: crate::math::number::Real {
    fn up(self) -> Self;
    fn down(self) -> Self;
}

macro_rules! neighbours {
    ($($ty:ty),*) => {
        $(impl Neighbours for $ty {
            fn up(self) -> $ty { self.next_up() }
            fn down(self) -> $ty { self.next_down() }
        })*
    };
}

neighbours!(f32, f64);

fn forward<T: Neighbours>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    zip::<T, T>(ctx, 2.0, |x, towards| {
        if x < towards {
            x.up()
        } else if x > towards {
            x.down()
        } else if x == towards {
            towards
        } else {
            T::nan()
        }
    })
}

const KERNELS: &[KernelDef] = cpu_kernels!(forward: f32, f64);

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor};

    #[test]
    fn neighbours() {
        let run = |x: f64, towards: f64| {
            let found = check_op("NextAfter").input(x).input(towards).run(false).unwrap();
            found[0].scalar_value::<f64>().unwrap()
        };
        assert_eq!(run(1.0, 2.0), 1.0 + f64::EPSILON);
        assert_eq!(run(1.0, 0.0), 1.0 - f64::EPSILON / 2.0);
        assert_eq!(run(0.0, -1.0), -f64::from_bits(1));
        assert_eq!(run(-f64::from_bits(1), 1.0).to_bits(), (-0.0f64).to_bits());
        assert_eq!(run(f64::MAX, f64::INFINITY), f64::INFINITY);
        assert_eq!(run(f64::INFINITY, 0.0), f64::MAX);
        assert!(run(f64::NAN, 0.0).is_nan() && run(0.0, f64::NAN).is_nan());
        check_op("NextAfter")
            .tolerance(0.0)
            .input([[1.0f32], [-1.0]])
            .input([2.0f32, 1.0])
            .gives(tensor([2, 2], [1.0 + f32::EPSILON, 1.0, -1.0 + f32::EPSILON / 2.0, -1.0 + f32::EPSILON / 2.0]));
    }
}
