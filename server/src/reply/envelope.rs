//! The fields that responses of several APIs share.

use axum::response::Response;
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::{Value, json};
use store::unix_seconds;

use crate::app::App;
use crate::http::call;
use crate::http::json::{self, Items};

/// Id of a response that begins with `prefix`: as in vLLM with the client's id of the call, or a unique one.
pub fn response_id(prefix: &str) -> String {
    call::sent_id().map_or_else(|| call::fresh_id(prefix), |id| format!("{prefix}-{id}"))
}

/// The field `usage` of a request that generates nothing: numbers of tokens of its prompts, and of those found in the prefix cache.
pub fn prompt_usage((prompt_tokens, cached_tokens): (usize, usize)) -> Value {
    json!({
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    })
}

/// The fields that all chunks of a response share.
#[derive(Clone, Debug)]
pub struct Envelope {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Envelope {
    /// Envelope of a new response of the model or of a LoRA adapter.
    pub fn new(app: &App, adapter: Option<&str>, prefix: &str, object: &'static str) -> Envelope {
        let model = adapter.unwrap_or(&app.model).to_string();
        Envelope { id: response_id(prefix), object, created: unix_seconds(), model }
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The response of a request that generates nothing: the fields of the envelope, the list `data`, and `usage`, of which
    /// [`prompt_usage`] says what it counts.
    pub fn respond(&self, data: impl IntoIterator<Item: Serialize>, tokens: (usize, usize)) -> Response {
        let mut text = Vec::new();
        self.write::<()>(&mut text, ("data", data), &[], Some(prompt_usage(tokens)));
        json::respond(text)
    }

    /// Appends the JSON of an object: the fields of the envelope, a list of this name, further fields, and `usage` unless it is `None`.
    pub fn write<F: Serialize>(
        &self,
        text: &mut Vec<u8>,
        (list, items): (&str, impl IntoIterator<Item: Serialize>),
        more: &[(&str, F)],
        usage: Option<Value>,
    ) {
        let write = || {
            let mut serializer = serde_json::Serializer::new(text);
            let mut map = serializer.serialize_map(None)?;
            map.serialize_entry("id", &self.id)?;
            map.serialize_entry("object", self.object)?;
            map.serialize_entry("created", &self.created)?;
            map.serialize_entry("model", &self.model)?;
            map.serialize_entry(list, &Items::new(items))?;
            more.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))?;
            usage.iter().try_for_each(|usage| map.serialize_entry("usage", usage))?;
            map.end()
        };
        // Writing to a `Vec` cannot fail.
        let _: serde_json::Result<()> = write();
    }
}
