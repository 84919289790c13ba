//! Why tokens and texts can not be converted.

/// Why a text or a list of ids can not be converted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizeError {
    /// The tokenizer has no tokens for a text.
    #[error("the text can not be tokenized: {0}")]
    Encode(String),
    /// The text has to be tokenised at once, and is longer than the caller wants that to be.
    #[error(
        "found {found} bytes that this tokenizer has to take at once, expected at most {most}; send a shorter text"
    )]
    TooLong {
        /// Bytes of what cannot be divided.
        found: usize,
        /// The most that was allowed.
        most: usize,
    },
    /// The caller did not want to go on.
    #[error("tokenizing was stopped after {0} tokens")]
    Stopped(usize),
    /// The ids have no text.
    #[error("the token ids can not be decoded: {0}")]
    Decode(String),
}
