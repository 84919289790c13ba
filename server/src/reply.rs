//! The frame around every answer: id, model, usage. Whole answers and chunks of a stream have the same one.

use engine::FinishReason;
use engine::StopCause;
use serde_json::{Value, json};

use super::app::{App, unix_seconds};
use super::json::Json;

/// The fields that all chunks of one answer share.
#[derive(Clone, Debug)]
pub struct Envelope {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Envelope {
    /// A new answer; `prefix` begins its id.
    pub fn new(app: &App, prefix: &str, object: &'static str) -> Envelope {
        Envelope { id: app.fresh_id(prefix), object, created: unix_seconds(), model: app.model.clone() }
    }

    /// `body` (the choices, mostly) in the frame; `usage` is left out where it is `None`.
    pub fn wrap(&self, body: Vec<(&str, Json)>, usage: Option<Value>) -> Json {
        let mut frame = Json::from(json!({
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
        }));
        body.into_iter().for_each(|(name, value)| frame.set(name, value));
        usage.into_iter().for_each(|usage| frame.set("usage", usage));
        frame
    }
}

/// Tokens of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of all prompts, each counted once.
    pub prompt_tokens: usize,
    /// Tokens of all sequences that are returned, those that ended them included; not what `best_of` left out and a beam
    /// search gave up.
    pub completion_tokens: usize,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: usize,
}

impl Usage {
    /// The JSON object.
    pub fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        })
    }
}

/// A body of choices.
pub fn choices(choices: Vec<Json>) -> Vec<(&'static str, Json)> {
    vec![("choices", choices.into())]
}

/// `finish_reason` and vLLM's `stop_reason` (the stop string or token; `null` for an end-of-sequence token).
pub fn finish(reason: Option<&FinishReason>) -> (Value, Value) {
    match reason {
        None => (Value::Null, Value::Null),
        Some(FinishReason::Length) => ("length".into(), Value::Null),
        Some(FinishReason::Stop(None | Some(StopCause::Complete))) => ("stop".into(), Value::Null),
        Some(FinishReason::Stop(Some(StopCause::Token(id)))) => ("stop".into(), (*id).into()),
        Some(FinishReason::Stop(Some(StopCause::Text(text)))) => ("stop".into(), text.as_str().into()),
        Some(FinishReason::Grammar(_) | FinishReason::Error(_)) => ("error".into(), Value::Null),
    }
}
