//! Reading and checking the files of a checkpoint: settings, weights, defaults. Nothing here depends on a family.

mod beginning;
pub(crate) mod bytes;
mod demo;
pub(crate) mod error;
pub(crate) mod fields;
pub(crate) mod files;
mod generation;
pub mod gguf;
pub(crate) mod pattern;
mod python;
pub(crate) mod quantized;
mod stored_as;
pub(crate) mod weights;

pub use beginning::{Needed, needed};
pub use bytes::FileBytes;
pub use demo::demo;
pub use error::LoadError;
pub use files::ModelFiles;
pub use generation::GenerationDefaults;
pub use stored_as::stored_as;
pub use weights::{RoundActivations, WeightView, Weights};
