//! `StaticRegexFullMatch`: whether strings match a pattern. Every sharded saver of TensorFlow has one, to see whether it
//! writes to an object store.
//!
//! Of the syntax, what such graphs need is understood: characters, `\` before one that means something, `.`, and `*`, `+`
//! or `?` after one of these; `^` first and `$` last. Anything else is refused when the kernel is made.

use kolo_core::{Error, Result, Tensor};
use kolo_graph::{Gradient, OpDef, Output, shape_fns};

use crate::op::{KernelMaker, Op, cpu_made};
use crate::{Cost, Kernel, KernelCtx};

/// For each element of `input`, whether all of it matches `pattern`.
#[track_caller]
pub fn static_regex_full_match<'g>(input: Output<'g>, pattern: &str) -> Output<'g> {
    input.graph().op("StaticRegexFullMatch").input(input).attr("pattern", pattern).out()
}

pub(crate) static STATIC_REGEX_FULL_MATCH: Op = Op {
    def: OpDef {
        name: "StaticRegexFullMatch",
        signature: "(input:string) -> (output:bool) ; pattern:string",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::None("strings are not numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(|init| Ok(Box::new(Pattern::parse(init.attrs().str("pattern")?)?))))],
    cost: Cost::Inline,
};

struct Pattern(Vec<Item>);

struct Item {
    /// `None` matches every character but a line feed.
    byte: Option<u8>,
    may_be_absent: bool,
    may_repeat: bool,
}

impl Pattern {
    fn parse(text: &str) -> Result<Pattern> {
        let refused = |what: char| {
            Error::unimplemented(format!(
                "'{what}' in the pattern '{text}': only characters, ., *, +, ? and \\ are known"
            ))
        };
        let inner = text.strip_prefix('^').unwrap_or(text);
        let is_escaped =
            inner.strip_suffix('$').is_some_and(|rest| rest.chars().rev().take_while(|c| *c == '\\').count() % 2 == 1);
        let inner = if is_escaped { inner } else { inner.strip_suffix('$').unwrap_or(inner) };
        let mut items: Vec<Item> = Vec::new();
        let mut characters = inner.chars();
        while let Some(character) = characters.next() {
            let literal = match character {
                '*' | '+' | '?' => {
                    let last = items.last_mut().filter(|item| !item.may_be_absent && !item.may_repeat);
                    let last = last.ok_or_else(|| refused(character))?;
                    last.may_be_absent = character != '+';
                    last.may_repeat = character != '?';
                    continue;
                }
                '.' => None,
                '\\' => Some(characters.next().filter(char::is_ascii_punctuation).ok_or_else(|| refused('\\'))?),
                '[' | ']' | '(' | ')' | '{' | '}' | '|' | '^' | '$' => return Err(refused(character)),
                other => Some(other),
            };
            match literal {
                None => items.push(Item { byte: None, may_be_absent: false, may_repeat: false }),
                Some(literal) => {
                    let mut buffer = [0; 4];
                    let bytes = literal.encode_utf8(&mut buffer).bytes();
                    items.extend(bytes.map(|byte| Item { byte: Some(byte), may_be_absent: false, may_repeat: false }));
                }
            }
        }
        Ok(Pattern(items))
    }

    /// Keeps the set of items that may come next, so that no pattern takes longer than its length times the text's.
    fn matches(&self, text: &[u8]) -> bool {
        let n = self.0.len();
        let mut next = vec![false; n + 1];
        self.reach(&mut next, 0);
        for &byte in text {
            let now = std::mem::replace(&mut next, vec![false; n + 1]);
            for (i, item) in self.0.iter().enumerate().filter(|(i, _)| now[*i]) {
                if item.byte.map_or(byte != b'\n', |wanted| wanted == byte) {
                    if item.may_repeat {
                        self.reach(&mut next, i);
                    }
                    self.reach(&mut next, i + 1);
                }
            }
        }
        next[n]
    }

    /// Item `from` may come next, and those behind it that are reached without a character.
    fn reach(&self, next: &mut [bool], from: usize) {
        for i in from..=self.0.len() {
            next[i] = true;
            if !self.0.get(i).is_some_and(|item| item.may_be_absent) {
                return;
            }
        }
    }
}

impl Kernel for Pattern {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let input = ctx.input(0)?;
        let found: Vec<bool> = input.strings()?.iter().map(|text| self.matches(text)).collect();
        let output = Tensor::from_vec(input.shape().clone(), found)?;
        ctx.set_output(0, output);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::check_op;

    #[test]
    fn the_saver_s_question() {
        let op = || check_op("StaticRegexFullMatch").attr("pattern", "^s3://.*");
        op().input("s3://bucket/m").gives(true);
        op().input(["/tmp/m", "xs3://", "s3://", "s3:/"]).gives([false, false, true, false]);
    }

    #[test]
    fn small_patterns() {
        let cases = [
            ("", "", true),
            ("", "a", false),
            ("ab*c", "ac", true),
            ("ab*c", "abbbc", true),
            ("ab+c", "ac", false),
            ("ab?c", "abc", true),
            ("ab?c", "abbc", false),
            (".*b.*", "aabaa", true),
            (".*", "a\nb", false),
            ("a\\.b", "a.b", true),
            ("a\\.b", "axb", false),
            ("a\\$", "a$", true),
            ("a$", "a", true),
            ("a*a*a*a*a*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac", false),
        ];
        for (pattern, text, expected) in cases {
            assert_eq!(Pattern::parse(pattern).unwrap().matches(text.as_bytes()), expected, "{pattern} {text}");
        }
        for pattern in ["(a)", "[a]", "a|b", "a{2}", "*a", "a**", "\\d", "\\", "a^b"] {
            assert!(Pattern::parse(pattern).is_err(), "{pattern}");
        }
    }
}
