//! From the keys of `config.json` to a [`ModelConfig`], with the defaults that transformers has for absent keys.
//!
//! What would change the numbers and is not supported (another activation, another rope, a quantised checkpoint) is refused by
//! name; keys that do not matter for inference are ignored.

use serde_json::{Map, Value};

use super::fields::Fields;
use super::{Architecture, ModelConfig, RopeConfig, RopeScaling};
use crate::error::{LoadError, one_line};
use crate::files::ModelFiles;

const FILE: &str = "config.json";

/// Name in `architectures`, `model_type`, and what it is here.
const SUPPORTED: [(&str, &str, Architecture); 4] = [
    ("LlamaForCausalLM", "llama", Architecture::Llama),
    ("MistralForCausalLM", "mistral", Architecture::Mistral),
    ("Qwen2ForCausalLM", "qwen2", Architecture::Qwen2),
    ("Qwen3ForCausalLM", "qwen3", Architecture::Qwen3),
];

/// Greatest sizes that are taken for a model and not for a broken file; their products stay far from overflow.
const MAX_VOCAB: u64 = 1 << 24;
const MAX_WIDTH: u64 = 1 << 20;
const MAX_LAYERS: u64 = 1 << 12;
const MAX_HEADS: u64 = 1 << 12;
const MAX_HEAD_DIM: u64 = 1 << 12;
const MAX_POSITIONS: u64 = 1 << 31;

/// What transformers takes for absent keys.
const DEFAULT_SLIDING_WINDOW: usize = 4096;
const DEFAULT_MAX_WINDOW_LAYERS: u64 = 28;
const DEFAULT_QWEN3_HEAD_DIM: usize = 128;
const DEFAULT_RMS_NORM_EPS: f64 = 1e-6;
const DEFAULT_ROPE_THETA: f64 = 10_000.0;

impl ModelConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// When the file is missing or broken, the architecture or one of its options is not supported, or a size makes no sense.
    pub fn load(files: &ModelFiles) -> Result<ModelConfig, LoadError> {
        let map: Map<String, Value> = files.read_json(FILE)?;
        let fields = Fields::new(files.locate(FILE), &map);
        let architecture = architecture(&fields, &files.locate(FILE))?;
        refuse_unsupported(&fields)?;

        let hidden_size = size(&fields, "hidden_size", MAX_WIDTH)?;
        let num_heads = size(&fields, "num_attention_heads", MAX_HEADS)?;
        let num_kv_heads = optional_size(&fields, "num_key_value_heads", MAX_HEADS)?.unwrap_or(num_heads);
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(fields.wrong("num_key_value_heads", format!("a divisor of `num_attention_heads`, {num_heads}")));
        }
        let num_layers = size(&fields, "num_hidden_layers", MAX_LAYERS)?;
        let max_position_embeddings = size(&fields, "max_position_embeddings", MAX_POSITIONS)?;
        let attention_bias = fields.boolean("attention_bias")?.unwrap_or(false);
        let has_optional_bias = matches!(architecture, Architecture::Llama | Architecture::Qwen3);

        Ok(ModelConfig {
            architecture,
            vocab_size: size(&fields, "vocab_size", MAX_VOCAB)?,
            hidden_size,
            intermediate_size: size(&fields, "intermediate_size", MAX_WIDTH)?,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim: head_dim(&fields, architecture, hidden_size, num_heads)?,
            max_position_embeddings,
            rms_norm_eps: positive(&fields, "rms_norm_eps")?.unwrap_or(DEFAULT_RMS_NORM_EPS) as f32,
            rope: rope(&fields, max_position_embeddings)?,
            tie_word_embeddings: fields.boolean("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias: architecture == Architecture::Qwen2 || (has_optional_bias && attention_bias),
            output_bias: has_optional_bias && attention_bias,
            mlp_bias: architecture == Architecture::Llama && fields.boolean("mlp_bias")?.unwrap_or(false),
            qk_norm: architecture == Architecture::Qwen3,
            layer_windows: layer_windows(&fields, architecture, num_layers)?,
            eos_token_ids: fields.token_ids("eos_token_id")?,
            bos_token_id: fields.token_ids("bos_token_id")?.first().copied(),
        })
    }
}

/// The family by `architectures`, or by `model_type` where that is absent.
fn architecture(fields: &Fields, file: &str) -> Result<Architecture, LoadError> {
    let stated = fields.read("architectures", "a list with the name of one architecture", |value| {
        match value.as_array()?.as_slice() {
            [Value::String(name)] => Some(name.as_str()),
            _ => None,
        }
    })?;
    let name = match stated {
        Some(name) => Some(name),
        None => fields.string("model_type")?,
    };
    let found = SUPPORTED.iter().find(|(class, model_type, _)| match stated {
        Some(name) => *class == name,
        None => Some(*model_type) == name,
    });
    found.map(|(_, _, architecture)| *architecture).ok_or_else(|| LoadError::UnsupportedArchitecture {
        file: file.to_string(),
        found: name.map_or("no name".to_string(), one_line),
        supported: SUPPORTED.map(|(class, _, _)| class).join(", "),
    })
}

fn refuse_unsupported(fields: &Fields) -> Result<(), LoadError> {
    if let Some(quantization) = fields.object("quantization_config")? {
        return Err(match quantization.get("quant_method") {
            Some(_) => quantization.wrong("quant_method", "an unquantised checkpoint (F32, F16 or BF16 weights)"),
            None => fields.wrong("quantization_config", "an unquantised checkpoint (F32, F16 or BF16 weights)"),
        });
    }
    // `swish` is the same function under its older name.
    match fields.string("hidden_act")? {
        None | Some("silu" | "swish") => Ok(()),
        Some(_) => Err(fields.wrong("hidden_act", "\"silu\"")),
    }
}

fn size(fields: &Fields, key: &str, greatest: u64) -> Result<usize, LoadError> {
    optional_size(fields, key, greatest)?.ok_or_else(|| fields.wrong(key, format!("an integer, 1 to {greatest}")))
}

fn optional_size(fields: &Fields, key: &str, greatest: u64) -> Result<Option<usize>, LoadError> {
    Ok(fields.integer(key, 1..=greatest)?.map(|value| value as usize))
}

fn positive(fields: &Fields, key: &str) -> Result<Option<f64>, LoadError> {
    fields.float(key, "a number above 0", |value| value > 0.0)
}

fn head_dim(
    fields: &Fields,
    architecture: Architecture,
    hidden_size: usize,
    num_heads: usize,
) -> Result<usize, LoadError> {
    let stated = optional_size(fields, "head_dim", MAX_HEAD_DIM)?;
    let head_dim = match stated {
        Some(head_dim) => head_dim,
        None if architecture == Architecture::Qwen3 => DEFAULT_QWEN3_HEAD_DIM,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            return Err(fields
                .wrong("hidden_size", format!("a multiple of `num_attention_heads`, {num_heads}, or a `head_dim`")));
        }
    };
    if head_dim % 2 == 1 {
        let expected = format!("an even number of elements per head for the rotary embedding; {head_dim} is odd");
        return Err(fields.wrong(if stated.is_some() { "head_dim" } else { "hidden_size" }, expected));
    }
    Ok(head_dim)
}

/// The rotary embedding from `rope_scaling` (older) or `rope_parameters` (newer); what stands inside wins over `rope_theta` beside it.
fn rope(fields: &Fields, max_position_embeddings: usize) -> Result<RopeConfig, LoadError> {
    let outer_theta = positive(fields, "rope_theta")?;
    let whole_heads =
        |fields: &Fields| fields.float("partial_rotary_factor", "1 (whole heads rotated)", |factor| factor == 1.0);
    whole_heads(fields)?;
    let parameters = match fields.object("rope_scaling")? {
        Some(parameters) if !parameters.is_empty() => Some(parameters),
        _ => fields.object("rope_parameters")?,
    };
    let Some(parameters) = parameters else {
        return Ok(RopeConfig { theta: outer_theta.unwrap_or(DEFAULT_ROPE_THETA), scaling: RopeScaling::None });
    };
    whole_heads(&parameters)?;

    let type_key = if parameters.get("rope_type").is_some() { "rope_type" } else { "type" };
    let number = |key: &str, expected: &str, in_range: fn(f64) -> bool| {
        parameters.float(key, expected, in_range)?.ok_or_else(|| parameters.wrong(key, expected))
    };
    let scaling = match parameters.string(type_key)? {
        None | Some("default") => RopeScaling::None,
        Some("linear") => {
            RopeScaling::Linear { factor: number("factor", "a number, at least 1", |value| value >= 1.0)? }
        }
        Some("llama3") => {
            let low_freq_factor = number("low_freq_factor", "a number above 0", |value| value > 0.0)?;
            let high_freq_factor = number("high_freq_factor", "a number above 0", |value| value > 0.0)?;
            if high_freq_factor <= low_freq_factor {
                return Err(
                    parameters.wrong("high_freq_factor", format!("more than `low_freq_factor`, {low_freq_factor}"))
                );
            }
            let original = match positive(fields, "original_max_position_embeddings")? {
                Some(original) => original,
                None => {
                    positive(&parameters, "original_max_position_embeddings")?.unwrap_or(max_position_embeddings as f64)
                }
            };
            RopeScaling::Llama3 {
                factor: number("factor", "a number, at least 1", |value| value >= 1.0)?,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original,
            }
        }
        Some(_) => return Err(parameters.wrong(type_key, "\"default\", \"linear\" or \"llama3\"")),
    };
    let theta = positive(&parameters, "rope_theta")?.or(outer_theta).unwrap_or(DEFAULT_ROPE_THETA);
    Ok(RopeConfig { theta, scaling })
}

/// The window of each layer: by `layer_types` where the file has it, else by the family's rule.
fn layer_windows(
    fields: &Fields,
    architecture: Architecture,
    num_layers: usize,
) -> Result<Vec<Option<usize>>, LoadError> {
    let windowed = match architecture {
        Architecture::Llama => false,
        Architecture::Mistral => true,
        Architecture::Qwen2 | Architecture::Qwen3 => fields.boolean("use_sliding_window")?.unwrap_or(false),
    };
    // `null` switches the window off, an absent key does not.
    let window = match optional_size(fields, "sliding_window", MAX_POSITIONS) {
        _ if !windowed => None,
        Ok(None) if fields.is_absent("sliding_window") => Some(DEFAULT_SLIDING_WINDOW),
        stated => stated?,
    };
    if let Some(kinds) = layer_types(fields, num_layers)? {
        if window.is_none() && kinds.contains(&LayerType::Sliding) {
            return Err(fields.wrong("layer_types", "\"full_attention\" everywhere, as no sliding window is in force"));
        }
        return Ok(kinds.iter().map(|kind| window.filter(|_| *kind == LayerType::Sliding)).collect());
    }
    let first_windowed = match architecture {
        Architecture::Llama | Architecture::Mistral => 0,
        Architecture::Qwen2 | Architecture::Qwen3 => {
            fields.integer("max_window_layers", 0..=MAX_LAYERS)?.unwrap_or(DEFAULT_MAX_WINDOW_LAYERS) as usize
        }
    };
    Ok((0..num_layers).map(|layer| window.filter(|_| layer >= first_windowed)).collect())
}

#[derive(Clone, Copy, PartialEq)]
enum LayerType {
    Full,
    Sliding,
}

fn layer_types(fields: &Fields, num_layers: usize) -> Result<Option<Vec<LayerType>>, LoadError> {
    let expected = format!("a list of {num_layers} of \"full_attention\" and \"sliding_attention\"");
    fields.read("layer_types", &expected, |value| {
        let kinds = value.as_array()?.iter().map(|kind| match kind.as_str()? {
            "full_attention" => Some(LayerType::Full),
            "sliding_attention" => Some(LayerType::Sliding),
            _ => None,
        });
        kinds.collect::<Option<Vec<_>>>().filter(|kinds| kinds.len() == num_layers)
    })
}
