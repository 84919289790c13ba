//! The special tokens around a text and around a pair of texts.
//!
//! They do not depend on the texts, so they are taken from a probe. Texts are tokenized on their own, which bounds the memory that it
//! takes, and can be cut before the special tokens are put around them.

use super::{TokenizeError, Tokenizer};
use crate::error::one_line;

/// The special tokens of a prompt: of one text, or of two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// In front of the first text.
    pub before: Vec<u32>,
    /// Between the texts.
    pub between: Vec<u32>,
    /// Behind the last text.
    pub after: Vec<u32>,
    /// Whether the tokens from the second text on are of another type.
    pub typed: bool,
}

/// A text of at least one token in every vocabulary.
const PROBE: &str = "a";

impl Frame {
    /// Number of special tokens.
    pub fn len(&self) -> usize {
        self.before.len() + self.between.len() + self.after.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The prompt of one text.
    pub fn single(&self, text: &[u32]) -> Vec<u32> {
        [&self.before[..], text, &self.after].concat()
    }

    /// The prompt of two texts, and where the tokens of another type begin, if there are any.
    pub fn pair(&self, first: &[u32], second: &[u32]) -> (Vec<u32>, Option<usize>) {
        let start = self.before.len() + first.len() + self.between.len();
        ([&self.before[..], first, &self.between, second, &self.after].concat(), self.typed.then_some(start))
    }
}

impl Tokenizer {
    /// The special tokens around a text.
    ///
    /// # Errors
    /// The vocabulary cannot represent a letter.
    pub fn frame(&self) -> Result<Frame, TokenizeError> {
        let (bare, whole) = (self.encode_whole(PROBE, false)?, self.encode_whole(PROBE, true)?);
        let before = start_of(&bare, &whole);
        let after = whole.get(before + bare.len()..).unwrap_or_default().to_vec();
        Ok(Frame { before: whole[..before].to_vec(), after, ..Frame::default() })
    }

    /// The special tokens around a pair of texts, as the tokenizer encodes one.
    ///
    /// # Errors
    /// The vocabulary cannot represent a letter.
    pub fn pair_frame(&self) -> Result<Frame, TokenizeError> {
        let bare = self.encode_whole(PROBE, false)?;
        let pair = self.inner.encode((PROBE, PROBE), true).map_err(|error| TokenizeError::Encode(one_line(error)))?;
        let (whole, types) = (pair.get_ids(), pair.get_type_ids());
        let first = start_of(&bare, whole);
        let rest = whole.get(first + bare.len()..).unwrap_or_default();
        let between = start_of(&bare, rest);
        let second = first + bare.len() + between;
        Ok(Frame {
            before: whole[..first].to_vec(),
            between: rest[..between].to_vec(),
            after: whole.get(second + bare.len()..).unwrap_or_default().to_vec(),
            typed: types.get(second).is_some_and(|kind| Some(kind) != types.get(first)),
        })
    }
}

/// Where `part` begins in `whole`; 0 if nowhere.
fn start_of(part: &[u32], whole: &[u32]) -> usize {
    (0..=whole.len()).find(|&at| whole[at..].starts_with(part)).unwrap_or(0)
}
