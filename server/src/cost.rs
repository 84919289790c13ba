//! What a request costs: one value, computed from the parsed fields before any work and compared with the limits.
//!
//! A limit on each field does not bound their product, so the products are bounded here: prompts × sequences, tokens ×
//! alternatives × sequences, and the bytes that the server keeps for the request until it is answered. Those bytes are
//! taken from one budget that all requests share ([`Limits::max_inflight_bytes`]): what is left of it decides between an
//! answer and a 429.
//!
//! Tokens are counted from below while a prompt is still text, and exactly once it is tokenised; the cost is checked at both
//! times.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::ApiError;
use super::settings::Limits;

/// Bytes that a prompt's token takes: in the request, in the engine, in the scheduler, and in the answer's state.
const PROMPT_TOKEN: usize = 16;
/// Bytes of a log-probability: 12 in the engine's event, up to 96 as JSON.
const LOGPROB: usize = 108;
/// Bytes of a sequence beside its tokens: its place in the engine, its text's state, its choice in the answer.
const SEQUENCE: usize = 2048;
/// Bytes of text of a generated token.
const OUTPUT_TOKEN: usize = 4;
/// Answers of more log-probabilities or repeated bytes than this are not written on a thread that serves others.
const LARGE: usize = 512;

/// What a request may make the server do and keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Prompts, each an engine request.
    pub prompts: usize,
    /// Sequences of each prompt, candidates and beams included.
    pub sequences: usize,
    /// Sequences of each prompt that are returned.
    pub n: usize,
    /// Tokens of all prompts; a lower bound while they are text.
    pub prompt_tokens: usize,
    /// Most tokens of a sequence.
    pub max_tokens: usize,
    /// Log-probabilities that the answer gives for each prompt token, copies in several choices included.
    pub per_prompt_token: usize,
    /// Log-probabilities that the answer holds for each generated token.
    pub per_output_token: usize,
    /// Generated text is kept to the end, for an answer that is no stream.
    pub is_kept: bool,
    /// Bytes that every engine request keeps of its own: stop ids, biases.
    pub list_bytes: usize,
    /// Bytes that all of them share: long lists, grammars.
    pub shared_bytes: usize,
    /// Bytes of the prompts that the answer repeats, as text and as ids.
    pub repeated_bytes: usize,
    /// The field that asks for log-probabilities.
    pub logprobs_field: &'static str,
}

impl Cost {
    /// Sequences of the whole request.
    fn total_sequences(&self) -> usize {
        self.prompts.saturating_mul(self.sequences)
    }

    /// Log-probabilities in the whole answer.
    fn logprobs(&self) -> usize {
        let of_prompts = self.prompt_tokens.saturating_mul(self.per_prompt_token);
        let outputs = self.total_sequences().saturating_mul(self.max_tokens);
        of_prompts.saturating_add(outputs.saturating_mul(self.per_output_token))
    }

    /// Bytes that are kept until the request is answered, beside the engine's own memory. A sequence that runs is paid for
    /// by the cache; text piles up in those that have ended while others go on.
    pub fn bytes(&self) -> usize {
        let ended = if self.is_kept { self.total_sequences().saturating_sub(1) } else { 0 };
        let parts = [
            self.prompt_tokens.saturating_mul(PROMPT_TOKEN),
            self.total_sequences().saturating_mul(SEQUENCE),
            ended.saturating_mul(self.max_tokens).saturating_mul(OUTPUT_TOKEN),
            self.logprobs().saturating_mul(LOGPROB),
            self.prompts.saturating_mul(self.list_bytes),
            self.shared_bytes,
            self.repeated_bytes,
        ];
        parts.into_iter().fold(0, usize::saturating_add)
    }

    /// Whether writing the answer takes long enough to be done off the threads that serve everybody.
    pub fn is_large(&self) -> bool {
        self.logprobs() > LARGE || self.repeated_bytes > LARGE || self.total_sequences() > LARGE
    }

    /// Refuses what is over a limit, whatever else runs.
    pub fn check(&self, limits: &Limits) -> Result<(), ApiError> {
        let sequences = self.total_sequences();
        if sequences > limits.max_sequences {
            let what = format!("sequences ({} prompts of {})", self.prompts, self.sequences);
            let advice = "lower n or send fewer prompts (--max-sequences)";
            return Err(ApiError::over("n", sequences, limits.max_sequences, &what, advice));
        }
        if self.prompt_tokens > limits.max_request_tokens {
            let advice = "send fewer or shorter prompts (--max-request-tokens)";
            return Err(ApiError::over("prompt", self.prompt_tokens, limits.max_request_tokens, "tokens", advice));
        }
        let logprobs = self.logprobs();
        if logprobs > limits.max_logprob_entries {
            let advice = "lower it, n or max_tokens, shorten the prompts, or stream (--max-logprob-entries)";
            let what = "log-probabilities in the answer";
            return Err(ApiError::over(self.logprobs_field, logprobs, limits.max_logprob_entries, what, advice));
        }
        let (bytes, most) = (self.bytes(), limits.max_inflight_bytes);
        if bytes > most {
            return Err(ApiError::body(format!(
                "the request would keep {bytes} bytes until it is answered, expected at most {most}; send fewer prompts \
                 or lower n or max_tokens (--max-inflight-bytes)"
            )));
        }
        Ok(())
    }
}

/// The bytes that all requests in flight may take together.
pub struct Budget {
    free: Arc<Semaphore>,
    /// A large part has been given back since somebody looked.
    freed: Arc<AtomicBool>,
}

/// A part of the budget, given back when it is dropped.
#[derive(Debug, Default)]
pub struct Reserved {
    permit: Option<OwnedSemaphorePermit>,
    /// The most that it has held, in units.
    most: usize,
    freed: Arc<AtomicBool>,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.most >= NOTED {
            self.freed.store(true, Ordering::Release);
        }
    }
}

impl Reserved {
    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.permit.as_ref().is_none_or(|permit| permit.num_permits() == 0)
    }
}

/// The budget is counted in units of this many bytes.
const UNIT: usize = 1024;

/// Units of a part whose return is worth a look at what the allocator keeps.
const NOTED: usize = 256;

impl Budget {
    /// A budget of so many bytes.
    pub fn new(bytes: usize) -> Budget {
        let free = Semaphore::new(bytes.div_ceil(UNIT).min(Semaphore::MAX_PERMITS));
        Budget { free: Arc::new(free), freed: Arc::default() }
    }

    /// Changes `reserved` to hold `bytes`; answers 429, and leaves it as it is, where that is more than is free.
    pub fn resize(&self, reserved: &mut Reserved, bytes: usize) -> Result<(), ApiError> {
        let (held, wanted) =
            (reserved.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits), bytes.div_ceil(UNIT));
        if wanted <= held {
            drop(reserved.permit.as_mut().and_then(|permit| permit.split(held - wanted)));
            return Ok(());
        }
        let more =
            u32::try_from(wanted - held).ok().and_then(|more| self.free.clone().try_acquire_many_owned(more).ok());
        let more = more.ok_or_else(|| {
            ApiError::busy("requests in flight take as much memory as they may (--max-inflight-bytes): try again later")
        })?;
        (reserved.most, reserved.freed) = (wanted, self.freed.clone());
        match &mut reserved.permit {
            Some(permit) => permit.merge(more),
            none => *none = Some(more),
        }
        Ok(())
    }

    /// Whether a large part has been given back since the last call.
    pub fn was_freed(&self) -> bool {
        self.freed.swap(false, Ordering::AcqRel)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn param(cost: Cost, limits: &Limits) -> Option<String> {
        let error = cost.check(limits).err()?.to_json();
        Some(error["error"]["param"].as_str().unwrap_or_default().to_string())
    }

    #[test]
    fn each_product_has_its_limit_and_may_reach_it() {
        let limits = Limits {
            max_sequences: 8,
            max_request_tokens: 100,
            max_logprob_entries: 60,
            max_inflight_bytes: 1 << 20,
            ..Limits::default()
        };
        let plain = Cost { prompts: 2, sequences: 4, n: 4, prompt_tokens: 10, max_tokens: 5, ..Cost::default() };
        assert_eq!(param(plain, &limits), None);
        assert_eq!(param(Cost { sequences: 5, ..plain }, &limits).as_deref(), Some("n"));
        assert_eq!(param(Cost { prompt_tokens: 101, ..plain }, &limits).as_deref(), Some("prompt"));
        let scored = Cost { per_prompt_token: 2, per_output_token: 1, logprobs_field: "logprobs", ..plain };
        assert_eq!(param(scored, &limits), None, "10 · 2 + 2 · 4 · 5");
        assert_eq!(param(Cost { max_tokens: 6, ..scored }, &limits).as_deref(), Some("logprobs"));
        assert_eq!(param(Cost { shared_bytes: 2 << 20, ..plain }, &limits).as_deref(), Some(""));
        let endless = Cost { max_tokens: usize::MAX, is_kept: true, ..plain };
        assert_eq!(param(endless, &limits).as_deref(), Some(""), "sums do not overflow");
    }

    #[test]
    fn a_budget_is_shared_and_given_back() {
        let (budget, mut one, mut two) = (Budget::new(10 * UNIT), Reserved::default(), Reserved::default());
        budget.resize(&mut one, 6 * UNIT).unwrap();
        assert_eq!(budget.resize(&mut two, 5 * UNIT).unwrap_err().status().as_u16(), 429);
        budget.resize(&mut one, 2 * UNIT).unwrap();
        budget.resize(&mut two, 8 * UNIT).unwrap();
        assert!(budget.resize(&mut one, 2 * UNIT + 1).is_err());
        drop(two);
        budget.resize(&mut one, 10 * UNIT).unwrap();
    }
}
