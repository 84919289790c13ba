//! Parts that all responses and chunks of completions share: the envelope, choices and usage.
//!
//! They are written as text, field by field. A chunk of a stream has a few bytes that are new and some two hundred that every chunk of
//! the response has, so [`Envelope`] keeps these as text.

use engine::{Delta, DraftCounts, FinishReason, StopCause};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value, json};

use super::logprobs::{Logprobs, PromptLogprobs};
use super::run::PromptOutput;
use crate::app::{App, unix_seconds};
use crate::http::json::put;
use crate::http::{Json, call};

/// The fields that all chunks of a response share.
#[derive(Clone, Debug)]
pub struct Envelope {
    id: String,
    /// Text of an object with these fields, without the brace that closes it.
    head: String,
}

impl Envelope {
    /// Envelope of a new response of the model or of a LoRA adapter. Its id is `prefix` and, as in vLLM, the client's id of the call, or
    /// a unique one.
    pub fn new(app: &App, adapter: Option<&str>, prefix: &str, object: &'static str) -> Envelope {
        Envelope::of(response_id(prefix), object, unix_seconds(), adapter.unwrap_or(&app.model))
    }

    fn of(id: String, object: &str, created: u64, model: &str) -> Envelope {
        let mut head = json!({"id": id, "object": object, "created": created, "model": model}).to_string();
        head.pop();
        Envelope { id, head }
    }

    /// Id of the response.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Appends the JSON of an object: the fields of the envelope, a list of this name, further fields, and `usage` unless it is `None`.
    pub fn write(
        &self,
        text: &mut Vec<u8>,
        (list, items): (&str, impl IntoIterator<Item: Serialize>),
        more: &[(&str, Field)],
        usage: Option<Value>,
    ) {
        text.extend_from_slice(self.head.as_bytes());
        begin_field(text, list);
        text.push(b'[');
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                text.push(b',');
            }
            put(text, &item);
        }
        text.push(b']');
        for (name, value) in more {
            begin_field(text, name);
            put(text, value);
        }
        if let Some(usage) = usage {
            begin_field(text, "usage");
            put(text, &usage);
        }
        text.push(b'}');
    }
}

fn begin_field(text: &mut Vec<u8>, name: &str) {
    text.push(b',');
    put(text, name);
    text.push(b':');
}

/// Response of a `render` route, with what the engine would compute. `id` is that of the response.
pub fn rendered(app: &App, adapter: Option<&str>, id: &str, ids: &[u32]) -> Json {
    let mut reply = Json::from(json!({"request_id": id, "model": adapter.unwrap_or(&app.model)}));
    reply.set("token_ids", Json::list(ids.iter()));
    reply
}

/// Id of a response that begins with `prefix`.
pub fn response_id(prefix: &str) -> String {
    call::sent_id().map_or_else(|| call::fresh_id(prefix), |id| format!("{prefix}-{id}"))
}

/// Token counts of a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of all prompts, each counted once.
    pub prompt_tokens: usize,
    /// Tokens of all returned sequences, including end-of-sequence tokens. Sequences that `best_of` or a beam search
    /// discards do not count.
    pub completion_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// Drafts of speculative decoding.
    pub drafts: DraftCounts,
}

impl Usage {
    /// Adds the generated and the cached tokens of one prompt.
    pub fn add(&mut self, answer: &PromptOutput) {
        self.completion_tokens += answer.completion_tokens;
        self.cached_tokens += answer.cached_tokens;
        self.drafts += answer.drafts;
    }

    /// The JSON object.
    pub fn to_json(self) -> Value {
        let mut usage = json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        });
        let details = self.draft_details();
        if !details.is_empty() {
            usage["completion_tokens_details"] = details.into();
        }
        usage
    }

    /// The numbers of drafts among the details of the output, if there were any.
    pub fn draft_details(&self) -> Map<String, Value> {
        let DraftCounts { accepted, rejected } = self.drafts;
        let numbers = [("accepted_prediction_tokens", accepted), ("rejected_prediction_tokens", rejected)];
        let numbers = numbers.into_iter().filter(|_| accepted + rejected > 0);
        numbers.map(|(name, count)| (name.to_string(), count.into())).collect()
    }
}

/// A choice of a response or of a chunk.
pub struct Choice<'a, C> {
    /// Index among the choices.
    pub index: usize,
    /// Name of the field with the content, and the content.
    pub content: (&'static str, C),
    /// Log probabilities, if requested.
    pub logprobs: Option<Logprobs<'a>>,
    /// Why the sequence ended.
    pub finish: Option<&'a FinishReason>,
    /// Whether a stop is the end of a tool call.
    pub has_called: bool,
    /// Further fields.
    pub more: Vec<(&'static str, Field)>,
}

impl<C: Serialize> Serialize for Choice<'_, C> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (name, content) = &self.content;
        let finish_reason = self.finish.map(|finish| match finish {
            FinishReason::Length => "length",
            FinishReason::Stop(_) if self.has_called => "tool_calls",
            FinishReason::Stop(_) => "stop",
            FinishReason::Grammar(_) | FinishReason::Error(_) => "error",
        });
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("index", &self.index)?;
        map.serialize_entry(name, content)?;
        map.serialize_entry("logprobs", &self.logprobs)?;
        map.serialize_entry("finish_reason", &finish_reason)?;
        // `stop_reason` is vLLM's: the stop string or token, `null` for an end-of-sequence token.
        match self.finish {
            Some(FinishReason::Stop(Some(StopCause::Token(id)))) => map.serialize_entry("stop_reason", id)?,
            Some(FinishReason::Stop(Some(StopCause::Text(text)))) => map.serialize_entry("stop_reason", text)?,
            _ => map.serialize_entry("stop_reason", &())?,
        }
        for (name, value) in &self.more {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

/// A further field of a response or of a choice. Those that may be long become JSON when they are written.
pub enum Field {
    /// JSON.
    Json(Json),
    /// Token ids; `None` is null.
    Ids(Option<Vec<u32>>),
    /// Log probabilities of a prompt.
    PromptLogprobs(PromptLogprobs),
}

impl<J: Into<Json>> From<J> for Field {
    fn from(json: J) -> Field {
        Field::Json(json.into())
    }
}

impl Serialize for Field {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Field::Json(json) => json.serialize(serializer),
            Field::Ids(ids) => ids.serialize(serializer),
            Field::PromptLogprobs(logprobs) => logprobs.serialize(serializer),
        }
    }
}

/// `token_ids` of a choice.
pub fn token_ids(delta: &Delta) -> Field {
    Field::Ids(Some(delta.tokens.iter().map(|token| token.id).collect()))
}

#[cfg(test)]
mod tests {
    use super::super::{Message, MessageDelta, Piece};
    use super::*;
    use proptest::prelude::*;

    fn finish() -> impl Strategy<Value = Option<FinishReason>> {
        prop_oneof![
            Just(None),
            Just(Some(FinishReason::Length)),
            Just(Some(FinishReason::Stop(None))),
            any::<u32>().prop_map(|id| Some(FinishReason::Stop(Some(StopCause::Token(id))))),
            any::<String>().prop_map(|text| Some(FinishReason::Stop(Some(StopCause::Text(text))))),
            Just(Some(FinishReason::Error("x".into()))),
        ]
    }

    /// The fields of a choice around its content, as values.
    fn tree(index: usize, (name, content): (&str, Value), finish: &Option<FinishReason>, has_called: bool) -> Value {
        let (reason, stop) = match finish {
            None => (Value::Null, Value::Null),
            Some(FinishReason::Length) => ("length".into(), Value::Null),
            Some(FinishReason::Stop(cause)) => {
                let stop = match cause {
                    Some(StopCause::Token(id)) => (*id).into(),
                    Some(StopCause::Text(text)) => text.as_str().into(),
                    _ => Value::Null,
                };
                (if has_called { "tool_calls" } else { "stop" }.into(), stop)
            }
            Some(_) => ("error".into(), Value::Null),
        };
        json!({"index": index, name: content, "logprobs": null, "finish_reason": reason, "stop_reason": stop})
    }

    proptest! {
        #[test]
        fn a_chunk_has_the_bytes_of_the_same_values_as_a_tree(
            ids in [any::<String>(); 2],
            texts in [any::<String>(); 3],
            finish in finish(),
            has_called: bool,
            index in 0..9usize,
            usage in prop_oneof![Just(None), Just(Some(Value::Null)), Just(Some(json!({"prompt_tokens": 3})))],
        ) {
            let ([id, model], [text, reasoning, content]) = (ids, texts);
            let envelope = Envelope::of(id.clone(), "text_completion", 7, &model);
            let choice = |content: (&'static str, Value)| tree(index, content, &finish, has_called);
            let mut message = json!({"role": "assistant", "content": content});
            if content.is_empty() && !reasoning.is_empty() {
                message["content"] = Value::Null;
            }
            let mut delta = json!({});
            if !reasoning.is_empty() {
                for name in ["reasoning", "reasoning_content"] {
                    message[name] = reasoning.as_str().into();
                    delta[name] = reasoning.as_str().into();
                }
            }
            if !content.is_empty() {
                delta["content"] = content.as_str().into();
            }
            let piece = || Piece { reasoning: reasoning.clone(), content: content.clone(), calls: Vec::new() };
            fn chunk(envelope: &Envelope, choice: Choice<'_, impl Serialize>, usage: &Option<Value>) -> String {
                let mut text = Vec::new();
                envelope.write(&mut text, ("choices", [choice]), &[("a\"b", Value::from(1).into())], usage.clone());
                String::from_utf8(text).unwrap_or_default()
            }
            let of = |tree: Value| {
                let mut whole = json!({"id": id, "object": "text_completion", "created": 7, "model": model, "choices": [tree], "a\"b": 1});
                if let Some(usage) = &usage {
                    whole["usage"] = usage.clone();
                }
                whole.to_string()
            };
            macro_rules! choice {
                ($name:literal, $content:expr) => {
                    Choice {
                        index, content: ($name, $content), logprobs: None, finish: finish.as_ref(), has_called,
                        more: Vec::new(),
                    }
                };
            }
            prop_assert_eq!(chunk(&envelope, choice!("text", &text), &usage), of(choice(("text", text.as_str().into()))));
            prop_assert_eq!(chunk(&envelope, choice!("message", Message(piece())), &usage), of(choice(("message", message))));
            prop_assert_eq!(chunk(&envelope, choice!("delta", MessageDelta(piece())), &usage), of(choice(("delta", delta))));
        }
    }
}
