//! The state of one sequence in a compiled grammar.

use std::sync::Arc;

use sampling::{Constraint, ConstraintError, Mask, TokenSet};

/// llguidance's matcher as a [`Constraint`].
pub(super) struct Matcher {
    inner: llguidance::Matcher,
    /// Size of the vocabulary; the id of this value stands for the end of the text.
    vocab_size: usize,
    /// The mask at the start of the grammar, until it is asked for.
    first: Option<Mask>,
    /// Keywords of JSON schemas that the grammar does not enforce.
    pub unenforced: Arc<[String]>,
}

impl Matcher {
    /// Wraps a matcher at the start of its grammar, and computes the first mask, which all copies have. Some errors show only there.
    pub fn new(
        inner: llguidance::Matcher,
        vocab_size: usize,
        unenforced: Arc<[String]>,
    ) -> Result<Matcher, ConstraintError> {
        let mut matcher = Matcher { inner, vocab_size, first: None, unenforced };
        matcher.first = Some(matcher.mask()?);
        Ok(matcher)
    }

    /// Whether the text may continue with these tokens.
    pub fn allows(&self, tokens: &[u32]) -> bool {
        self.inner.deep_clone().validate_tokens(tokens).is_ok_and(|valid| valid == tokens.len())
    }

    /// Clones the state and its caches, so that two threads can use the two independently.
    pub fn deep_clone(&self) -> Matcher {
        let Matcher { inner, vocab_size, first, unenforced } = self;
        Matcher {
            inner: inner.deep_clone(),
            vocab_size: *vocab_size,
            first: first.clone(),
            unenforced: unenforced.clone(),
        }
    }
}

impl Constraint for Matcher {
    fn mask(&mut self) -> Result<Mask, ConstraintError> {
        if let Some(first) = self.first.take() {
            return Ok(first);
        }
        let set = self.inner.compute_mask_or_eos().map_err(failed)?;
        Ok(Mask { tokens: TokenSet::from_words(set.as_slice(), self.vocab_size), may_end: set.get(self.vocab_size) })
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.first = None;
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
