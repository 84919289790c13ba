//! Prompts of completions and embeddings, in four forms: a text, a list of texts, a list of token ids, or a list of
//! lists of token ids. The items of a list may be texts and lists of token ids side by side.
//!
//! Token ids are parsed directly from the body's text and take four bytes each.

use serde_json::json;
use serde_json::value::RawValue;

use super::cost::Cost;
use super::fields::Fields;
use super::options::{check_length, truncate};
use super::raw::{excerpt, items, token_ids};
use super::work::Work;
use crate::http::ApiError;

/// One prompt of a request.
pub enum Input {
    /// Text to tokenize.
    Text(String),
    /// Token ids, each below the vocabulary size.
    Ids(Vec<u32>),
}

impl Input {
    /// Lower bound of the number of tokens.
    pub fn least_tokens(&self, work: &Work) -> usize {
        match self {
            Input::Text(text) => work.tokenizer().least_tokens(text.len()),
            Input::Ids(ids) => ids.len(),
        }
    }
}

/// Token ids of a prompt, and its text if there is one.
pub type Tokenized = (Vec<u32>, Option<String>);

/// Token ids of the prompts of the field `param`, of each the last `keep`, and their texts unless they were cut.
pub fn tokenize(
    work: &Work,
    prompts: Vec<Input>,
    param: &str,
    add_special: bool,
    keep: Option<usize>,
) -> Result<Vec<Tokenized>, ApiError> {
    let mut tokens = 0;
    let one = |input| {
        let (ids, text) = match input {
            Input::Ids(ids) => (ids, None),
            Input::Text(text) => (work.encode(&text, add_special, param, keep.is_none())?, Some(text)),
        };
        let whole = ids.len();
        let ids = truncate(ids, keep);
        check_length(work, ids.len(), param)?;
        tokens += ids.len();
        Cost { prompts: 1, prompt_tokens: tokens, ..Cost::default() }.check(&work.options.limits)?;
        let text = text.filter(|_| ids.len() == whole);
        Ok((ids, text))
    };
    prompts.into_iter().map(one).collect()
}

/// Reads the prompts of the field `param`, at least one.
pub fn read(work: &Work, fields: &Fields<'_>, param: &str, description: &str) -> Result<Vec<Input>, ApiError> {
    let given = given(work, fields, param, description)?;
    fields.required(param, given, &expected(work))
}

/// What a field of prompts may be.
pub fn expected(work: &Work) -> String {
    let (last, most) = (work.vocab().saturating_sub(1), work.options.limits.max_prompts);
    format!("a string, a list of token ids from 0 to {last}, or a list of 1 to {most} of these")
}

/// Reads the prompts of the field `param`, at least one; `None` without the field.
pub fn given(work: &Work, fields: &Fields<'_>, param: &str, description: &str) -> Result<Option<Vec<Input>>, ApiError> {
    let (vocab, most, most_tokens) =
        (work.vocab(), work.options.limits.max_prompts, work.options.limits.max_request_tokens);
    let last = vocab.saturating_sub(1);
    let id = json!({"type": "integer", "minimum": 0, "maximum": last});
    let ids = json!({"type": "array", "minItems": 1, "items": id});
    let schema = json!({"anyOf": [
        {"type": "string"},
        ids,
        {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": [{"type": "string"}, ids]}},
    ]});
    fields.describe(param, description, || schema);
    let Some(raw) = fields.raw(param) else { return Ok(None) };
    let wrong = || ApiError::found(param, &excerpt(raw), expected(work));
    let parts: Vec<&RawValue> = if is_list_of_prompts(raw.get()) {
        fields.check_items(param, most, "--max-prompts")?;
        serde_json::from_str(raw.get()).map_err(|_| wrong())?
    } else {
        vec![raw]
    };
    let (mut prompts, mut tokens) = (Vec::with_capacity(parts.len()), 0);
    for part in parts {
        let text = part.get();
        if !text.starts_with('[') {
            prompts.push(Input::Text(serde_json::from_str(text).map_err(|_| wrong())?));
            continue;
        }
        tokens += items(part).unwrap_or(0);
        if tokens > most_tokens {
            let advice = "send fewer or raise --max-request-tokens";
            return Err(ApiError::over(param, tokens, most_tokens, "tokens or more", advice));
        }
        prompts.push(Input::Ids(token_ids(text, vocab).filter(|ids| !ids.is_empty()).ok_or_else(wrong)?));
    }
    Ok(Some(prompts))
}

/// Whether a JSON text is a list of texts or lists, judging by its first item.
fn is_list_of_prompts(text: &str) -> bool {
    text.strip_prefix('[').is_some_and(|items| items.trim_start().starts_with(['"', '[']))
}
