//! `config.json` with its spellings unified and its values checked.

use serde::Serialize;
use serde_json::{Map, Value};

use super::Family;
use super::sizes::{self, MAX_POSITIONS};
use super::unread;
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::checkpoint::files::ModelFiles;
use crate::checkpoint::quantized::config::QuantizationConfig;
use crate::decoder::Decoder;

const FILE: &str = "config.json";

/// The text part of a multimodal configuration.
const TEXT: &str = "text_config";

/// Keys that belong to the text part but may lie beside it.
const SHARED: [&str; 4] = ["architectures", "eos_token_id", "tie_word_embeddings", "quantization_config"];

/// Configuration of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    /// Name of the family in `architectures`.
    pub architecture: &'static str,
    /// Declaration of its layers.
    pub decoder: Decoder,
    /// Declaration of the layer behind the last one that predicts a further token, if `config.json` says that there is one. Of several
    /// it is the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predictor: Option<Decoder>,
    /// Greatest number of tokens in a context, according to the checkpoint.
    pub max_position_embeddings: usize,
    /// End-of-sequence token ids (a number or a list in the file).
    pub eos_token_ids: Vec<u32>,
    /// The checkpoint is that of a decoder without an output layer: it gives embeddings and cannot generate.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_headless: bool,
    /// Keys that the family does not read and that may change the results.
    #[serde(skip)]
    pub unread: Vec<String>,
}

impl ModelConfig {
    /// Reads `config.json`, of a multimodal checkpoint its text part.
    ///
    /// # Errors
    /// The file is missing or broken, the architecture or one of its options is not supported, or a size makes no sense.
    pub fn load(files: &ModelFiles) -> Result<ModelConfig, LoadError> {
        let mut map: Map<String, Value> = files.read_json(FILE)?;
        let text = match map.get(TEXT) {
            Some(Value::Object(text)) => Some(text.clone()),
            _ => None,
        };
        let is_part = text.is_some();
        if let Some(mut text) = text {
            for key in SHARED {
                if text.get(key).is_none_or(Value::is_null)
                    && let Some(value) = map.remove(key)
                {
                    text.insert(key.to_string(), value);
                }
            }
            map = text;
        }
        let prefix = if is_part { format!("{TEXT}.") } else { String::new() };
        let fields = Fields::new(files.locate(FILE), prefix, &map);
        let (family, is_headless) = super::find(&fields, is_part)?;
        QuantizationConfig::load(files)?;
        let max_position_embeddings = positions(family, &fields)?;
        let mut decoder = (family.declare)(&fields, max_position_embeddings)?;
        if is_headless {
            decoder.head.linear = None;
        }
        let predictor = (family.predict)(&fields, max_position_embeddings)?;
        let eos_token_ids = fields.token_ids("eos_token_id")?;
        let unread = unread::check(&fields, &decoder)?;
        Ok(ModelConfig {
            architecture: family.architectures.first().copied().unwrap_or_default(),
            decoder,
            predictor,
            max_position_embeddings,
            eos_token_ids,
            is_headless,
            unread,
        })
    }
}

fn positions(family: &Family, fields: &Fields<'_>) -> Result<usize, LoadError> {
    let (keys, default) = family.positions;
    let stated = keys.iter().find(|key| fields.get(key).is_some());
    match (stated.or(keys.first()), default) {
        (Some(_), Some(default)) if stated.is_none() => Ok(default),
        (Some(key), _) => sizes::required(fields, key, MAX_POSITIONS),
        (None, default) => Ok(default.unwrap_or(1)),
    }
}
