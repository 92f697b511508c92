//! `StringLength`: how many bytes, or characters, strings have.

use kolo_core::{DType, Error, Result};
use kolo_device::cpu::stop_if_asked;
use kolo_graph::{OpDef, Output, shape_fns};

use super::NO_GRADIENT;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// How many bytes each string has.
#[track_caller]
pub fn string_length(strings: Output<'_>) -> Output<'_> {
    strings.graph().op("StringLength").input(strings).out()
}

pub(crate) static STRING_LENGTH: Op = Op {
    def: OpDef {
        name: "StringLength",
        signature: "(input:string) -> (output:int32) ; unit:string{BYTE|UTF8_CHAR}=\"BYTE\"",
        shape: shape_fns::same_as_input_0,
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

/// Whether a byte begins a character, in UTF-8 or in what is taken for it.
pub(super) fn begins_character(byte: u8) -> bool {
    byte & 0xc0 != 0x80
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let by_character = ctx.attrs().str("unit")? == "UTF8_CHAR";
    let mut out = ctx.allocate(DType::I32, ctx.input(0)?.shape().clone())?;
    let strings = ctx.input(0)?.strings()?;
    for (y, text) in out.data_mut::<i32>()?.iter_mut().zip(strings) {
        stop_if_asked();
        let n = if by_character { text.iter().filter(|&&byte| begins_character(byte)).count() } else { text.len() };
        *y = i32::try_from(n).map_err(|_| Error::out_of_range(format!("a string of {n} units")))?;
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::string::words;
    use crate::testing::check_op;

    #[test]
    fn lengths() {
        check_op("StringLength").input(words(["", "ab", "é中"])).gives([0i32, 2, 5]);
        check_op("StringLength").attr("unit", "UTF8_CHAR").input(words(["", "ab", "é中"])).gives([0i32, 2, 2]);
        let broken = Tensor::string(bytes::Bytes::from_static(b"\xff\x80a"));
        check_op("StringLength").attr("unit", "UTF8_CHAR").input(broken).gives(2i32);
        check_op("StringLength").attr("unit", "WORD").input("a").fails("unit");
    }
}
