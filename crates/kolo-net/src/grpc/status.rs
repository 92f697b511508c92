//! Errors to and from the wire: a gRPC status, or two fields of a response.
//!
//! The codes have the same numbers. An error that only echoes another one is marked in its text, as TensorFlow 1 does,
//! so that a master can tell the cause from its echoes.

use http::HeaderMap;
use kolo_core::{Code, Error};
use tonic::Status;

/// What goes before the text of an error that only echoes another one.
const DERIVED: &str = "[_Derived_]";

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
    let code = Code::from_number(code).unwrap_or(Code::Internal);
    Some(match text.strip_prefix(DERIVED) {
        Some(text) => Error::new(code, text).into_derived(),
        None => Error::new(code, text),
    })
}

/// The gRPC status of an error.
pub fn to_status(error: &Error) -> Status {
    let mut text = wire_text(error);
    if text.len() > MAX_STATUS_TEXT {
        let end = (0..=MAX_STATUS_TEXT).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        text.push_str(TRUNCATED);
    }
    Status::new(tonic::Code::from_i32(error.code() as i32), text)
}

/// The error of a gRPC status; `None` if it is OK.
pub fn from_status(status: &Status) -> Option<Error> {
    if status.code() == tonic::Code::Unknown && status.message() == "Stream removed" {
        return Some(Error::unavailable(status.message()));
    }
    from_body(status.code() as i32, status.message())
}

/// The trailers of a response.
pub(crate) fn trailers(outcome: Result<(), &Error>) -> HeaderMap {
    let status = match outcome {
        Ok(()) => Status::ok(""),
        Err(error) => to_status(error),
    };
    let mut trailers = HeaderMap::new();
    if status.add_header(&mut trailers).is_err() {
        trailers.insert("grpc-status", http::HeaderValue::from(status.code() as i32));
    }
    trailers
}

/// What the trailers of a response say; `None` if they say nothing.
pub(crate) fn outcome(trailers: &HeaderMap) -> Option<Result<(), Error>> {
    let status = Status::from_header_map(trailers)?;
    Some(from_status(&status).map_or(Ok(()), Err))
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

    #[test]
    fn a_removed_stream_is_a_lost_connection() {
        let status = Status::unknown("Stream removed");
        assert_eq!(from_status(&status).unwrap().code(), Code::Unavailable);
        assert_eq!(from_status(&Status::unknown("other")).unwrap().code(), Code::Unknown);
    }
}
