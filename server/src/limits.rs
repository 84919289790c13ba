//! What one request may ask for and how long it may take: one value, read by whoever enforces a part of it.
//!
//! | limit | enforced in |
//! |---|---|
//! | connections, time for a head, unread bytes | `serve`, `connection` |
//! | bytes and number of headers | here, as middleware; far beyond them in `serve` |
//! | bytes of a body, time for it, bytes of all bodies | `body` |
//! | numbers and sizes of fields | where the field is read |
//! | products of fields, and what all requests keep together | `cost` |
//! | streams, whole request | `call`, `run` |

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::app::App;
use super::error::ApiError;

/// Limits of a server. `Default` is what the flags default to.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Connections at once; further ones are told so and closed.
    pub max_connections: usize,
    /// Answers that stream at once; `None` for as many as there are connections.
    pub max_concurrent_streams: Option<usize>,
    /// Bytes of a body. A prompt of a million tokens is about 4 MB.
    pub max_body_bytes: usize,
    /// Bytes of all requests together: their bodies, then what is kept of them until they are answered.
    pub max_inflight_bytes: usize,
    /// Values and names in the JSON of one request, lists of token ids and prompts aside.
    pub max_json_values: usize,
    /// Bytes of one text that becomes tokens; a sixteenth of it where a tokenizer has to take the text at once.
    pub max_text_bytes: usize,
    /// Tokens of all prompts of one request.
    pub max_request_tokens: usize,
    /// Bytes of all header names and values.
    pub max_header_bytes: usize,
    /// Headers.
    pub max_header_count: usize,
    /// Prompts in one request.
    pub max_prompts: usize,
    /// Sequences per prompt, candidates of `best_of` and beams included; the engine may allow fewer.
    pub max_n: usize,
    /// Sequences of one request: prompts times sequences per prompt.
    pub max_sequences: usize,
    /// Alternatives for which a token's log-probability is given.
    pub max_logprobs: usize,
    /// Log-probabilities in one answer: tokens times alternatives, over all sequences.
    pub max_logprob_entries: usize,
    /// Stop strings.
    pub max_stop: usize,
    /// Bytes of a stop string, and of a bad word.
    pub max_stop_bytes: usize,
    /// Entries of `stop_token_ids`.
    pub max_stop_token_ids: usize,
    /// Entries of `allowed_token_ids`.
    pub max_allowed_token_ids: usize,
    /// Entries of `bad_words`.
    pub max_bad_words: usize,
    /// Entries of `logit_bias`.
    pub max_logit_bias: usize,
    /// Bytes of a schema, grammar, regular expression or list of choices, and of all tools together, as JSON.
    pub max_schema_bytes: usize,
    /// Messages of a conversation, and items of an `input`.
    pub max_messages: usize,
    /// Functions in `tools`.
    pub max_tools: usize,
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
            max_inflight_bytes: 128 << 20,
            max_json_values: 128 << 10,
            max_text_bytes: 4 << 20,
            max_request_tokens: 4 << 20,
            max_header_bytes: 64 << 10,
            max_header_count: 100,
            max_prompts: 2048,
            max_n: 128,
            max_sequences: 4096,
            max_logprobs: 20,
            max_logprob_entries: 1 << 20,
            max_stop: 16,
            max_stop_bytes: 1024,
            max_stop_token_ids: 1024,
            max_allowed_token_ids: 64 << 10,
            max_bad_words: 1024,
            max_logit_bias: 1024,
            max_schema_bytes: 512 << 10,
            max_messages: 4096,
            max_tools: 1024,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            send_timeout: Duration::from_secs(60),
            request_timeout: None,
            engine_iteration_timeout: Duration::from_secs(120),
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
