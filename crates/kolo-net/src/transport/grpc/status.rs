//! Errors to and from the wire: a gRPC status, or two fields of a response.
//!
//! The codes have the same numbers. An error that only echoes another one is marked in its text, as TensorFlow 1 does,
//! so that a master can tell the cause from its echoes.

use http::{HeaderMap, HeaderValue};
use kolo_core::{Code, Error};

/// The trailers of a response: a code's number, and an error's text, percent-encoded.
const STATUS: &str = "grpc-status";
const MESSAGE: &str = "grpc-message";

/// What goes before the text of an error that only echoes another one.
pub(crate) const DERIVED: &str = "[_Derived_]";

/// Trailers are small; longer texts are cut, as TensorFlow cuts them.
const MAX_STATUS_TEXT: usize = 3072;

const TRUNCATED: &str = " ... [truncated]";

/// The text of an error as clients expect it: the node at its end, in the form that Python looks for.
pub fn wire_text(error: &Error) -> String {
    let derived = if error.is_derived() { DERIVED } else { "" };
    let node = match error.node() {
        Some(place) if !error.message().contains("{{node ") => format!("\n\t [[{{{{node {}}}}}]]", place.node),
        _ => String::new(),
    };
    format!("{derived}{}{node}", error.message())
}

/// The two fields of a response that holds its error.
pub fn to_body(error: &Error) -> (i32, String) {
    (error.code() as i32, wire_text(error))
}

/// The error in the two fields of a response, if there is one.
pub fn from_body(code: i32, text: &str) -> Option<Error> {
    if code == 0 {
        return None;
    }
    // TensorFlow's codes end where gRPC's do; a number beyond them is a peer's mistake, not a reason to try again.
    Some(from_text(Code::from_number(code).unwrap_or(Code::Internal), text))
}

fn from_text(code: Code, text: &str) -> Error {
    match text.strip_prefix(DERIVED) {
        Some(text) => Error::new(code, text).into_derived(),
        None => Error::new(code, text),
    }
}

/// The trailers of a response.
pub(crate) fn trailers(outcome: Result<(), &Error>) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert(STATUS, HeaderValue::from(outcome.map_or_else(|error| error.code() as i32, |()| 0)));
    if let Err(error) = outcome
        && let Ok(text) = HeaderValue::try_from(percent_encoded(&short_text(error)))
    {
        trailers.insert(MESSAGE, text);
    }
    trailers
}

/// What the trailers of a response say; `None` if they say nothing.
pub(crate) fn outcome(trailers: &HeaderMap) -> Option<Result<(), Error>> {
    // gRPC calls a number that it does not know `UNKNOWN`.
    let code = match trailers.get(STATUS)?.to_str().map(str::parse) {
        Ok(Ok(0)) => return Some(Ok(())),
        Ok(Ok(number)) => Code::from_number(number).unwrap_or(Code::Unknown),
        _ => Code::Unknown,
    };
    let text = trailers.get(MESSAGE).map_or_else(String::new, |text| percent_decoded(text.as_bytes()));
    Some(Err(match code == Code::Unknown && text == "Stream removed" {
        // What gRPC's own library says of a connection that was lost.
        true => Error::unavailable(text),
        false => from_text(code, &text),
    }))
}

fn short_text(error: &Error) -> String {
    let mut text = wire_text(error);
    if text.len() > MAX_STATUS_TEXT {
        let end = (0..=MAX_STATUS_TEXT).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        text.push_str(TRUNCATED);
    }
    text
}

/// Visible ASCII as it is, but for `%`; all other bytes as `%` and two digits. Spaces too, which a header could lose at its ends.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'%' | ..=b' ' | 0x7f.. => encoded.push_str(&format!("%{byte:02X}")),
            _ => encoded.push(char::from(byte)),
        }
    }
    encoded
}

/// The way back. What is not encoded well stays as it is: a text is better than none.
fn percent_decoded(encoded: &[u8]) -> String {
    let digit = |at: usize| encoded.get(at).and_then(|&byte| char::from(byte).to_digit(16));
    let (mut bytes, mut at) = (Vec::with_capacity(encoded.len()), 0);
    while let Some(&byte) = encoded.get(at) {
        match (byte, digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((high * 16 + low) as u8);
                at += 3;
            }
            _ => {
                bytes.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(error: &Error) -> Error {
        outcome(&trailers(Err(error))).unwrap().unwrap_err()
    }

    #[test]
    fn every_code_survives_the_trip() {
        for number in 1..=16 {
            let code = Code::from_number(number).unwrap();
            let error = Error::new(code, "größer als\n100 %");
            assert_eq!(round_trip(&error), error);
            let (code, text) = to_body(&error);
            assert_eq!(from_body(code, &text), Some(error));
        }
        assert_eq!(outcome(&trailers(Ok(()))), Some(Ok(())));
        assert_eq!(from_body(0, "x"), None);
        assert_eq!(from_body(99, "x").unwrap().code(), Code::Internal);
        assert_eq!(outcome(&HeaderMap::new()), None);
    }

    #[test]
    fn echoes_stay_echoes() {
        let error = Error::cancelled("stopped").into_derived();
        assert!(round_trip(&error).is_derived());
        assert_eq!(round_trip(&error).message(), "stopped");
        assert!(!round_trip(&Error::cancelled("stopped")).is_derived());
    }

    #[test]
    fn the_node_is_where_python_looks_for_it() {
        let error = Error::invalid_argument("sizes differ").with_node("dense/MatMul", "MatMul", "/cpu:0");
        assert_eq!(wire_text(&error), "sizes differ\n\t [[{{node dense/MatMul}}]]");
        let named = Error::invalid_argument("x {{node a}} y").with_node("b", "B", "");
        assert_eq!(wire_text(&named), "x {{node a}} y");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let error = Error::internal("é".repeat(4000));
        let cut = round_trip(&error);
        assert!(cut.message().ends_with("é ... [truncated]"));
        assert_eq!(cut.message().len(), 3072 + TRUNCATED.len());
        let odd = round_trip(&Error::internal(format!("x{}", "é".repeat(4000))));
        assert_eq!(odd.message().len(), 3071 + TRUNCATED.len());
        assert_eq!(to_body(&error).1.len(), 8000);
    }

    fn heard(status: &'static str, message: &'static [u8]) -> Option<Result<(), Error>> {
        let mut headers = HeaderMap::new();
        headers.insert(STATUS, HeaderValue::from_static(status));
        headers.insert(MESSAGE, HeaderValue::from_bytes(message).unwrap());
        outcome(&headers)
    }

    #[test]
    fn a_removed_stream_is_a_lost_connection() {
        assert_eq!(heard("2", b"Stream removed"), Some(Err(Error::unavailable("Stream removed"))));
        assert_eq!(heard("2", b"other"), Some(Err(Error::new(Code::Unknown, "other"))));
        assert_eq!(heard("13", b"Stream removed"), Some(Err(Error::internal("Stream removed"))));
    }

    #[test]
    fn texts_are_encoded_as_grpc_says() {
        let said = trailers(Err(&Error::not_found("größer als\n100 %~")));
        assert_eq!(said.get(STATUS).unwrap(), "5");
        assert_eq!(said.get(MESSAGE).unwrap(), "gr%C3%B6%C3%9Fer%20als%0A100%20%25~");
        assert_eq!(trailers(Ok(())).len(), 1);
        // As others encode it.
        assert_eq!(heard("5", b"gr%c3%B6%C3%9Fer als 1%25"), Some(Err(Error::not_found("größer als 1%"))));
    }

    #[test]
    fn what_a_peer_gets_wrong_is_still_an_error_with_a_text() {
        for (message, text) in [
            (&b"50% of it"[..], "50% of it"),
            (b"100%", "100%"),
            (b"%4", "%4"),
            (b"%zz%", "%zz%"),
            (b"%+1", "%+1"),
            (b"%C3(", "\u{fffd}("),
            (b"\xff", "\u{fffd}"),
        ] {
            assert_eq!(heard("3", message), Some(Err(Error::invalid_argument(text))));
        }
        for status in ["17", "-1", "", "x", "99999999999"] {
            assert_eq!(heard(status, b"x"), Some(Err(Error::new(Code::Unknown, "x"))), "{status}");
        }
        let mut with_details = trailers(Err(&Error::internal("x")));
        with_details.insert("grpc-status-details-bin", HeaderValue::from_static("not base64!"));
        assert_eq!(outcome(&with_details), Some(Err(Error::internal("x"))));
    }
}
