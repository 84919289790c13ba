//! Where the sampling defaults of a model come from: `generation_config.json`, and settings in its place.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use models::{GenerationDefaults, LoadError, ModelFiles};
use serde_json::Value;

use crate::keys::Keys;

const EXAMPLE: &str = r#"{"temperature": 0.6, "top_p": 0.95}"#;

/// Where the sampling defaults of a model come from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// The file.
    pub source: GenerationSource,
    /// Values in place of those of the file.
    pub overrides: GenerationOverrides,
}

/// The file of sampling defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GenerationSource {
    /// That of the checkpoint.
    #[default]
    Checkpoint,
    /// None: defaults are neutral. Only the tokens that end a sequence are those of the checkpoint.
    Neutral,
    /// That of another folder.
    Folder(PathBuf),
}

impl FromStr for GenerationSource {
    type Err = Infallible;

    /// `auto`, `vllm` or a folder.
    fn from_str(text: &str) -> Result<GenerationSource, Infallible> {
        Ok(match text {
            "auto" => GenerationSource::Checkpoint,
            "vllm" => GenerationSource::Neutral,
            folder => GenerationSource::Folder(folder.into()),
        })
    }
}

/// Sampling defaults in place of those of a checkpoint; `None` keeps the checkpoint's.
///
/// ```
/// use engine::GenerationOverrides;
/// let overrides: GenerationOverrides = r#"{"temperature": 0.6, "top_k": -1}"#.parse().unwrap();
/// assert_eq!((overrides.temperature, overrides.top_k), (Some(0.6), Some(0)));
/// assert!(r#"{"top_p": 2}"#.parse::<GenerationOverrides>().unwrap_err().starts_with("top_p: found 2"));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationOverrides {
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
    /// Number of tokens to generate if a request does not set it.
    pub max_new_tokens: Option<usize>,
}

impl FromStr for GenerationOverrides {
    type Err = String;

    /// # Errors
    /// One line that says what was found and what is allowed.
    fn from_str(text: &str) -> Result<GenerationOverrides, String> {
        fn within(value: &Value, is_valid: impl Fn(f64) -> bool) -> Option<f32> {
            value.as_f64().filter(|number| is_valid(*number)).map(|number| number as f32)
        }
        let mut keys = Keys::parse(text, EXAMPLE)?;
        let top_k = |value: &Value| match value.as_i64()? {
            // Both mean "all".
            -1 | 0 => Some(0),
            k => u32::try_from(k).ok(),
        };
        let tokens = |value: &Value| value.as_u64().filter(|n| *n > 0).and_then(|n| usize::try_from(n).ok());
        let overrides = GenerationOverrides {
            temperature: keys.read("temperature", "a number, at least 0", |v| within(v, |n| n >= 0.0))?,
            top_p: keys.read("top_p", "a number above 0 and at most 1", |v| within(v, |n| n > 0.0 && n <= 1.0))?,
            top_k: keys.read("top_k", "a whole number from -1", top_k)?,
            min_p: keys.read("min_p", "a number, 0 to 1", |v| within(v, |n| (0.0..=1.0).contains(&n)))?,
            repetition_penalty: keys.read("repetition_penalty", "a number above 0", |v| within(v, |n| n > 0.0))?,
            max_new_tokens: keys.read("max_new_tokens", "a whole number from 1", tokens)?,
        };
        keys.end()?;
        Ok(overrides)
    }
}

impl GenerationConfig {
    /// The sampling defaults of a checkpoint, whose `config.json` has these tokens that end a sequence.
    ///
    /// # Errors
    /// A file is broken, or the folder does not exist.
    pub(crate) fn load(&self, files: &ModelFiles, eos_token_ids: &[u32]) -> Result<GenerationDefaults, LoadError> {
        let of_checkpoint = GenerationDefaults::load(files, eos_token_ids)?;
        let mut defaults = match &self.source {
            GenerationSource::Checkpoint => of_checkpoint,
            GenerationSource::Neutral => {
                GenerationDefaults { eos_token_ids: of_checkpoint.eos_token_ids, ..GenerationDefaults::default() }
            }
            GenerationSource::Folder(path) => {
                GenerationDefaults::load(&ModelFiles::open(path)?, &of_checkpoint.eos_token_ids)?
            }
        };
        let GenerationOverrides { temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens } =
            self.overrides;
        defaults.temperature = temperature.or(defaults.temperature);
        defaults.top_p = top_p.or(defaults.top_p);
        defaults.top_k = top_k.or(defaults.top_k);
        defaults.min_p = min_p.or(defaults.min_p);
        defaults.repetition_penalty = repetition_penalty.or(defaults.repetition_penalty);
        defaults.max_new_tokens = max_new_tokens.or(defaults.max_new_tokens);
        Ok(defaults)
    }
}
