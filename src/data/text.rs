//! Text as numbers: a vocabulary of characters or of bytes, and windows for a language model to learn from.

use std::collections::BTreeSet;
use std::path::Path;

use kolo_core::{DType, Error, Result, Tensor};

use super::Dataset;
use super::file::Input;

/// The longest text that is read into memory.
const MAX_BYTES: u64 = 4 << 30;

/// Shakespeare's plays, 1.1 MB of them, as characters: the text that small language models are tried on. It is part of
/// this program.
///
/// ```
/// let corpus = kolo::data::text::shakespeare()?;
/// assert_eq!((corpus.len(), corpus.vocabulary().len()), (1_115_394, 65));
/// assert!(corpus.text().starts_with("First Citizen:"));
///
/// let batch = corpus.windows(64).shuffle(1).batch(32, true).batches()?.next().unwrap()?;
/// assert_eq!(batch.tensors[0].shape().dims(), [32, 64]); // input, int32
/// assert_eq!(batch.tensors[1].shape().dims(), [32, 64]); // target: the same, one character further on
/// # Ok::<(), kolo::Error>(())
/// ```
pub fn shakespeare() -> Result<Corpus> {
    let mut input = Input::from_bytes("shakespeare.txt.gz", include_bytes!("../../data/shakespeare.txt.gz"))?;
    Corpus::characters(&utf8("shakespeare.txt.gz", input.read_rest(MAX_BYTES)?)?)
}

/// A text, each token a number.
#[derive(Clone, Debug)]
pub struct Corpus {
    vocabulary: Vocabulary,
    tokens: Tensor,
}

/// What each number stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vocabulary {
    /// Number `i` is byte `i`: any text, any language, 256 tokens.
    Bytes,
    /// Number `i` is the character at place `i`; they are sorted.
    Characters(Vec<char>),
}

impl Corpus {
    /// The text by characters: its vocabulary are those that occur in it.
    pub fn characters(text: &str) -> Result<Corpus> {
        let characters: BTreeSet<char> = text.chars().collect();
        Corpus::with_vocabulary(Vocabulary::Characters(characters.into_iter().collect()), text)
    }

    /// The text by bytes.
    pub fn bytes(text: &str) -> Result<Corpus> {
        Corpus::with_vocabulary(Vocabulary::Bytes, text)
    }

    /// The text in a vocabulary that exists already, such as that of the text a model was trained on.
    pub fn with_vocabulary(vocabulary: Vocabulary, text: &str) -> Result<Corpus> {
        let tokens = match &vocabulary {
            Vocabulary::Bytes => Tensor::from(text.as_bytes()),
            small if small.len() <= 256 => {
                Tensor::from(small.encode(text)?.into_iter().map(|token| token as u8).collect::<Vec<u8>>())
            }
            large => Tensor::from(large.encode(text)?),
        };
        Ok(Corpus { vocabulary, tokens })
    }

    /// The text in a file, gzipped or not, by characters.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Corpus> {
        let path = path.as_ref();
        Corpus::characters(&utf8(&path.display().to_string(), Input::open(path)?.read_rest(MAX_BYTES)?)?)
    }

    /// How many tokens it has.
    pub fn len(&self) -> usize {
        self.tokens.n_elements()
    }

    /// True if it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the numbers stand for.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// The numbers: `uint8` if the vocabulary has at most 256 tokens, else `int32`.
    pub fn tokens(&self) -> &Tensor {
        &self.tokens
    }

    /// The text.
    pub fn text(&self) -> String {
        match (self.tokens.data::<u8>(), self.tokens.data::<i32>()) {
            (Ok(tokens), _) => self.vocabulary.text(tokens.iter().map(|&token| token.into())),
            (_, Ok(tokens)) => self.vocabulary.text(tokens.iter().copied()),
            _ => String::new(),
        }
    }

    /// The first part, `fraction` of the whole, and the rest: to train on the one and to test with the other.
    pub fn split(&self, fraction: f64) -> Result<(Corpus, Corpus)> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::invalid_argument(format!("{fraction} is not a fraction from 0 to 1")));
        }
        let n = ((self.len() as f64 * fraction).round() as usize).min(self.len());
        let part = |start, n| Ok(Corpus { vocabulary: self.vocabulary.clone(), tokens: self.tokens.rows(start, n)? });
        Ok((part(0, n)?, part(n, self.len() - n)?))
    }

    /// Two columns, `int32[n,length]`: windows of the text side by side, and the tokens that follow each of theirs.
    pub fn windows(&self, length: usize) -> Dataset {
        self.windows_every(length, length)
    }

    /// As [`Corpus::windows`], with a window beginning at every `stride`-th token: they overlap if that is less than
    /// `length`.
    pub fn windows_every(&self, length: usize, stride: usize) -> Dataset {
        Dataset::windows(self.tokens.clone(), length, stride).cast(0, DType::I32).cast(1, DType::I32)
    }
}

impl Vocabulary {
    /// How many tokens there are.
    pub fn len(&self) -> usize {
        match self {
            Vocabulary::Bytes => 256,
            Vocabulary::Characters(characters) => characters.len(),
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The numbers of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>> {
        match self {
            Vocabulary::Bytes => Ok(text.bytes().map(i32::from).collect()),
            Vocabulary::Characters(characters) => {
                let token = |(at, character): (usize, char)| {
                    let found = characters.binary_search(&character).ok();
                    found.and_then(|token| i32::try_from(token).ok()).ok_or_else(|| {
                        Error::not_found(format!("character {character:?} at byte {at} is not in the vocabulary"))
                    })
                };
                text.char_indices().map(token).collect()
            }
        }
    }

    /// The text of some numbers. What is no token or no UTF-8 becomes `�`.
    pub fn decode(&self, tokens: &[i32]) -> String {
        self.text(tokens.iter().copied())
    }

    fn text(&self, tokens: impl Iterator<Item = i32>) -> String {
        match self {
            Vocabulary::Bytes => {
                let bytes: Vec<u8> = tokens.map(|token| u8::try_from(token).unwrap_or(0xff)).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Vocabulary::Characters(characters) => tokens
                .map(|token| usize::try_from(token).ok().and_then(|token| characters.get(token)).unwrap_or(&'\u{fffd}'))
                .collect(),
        }
    }
}

fn utf8(name: &str, bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Error::invalid_argument(format!("{name}: expected text in UTF-8, found something else at byte {at}"))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_numbered_in_order_and_come_back() {
        let corpus = Corpus::characters("banana é").unwrap();
        assert_eq!(corpus.vocabulary(), &Vocabulary::Characters(vec![' ', 'a', 'b', 'n', 'é']));
        assert_eq!(corpus.tokens().data::<u8>().unwrap(), [2, 1, 3, 1, 3, 1, 0, 4]);
        assert_eq!(corpus.text(), "banana é");
        assert_eq!(corpus.vocabulary().decode(&[2, 1, 9, -1]), "ba\u{fffd}\u{fffd}");
        let error = corpus.vocabulary().encode("anx").unwrap_err();
        assert_eq!(error.message(), "character 'x' at byte 2 is not in the vocabulary");
        assert!(Corpus::characters("").unwrap().is_empty());
    }

    #[test]
    fn bytes_need_no_vocabulary() {
        let corpus = Corpus::bytes("é!").unwrap();
        assert_eq!(corpus.tokens().data::<u8>().unwrap(), [0xc3, 0xa9, b'!']);
        assert_eq!((corpus.text(), corpus.vocabulary().len()), ("é!".to_owned(), 256));
        assert_eq!(corpus.vocabulary().decode(&[0xc3, 256, 65]), "\u{fffd}\u{fffd}A");
    }

    #[test]
    fn more_than_256_characters_are_wider_numbers() {
        let text: String = (0x4e00u32..0x4e00 + 300).filter_map(char::from_u32).collect();
        let corpus = Corpus::characters(&text).unwrap();
        assert_eq!(corpus.tokens().data::<i32>().unwrap()[299], 299);
        assert_eq!(corpus.text(), text);
    }

    #[test]
    fn the_target_is_one_further_on() {
        let corpus = Corpus::characters("abcdefg").unwrap();
        let columns = corpus.windows(3).all().unwrap();
        assert_eq!(columns, [Tensor::from([[0, 1, 2], [3, 4, 5]]), Tensor::from([[1, 2, 3], [4, 5, 6]])]);
        assert_eq!(corpus.windows_every(3, 1).len(), Some(4));
        let (train, test) = corpus.split(0.75).unwrap();
        assert_eq!((train.text(), test.text()), ("abcde".to_owned(), "fg".to_owned()));
        assert!(corpus.split(1.5).is_err());
        assert_eq!(test.windows(3).len(), Some(0));
    }

    #[test]
    fn a_file_that_is_not_text_says_where() {
        let path = std::env::temp_dir().join(format!("kolo-text-{}", std::process::id()));
        std::fs::write(&path, b"ab\xff").unwrap();
        let error = Corpus::from_file(&path).unwrap_err();
        assert!(error.message().contains("found something else at byte 2"), "{error}");
        std::fs::write(&path, "aba").unwrap();
        assert_eq!(Corpus::from_file(&path).unwrap().len(), 3);
        std::fs::remove_file(&path).unwrap();
    }
}
