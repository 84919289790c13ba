//! `config.json` with its spellings unified and its values checked.

use serde::Serialize;
use serde_json::{Map, Value};

use super::sizes::{self, MAX_POSITIONS};
use super::unread;
use super::{Extent, Family, labels};
use crate::Weights;
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::checkpoint::files::ModelFiles;
use crate::checkpoint::quantized::config::QuantizationConfig;
use crate::decoder::{Classifier, Decoder, Dense, Linear, Mixer, Part, Role};
use crate::pooling::{self, Dimensions};

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
    /// To which lengths embeddings may be cut.
    pub dimensions: Dimensions,
    /// Greatest number of tokens in a context, according to the checkpoint.
    pub max_position_embeddings: usize,
    /// End-of-sequence token ids (a number or a list in the file).
    pub eos_token_ids: Vec<u32>,
    /// The checkpoint has no output layer for tokens: it gives embeddings or scores of labels and cannot generate.
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
        let (family, extent) = super::find(&fields, is_part)?;
        QuantizationConfig::load(files)?;
        let max_position_embeddings = positions(family, &fields)?;
        let mut decoder = (family.declare)(&fields, max_position_embeddings)?;
        see_both_sides(&fields, &mut decoder)?;
        let is_headless = extent != Extent::Whole || decoder.is_encoder();
        if is_headless {
            decoder.head.linear = None;
        }
        if extent == Extent::Classifier {
            let (labels, scores) = labels::read(&fields)?;
            let pooling = (family.pool_classes)(&fields)?;
            let mut layers = (family.classify)(&fields, decoder.hidden_size(), labels.len())?;
            let late = (family.late)(&fields)?.filter(|_| layers.len() > 1);
            if late.is_some() {
                let Dense { name, outputs, inputs, bias, .. } = layers.remove(0);
                let first = Linear::new(inputs, Role::Replicated, [Part::new(name, outputs)]);
                decoder.head.projection = Some(Linear { adapters: false, bias, ..first });
                decoder.head.activation = late;
            }
            decoder.head.classifier = Some(Classifier { pooling, layers, labels, scores });
        }
        // Some rows of a table of positions may lie before that of the first token, and texts may be limited to fewer tokens.
        let of_table = decoder.embedding.positions.as_ref().map(|it| it.table.rows() - it.offset);
        let limits = [of_table, pooling::max_tokens(files)?];
        let longest = limits.into_iter().flatten().fold(max_position_embeddings, usize::min);
        let predictor = (family.predict)(&fields, max_position_embeddings)?;
        let eos_token_ids = fields.token_ids("eos_token_id")?;
        let dimensions = labels::dimensions(&fields)?;
        let unread = unread::named(&fields, &decoder);
        Ok(ModelConfig {
            architecture: family.architectures.first().copied().unwrap_or_default(),
            decoder,
            predictor,
            dimensions,
            max_position_embeddings: longest,
            eos_token_ids,
            is_headless,
            unread,
        })
    }
}

impl ModelConfig {
    /// Takes the output layer from a folder of Sentence Transformers whose weights have none, whatever its class says.
    pub fn drop_missing_head(&mut self, files: &ModelFiles, weights: &Weights) {
        let Some(head) = &self.decoder.head.linear else { return };
        let is_missing = head.parts.iter().any(|part| weights.raw(&weights.stored_part(part).weight()).is_none());
        if is_missing && pooling::is_listed(files) {
            self.decoder.head.linear = None;
            self.is_headless = true;
        }
    }
}

/// Lets the layers of a decoder see both sides, if the configuration says so: some embedding models are trained that way.
fn see_both_sides(fields: &Fields<'_>, decoder: &mut Decoder) -> Result<(), LoadError> {
    let gemma = "use_bidirectional_attention";
    let all = fields.read(gemma, "true, false or \"vision\"", |value| match value {
        Value::Bool(all) => Some(*all),
        // Only tokens of images see both sides.
        other => (other == "vision").then_some(false),
    })?;
    let key = match all {
        Some(true) => gemma,
        _ if !decoder.is_encoder() && fields.boolean("is_causal")? == Some(false) => "is_causal",
        _ => return Ok(()),
    };
    let is_plain = |layer: &crate::decoder::Attention| {
        let is_usual = layer.alibi_slopes.is_none() && layer.sinks.is_none() && layer.sparse.is_none();
        is_usual
            && layer.latent.is_none()
            && layer.value_dim.is_none()
            && layer.shares.is_none()
            && (key == gemma || layer.window.is_none())
    };
    if !decoder.attention().all(is_plain) || decoder.recurrent().next().is_some() {
        let expected = "a model without windows, sinks, ALiBi, latents and states, if layers see later tokens";
        return Err(fields.wrong(key, expected));
    }
    for branch in decoder.layers.iter_mut().flat_map(|layer| &mut layer.branches) {
        if let Mixer::Attention(attention) = &mut branch.mixer {
            attention.both_sides = true;
            // The window is as wide, half of it to each side.
            attention.window = attention.window.map(|window| window / 2 + 1);
        }
    }
    Ok(())
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
