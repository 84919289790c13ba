//! The flags for what clients may ask of `quire serve`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::error::CliError;
use super::values;
use server::{Cors, Limits};

/// Who may use the server, and how much of it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Access and limits")]
pub struct LimitArgs {
    /// Key that clients must send as a bearer token; may be given several times
    #[arg(long, value_name = "KEY", value_parser = values::key, env = "QUIRE_API_KEY", hide_env_values = true)]
    pub api_key: Vec<String>,
    /// File with one key per line; blank lines and lines that begin with # do not count
    #[arg(long, value_name = "FILE", env = "QUIRE_API_KEY_FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Origin whose pages may use the server, or *; may be given several times [default: none]
    #[arg(long, value_name = "ORIGIN", value_parser = values::header, env = "QUIRE_ALLOWED_ORIGINS")]
    pub allowed_origins: Vec<String>,
    /// Method that they may use; may be given several times [default: GET and POST]
    #[arg(long, value_name = "METHOD", value_parser = values::header, env = "QUIRE_ALLOWED_METHODS")]
    pub allowed_methods: Vec<String>,
    /// Header that they may send; may be given several times [default: those of the API]
    #[arg(long, value_name = "NAME", value_parser = values::header, env = "QUIRE_ALLOWED_HEADERS")]
    pub allowed_headers: Vec<String>,
    /// Host name, beside localhost, that requests may be sent to, or *; may be given several times [default: none on a
    /// loopback address without keys, else any]
    #[arg(long, value_name = "NAME", value_parser = values::host, env = "QUIRE_ALLOWED_HOSTS")]
    pub allowed_hosts: Vec<String>,
    /// Connections at once
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::positive, env = "QUIRE_MAX_CONNECTIONS")]
    pub max_connections: usize,
    /// Answers that stream at once [default: as many as connections]
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>, env = "QUIRE_MAX_CONCURRENT_STREAMS")]
    pub max_concurrent_streams: Option<usize>,
    /// Bytes of a body [default: 16M]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_MAX_BODY_BYTES")]
    pub max_body_bytes: Option<u64>,
    /// Bytes of all requests together: their bodies, then what is kept of them until they are answered; more are answered
    /// 429 [default: 128M]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_MAX_INFLIGHT_BYTES")]
    pub max_inflight_bytes: Option<u64>,
    /// Values and names in the JSON of a request, lists of token ids and prompts aside
    #[arg(long, value_name = "N", default_value_t = 131072, value_parser = values::positive, env = "QUIRE_MAX_JSON_VALUES")]
    pub max_json_values: usize,
    /// Bytes of one text that becomes tokens [default: 4M]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_MAX_TEXT_BYTES")]
    pub max_text_bytes: Option<u64>,
    /// Tokens of all prompts of a request
    #[arg(long, value_name = "TOKENS", default_value_t = 4194304, value_parser = values::positive, env = "QUIRE_MAX_REQUEST_TOKENS")]
    pub max_request_tokens: usize,
    /// Bytes of all headers [default: 64K]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_MAX_HEADER_BYTES")]
    pub max_header_bytes: Option<u64>,
    /// Headers of a request
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = values::positive, env = "QUIRE_MAX_HEADER_COUNT")]
    pub max_header_count: usize,
    /// Prompts in one request
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = values::positive, env = "QUIRE_MAX_PROMPTS")]
    pub max_prompts: usize,
    /// Sequences per prompt
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = values::positive, env = "QUIRE_MAX_N")]
    pub max_n: usize,
    /// Sequences of a request: prompts times sequences per prompt
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::positive, env = "QUIRE_MAX_SEQUENCES")]
    pub max_sequences: usize,
    /// Alternatives for which a token's log-probability is given, up to 1000
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = values::whole::<usize>, env = "QUIRE_MAX_LOGPROBS")]
    pub max_logprobs: usize,
    /// Log-probabilities in an answer: tokens times alternatives, over all sequences
    #[arg(long, value_name = "N", default_value_t = 1048576, value_parser = values::positive, env = "QUIRE_MAX_LOGPROB_ENTRIES")]
    pub max_logprob_entries: usize,
    /// Stop strings
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = values::positive, env = "QUIRE_MAX_STOP")]
    pub max_stop: usize,
    /// Bytes of a stop string, and of a bad word [default: 1K]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_MAX_STOP_BYTES")]
    pub max_stop_bytes: Option<u64>,
    /// Entries of stop_token_ids
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = values::positive, env = "QUIRE_MAX_STOP_TOKEN_IDS")]
    pub max_stop_token_ids: usize,
    /// Entries of allowed_token_ids
    #[arg(long, value_name = "N", default_value_t = 65536, value_parser = values::positive, env = "QUIRE_MAX_ALLOWED_TOKEN_IDS")]
    pub max_allowed_token_ids: usize,
    /// Entries of bad_words
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = values::positive, env = "QUIRE_MAX_BAD_WORDS")]
    pub max_bad_words: usize,
    /// Entries of logit_bias
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = values::positive, env = "QUIRE_MAX_LOGIT_BIAS")]
    pub max_logit_bias: usize,
    /// Bytes of a schema or grammar as it is sent, and of all tools [default: 512K]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_MAX_SCHEMA_BYTES")]
    pub max_schema_bytes: Option<u64>,
    /// Messages of a conversation, and items of an input
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::positive, env = "QUIRE_MAX_MESSAGES")]
    pub max_messages: usize,
    /// Functions in tools
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = values::positive, env = "QUIRE_MAX_TOOLS")]
    pub max_tools: usize,
    /// Requests that wait for their turn; more are answered 429
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::whole::<usize>, env = "QUIRE_MAX_QUEUED_REQUESTS")]
    pub max_queued_requests: usize,
    /// Events per sequence that a slow reader may leave unread before the request is cancelled
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::positive, env = "QUIRE_MAX_UNREAD_EVENTS")]
    pub max_unread_events: usize,
    /// Seconds for the head of a request; idle connections are closed after them too
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = values::seconds, env = "QUIRE_HEADER_TIMEOUT")]
    pub header_timeout: f64,
    /// Seconds for the body of a request
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = values::seconds, env = "QUIRE_BODY_TIMEOUT")]
    pub body_timeout: f64,
    /// Seconds that a client may leave bytes unread before its connection is closed
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = values::seconds, env = "QUIRE_SEND_TIMEOUT")]
    pub send_timeout: f64,
    /// Seconds for a whole request [default: as long as it takes]
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds, env = "QUIRE_REQUEST_TIMEOUT")]
    pub request_timeout: Option<f64>,
    /// Seconds without a completed step, while there is work, before /health answers 503 and a dump is logged
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = values::seconds, env = "QUIRE_ENGINE_ITERATION_TIMEOUT")]
    pub engine_iteration_timeout: f64,
}

impl LimitArgs {
    /// The keys of the flags and of the file.
    pub fn api_keys(&self) -> Result<Vec<String>, CliError> {
        let mut keys = self.api_key.clone();
        if let Some(path) = &self.api_key_file {
            keys.extend(read_keys(path)?);
        }
        Ok(keys)
    }

    /// Origins, methods and headers.
    pub fn cors(&self) -> Cors {
        Cors {
            origins: self.allowed_origins.clone(),
            methods: self.allowed_methods.clone(),
            headers: self.allowed_headers.clone(),
        }
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        let default = Limits::default();
        let bytes =
            |given: Option<u64>, default: usize| given.map_or(default, |n| usize::try_from(n).unwrap_or(usize::MAX));
        Limits {
            max_connections: self.max_connections,
            max_concurrent_streams: self.max_concurrent_streams,
            max_body_bytes: bytes(self.max_body_bytes, default.max_body_bytes),
            max_inflight_bytes: bytes(self.max_inflight_bytes, default.max_inflight_bytes),
            max_json_values: self.max_json_values,
            max_text_bytes: bytes(self.max_text_bytes, default.max_text_bytes),
            max_request_tokens: self.max_request_tokens,
            max_header_bytes: bytes(self.max_header_bytes, default.max_header_bytes),
            max_header_count: self.max_header_count,
            max_prompts: self.max_prompts,
            max_n: self.max_n,
            max_sequences: self.max_sequences,
            max_logprobs: self.max_logprobs.min(1000),
            max_logprob_entries: self.max_logprob_entries,
            max_stop: self.max_stop,
            max_stop_bytes: bytes(self.max_stop_bytes, default.max_stop_bytes),
            max_stop_token_ids: self.max_stop_token_ids,
            max_allowed_token_ids: self.max_allowed_token_ids,
            max_bad_words: self.max_bad_words,
            max_logit_bias: self.max_logit_bias,
            max_schema_bytes: bytes(self.max_schema_bytes, default.max_schema_bytes),
            max_messages: self.max_messages,
            max_tools: self.max_tools,
            header_timeout: Duration::from_secs_f64(self.header_timeout),
            body_timeout: Duration::from_secs_f64(self.body_timeout),
            send_timeout: Duration::from_secs_f64(self.send_timeout),
            request_timeout: self.request_timeout.map(Duration::from_secs_f64),
            engine_iteration_timeout: Duration::from_secs_f64(self.engine_iteration_timeout),
        }
    }
}

fn read_keys(path: &Path) -> Result<Vec<String>, CliError> {
    let problem = |message: String| CliError::KeyFile { path: path.to_owned(), message };
    let text = std::fs::read_to_string(path).map_err(|error| problem(error.to_string()))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_string).collect();
    // A file that was meant to guard the server and holds nothing must not leave it open.
    if keys.is_empty() { Err(problem("holds no key, expected one per line".to_string())) } else { Ok(keys) }
}
