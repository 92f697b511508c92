//! `StringSplit` and `StringSplitV2`: strings cut into words, as a sparse matrix with a row for each string.

use bytes::Bytes;
use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_graph::{InferCtx, OpDef, Output};

use super::strip::is_space;
use super::{NO_GRADIENT, scalar};
use crate::memory::room;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The words of each string of a vector, cut at `separator`, or at white space if that is empty: coordinates, words and
/// shape of a sparse matrix.
#[track_caller]
pub fn string_split<'g>(strings: Output<'g>, separator: &str) -> [Output<'g>; 3] {
    let graph = strings.graph();
    let separator = graph.constant(Tensor::string(separator.to_owned()));
    let op = graph.op("StringSplitV2").input(strings).input(separator).build();
    [0, 1, 2].map(|i| op.output(i))
}

pub(crate) static STRING_SPLIT: Op = Op {
    def: OpDef {
        name: "StringSplit",
        signature: "(input:string, delimiter:string) -> (indices:int64, values:string, shape:int64) ; \
                    skip_empty:bool=true",
        shape: infer,
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

pub(crate) static STRING_SPLIT_V2: Op = Op {
    def: OpDef {
        name: "StringSplitV2",
        signature: "(input:string, sep:string) -> (indices:int64, values:string, shape:int64) ; maxsplit:int=-1",
        shape: infer,
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_v2)],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    ctx.input_of_rank(0, 1)?;
    ctx.input_of_rank(1, 0)?;
    Ok(vec![PartialShape::new(&[None, Some(2)]), PartialShape::of_rank(1), PartialShape::from([2usize])])
}

/// Is told of each word. They are asked for one by one: a word takes far more than its text, if that is one byte.
type Words<'a> = &'a mut dyn FnMut(Bytes) -> Result<()>;

/// Sets the outputs to the words that `cut` finds in each string.
fn split(ctx: &mut KernelCtx<'_>, cut: impl Fn(&Bytes, Words<'_>) -> Result<()>) -> Result<()> {
    let input = ctx.input(0)?;
    let &[n] = input.shape().dims() else {
        return Err(Error::invalid_argument(format!("input must be a vector, got shape: {}", input.shape())));
    };
    let mut values = ctx.strings_made();
    let mut lengths: Vec<usize> = room(n, "lengths of lists of words")?;
    for text in input.strings()? {
        let before = values.len();
        cut(text, &mut |word| values.push_part(word))?;
        lengths.push(values.len() - before);
    }
    let n_words = values.len();
    let values = values.finish(Shape::new(&[n_words])?)?;
    let mut indices = ctx.allocate(DType::I64, Shape::new(&[n_words, 2])?)?;
    let places = lengths.iter().enumerate().flat_map(|(row, &n)| (0..n).map(move |column| [row, column]));
    for (to, place) in indices.data_mut::<i64>()?.chunks_exact_mut(2).zip(places) {
        to.copy_from_slice(&place.map(|at| at as i64));
    }
    let most = lengths.into_iter().max().unwrap_or(0);
    ctx.set_output(0, indices);
    ctx.set_output(1, values);
    ctx.set_output(2, Tensor::from([n as i64, most as i64]));
    Ok(())
}

fn delimiter(ctx: &KernelCtx<'_>, what: &str) -> Result<Bytes> {
    scalar(ctx, 1, what).cloned().map_err(|_| match ctx.input(1) {
        Ok(input) => Error::invalid_argument(format!("{what} must be a scalar, got shape: {}", input.shape())),
        Err(error) => error,
    })
}

/// Cut at each byte that the delimiter has, or at all bytes if it has none.
fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let skip_empty = ctx.attrs().bool("skip_empty")?;
    let delimiter = delimiter(ctx, "delimiter")?;
    split(ctx, |text, words| {
        // A string that is empty has no words at all.
        if text.is_empty() {
            return Ok(());
        }
        if delimiter.is_empty() {
            return (0..text.len()).try_for_each(|at| words(text.slice(at..at + 1)));
        }
        let mut found = text.split(|byte| delimiter.contains(byte)).filter(|word| !(skip_empty && word.is_empty()));
        found.try_for_each(|word| words(text.slice_ref(word)))
    })
}

/// Cut as Python's `str.split` does.
fn forward_v2(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let most = usize::try_from(ctx.attrs().int("maxsplit")?).unwrap_or(usize::MAX);
    let separator = delimiter(ctx, "sep")?;
    split(ctx, |text, words| match separator.is_empty() {
        true => at_spaces(text, most, words),
        false => at_separator(text, &separator, most, words),
    })
}

fn at_spaces(text: &Bytes, most: usize, words: Words<'_>) -> Result<()> {
    // Without any cut, TensorFlow leaves the string as it is.
    if most == 0 {
        return words(text.clone());
    }
    let (mut n, mut rest) = (0, text.as_ref());
    loop {
        let Some(start) = rest.iter().position(|&byte| !is_space(byte)) else { return Ok(()) };
        rest = &rest[start..];
        let end = rest.iter().position(|&byte| is_space(byte)).unwrap_or(rest.len());
        words(text.slice_ref(&rest[..end]))?;
        n += 1;
        rest = &rest[end..];
        if n == most {
            // What is left follows as it is, even if it is nothing: so does TensorFlow, and not Python.
            let start = rest.iter().position(|&byte| !is_space(byte)).unwrap_or(rest.len());
            return words(text.slice_ref(&rest[start..]));
        }
    }
}

fn at_separator(text: &Bytes, separator: &[u8], most: usize, words: Words<'_>) -> Result<()> {
    let (mut n, mut rest) = (0, text.as_ref());
    while n < most
        && let Some(at) = rest.windows(separator.len()).position(|window| window == separator)
    {
        words(text.slice_ref(&rest[..at]))?;
        n += 1;
        rest = &rest[at + separator.len()..];
    }
    words(text.slice_ref(rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::string::words;
    use crate::testing::{check_op, tensor};

    #[test]
    fn words_are_cut_at_any_of_some_bytes() {
        check_op("StringSplit").input(words(["hello world", "a b c", "", " x "])).input(" ").gives_all([
            Tensor::from([[0i64, 0], [0, 1], [1, 0], [1, 1], [1, 2], [3, 0]]),
            words(["hello", "world", "a", "b", "c", "x"]),
            Tensor::from([4i64, 3]),
        ]);
        check_op("StringSplit").attr("skip_empty", false).input(words(["a,b;c", ",", ""])).input(",;").gives_all([
            Tensor::from([[0i64, 0], [0, 1], [0, 2], [1, 0], [1, 1]]),
            words(["a", "b", "c", "", ""]),
            Tensor::from([3i64, 3]),
        ]);
        check_op("StringSplit").input(words(["ab", "c"])).input("").gives_all([
            Tensor::from([[0i64, 0], [0, 1], [1, 0]]),
            words(["a", "b", "c"]),
            Tensor::from([2i64, 2]),
        ]);
        check_op("StringSplit").input(words([])).input(" ").gives_all([
            tensor::<i64, 2>([0, 2], []),
            words([]),
            Tensor::from([0i64, 0]),
        ]);
        check_op("StringSplit").input("ab").input(" ").fails("rank 1");
        check_op("StringSplit").input(words(["ab"])).input(words(["a", "b"])).fails("rank 0");
    }

    #[test]
    fn words_are_cut_as_in_python() {
        let test = |texts: Tensor, separator: &'static str, most: i64| {
            check_op("StringSplitV2").attr("maxsplit", most).input(texts).input(separator)
        };
        test(words(["hello  world", " a b c ", ""]), "", -1).gives_all([
            Tensor::from([[0i64, 0], [0, 1], [1, 0], [1, 1], [1, 2]]),
            words(["hello", "world", "a", "b", "c"]),
            Tensor::from([3i64, 3]),
        ]);
        test(words(["a<>b<><>c", "", "<>"]), "<>", -1).gives_all([
            Tensor::from([[0i64, 0], [0, 1], [0, 2], [0, 3], [1, 0], [2, 0], [2, 1]]),
            words(["a", "b", "", "c", "", "", ""]),
            Tensor::from([3i64, 4]),
        ]);
        let cut = |text: &'static str, separator: &'static str, most: i64| {
            test(words([text]), separator, most).run(false).unwrap().remove(1)
        };
        assert_eq!(cut("a,b,c,d", ",", 2), words(["a", "b", "c,d"]));
        assert_eq!(cut("  a  b  c  ", "", 1), words(["a", "b  c  "]));
        assert_eq!(cut("d", "", 1), words(["d", ""]));
        assert_eq!(cut(" a b ", "", 0), words([" a b "]));
        assert_eq!(cut("a,b", ",", 0), words(["a,b"]));
    }
}
