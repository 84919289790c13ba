//! What every handler sees: the engine, the names it is served under, and the numbers kept for `/metrics`.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use engine::text::ToolFormat;
use engine::{AsyncEngine, Pooling, Tokenizer};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::connection::Activity;
use super::cost::Budget;
use super::error::ApiError;
use super::fields::Fields;
use super::lanes::Lanes;
use super::metrics::Metrics;
use super::settings::{Cors, Limits, Reasoning, ServerOptions};

/// Clients that watch the engine at once: streams and single looks.
pub const MAX_WATCHERS: usize = 32;

/// State shared by all handlers.
pub struct App {
    /// The engine.
    pub(super) engine: AsyncEngine,
    /// Latencies and outcomes as this layer sees them.
    pub(super) metrics: Metrics,
    /// `model` in requests and answers.
    pub(super) model: String,
    /// Where the model came from.
    pub(super) root: String,
    /// The keys of which clients must send one, if any.
    pub(super) api_keys: Vec<String>,
    /// Which pages of other origins may use the server.
    pub(super) cors: Cors,
    /// Names under which the server takes requests, beside those of loopback.
    pub(super) allowed_hosts: Vec<String>,
    /// What requests may ask for.
    pub(super) limits: Limits,
    /// Log so many characters of each prompt.
    pub(super) log_prompts: Option<usize>,
    /// A permit for each answer that streams, where they are limited.
    pub(super) streams: Option<Arc<Semaphore>>,
    /// How the model writes tool calls.
    pub(super) tool_format: ToolFormat,
    /// How thoughts are split off.
    pub(super) reasoning: Reasoning,
    /// How embeddings are made; `None` where the checkpoint asks for what is not built.
    pub(super) pooling: Option<Pooling>,
    /// Unix seconds of the start.
    pub(super) created: u64,
    /// What a stop waits for beside the engine.
    pub(super) activity: Activity,
    /// Threads for the work on bodies.
    pub(super) lanes: Lanes,
    /// Memory for requests in flight.
    pub(super) budget: Budget,
    /// What `/openapi.json` says, once it was asked for.
    pub(super) openapi: OnceLock<Value>,
    /// A permit for each client that watches the engine.
    pub(super) watchers: Arc<Semaphore>,
    ids: AtomicU64,
    id_base: u64,
}

impl App {
    /// State around a running engine.
    pub fn new(engine: AsyncEngine, options: ServerOptions) -> App {
        let model = options.served_model_name.unwrap_or_else(|| engine.info().name.clone());
        let template = engine.chat_template().map(AsRef::as_ref);
        let tool_format = options.tool_call_parser.unwrap_or_else(|| ToolFormat::of(template));
        let thinks = template.is_some_and(|template| template.mentions("</think>"));
        let default = if thinks { Reasoning::Tags } else { Reasoning::Off };
        let reasoning = options.reasoning_parser.unwrap_or(default);
        let pooling = options.pooling_type.or(engine.info().pooling);
        let budget = Budget::new(options.limits.max_inflight_bytes);
        App {
            metrics: Metrics::new(&model, engine.info()),
            engine,
            model,
            root: options.root,
            api_keys: options.api_keys,
            cors: options.cors,
            allowed_hosts: options.allowed_hosts,
            streams: options.limits.max_concurrent_streams.map(|most| Arc::new(Semaphore::new(most))),
            limits: options.limits,
            log_prompts: options.log_prompts,
            tool_format,
            reasoning,
            pooling,
            created: unix_seconds(),
            activity: Activity::default(),
            lanes: Lanes::default(),
            budget,
            openapi: OnceLock::new(),
            watchers: Arc::new(Semaphore::new(MAX_WATCHERS)),
            ids: AtomicU64::new(0),
            // Ids of two runs of a server should not meet in a client's log; `RandomState` is the entropy std has.
            id_base: RandomState::new().build_hasher().finish(),
        }
    }

    /// An id that no other answer of this process has.
    pub(super) fn fresh_id(&self, prefix: &str) -> String {
        format!("{prefix}-{:016x}{:08x}", self.id_base, self.ids.fetch_add(1, Ordering::Relaxed))
    }

    /// The model's tokenizer.
    pub(super) fn tokenizer(&self) -> &Tokenizer {
        self.engine.tokenizer()
    }

    /// Longest prompt plus output.
    pub(super) fn context(&self) -> usize {
        self.engine.info().max_model_len
    }

    /// Rows of the output projection; token ids are less.
    pub(super) fn vocab(&self) -> usize {
        self.engine.info().vocab_size
    }

    /// The request is for the model that is served; a request that names none means it.
    pub(super) fn check_model(&self, fields: &Fields<'_>) -> Result<(), ApiError> {
        match fields.str("model", usize::MAX, "The served model, which is also meant where none is named.")? {
            Some(name) if name != self.model => Err(ApiError::unknown_model(name, &self.model)),
            _ => Ok(()),
        }
    }
}

/// Now, in whole seconds.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
