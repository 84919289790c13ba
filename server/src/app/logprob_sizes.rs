//! How many bytes log probabilities take in a response, which depends on the tokens of the vocabulary.

use std::ops::{Add, Mul};

use text::Tokenizer;

/// Bytes per alternative of a token besides its text: 8 in the engine's event, the rest as JSON, most of it names.
const ALTERNATIVE: usize = 8 + 88;
/// Bytes per token that is kept for the response, besides its alternatives.
pub const KEPT_TOKEN: usize = 64;

/// Log probabilities of a token: their number, and an upper bound of their bytes in the engine's event and as JSON
/// ([`Sizes`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entries {
    /// Their number.
    pub count: usize,
    /// Their bytes.
    pub bytes: usize,
}

impl Mul<usize> for Entries {
    type Output = Entries;

    fn mul(self, times: usize) -> Entries {
        Entries { count: self.count.saturating_mul(times), bytes: self.bytes.saturating_mul(times) }
    }
}

impl Add for Entries {
    type Output = Entries;

    fn add(self, other: Entries) -> Entries {
        Entries { count: self.count.saturating_add(other.count), bytes: self.bytes.saturating_add(other.bytes) }
    }
}

/// A format of log probabilities in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogprobFormat {
    /// Completions and prompts: the text of each token.
    Completion,
    /// Chats: also the bytes of each token, as a list of numbers.
    Chat,
}

impl LogprobFormat {
    /// The field that requests log probabilities of the output.
    pub fn field(self) -> &'static str {
        match self {
            LogprobFormat::Completion => "logprobs",
            LogprobFormat::Chat => "top_logprobs",
        }
    }
}

/// Upper bounds of the bytes of log probabilities, which depend on the longest tokens of the vocabulary: a token of 128
/// spaces takes 640 bytes as JSON, most take 100.
///
/// The alternatives of a token are different tokens, so that they are at most as long as the longest ones together. One
/// token more is repeated by some formats.
pub struct Sizes {
    /// Sums of the longest 1, 2, … tokens, by [`LogprobFormat`].
    sums: [Vec<usize>; 2],
}

impl Sizes {
    /// Sizes for a vocabulary, and at most this many alternatives.
    pub fn new(tokenizer: &Tokenizer, vocab: usize, most: usize) -> Sizes {
        let mut sizes = [Vec::with_capacity(vocab), Vec::with_capacity(vocab)];
        for id in 0..vocab as u32 {
            let bytes = tokenizer.token_bytes(id);
            let text = ALTERNATIVE + text_size(&bytes);
            sizes[LogprobFormat::Completion as usize].push(text);
            sizes[LogprobFormat::Chat as usize].push(text + bytes.iter().map(number_size).sum::<usize>());
        }
        let sums = |mut sizes: Vec<usize>| {
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            let sums = sizes.iter().take(most.saturating_add(1)).scan(0, |sum, size| {
                *sum += size;
                Some(*sum)
            });
            sums.collect()
        };
        Sizes { sums: sizes.map(sums) }
    }

    /// Log probabilities of a token with this many alternatives.
    pub fn entries(&self, alternatives: usize, format: LogprobFormat) -> Entries {
        let sums = &self.sums[format as usize];
        let sum = |count: usize| sums.get(count - 1).or(sums.last()).copied().unwrap_or(0);
        Entries { count: alternatives + 1, bytes: KEPT_TOKEN + sum(1) + sum(alternatives + 1) }
    }
}

/// Bytes of a token's text as JSON, with quotes escaped; see `reply::logprobs`.
fn text_size(bytes: &[u8]) -> usize {
    let escaped = |c: char| match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\x08' | '\x0c' => 2,
        '\0'..'\x20' => 6,
        c => c.len_utf8(),
    };
    std::str::from_utf8(bytes).map_or(6 + 5 * bytes.len(), |text| text.chars().map(escaped).sum())
}

/// Bytes of a number in a list.
fn number_size(byte: &u8) -> usize {
    1 + byte.checked_ilog10().map_or(1, |log| log as usize + 1)
}
