//! The state of one sequence in a compiled grammar.

use std::sync::Arc;

use sampling::{Constraint, ConstraintError, Mask, TokenSet};

/// llguidance's matcher as a [`Constraint`].
pub(super) struct Matcher {
    inner: llguidance::Matcher,
    /// Size of the vocabulary; the id of this value stands for the end of the text.
    vocab_size: usize,
    /// Keywords of JSON schemas that the grammar does not enforce.
    pub unenforced: Arc<[String]>,
}

impl Matcher {
    /// Wraps a matcher at the start of its grammar.
    pub fn new(inner: llguidance::Matcher, vocab_size: usize, unenforced: Arc<[String]>) -> Matcher {
        Matcher { inner, vocab_size, unenforced }
    }

    /// Whether the text may continue with these tokens.
    pub fn allows(&self, tokens: &[u32]) -> bool {
        self.inner.deep_clone().validate_tokens(tokens).is_ok_and(|valid| valid == tokens.len())
    }

    /// Clones the state and its caches, so that two threads can use the two independently.
    pub fn deep_clone(&self) -> Matcher {
        Matcher { inner: self.inner.deep_clone(), vocab_size: self.vocab_size, unenforced: self.unenforced.clone() }
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
    ConstraintError(super::one_line(error))
}
