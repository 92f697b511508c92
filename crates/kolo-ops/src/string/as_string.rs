//! `AsString`: numbers as text.

use bytes::Bytes;
use half::{bf16, f16};
use kolo_core::{DType, Error, Result, Tensor};
use kolo_device::cpu::looking;
use kolo_graph::{Attrs, OpDef, Output, shape_fns};

use super::NO_GRADIENT;
use super::printf::{Format, Notation};
use crate::memory::StringsMade;
use crate::op::{Gpu, KernelMaker, Op, cpu_made};
use crate::{Cost, Kernel, KernelCtx, KernelInit};

/// Each element as text, floats with six digits after the point.
#[track_caller]
pub fn as_string(x: Output<'_>) -> Output<'_> {
    x.graph().op("AsString").input(x).out()
}

pub(crate) static AS_STRING: Op = Op {
    def: OpDef {
        name: "AsString",
        signature: "(input:T) -> (output:string) ; T:type{float,double,int32,uint8,int16,int8,int64,bfloat16,uint16,half,\
                    uint32,uint64,complex64,complex128,bool,variant,string}, precision:int=-1, scientific:bool=false, \
                    shortest:bool=false, width:int=-1, fill:string=\"\"",
        shape: shape_fns::same_as_input_0,
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(make))],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

fn make(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
    AsString::new(init.attrs()).map(|kernel| Box::new(kernel) as Box<dyn Kernel>)
}

struct AsString {
    format: Format,
    notation: Notation,
    precision: Option<usize>,
}

/// No number needs more characters than this, and a graph must not make us write more.
const MOST: i64 = 1 << 16;

impl AsString {
    fn new(attrs: &Attrs) -> Result<AsString> {
        let dtype = attrs.dtype("T")?;
        let (precision, width) = (attrs.int("precision")?, attrs.int("width")?);
        let (scientific, shortest) = (attrs.bool("scientific")?, attrs.bool("shortest")?);
        if !dtype.is_float() {
            if scientific || shortest {
                return Err(Error::invalid_argument(format!(
                    "scientific and shortest format not supported for datatype {dtype}"
                )));
            }
            if precision >= 0 {
                return Err(Error::invalid_argument(format!("precision not supported for datatype {dtype}")));
            }
        }
        if scientific && shortest {
            return Err(Error::invalid_argument("Cannot select both scientific and shortest notation"));
        }
        if precision > MOST || width > MOST {
            return Err(Error::invalid_argument(format!("precision {precision} and width {width} exceed {MOST}")));
        }
        let fill = attrs.str("fill")?;
        let flag = match fill {
            "" => None,
            "0" | "-" | "+" | " " => fill.chars().next(),
            _ if fill.len() > 1 => return Err(Error::invalid_argument("Fill string must be one or fewer characters")),
            _ => return Err(Error::invalid_argument(format!("Fill argument not supported: \"{fill}\""))),
        };
        let notation = match (scientific, shortest) {
            (true, _) => Notation::Scientific,
            (_, true) => Notation::Shortest,
            _ => Notation::Fixed,
        };
        let format = Format { flag, width: usize::try_from(width).unwrap_or(0) };
        Ok(AsString { format, notation, precision: usize::try_from(precision).ok() })
    }

    fn float(&self, value: f64) -> Bytes {
        self.format.float(value, self.notation, self.precision).into()
    }

    fn signed(&self, value: i64) -> Bytes {
        self.format.number(value < 0, &value.unsigned_abs().to_string(), true).into()
    }

    /// C's sign flags mean nothing to unsigned numbers.
    fn unsigned(&self, value: u64) -> Bytes {
        let flag = self.format.flag.filter(|flag| !"+ ".contains(*flag));
        Format { flag, ..self.format }.number(false, &value.to_string(), true).into()
    }

    fn texts(&self, tensor: &Tensor, made: &mut StringsMade<'_>) -> Result<()> {
        macro_rules! each {
            ($ty:ty, |$x:ident| $text:expr) => {
                looking(tensor.data::<$ty>()?).try_for_each(|&$x| made.push($text))
            };
        }
        match tensor.dtype() {
            DType::F32 => each!(f32, |x| self.float(f64::from(x))),
            DType::F64 => each!(f64, |x| self.float(x)),
            DType::F16 => each!(f16, |x| self.float(x.to_f64())),
            DType::BF16 => each!(bf16, |x| self.float(x.to_f64())),
            DType::I8 => each!(i8, |x| self.signed(x.into())),
            DType::I16 => each!(i16, |x| self.signed(x.into())),
            DType::I32 => each!(i32, |x| self.signed(x.into())),
            DType::I64 => each!(i64, |x| self.signed(x)),
            DType::U8 => each!(u8, |x| self.unsigned(x.into())),
            DType::U16 => each!(u16, |x| self.unsigned(x.into())),
            DType::U32 => each!(u32, |x| self.unsigned(x.into())),
            DType::U64 => each!(u64, |x| self.unsigned(x)),
            DType::Bool => each!(bool, |x| Bytes::from_static(if x { b"true" } else { b"false" })),
            DType::Str => looking(tensor.strings()?).try_for_each(|text| made.push(self.padded(text))),
            other => Err(Error::unimplemented(format!("AsString does not work on {other}"))),
        }
    }

    fn padded(&self, text: &Bytes) -> Bytes {
        let missing = self.format.width.saturating_sub(text.len());
        if missing == 0 {
            return text.clone();
        }
        let blanks = vec![b' '; missing];
        let parts = if self.format.flag == Some('-') { [text, blanks.as_slice()] } else { [blanks.as_slice(), text] };
        parts.concat().into()
    }
}

impl Kernel for AsString {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let input = ctx.input(0)?;
        let mut made = ctx.strings_made();
        self.texts(input, &mut made)?;
        let out = made.finish(input.shape().clone())?;
        ctx.set_output(0, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::string::words;
    use crate::testing::{OpTest, check_op};

    fn floats() -> OpTest {
        let values =
            [0.0f32, 1.5, -std::f32::consts::PI, 1e10, 1e-7, 123_456.79, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        check_op("AsString").input(values.to_vec())
    }

    #[test]
    fn floats_are_written_as_by_printf() {
        floats().gives(words([
            "0.000000",
            "1.500000",
            "-3.141593",
            "10000000000.000000",
            "0.000000",
            "123456.789062",
            "inf",
            "-inf",
            "nan",
        ]));
        floats().attr("precision", 2i64).gives(words([
            "0.00",
            "1.50",
            "-3.14",
            "10000000000.00",
            "0.00",
            "123456.79",
            "inf",
            "-inf",
            "nan",
        ]));
        floats().attr("scientific", true).gives(words([
            "0.000000e+00",
            "1.500000e+00",
            "-3.141593e+00",
            "1.000000e+10",
            "1.000000e-07",
            "1.234568e+05",
            "inf",
            "-inf",
            "nan",
        ]));
        floats()
            .attr("shortest", true)
            .gives(words(["0", "1.5", "-3.14159", "1e+10", "1e-07", "123457", "inf", "-inf", "nan"]));
        floats()
            .attr("shortest", true)
            .attr("precision", 3i64)
            .gives(words(["0", "1.5", "-3.14", "1e+10", "1e-07", "1.23e+05", "inf", "-inf", "nan"]));
        let few = |width: i64, fill: &str| {
            let test = check_op("AsString").input([1.5f32, -3.25, f32::INFINITY]);
            test.attr("width", width).attr("fill", fill)
        };
        few(12, "0").gives(words(["00001.500000", "-0003.250000", "         inf"]));
        few(12, "-").gives(words(["1.500000    ", "-3.250000   ", "inf         "]));
        few(-1, "+").gives(words(["+1.500000", "-3.250000", "+inf"]));
        few(10, " ").attr("precision", 1i64).gives(words(["       1.5", "      -3.2", "       inf"]));
        check_op("AsString").input([f16::from_f32(0.1)]).gives(words(["0.099976"]));
        check_op("AsString").attr("shortest", true).input([bf16::from_f32(0.1)]).gives(words(["0.100098"]));
        check_op("AsString").input([-0.0f64]).gives(words(["-0.000000"]));
    }

    #[test]
    fn integers_truths_and_strings() {
        let ints =
            |width: i64, fill: &str| check_op("AsString").input([0i32, 42, -7]).attr("width", width).attr("fill", fill);
        ints(-1, "").gives(words(["0", "42", "-7"]));
        ints(6, "").gives(words(["     0", "    42", "    -7"]));
        ints(6, "0").gives(words(["000000", "000042", "-00007"]));
        ints(6, "-").gives(words(["0     ", "42    ", "-7    "]));
        ints(-1, "+").gives(words(["+0", "+42", "-7"]));
        check_op("AsString").input([200u8]).attr("fill", "+").gives(words(["200"]));
        check_op("AsString").input([i64::MIN]).gives(words(["-9223372036854775808"]));
        check_op("AsString").input([u64::MAX]).gives(words(["18446744073709551615"]));
        check_op("AsString").input([true, false]).attr("width", 9i64).gives(words(["true", "false"]));
        check_op("AsString").input(words(["ab", ""])).attr("width", 4i64).gives(words(["  ab", "    "]));
    }

    #[test]
    fn what_cannot_be_asked_for() {
        let test = || check_op("AsString").input([1i32]);
        test().attr("precision", 2i64).fails("precision not supported for datatype int32");
        test().attr("scientific", true).fails("scientific and shortest format not supported for datatype int32");
        let test = || check_op("AsString").input([1.0f32]);
        test().attr("scientific", true).attr("shortest", true).fails("Cannot select both");
        test().attr("fill", "xx").fails("one or fewer characters");
        test().attr("fill", "x").fails("Fill argument not supported: \"x\"");
        test().attr("precision", 1i64 << 40).fails("exceed");
    }
}
