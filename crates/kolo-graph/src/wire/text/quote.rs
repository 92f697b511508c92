//! Quoted strings: escapes in, escapes out.

use std::fmt::Write;

/// Appends what a quoted string stands for. The error is the byte offset of the bad escape in `inner` and what is
/// wrong with it.
pub(super) fn unescape(inner: &str, out: &mut Vec<u8>) -> Result<(), (usize, &'static str)> {
    let mut rest = inner;
    while let Some(at) = rest.find('\\') {
        out.extend_from_slice(&rest.as_bytes()[..at]);
        let escape = &rest[at..];
        let n_bytes = unescape_one(escape, out).map_err(|what| (inner.len() - escape.len(), what))?;
        rest = &escape[n_bytes..];
    }
    out.extend_from_slice(rest.as_bytes());
    Ok(())
}

/// Appends `bytes` as Python's text format does: printable ASCII as it is, the rest in octal.
pub(super) fn escape(bytes: &[u8], out: &mut String) {
    for &byte in bytes {
        match byte {
            b'\t' => out.push_str("\\t"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'"' | b'\'' | b'\\' => out.extend(['\\', char::from(byte)]),
            b' '..=b'~' => out.push(char::from(byte)),
            _ => write!(out, "\\{byte:03o}").expect("writing to a String succeeds"),
        }
    }
}

/// Appends what the escape at the start of `text` stands for and returns its length.
fn unescape_one(text: &str, out: &mut Vec<u8>) -> Result<usize, &'static str> {
    let bytes = text.as_bytes();
    let simple = match bytes.get(1) {
        Some(b'a') => 0x07,
        Some(b'b') => 0x08,
        Some(b'f') => 0x0c,
        Some(b'n') => b'\n',
        Some(b'r') => b'\r',
        Some(b't') => b'\t',
        Some(b'v') => 0x0b,
        Some(&byte @ (b'?' | b'\'' | b'"' | b'\\')) => byte,
        Some(b'0'..=b'7') => {
            let (value, n_digits) = digits(&bytes[1..], 8, 3);
            out.push(u8::try_from(value).map_err(|_| "octal escape is above \\377")?);
            return Ok(1 + n_digits);
        }
        Some(b'x' | b'X') => {
            let (value, n_digits) = digits(&bytes[2..], 16, 2);
            if n_digits == 0 {
                return Err("\\x needs a hexadecimal digit");
            }
            out.push(u8::try_from(value).map_err(|_| "hexadecimal escape is above \\xff")?);
            return Ok(2 + n_digits);
        }
        Some(b'u' | b'U') => {
            let (character, n_bytes) = unicode(text)?;
            out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
            return Ok(n_bytes);
        }
        Some(_) | None => return Err("unknown escape"),
    };
    out.push(simple);
    Ok(2)
}

/// The character a `\uXXXX`, a `\UXXXXXXXX` or a pair of `\u` surrogates stands for, and the length of all that.
fn unicode(text: &str) -> Result<(char, usize), &'static str> {
    const BAD: &str = "\\u and \\U need 4 and 8 hexadecimal digits of a Unicode character";
    let (value, n_bytes) = code_unit(text).ok_or(BAD)?;
    if let Some(character) = char::from_u32(value) {
        return Ok((character, n_bytes));
    }
    let (low, n_low) = code_unit(&text[n_bytes..]).ok_or(BAD)?;
    if !(0xd800..0xdc00).contains(&value) || !(0xdc00..0xe000).contains(&low) {
        return Err(BAD);
    }
    let value = 0x10000 + ((value - 0xd800) << 10) + (low - 0xdc00);
    Ok((char::from_u32(value).ok_or(BAD)?, n_bytes + n_low))
}

/// The number in a `\uXXXX` or `\UXXXXXXXX` at the start of `text`, and the escape's length.
fn code_unit(text: &str) -> Option<(u32, usize)> {
    let n_digits = match text.as_bytes().get(..2)? {
        b"\\u" => 4,
        b"\\U" => 8,
        _ => return None,
    };
    let (value, found) = digits(&text.as_bytes()[2..], 16, n_digits);
    (found == n_digits).then_some((value, 2 + n_digits))
}

/// The number made of the leading digits, at most `max` (and 8) of them, and how many there are.
fn digits(bytes: &[u8], radix: u32, max: usize) -> (u32, usize) {
    let mut value = 0;
    let mut n_digits = 0;
    for &byte in bytes.iter().take(max) {
        let Some(digit) = char::from(byte).to_digit(radix) else {
            break;
        };
        value = value * radix + digit;
        n_digits += 1;
    }
    (value, n_digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unescaped(inner: &str) -> Result<Vec<u8>, (usize, &'static str)> {
        let mut out = Vec::new();
        unescape(inner, &mut out).map(|()| out)
    }

    #[test]
    fn every_escape_is_understood() {
        for (inner, bytes) in [
            ("plain é", "plain é".as_bytes()),
            (r#"\a\b\f\n\r\t\v\?\'\"\\"#, b"\x07\x08\x0c\n\r\t\x0b?'\"\\"),
            (r"\0\18\377\1234", b"\0\x018\xffS4"),
            (r"\x4\x41\XfFf\x0g", b"\x04A\xfff\0g"),
            (r"\u00e9\U0001F600\uD83D\uDE00", "é😀😀".as_bytes()),
        ] {
            assert_eq!(unescaped(inner).unwrap(), bytes, "{inner}");
        }
    }

    #[test]
    fn bad_escapes_say_where() {
        for (inner, at) in [
            (r"\q", 0),
            (r"é\x", 2),
            (r"\n\400", 2),
            (r"\u12", 0),
            (r"\U00110000", 0),
            (r"\uD83D", 0),
            (r"\uD83Dx", 0),
            (r"\uDE00\uD83D", 0),
            (r"\é", 0),
            ("\\", 0),
        ] {
            assert_eq!(unescaped(inner).unwrap_err().0, at, "{inner}");
        }
    }

    #[test]
    fn every_byte_survives() {
        let bytes: Vec<u8> = (0..=255).collect();
        let mut text = String::new();
        escape(&bytes, &mut text);
        assert_eq!(unescaped(&text).unwrap(), bytes);
        assert!(text.starts_with(r"\000\001\002\003\004\005\006\007\010\t\n\013\014\r\016"));
        assert!(text.ends_with(r"\375\376\377"));
    }
}
