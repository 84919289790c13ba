//! Settings of speculative decoding, with the keys of vLLM.

use std::path::PathBuf;
use std::str::FromStr;

use serde_json::Value;

use super::by_worker::ByWorker;
use super::ngram::Ngram;
use super::proposer::Proposer;
use super::speculator::Speculation;
use super::suffix::{Suffix, SuffixLimits};
use crate::keys::Keys;

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

/// Where a draft model is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftCheckpoint {
    /// Folder, GGUF file, or id on the hub.
    pub model: PathBuf,
    /// Branch, tag or commit on the hub.
    pub revision: Option<String>,
}

impl SpeculativeConfig {
    /// Creates the source of drafts. Sequences longer than `max_len` tokens get no drafts from a draft model.
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

fn count(keys: &mut Keys, key: &'static str, least: usize, most: usize) -> Result<Option<usize>, String> {
    let parse = |value: &Value| usize::try_from(value.as_u64()?).ok().filter(|n| (least..=most).contains(n));
    keys.read(key, format_args!("a whole number from {least} to {most}"), parse)
}

fn number(keys: &mut Keys, key: &'static str, most: f64) -> Result<Option<f64>, String> {
    let parse = |value: &Value| value.as_f64().filter(|n| (0.0..=most).contains(n));
    keys.read(key, format_args!("a number from 0 to {most}"), parse)
}

fn checkpoint(keys: &mut Keys) -> Result<DraftCheckpoint, String> {
    let expected = "a folder, a .gguf file, or a hub id";
    let model = keys.text("model", expected)?.ok_or_else(|| format!("model: missing, expected {expected}"))?;
    Ok(DraftCheckpoint { model: model.into(), revision: keys.text("revision", "a branch, tag or commit")? })
}

impl FromStr for SpeculativeConfig {
    type Err = String;

    /// # Errors
    /// One line that says what was found and what is allowed.
    fn from_str(text: &str) -> Result<SpeculativeConfig, String> {
        let methods = r#""ngram", "suffix", "draft_model", "eagle3" or "mtp""#;
        let example = format!(r#"{{"method": {methods}, "num_speculative_tokens": 4}}"#);
        let mut keys = Keys::parse(text, &example)?;
        let method = keys.read("method", methods, |value| value.as_str().map(str::to_string))?;
        let method = method.ok_or_else(|| format!("method: missing, expected {methods}"))?;
        let given = count(&mut keys, "num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS)?;
        let source = match method.as_str() {
            "draft_model" => SpeculativeMethod::DraftModel(checkpoint(&mut keys)?),
            "eagle3" => SpeculativeMethod::Eagle3(checkpoint(&mut keys)?),
            // vLLM's older names have that of the family in front, such as qwen3_next_mtp.
            name if name == "mtp" || name.ends_with("_mtp") => SpeculativeMethod::Mtp,
            "ngram" => {
                let min = count(&mut keys, "prompt_lookup_min", 1, MAX_MATCH)?;
                let max = count(&mut keys, "prompt_lookup_max", 1, MAX_MATCH)?;
                let (min, max) = (min.or(max).unwrap_or(5), max.or(min).unwrap_or(5));
                if min > max {
                    return Err(format!("prompt_lookup_min: found {min}, expected at most prompt_lookup_max, {max}"));
                }
                SpeculativeMethod::Ngram { min, max }
            }
            "suffix" => {
                let mut limits = SuffixLimits::default();
                let depth = count(&mut keys, "suffix_decoding_max_tree_depth", 2, MAX_MATCH)?;
                let kept = count(&mut keys, "suffix_decoding_max_cached_requests", 0, 1_000_000)?;
                let factor = number(&mut keys, "suffix_decoding_max_spec_factor", 100.0)?;
                let least = number(&mut keys, "suffix_decoding_min_token_prob", 1.0)?;
                limits.max_tree_depth = depth.unwrap_or(limits.max_tree_depth);
                limits.max_cached_requests = kept.unwrap_or(limits.max_cached_requests);
                limits.max_spec_factor = factor.unwrap_or(limits.max_spec_factor);
                limits.min_token_prob = least.unwrap_or(limits.min_token_prob);
                SpeculativeMethod::Suffix(limits)
            }
            other => return Err(format!("method: found {other:?}, expected {methods}")),
        };
        keys.end().map_err(|error| format!("{error} for {method}"))?;
        let num_speculative_tokens = match (given, &source) {
            (Some(given), _) => given,
            (None, SpeculativeMethod::Suffix(limits)) => limits.max_tree_depth.min(MAX_SPECULATIVE_TOKENS),
            (None, _) => {
                let expected = format!("expected a whole number from 1 to {MAX_SPECULATIVE_TOKENS}");
                return Err(format!("num_speculative_tokens: missing, {expected}"));
            }
        };
        Ok(SpeculativeConfig { method: source, num_speculative_tokens })
    }
}
