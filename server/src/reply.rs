//! Parts that all responses and chunks of completions share: the envelope, choices and usage.

use engine::{Delta, DraftCounts, FinishReason, StopCause};
use serde_json::{Map, Value, json};

use super::app::{App, unix_seconds};
use super::call;
use super::json::Json;
use super::run::Answer;

/// The fields that all chunks of a response share.
#[derive(Clone, Debug)]
pub struct Envelope {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Envelope {
    /// Envelope of a new response of the model or of a LoRA adapter. Its id is `prefix` and, as in vLLM, the client's id of the call, or
    /// a unique one.
    pub fn new(app: &App, adapter: Option<&str>, prefix: &str, object: &'static str) -> Envelope {
        let model = adapter.unwrap_or(&app.model).to_string();
        Envelope { id: response_id(app, prefix), object, created: unix_seconds(), model }
    }

    /// Id of the response.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Adds the fields of the envelope, and `usage` unless it is `None`, to those of `body`.
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

/// Response of a `render` route, with what the engine would compute. `id` is that of the response.
pub fn rendered(app: &App, adapter: Option<&str>, id: &str, ids: &[u32]) -> Json {
    let mut reply = Json::from(json!({"request_id": id, "model": adapter.unwrap_or(&app.model)}));
    reply.set("token_ids", Json::list(ids.iter()));
    reply
}

/// Bytes of a token id in the response of a `render` route.
pub const RENDERED_BYTES: usize = 8;

/// Id of a response that begins with `prefix`.
pub fn response_id(app: &App, prefix: &str) -> String {
    call::sent_id().map_or_else(|| app.fresh_id(prefix), |id| format!("{prefix}-{id}"))
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
    pub fn add(&mut self, answer: &Answer) {
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

/// A body of choices.
pub fn choices(choices: impl IntoIterator<Item = Json>) -> Vec<(&'static str, Json)> {
    vec![("choices", choices.into_iter().collect::<Vec<Json>>().into())]
}

/// A choice; `key` is the field with its content.
pub fn choice(index: usize, (key, content): (&str, Value), delta: &Delta, logprobs: Option<Json>) -> Json {
    // `stop_reason` is vLLM's: the stop string or token, `null` for an end-of-sequence token.
    let (finish_reason, stop_reason) = match &delta.finish {
        None => (Value::Null, Value::Null),
        Some(FinishReason::Length) => ("length".into(), Value::Null),
        Some(FinishReason::Stop(None | Some(StopCause::Complete))) => ("stop".into(), Value::Null),
        Some(FinishReason::Stop(Some(StopCause::Token(id)))) => ("stop".into(), (*id).into()),
        Some(FinishReason::Stop(Some(StopCause::Text(text)))) => ("stop".into(), text.as_str().into()),
        Some(FinishReason::Grammar(_) | FinishReason::Error(_)) => ("error".into(), Value::Null),
    };
    let mut choice = Json::from(json!({
        "index": index,
        key: content,
        "logprobs": null,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }));
    logprobs.into_iter().for_each(|logprobs| choice.set("logprobs", logprobs));
    choice
}

/// `token_ids` of a choice.
pub fn token_ids(delta: &Delta) -> Value {
    delta.tokens.iter().map(|token| token.id).collect()
}
