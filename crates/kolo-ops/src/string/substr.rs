//! `Substr`: parts of strings, by position and length.

use bytes::Bytes;
use kolo_core::{Error, PartialShape, Result};
use kolo_graph::{OpDef, Output};

use super::length::begins_character;
use super::{NO_GRADIENT, shown};
use crate::math::elementwise::broadcast_shape;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// `length` bytes of each string from `position` on, which counts from the end if negative.
#[track_caller]
pub fn substr<'g>(strings: Output<'g>, position: Output<'g>, length: Output<'g>) -> Output<'g> {
    strings.graph().op("Substr").inputs([strings, position, length]).out()
}

pub(crate) static SUBSTR: Op = Op {
    def: OpDef {
        name: "Substr",
        signature: "(input:string, pos:T, len:T) -> (output:string) ; T:type{int32,int64}, \
                    unit:string{BYTE|UTF8_CHAR}=\"BYTE\"",
        shape: |ctx| {
            let position: PartialShape = ctx.input(1).merge(ctx.input(2)).map_err(|_| {
                Error::invalid_argument(format!(
                    "pos and len should have the same shape, got: {} vs. {}",
                    ctx.input(1),
                    ctx.input(2)
                ))
            })?;
            Ok(vec![ctx.input(0).broadcast(&position)?])
        },
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (input, pos, len) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    if pos.shape() != len.shape() {
        return Err(Error::invalid_argument(format!(
            "pos and len should have the same shape, got: {} vs. {}",
            pos.shape(),
            len.shape()
        )));
    }
    let by_character = ctx.attrs().str("unit")? == "UTF8_CHAR";
    let shape = broadcast_shape(input.shape(), pos.shape())?;
    let steps = |of: &kolo_core::Shape| -> Vec<usize> {
        let own = crate::array::view::strides(of);
        let missing = shape.rank() - of.rank();
        (0..shape.rank())
            .map(|d| match d.checked_sub(missing) {
                Some(d) if of[d] != 1 => own[d] as usize,
                _ => 0,
            })
            .collect()
    };
    let (text_steps, pos_steps) = (steps(input.shape()), steps(pos.shape()));
    let at = |mut i: usize, steps: &[usize]| -> usize {
        let mut at = 0;
        for (&dim, &step) in shape.iter().zip(steps).rev() {
            at += i % dim * step;
            i /= dim;
        }
        at
    };
    let (texts, positions, lengths) = (input.strings()?, pos.integers()?, len.integers()?);
    let mut out = ctx.strings(shape.n_elements())?;
    for i in 0..shape.n_elements() {
        let (text, p) = (&texts[at(i, &text_steps)], at(i, &pos_steps));
        let part = match by_character {
            true => characters(text, positions[p], lengths[p]),
            false => bytes(text, positions[p], lengths[p]),
        };
        out.push(part.ok_or_else(|| {
            let name = if by_character { String::new() } else { format!(" b'{}'", shown(text)) };
            Error::invalid_argument(format!("pos {} out of range for string{name} at index {i}", positions[p]))
        })?);
    }
    ctx.set_output(0, ctx.string_tensor(shape, out)?);
    Ok(())
}

/// The range of units from `position` on; `None` if that is outside. A negative length goes all the way.
fn range(n: usize, position: i64, length: i64) -> Option<std::ops::Range<usize>> {
    let start = if position < 0 { position.checked_add(n as i64)? } else { position };
    let start = usize::try_from(start).ok().filter(|&start| start <= n)?;
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    Some(start..start.saturating_add(length).min(n))
}

fn bytes(text: &Bytes, position: i64, length: i64) -> Option<Bytes> {
    range(text.len(), position, length).map(|range| text.slice(range))
}

fn characters(text: &Bytes, position: i64, length: i64) -> Option<Bytes> {
    let starts: Vec<usize> = (0..text.len()).filter(|&at| begins_character(text[at])).collect();
    let place = |i: usize| starts.get(i).copied().unwrap_or(text.len());
    range(starts.len(), position, length).map(|range| text.slice(place(range.start)..place(range.end)))
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::string::words;
    use crate::testing::check_op;

    #[test]
    fn parts_are_cut_out() {
        let test = |texts: Tensor, pos: Tensor, len: Tensor| check_op("Substr").input(texts).input(pos).input(len);
        let two = || words(["hello", "world"]);
        let of = Tensor::scalar::<i32>;
        test(two(), of(1), of(3)).gives(words(["ell", "orl"]));
        test(two(), of(-3), of(2)).gives(words(["ll", "rl"]));
        test(two(), [0i64, 5].into(), [9i64, 1].into()).gives(words(["hello", ""]));
        let grid = words(["ab", "cd", "ef", "gh"]).reshaped([2, 2].into()).unwrap();
        test(grid, [0i32, 1].into(), [1i32, 1].into())
            .gives(words(["a", "d", "e", "h"]).reshaped([2, 2].into()).unwrap());
        test(Tensor::string("abcdef"), [0i32, 2].into(), [1i32, 2].into()).gives(words(["a", "cd"]));
        test(two(), of(1), of(-1)).gives(words(["ello", "orld"]));
        test(words(["é中x"]), of(1), of(1)).attr("unit", "UTF8_CHAR").gives(words(["中"]));
        test(words(["é中x"]), of(-2), of(5)).attr("unit", "UTF8_CHAR").gives(words(["中x"]));
        test(words(["hello"]), of(6), of(1)).fails("pos 6 out of range for string b'hello' at index 0");
        test(words(["hello"]), of(-6), of(1)).fails("pos -6 out of range for string b'hello' at index 0");
        test(words(["é"]), of(2), of(1)).attr("unit", "UTF8_CHAR").fails("pos 2 out of range for string at index 0");
        test(words(["hello"]), [1i32, 2].into(), [1i32].into()).fails("pos and len should have the same shape");
    }
}
