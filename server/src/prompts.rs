//! Plain prompts in the four forms that completions and embeddings take: a text, a list of texts, a list of token ids, a
//! list of lists of token ids (texts and lists may be mixed).
//!
//! They are read straight from the body's text: the ids of a long list take four bytes each.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};
use serde_json::json;

use super::error::ApiError;
use super::fields::{Fields, Id, Ids, excerpt, items};
use super::options::check_length;
use super::work::Work;

/// One prompt as it was sent.
pub enum Input {
    /// Text, to be tokenised.
    Text(String),
    /// Token ids, each less than the vocabulary.
    Ids(Vec<u32>),
}

impl Input {
    /// The token ids, and the text if it was one. `param` is the field, for the error; see [`Work::encode`].
    pub fn encode(
        self,
        work: &Work,
        add_special: bool,
        param: &str,
        must_fit: bool,
    ) -> Result<(Vec<u32>, Option<String>), ApiError> {
        match self {
            Input::Ids(ids) => {
                if must_fit {
                    check_length(work, ids.len(), param)?;
                }
                Ok((ids, None))
            }
            Input::Text(text) => Ok((work.encode(&text, add_special, param, must_fit)?, Some(text))),
        }
    }

    /// A number of tokens that it has at least.
    pub fn least_tokens(&self, work: &Work) -> usize {
        match self {
            Input::Text(text) => work.tokenizer().least_tokens(text.len()),
            Input::Ids(ids) => ids.len(),
        }
    }
}

/// The prompts of the field `param`, at least one.
pub fn read(work: &Work, fields: &Fields<'_>, param: &str, description: &str) -> Result<Vec<Input>, ApiError> {
    let (vocab, most, most_tokens) = (work.vocab(), work.limits.max_prompts, work.limits.max_request_tokens);
    let last = vocab.saturating_sub(1);
    let id = json!({"type": "integer", "minimum": 0, "maximum": last});
    let ids = json!({"type": "array", "minItems": 1, "items": id});
    let schema = json!({"anyOf": [
        {"type": "string"},
        ids,
        {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": [{"type": "string"}, ids]}},
    ]});
    fields.describe(param, description, || schema);
    let expected = format!("a text, token ids from 0 to {last}, or a list of 1 to {most} of either");
    let found = match fields.raw(param) {
        None => None,
        Some(raw) => {
            let left = Cell::new(most_tokens);
            let prompts = Prompts { vocab, most, left: &left };
            let found = serde_json::Deserializer::from_str(raw.get()).deserialize_any(prompts);
            Some(found.ok().filter(|found| !found.is_empty()).ok_or_else(|| {
                if left.get() == 0 {
                    let advice = "send fewer (--max-request-tokens)";
                    return ApiError::invalid(
                        param,
                        format_args!("found more than {most_tokens} tokens, expected at most {most_tokens}; {advice}"),
                    );
                }
                let several = items(raw).filter(|items| *items > most && found_texts(raw.get()));
                match several {
                    Some(found) => ApiError::over(param, found, most, "prompts", "send fewer (--max-prompts)"),
                    None => ApiError::found(param, &excerpt(raw), &expected),
                }
            })?)
        }
    };
    fields.required(param, found, &expected)
}

/// Whether a list holds anything but numbers, by its first item.
fn found_texts(list: &str) -> bool {
    list[1..].trim_start().starts_with(['"', '['])
}

/// Reads the whole field.
#[derive(Clone, Copy)]
struct Prompts<'a> {
    vocab: usize,
    most: usize,
    /// Token ids that may still come; 0 once there were too many.
    left: &'a Cell<usize>,
}

impl Prompts<'_> {
    fn count<E: Error>(&self, ids: usize) -> Result<(), E> {
        self.left.set(self.left.get().saturating_sub(ids));
        if self.left.get() == 0 { Err(E::custom("too many tokens")) } else { Ok(()) }
    }
}

impl<'de> Visitor<'de> for Prompts<'_> {
    type Value = Vec<Input>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("prompts")
    }

    fn visit_str<E>(self, text: &str) -> Result<Vec<Input>, E> {
        Ok(vec![Input::Text(text.to_string())])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<Input>, A::Error> {
        let (mut ids, mut inputs) = (Vec::new(), Vec::new());
        while let Some(item) = seq.next_element_seed(self)? {
            match item {
                Item::Id(id) if inputs.is_empty() => {
                    self.count(1)?;
                    ids.push(id);
                }
                Item::Input(input) if ids.is_empty() && inputs.len() < self.most => inputs.push(input),
                _ => return Err(A::Error::custom("ids beside prompts, or too many prompts")),
            }
        }
        if !ids.is_empty() {
            inputs.push(Input::Ids(ids));
        }
        Ok(inputs)
    }
}

/// An item of the list.
enum Item {
    Id(u32),
    Input(Input),
}

impl<'de> DeserializeSeed<'de> for Prompts<'_> {
    type Value = Item;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Item, D::Error> {
        deserializer.deserialize_any(OneItem(self))
    }
}

/// Reads one item.
struct OneItem<'a>(Prompts<'a>);

impl<'de> Visitor<'de> for OneItem<'_> {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a prompt")
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<Item, E> {
        Id { vocab: self.0.vocab }.visit_u64(id).map(Item::Id)
    }

    fn visit_f64<E: Error>(self, id: f64) -> Result<Item, E> {
        Id { vocab: self.0.vocab }.visit_f64(id).map(Item::Id)
    }

    fn visit_str<E>(self, text: &str) -> Result<Item, E> {
        Ok(Item::Input(Input::Text(text.to_string())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Item, A::Error> {
        let ids = Ids { vocab: self.0.vocab }.visit_seq(seq)?;
        self.0.count(ids.len())?;
        Ok(Item::Input(Input::Ids(ids)))
    }
}
