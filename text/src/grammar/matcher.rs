//! The state of one sequence in a compiled grammar.

use std::sync::Arc;

use super::{GrammarError, one_line};

/// What may follow in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    /// One bit per token: bit `j` of word `i` is id `32 i + j`. Bits past the vocabulary have no meaning.
    pub words: Vec<u32>,
    /// Whether the text may end here.
    pub may_end: bool,
}

/// The state of one sequence in a grammar. It depends only on the tokens that it has accepted.
pub struct Matcher {
    inner: llguidance::Matcher,
    /// Size of the vocabulary; the id of this value stands for the end of the text.
    vocab_size: usize,
    /// The mask at the start of the grammar, until it is asked for.
    first: Option<Mask>,
    unenforced: Arc<[String]>,
}

impl Matcher {
    /// Wraps a matcher at the start of its grammar, and computes the first mask, which all copies have. Some errors show only there.
    pub(super) fn new(
        inner: llguidance::Matcher,
        vocab_size: usize,
        unenforced: Arc<[String]>,
    ) -> Result<Matcher, GrammarError> {
        let mut matcher = Matcher { inner, vocab_size, first: None, unenforced };
        matcher.first = Some(matcher.mask()?);
        Ok(matcher)
    }

    /// Number of tokens in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Keywords of JSON schemas that the grammar does not enforce, in alphabetical order.
    pub fn unenforced(&self) -> &Arc<[String]> {
        &self.unenforced
    }

    /// Whether the text may continue with these tokens.
    pub(super) fn allows(&self, tokens: &[u32]) -> bool {
        self.inner.deep_clone().validate_tokens(tokens).is_ok_and(|valid| valid == tokens.len())
    }

    /// Computes what may follow, which walks the vocabulary.
    ///
    /// # Errors
    /// The grammar is too complex at this point.
    pub fn mask(&mut self) -> Result<Mask, GrammarError> {
        if let Some(first) = self.first.take() {
            return Ok(first);
        }
        let set = self.inner.compute_mask_or_eos().map_err(failed)?;
        Ok(Mask { words: set.as_slice().to_vec(), may_end: set.get(self.vocab_size) })
    }

    /// Advances by a token, which must not be one that ends the text.
    ///
    /// # Errors
    /// The token was not in the mask.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        self.first = None;
        self.inner.consume_token(token).map_err(failed)
    }

    /// Whether the text may end and nothing can follow.
    pub fn is_complete(&self) -> bool {
        self.inner.is_stopped() && !self.inner.is_error()
    }
}

/// Copies the state and its caches, so that two threads can use the two independently.
impl Clone for Matcher {
    fn clone(&self) -> Matcher {
        let Matcher { inner, vocab_size, first, unenforced } = self;
        Matcher {
            inner: inner.deep_clone(),
            vocab_size: *vocab_size,
            first: first.clone(),
            unenforced: unenforced.clone(),
        }
    }
}

fn failed(error: impl std::fmt::Display) -> GrammarError {
    GrammarError(one_line(error))
}
