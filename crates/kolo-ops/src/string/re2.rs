//! RE2's dialect of regular expressions, for which TensorFlow's patterns are written, in terms of the `regex` crate's. Both
//! match in linear time; the spelling differs little:
//!
//! - `\d`, `\w`, `\s` and `\b` know ASCII only;
//! - `\Q…\E` quotes;
//! - inside of brackets `[`, `&&`, `--` and `~~` mean nothing special.

use kolo_core::{Error, Result};
use regex::bytes::{Regex, RegexBuilder};

/// A pattern as TensorFlow reads it.
pub(super) fn compile(pattern: &[u8], anchored: bool) -> Result<Regex> {
    let bad = |why: &str| {
        let pattern = String::from_utf8_lossy(pattern);
        Error::invalid_argument(format!("Invalid pattern: {pattern}, error: {why}"))
    };
    let text = std::str::from_utf8(pattern).map_err(|_| bad("invalid UTF-8"))?;
    let translated = translate(text);
    let whole = if anchored { format!(r"\A(?:{translated})\z") } else { translated };
    RegexBuilder::new(&whole).build().map_err(|error| {
        // The last line of the crate's message says what is wrong; the others draw where.
        let text = error.to_string();
        bad(text.lines().last().unwrap_or("malformed").trim_start_matches("error: "))
    })
}

fn translate(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let mut rest = pattern.chars().peekable();
    // Inside of brackets, and whether a closing one would still be an ordinary character there.
    let (mut in_class, mut at_start) = (false, false);
    while let Some(c) = rest.next() {
        let starts = std::mem::replace(&mut at_start, false);
        match (c, in_class) {
            ('\\', _) => match rest.next() {
                Some('d') => out.push_str(if in_class { "0-9" } else { "[0-9]" }),
                Some('w') => out.push_str(if in_class { "0-9A-Za-z_" } else { "[0-9A-Za-z_]" }),
                Some('s') => out.push_str(if in_class { r"\t\n\f\r " } else { r"[\t\n\f\r ]" }),
                Some('D') => out.push_str("[^0-9]"),
                Some('W') => out.push_str("[^0-9A-Za-z_]"),
                Some('S') => out.push_str(r"[^\t\n\f\r ]"),
                Some('b') if !in_class => out.push_str(r"(?-u:\b)"),
                Some('B') if !in_class => out.push_str(r"(?-u:\B)"),
                Some('Q') => quote(&mut rest, &mut out),
                Some(other) => out.extend(['\\', other]),
                None => out.push('\\'),
            },
            ('[', false) => {
                in_class = true;
                at_start = true;
                out.push('[');
                if rest.peek() == Some(&'^') {
                    rest.next();
                    out.push('^');
                }
            }
            (']', true) if starts => out.push_str(r"\]"),
            (']', true) => {
                in_class = false;
                out.push(']');
            }
            ('[', true) if rest.peek() == Some(&':') => {
                // `[:alpha:]`, up to its own end.
                out.push('[');
                for c in rest.by_ref() {
                    out.push(c);
                    if c == ']' {
                        break;
                    }
                }
            }
            ('[' | '&' | '~', true) => out.extend(['\\', c]),
            ('-', true) if rest.peek() == Some(&'-') => out.push_str(r"\-"),
            _ => out.push(c),
        }
    }
    out
}

/// Copies up to `\E` so that nothing in it means anything.
fn quote(rest: &mut std::iter::Peekable<std::str::Chars<'_>>, out: &mut String) {
    while let Some(c) = rest.next() {
        if c == '\\' && rest.peek() == Some(&'E') {
            rest.next();
            return;
        }
        out.push_str(&regex::escape(c.encode_utf8(&mut [0; 4])));
    }
}
