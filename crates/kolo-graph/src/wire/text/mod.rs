//! Protobuf's text format: what `.pbtxt` files hold and `tf.io.write_graph(.., as_text=True)` writes.
//!
//! ```text
//!   text ──lex──> tokens ──parse──> wire bytes ──prost──> message
//!   text <─────────────print─────── wire bytes <──prost── message
//! ```
//!
//! Both directions go through the wire format, guided by the message's [table](super::describe), so there is no code
//! per message. [`print()`] writes byte for byte what Python's `text_format.MessageToString(message, as_utf8=False)`
//! writes. [`parse()`] reads every notation of the format for these messages; it refuses unknown escapes and `1_000`,
//! which Python lets pass, and reads `\?` as a question mark, which Python does not.

mod lex;
mod number;
mod parse;
mod print;
mod quote;

pub use parse::parse;
pub(crate) use parse::{Mark, parse_marked};
pub use print::print;

use std::fmt;

/// How deeply messages may nest in text. It is also prost's limit for bytes.
pub const MAX_DEPTH: usize = 100;

/// Why a text is not a message, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextError {
    /// The line, from 1.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
    /// What was expected and what was found.
    pub message: String,
}

impl TextError {
    /// An error at the byte `offset` of `text`.
    fn at(text: &str, offset: usize, message: impl Into<String>) -> Self {
        let before = text.get(..offset).unwrap_or(text);
        let start_of_line = before.rfind('\n').map_or(0, |newline| newline + 1);
        Self {
            line: before.bytes().filter(|&byte| byte == b'\n').count() + 1,
            column: before[start_of_line..].chars().count() + 1,
            message: message.into(),
        }
    }
}

/// `line:column: message`.
impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.line, self.column, self.message)
    }
}

impl std::error::Error for TextError {}
