//! One sequence's place in a compiled grammar.

use sampling::{Constraint, ConstraintError, Mask, TokenSet};

/// llguidance's matcher, seen as a constraint.
pub(super) struct Matcher {
    inner: llguidance::Matcher,
    /// Tokens of the vocabulary; the id that equals it means "the text ends".
    vocab_size: usize,
}

impl Matcher {
    /// A matcher at the start of its grammar.
    pub fn new(inner: llguidance::Matcher, vocab_size: usize) -> Matcher {
        Matcher { inner, vocab_size }
    }

    /// The same state with caches of its own, so that two threads may go on with the two.
    pub fn deep_clone(&self) -> Matcher {
        Matcher { inner: self.inner.deep_clone(), vocab_size: self.vocab_size }
    }
}

impl Constraint for Matcher {
    fn mask(&mut self) -> Result<Mask, ConstraintError> {
        let set = self.inner.compute_mask_or_eos().map_err(failed)?;
        Ok(Mask { tokens: TokenSet::from_words(set.as_slice(), self.vocab_size), may_end: set.get(self.vocab_size) })
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.inner.consume_token(token).map_err(failed)
    }

    fn is_complete(&self) -> bool {
        self.inner.is_stopped() && !self.inner.is_error()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.deep_clone())
    }
}

fn failed(error: impl std::fmt::Display) -> ConstraintError {
    ConstraintError(super::compile::one_line(error))
}
