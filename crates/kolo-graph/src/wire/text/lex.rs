//! Splits text into tokens. Tokens borrow the text; what they mean is the parser's business.

use std::fmt;

use super::TextError;

/// One token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token<'a> {
    /// A field name, an enum value, `true`, `inf` and so on.
    Word(&'a str),
    /// A number without its sign. Whether it is a good one is not known yet.
    Number(&'a str),
    /// What stands between two equal quotes, escapes and all.
    Quoted(&'a str),
    /// One character of punctuation.
    Punct(char),
    /// The end of the text.
    End,
}

/// The tokens of a text, one ahead.
pub(super) struct Lexer<'a> {
    text: &'a str,
    /// Where the rest of the text begins.
    rest: usize,
    /// Where `token` begins.
    start: usize,
    token: Token<'a>,
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a str) -> Result<Self, TextError> {
        let mut lexer = Self { text, rest: 0, start: 0, token: Token::End };
        lexer.advance()?;
        Ok(lexer)
    }

    /// The token that comes next.
    pub(super) fn peek(&self) -> Token<'a> {
        self.token
    }

    /// Where the token that comes next begins.
    pub(super) fn offset(&self) -> usize {
        self.start
    }

    /// Takes the next token if it is this punctuation.
    pub(super) fn accept(&mut self, punct: char) -> Result<bool, TextError> {
        let accepted = self.token == Token::Punct(punct);
        if accepted {
            self.advance()?;
        }
        Ok(accepted)
    }

    /// Moves on to the token after the next one.
    pub(super) fn advance(&mut self) -> Result<(), TextError> {
        self.skip_blanks();
        self.start = self.rest;
        let rest = &self.text[self.rest..];
        let Some(first) = rest.chars().next() else {
            self.token = Token::End;
            return Ok(());
        };
        let (token, n_bytes) = match first {
            'a'..='z' | 'A'..='Z' | '_' => {
                let word = &rest[..word_len(rest)];
                (Token::Word(word), word.len())
            }
            '0'..='9' | '.' => {
                let number = &rest[..number_len(rest)];
                (Token::Number(number), number.len())
            }
            '"' | '\'' => {
                let inner = self.quoted(first)?;
                (Token::Quoted(inner), inner.len() + 2)
            }
            '{' | '}' | '<' | '>' | '[' | ']' | ':' | ',' | ';' | '-' => (Token::Punct(first), 1),
            other => return Err(self.error(self.start, format!("unexpected character {other:?}"))),
        };
        self.token = token;
        self.rest += n_bytes;
        Ok(())
    }

    /// An error at a byte of the text.
    pub(super) fn error(&self, offset: usize, message: impl Into<String>) -> TextError {
        TextError::at(self.text, offset, message)
    }

    /// An error at the next token, which is not what was expected.
    pub(super) fn expected(&self, what: impl fmt::Display) -> TextError {
        self.error(self.start, format!("expected {what}, found {}", self.token))
    }

    fn skip_blanks(&mut self) {
        loop {
            let rest = &self.text[self.rest..];
            let trimmed = rest.trim_start_matches([' ', '\t', '\n', '\r', '\x0b', '\x0c']);
            self.rest += rest.len() - trimmed.len();
            if !trimmed.starts_with('#') {
                return;
            }
            self.rest += trimmed.find('\n').unwrap_or(trimmed.len());
        }
    }

    /// What follows an opening quote at `start`, up to its closing one.
    fn quoted(&self, quote: char) -> Result<&'a str, TextError> {
        let inner = &self.text[self.start + 1..];
        let mut bytes = inner.bytes().enumerate();
        while let Some((at, byte)) = bytes.next() {
            match byte {
                b'\n' => break,
                // The byte after a backslash is never the end, whatever it is; a newline still is an error.
                b'\\' => {
                    if matches!(bytes.next(), None | Some((_, b'\n'))) {
                        break;
                    }
                }
                byte if char::from(byte) == quote => return Ok(&inner[..at]),
                _ => {}
            }
        }
        Err(self.error(self.start, "string has no closing quote on its line"))
    }
}

fn word_len(text: &str) -> usize {
    text.bytes().position(|byte| !byte.is_ascii_alphanumeric() && byte != b'_').unwrap_or(text.len())
}

/// Digits, letters and dots, and a sign after the `e` of a decimal exponent.
fn number_len(text: &str) -> usize {
    let hex = text.starts_with("0x") || text.starts_with("0X");
    let mut last = b'0';
    for (at, byte) in text.bytes().enumerate() {
        let sign_of_exponent = matches!(byte, b'+' | b'-') && matches!(last, b'e' | b'E') && !hex;
        if !byte.is_ascii_alphanumeric() && !matches!(byte, b'.' | b'_') && !sign_of_exponent {
            return at;
        }
        last = byte;
    }
    text.len()
}

/// The token as error messages show it, shortened where it is long.
impl fmt::Display for Token<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 40;
        let (kind, text) = match self {
            Self::Word(text) => ("", text),
            Self::Number(text) => ("", text),
            Self::Quoted(text) => ("string ", text),
            Self::Punct(punct) => return write!(f, "`{punct}`"),
            Self::End => return f.write_str("the end of the text"),
        };
        match text.char_indices().nth(SHOWN) {
            Some((end, _)) => write!(f, "{kind}`{}...`", &text[..end]),
            None => write!(f, "{kind}`{text}`"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Token::{Number, Punct, Quoted, Word};
    use super::*;

    fn tokens(text: &str) -> Result<Vec<Token<'_>>, TextError> {
        let mut lexer = Lexer::new(text)?;
        let mut tokens = Vec::new();
        while lexer.peek() != Token::End {
            tokens.push(lexer.peek());
            lexer.advance()?;
        }
        Ok(tokens)
    }

    #[test]
    fn tokens_end_where_they_should() {
        assert_eq!(
            tokens("a:-1e-3f,0xe-1# x\n'q\"\\''\"\"").unwrap(),
            [
                Word("a"),
                Punct(':'),
                Punct('-'),
                Number("1e-3f"),
                Punct(','),
                Number("0xe"),
                Punct('-'),
                Number("1"),
                Quoted("q\"\\'"),
                Quoted(""),
            ]
        );
        assert_eq!(tokens(" \t#only").unwrap(), []);
    }

    #[test]
    fn bad_tokens_say_where() {
        for (text, error) in [
            ("a\n  é", "2:3: unexpected character 'é'"),
            ("a: 'x\n'", "1:4: string has no closing quote on its line"),
            ("\"é\" 'x\\", "1:5: string has no closing quote on its line"),
            ("'\\\n'", "1:1: string has no closing quote on its line"),
        ] {
            assert_eq!(tokens(text).unwrap_err().to_string(), error);
        }
    }
}
