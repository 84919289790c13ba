//! Everything that can be wrong with a checkpoint, as values.
//!
//! Invariant: the `Display` of every variant is one line that names the file, what was found, what was expected and, where it is
//! not plain, what to do. Text that comes out of a file goes through [`one_line`] before it gets in here.

use std::fmt::Display;

/// Why a checkpoint folder can not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The device could not take the weights.
    #[error("{0}")]
    Device(String),
    /// The path does not exist.
    #[error(
        "{path}: no such folder; expected a checkpoint folder in Hugging Face layout (config.json, tokenizer.json, *.safetensors)"
    )]
    NoSuchFolder {
        /// The path as given.
        path: String,
    },
    /// The path does not exist and reads like the id of a repository on the hub.
    #[error(
        "{id}: no such folder; it reads like a hub id, and downloading is not there yet: expected a folder, so download {id} and give its folder"
    )]
    HubId {
        /// The id as given, `org/name`.
        id: String,
    },
    /// The path is a file.
    #[error("{path}: found a file; expected a folder in Hugging Face layout: give the folder that holds config.json")]
    NotAFolder {
        /// The path as given.
        path: String,
    },
    /// A file of the checkpoint is not there.
    #[error("{file}: not found; expected {expected}")]
    MissingFile {
        /// The file that was looked for.
        file: String,
        /// What it would hold, or what would do in its place.
        expected: String,
    },
    /// The operating system refuses to give a file.
    #[error("{file}: can not be read: {source}")]
    Io {
        /// The file.
        file: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is not JSON, or not of the expected structure.
    #[error("{file}: found broken JSON ({problem}); expected the file as published: fetch it again")]
    Json {
        /// The file.
        file: String,
        /// The parser's complaint with line and column.
        problem: String,
    },
    /// A setting has a value that makes no sense or is not supported.
    #[error("{file}: `{key}` is {found}; expected {expected}")]
    Setting {
        /// The file.
        file: String,
        /// The key, dotted when nested.
        key: String,
        /// Its value.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// A decoder family that this engine does not run.
    #[error("{file}: found architecture {found}, which is not supported; expected one of {supported}")]
    UnsupportedArchitecture {
        /// The file.
        file: String,
        /// The name in the file.
        found: String,
        /// The names that would do.
        supported: String,
    },
    /// A weight file whose bytes are not what its header or the format says.
    #[error("{file}: found {found}; expected {expected}: the file is truncated or damaged, fetch it again")]
    DamagedWeights {
        /// The file.
        file: String,
        /// What it holds.
        found: String,
        /// What it should hold.
        expected: String,
    },
    /// A tensor that the architecture needs is not there.
    #[error(
        "{file}: tensor {tensor} not found; expected it with shape {expected}: are config.json and the weights of the same model?"
    )]
    MissingTensor {
        /// The weight file or index.
        file: String,
        /// The tensor's name.
        tensor: String,
        /// Its shape by the configuration.
        expected: String,
    },
    /// A tensor has another shape than the configuration asks for.
    #[error("{file}: tensor {tensor} has shape {found:?}; expected {expected:?} by config.json")]
    WrongShape {
        /// The weight file.
        file: String,
        /// The tensor's name.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// Its shape by the configuration.
        expected: Vec<usize>,
    },
    /// A tensor is stored in a type that is not understood.
    #[error("{file}: tensor {tensor} has dtype {found}; expected F32, F16 or BF16 (an unquantised checkpoint)")]
    WrongDtype {
        /// The weight file.
        file: String,
        /// The tensor's name.
        tensor: String,
        /// Its type.
        found: String,
    },
    /// The tokenizer can not be built.
    #[error(
        "{file}: found a tokenizer that can not be used ({problem}); expected a tokenizer.json of the `tokenizers` library"
    )]
    Tokenizer {
        /// The file.
        file: String,
        /// The library's complaint.
        problem: String,
    },
    /// The tokenizer makes ids for which the model has no embedding.
    #[error(
        "{file}: found token id {greatest_id}; expected ids below {vocab_size}, the `vocab_size` of config.json: the tokenizer is of another model"
    )]
    TokenizerMismatch {
        /// The file.
        file: String,
        /// The greatest id that the tokenizer makes.
        greatest_id: usize,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// The chat template is not Jinja, or uses what is not there.
    #[error(
        "{file}: found a chat template that can not be used ({problem}); expected Jinja as transformers renders it"
    )]
    ChatTemplate {
        /// The file.
        file: String,
        /// The template engine's complaint with the line.
        problem: String,
    },
}

/// `text` with every control character, line breaks included, as a space: it goes into messages of one line.
pub(crate) fn one_line(text: impl Display) -> String {
    text.to_string().replace(|c: char| c.is_control(), " ")
}
