//! `Cast`: every element as the nearest one of another dtype. `_HostCast`: the same, of values in host memory.
//!
//! Floats become integers by cutting off the fraction. C++ leaves open what becomes of NaN and of what is out of range; it is
//! what x86 makes of one element, as in TensorFlow: the least `int32` or `int64`. Narrower integers are the low bits of that
//! `int32`, and `uint32` those of the `int64`. Integers wrap. Anything but zero is true. Halves are reached through `float`,
//! as in TensorFlow.

use half::{bf16, f16};
use kolo_core::{DType, Element, Error, Result, Tensor};
use kolo_device::cpu::halves::{f16_to_f32, f32_to_f16, from_half, to_half};
use kolo_device::cpu::{pool, vectorize, vmath};
use kolo_graph::{Attrs, Elements, Elementwise, Gradient, HostRule, Literal, OpDef, Output, shape_fns};

use crate::cuda::c_type;
use crate::cuda::map::{Expression, map_inputs};
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// `x` as elements of `dtype`; `x` itself if it is of that dtype already.
#[track_caller]
pub fn cast(x: Output<'_>, dtype: DType) -> Output<'_> {
    if x.dtype() == dtype && x.is_valid() && !x.is_ref() {
        return x;
    }
    x.graph().op("Cast").input(x).attr("DstT", dtype).out()
}

pub(crate) static CAST: Op = Op {
    def: OpDef {
        name: "Cast",
        signature: "(x:SrcT) -> (y:DstT) ; SrcT:type, DstT:type, Truncate:bool=false",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::Rule(|op, dy| {
            let from = op.input(0).dtype();
            let dx = first(dy)?;
            Ok(vec![from.is_float().then(|| cast(dx, from).into())])
        }),
        host: HostRule::SmallIntegers,
        // Cutting low bits off instead of rounding is no plain conversion.
        elementwise: Some(Elementwise::new("x0", Elements::Plain).unless("Truncate", Literal::Bool(true))),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(
        &[gpu_kernel("SrcT", ON_GPU, on_gpu).except("truncates, or casts to no number", is_for_the_host)],
    ),
    cost: Cost::Elements,
};

pub(crate) static HOST_CAST: Op = Op {
    def: OpDef {
        name: "_HostCast",
        gradient: Gradient::Refused("differentiate Cast instead"),
        host: HostRule::Always,
        elementwise: None,
        ..CAST.def
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Host,
    cost: Cost::Elements,
};

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (from, to) = (ctx.attrs().dtype("SrcT")?, ctx.attrs().dtype("DstT")?);
    if from == to {
        return ctx.forward(0, 0);
    }
    if ctx.attrs().bool("Truncate")? {
        let truncated = truncated(ctx.take_input(0)?, to)?;
        ctx.inputs[0] = crate::Value::Tensor(truncated);
    }
    macro_rules! from {
        ($($dtype:ident),*) => {
            match from {
                $(DType::$dtype => cast_from::<as_type!($dtype)>(ctx, to)?,)*
                other => return Err(unsupported(other, to)),
            }
        };
    }
    let out = from!(F32, F64, F16, BF16, I8, I16, I32, I64, U8, U16, U32, U64, Bool);
    ctx.set_output(0, out);
    Ok(())
}

fn cast_from<S: Source>(ctx: &KernelCtx<'_>, to: DType) -> Result<Tensor> {
    macro_rules! to {
        ($($dtype:ident),*) => {
            match to {
                $(DType::$dtype => convert::<S, as_type!($dtype)>(ctx, ctx.input(0)?),)*
                other => Err(unsupported(S::DTYPE, other)),
            }
        };
    }
    to!(F32, F64, F16, BF16, I8, I16, I32, I64, U8, U16, U32, U64, Bool)
}

/// `input`, of elements `S`, as elements `D`.
pub(crate) fn convert<S: Source, D: Target>(ctx: &KernelCtx<'_>, input: &Tensor) -> Result<Tensor> {
    // Loops with instructions of their own. The plain cast to an integer compares with the ends one by one.
    match (S::DTYPE, D::DTYPE) {
        (DType::F32, DType::I32) => return convert_by(ctx, input, vmath::f32_to_i32),
        (DType::F16, DType::F32) => return convert_by(ctx, input, f16_to_f32),
        (DType::F32, DType::F16) => return convert_by(ctx, input, f32_to_f16),
        _ => {}
    }
    if const { is_common(S::DTYPE) && is_common(D::DTYPE) } {
        return convert_by(ctx, input, vectorized::<S, D>);
    }
    convert_by(ctx, input, each::<S, D>)
}

fn convert_by<S: Element, D: Element>(
    ctx: &KernelCtx<'_>,
    input: &Tensor,
    each: impl Fn(&[S], &mut [D]) + Sync,
) -> Result<Tensor> {
    let mut out = ctx.allocate(D::DTYPE, input.shape().clone())?;
    let input = input.data::<S>()?;
    let chunk = pool::fill_grain::<D>(input.len(), 0.5);
    ctx.pool().fill_chunks(out.data_mut::<D>()?, chunk, &|i, out| each(&input[i * chunk..i * chunk + out.len()], out));
    Ok(out)
}

#[inline(always)]
fn each<S: Source, D: Target>(input: &[S], out: &mut [D]) {
    for (y, &x) in out.iter_mut().zip(input) {
        *y = D::of(x);
    }
}

/// Converts elements, compiled for every instruction set.
pub(crate) fn vectorized<S: Source, D: Target>(input: &[S], out: &mut [D]) {
    vectorize(
        #[inline(always)]
        || each(input, out),
    );
}

/// Whether casts from and to this dtype are compiled for every instruction set.
const fn is_common(dtype: DType) -> bool {
    use DType::{BF16, Bool, F16, F32, F64, I32, I64, U8};
    matches!(dtype, F32 | F64 | F16 | BF16 | I32 | I64 | U8 | Bool)
}

fn unsupported(from: DType, to: DType) -> Error {
    Error::unimplemented(format!("Cast {from} to {to} is not supported"))
}

/// Floats with the bits cleared that `to` has no room for, so that the cast rounds towards zero.
fn truncated(tensor: Tensor, to: DType) -> Result<Tensor> {
    let mantissa_bits = |dtype| match dtype {
        DType::F64 => Some(52),
        DType::F32 => Some(23),
        DType::F16 => Some(10),
        DType::BF16 => Some(7),
        _ => None,
    };
    let (Some(have), Some(want)) = (mantissa_bits(tensor.dtype()), mantissa_bits(to)) else { return Ok(tensor) };
    if have <= want {
        return Ok(tensor);
    }
    let mask = u64::MAX << (have - want);
    let shape = tensor.shape().clone();
    match tensor.dtype() {
        DType::F64 => {
            Tensor::from_vec(shape, tensor.data::<f64>()?.iter().map(|x| f64::from_bits(x.to_bits() & mask)).collect())
        }
        DType::F32 => Tensor::from_vec(
            shape,
            tensor.data::<f32>()?.iter().map(|x| f32::from_bits(x.to_bits() & mask as u32)).collect(),
        ),
        _ => Tensor::from_vec(
            shape,
            tensor.data::<f16>()?.iter().map(|x| f16::from_bits(x.to_bits() & mask as u16)).collect(),
        ),
    }
}

macro_rules! as_type {
    (F32) => {
        f32
    };
    (F64) => {
        f64
    };
    (F16) => {
        f16
    };
    (BF16) => {
        bf16
    };
    (I8) => {
        i8
    };
    (I16) => {
        i16
    };
    (I32) => {
        i32
    };
    (I64) => {
        i64
    };
    (U8) => {
        u8
    };
    (U16) => {
        u16
    };
    (U32) => {
        u32
    };
    (U64) => {
        u64
    };
    (Bool) => {
        bool
    };
}
use as_type;

macro_rules! conversions {
    ($($method:ident: $ty:ty),*) => {
        /// What can be cast: one method for each result.
        pub trait Source: Element {
            /// Whether it differs from zero.
            fn to_bool(self) -> bool;
            $(
                /// The same number in this type.
                fn $method(self) -> $ty;
            )*
        }

        macro_rules! sources {
            ($from:ty, $zero:expr) => {
                impl Source for $from {
                    #[inline(always)]
                    fn to_bool(self) -> bool { self != $zero }
                    $(#[inline(always)]
                    fn $method(self) -> $ty { self as $ty })*
                }
            };
        }

        macro_rules! indirect_sources {
            ($from:ty, $via:ty, $convert:expr) => {
                impl Source for $from {
                    #[inline(always)]
                    fn to_bool(self) -> bool { ($convert)(self).to_bool() }
                    $(#[inline(always)]
                    fn $method(self) -> $ty { Source::$method(($convert)(self)) })*
                }
            };
        }

        $(impl Target for $ty {
            #[inline(always)]
            fn of<S: Source>(value: S) -> $ty { value.$method() }
        })*
    };
}

/// What can be cast to.
pub trait Target: Element {
    /// The nearest value.
    fn of<S: Source>(value: S) -> Self;
}

conversions!(
    to_f32: f32, to_f64: f64,
    to_i8: i8, to_i16: i16, to_i32: i32, to_i64: i64,
    to_u8: u8, to_u16: u16, to_u32: u32, to_u64: u64
);

sources!(i8, 0);
sources!(i16, 0);
sources!(i32, 0);
sources!(i64, 0);
sources!(u8, 0);
sources!(u16, 0);
sources!(u32, 0);
sources!(u64, 0);

macro_rules! float_sources {
    ($from:ty) => {
        impl Source for $from {
            #[inline(always)]
            fn to_bool(self) -> bool {
                self != 0.0
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                self as f32
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn to_i8(self) -> i8 {
                self.in_32_bits() as i8
            }
            #[inline(always)]
            fn to_i16(self) -> i16 {
                self.in_32_bits() as i16
            }
            #[inline(always)]
            fn to_i32(self) -> i32 {
                self.in_32_bits()
            }
            #[inline(always)]
            fn to_i64(self) -> i64 {
                self.in_64_bits()
            }
            #[inline(always)]
            fn to_u8(self) -> u8 {
                self.in_32_bits() as u8
            }
            #[inline(always)]
            fn to_u16(self) -> u16 {
                self.in_32_bits() as u16
            }
            #[inline(always)]
            fn to_u32(self) -> u32 {
                self.in_64_bits() as u32
            }
            #[inline(always)]
            fn to_u64(self) -> u64 {
                self.in_64_unsigned_bits()
            }
        }
    };
}

float_sources!(f32);
float_sources!(f64);
indirect_sources!(bool, u8, u8::from);
indirect_sources!(f16, f32, from_half);
indirect_sources!(bf16, f32, bf16::to_f32);

impl Target for bool {
    #[inline(always)]
    fn of<S: Source>(value: S) -> bool {
        value.to_bool()
    }
}

impl Target for f16 {
    #[inline(always)]
    fn of<S: Source>(value: S) -> f16 {
        to_half(value.to_f32())
    }
}

impl Target for bf16 {
    #[inline(always)]
    fn of<S: Source>(value: S) -> bf16 {
        bf16::from_f32(value.to_f32())
    }
}

/// The whole part of a float in 32 bits, or the least number if it has no room there: what x86 gives.
trait WholePart: Copy {
    /// In 32 bits.
    fn in_32_bits(self) -> i32;
    /// In 64 bits.
    fn in_64_bits(self) -> i64;
    /// Its bits in 64 without a sign; of what is out of range the highest alone.
    fn in_64_unsigned_bits(self) -> u64;
}

macro_rules! whole_parts {
    ($($ty:ty),*) => {
        $(impl WholePart for $ty {
            // NaN is not smaller; what is too small the cast itself makes the least number.
            #[inline(always)]
            fn in_32_bits(self) -> i32 {
                if self < 2_147_483_648.0 { self as i32 } else { i32::MIN }
            }
            #[inline(always)]
            fn in_64_bits(self) -> i64 {
                if self < 9_223_372_036_854_775_808.0 { self as i64 } else { i64::MIN }
            }
            #[inline(always)]
            fn in_64_unsigned_bits(self) -> u64 {
                const HALF: $ty = 9_223_372_036_854_775_808.0;
                if self < HALF { self as i64 as u64 } else { (self - HALF).in_64_bits() as u64 | 1 << 63 }
            }
        })*
    };
}
whole_parts!(f32, f64);

/// The GPU's expression of a cast from `from` to `to`: the rule of the CPU, whose conversions of what is out of range differ
/// from the GPU's own.
pub(crate) fn gpu_text(from: DType, to: DType) -> Expression {
    match (from.is_float(), to) {
        (_, DType::Bool) => Expression { name: "to_bool", text: "x0 != (W)0" },
        (true, DType::I8 | DType::I16 | DType::I32 | DType::U8 | DType::U16) => {
            Expression { name: "by_32_bits", text: "x0 < (W)2147483648.0 ? (int)x0 : -2147483647 - 1" }
        }
        (true, DType::I64 | DType::U32) => Expression {
            name: "by_64_bits",
            text: "x0 < (W)9223372036854775808.0 ? (long long)x0 : -9223372036854775807LL - 1",
        },
        (true, DType::U64) => Expression {
            name: "to_u64",
            text: "x0 < (W)9223372036854775808.0 ? (unsigned long long)(long long)x0 : \
                   (x0 < (W)18446744073709551616.0 ? (unsigned long long)(long long)(x0 - (W)9223372036854775808.0) : 0ULL) \
                   | 0x8000000000000000ULL",
        },
        _ => Expression { name: "cast", text: "x0" },
    }
}

/// On a GPU, where bits are not truncated.
/// What the GPU casts from and to: all numbers, `int32` too, and `bool`.
const ON_GPU: &[DType] = {
    use DType::{BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    &[F32, F64, F16, BF16, I8, I16, I32, I64, U8, U16, U32, U64, Bool]
};

/// What the GPU's kernel does not do.
fn is_for_the_host(attrs: &Attrs) -> bool {
    attrs.bool("Truncate").unwrap_or(false) || attrs.dtype("DstT").is_ok_and(|to| !ON_GPU.contains(&to))
}

fn on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (from, to) = (ctx.attrs().dtype("SrcT")?, ctx.attrs().dtype("DstT")?);
    if from == to {
        return ctx.forward(0, 0);
    }
    if ctx.attrs().bool("Truncate")? || c_type(from) == "void" || c_type(to) == "void" {
        return Err(Error::unimplemented(format!("Cast {from} to {to} is not supported on a GPU")));
    }
    map_inputs(ctx, gpu_text(from, to), to, &[])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    fn check(input: impl Into<Tensor>, expected: impl Into<Tensor>) {
        let expected = expected.into();
        check_op("Cast").attr("DstT", expected.dtype()).input(input).gives(expected);
    }

    #[test]
    fn floats_lose_their_fraction() {
        check([1.9f32, -1.9, 0.0], [1i32, -1, 0]);
        check_op("_HostCast").attr("DstT", DType::I32).input([1.9f32]).gives([1i32]);
        check([-0.9f64, 100.5, 255.9], [0u8, 100, 255]);
        check([2.5f64, f64::MAX], [2.5f32, f32::INFINITY]);
        check([f16::from_f32(-2.5), f16::from_f32(100.0)], [-2i8, 100]);
    }

    /// TensorFlow's answers, one element at a time.
    #[test]
    fn floats_out_of_range_become_what_x86_makes_of_them() {
        const X: [f32; 14] = [
            300.0,
            -1.0,
            -129.0,
            65536.0,
            -32769.0,
            40000.0,
            3e9,
            -3e9,
            5e9,
            1e19,
            -1e19,
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
        ];
        const LEAST: i32 = i32::MIN;
        const FAR: i64 = i64::MIN;
        const TOP: u64 = 1 << 63;
        fn all<D: Target>(expected: [D; 14])
        where
            Tensor: From<[D; 14]>,
        {
            let expected = Tensor::from(expected);
            // Long enough for vectors, too.
            for n in [1usize, 14, 70] {
                let x: Vec<f32> = X.iter().copied().cycle().take(n).collect();
                let expected: Vec<D> = expected.data::<D>().unwrap().iter().copied().cycle().take(n).collect();
                let expected = Tensor::from_vec([n], expected).unwrap();
                let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                check(x, expected.clone());
                check(wide, expected);
            }
        }
        all([44u8, 255, 127, 0, 255, 64, 0, 0, 0, 0, 0, 0, 0, 0]);
        all([44i8, -1, 127, 0, -1, 64, 0, 0, 0, 0, 0, 0, 0, 0]);
        all([300i16, -1, -129, 0, 32767, -25536, 0, 0, 0, 0, 0, 0, 0, 0]);
        all([300u16, 65535, 65407, 0, 32767, 40000, 0, 0, 0, 0, 0, 0, 0, 0]);
        all([300, -1, -129, 65536, -32769, 40000, LEAST, LEAST, LEAST, LEAST, LEAST, LEAST, LEAST, LEAST]);
        all([
            300u32,
            u32::MAX,
            u32::MAX - 128,
            65536,
            u32::MAX - 32768,
            40000,
            3_000_000_000,
            1_294_967_296,
            705_032_704,
            0,
            0,
            0,
            0,
            0,
        ]);
        all([
            300i64,
            -1,
            -129,
            65536,
            -32769,
            40000,
            3_000_000_000,
            -3_000_000_000,
            5_000_000_000,
            FAR,
            FAR,
            FAR,
            FAR,
            FAR,
        ]);
        all([
            300u64,
            u64::MAX,
            u64::MAX - 128,
            65536,
            u64::MAX - 32768,
            40000,
            3_000_000_000,
            u64::MAX - 2_999_999_999,
            5_000_000_000,
            9_999_999_980_506_447_872,
            TOP,
            TOP,
            TOP,
            TOP,
        ]);
        check([f16::from_f32(300.0), f16::NAN, f16::INFINITY], [44u8, 0, 0]);
        check([bf16::from_f32(3e9), bf16::NAN], [LEAST, LEAST]);
    }

    #[test]
    fn integers_wrap() {
        check([300i32, -1, 127], [44u8, 255, 127]);
        check([-1i64, 1 << 40], [u32::MAX, 0]);
        check([u64::MAX, 5], [-1i64, 5]);
        check([1i64 << 40], [(1i64 << 40) as f32]);
        check([16_777_217i32], [16_777_216.0f32]);
    }

    #[test]
    fn truth_is_not_zero() {
        check([0.0f32, -0.0, 0.5, f32::NAN], [false, false, true, true]);
        check([0i64, 256, -1], [false, true, true]);
        check([true, false], [1.0f64, 0.0]);
        check([true, false], [f16::ONE, f16::ZERO]);
    }

    #[test]
    fn halves_round_to_even() {
        // 1 + 2^-9 lies between the bfloat16 neighbours 1 and 1 + 2^-7, nearer to 1; 1 + 3·2^-8 is half way.
        check([1.001_953_1f32, 1.011_718_8, 1e30], [1.0, 1.015_625, 1e30].map(bf16::from_f32));
        check([1e6f32, 0.1], [f16::INFINITY, f16::from_bits(0x2e66)]);
        check([bf16::from_f32(3.0)], [f16::from_f32(3.0)]);
    }

    #[test]
    fn truncation_rounds_towards_zero() {
        let case = || check_op("Cast").attr("Truncate", true);
        case()
            .attr("DstT", DType::BF16)
            .input([1.011_718_8f32, -1.011_718_8])
            .gives([1.007_812_5, -1.007_812_5].map(bf16::from_f32));
        case().attr("DstT", DType::F32).input([1.0 + 3.0 * 2f64.powi(-25)]).gives([1.0f32]);
        case().attr("DstT", DType::I32).input([1.5f32]).gives([1i32]);
    }

    #[test]
    fn every_pair_of_numbers_keeps_small_ones() {
        use DType::*;
        let all = [F32, F64, F16, BF16, I8, I16, I32, I64, U8, U16, U32, U64];
        let of = |dtype| {
            let out = check_op("Cast").attr("DstT", dtype).input([0u8, 1, 100]).run(false).unwrap();
            out[0].clone()
        };
        for from in all {
            for to in all {
                check_op("Cast").attr("DstT", to).input(of(from)).gives(of(to));
            }
            check_op("Cast").attr("DstT", Bool).input(of(from)).gives([false, true, true]);
        }
    }

    #[test]
    fn strings_are_refused_and_the_same_dtype_passes() {
        check_op("Cast").attr("DstT", DType::F32).input("1").fails("Cast string to float is not supported");
        check_op("Cast").attr("DstT", DType::Str).input("1").gives("1");
        check(tensor::<f32, 2>([0, 3], []), tensor::<i32, 2>([0, 3], []));
        check(7.0f32, 7i64);
    }

    #[test]
    fn gradients_are_cast_back() {
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [3usize]);
        let y = cast(x, DType::F64) * 3.0;
        let grads = kolo_graph::gradients(&[y], &[x]).unwrap();
        let dx = grads[0].unwrap().dense().unwrap();
        assert_eq!(dx.dtype(), DType::F32);
        let value = crate::testing::evaluate(&g, &[dx], &[(x, wavy([3], 0))]).unwrap();
        assert_eq!(value[0], Tensor::from([3.0f32; 3]));
    }
}
