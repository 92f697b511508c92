//! Operations on the bits of whole numbers, elementwise: BitwiseAnd, BitwiseOr, BitwiseXor, Invert, LeftShift, RightShift,
//! PopulationCount.

use kolo_graph::{Gradient, OpDef, Output, ShapeFn, shape_fns};
use num_traits::PrimInt;

use crate::math::elementwise::{Computed, expression_kernels, map, zip};
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

macro_rules! builders {
    ($($function:ident, $op:literal, $doc:literal;)*) => {
        $(#[doc = $doc]
        #[track_caller]
        pub fn $function<'g>(x: Output<'g>, y: Output<'g>) -> Output<'g> {
            x.graph().op($op).input(x).input(y).out()
        })*
    };
}

builders! {
    bitwise_and, "BitwiseAnd", "The bits that are set in both, elementwise.";
    bitwise_or, "BitwiseOr", "The bits that are set in either, elementwise.";
    bitwise_xor, "BitwiseXor", "The bits that are set in one alone, elementwise.";
    left_shift, "LeftShift", "`x · 2ʸ`, elementwise, without the bits that do not fit.";
    right_shift, "RightShift", "`x / 2ʸ` rounded down, elementwise.";
}

/// Every bit turned over, elementwise.
#[track_caller]
pub fn invert(x: Output<'_>) -> Output<'_> {
    x.graph().op("Invert").input(x).out()
}

const TWO: &str = "(x:T, y:T) -> (z:T) ; T:type{int8,int16,int32,int64,uint8,uint16,uint32,uint64}";
const ONE: &str = "(x:T) -> (y:T) ; T:type{int8,int16,int32,int64,uint8,uint16,uint32,uint64}";
const COUNT: &str = "(x:T) -> (y:uint8) ; T:type{int8,int16,int32,int64,uint8,uint16,uint32,uint64}";

pub(crate) static BITWISE_AND: Op = bits("BitwiseAnd", TWO, shape_fns::broadcast, AND_KERNELS);
pub(crate) static BITWISE_OR: Op = bits("BitwiseOr", TWO, shape_fns::broadcast, OR_KERNELS);
pub(crate) static BITWISE_XOR: Op = bits("BitwiseXor", TWO, shape_fns::broadcast, XOR_KERNELS);
pub(crate) static INVERT: Op = bits("Invert", ONE, shape_fns::same_as_input_0, INVERT_KERNELS);
pub(crate) static LEFT_SHIFT: Op = bits("LeftShift", TWO, shape_fns::broadcast, LEFT_KERNELS);
pub(crate) static RIGHT_SHIFT: Op = bits("RightShift", TWO, shape_fns::broadcast, RIGHT_KERNELS);
pub(crate) static POPULATION_COUNT: Op = bits("PopulationCount", COUNT, shape_fns::same_as_input_0, COUNT_KERNELS);

const fn bits(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::None("whole numbers have no gradient"),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

/// About what one element costs.
const NS: f64 = 0.3;

expression_kernels! {
    AND_KERNELS, and_kernel: Bits, zip(NS), |a, b| a & b, (i8, i16, i32, i64, u8, u16, u32, u64);
    OR_KERNELS, or_kernel: Bits, zip(NS), |a, b| a | b, (i8, i16, i32, i64, u8, u16, u32, u64);
    XOR_KERNELS, xor_kernel: Bits, zip(NS), |a, b| a ^ b, (i8, i16, i32, i64, u8, u16, u32, u64);
    INVERT_KERNELS, invert_kernel: Bits, map(NS), |x| !x, (i8, i16, i32, i64, u8, u16, u32, u64);
    LEFT_KERNELS, left_kernel: Bits, zip(NS), |a, b| a << places(b), (i8, i16, i32, i64, u8, u16, u32, u64);
    RIGHT_KERNELS, right_kernel: Bits, zip(NS), |a, b| a >> places(b), (i8, i16, i32, i64, u8, u16, u32, u64);
}

/// A whole number of any size.
trait Bits: Computed + PrimInt {}
impl<T: Computed + PrimInt> Bits for T {}

/// By how many places to shift: as TensorFlow does, at least 0 and at most so many that one bit is left.
#[inline(always)]
fn places<T: PrimInt>(n: T) -> usize {
    let most = T::zero().count_zeros() as usize - 1;
    if n < T::zero() { 0 } else { n.to_usize().map_or(most, |n| n.min(most)) }
}

fn count_kernel<T: Bits>(ctx: &mut KernelCtx<'_>) -> kolo_core::Result<()> {
    map::<T, u8>(ctx, NS, |x| x.count_ones() as u8)
}

const COUNT_KERNELS: &[KernelDef] = cpu_kernels!(count_kernel: i8, i16, i32, i64, u8, u16, u32, u64);

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor};

    #[test]
    fn bits() {
        let (a, b) = ([0b1100i32, -1], [0b1010i32, 7]);
        check_op("BitwiseAnd").input(a).input(b).gives([0b1000i32, 7]);
        check_op("BitwiseOr").input(a).input(b).gives([0b1110i32, -1]);
        check_op("BitwiseXor").input(a).input(b).gives([0b0110i32, -8]);
        check_op("Invert").input([0u8, 200]).gives([255u8, 55]);
        check_op("Invert").input([0i64, -1]).gives([-1i64, 0]);
        check_op("BitwiseAnd").input([[0x0fu16], [0xf0]]).input([0xffu16, 0x11]).gives([[0x0fu16, 0x01], [0xf0, 0x10]]);
        check_op("BitwiseOr").input(tensor::<u8, 1>([0], [])).input(1u8).gives(tensor::<u8, 1>([0], []));
        check_op("BitwiseAnd").input([1.0f32]).input([1.0f32]).fails("float");
        check_op("PopulationCount").input([-1i8, 0, 5]).gives([8u8, 0, 2]);
        check_op("PopulationCount").input([u64::MAX]).gives([64u8]);
    }

    #[test]
    fn shifts_stop_at_the_last_bit() {
        check_op("LeftShift").input([1i8, -1, 1, 3]).input([6i8, 1, 100, -5]).gives([64i8, -2, -128, 3]);
        check_op("RightShift").input([-128i8, 127, -1]).input([2i8, 100, 100]).gives([-32i8, 0, -1]);
        check_op("RightShift").input([255u8, 255]).input([3u8, 200]).gives([31u8, 1]);
        check_op("LeftShift").input([1u64]).input([u64::MAX]).gives([1u64 << 63]);
    }
}
