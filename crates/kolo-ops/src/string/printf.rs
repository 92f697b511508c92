//! Numbers as C's `printf` writes them.

/// How to write a float.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notation {
    /// `%f`.
    Fixed,
    /// `%e`.
    Scientific,
    /// `%g`.
    Shortest,
}

/// The part of a format before the letter: `%`, flag, width.
#[derive(Clone, Copy, Debug, Default)]
pub struct Format {
    /// `0`, `-`, `+` or a blank, if any.
    pub flag: Option<char>,
    /// The least number of characters.
    pub width: usize,
}

impl Format {
    /// A number's digits with its sign, filled up to the width. Only finite numbers are filled with zeros.
    pub fn number(self, is_negative: bool, digits: &str, is_finite: bool) -> String {
        let sign = match (is_negative, self.flag) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            _ => "",
        };
        let missing = self.width.saturating_sub(sign.len() + digits.len());
        if self.flag == Some('0') && is_finite {
            return filled(self.width, sign, '0', missing, digits);
        }
        self.text(&format!("{sign}{digits}"))
    }

    /// A text, filled with blanks up to the width.
    pub fn text(self, text: &str) -> String {
        let missing = self.width.saturating_sub(text.len());
        if self.flag == Some('-') {
            filled(self.width, text, ' ', missing, "")
        } else {
            filled(self.width, "", ' ', missing, text)
        }
    }

    /// A float.
    pub fn float(self, value: f64, notation: Notation, precision: Option<usize>) -> String {
        let (negative, value) = (value.is_sign_negative() && !value.is_nan(), value.abs());
        if !value.is_finite() {
            return self.number(negative, if value.is_nan() { "nan" } else { "inf" }, false);
        }
        let precision = precision.unwrap_or(6);
        let digits = match notation {
            Notation::Fixed => format!("{value:.precision$}"),
            Notation::Scientific => scientific(value, precision),
            Notation::Shortest => shortest(value, precision.max(1)),
        };
        self.number(negative, &digits, true)
    }
}

/// Pieces with `n` times the same byte between them, in a text of `width` or more that is made at once: one that grows would
/// leave holes of its own size.
fn filled(width: usize, first: &str, byte: char, n: usize, last: &str) -> String {
    let mut text = String::with_capacity(width.max(first.len() + n + last.len()));
    text.push_str(first);
    text.extend(std::iter::repeat_n(byte, n));
    text.push_str(last);
    text
}

/// Digits and exponent of `%e`.
fn parts(value: f64, precision: usize) -> (String, i32) {
    let text = format!("{value:.precision$e}");
    match text.split_once('e') {
        Some((digits, exponent)) => (digits.to_owned(), exponent.parse().unwrap_or(0)),
        None => (text, 0),
    }
}

fn scientific(value: f64, precision: usize) -> String {
    let (digits, exponent) = parts(value, precision);
    with_exponent(&digits, exponent)
}

fn with_exponent(digits: &str, exponent: i32) -> String {
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// The shorter of both notations, with so many significant digits, and without zeros at the end.
fn shortest(value: f64, precision: usize) -> String {
    let (digits, exponent) = parts(value, precision - 1);
    let trimmed = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    if exponent < -4 || exponent >= precision as i32 {
        return with_exponent(&trimmed(&digits), exponent);
    }
    let after = (precision as i32 - 1 - exponent).max(0) as usize;
    trimmed(&format!("{value:.after$}"))
}
