//! Text to token ids and back, over the `tokenizers` library.
//!
//! `tokenizer.json` is the whole truth: its post-processor decides which special tokens are added, its added tokens which texts
//! become one id. Padding and truncation that were saved with it are switched off, since a prompt is never padded or cut here.

use std::collections::HashSet;

use crate::error::{LoadError, one_line};
use crate::files::ModelFiles;

mod bytes;
use bytes::TokenSpelling;

const FILE: &str = "tokenizer.json";

/// Why a text or a list of ids can not be converted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizeError {
    /// The tokenizer has no tokens for a text.
    #[error("the text can not be tokenized: {0}")]
    Encode(String),
    /// The ids have no text.
    #[error("the token ids can not be decoded: {0}")]
    Decode(String),
}

/// A checkpoint's tokenizer; may be shared between threads.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    special: HashSet<u32>,
    vocab_size: usize,
    spelling: TokenSpelling,
    file: String,
}

impl Tokenizer {
    /// Builds the tokenizer of `tokenizer.json`.
    ///
    /// # Errors
    /// When the file is missing or is no tokenizer of the `tokenizers` library.
    pub fn load(files: &ModelFiles) -> Result<Self, LoadError> {
        let file = files.locate(FILE);
        let unusable = |problem: String| LoadError::Tokenizer { file: file.clone(), problem };
        let mut inner =
            tokenizers::Tokenizer::from_bytes(&*files.bytes(FILE)?).map_err(|error| unusable(one_line(error)))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| unusable(one_line(error)))?;

        let vocab_size = inner.get_vocab(true).into_values().max().map_or(0, |greatest| greatest as usize + 1);
        if vocab_size == 0 {
            return Err(unusable("it has no tokens".to_string()));
        }
        let special = inner.get_added_tokens_decoder().into_iter().filter(|(_, token)| token.special).map(|(id, _)| id);
        let special = special.collect();
        let spelling = TokenSpelling::of(inner.get_decoder()).map_err(unusable)?;
        Ok(Tokenizer { inner, special, vocab_size, spelling, file })
    }

    /// Whether every id has a row in an embedding of `vocab_size` rows.
    ///
    /// # Errors
    /// When the tokenizer makes ids beyond it: it belongs to another model.
    pub fn check(&self, vocab_size: usize) -> Result<(), LoadError> {
        if self.vocab_size > vocab_size {
            let file = self.file.clone();
            return Err(LoadError::TokenizerMismatch { file, greatest_id: self.vocab_size - 1, vocab_size });
        }
        Ok(())
    }

    /// The ids of `text`. Text that spells a special token becomes that token; `add_special` also adds those that every prompt of
    /// this model gets, such as a beginning-of-sequence token.
    ///
    /// # Errors
    /// When the vocabulary has no way to write the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizeError> {
        let encoding =
            self.inner.encode_fast(text, add_special).map_err(|error| TokenizeError::Encode(one_line(error)))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`; bytes that are no UTF-8 become U+FFFD, unknown ids nothing, special tokens nothing where `skip_special`.
    ///
    /// # Errors
    /// When the library's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizeError> {
        self.inner.decode(ids, skip_special).map_err(|error| TokenizeError::Decode(one_line(error)))
    }

    /// The greatest id plus one, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The token as the vocabulary spells it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token as the vocabulary spells it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether `id` is left out of a text that skips special tokens.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The raw bytes that the token adds to a text, which may be a part of a character; empty for an unknown id.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.id_to_token(id).map_or_else(Vec::new, |token| self.spelling.bytes(&token))
    }
}
