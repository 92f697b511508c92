//! `StringStrip`: strings without the white space around them. `StringLower`, `StringUpper`: in small or large letters.

use bytes::Bytes;
use kolo_core::{Error, Result};
use kolo_graph::{OpDef, Output, shape_fns};

use super::{NO_GRADIENT, map, shown};
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// Strings without white space at either end.
#[track_caller]
pub fn string_strip(strings: Output<'_>) -> Output<'_> {
    strings.graph().op("StringStrip").input(strings).out()
}

/// Strings with the letters A to Z in lower case.
#[track_caller]
pub fn string_lower(strings: Output<'_>) -> Output<'_> {
    strings.graph().op("StringLower").input(strings).out()
}

/// Strings with the letters a to z in upper case.
#[track_caller]
pub fn string_upper(strings: Output<'_>) -> Output<'_> {
    strings.graph().op("StringUpper").input(strings).out()
}

pub(crate) static STRING_STRIP: Op = Op {
    def: OpDef {
        name: "StringStrip",
        signature: "(input:string) -> (output:string)",
        shape: shape_fns::same_as_input_0,
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| map(ctx, |text| Ok(text.slice_ref(stripped(text)))))],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

pub(crate) static STRING_LOWER: Op = Op {
    def: OpDef {
        name: "StringLower",
        signature: "(input:string) -> (output:string) ; encoding:string=\"\"",
        shape: shape_fns::same_as_input_0,
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| change_case(ctx, <[u8]>::to_ascii_lowercase, str::to_lowercase))],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

pub(crate) static STRING_UPPER: Op = Op {
    def: OpDef { name: "StringUpper", ..STRING_LOWER.def },
    kernels: &[cpu_any(|ctx| change_case(ctx, <[u8]>::to_ascii_uppercase, str::to_uppercase))],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

/// White space as C sees it.
pub(super) fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | 0x0b | 0x0c | b'\r')
}

/// Bytes without white space at either end.
pub(super) fn stripped(text: &[u8]) -> &[u8] {
    let Some(first) = text.iter().position(|&byte| !is_space(byte)) else { return &text[..0] };
    let last = text.iter().rposition(|&byte| !is_space(byte)).unwrap_or(first);
    &text[first..=last]
}

fn change_case(ctx: &mut KernelCtx<'_>, bytes: fn(&[u8]) -> Vec<u8>, text: fn(&str) -> String) -> Result<()> {
    match ctx.attrs().str("encoding")? {
        "" => map(ctx, |old| Ok(Bytes::from(bytes(old)))),
        "utf-8" => map(ctx, |old| match std::str::from_utf8(old) {
            Ok(old) => Ok(Bytes::from(text(old))),
            Err(_) => Err(Error::invalid_argument(format!("{:?} is not valid UTF-8", shown(old)))),
        }),
        other => Err(Error::invalid_argument(format!("only utf-8 or '' (no encoding) is supported, received {other}"))),
    }
}

#[cfg(test)]
mod tests {
    use crate::string::words;
    use crate::testing::check_op;

    #[test]
    fn white_space_and_case() {
        let spaces = words([" a b \n", "\t\u{b}\u{c}\r", "", "\u{a0}x"]);
        check_op("StringStrip").input(spaces).gives(words(["a b", "", "", "\u{a0}x"]));
        check_op("StringLower").input(words(["ABCÉ"])).gives(words(["abcÉ"]));
        check_op("StringLower").attr("encoding", "utf-8").input(words(["ABCÉ"])).gives(words(["abcé"]));
        check_op("StringUpper").input(words(["abcé"])).gives(words(["ABCé"]));
        check_op("StringUpper").attr("encoding", "utf-8").input(words(["abcéß"])).gives(words(["ABCÉSS"]));
        check_op("StringLower").attr("encoding", "x").input("A").fails("only utf-8 or ''");
    }
}
