//! What a GGUF file says about texts and sampling, in the form of the JSON files that a folder has for it.

use serde_json::{Map, Value as Json, json};

use super::file::Gguf;
use super::value::Value;
use super::vocabulary::Vocabulary;

const TEMPLATE: &str = "tokenizer.chat_template";

/// Settings of `generation_config.json` and their keys.
const SAMPLING: [(&str, &str); 5] = [
    ("temperature", "temp"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("min_p", "min_p"),
    ("repetition_penalty", "penalty_repeat"),
];

/// `tokenizer_config.json`: the chat templates and the special tokens that they may print.
pub(super) fn tokenizer_config(gguf: &Gguf, vocabulary: &Vocabulary<'_>) -> Map<String, Json> {
    let mut map = Map::new();
    let special = [
        ("bos_token", vocabulary.bos),
        ("eos_token", vocabulary.eos),
        ("unk_token", vocabulary.unknown),
        ("pad_token", vocabulary.padding),
    ];
    for (name, id) in special {
        if let Some(text) = id.and_then(|id| vocabulary.text(id)) {
            map.insert(name.into(), text.into());
        }
    }
    let template = |key: &str| Some(gguf.value(key)?.text().map_or(Json::Bool(false), Json::from));
    let mut templates = Vec::new();
    for key in gguf.keys().filter_map(|key| Some((key.strip_prefix(TEMPLATE)?, key))) {
        let name = match key.0 {
            "" => Some("default"),
            other => other.strip_prefix('.'),
        };
        if let (Some(name), Some(template)) = (name, template(key.1)) {
            templates.push(json!({"name": name, "template": template}));
        }
    }
    if !templates.is_empty() {
        map.insert("chat_template".into(), templates.into());
    }
    map
}

/// `generation_config.json`: end tokens and recommended sampling.
pub(super) fn generation_config(gguf: &Gguf, end_tokens: &[u32]) -> Map<String, Json> {
    let mut map = Map::new();
    map.insert("eos_token_id".into(), json!(end_tokens));
    for (name, key) in SAMPLING {
        if let Some(value) = gguf.value(&format!("general.sampling.{key}")) {
            let value = match value {
                Value::Unsigned(number) => number.into(),
                Value::Signed(number) => number.into(),
                Value::Float(number) if number.is_finite() => number.into(),
                // The check of the settings refuses it.
                other => other.to_string().into(),
            };
            map.insert(name.into(), value);
        }
    }
    map
}
