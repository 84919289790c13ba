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
        let eos_token_ids = match fields.token_ids("eos_token_id")? {
            ids if ids.is_empty() => eos_token_ids.to_vec(),
            ids => ids,
        };
        Ok(GenerationDefaults {
            eos_token_ids,
            ..GenerationDefaults::read(|key, what, of| fields.read(key, what, of))?
        })
    }

    /// Reads the settings besides the end tokens. `number` returns that of a key, or an error that has what is expected if the function
    /// has none for its value.
    ///
    /// # Errors
    /// What `number` returns as an error.
    pub fn read<E>(
        mut number: impl FnMut(&'static str, &'static str, fn(&Value) -> Option<f64>) -> Result<Option<f64>, E>,
    ) -> Result<GenerationDefaults, E> {
        fn within(value: &Value, is_valid: impl Fn(f64) -> bool) -> Option<f64> {
            value.as_f64().filter(|number| is_valid(*number))
        }
        fn whole(value: &Value, least: i64) -> Option<f64> {
            value.as_i64().filter(|number| (least..=i64::from(u32::MAX)).contains(number)).map(|number| number as f64)
        }
        Ok(GenerationDefaults {
            eos_token_ids: Vec::new(),
            temperature: number("temperature", "a number, at least 0", |v| within(v, |n| n >= 0.0))?.map(|n| n as f32),
            top_p: number("top_p", "a number above 0 and at most 1", |v| within(v, |n| n > 0.0 && n <= 1.0))?
                .map(|n| n as f32),
            // Both -1 and 0 mean "all".
            top_k: number("top_k", "a whole number from -1", |v| whole(v, -1))?.map(|k| k.max(0.0) as u32),
            min_p: number("min_p", "a number, 0 to 1", |v| within(v, |n| (0.0..=1.0).contains(&n)))?.map(|n| n as f32),
            repetition_penalty: number("repetition_penalty", "a number above 0", |v| within(v, |n| n > 0.0))?
                .map(|n| n as f32),
            max_new_tokens: number("max_new_tokens", "a whole number from 1", |v| whole(v, 1))?.map(|n| n as usize),
        })
    }

    /// These settings, and those of `others` where there are none. The end tokens are those of `others`.
    #[must_use]
    pub fn over(&self, others: GenerationDefaults) -> GenerationDefaults {
        GenerationDefaults {
            eos_token_ids: others.eos_token_ids,
            temperature: self.temperature.or(others.temperature),
            top_p: self.top_p.or(others.top_p),
            top_k: self.top_k.or(others.top_k),
            min_p: self.min_p.or(others.min_p),
            repetition_penalty: self.repetition_penalty.or(others.repetition_penalty),
            max_new_tokens: self.max_new_tokens.or(others.max_new_tokens),
        }
    }
}
