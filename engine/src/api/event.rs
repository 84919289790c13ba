//! The events of a request.

use sampling::{Sampled, TokenLogprobs};

/// Why a sequence ended.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// The token limit or the context was reached.
    Length,
    /// An end-of-sequence token (`None`), a stop token or a stop string.
    Stop(Option<StopCause>),
    /// The grammar of the sequence cannot be continued: it is too complex, or no token matches it.
    Grammar(String),
    /// The step of the request failed.
    Error(String),
}

/// What ended a sequence early.
#[derive(Clone, Debug, PartialEq)]
pub enum StopCause {
    /// One of `stop_token_ids`.
    Token(u32),
    /// One of `stop`.
    Text(String),
    /// The text matches the grammar of `structured_outputs` and nothing can follow. The last token is part of the text.
    Complete,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOutput {
    /// Token id.
    pub id: u32,
    /// Its log-probability and the best alternatives, if requested.
    pub logprobs: Option<TokenLogprobs>,
    /// Offset in characters of the token's text in the sequence's output text (`text_offset` of the completions API).
    pub text_offset: usize,
}

/// Numbers of drafts that were verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Drafts that became output.
    pub accepted: usize,
    /// All other drafts.
    pub rejected: usize,
}

impl std::ops::AddAssign for DraftCounts {
    fn add_assign(&mut self, other: DraftCounts) {
        self.accepted += other.accepted;
        self.rejected += other.rejected;
    }
}

/// What one or several steps added to a sequence of a request.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Delta {
    /// Index of the sequence, below `n`.
    pub index: u32,
    /// Final text: no partial character, and nothing that may still become a stop string.
    pub text: String,
    /// Tokens of this delta. Their text may follow in a later delta.
    pub tokens: Vec<TokenOutput>,
    /// Set on the last delta of the sequence.
    pub finish: Option<FinishReason>,
    /// Drafts that the steps verified.
    pub drafts: DraftCounts,
}

impl Delta {
    /// Appends the next delta of the same sequence.
    pub fn extend(&mut self, later: Delta) {
        self.text.push_str(&later.text);
        self.tokens.extend(later.tokens);
        self.finish = later.finish.or(self.finish.take());
        self.drafts += later.drafts;
    }
}

/// An event in a request's stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Log-probabilities of the prompt tokens (`None` for the first). The first event, if they were requested.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// The embedding of the prompt, or the logits of its labels, if they were requested.
    Embedding(Vec<f32>),
    /// The prompt has been computed.
    Started {
        /// Number of prompt tokens that came from the prefix cache.
        cached_tokens: usize,
    },
    /// Output of a sequence.
    Delta(Delta),
}

/// An event of a request on token ids.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenEvent {
    /// Log-probabilities of the prompt, once, before any token, if they were requested.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// The embedding of the prompt, or the logits of its labels, once, if they were requested.
    Embedding(Vec<f32>),
    /// The prompt has been computed.
    Started {
        /// Number of prompt tokens that came from the prefix cache.
        cached_tokens: usize,
    },
    /// A token of a sequence, its end, or both.
    Token {
        /// Index of the sequence.
        index: u32,
        /// The token; `None` if the sequence ends without one.
        token: Option<Sampled>,
        /// Set with the last event of the sequence.
        finish: Option<FinishReason>,
        /// Drafts whose verification ends with this token.
        drafts: DraftCounts,
    },
}
