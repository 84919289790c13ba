//! Keys of `config.json` that a family does not read and that may change the results.

use serde_json::Value;

use super::activations::activation_of;
use crate::checkpoint::error::one_line;
use crate::checkpoint::fields::Fields;
use crate::decoder::{Activation, Decoder, Mixer};

/// Keys that do not change the results of a forward pass: of files and formats, training, generation, tasks and other modalities.
const HARMLESS: &[&str] = &[
    "_name_or_path",
    "add_cross_attention",
    "architectures",
    "auto_map",
    "bad_words_ids",
    "bias_dropout_fusion",
    "chunk_size_feed_forward",
    "decoder_bias",
    "do_sample",
    "dtype",
    "early_stopping",
    "ep_size",
    "finetuning_task",
    "generation",
    "id2label",
    "init_method",
    "initial_context_length",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "layernorm_full_attention_beta",
    "max_length",
    "model_type",
    "n_ctx",
    "moe_capacity",
    "moe_gate",
    "moe_use_aux_free",
    "mtp_transformer_layers",
    "name_or_path",
    "num_beams",
    "num_mtp_modules",
    // The families that read predictors read this key; the others ignore it.
    "num_nextn_predict_layers",
    "num_return_sequences",
    "offset_alibi",
    "prefix",
    "pretraining_tp",
    "quantization_config",
    "repetition_penalty",
    "seq_aux",
    "shared_moe_mode",
    "skip_bias_add",
    "sparse_pred_ignore_index",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "use_cache",
    "use_mtp",
];

/// Parts of such keys.
const HARMLESS_PARTS: &[&str] = &[
    "_coef",
    "_fusion",
    "classifier_",
    "_in_fp32",
    "attn_implementation",
    "aux_loss",
    "cache_implementation",
    "dropout",
    "init_",
    "initializer",
    "length_penalty",
    "output_",
    "pdrop",
    "return_",
    "summary_",
    "token_id",
    "unsloth_",
];

/// Greatest number of keys that a message names.
const MAX_KEYS: usize = 8;

/// The keys that may have an effect on the decoder, of those that nobody has asked for: known to be of none are the harmless ones, values
/// that switch nothing on, and values that say what the decoder computes.
pub(super) fn named(fields: &Fields<'_>, decoder: &Decoder) -> Vec<String> {
    let mut keys: Vec<&str> = fields.unread().collect();
    let is_off = |value: &Value| match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        // Also the types of layers that are all alike.
        Value::Array(list) => list.iter().all(|item| item == "full_attention"),
        Value::Object(map) => map.is_empty(),
    };
    let is_harmless = |key: &str| HARMLESS.contains(&key) || HARMLESS_PARTS.iter().any(|part| key.contains(part));
    let is_stated = |key: &str| fields.get(key).is_some();
    keys.retain(|key| {
        let value = fields.get(key).filter(|value| !is_off(value));
        !is_harmless(key) && value.is_some_and(|value| !agrees(key, value, decoder, &is_stated))
    });
    keys.into_iter().take(MAX_KEYS).map(one_line).collect()
}

/// Whether a key says what the decoder computes: under a name that the family does not read, or that others read.
fn agrees(key: &str, value: &Value, decoder: &Decoder, is_stated: &impl Fn(&str) -> bool) -> bool {
    let number = value.as_u64().map(|number| number as usize);
    match key {
        "hidden_act" | "hidden_activation" | "activation" | "activation_function" => {
            let found = value.as_str().and_then(activation_of);
            let is_it = |own: &Activation| match own {
                Activation::Xielu { .. } => value == "xielu",
                // A SiLU of the gate, with bounds that have a key of their own.
                Activation::ClampedSwiglu { .. } => found == Some(Activation::Silu),
                own => found == Some(*own),
            };
            activations(decoder).iter().all(is_it)
        }
        "experts_per_token" => decoder.experts().all(|experts| Some(experts.routing.top_k) == number),
        "sliding_window_size" => number.is_some() && decoder.attention().any(|attention| attention.window == number),
        // Layers from this one on have a window, unless each has its own type.
        "max_window_layers" if is_stated("layer_types") => true,
        "max_window_layers" => {
            let has_window: Vec<bool> = decoder.attention().map(|attention| attention.window.is_some()).collect();
            let is_it = |first| has_window.iter().enumerate().all(|(layer, has)| *has == (layer >= first));
            !has_window.contains(&true) || number.is_some_and(is_it)
        }
        _ => false,
    }
}

/// The activations of the feed-forward networks.
fn activations(decoder: &Decoder) -> Vec<Activation> {
    let networks = decoder.branches().flat_map(|branch| branch.mixer.leaves()).flat_map(|mixer| match mixer {
        Mixer::Mlp(mlp) => vec![mlp.activation],
        Mixer::Experts(experts) => experts.experts.iter().chain(&experts.shared).map(|mlp| mlp.activation).collect(),
        _ => Vec::new(),
    });
    networks.collect()
}
