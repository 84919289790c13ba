//! What a GGUF file says about texts and sampling, in the form of the JSON files that a folder has for it.

use serde_json::{Map, Value as Json, json};

use super::architectures::Architecture;
use super::file::Gguf;
use super::value::Value;
use super::vocabulary::Vocabulary;
use crate::checkpoint::error::{LoadError, one_line};

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

/// The files of Sentence Transformers, if the file says how hidden states become an embedding, which then has length 1.
///
/// # Errors
/// A pooling that is not supported.
pub(super) fn pooling(gguf: &Gguf, architecture: &Architecture) -> Result<Vec<(&'static str, Json)>, LoadError> {
    let key = format!("{}.pooling_type", architecture.name);
    let Some(value) = gguf.value(&key) else { return Ok(Vec::new()) };
    let has_classes = architecture.outer.iter().any(|(stored, _)| *stored == "cls.output")
        && gguf.tensors().contains_key("cls.output.weight");
    let mode = match value.unsigned() {
        Some(1) => "mean",
        Some(2) => "cls",
        Some(3) => "lasttoken",
        Some(0) => return Ok(Vec::new()),
        // The classifier says how it pools.
        Some(4) if has_classes => return Ok(Vec::new()),
        _ => {
            return Err(LoadError::Setting {
                file: gguf.file(0).to_string(),
                key,
                found: one_line(value),
                expected: "0 (none), 1 (mean), 2 (first token), 3 (last token), or 4 for a reranker of BERT"
                    .to_string(),
            });
        }
    };
    let module = |(idx, (kind, path)): (usize, (&str, &str))| json!({"idx": idx, "name": idx.to_string(), "path": path, "type": format!("sentence_transformers.models.{kind}")});
    let modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")];
    let modules: Vec<Json> = modules.into_iter().enumerate().map(module).collect();
    Ok(vec![("modules.json", Json::Array(modules)), ("1_Pooling/config.json", json!({"pooling_mode": mode}))])
}
