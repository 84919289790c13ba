//! The families of decoders: from the keys of `config.json` to a [`Decoder`].
//!
//! A family is one file that reads like its model card: which keys it reads, with the defaults of transformers, and what its
//! layers are. A new one is a file here and a line in [`FAMILIES`]; see docs/adding-a-model.md. What would change the numbers and
//! is not supported (another activation, another rope, a quantised checkpoint) is refused by name. Other keys are ignored.

mod common;
mod config;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;
mod rope;

use serde_json::Value;

pub use config::ModelConfig;

use crate::checkpoint::error::{LoadError, one_line};
use crate::checkpoint::fields::Fields;
use crate::decoder::Decoder;

/// A family of decoders.
pub(crate) struct Family {
    /// Its name in `architectures`.
    pub class: &'static str,
    /// Its name in `model_type`.
    pub model_type: &'static str,
    /// Reads `config.json`.
    pub declare: fn(&Fields<'_>) -> Result<Decoder, LoadError>,
}

/// Every family that can be run.
const FAMILIES: [&Family; 4] = [&llama::FAMILY, &mistral::FAMILY, &qwen2::FAMILY, &qwen3::FAMILY];

/// The family by `architectures`, or by `model_type` where that is absent.
///
/// # Errors
/// When there is no such family; names those that exist.
pub(crate) fn find(fields: &Fields<'_>, file: &str) -> Result<&'static Family, LoadError> {
    let class = fields.read("architectures", "a list with the name of one architecture", |value| {
        match value.as_array()?.as_slice() {
            [Value::String(name)] => Some(name.as_str()),
            _ => None,
        }
    })?;
    let name = match class {
        Some(name) => Some(name),
        None => fields.string("model_type")?,
    };
    let found = FAMILIES.into_iter().find(|family| match class {
        Some(name) => family.class == name,
        None => Some(family.model_type) == name,
    });
    found.ok_or_else(|| LoadError::UnsupportedArchitecture {
        file: file.to_string(),
        found: name.map_or("no name".to_string(), one_line),
        supported: FAMILIES.map(|family| family.class).join(", "),
    })
}
