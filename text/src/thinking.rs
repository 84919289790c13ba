//! A limit of the reasoning in front of an answer, in tokens.

use std::sync::Arc;

use crate::tools::special_token;
use crate::{Detokenizer, ReasoningFormat, ReasoningParser, TokenizeError, Tokenizer};

/// Number of tokens at the end of a prompt that tell whether it ends within reasoning.
const TAIL: usize = 4096;

/// How many tokens the reasoning of an answer may have, and the tokens that end it.
#[derive(Clone, Debug, PartialEq)]
pub struct ThinkingLimit {
    tokens: usize,
    /// Parser of the text after the prompt.
    parser: ReasoningParser,
    close: Arc<[u32]>,
}

impl ReasoningFormat {
    /// A limit of `tokens` for the answer to a prompt; `None` for a format without reasoning. The marker at the end of the reasoning
    /// does not count.
    ///
    /// # Errors
    /// The tokenizer cannot write the marker at the end.
    pub fn limit(
        self,
        tokenizer: &Tokenizer,
        prompt: &[u32],
        tokens: usize,
    ) -> Result<Option<ThinkingLimit>, TokenizeError> {
        let tail = &prompt[prompt.len().saturating_sub(TAIL)..];
        let Some(parser) = self.parser(&tokenizer.decode(tail, false)?) else { return Ok(None) };
        let (_, close) = self.markers();
        let close = match special_token(tokenizer, close) {
            Some(id) => vec![id],
            None => tokenizer.encode(close, false)?,
        };
        Ok(Some(ThinkingLimit { tokens, parser, close: close.into() }))
    }
}

/// Counts the tokens of one sequence's reasoning, and says which tokens end it when the limit is reached.
///
/// What is reasoning is what [`ReasoningParser`] returns as reasoning. The state depends on the tokens of the sequence alone.
#[derive(Clone)]
pub struct ThinkingBudget {
    detokenizer: Detokenizer,
    parser: ReasoningParser,
    close: Arc<[u32]>,
    /// Number of tokens that the reasoning may still have.
    left: usize,
    /// Number of tokens of `close` that have followed the last token of the reasoning.
    closing: usize,
}

impl ThinkingBudget {
    /// The state at the beginning of the answer to `prompt`.
    pub fn new(limit: ThinkingLimit, tokenizer: Arc<Tokenizer>, prompt: &[u32]) -> ThinkingBudget {
        let ThinkingLimit { tokens, parser, close } = limit;
        let detokenizer = Detokenizer::new(tokenizer, prompt, false);
        ThinkingBudget { detokenizer, parser, close, left: tokens, closing: 0 }
    }

    /// The token that must follow, if the reasoning goes on and has used up its tokens.
    pub fn forced(&self) -> Option<u32> {
        let is_spent = self.left == 0 && self.parser.is_within();
        self.close.get(self.closing).copied().filter(|_| is_spent)
    }

    /// Advances by a token.
    pub fn accept(&mut self, token: u32) {
        if !self.parser.may_reason() {
            return;
        }
        if self.forced() == Some(token) {
            self.closing += 1;
        } else if self.parser.is_within() {
            self.left = self.left.saturating_sub(1);
        }
        let text = self.detokenizer.push(token);
        self.parser.push(&text);
        // A format may have a second part of reasoning, which is closed in the same way.
        if !self.parser.is_within() {
            self.closing = 0;
        }
    }
}
