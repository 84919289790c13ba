//! Errors in the files of a checkpoint that concern texts. Each is one line: file, what was found, what was expected.

use std::fmt::Display;

/// Reason why a tokenizer or a chat template cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file cannot be read; the message is that of its reader.
    #[error("{0}")]
    Unread(String),
    /// A file is missing, or has contents that cannot be used.
    #[error("{file}: {found}; expected {expected}")]
    File {
        /// The file.
        file: String,
        /// What is wrong with it.
        found: String,
        /// What it should contain, or what may replace it.
        expected: String,
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

impl LoadError {
    pub(crate) fn file(file: String, found: String, expected: impl Into<String>) -> LoadError {
        LoadError::File { file, found, expected: expected.into() }
    }

    pub(crate) fn json(file: String, problem: impl Display) -> LoadError {
        let found = format!("found broken JSON ({})", one_line(problem));
        LoadError::file(file, found, "the file as published: download it again")
    }

    pub(crate) fn tokenizer(file: &str, problem: impl Display) -> LoadError {
        let found = format!("found a tokenizer that cannot be used ({})", one_line(problem));
        LoadError::file(file.to_string(), found, "a tokenizer.json of the `tokenizers` library")
    }
}

/// `text` with every control character, including line breaks, replaced by a space, for messages of one line.
pub(crate) fn one_line(text: impl Display) -> String {
    text.to_string().replace(|c: char| c.is_control(), " ")
}
