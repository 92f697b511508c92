//! `RegexFullMatch`, `RegexReplace` and their forms with a constant pattern: regular expressions in RE2's syntax.

use std::sync::Arc;

use bytes::Bytes;
use kolo_core::{DType, Error, Result};
use kolo_device::cpu::stop_if_asked;
use kolo_graph::{OpDef, Output, shape_fns};
use parking_lot::Mutex;
use regex::bytes::Regex;

use super::re2::compile;
use super::{NO_GRADIENT, scalar};
use crate::op::{Gpu, KernelMaker, Op, cpu_made};
use crate::{Cost, Kernel, KernelCtx, KernelInit};

/// For each string, whether all of it matches `pattern`.
#[track_caller]
pub fn static_regex_full_match<'g>(strings: Output<'g>, pattern: &str) -> Output<'g> {
    strings.graph().op("StaticRegexFullMatch").input(strings).attr("pattern", pattern).out()
}

/// Strings with every match of `pattern` replaced; `\1` in the replacement stands for what the first group matched.
#[track_caller]
pub fn static_regex_replace<'g>(strings: Output<'g>, pattern: &str, rewrite: &str) -> Output<'g> {
    strings.graph().op("StaticRegexReplace").input(strings).attr("pattern", pattern).attr("rewrite", rewrite).out()
}

pub(crate) static REGEX_FULL_MATCH: Op = Op {
    def: OpDef {
        name: "RegexFullMatch",
        signature: "(input:string, pattern:string) -> (output:bool)",
        shape: |ctx| {
            ctx.input_of_rank(1, 0)?;
            shape_fns::same_as_input_0(ctx)
        },
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(|_| Ok(Box::new(FullMatch(Pattern::from_input(true))))))],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

pub(crate) static STATIC_REGEX_FULL_MATCH: Op = Op {
    def: OpDef {
        name: "StaticRegexFullMatch",
        signature: "(input:string) -> (output:bool) ; pattern:string",
        shape: shape_fns::same_as_input_0,
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(|init| Ok(Box::new(FullMatch(Pattern::from_attr(init, true)?)))))],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

pub(crate) static REGEX_REPLACE: Op = Op {
    def: OpDef {
        name: "RegexReplace",
        signature: "(input:string, pattern:string, rewrite:string) -> (output:string) ; replace_global:bool=true",
        shape: |ctx| {
            ctx.input_of_rank(1, 0)?;
            ctx.input_of_rank(2, 0)?;
            shape_fns::same_as_input_0(ctx)
        },
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(|_| {
        Ok(Box::new(Replace { pattern: Pattern::from_input(false), rewrite: None }))
    }))],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

pub(crate) static STATIC_REGEX_REPLACE: Op = Op {
    def: OpDef {
        name: "StaticRegexReplace",
        signature: "(input:string) -> (output:string) ; pattern:string, rewrite:string, replace_global:bool=true",
        shape: shape_fns::same_as_input_0,
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(|init| {
        let rewrite = init.attrs().str("rewrite")?.as_bytes().to_vec();
        Ok(Box::new(Replace { pattern: Pattern::from_attr(init, false)?, rewrite: Some(rewrite) }))
    }))],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

/// A pattern that is given once, or with every call: then the last one is kept, since it is usually the same.
enum Pattern {
    Fixed(Arc<Regex>),
    Given { anchored: bool, last: Mutex<Option<(Bytes, Arc<Regex>)>> },
}

impl Pattern {
    fn from_input(anchored: bool) -> Pattern {
        Pattern::Given { anchored, last: Mutex::new(None) }
    }

    fn from_attr(init: &KernelInit<'_>, anchored: bool) -> Result<Pattern> {
        let pattern = init.attrs().str("pattern")?;
        Ok(Pattern::Fixed(Arc::new(compile(pattern.as_bytes(), anchored)?)))
    }

    fn get(&self, ctx: &KernelCtx<'_>) -> Result<Arc<Regex>> {
        let (anchored, last) = match self {
            Pattern::Fixed(regex) => return Ok(regex.clone()),
            Pattern::Given { anchored, last } => (*anchored, last),
        };
        let pattern = scalar(ctx, 1, "Pattern")?;
        if let Some((text, regex)) = &*last.lock()
            && text == pattern
        {
            return Ok(regex.clone());
        }
        let regex = Arc::new(compile(pattern, anchored)?);
        *last.lock() = Some((pattern.clone(), regex.clone()));
        Ok(regex)
    }
}

struct FullMatch(Pattern);

impl Kernel for FullMatch {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let regex = self.0.get(ctx)?;
        let input = ctx.input(0)?;
        let mut out = ctx.allocate(DType::Bool, input.shape().clone())?;
        for (to, text) in out.data_mut::<bool>()?.iter_mut().zip(input.strings()?) {
            stop_if_asked();
            *to = regex.is_match(text);
        }
        ctx.set_output(0, out);
        Ok(())
    }
}

struct Replace {
    pattern: Pattern,
    /// `None` if it comes with every call.
    rewrite: Option<Vec<u8>>,
}

impl Kernel for Replace {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let regex = self.pattern.get(ctx)?;
        let rewrite = match &self.rewrite {
            Some(rewrite) => rewrite.clone(),
            None => scalar(ctx, 2, "Rewrite")?.to_vec(),
        };
        let pieces = pieces(&rewrite)?;
        let most = pieces.iter().filter_map(|piece| if let Piece::Group(n) = piece { Some(*n) } else { None }).max();
        // RE2 changes nothing if the rewrite names a group that the pattern does not have.
        if most.is_some_and(|most| most >= regex.captures_len()) {
            return ctx.forward(0, 0);
        }
        let limit = if ctx.attrs().bool("replace_global")? { usize::MAX } else { 1 };
        let input = ctx.input(0)?.clone();
        let (pieces, regex) = (&pieces, &*regex);
        let mut replaced = ctx.strings_made();
        for text in input.strings()? {
            if !regex.is_match(text) {
                replaced.push_part(text.clone())?;
                continue;
            }
            // The bytes before each match and its rewrite; at last the bytes after all matches. A short rewrite may make
            // a text many times as long, so it is measured before it is made.
            let text: &[u8] = text;
            let made = ctx.texts(1, |_| {
                let mut after = 0;
                let matches = regex.captures_iter(text).take(limit).map(Some).chain(std::iter::once(None));
                matches.flat_map(move |found| {
                    let whole = found.as_ref().and_then(|found| found.get(0));
                    let whole = whole.map_or(text.len()..text.len(), |whole| whole.range());
                    let before = &text[std::mem::replace(&mut after, whole.end)..whole.start];
                    let rewritten = pieces.iter().map(move |piece| match (&found, piece) {
                        (None, _) => &[][..],
                        (Some(_), Piece::Bytes(bytes)) => bytes,
                        (Some(found), Piece::Group(n)) => found.get(*n).map_or(&[][..], |group| group.as_bytes()),
                    });
                    std::iter::once(before).chain(rewritten)
                })
            })?;
            made.into_iter().try_for_each(|text| replaced.push_made(text))?;
        }
        let replaced = replaced.finish(input.shape().clone())?;
        ctx.set_output(0, replaced);
        Ok(())
    }
}

/// A part of a rewrite.
enum Piece {
    Bytes(Vec<u8>),
    Group(usize),
}

fn pieces(rewrite: &[u8]) -> Result<Vec<Piece>> {
    let mut pieces = Vec::new();
    let mut bytes = Vec::new();
    let mut rest = rewrite.iter();
    while let Some(&byte) = rest.next() {
        match byte {
            b'\\' => match rest.next() {
                Some(digit @ b'0'..=b'9') => {
                    pieces.push(Piece::Bytes(std::mem::take(&mut bytes)));
                    pieces.push(Piece::Group(usize::from(digit - b'0')));
                }
                Some(b'\\') => bytes.push(b'\\'),
                _ => {
                    return Err(Error::invalid_argument(format!(
                        "Invalid rewrite: {}: a backslash must be followed by a digit or another one",
                        String::from_utf8_lossy(rewrite)
                    )));
                }
            },
            _ => bytes.push(byte),
        }
    }
    pieces.push(Piece::Bytes(bytes));
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use crate::string::words;
    use crate::testing::{Evaluation, OpTest, check_op};

    #[test]
    fn whole_strings_match() {
        let test =
            |texts: kolo_core::Tensor, pattern: &'static str| check_op("RegexFullMatch").input(texts).input(pattern);
        test(words(["abc", "abcd", "ABC", ""]), "a.c").gives([true, false, false, false]);
        // Only ASCII digits, letters and blanks.
        test(words(["٣", "3", "é", "x y", "x\ny"]), r"\d|\w|x\sy").gives([false, true, false, true, true]);
        test(words(["a[", "&&", "~", "-"]), r"a\[|[&]+|[~-]").gives([true, true, true, true]);
        test(words(["a.b", "axb"]), r"\Qa.b\E").gives([true, false]);
        test(words(["[", "]", "a"]), "[[]|[]]").gives([true, true, false]);
        test(words(["a1_", "a-", "é"]), r"[\w]+|a[^\d]").gives([true, true, false]);
        test(words(["ab", "AB"]), "(?i)ab").gives([true, true]);
        test(words(["ab", "a b"]), r"a\b.b").gives([false, true]);
        test(words(["x", "7"]), "[[:alpha:]]").gives([true, false]);
        test(words(["a"]), "a(").fails("Invalid pattern: a(, error: ");
        test(words(["a"]), "(?=a)").fails("Invalid pattern: (?=a), error: ");
        check_op("RegexFullMatch").input(words(["a"])).input(words(["a", "b"])).fails("rank 0");
        let fixed =
            |pattern: &str| check_op("StaticRegexFullMatch").attr("pattern", pattern).input(words(["s3://x", "/x"]));
        fixed("^s3://.*").gives([true, false]);
        fixed("a(").fails("Invalid pattern");
    }

    /// Each of them is too short for a block of the device's memory.
    #[test]
    fn short_replacements_count() {
        let g = crate::graph();
        let texts = g.op("Fill").input(g.constant([1000])).input(g.constant("a")).out();
        let replaced = super::static_regex_replace(texts, "a", &"b".repeat(4000));
        let run = Evaluation::new(g.snapshot());
        assert_eq!(run.run(&[replaced], &[]).unwrap()[0].strings().unwrap()[999].len(), 4000);
        assert!(run.memory().peak >= 4_000_000, "{:?}", run.memory());
    }

    #[test]
    fn matches_are_replaced() {
        let test = |texts: kolo_core::Tensor, pattern: &'static str, rewrite: &'static str| -> OpTest {
            check_op("RegexReplace").input(texts).input(pattern).input(rewrite)
        };
        test(words(["aa", "ab ba", "baac", ""]), "a*", "-").gives(words(["-", "-b- -b-", "-b-c-", "-"]));
        test(words(["aaa", "bab"]), "a", "x").attr("replace_global", false).gives(words(["xaa", "bxb"]));
        test(words(["john smith"]), r"(\w+) (\w+)", r"\2, \1 \0 \\").gives(words(["smith, john john smith \\"]));
        test(words(["john"]), r"(\w+)", r"\2").gives(words(["john"]));
        test(words(["john"]), r"(\w+)", r"\x").fails("Invalid rewrite");
        test(words(["john"]), "(", "x").fails("Invalid pattern");
        check_op("StaticRegexReplace")
            .attr("pattern", "X")
            .attr("rewrite", "$1")
            .input(words(["aXbX"]))
            .gives(words(["a$1b$1"]));
    }
}
