//! `StringToNumber`: text as a number.

use kolo_core::{DType, Error, Result, Tensor};
use kolo_device::cpu::looking;
use kolo_graph::{OpDef, Output, shape_fns};

use super::strip::stripped;
use super::{NO_GRADIENT, shown};
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// Each string as a number of `dtype`: float, double or an integer of 32 or 64 bits.
#[track_caller]
pub fn string_to_number(strings: Output<'_>, dtype: DType) -> Output<'_> {
    strings.graph().op("StringToNumber").input(strings).attr("out_type", dtype).out()
}

pub(crate) static STRING_TO_NUMBER: Op = Op {
    def: OpDef {
        name: "StringToNumber",
        signature: "(string_tensor:string) -> (output:out_type) ; \
                    out_type:type{float,double,int32,int64,uint32,uint64}=float",
        shape: shape_fns::same_as_input_0,
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

/// Text as a number, blanks around it ignored; `None` if it is none, or an integer out of range.
pub(crate) trait FromText: kolo_core::Element {
    fn from_text(text: &[u8]) -> Option<Self>;
}

macro_rules! integers {
    ($($ty:ty),*) => {
        $(impl FromText for $ty {
            fn from_text(text: &[u8]) -> Option<$ty> {
                std::str::from_utf8(stripped(text)).ok()?.parse().ok()
            }
        })*
    };
}

integers!(i32, i64, u32, u64);

macro_rules! floats {
    ($($ty:ty),*) => {
        $(impl FromText for $ty {
            fn from_text(text: &[u8]) -> Option<$ty> {
                let text = std::str::from_utf8(stripped(text)).ok()?;
                let (sign, digits) = match text.as_bytes().first() {
                    Some(b'-') => (-1.0, &text[1..]),
                    Some(b'+') => (1.0, &text[1..]),
                    _ => (1.0, text),
                };
                if digits.starts_with(['-', '+']) {
                    return None;
                }
                match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
                    Some(hex) => hexadecimal(hex).map(|value| sign * value as $ty),
                    None => digits.parse::<$ty>().ok().map(|value| sign * value),
                }
            }
        })*
    };
}

floats!(f32, f64);

/// A whole number to base 16, which C allows for floats.
fn hexadecimal(digits: &str) -> Option<f64> {
    let fits = !digits.is_empty() && digits.len() <= 13 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    fits.then(|| u64::from_str_radix(digits, 16).ok())?.map(|value| value as f64)
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let out = match ctx.attrs().dtype("out_type")? {
        DType::F32 => numbers::<f32>(input)?,
        DType::F64 => numbers::<f64>(input)?,
        DType::I32 => numbers::<i32>(input)?,
        DType::I64 => numbers::<i64>(input)?,
        DType::U32 => numbers::<u32>(input)?,
        DType::U64 => numbers::<u64>(input)?,
        other => return Err(Error::unimplemented(format!("StringToNumber does not make {other}"))),
    };
    ctx.set_output(0, out);
    Ok(())
}

fn numbers<T: FromText>(input: &Tensor) -> Result<Tensor> {
    let number = |text: &bytes::Bytes| {
        T::from_text(text).ok_or_else(|| {
            Error::invalid_argument(format!("StringToNumberOp could not correctly convert string: {}", shown(text)))
        })
    };
    Tensor::from_vec(input.shape().clone(), looking(input.strings()?).map(number).collect::<Result<Vec<T>>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::string::words;
    use crate::testing::check_op;

    #[test]
    fn numbers_are_read() {
        let inf = f32::INFINITY;
        check_op("StringToNumber")
            .input(words(["1.5", " 2 ", "-3e2", "inf", "-inf", "nan", "0x10", "1e50", "1e-60", "+4", ".5", "5."]))
            .gives([1.5f32, 2.0, -300.0, inf, -inf, f32::NAN, 16.0, inf, 0.0, 4.0, 0.5, 5.0]);
        check_op("StringToNumber").input(words(["infinity", "INF"])).gives([inf, inf]);
        check_op("StringToNumber").attr("out_type", DType::F64).input(words(["0.1"])).gives([0.1f64]);
        check_op("StringToNumber")
            .attr("out_type", DType::I32)
            .input(words(["15", "-2", " 7 ", "+3"]))
            .gives([15i32, -2, 7, 3]);
        check_op("StringToNumber")
            .attr("out_type", DType::U64)
            .input(words(["18446744073709551615"]))
            .gives([u64::MAX]);
    }

    #[test]
    fn other_text_is_refused() {
        for text in ["", "abc", "1.5x", "1 2", "1f", "0b1", " ", "1e", "--1", "1_0", "+-1"] {
            let text = Tensor::string(bytes::Bytes::from_static(text.as_bytes()));
            check_op("StringToNumber").input(text.clone()).fails("StringToNumberOp could not correctly convert string");
            check_op("StringToNumber").attr("out_type", DType::I32).input(text).fails("could not correctly convert");
        }
        for text in ["1.0", "99999999999", "inf", "0x10"] {
            let text = Tensor::string(bytes::Bytes::from_static(text.as_bytes()));
            check_op("StringToNumber").attr("out_type", DType::I32).input(text).fails("could not correctly convert");
        }
    }
}
