//! `config.json` as this engine understands it, whatever the spelling on disk.

use serde::Serialize;
use serde_json::{Map, Value};

use super::common::max_position_embeddings;
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::checkpoint::files::ModelFiles;
use crate::decoder::Decoder;

const FILE: &str = "config.json";

/// What a checkpoint is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    /// Name of the family in `architectures`.
    pub architecture: &'static str,
    /// What its layers compute, and where their weights are.
    pub decoder: Decoder,
    /// Longest context in tokens that the checkpoint states.
    pub max_position_embeddings: usize,
    /// End-of-sequence ids (a number or a list in the file).
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// When the file is missing or broken, the architecture or one of its options is not supported, or a size makes no sense.
    pub fn load(files: &ModelFiles) -> Result<ModelConfig, LoadError> {
        let map: Map<String, Value> = files.read_json(FILE)?;
        let fields = Fields::new(files.locate(FILE), &map);
        let family = super::find(&fields, &files.locate(FILE))?;
        if let Some(quantization) = fields.object("quantization_config")? {
            let expected = "an unquantised checkpoint (F32, F16 or BF16 weights)";
            return Err(match quantization.get("quant_method") {
                Some(_) => quantization.wrong("quant_method", expected),
                None => fields.wrong("quantization_config", expected),
            });
        }
        Ok(ModelConfig {
            architecture: family.class,
            decoder: (family.declare)(&fields)?,
            max_position_embeddings: max_position_embeddings(&fields)?,
            eos_token_ids: fields.token_ids("eos_token_id")?,
        })
    }
}
