//! Settings of a server: its name, who may use it, and the limits of requests. They are declared once: as fields, and as flags of
//! `quire serve`, whose help and page (`docs/configuration.md`) are the comments of the fields.

mod state;
pub mod values;

use std::time::Duration;

use clap::{Args, Parser};
use engine::Pooling;
use serde_json::{Map, Value};
use text::{ReasoningFormat, ToolFormat};

pub use state::StateOptions;
pub(crate) use values::Host;

/// Heading in the help of the flags that say who may use a server, and how much.
pub const ACCESS_AND_LIMITS: &str = "Access and limits";

/// Settings of a server. `Default` has the defaults of the flags.
#[derive(Args, Clone, Debug, Default)]
pub struct ServerOptions {
    /// Name of the model in the API; several can follow, of which answers and metrics have the first [default: the name of its
    /// folder]
    ///
    /// Put MODEL before the flag. Requests may use each name, and `/v1/models` lists all.
    #[arg(long = "served-model-name", value_name = "NAME", num_args = 1.., value_parser = values::filled)]
    pub served_model_names: Vec<String>,
    /// Owner of the models in /v1/models, by which some routers tell engines apart [default: quire]
    ///
    /// [Routers](routers.md) that do so need `vllm`.
    #[arg(long, value_name = "NAME", value_parser = values::filled)]
    pub owned_by: Option<String>,
    /// Prefix under which a proxy offers the routes, such as /llm; they are served with and without it [default: none]
    ///
    /// `/openapi.json` states it as the server's address.
    #[arg(long, value_name = "PATH", value_parser = values::prefix)]
    pub root_path: Option<String>,
    /// Variables of the chat template for requests that do not set them in chat_template_kwargs, as a JSON object such as
    /// {"enable_thinking": false} [default: none]
    #[arg(long, value_name = "JSON", value_parser = values::object)]
    pub default_chat_template_kwargs: Option<Map<String, Value>>,
    /// Leave the tools of a chat out of its prompt if tool_choice is none
    #[arg(long)]
    pub exclude_tools_when_tool_choice_none: bool,
    /// Send the usage at the end of every stream, whether the request asks for it or not
    #[arg(long)]
    pub enable_force_include_usage: bool,
    /// Where the model was loaded from, for `/v1/models`.
    #[arg(skip)]
    pub root: String,
    /// Accepted API keys. All routes except `/health`, `/ping`, `/version` and `/metrics` require one; empty: none do.
    #[arg(skip)]
    pub api_keys: Vec<String>,
    /// Origins whose pages may use the server.
    #[command(flatten)]
    pub cors: Cors,
    /// Host name that requests may use in addition to localhost and, on another address, IP addresses and names without a
    /// dot; * means any; can be given several times [default: any with API keys, otherwise none]
    ///
    /// The port is ignored. See [requests of other sites](#requests-from-web-pages-of-other-sites).
    #[arg(long, value_name = "NAME", value_parser = values::host, help_heading = ACCESS_AND_LIMITS)]
    pub allowed_hosts: Vec<String>,
    /// Limits of requests.
    #[command(flatten)]
    pub limits: Limits,
    /// Where responses, files and batches are kept.
    #[command(flatten)]
    pub state: StateOptions,
    /// Number of characters of each prompt to log; `None` logs none.
    #[arg(skip)]
    pub log_prompts: Option<usize>,
    /// Format of the model's tool calls, by vLLM's name of its parser [default: that of its chat template]
    ///
    /// The names are in [a table](api.md#request-fields).
    #[arg(long, value_name = "FORMAT")]
    pub tool_call_parser: Option<ToolFormat>,
    /// Format of the model's reasoning: none, or vLLM's name of its parser [default: that of its chat template]
    ///
    /// `none` leaves the reasoning in the text. The names are in [a table](api.md#request-fields).
    #[arg(long, value_name = "NAME")]
    pub reasoning_parser: Option<ReasoningFormat>,
    /// Render a request with the chat template that it has in `chat_template`
    ///
    /// Such templates run under the limits of all templates. Without the flag these requests are refused.
    #[arg(long, env = "QUIRE_TRUST_REQUEST_CHAT_TEMPLATE")]
    pub trust_request_chat_template: bool,
    /// Let clients load and unload adapters from folders of this machine [default: true on a loopback address]
    ///
    /// Elsewhere the default is false. See [loading while the server runs](lora.md#loading-while-the-server-runs).
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = clap::builder::BoolishValueParser::new(), env = "VLLM_ALLOW_RUNTIME_LORA_UPDATING")]
    pub allow_runtime_lora_updating: Option<bool>,
    /// Let clients reset the prefix cache, put the engine to sleep, end requests of others and read how it is set up [default: true on
    /// a loopback address]
    ///
    /// Elsewhere the default is false. [`POST /reset_prefix_cache`](api.md#routes) makes the next requests of all clients slower, and a
    /// server that [sleeps](api.md#sleep) answers none.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_parser = clap::builder::BoolishValueParser::new(), env = "VLLM_SERVER_DEV_MODE")]
    pub server_dev_mode: Option<bool>,
    /// Pooling of hidden states for embeddings: last, mean or cls [default: that of the checkpoint, otherwise last, of an encoder cls]
    ///
    /// `last` takes the state of the last token after the final norm, `cls` that of the first, `mean` the mean of all. A
    /// checkpoint states its type in `1_Pooling/config.json`.
    #[arg(long, value_name = "TYPE")]
    pub pooling_type: Option<Pooling>,
}

/// Cross-origin resource sharing: which origins' pages may use the server from a browser.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = ACCESS_AND_LIMITS)]
pub struct Cors {
    /// Origin whose web pages may use the server, or *; can be given several times [default: none]
    ///
    /// As browsers send it: `https://example.org`. See [requests of other sites](#requests-from-web-pages-of-other-sites).
    #[arg(long = "allowed-origins", value_name = "ORIGIN", value_parser = values::header)]
    pub origins: Vec<String>,
    /// Method that these pages may use; can be given several times [default: GET and POST]
    #[arg(long = "allowed-methods", value_name = "METHOD", value_parser = values::header)]
    pub methods: Vec<String>,
    /// Header that these pages may send; can be given several times [default: those that a page asks for]
    #[arg(long = "allowed-headers", value_name = "NAME", value_parser = values::header)]
    pub headers: Vec<String>,
    /// Let these pages send cookies and other credentials of the browser
    ///
    /// No route reads them; a proxy in front may.
    #[arg(long = "allow-credentials")]
    pub credentials: bool,
}

impl Cors {
    /// Whether an origin is allowed.
    pub(crate) fn allows(&self, origin: &str) -> bool {
        self.origins.iter().any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(origin))
    }
}

/// Limits of a server. `Default` has the defaults of the flags.
#[derive(Clone, Debug, Parser, PartialEq)]
#[command(no_binary_name = true, next_help_heading = ACCESS_AND_LIMITS)]
pub struct Limits {
    /// Maximum number of open connections
    ///
    /// At the limit the connection that has waited longest for a complete request gives way to a new one. If all are being
    /// answered, up to 64 at a time get an error answer; others are closed without one. The system's limit of open files should
    /// be higher (`ulimit -n`).
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::positive)]
    pub max_connections: usize,
    /// Maximum number of concurrent streams [default: --max-connections]
    #[arg(long, value_name = "N", value_parser = values::whole)]
    pub max_concurrent_streams: Option<usize>,
    /// Maximum size of a request body
    ///
    /// A prompt of a million tokens has about 4 MB.
    #[arg(long, value_name = "BYTES", default_value = "16M", value_parser = values::bytes::<usize>)]
    pub max_body_bytes: usize,
    /// Maximum size of an upload to /v1/files
    ///
    /// It is stored in pieces and never in memory as a whole. All files together are bounded by --state-max-bytes.
    #[arg(long, value_name = "BYTES", default_value = "200M", value_parser = values::bytes::<usize>)]
    pub max_file_bytes: usize,
    /// Maximum total size of all requests in progress: their bodies, then the data kept until they are answered. Further
    /// requests are answered with 429
    ///
    /// The data are prompts, log-probabilities and finished sequences. Parts of up to 64 KiB may use all of it, those of up
    /// to 1 MiB seven eighths, larger ones six eighths, and bodies of more than 64 KiB half while they are incomplete. A
    /// request that never fits is answered 400, or 413 for its body.
    #[arg(long, value_name = "BYTES", default_value = "128M", value_parser = values::bytes::<usize>)]
    pub max_inflight_bytes: usize,
    /// Maximum number of values and names in the JSON of a request, not counting lists of token ids and prompts
    ///
    /// Fields that are not read do not count either.
    #[arg(long, value_name = "N", default_value_t = 131072, value_parser = values::positive)]
    pub max_json_values: usize,
    /// Maximum size of one text to tokenize
    ///
    /// A sixteenth of that for a stretch that the tokenizer cannot cut ([texts](models.md#texts)).
    #[arg(long, value_name = "BYTES", default_value = "4M", value_parser = values::bytes::<usize>)]
    pub max_text_bytes: usize,
    /// Maximum number of tokens in all prompts of a request
    #[arg(long, value_name = "TOKENS", default_value_t = 4194304, value_parser = values::positive)]
    pub max_request_tokens: usize,
    /// Maximum size of all headers of a request
    ///
    /// The request target plus all header names and values (414 if the target alone is longer). Up to four times as many
    /// bytes of the head are read.
    #[arg(long, value_name = "BYTES", default_value = "64K", value_parser = values::bytes::<usize>)]
    pub max_header_bytes: usize,
    /// Maximum number of headers of a request
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = values::positive)]
    pub max_header_count: usize,
    /// Maximum number of prompts per request
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = values::positive)]
    pub max_prompts: usize,
    /// Maximum number of sequences per prompt
    ///
    /// This includes `best_of` candidates and beams. Sequences beyond --max-num-seqs wait until others have ended. A beam search that
    /// is as wide is refused.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = values::positive)]
    pub max_n: usize,
    /// Maximum number of sequences per request: prompts times sequences per prompt
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::positive)]
    pub max_sequences: usize,
    /// Maximum number of alternatives with log-probabilities per token; -1 allows all of the vocabulary
    ///
    /// A request asks for all of them with -1. More than 1000 are limited by --max-logprob-entries in a stream too.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = values::alternatives)]
    pub max_logprobs: usize,
    /// Maximum number of log-probabilities in an answer: tokens times alternatives, over all sequences
    ///
    /// The token itself counts as one more alternative. Each entry counts towards --max-inflight-bytes with what the
    /// longest tokens of the vocabulary take as JSON. A plain stream of generated tokens is not limited.
    #[arg(long, value_name = "N", default_value_t = 1048576, value_parser = values::positive)]
    pub max_logprob_entries: usize,
    /// Maximum number of stop strings
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = values::positive)]
    pub max_stop: usize,
    /// Maximum size of a stop string, and of a bad word
    #[arg(long, value_name = "BYTES", default_value = "1K", value_parser = values::bytes::<usize>)]
    pub max_stop_bytes: usize,
    /// Maximum number of entries in stop_token_ids
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = values::positive)]
    pub max_stop_token_ids: usize,
    /// Maximum number of entries in allowed_token_ids
    #[arg(long, value_name = "N", default_value_t = 65536, value_parser = values::positive)]
    pub max_allowed_token_ids: usize,
    /// Maximum number of entries in bad_words
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = values::positive)]
    pub max_bad_words: usize,
    /// Maximum number of entries in logit_bias
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = values::positive)]
    pub max_logit_bias: usize,
    /// Maximum size of a schema or grammar, and of all tools
    ///
    /// In bytes as sent. It holds for regular expressions and lists of choices too.
    #[arg(long, value_name = "BYTES", default_value = "512K", value_parser = values::bytes::<usize>)]
    pub max_schema_bytes: usize,
    /// Maximum number of messages in a conversation, and of items in an input
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::positive)]
    pub max_messages: usize,
    /// Maximum number of functions in tools
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = values::positive)]
    pub max_tools: usize,
    /// Seconds for receiving the head of a request, after which idle connections are closed too
    ///
    /// The time counts from when the connection is ready for a request.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = values::seconds)]
    pub header_timeout: Duration,
    /// Seconds for receiving the body of a request; one that stalls for a sixth of them is refused earlier
    ///
    /// A body stalls if it brings less than 4 KiB in each of ten successive sixtieths of this time. If another body waits
    /// for its memory, one is refused that is too slow in one of them to arrive in time.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = values::seconds)]
    pub body_timeout: Duration,
    /// Seconds in which a client reads nothing before its connection is closed
    ///
    /// Its requests are cancelled.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = values::seconds)]
    pub send_timeout: Duration,
    /// Seconds for a whole request [default: no limit]
    ///
    /// The time is from the arrival of the body to the end of the answer. A stream that exceeds it ends with an error
    /// event.
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds)]
    pub request_timeout: Option<Duration>,
    /// Seconds without a completed step, although there is work, before /health answers 503 and a dump is logged
    ///
    /// With several ranks also without a sign of life of all of them. The dump has queues, pool and plan.
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = values::seconds)]
    pub engine_iteration_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits::parse_from([""; 0])
    }
}
