//! Settings of speculative decoding, with the keys of vLLM.

use std::path::PathBuf;
use std::str::FromStr;

use serde_json::{Map, Value};

use super::by_worker::ByWorker;
use super::ngram::Ngram;
use super::proposer::Proposer;
use super::speculator::Speculation;
use super::suffix::{Suffix, SuffixLimits};

/// Greatest number of drafts of a sequence in a step.
pub const MAX_SPECULATIVE_TOKENS: usize = 32;

/// Greatest length of an n-gram, and of a match of suffix decoding.
const MAX_MATCH: usize = 64;

/// What is proposed, and how many drafts at once. Parsed from the JSON object of `--speculative-config`.
///
/// ```
/// let config: engine::SpeculativeConfig = r#"{"method": "ngram", "num_speculative_tokens": 4}"#.parse()?;
/// assert_eq!(config.num_speculative_tokens, 4);
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SpeculativeConfig {
    /// The source of drafts.
    pub method: SpeculativeMethod,
    /// Greatest number of drafts of a sequence in a step.
    pub num_speculative_tokens: usize,
}

/// A source of drafts.
#[derive(Clone, Debug, PartialEq)]
pub enum SpeculativeMethod {
    /// What followed the last tokens earlier in the same request: those that match `min` to `max` tokens.
    Ngram {
        /// `prompt_lookup_min`.
        min: usize,
        /// `prompt_lookup_max`.
        max: usize,
    },
    /// What most often followed the last tokens in the same request and in earlier outputs.
    Suffix(SuffixLimits),
    /// A smaller model with the same vocabulary.
    DraftModel(DraftCheckpoint),
    /// An EAGLE-3 head for the model.
    Eagle3(DraftCheckpoint),
    /// The layer for further tokens that the model's checkpoint carries.
    Mtp,
}

/// Where a model for drafts is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftCheckpoint {
    /// Folder, GGUF file, or id on the hub.
    pub model: PathBuf,
    /// Branch, tag or commit on the hub.
    pub revision: Option<String>,
}

impl SpeculativeConfig {
    /// Creates the source of drafts. `max_len` is the greatest number of tokens of a text for which the worker computes drafts.
    pub fn speculation(&self, max_len: usize) -> Speculation {
        let proposer: Box<dyn Proposer> = match self.method {
            SpeculativeMethod::Ngram { min, max } => Box::new(Ngram::new(min, max)),
            SpeculativeMethod::Suffix(limits) => Box::new(Suffix::new(limits)),
            SpeculativeMethod::DraftModel(_) | SpeculativeMethod::Eagle3(_) | SpeculativeMethod::Mtp => {
                Box::new(ByWorker::new(max_len))
            }
        };
        Speculation { proposer, num_speculative_tokens: self.num_speculative_tokens, is_adaptive: true }
    }

    /// The checkpoint that the drafts come from, if it is another than the model's.
    pub fn checkpoint_mut(&mut self) -> Option<&mut DraftCheckpoint> {
        match &mut self.method {
            SpeculativeMethod::DraftModel(checkpoint) | SpeculativeMethod::Eagle3(checkpoint) => Some(checkpoint),
            SpeculativeMethod::Ngram { .. } | SpeculativeMethod::Suffix(_) | SpeculativeMethod::Mtp => None,
        }
    }

    /// One line for the log of a start.
    pub(crate) fn line(&self) -> String {
        let source = match &self.method {
            SpeculativeMethod::DraftModel(DraftCheckpoint { model, .. }) => format!("the model {}", model.display()),
            SpeculativeMethod::Eagle3(DraftCheckpoint { model, .. }) => {
                format!("the EAGLE-3 head {}", model.display())
            }
            SpeculativeMethod::Mtp => "the checkpoint's layer for further tokens".to_string(),
            SpeculativeMethod::Ngram { min, max } if min == max => format!("n-grams of {min} tokens"),
            SpeculativeMethod::Ngram { min, max } => format!("n-grams of {min} to {max} tokens"),
            SpeculativeMethod::Suffix(limits) => format!(
                "suffixes of up to {} tokens of the request and of at most {} earlier outputs",
                limits.max_tree_depth, limits.max_cached_requests
            ),
        };
        format!("speculative decoding: up to {} drafts of {source}", self.num_speculative_tokens)
    }
}

/// The keys of a JSON object. Each is read once; what is left at the end is unknown.
struct Keys {
    values: Map<String, Value>,
    known: Vec<&'static str>,
}

impl Keys {
    fn read<T>(
        &mut self,
        key: &'static str,
        expected: impl FnOnce() -> String,
        parse: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        self.known.push(key);
        let Some(value) = self.values.remove(key) else { return Ok(None) };
        parse(&value).map(Some).ok_or_else(|| format!("{key}: found {value}, expected {}", expected()))
    }

    fn count(&mut self, key: &'static str, least: usize, most: usize) -> Result<Option<usize>, String> {
        let parse = |value: &Value| usize::try_from(value.as_u64()?).ok().filter(|n| (least..=most).contains(n));
        self.read(key, || format!("a whole number from {least} to {most}"), parse)
    }

    fn number(&mut self, key: &'static str, most: f64) -> Result<Option<f64>, String> {
        let parse = |value: &Value| value.as_f64().filter(|n| (0.0..=most).contains(n));
        self.read(key, || format!("a number from 0 to {most}"), parse)
    }

    fn checkpoint(&mut self) -> Result<DraftCheckpoint, String> {
        let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_string);
        let expected = "a folder, a .gguf file, or a hub id";
        let model = self.read("model", || expected.to_string(), text)?;
        let model = model.ok_or_else(|| format!("model: missing, expected {expected}"))?;
        let revision = self.read("revision", || "a branch, tag or commit".to_string(), text)?;
        Ok(DraftCheckpoint { model: model.into(), revision })
    }

    fn end(self, method: &str) -> Result<(), String> {
        match self.values.keys().next() {
            None => Ok(()),
            Some(key) => Err(format!("unknown key {key:?}, expected one of {} for {method}", self.known.join(", "))),
        }
    }
}

impl FromStr for SpeculativeConfig {
    type Err = String;

    /// # Errors
    /// One line that says what was found and what is allowed.
    fn from_str(text: &str) -> Result<SpeculativeConfig, String> {
        let methods = r#""ngram", "suffix", "draft_model", "eagle3" or "mtp""#;
        let expected =
            format!(r#"expected a JSON object such as {{"method": {methods}, "num_speculative_tokens": 4}}"#);
        let values = match serde_json::from_str(text) {
            Ok(Value::Object(values)) => values,
            Ok(_) => return Err(expected),
            Err(error) => return Err(format!("not valid JSON ({error}), {expected}")),
        };
        let mut keys = Keys { values, known: Vec::new() };
        let method = keys.read("method", || methods.to_string(), |value| value.as_str().map(str::to_string))?;
        let method = method.ok_or_else(|| format!("method: missing, expected {methods}"))?;
        let given = keys.count("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS)?;
        let needed = || {
            let missing = "num_speculative_tokens: missing, expected a whole number from 1 to";
            given.ok_or_else(|| format!("{missing} {MAX_SPECULATIVE_TOKENS}"))
        };
        let config = match method.as_str() {
            "draft_model" | "eagle3" => {
                let checkpoint = keys.checkpoint()?;
                let method = match method.as_str() {
                    "eagle3" => SpeculativeMethod::Eagle3(checkpoint),
                    _ => SpeculativeMethod::DraftModel(checkpoint),
                };
                SpeculativeConfig { method, num_speculative_tokens: needed()? }
            }
            "mtp" => SpeculativeConfig { method: SpeculativeMethod::Mtp, num_speculative_tokens: needed()? },
            "ngram" => {
                let num_speculative_tokens = needed()?;
                let min = keys.count("prompt_lookup_min", 1, MAX_MATCH)?;
                let max = keys.count("prompt_lookup_max", 1, MAX_MATCH)?;
                let (min, max) = (min.or(max).unwrap_or(5), max.or(min).unwrap_or(5));
                if min > max {
                    return Err(format!("prompt_lookup_min: found {min}, expected at most prompt_lookup_max, {max}"));
                }
                SpeculativeConfig { method: SpeculativeMethod::Ngram { min, max }, num_speculative_tokens }
            }
            "suffix" => {
                let default = SuffixLimits::default();
                let depth = keys.count("suffix_decoding_max_tree_depth", 2, MAX_MATCH)?;
                let limits = SuffixLimits {
                    max_tree_depth: depth.unwrap_or(default.max_tree_depth),
                    max_cached_requests: keys
                        .count("suffix_decoding_max_cached_requests", 0, 1_000_000)?
                        .unwrap_or(default.max_cached_requests),
                    max_spec_factor: keys
                        .number("suffix_decoding_max_spec_factor", 100.0)?
                        .unwrap_or(default.max_spec_factor),
                    min_token_prob: keys
                        .number("suffix_decoding_min_token_prob", 1.0)?
                        .unwrap_or(default.min_token_prob),
                };
                let most = given.unwrap_or(limits.max_tree_depth.min(MAX_SPECULATIVE_TOKENS));
                SpeculativeConfig { method: SpeculativeMethod::Suffix(limits), num_speculative_tokens: most }
            }
            other => return Err(format!("method: found {other:?}, expected {methods}")),
        };
        keys.end(&method)?;
        Ok(config)
    }
}
