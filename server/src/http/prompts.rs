//! Plain prompts in the four forms that completions and embeddings take: a text, a list of texts, a list of token ids, a
//! list of lists of token ids (texts and lists may be mixed).

use serde_json::Value;

use super::app::App;
use super::error::ApiError;
use super::fields::{Fields, token_id};

/// One prompt as it was sent.
pub enum Input {
    /// Text, to be tokenised.
    Text(String),
    /// Token ids, each less than the vocabulary.
    Ids(Vec<u32>),
}

impl Input {
    /// The token ids, and the text if it was one. `param` is the field, for the error.
    pub fn encode(self, app: &App, add_special: bool, param: &str) -> Result<(Vec<u32>, Option<String>), ApiError> {
        match self {
            Input::Ids(ids) => Ok((ids, None)),
            Input::Text(text) => {
                let ids =
                    app.tokenizer().encode(&text, add_special).map_err(|error| ApiError::invalid(param, error))?;
                Ok((ids, Some(text)))
            }
        }
    }
}

/// The prompts of the field `param`, at least one.
pub fn read(app: &App, fields: &Fields, param: &str) -> Result<Vec<Input>, ApiError> {
    let (vocab, most) = (app.vocab(), app.limits.max_prompts);
    let ids = |items: &[Value]| items.iter().map(|item| token_id(item, vocab)).collect::<Option<Vec<u32>>>();
    let one = |value: &Value| match value {
        Value::String(text) => Some(Input::Text(text.clone())),
        Value::Array(items) => ids(items).map(Input::Ids),
        _ => None,
    };
    let value = fields.get(param).unwrap_or(&Value::Null);
    let inputs = match value {
        Value::Array(items) if items.is_empty() || items.len() > most && !items[0].is_number() => None,
        Value::Array(items) if items[0].is_number() => ids(items).map(|ids| vec![Input::Ids(ids)]),
        Value::Array(items) => items.iter().map(one).collect(),
        other => one(other).map(|one| vec![one]),
    };
    inputs.ok_or_else(|| {
        let expected =
            format!("a text, token ids from 0 to {}, or a list of 1 to {most} of either", vocab.saturating_sub(1));
        ApiError::wrong(param, value, expected)
    })
}
