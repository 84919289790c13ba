//! Settings of a server: its name, who may use it, and the limits of requests.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, header};
use engine::Pooling;
use engine::text::{ReasoningFormat, ToolFormat};

/// Settings of a server.
#[derive(Clone, Debug, Default)]
pub struct ServerOptions {
    /// Names of the model in requests; responses and metrics have the first. Empty means the model's own name.
    pub served_model_names: Vec<String>,
    /// Owner of the models in `/v1/models`, by which some routers tell engines apart; `None` means `quire`.
    pub owned_by: Option<String>,
    /// Where the model was loaded from, for `/v1/models`.
    pub root: String,
    /// Accepted API keys. All routes except `/health`, `/ping`, `/version` and `/metrics` require one; empty: none do.
    pub api_keys: Vec<String>,
    /// Origins whose pages may use the server.
    pub cors: Cors,
    /// Accepted host names besides those of loopback and, on another address, IP addresses and names without a dot; `*` means
    /// any.
    pub allowed_hosts: Vec<String>,
    /// Limits of requests.
    pub limits: Limits,
    /// Number of characters of each prompt to log; `None` logs none.
    pub log_prompts: Option<usize>,
    /// Format of the model's tool calls; `None` derives it from the chat template.
    pub tool_call_parser: Option<ToolFormat>,
    /// Format of the model's reasoning; `None` derives it from the chat template.
    pub reasoning_parser: Option<ReasoningFormat>,
    /// Whether clients may load and unload LoRA adapters, whose folders on this machine they name; `None` allows it if the
    /// server listens on a loopback address.
    pub allow_runtime_lora_updating: Option<bool>,
    /// Whether clients may reset the prefix cache; `None` allows it if the server listens on a loopback address.
    pub server_dev_mode: Option<bool>,
    /// Pooling of `/v1/embeddings`; `None` means that of the checkpoint.
    pub pooling_type: Option<Pooling>,
}

/// Cross-origin resource sharing: which origins' pages may use the server from a browser.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cors {
    /// Origins as browsers send them (`https://example.org`); `*` means all, empty none.
    pub origins: Vec<String>,
    /// Methods that they may use; empty means `GET` and `POST`.
    pub methods: Vec<String>,
    /// Headers that they may send; empty means those that they ask for.
    pub headers: Vec<String>,
}

impl Cors {
    /// Whether an origin is allowed.
    pub(super) fn allows(&self, origin: &str) -> bool {
        self.origins.iter().any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(origin))
    }

    pub(super) fn list(items: &[String], default: &'static str) -> HeaderValue {
        match items {
            [] => HeaderValue::from_static(default),
            _ => HeaderValue::from_str(&items.join(", ")).unwrap_or(HeaderValue::from_static(default)),
        }
    }

    /// Adds the CORS headers for an allowed origin.
    pub(super) fn grant(&self, origin: &HeaderValue, headers: &mut HeaderMap) {
        let any = self.origins.iter().any(|allowed| allowed == "*");
        let shown = if any { HeaderValue::from_static("*") } else { origin.clone() };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, shown);
        headers.append(header::VARY, HeaderValue::from_static("origin"));
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id, retry-after"));
    }
}

/// Limits of a server. `Default` has the defaults of the flags.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Maximum number of open connections; further ones get an error.
    pub max_connections: usize,
    /// Maximum number of streaming responses at a time; `None` means one per connection.
    pub max_concurrent_streams: Option<usize>,
    /// Maximum bytes of a body. A prompt of a million tokens has about 4 MB.
    pub max_body_bytes: usize,
    /// Maximum bytes of all requests in flight: their bodies, then what is held until they are answered.
    pub max_inflight_bytes: usize,
    /// Maximum number of values and names in the JSON of a request, except lists of token ids and prompts.
    pub max_json_values: usize,
    /// Maximum bytes of a text to tokenize; a sixteenth of it for text that the tokenizer cannot cut.
    pub max_text_bytes: usize,
    /// Maximum number of tokens of all prompts of a request.
    pub max_request_tokens: usize,
    /// Maximum bytes of all header names and values.
    pub max_header_bytes: usize,
    /// Maximum number of headers.
    pub max_header_count: usize,
    /// Maximum number of prompts of a request.
    pub max_prompts: usize,
    /// Maximum number of sequences per prompt, including candidates of `best_of` and beams; the engine may allow fewer.
    pub max_n: usize,
    /// Maximum number of sequences of a request: prompts times sequences per prompt.
    pub max_sequences: usize,
    /// Maximum number of alternatives per token in log probabilities.
    pub max_logprobs: usize,
    /// Maximum number of log probabilities in a response: tokens times alternatives, over all sequences.
    pub max_logprob_entries: usize,
    /// Maximum number of stop strings.
    pub max_stop: usize,
    /// Maximum bytes of a stop string or a bad word.
    pub max_stop_bytes: usize,
    /// Maximum number of `stop_token_ids`.
    pub max_stop_token_ids: usize,
    /// Maximum number of `allowed_token_ids`.
    pub max_allowed_token_ids: usize,
    /// Maximum number of `bad_words`.
    pub max_bad_words: usize,
    /// Maximum number of entries of `logit_bias`.
    pub max_logit_bias: usize,
    /// Maximum bytes of JSON of a schema, a grammar, a regular expression, a list of choices, or all tools together.
    pub max_schema_bytes: usize,
    /// Maximum number of messages of a conversation, or items of `input`.
    pub max_messages: usize,
    /// Maximum number of functions in `tools`.
    pub max_tools: usize,
    /// Time limit for the head of a request, from when the connection is ready for one; closes idle connections too.
    pub header_timeout: Duration,
    /// Time limit for a body.
    pub body_timeout: Duration,
    /// Time without progress of a write before the connection is closed.
    pub send_timeout: Duration,
    /// Time limit from the arrival of a body to the end of the response; `None` means none.
    pub request_timeout: Option<Duration>,
    /// Time without a completed step, while requests are unfinished, before the engine counts as stuck.
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
