//! Cost of a request: computed from its fields before any work, and compared with the limits.
//!
//! Limits of single fields do not bound their products. The products are bounded here: prompts × sequences, tokens ×
//! alternatives × sequences, and the bytes that the server holds for the request until it is answered. These bytes are
//! taken from one budget that all requests share ([`super::budget`]). If it is exhausted, the request fails with 429.
//!
//! The cost is checked twice: with a lower bound of the tokens while a prompt is text, and after tokenization.

use std::ops::{Add, Mul};

use super::budget;
use super::error::ApiError;
use super::settings::Limits;
use text::Tokenizer;

/// Bytes per prompt token: in the request, the engine, the scheduler and the state of the response.
const PROMPT_TOKEN: usize = 16;
/// Bytes per repeated token id: as a number, and as JSON.
pub const TOKEN_ID: usize = 4 + 8;
/// Bytes per alternative of a token besides its text: 8 in the engine's event, the rest as JSON, most of it names.
const ALTERNATIVE: usize = 8 + 88;
/// Bytes per sequence besides its tokens: its state in the engine, its text, its choice in the response.
const SEQUENCE: usize = 2048;
/// Bytes per token that is kept for the response, besides its alternatives.
pub const KEPT_TOKEN: usize = 64;
/// Bytes of text per generated token.
const OUTPUT_TOKEN: usize = 4;
/// Responses with more log probabilities, repeated bytes or sequences than this are written off the serving threads.
const LARGE: usize = 512;

/// Log probabilities of a token: their number, and an upper bound of their bytes in the engine's event and as JSON
/// ([`super::logprobs::Sizes`]).
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

/// A format of log probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Completions and prompts: the text of each token.
    Completion,
    /// Chats: also the bytes of each token, as a list of numbers.
    Chat,
}

impl Format {
    /// The field that requests log probabilities of the output.
    pub fn field(self) -> &'static str {
        match self {
            Format::Completion => "logprobs",
            Format::Chat => "top_logprobs",
        }
    }
}

/// Upper bounds of the bytes of log probabilities, which depend on the longest tokens of the vocabulary: a token of 128
/// spaces takes 640 bytes as JSON, most take 100.
///
/// The alternatives of a token are different tokens, so that they are at most as long as the longest ones together. One
/// token more is repeated by some formats.
pub struct Sizes {
    /// Sums of the longest 1, 2, … tokens, by [`Format`].
    sums: [Vec<usize>; 2],
}

impl Sizes {
    /// Sizes for a vocabulary, and at most this many alternatives.
    pub fn new(tokenizer: &Tokenizer, vocab: usize, most: usize) -> Sizes {
        let mut sizes = [Vec::with_capacity(vocab), Vec::with_capacity(vocab)];
        for id in 0..vocab as u32 {
            let bytes = tokenizer.token_bytes(id);
            let text = ALTERNATIVE + text_size(&bytes);
            sizes[Format::Completion as usize].push(text);
            sizes[Format::Chat as usize].push(text + bytes.iter().map(number_size).sum::<usize>());
        }
        let sums = |mut sizes: Vec<usize>| {
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            let sums = sizes.iter().take(most + 1).scan(0, |sum, size| {
                *sum += size;
                Some(*sum)
            });
            sums.collect()
        };
        Sizes { sums: sizes.map(sums) }
    }

    /// Log probabilities of a token with this many alternatives.
    pub fn entries(&self, alternatives: usize, format: Format) -> Entries {
        let sums = &self.sums[format as usize];
        let sum = |count: usize| sums.get(count - 1).or(sums.last()).copied().unwrap_or(0);
        Entries { count: alternatives + 1, bytes: KEPT_TOKEN + sum(1) + sum(alternatives + 1) }
    }
}

/// Bytes of a token's text as JSON, with quotes escaped; see `logprobs::token_text`.
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

/// Upper bounds of the work and memory of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Number of prompts, each an engine request.
    pub prompts: usize,
    /// Number of sequences per prompt, including candidates and beams.
    pub sequences: usize,
    /// Number of returned sequences per prompt.
    pub n: usize,
    /// Number of tokens of all prompts; a lower bound while they are text.
    pub prompt_tokens: usize,
    /// Maximum number of tokens per sequence.
    pub max_tokens: usize,
    /// Log probabilities in the response per prompt token, including copies in several choices.
    pub per_prompt_token: Entries,
    /// Log probabilities held per generated token.
    pub per_output_token: Entries,
    /// Whether the ids of generated tokens are held to the end.
    pub keeps_ids: bool,
    /// Whether generated text is held to the end, because the response is not a stream.
    pub is_kept: bool,
    /// Bytes of lists that each engine request copies: stop ids, biases.
    pub list_bytes: usize,
    /// Bytes that all engine requests share: long lists, grammars.
    pub shared_bytes: usize,
    /// Bytes of the prompts, as text and as ids, that the response repeats.
    pub repeated_bytes: usize,
    /// Field that requests log probabilities, for errors.
    pub logprobs_field: &'static str,
}

impl Cost {
    fn total_sequences(&self) -> usize {
        self.prompts.saturating_mul(self.sequences)
    }

    fn output_tokens(&self) -> usize {
        self.total_sequences().saturating_mul(self.max_tokens)
    }

    /// Log probabilities in the response.
    fn logprobs(&self) -> Entries {
        self.per_prompt_token * self.prompt_tokens + self.per_output_token * self.output_tokens()
    }

    /// Bytes held until the request is answered, besides the engine's own memory. Running sequences are bounded by the
    /// cache; text accumulates in those that have ended while others run.
    pub fn bytes(&self) -> usize {
        let ended = if self.is_kept { self.total_sequences().saturating_sub(1) } else { 0 };
        let parts = [
            self.prompt_tokens.saturating_mul(PROMPT_TOKEN),
            self.total_sequences().saturating_mul(SEQUENCE),
            ended.saturating_mul(self.max_tokens).saturating_mul(OUTPUT_TOKEN),
            self.logprobs().bytes,
            if self.keeps_ids { self.output_tokens().saturating_mul(KEPT_TOKEN + TOKEN_ID) } else { 0 },
            self.prompts.saturating_mul(self.list_bytes),
            self.shared_bytes,
            self.repeated_bytes,
        ];
        parts.into_iter().fold(0, usize::saturating_add)
    }

    /// Whether the response is too large to be written on a serving thread.
    pub fn is_large(&self) -> bool {
        self.logprobs().count > LARGE || self.repeated_bytes > LARGE || self.total_sequences() > LARGE
    }

    /// Fails if a limit is exceeded, whatever other requests hold.
    pub fn check(&self, limits: &Limits) -> Result<(), ApiError> {
        let sequences = self.total_sequences();
        if sequences > limits.max_sequences {
            let what = format!("sequences ({} prompts of {})", self.prompts, self.sequences);
            let advice = "lower n, send fewer prompts or raise --max-sequences";
            return Err(ApiError::over("n", sequences, limits.max_sequences, &what, advice));
        }
        if self.prompt_tokens > limits.max_request_tokens {
            let advice = "send fewer or shorter prompts or raise --max-request-tokens";
            return Err(ApiError::over("prompt", self.prompt_tokens, limits.max_request_tokens, "tokens", advice));
        }
        let logprobs = self.logprobs().count;
        if logprobs > limits.max_logprob_entries {
            let advice = "lower it, n or max_tokens, shorten the prompts, stream, or raise --max-logprob-entries";
            let what = "log probabilities in the response";
            return Err(ApiError::over(self.logprobs_field, logprobs, limits.max_logprob_entries, what, advice));
        }
        let (bytes, most) = (self.bytes(), budget::largest(limits.max_inflight_bytes));
        if bytes > most {
            let found = format!("the request needs {bytes} bytes until it is answered, expected at most {most}");
            let advice = "send fewer prompts, lower n, max_tokens or logprobs, or raise --max-inflight-bytes";
            return Err(ApiError::bad_request(format!("{found}; {advice}")));
        }
        Ok(())
    }
}
