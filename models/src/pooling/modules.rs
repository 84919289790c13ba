//! Folders of Sentence Transformers: `modules.json` and the files that it names.
//!
//! ```text
//! modules.json                         Transformer, Pooling, Dense, Normalize, LogitScore
//! 1_Pooling/config.json                how hidden states are pooled
//! 2_Dense/config.json, *.safetensors   a dense layer of the vector
//! sentence_bert_config.json            how many tokens a text has at most
//! config_sentence_transformers.json    texts to put before queries and documents
//! ```
//!
//! Checkpoints for generation have none of them.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use serde_json::{Map, Value};

use super::Pooling;
use crate::Weights;
use crate::checkpoint::error::{LoadError, one_line};
use crate::checkpoint::fields::Fields;
use crate::checkpoint::files::ModelFiles;
use crate::decoder::{Dense, DenseActivation};

const MODULES: &str = "modules.json";
const LIMITS: &str = "sentence_bert_config.json";
const PROMPTS: &str = "config_sentence_transformers.json";
/// Where the pooling is stated in a folder without a list of modules.
const POOLING: &str = "1_Pooling";

/// Greatest number of modules, of outputs of a dense layer, and of tokens of a text.
const MAX_MODULES: usize = 64;
const MAX_WIDTH: u64 = 1 << 20;
const MAX_TOKENS: u64 = 1 << 31;

/// What follows the pooling.
pub(super) enum Module {
    /// A dense layer, and its weights.
    Dense(Dense, Box<Weights>),
    /// The vector at length 1.
    Normalize,
    /// The log-odds of two tokens of the vocabulary, that of a yes and that of a no.
    LogitScore([u32; 2]),
}

/// What a folder states about pooling.
#[derive(Default)]
pub(super) struct Modules {
    /// Whether the folder lists its modules.
    pub listed: bool,
    /// The pooling; `None` in `Some` for one that is not supported.
    pub pooling: Option<Option<Pooling>>,
    pub after: Vec<Module>,
    /// Texts that are put before others, by name.
    pub prompts: BTreeMap<String, String>,
}

impl Modules {
    pub fn load(files: &ModelFiles) -> Result<Modules, LoadError> {
        let mut found = Modules { prompts: prompts(files)?, ..Modules::default() };
        if !is_listed(files) {
            if files.exists(&format!("{POOLING}/config.json")) {
                found.pooling = Some(pooling(files, POOLING)?);
            }
            return Ok(found);
        }
        found.listed = true;
        let list: Vec<Map<String, Value>> = files.read_json(MODULES)?;
        if list.len() > MAX_MODULES {
            return Err(wrong(files, MODULES, "length", list.len(), format!("at most {MAX_MODULES} modules")));
        }
        for (number, module) in list.iter().enumerate() {
            let fields = Fields::new(files.locate(MODULES), format!("{number}."), module);
            let kind = fields.string("type")?.unwrap_or_default();
            let path = fields.string("path")?.unwrap_or_default();
            let is_plain = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
            if !is_plain {
                return Err(fields.wrong("path", "the name of a folder in that of the checkpoint"));
            }
            match kind.rsplit('.').next().unwrap_or_default() {
                "Transformer" | "Dropout" => {}
                "Pooling" => found.pooling = Some(pooling(files, path)?),
                "Dense" => found.after.push(dense(files, path)?),
                "Normalize" => found.after.push(Module::Normalize),
                "LogitScore" => found.after.push(logit_score(files, path)?),
                _ => return Err(fields.wrong("type", "Transformer, Pooling, Dense, Normalize, LogitScore or Dropout")),
            }
        }
        Ok(found)
    }
}

/// Whether a folder lists modules, so that it is one of embeddings.
pub(crate) fn is_listed(files: &ModelFiles) -> bool {
    files.exists(MODULES)
}

/// The greatest number of tokens of a text, special ones included, if the folder lists modules and states it.
pub(crate) fn max_tokens(files: &ModelFiles) -> Result<Option<usize>, LoadError> {
    if !is_listed(files) {
        return Ok(None);
    }
    let map: Map<String, Value> = files.read_optional_json(LIMITS)?;
    let fields = Fields::new(files.locate(LIMITS), String::new(), &map);
    Ok(fields.integer("max_seq_length", 1..=MAX_TOKENS)?.map(|most| most as usize))
}

fn prompts(files: &ModelFiles) -> Result<BTreeMap<String, String>, LoadError> {
    let map: Map<String, Value> = files.read_optional_json(PROMPTS)?;
    let fields = Fields::new(files.locate(PROMPTS), String::new(), &map);
    let named = fields.read("prompts", "an object of names and texts", |value| {
        let texts = value.as_object()?.iter().map(|(name, text)| Some((name.clone(), text.as_str()?.to_string())));
        texts.collect::<Option<BTreeMap<_, _>>>()
    })?;
    Ok(named.unwrap_or_default())
}

/// The pooling of a module; `None` if it is not supported: several poolings side by side, or an unknown one.
fn pooling(files: &ModelFiles, folder: &str) -> Result<Option<Pooling>, LoadError> {
    let map: Map<String, Value> = files.read_optional_json(&format!("{folder}/config.json"))?;
    let stated = match map.get("pooling_mode") {
        Some(Value::String(mode)) => vec![mode.as_str()],
        Some(Value::Array(modes)) => modes.iter().map(|mode| mode.as_str().unwrap_or_default()).collect(),
        _ => {
            let on = map.iter().filter(|(_, value)| **value == Value::Bool(true));
            on.filter_map(|(key, _)| key.strip_prefix("pooling_mode_")).collect()
        }
    };
    Ok(match stated[..] {
        [] if map.is_empty() => Some(Pooling::Last),
        // The default of the library.
        [] => Some(Pooling::Mean),
        ["lasttoken"] => Some(Pooling::Last),
        ["mean" | "mean_tokens"] => Some(Pooling::Mean),
        ["cls" | "cls_token"] => Some(Pooling::Cls),
        ["max" | "max_tokens"] => Some(Pooling::Max),
        ["mean_sqrt_len_tokens"] => Some(Pooling::MeanSqrtLen),
        ["weightedmean" | "weightedmean_tokens"] => Some(Pooling::WeightedMean),
        _ => None,
    })
}

fn dense(files: &ModelFiles, folder: &str) -> Result<Module, LoadError> {
    let file = format!("{folder}/config.json");
    let map: Map<String, Value> = files.read_json(&file)?;
    let fields = Fields::new(files.locate(&file), String::new(), &map);
    let size = |key: &str| {
        let expected = format!("an integer, 1 to {MAX_WIDTH}");
        fields.integer(key, 1..=MAX_WIDTH)?.map(|size| size as usize).ok_or_else(|| fields.wrong(key, expected))
    };
    let (inputs, outputs) = (size("in_features")?, size("out_features")?);
    let bias = fields.boolean("bias")?.unwrap_or(true);
    let named =
        fields.read("activation_function", DenseActivation::NAMES, |value| DenseActivation::named(value.as_str()?))?;
    // The library's default.
    let activation = named.unwrap_or(DenseActivation::Tanh);
    let weights = Weights::open_file(files, &format!("{folder}/model.safetensors"))?;
    Ok(Module::Dense(Dense::new("linear", outputs, inputs).activated(bias, activation), Box::new(weights)))
}

fn logit_score(files: &ModelFiles, folder: &str) -> Result<Module, LoadError> {
    let file = format!("{folder}/config.json");
    let map: Map<String, Value> = files.read_json(&file)?;
    let fields = Fields::new(files.locate(&file), String::new(), &map);
    let token = |key: &str| {
        let id = fields.integer(key, 0..=u64::from(u32::MAX - 1))?;
        id.and_then(|id| u32::try_from(id).ok()).ok_or_else(|| fields.wrong(key, "a token id"))
    };
    Ok(Module::LogitScore([token("true_token_id")?, token("false_token_id")?]))
}

fn wrong(files: &ModelFiles, file: &str, key: &str, found: impl ToString, expected: String) -> LoadError {
    let (file, found) = (files.locate(file), one_line(found.to_string()));
    LoadError::Setting { file, key: key.to_string(), found, expected }
}
