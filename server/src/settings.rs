//! How a server presents itself, whom it serves, and what requests may ask for.

use std::str::FromStr;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, header};
use engine::Pooling;
use engine::text::ToolFormat;

/// What is done about `<think>…</think>` in front of an answer. Names are vLLM's where one does the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reasoning {
    /// `none`: it is text.
    Off,
    /// `qwen3`: split off where the tag is, in the text or at the end of the prompt.
    Tags,
    /// `deepseek_r1`: split off, and the text begins with thoughts even without a tag.
    Always,
}

impl FromStr for Reasoning {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Reasoning, &'static str> {
        match name {
            "none" => Ok(Reasoning::Off),
            "qwen3" => Ok(Reasoning::Tags),
            "deepseek_r1" => Ok(Reasoning::Always),
            _ => Err("expected none, qwen3 or deepseek_r1"),
        }
    }
}

/// How a server presents itself.
#[derive(Clone, Debug, Default)]
pub struct ServerOptions {
    /// `model` in requests and answers; `None` takes the model's own name.
    pub served_model_name: Option<String>,
    /// Where the model came from, told in `/v1/models`.
    pub root: String,
    /// One of them is asked of every request except `/health`, `/version` and `/metrics`; none: everyone is served.
    pub api_keys: Vec<String>,
    /// Which pages of other origins may use the server.
    pub cors: Cors,
    /// Names, beside those of loopback, under which the server takes requests; `*` is any.
    pub allowed_hosts: Vec<String>,
    /// What requests may ask for.
    pub limits: Limits,
    /// Log so many characters of each prompt; `None`: prompts are in no log.
    pub log_prompts: Option<usize>,
    /// How the model writes tool calls; `None` takes what its chat template speaks of.
    pub tool_call_parser: Option<ToolFormat>,
    /// Whether thoughts are split off; `None` where the chat template speaks of them.
    pub reasoning_parser: Option<Reasoning>,
    /// How `/v1/embeddings` makes a vector of a text; `None` as the checkpoint says.
    pub pooling_type: Option<Pooling>,
}

/// Which pages of other origins a browser lets use this server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cors {
    /// As browsers send them, `https://example.org`; `*` is all. Empty: none.
    pub origins: Vec<String>,
    /// Methods that they may use; empty: `GET` and `POST`.
    pub methods: Vec<String>,
    /// Headers that they may send; empty: those that clients of the API send.
    pub headers: Vec<String>,
}

impl Cors {
    /// Whether pages of this origin may use the server.
    pub(super) fn allows(&self, origin: &str) -> bool {
        self.origins.iter().any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(origin))
    }

    pub(super) fn list(items: &[String], default: &'static str) -> HeaderValue {
        match items {
            [] => HeaderValue::from_static(default),
            _ => HeaderValue::from_str(&items.join(", ")).unwrap_or(HeaderValue::from_static(default)),
        }
    }

    /// The headers for an allowed origin.
    pub(super) fn grant(&self, origin: &HeaderValue, headers: &mut HeaderMap) {
        let any = self.origins.iter().any(|allowed| allowed == "*");
        let shown = if any { HeaderValue::from_static("*") } else { origin.clone() };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, shown);
        headers.append(header::VARY, HeaderValue::from_static("origin"));
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id, retry-after"));
    }
}

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
