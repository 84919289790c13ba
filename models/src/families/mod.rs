//! Families of decoders: each declares a [`Decoder`] from the keys of `config.json`.
//!
//! A family is one file that reads like its model card: the keys that it reads, with the defaults of transformers, and its
//! layers. To add one, write a file here and add it to [`FAMILIES`]; docs/adding-a-model.md shows the steps. A value that would
//! change the results and is not supported (another activation, another rope, a quantised checkpoint) is an error that names the
//! key. Keys that do not affect the results are ignored.

mod common;
mod config;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;
mod rope;

use serde_json::Value;

pub use config::ModelConfig;

// What a family file imports.
use crate::checkpoint::error::{LoadError, one_line};
use crate::checkpoint::fields::Fields;
use crate::decoder::Decoder;
use common::{Common, Windows};

/// A family of decoders.
pub(crate) struct Family {
    /// Name in `architectures`.
    pub class: &'static str,
    /// Name in `model_type`.
    pub model_type: &'static str,
    /// Declares the decoder, given the keys of `config.json` and its `max_position_embeddings`.
    pub declare: fn(&Fields<'_>, usize) -> Result<Decoder, LoadError>,
}

/// All supported families.
const FAMILIES: [&Family; 4] = [&llama::FAMILY, &mistral::FAMILY, &qwen2::FAMILY, &qwen3::FAMILY];

/// Finds the family named by `architectures`, or by `model_type` if that key is absent. The error lists the supported families.
fn find(fields: &Fields<'_>, file: &str) -> Result<&'static Family, LoadError> {
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
