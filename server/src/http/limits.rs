//! What one request may ask for and how long it may take: one value, read by whoever enforces a part of it.
//!
//! | limit | enforced in |
//! |---|---|
//! | connections, time for a head, unread bytes | `serve`, `connection` |
//! | bytes and number of headers | here, as middleware; far beyond them in `serve` |
//! | bytes of a body, time for it | `body` |
//! | numbers and sizes of fields | here, on the parsed body |
//! | prompts, `n`, `stop` | where the field is read |
//! | streams, whole request | `call`, `run` |

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;

/// Limits of a server. `Default` is what the flags default to.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Connections at once; further ones are told so and closed.
    pub max_connections: usize,
    /// Answers that stream at once; `None` for as many as there are connections.
    pub max_concurrent_streams: Option<usize>,
    /// Bytes of a body. Parsed JSON takes many times its text; a prompt of a million tokens is about 4 MB.
    pub max_body_bytes: usize,
    /// Bytes of all header names and values.
    pub max_header_bytes: usize,
    /// Headers.
    pub max_header_count: usize,
    /// Prompts in one request.
    pub max_prompts: usize,
    /// Sequences per prompt, candidates of `best_of` and beams included; the engine may allow fewer.
    pub max_n: usize,
    /// Stop strings.
    pub max_stop: usize,
    /// Bytes of a stop string.
    pub max_stop_bytes: usize,
    /// Entries of `logit_bias`.
    pub max_logit_bias: usize,
    /// Bytes of a schema, grammar, regular expression or list of choices, and of all tools together, as JSON.
    pub max_schema_bytes: usize,
    /// Messages of a conversation.
    pub max_messages: usize,
    /// For the head of a request to come, from when the connection could take one: idle connections end by it too.
    pub header_timeout: Duration,
    /// For a body to come.
    pub body_timeout: Duration,
    /// That bytes may wait for a client to read before its connection is closed.
    pub send_timeout: Duration,
    /// From the arrival of a body to the end of the answer; `None` for as long as it takes.
    pub request_timeout: Option<Duration>,
    /// Without a completed step, while there is work, before the engine counts as stuck.
    pub engine_iteration_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_connections: 4096,
            max_concurrent_streams: None,
            max_body_bytes: 16 << 20,
            max_header_bytes: 64 << 10,
            max_header_count: 100,
            max_prompts: 2048,
            max_n: 128,
            max_stop: 16,
            max_stop_bytes: 1024,
            max_logit_bias: 1024,
            max_schema_bytes: 512 << 10,
            max_messages: 4096,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            send_timeout: Duration::from_secs(60),
            request_timeout: None,
            engine_iteration_timeout: Duration::from_secs(120),
        }
    }
}

/// Fields that hold a grammar in some form, or tools.
const SCHEMAS: [&str; 7] = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "tools",
];

impl Limits {
    /// Refuses a body whose fields are larger than they may be, before anything is made of them.
    pub fn check(&self, fields: &Fields) -> Result<(), ApiError> {
        let too_many = |name, found, most, what| {
            Err(ApiError::invalid(name, format_args!("found {found} {what}, expected at most {most}")))
        };
        if let Some(Value::Array(messages)) = fields.get("messages")
            && messages.len() > self.max_messages
        {
            return too_many("messages", messages.len(), self.max_messages, "messages");
        }
        if let Some(Value::Object(bias)) = fields.get("logit_bias")
            && bias.len() > self.max_logit_bias
        {
            return too_many("logit_bias", bias.len(), self.max_logit_bias, "entries");
        }
        let stops = match fields.get("stop") {
            Some(Value::Array(items)) => items.as_slice(),
            Some(one) => std::slice::from_ref(one),
            None => &[],
        };
        if let Some(long) = stops.iter().filter_map(Value::as_str).map(str::len).find(|len| *len > self.max_stop_bytes)
        {
            return too_many("stop", long, self.max_stop_bytes, "bytes in a string");
        }
        for name in SCHEMAS {
            let bytes = fields.get(name).map_or(0, json_bytes);
            if bytes > self.max_schema_bytes {
                return too_many(name, bytes, self.max_schema_bytes, "bytes of JSON");
            }
        }
        Ok(())
    }
}

/// About the length of a value as JSON text, without writing it. Values are no deeper than the parser allows.
fn json_bytes(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) => 4,
        Value::Number(_) => 8,
        Value::String(text) => text.len() + 2,
        Value::Array(items) => 2 + items.iter().map(|item| 1 + json_bytes(item)).sum::<usize>(),
        Value::Object(fields) => {
            2 + fields.iter().map(|(name, value)| name.len() + 4 + json_bytes(value)).sum::<usize>()
        }
    }
}

/// Middleware: refuses a head that is too large, and one that does not say which host it means (RFC 9112, section 3.2).
pub async fn check_head(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let (headers, limits) = (request.headers(), &app.limits);
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    let bytes = target + headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>();
    let large = |found: usize, what: &str, most: usize| {
        ApiError::large_head(format!("found {found} {what}, expected at most {most}")).into_response()
    };
    let hosts = headers.get_all(header::HOST).iter().count();
    match () {
        () if headers.len() > limits.max_header_count => large(headers.len(), "headers", limits.max_header_count),
        () if target > limits.max_header_bytes => ApiError::long_target(limits.max_header_bytes).into_response(),
        () if bytes > limits.max_header_bytes => large(bytes, "bytes of headers", limits.max_header_bytes),
        () if hosts > 1 || hosts == 0 && request.version() == Version::HTTP_11 => {
            ApiError::body(format!("found {hosts} Host headers, expected one")).into_response()
        }
        () => next.run(request).await,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    #[test]
    fn each_field_has_its_limit_and_may_reach_it() {
        let limits =
            Limits { max_messages: 2, max_logit_bias: 2, max_stop_bytes: 4, max_schema_bytes: 64, ..Limits::default() };
        for (param, good, bad) in [
            ("messages", json!([1, 2]), json!([1, 2, 3])),
            ("logit_bias", json!({"1": 1, "2": 1}), json!({"1": 1, "2": 1, "3": 1})),
            ("stop", json!("abcd"), json!("abcde")),
            ("stop", json!(["abcd", "é"]), json!(["a", "ééé"])),
            ("guided_regex", json!("a".repeat(62)), json!("a".repeat(63))),
            ("guided_json", json!({"a": "b"}), json!({"a": ["b".repeat(60)]})),
            ("tools", json!([]), json!([{"name": "b".repeat(60)}])),
        ] {
            let check = |value: &Value| limits.check(&Fields::new(json!({ param: value })).unwrap());
            assert_eq!(check(&good), Ok(()), "{param}");
            let error = check(&bad).unwrap_err().to_json();
            assert_eq!(error["error"]["param"], param);
            assert!(error["error"]["message"].as_str().unwrap().contains("expected at most"));
        }
    }

    #[test]
    fn the_length_of_json_is_never_far_from_its_text() {
        let value = json!({"a": [1.5, true, null, "text"], "b": {"c": "d".repeat(100)}});
        let (guess, exact) = (json_bytes(&value), value.to_string().len());
        assert!(guess.abs_diff(exact) < 20, "{guess} {exact}");
    }
}
