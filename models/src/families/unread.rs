//! Keys of `config.json` that a family does not read: those which change the results are refused, others may change them.

use serde_json::Value;

use crate::checkpoint::error::{LoadError, one_line};
use crate::checkpoint::fields::Fields;

/// A key, whether a value is as if the key were absent, and what is expected.
type Change = (&'static str, fn(&Value) -> bool, &'static str);

/// Keys that change the results of every family that does not read them.
const CHANGES: &[Change] = &[
    ("is_causal", |value| *value == true, "true: attention to later tokens is not supported"),
    // "vision" is for the tokens of images.
    (
        "use_bidirectional_attention",
        |value| *value == false || *value == "vision",
        "false: attention to later tokens is not supported",
    ),
];

/// Keys that do not change the results of a forward pass: of files and formats, training, generation, tasks and other modalities.
const HARMLESS: &[&str] = &[
    "_name_or_path",
    "add_cross_attention",
    "architectures",
    "auto_map",
    "bad_words_ids",
    "bias_dropout_fusion",
    "chunk_size_feed_forward",
    "do_sample",
    "dtype",
    "early_stopping",
    "ep_size",
    "experts_per_token",
    "finetuning_task",
    "generation",
    "hidden_act",
    "hidden_activation",
    "id2label",
    "initial_context_length",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "max_length",
    "max_window_layers",
    "model_type",
    "n_ctx",
    "name_or_path",
    "num_beams",
    "num_return_sequences",
    "offset_alibi",
    "prefix",
    "pretraining_tp",
    "quantization_config",
    "repetition_penalty",
    "seq_aux",
    "skip_bias_add",
    "sliding_window_size",
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
];

/// Parts of such keys.
const HARMLESS_PARTS: &[&str] = &[
    "_coef",
    "_fusion",
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

/// Refuses values that change the results. Returns the other keys that nobody has asked for and that may change them.
pub(super) fn check(fields: &Fields<'_>) -> Result<Vec<String>, LoadError> {
    let keys: Vec<&str> = fields.unread().collect();
    let refused = CHANGES
        .iter()
        .find(|(key, is_neutral, _)| keys.contains(key) && fields.get(key).is_some_and(|value| !is_neutral(value)));
    match refused {
        Some((key, _, expected)) => Err(fields.wrong(key, *expected)),
        None => Ok(of_effect(fields, keys)),
    }
}

/// The keys that may have an effect: known to be of none are the harmless ones, and values that switch nothing on.
fn of_effect(fields: &Fields<'_>, mut keys: Vec<&str>) -> Vec<String> {
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
    keys.retain(|key| !is_harmless(key) && fields.get(key).is_some_and(|value| !is_off(value)));
    keys.retain(|key| CHANGES.iter().all(|(known, ..)| known != key));
    keys.into_iter().take(MAX_KEYS).map(one_line).collect()
}

/// The keys that may have an effect, of those that nobody has asked for.
pub(super) fn named(fields: &Fields<'_>) -> Vec<String> {
    of_effect(fields, fields.unread().collect())
}
