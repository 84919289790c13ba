//! `config.json` with its spellings unified and its values checked.

use serde::Serialize;
use serde_json::{Map, Value};

use super::common::max_position_embeddings;
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::checkpoint::files::ModelFiles;
use crate::decoder::Decoder;

const FILE: &str = "config.json";

/// Configuration of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    /// Name of the family in `architectures`.
    pub architecture: &'static str,
    /// Declaration of its layers.
    pub decoder: Decoder,
    /// Greatest number of tokens in a context, according to the checkpoint.
    pub max_position_embeddings: usize,
    /// End-of-sequence token ids (a number or a list in the file).
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// The file is missing or broken, the architecture or one of its options is not supported, or a size makes no sense.
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
        let max_position_embeddings = max_position_embeddings(&fields)?;
        Ok(ModelConfig {
            architecture: family.class,
            decoder: (family.declare)(&fields, max_position_embeddings)?,
            max_position_embeddings,
            eos_token_ids: fields.token_ids("eos_token_id")?,
        })
    }
}
