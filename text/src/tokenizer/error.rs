//! Errors of tokenizing and detokenizing.

/// Reason why a text or a list of token ids cannot be converted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizeError {
    /// The tokenizer has no tokens for a text.
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
    /// A stretch of the text cannot be tokenized in pieces and is longer than the caller allows for one piece.
    #[error(
        "found a text of {found} bytes that this tokenizer cannot cut, expected at most {most}; send a shorter text"
    )]
    TooLong {
        /// Size in bytes of the text that cannot be split.
        found: usize,
        /// Greatest size allowed.
        most: usize,
    },
    /// The caller stopped the tokenization.
    #[error("tokenizing was stopped after {0} tokens")]
    Stopped(usize),
    /// The ids have no text.
    #[error("the token ids cannot be decoded: {0}")]
    Decode(String),
}
