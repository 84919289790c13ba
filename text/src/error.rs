//! Errors in the files of a checkpoint that concern texts. Each is one line: file, what was found, what was expected.

use std::fmt::Display;

/// Reason why a tokenizer or a chat template cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file cannot be read; the message is that of its reader.
    #[error("{0}")]
    File(String),
    /// A file is missing.
    #[error("{file}: not found; expected {expected}")]
    Missing {
        /// The missing file.
        file: String,
        /// What may replace it.
        expected: String,
    },
    /// A file is not JSON, or does not have the expected structure.
    #[error("{file}: found broken JSON ({problem}); expected the file as published: download it again")]
    Json {
        /// The file.
        file: String,
        /// The parser's message with line and column.
        problem: String,
    },
    /// A setting has a value that is invalid or not supported.
    #[error("{file}: `{key}` is {found}; expected {expected}")]
    Setting {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// The accepted values.
        expected: String,
    },
    /// The tokenizer cannot be built.
    #[error(
        "{file}: found a tokenizer that cannot be used ({problem}); expected a tokenizer.json of the `tokenizers` library"
    )]
    Tokenizer {
        /// The file.
        file: String,
        /// The library's message.
        problem: String,
    },
    /// The tokenizer produces ids for which the model has no embedding.
    #[error(
        "{file}: found token id {greatest_id}; expected ids below {vocab_size}, the `vocab_size` of config.json: the tokenizer belongs to another model"
    )]
    TokenizerMismatch {
        /// The file.
        file: String,
        /// The greatest id of the tokenizer.
        greatest_id: usize,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// The chat template is not valid Jinja, or uses a feature that does not exist.
    #[error("{file}: found a chat template that cannot be used ({problem}); expected Jinja as transformers renders it")]
    ChatTemplate {
        /// The file.
        file: String,
        /// The template engine's message with the line.
        problem: String,
    },
}

/// `text` with every control character, including line breaks, replaced by a space, for messages of one line.
pub(crate) fn one_line(text: impl Display) -> String {
    text.to_string().replace(|c: char| c.is_control(), " ")
}
