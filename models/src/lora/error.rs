//! Reasons why an adapter cannot be used. Each message is one line.

use crate::LoadError;

/// Reason why an adapter cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The path is not a folder.
    #[error(
        "{path}: no such folder; expected the folder of a LoRA adapter (adapter_config.json, adapter_model.safetensors)"
    )]
    NoFolder {
        /// The path as given.
        path: String,
    },
    /// A file is missing, broken or has a setting that is not supported.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The rank of a module is above the limit.
    #[error("{file}: found rank {found} for {module}; expected at most {most} (--max-lora-rank)")]
    Rank {
        /// The file.
        file: String,
        /// The module, or `r` for all.
        module: String,
        /// Its rank.
        found: usize,
        /// The limit.
        most: usize,
    },
    /// The file is larger than an adapter of the greatest rank can be.
    #[error(
        "{file}: found {found} bytes; expected at most {most}, the size of an adapter of rank {rank} for this model (--max-lora-rank)"
    )]
    TooLarge {
        /// The file.
        file: String,
        /// Its size.
        found: u64,
        /// The limit.
        most: u64,
        /// The greatest rank.
        rank: usize,
    },
    /// A tensor belongs to no module of the model that adapters may target.
    #[error("{file}: found tensor {tensor}, which {problem}; expected an adapter for this model")]
    Unfit {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Why it does not fit.
        problem: String,
    },
    /// The shape of a tensor contradicts the model or the configuration.
    #[error(
        "{file}: tensor {tensor} has shape {found:?}; expected {expected:?} according to this model and adapter_config.json: is it an adapter for another model?"
    )]
    Shape {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// Its shape according to model and configuration.
        expected: Vec<usize>,
    },
    /// A tensor of a targeted module is missing, or its type is not supported.
    #[error("{file}: tensor {tensor} {found}; expected F32, F16 or BF16 {expected:?}")]
    Tensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// What was found.
        found: &'static str,
        /// Its shape.
        expected: Vec<usize>,
    },
    /// The files are no longer those that were loaded under this name.
    #[error("{path}: found an adapter with other contents than when it was loaded; load it again")]
    Changed {
        /// The folder.
        path: String,
    },
}

impl AdapterError {
    /// Whether the folder or one of its files does not exist.
    pub fn is_missing(&self) -> bool {
        matches!(self, AdapterError::NoFolder { .. } | AdapterError::Load(LoadError::MissingFile { .. }))
    }
}
