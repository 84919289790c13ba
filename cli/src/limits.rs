//! Flags for access to `quire serve` and limits on requests.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::error::CliError;
use super::values;
use server::{Cors, Limits};

#[derive(Debug, Args)]
#[command(next_help_heading = "Access and limits")]
pub struct LimitArgs {
    /// API key that clients must send as a bearer token; can be given several times
    #[arg(long, value_name = "KEY", value_parser = values::key, env = "QUIRE_API_KEY", hide_env_values = true)]
    pub api_key: Vec<String>,
    /// File with one API key per line; empty lines and lines that begin with # are ignored
    #[arg(long, value_name = "FILE", env = "QUIRE_API_KEY_FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Origin whose web pages may use the server, or *; can be given several times [default: none]
    #[arg(long, value_name = "ORIGIN", value_parser = values::header, env = "QUIRE_ALLOWED_ORIGINS")]
    pub allowed_origins: Vec<String>,
    /// Method that these pages may use; can be given several times [default: GET and POST]
    #[arg(long, value_name = "METHOD", value_parser = values::header, env = "QUIRE_ALLOWED_METHODS")]
    pub allowed_methods: Vec<String>,
    /// Header that these pages may send; can be given several times [default: those that a page asks for]
    #[arg(long, value_name = "NAME", value_parser = values::header, env = "QUIRE_ALLOWED_HEADERS")]
    pub allowed_headers: Vec<String>,
    /// Host name that requests may use in addition to localhost and, on another address, IP addresses and names without a
    /// dot; * means any; can be given several times [default: any with API keys, otherwise none]
    #[arg(long, value_name = "NAME", value_parser = values::host, env = "QUIRE_ALLOWED_HOSTS")]
    pub allowed_hosts: Vec<String>,
    /// Maximum number of open connections
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::positive, env = "QUIRE_MAX_CONNECTIONS")]
    pub max_connections: usize,
    /// Maximum number of concurrent streams [default: --max-connections]
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>, env = "QUIRE_MAX_CONCURRENT_STREAMS")]
    pub max_concurrent_streams: Option<usize>,
    /// Maximum size of a request body [default: 16M]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_MAX_BODY_BYTES")]
    pub max_body_bytes: Option<u64>,
    /// Maximum total size of all requests in progress: their bodies, then the data kept until they are answered. Further
    /// requests are answered with 429 [default: 128M]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_MAX_INFLIGHT_BYTES")]
    pub max_inflight_bytes: Option<u64>,
    /// Maximum number of values and names in the JSON of a request, not counting lists of token ids and prompts
    #[arg(long, value_name = "N", default_value_t = 131072, value_parser = values::positive, env = "QUIRE_MAX_JSON_VALUES")]
    pub max_json_values: usize,
    /// Maximum size of one text to tokenize [default: 4M]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_MAX_TEXT_BYTES")]
    pub max_text_bytes: Option<u64>,
    /// Maximum number of tokens in all prompts of a request
    #[arg(long, value_name = "TOKENS", default_value_t = 4194304, value_parser = values::positive, env = "QUIRE_MAX_REQUEST_TOKENS")]
    pub max_request_tokens: usize,
    /// Maximum size of all headers of a request [default: 64K]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_MAX_HEADER_BYTES")]
    pub max_header_bytes: Option<u64>,
    /// Maximum number of headers of a request
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = values::positive, env = "QUIRE_MAX_HEADER_COUNT")]
    pub max_header_count: usize,
    /// Maximum number of prompts per request
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = values::positive, env = "QUIRE_MAX_PROMPTS")]
    pub max_prompts: usize,
    /// Maximum number of sequences per prompt
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = values::positive, env = "QUIRE_MAX_N")]
    pub max_n: usize,
    /// Maximum number of sequences per request: prompts times sequences per prompt
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::positive, env = "QUIRE_MAX_SEQUENCES")]
    pub max_sequences: usize,
    /// Maximum number of alternatives with log-probabilities per token, up to 1000
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = values::whole::<usize>, env = "QUIRE_MAX_LOGPROBS")]
    pub max_logprobs: usize,
    /// Maximum number of log-probabilities in an answer: tokens times alternatives, over all sequences
    #[arg(long, value_name = "N", default_value_t = 1048576, value_parser = values::positive, env = "QUIRE_MAX_LOGPROB_ENTRIES")]
    pub max_logprob_entries: usize,
    /// Maximum number of stop strings
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = values::positive, env = "QUIRE_MAX_STOP")]
    pub max_stop: usize,
    /// Maximum size of a stop string, and of a bad word [default: 1K]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_MAX_STOP_BYTES")]
    pub max_stop_bytes: Option<u64>,
    /// Maximum number of entries in stop_token_ids
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = values::positive, env = "QUIRE_MAX_STOP_TOKEN_IDS")]
    pub max_stop_token_ids: usize,
    /// Maximum number of entries in allowed_token_ids
    #[arg(long, value_name = "N", default_value_t = 65536, value_parser = values::positive, env = "QUIRE_MAX_ALLOWED_TOKEN_IDS")]
    pub max_allowed_token_ids: usize,
    /// Maximum number of entries in bad_words
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = values::positive, env = "QUIRE_MAX_BAD_WORDS")]
    pub max_bad_words: usize,
    /// Maximum number of entries in logit_bias
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = values::positive, env = "QUIRE_MAX_LOGIT_BIAS")]
    pub max_logit_bias: usize,
    /// Maximum size of a schema or grammar, and of all tools [default: 512K]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, env = "QUIRE_MAX_SCHEMA_BYTES")]
    pub max_schema_bytes: Option<u64>,
    /// Maximum number of messages in a conversation, and of items in an input
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::positive, env = "QUIRE_MAX_MESSAGES")]
    pub max_messages: usize,
    /// Maximum number of functions in tools
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = values::positive, env = "QUIRE_MAX_TOOLS")]
    pub max_tools: usize,
    /// Maximum number of waiting requests; further ones are answered with 429
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::whole::<usize>, env = "QUIRE_MAX_QUEUED_REQUESTS")]
    pub max_queued_requests: usize,
    /// Maximum number of steps whose tokens may be unread before the requests of a slow reader are cancelled
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::positive, env = "QUIRE_MAX_UNREAD_EVENTS")]
    pub max_unread_events: usize,
    /// Seconds for receiving the head of a request, after which idle connections are closed too
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = values::seconds, env = "QUIRE_HEADER_TIMEOUT")]
    pub header_timeout: f64,
    /// Seconds for receiving the body of a request; one that stalls for a sixth of them is refused earlier
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = values::seconds, env = "QUIRE_BODY_TIMEOUT")]
    pub body_timeout: f64,
    /// Seconds in which a client reads nothing before its connection is closed
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = values::seconds, env = "QUIRE_SEND_TIMEOUT")]
    pub send_timeout: f64,
    /// Seconds for a whole request [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds, env = "QUIRE_REQUEST_TIMEOUT")]
    pub request_timeout: Option<f64>,
    /// Seconds without a completed step, although there is work, before /health answers 503 and a dump is logged
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = values::seconds, env = "QUIRE_ENGINE_ITERATION_TIMEOUT")]
    pub engine_iteration_timeout: f64,
}

impl LimitArgs {
    pub fn api_keys(&self) -> Result<Vec<String>, CliError> {
        let mut keys = self.api_key.clone();
        if let Some(path) = &self.api_key_file {
            keys.extend(read_keys(path)?);
        }
        Ok(keys)
    }

    pub fn cors(&self) -> Cors {
        Cors {
            origins: self.allowed_origins.clone(),
            methods: self.allowed_methods.clone(),
            headers: self.allowed_headers.clone(),
        }
    }

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
    let problem = |message: String| CliError::File { flag: "--api-key-file", path: path.to_owned(), message };
    let text = std::fs::read_to_string(path).map_err(|error| problem(error.to_string()))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_string).collect();
    // An empty file must not leave a server open that was meant to be protected.
    if keys.is_empty() { Err(problem("found no key, expected one per line".to_string())) } else { Ok(keys) }
}
