//! What a caller hears back.

use sampling::{Sampled, TokenLogprobs};

/// Why a sequence ended.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// The token limit or the context was reached.
    Length,
    /// An end-of-sequence token (`None`), a stop token or a stop string.
    Stop(Option<StopCause>),
    /// The grammar that held the sequence can not be followed further: it is too complex, or leads nowhere.
    Grammar(String),
    /// The step that held the request failed.
    Error(String),
}

/// What ended a sequence early.
#[derive(Clone, Debug, PartialEq)]
pub enum StopCause {
    /// One of `stop_token_ids`.
    Token(u32),
    /// One of `stop`.
    Text(String),
    /// Nothing can follow by the grammar of `structured_outputs`. The last token is a part of the text.
    Complete,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOutput {
    /// Its id.
    pub id: u32,
    /// Its log-probability and the best alternatives, when asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Offset in characters of this token's text in the sequence's output text (as `text_offset` of the completions API).
    pub text_offset: usize,
}

/// News of one sequence of a request: what a step (or several) added to it.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Delta {
    /// Which of the `n` sequences.
    pub index: u32,
    /// Text that is final: no half characters, nothing that may still become a stop string.
    pub text: String,
    /// Tokens of this delta; their text may arrive in a later delta.
    pub tokens: Vec<TokenOutput>,
    /// Set on the last delta of the sequence.
    pub finish: Option<FinishReason>,
}

impl Delta {
    /// Appends what comes after it in the same sequence.
    pub fn extend(&mut self, later: Delta) {
        self.text.push_str(&later.text);
        self.tokens.extend(later.tokens);
        self.finish = later.finish.or(self.finish.take());
    }
}

/// What a request's stream carries.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Log-probabilities of the prompt, one entry per prompt token (`None` for the first); comes first, only when asked for.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// The embedding of the prompt, `[hidden_size]`, of length 1; only when asked for.
    Embedding(Vec<f32>),
    /// The prompt has been computed; this many of its tokens came from the prefix cache.
    Started {
        /// Prompt tokens that were not recomputed.
        cached_tokens: usize,
    },
    /// News of a sequence.
    Delta(Delta),
}

/// What a step gave one request, on token ids.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenEvent {
    /// Log-probabilities of the prompt, once, before any token.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// The embedding of the prompt, once.
    Embedding(Vec<f32>),
    /// The prompt has been computed; so many of its tokens came from the prefix cache.
    Started {
        /// Prompt tokens that were not recomputed.
        cached_tokens: usize,
    },
    /// A token (none if the sequence ends without) and, if it was the last, why.
    Token {
        /// Which of the request's sequences.
        index: u32,
        /// The token and its log-probability.
        token: Option<Sampled>,
        /// Set on the last.
        finish: Option<FinishReason>,
    },
}
