//! `generation_config.json`: the sampling settings that the checkpoint's authors recommend.

use serde_json::{Map, Value};

use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::checkpoint::files::ModelFiles;

const FILE: &str = "generation_config.json";

/// Sampling defaults of a checkpoint; `None` for settings that it does not have.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Softmax temperature, at least 0.
    pub temperature: Option<f32>,
    /// Probability mass of nucleus sampling, above 0 and at most 1.
    pub top_p: Option<f32>,
    /// Number of most likely tokens to keep; 0 keeps all.
    pub top_k: Option<u32>,
    /// Minimum probability relative to that of the most likely token, 0 to 1.
    pub min_p: Option<f32>,
    /// Divisor of the positive logits of tokens that have occurred, above 0.
    pub repetition_penalty: Option<f32>,
    /// Number of tokens to generate if the request does not set it.
    pub max_new_tokens: Option<usize>,
}

impl GenerationDefaults {
    /// Reads `generation_config.json`, which may be missing. If it has no end tokens, `eos_token_ids` (those of `config.json`)
    /// are used.
    ///
    /// # Errors
    /// The file is broken or a value is out of range.
    pub fn load(files: &ModelFiles, eos_token_ids: &[u32]) -> Result<GenerationDefaults, LoadError> {
        let map: Map<String, Value> = files.read_optional_json(FILE)?;
        let fields = Fields::new(files.locate(FILE), String::new(), &map);
        let number = |key: &str, expected: &str, in_range: fn(f64) -> bool| -> Result<Option<f32>, LoadError> {
            Ok(fields.float(key, expected, in_range)?.map(|value| value as f32))
        };
        let eos_token_ids = match fields.token_ids("eos_token_id")? {
            ids if ids.is_empty() => eos_token_ids.to_vec(),
            ids => ids,
        };
        Ok(GenerationDefaults {
            eos_token_ids,
            temperature: number("temperature", "a number, at least 0", |value| value >= 0.0)?,
            top_p: number("top_p", "a number above 0 and at most 1", |value| value > 0.0 && value <= 1.0)?,
            // In checkpoints both -1 and 0 mean "all".
            top_k: match map.get("top_k").and_then(Value::as_i64) {
                Some(-1) => Some(0),
                _ => fields.integer("top_k", 0..=u32::MAX as u64)?.map(|value| value as u32),
            },
            min_p: number("min_p", "a number, 0 to 1", |value| (0.0..=1.0).contains(&value))?,
            repetition_penalty: number("repetition_penalty", "a number above 0", |value| value > 0.0)?,
            max_new_tokens: fields.integer("max_new_tokens", 1..=u32::MAX as u64)?.map(|value| value as usize),
        })
    }
}
