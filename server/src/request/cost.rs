//! Cost of a request: computed from its fields before any work, and compared with the limits.
//!
//! Limits of single fields do not bound their products. The products are bounded here: prompts × sequences, tokens ×
//! alternatives × sequences, and the bytes that the server holds for the request until it is answered. These bytes are
//! taken from one budget that all requests share ([`Budget`](crate::http::Budget)). If it is exhausted, the request fails with 429.
//!
//! The cost is checked twice: with a lower bound of the tokens while a prompt is text, and after tokenization.

use crate::app::{Entries, KEPT_TOKEN};
use crate::http::{ApiError, largest_part};
use crate::settings::Limits;

/// Bytes per prompt token: in the request, the engine, the scheduler and the state of the response.
const PROMPT_TOKEN: usize = 16;
/// Bytes per repeated token id: as a number, and as JSON.
pub const TOKEN_ID: usize = 4 + 8;
/// Bytes per sequence besides its tokens: its state in the engine, its text, its choice in the response.
const SEQUENCE: usize = 2048;
/// Bytes of text per generated token.
const OUTPUT_TOKEN: usize = 4;
/// Responses with more log probabilities, repeated bytes or sequences than this are written off the serving threads.
const LARGE: usize = 512;

/// Upper bounds of the work and memory of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Number of prompts, each an engine request.
    pub prompts: usize,
    /// Number of sequences per prompt, including candidates and beams.
    pub sequences: usize,
    /// Number of sequences per prompt that are engine requests of their own at once, because not all run at once.
    pub later_sequences: usize,
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
    /// Whether the response is a stream.
    pub streams: bool,
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
        let copies = 1 + self.later_sequences;
        let ended = if self.is_kept { self.total_sequences().saturating_sub(1) } else { 0 };
        let parts = [
            self.prompt_tokens.saturating_mul(PROMPT_TOKEN).saturating_mul(copies),
            self.total_sequences().saturating_mul(SEQUENCE),
            ended.saturating_mul(self.max_tokens).saturating_mul(OUTPUT_TOKEN),
            self.logprobs().bytes,
            if self.keeps_ids { self.output_tokens().saturating_mul(KEPT_TOKEN + TOKEN_ID) } else { 0 },
            self.prompts.saturating_mul(self.list_bytes).saturating_mul(copies),
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
        let (bytes, most) = (self.bytes(), largest_part(limits.max_inflight_bytes));
        if bytes > most {
            let found = format!("the request needs {bytes} bytes until it is answered, expected at most {most}");
            let advice = "send fewer prompts, lower n, max_tokens or logprobs, or raise --max-inflight-bytes";
            return Err(ApiError::bad_request(format!("{found}; {advice}")));
        }
        Ok(())
    }
}
