//! Errors in the files of a checkpoint.
//!
//! Invariant: the `Display` of every variant is one line that names the file, what was found, what was expected and, unless it is
//! obvious, what to do. Text from a file goes through [`one_line`] first.

use std::fmt::Display;

/// Reason why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The caller has ended the loading.
    #[error("the loading was stopped")]
    Stopped,
    /// The device failed while weights were loaded.
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
    /// The path does not exist and looks like the id of a repository on the Hugging Face hub.
    #[error(
        "{id}: no such folder; it looks like a hub id, which only the program quire and the crate hub resolve: download {id} first and pass its folder"
    )]
    HubId {
        /// The id as given, `org/name`.
        id: String,
    },
    /// The path is a file.
    #[error(
        "{path}: found a file; expected a folder in Hugging Face layout: pass the folder that holds config.json, or a .gguf file"
    )]
    NotAFolder {
        /// The path as given.
        path: String,
    },
    /// A file of the checkpoint is missing.
    #[error("{file}: not found; expected {expected}")]
    MissingFile {
        /// The missing file.
        file: String,
        /// What it should contain, or what may replace it.
        expected: String,
    },
    /// The operating system cannot read a file.
    #[error("{file}: cannot be read: {source}")]
    Io {
        /// The file.
        file: String,
        /// The system's error.
        source: std::io::Error,
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
        /// The key, dotted when nested.
        key: String,
        /// Its value.
        found: String,
        /// The accepted values.
        expected: String,
    },
    /// The decoder family is not supported.
    #[error("{file}: found architecture {found}, which is not supported; expected one of {supported}{advice}")]
    UnsupportedArchitecture {
        /// The file.
        file: String,
        /// The name in the file.
        found: String,
        /// The supported names.
        supported: String,
        /// The nearest name and the keys that it does not read, or nothing.
        advice: String,
    },
    /// The contents of a weight file contradict its header or its format.
    #[error("{file}: found {found}; expected {expected}: the file is truncated or damaged, download it again")]
    DamagedWeights {
        /// The file.
        file: String,
        /// What it contains.
        found: String,
        /// What it should contain.
        expected: String,
    },
    /// A GGUF file contradicts itself or its name, or uses what is not supported.
    #[error("{file}: found {found}; expected {expected}")]
    Gguf {
        /// The file.
        file: String,
        /// What it contains.
        found: String,
        /// What it should contain.
        expected: String,
    },
    /// A tensor that the architecture needs is missing.
    #[error(
        "{file}: tensor {tensor} not found; expected it with shape {expected}: do config.json and the weights belong to the same model?"
    )]
    MissingTensor {
        /// The weight file or index.
        file: String,
        /// The tensor's name.
        tensor: String,
        /// Its shape according to the configuration.
        expected: String,
    },
    /// The shape of a tensor contradicts the configuration.
    #[error("{file}: tensor {tensor} has shape {found:?}; expected {expected:?} according to config.json")]
    WrongShape {
        /// The weight file.
        file: String,
        /// The tensor's name.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// Its shape according to the configuration.
        expected: Vec<usize>,
    },
    /// The checkpoint has a tensor that the model does not read and that is not known to be harmless.
    #[error(
        "{file}: found tensor {tensor} {shape:?}, which the model of config.json does not read; expected tensors of that model alone: do config.json and the weights belong together?"
    )]
    UnusedTensor {
        /// The weight file.
        file: String,
        /// The tensor's name.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A tensor is stored in a type that is not supported.
    #[error("{file}: tensor {tensor} has dtype {found}; expected {expected}")]
    WrongDtype {
        /// The weight file.
        file: String,
        /// The tensor's name.
        tensor: String,
        /// Its type.
        found: String,
        /// The supported types.
        expected: String,
    },
    /// A quantised module contradicts `quantization_config`, or uses what is not supported.
    #[error("{file}: quantised module {module:?} has {found}; expected {expected}")]
    QuantizedModule {
        /// The file of the configuration.
        file: String,
        /// The module's name.
        module: String,
        /// What it has.
        found: String,
        /// What it should have.
        expected: String,
    },
}

impl From<device::DeviceError> for LoadError {
    fn from(error: device::DeviceError) -> LoadError {
        LoadError::Device(error.to_string())
    }
}

impl From<linear::LinearError> for LoadError {
    fn from(error: linear::LinearError) -> LoadError {
        LoadError::Device(error.to_string())
    }
}

/// `text` with every control character, including line breaks, replaced by a space, for messages of one line.
pub(crate) fn one_line(text: impl Display) -> String {
    text.to_string().replace(|c: char| c.is_control(), " ")
}
