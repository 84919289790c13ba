//! `--hf-overrides`: keys of `config.json` that a start replaces. Those of rerankers and of embeddings are known; vLLM takes any.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use text::Tokenizer;

use crate::error::{EngineError, bad};
use crate::keys::Keys;

const EXAMPLE: &str = r#"{"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": true}"#;

/// Keys in place of those of `config.json`.
///
/// ```
/// use engine::HfOverrides;
/// let text = r#"{"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": true}"#;
/// let overrides: HfOverrides = text.parse().unwrap();
/// assert!(overrides.is_original_qwen3_reranker);
/// assert!("{\"rope_theta\": 1}".parse::<HfOverrides>().unwrap_err().contains("rope_theta"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HfOverrides {
    /// The tokens of a no and of a yes: the model scores a text by how much likelier the second is at its end.
    pub classifier_from_token: Option<[String; 2]>,
    /// Whether a pair of texts is written in the prompt of Qwen3-Reranker.
    pub is_original_qwen3_reranker: bool,
    /// Whether embeddings may be cut to any length.
    pub is_matryoshka: Option<bool>,
    /// Lengths to which embeddings may be cut.
    pub matryoshka_dimensions: Option<Vec<usize>>,
}

impl FromStr for HfOverrides {
    type Err = String;

    /// # Errors
    /// One line that says what was found and what is allowed.
    fn from_str(text: &str) -> Result<HfOverrides, String> {
        let mut keys = Keys::parse(text, EXAMPLE)?;
        // The class that vLLM is told for such a model; the tokens say the same.
        let classes = "a list with the name of one class that ends in ForSequenceClassification";
        let class = keys.read("architectures", classes, |value| match value.as_array()?.as_slice() {
            [one] => one.as_str().filter(|name| name.ends_with("ForSequenceClassification")).map(str::to_string),
            _ => None,
        })?;
        let tokens = keys.read("classifier_from_token", r#"two tokens, ["no", "yes"]"#, |value| {
            match value.as_array()?.as_slice() {
                [no, yes] if no != yes => Some([no.as_str()?.to_string(), yes.as_str()?.to_string()]),
                _ => None,
            }
        })?;
        let original = keys.read("is_original_qwen3_reranker", "true or false", |value| value.as_bool())?;
        let is_matryoshka = keys.read("is_matryoshka", "true or false", |value| value.as_bool())?;
        let dimensions = keys.read("matryoshka_dimensions", "a list of numbers from 1 to 1048576", |value| {
            let number = |value: &serde_json::Value| value.as_u64().filter(|n| (1..=1 << 20).contains(n));
            let list = value.as_array().filter(|list| list.len() <= 1024)?;
            list.iter().map(|value| number(value).map(|n| n as usize)).collect()
        })?;
        keys.end()?;
        let is_original_qwen3_reranker = original.unwrap_or(false);
        if tokens.is_none() && (is_original_qwen3_reranker || class.is_some()) {
            let key = if class.is_some() { "architectures" } else { "is_original_qwen3_reranker" };
            return Err(format!("{key}: found without classifier_from_token, expected it beside, such as {EXAMPLE}"));
        }
        Ok(HfOverrides {
            classifier_from_token: tokens,
            is_original_qwen3_reranker,
            is_matryoshka,
            matryoshka_dimensions: dimensions,
        })
    }
}

impl HfOverrides {
    /// The ids of the yes and of the no.
    pub(crate) fn odds(
        &self,
        tokenizer: impl FnOnce() -> Result<Tokenizer, text::LoadError>,
    ) -> Result<Option<[u32; 2]>, EngineError> {
        let Some([no, yes]) = &self.classifier_from_token else { return Ok(None) };
        let tokenizer = tokenizer()?;
        let id = |token: &String| {
            let expected = "tokens of the vocabulary, as tokenizer.json spells them";
            let found = format!("classifier_from_token {token:?}");
            tokenizer.token_to_id(token).ok_or_else(|| bad("--hf-overrides", found, expected))
        };
        Ok(Some([id(yes)?, id(no)?]))
    }
}
