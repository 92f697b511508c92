//! What an agent has to know of a launcher: `FINGERPRINT.SECRET`, in hexadecimal digits.

use std::path::Path;

use kolo_core::{Error, Result};

use crate::transport::tls::{Token, random_token};
use crate::transport::user_token::read_private;

/// Bytes of a fingerprint, a SHA-256.
const FINGERPRINT: usize = 32;

/// What lets an agent join a launcher. It is as secret as a password.
#[derive(Clone, Debug)]
pub struct JoinToken {
    fingerprint: [u8; FINGERPRINT],
    secret: Token,
}

impl JoinToken {
    /// A new secret for the certificate with this fingerprint.
    pub(super) fn new(fingerprint: [u8; FINGERPRINT]) -> Result<JoinToken> {
        Ok(JoinToken { fingerprint, secret: random_token()? })
    }

    /// The token in a text.
    pub fn parse(text: &str) -> Result<JoinToken> {
        let wrong = || {
            Error::invalid_argument(
                "this is no join token: `kolo launch --hosts` prints one, two long words with a dot between",
            )
        };
        let (fingerprint, secret) = text.trim().split_once('.').ok_or_else(wrong)?;
        let mut bytes = [0; FINGERPRINT];
        if fingerprint.len() != 2 * FINGERPRINT || !fingerprint.is_ascii() {
            return Err(wrong());
        }
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&fingerprint[2 * i..2 * i + 2], 16).map_err(|_| wrong())?;
        }
        Ok(JoinToken { fingerprint: bytes, secret: Token::new(secret).map_err(|_| wrong())? })
    }

    /// Reads the token from a file that only this user can read.
    pub fn read(path: &Path) -> Result<JoinToken> {
        let bytes = read_private("the file of the join token", path)?;
        JoinToken::parse(&String::from_utf8_lossy(&bytes)).map_err(|error| error.context(path.display()))
    }

    /// It as a text, for an environment, a file or a pipe. It is not for flags or logs.
    pub fn text(&self) -> String {
        let digits: String = self.fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{digits}.{}", self.secret.secret())
    }

    pub(super) fn fingerprint(&self) -> [u8; FINGERPRINT] {
        self.fingerprint
    }

    pub(super) fn secret(&self) -> &Token {
        &self.secret
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_token_is_refused() {
        let token = JoinToken::new([0xab; FINGERPRINT]).unwrap();
        assert_eq!(JoinToken::parse(&token.text()).unwrap().text(), token.text());
        let short = format!("{}.short", "ab".repeat(32));
        let strange = format!("{}.0123456789abcdef", "é".repeat(32));
        for text in ["", "ab.0123456789abcdef0123", &token.text()[1..], &short, &strange, &"zz".repeat(32)] {
            assert!(JoinToken::parse(text).is_err(), "{text}");
        }
    }
}
