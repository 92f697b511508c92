//! Numbers: read as protobuf reads them, written as Python writes them.

/// The value of an integer token: decimal, octal (`017`) or hexadecimal (`0x1F`).
pub(super) fn parse_integer(token: &str) -> Option<u64> {
    // `from_str_radix` takes a leading `+`, which no token has.
    let (digits, radix) = match token.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&token[2..], 16),
        [b'0', _, ..] => (&token[1..], 8),
        _ => (token, 10),
    };
    u64::from_str_radix(digits, radix).ok()
}

/// The value of a float token, which may be an integer and may end in `f`.
pub(super) fn parse_float(token: &str) -> Option<f64> {
    // As in Python, `010.5` is refused: it could be meant as octal.
    if let [b'0', b'0'..=b'9', ..] = token.as_bytes() {
        return None;
    }
    token.strip_suffix(['f', 'F']).unwrap_or(token).parse().ok()
}

/// The value of a word that stands for a float: `inf`, `infinity` or `nan` in any case, with or without an `f`.
pub(super) fn parse_float_word(word: &str) -> Option<f64> {
    let lower = word.to_ascii_lowercase();
    match lower.as_str() {
        "inf" | "inff" | "infinity" | "infinityf" => Some(f64::INFINITY),
        "nan" | "nanf" => Some(f64::NAN),
        _ => None,
    }
}

/// A double as Python's `repr` writes it: the fewest digits that read back as the same number.
pub(super) fn print_double(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').expect("`{:e}` writes an exponent of every finite number");
    let exponent: i32 = exponent.parse().expect("`{:e}` writes the exponent in digits");
    if (-4..16).contains(&exponent) {
        return format!("{value:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}

/// A float as Python's text format writes it: rounded to the fewest digits, but at least six, that read back as the
/// same float. These are not always the fewest of all: the least float is `1.4013e-45`, not `1e-45`.
pub(super) fn print_float(value: f32) -> String {
    let exact = f64::from(value);
    if !value.is_finite() {
        return print_double(exact);
    }
    (6..=9)
        .filter_map(|n_digits| format!("{exact:.*e}", n_digits - 1).parse::<f64>().ok())
        // Rust's `as` rounds to nearest, as the readers do that parse a double and store a float.
        .find(|&rounded| rounded as f32 == value)
        .map_or_else(|| print_double(exact), print_double)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_have_three_bases() {
        assert_eq!(parse_integer("0"), Some(0));
        assert_eq!(parse_integer("017"), Some(15));
        assert_eq!(parse_integer("0xfF"), Some(255));
        assert_eq!(parse_integer("18446744073709551615"), Some(u64::MAX));
        for bad in ["18446744073709551616", "08", "0x", "1.0", "1f", "1_0", "."] {
            assert_eq!(parse_integer(bad), None, "{bad}");
        }
    }

    #[test]
    fn floats_are_read() {
        for (token, value) in [("1", 1.0), ("1.", 1.0), (".5", 0.5), ("1e-3f", 1e-3), ("0.5F", 0.5), ("1E+2", 100.0)] {
            assert_eq!(parse_float(token), Some(value), "{token}");
        }
        for bad in [".", "01", "0x1", "1ff", "1e", "e", "f"] {
            assert_eq!(parse_float(bad), None, "{bad}");
        }
    }

    #[test]
    fn doubles_are_written_like_python() {
        for (value, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-1.25e-7, "-1.25e-07"),
            (0.1, "0.1"),
            (9007199254740993.0, "9007199254740992.0"),
            (5e-324, "5e-324"),
            (f64::MAX, "1.7976931348623157e+308"),
            (-f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(print_double(value), text);
        }
    }

    #[test]
    fn floats_are_written_like_python() {
        for (value, text) in [
            (0.1, "0.1"),
            (1.0 / 3.0, "0.33333334"),
            (16777216.0, "16777216.0"),
            (1e-45, "1.4013e-45"),
            (f32::MIN_POSITIVE, "1.1754944e-38"),
            (f32::MAX, "3.4028235e+38"),
            (-0.0, "-0.0"),
            (1e-4, "0.0001"),
            (f32::INFINITY, "inf"),
        ] {
            assert_eq!(print_float(value), text);
        }
    }
}
