//! State shared by all handlers: the engine, the server's settings and its metrics.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use engine::{AdapterInfo, AsyncEngine, Pooling};
use serde_json::Value;
use text::{ReasoningFormat, Tokenizer, ToolFormat};
use tokio::sync::Semaphore;

use super::budget::Budget;
use super::connection::Activity;
use super::cost::{Entries, Format, Sizes};
use super::error::ApiError;
use super::fields::Fields;
use super::lanes::Lanes;
use super::metrics::Metrics;
use super::settings::ServerOptions;

/// Maximum number of clients of `/quire/state` and `/quire/events` at a time.
pub const MAX_WATCHERS: usize = 32;

/// State shared by all handlers.
pub struct App {
    pub(super) engine: AsyncEngine,
    pub(super) options: ServerOptions,
    pub(super) metrics: Metrics,
    /// Name of the model in responses.
    pub(super) model: String,
    /// Further names of the model in requests.
    pub(super) aliases: Vec<String>,
    /// Permits for streaming responses, if they are limited.
    pub(super) streams: Option<Arc<Semaphore>>,
    pub(super) tool_format: ToolFormat,
    pub(super) reasoning: ReasoningFormat,
    /// Pooling of embeddings; `None` if the checkpoint requires an unsupported one.
    pub(super) pooling: Option<Pooling>,
    /// Unix time of the start, in seconds.
    pub(super) created: u64,
    /// Responses that a shutdown waits for.
    pub(super) activity: Activity,
    pub(super) lanes: Lanes,
    pub(super) budget: Budget,
    /// Made on first use, or soon after the start.
    logprob_sizes: OnceLock<Sizes>,
    /// The OpenAPI document, made on first use.
    pub(super) openapi: OnceLock<Value>,
    /// Permits for [`MAX_WATCHERS`] clients.
    pub(super) watchers: Arc<Semaphore>,
    ids: AtomicU64,
    id_base: u64,
}

impl App {
    /// State of a server for a running engine.
    pub fn new(engine: AsyncEngine, options: ServerOptions) -> App {
        let info = engine.info();
        let template = engine.chat_template().map(AsRef::as_ref);
        let mut names = options.served_model_names.iter().cloned();
        let model = names.next().unwrap_or_else(|| info.name.clone());
        let mut aliases: Vec<String> = Vec::new();
        for name in names {
            if name != model && !aliases.contains(&name) {
                aliases.push(name);
            }
        }
        let limits = &options.limits;
        App {
            metrics: Metrics::new(&model, info),
            model,
            aliases,
            streams: limits.max_concurrent_streams.map(|most| Arc::new(Semaphore::new(most))),
            tool_format: options.tool_call_parser.unwrap_or_else(|| ToolFormat::of(template)),
            reasoning: options.reasoning_parser.unwrap_or_else(|| ReasoningFormat::of(template)),
            pooling: options.pooling_type.or(info.pooling),
            created: unix_seconds(),
            activity: Activity::default(),
            lanes: Lanes::default(),
            budget: Budget::new(limits.max_inflight_bytes, limits.max_body_bytes),
            logprob_sizes: OnceLock::new(),
            openapi: OnceLock::new(),
            watchers: Arc::new(Semaphore::new(MAX_WATCHERS)),
            ids: AtomicU64::new(0),
            // Ids should differ between runs of a server; `RandomState` is the standard library's source of entropy.
            id_base: RandomState::new().build_hasher().finish(),
            engine,
            options,
        }
    }

    /// How chats are written and read, in one line.
    pub fn formats(&self) -> String {
        let name = |names: &[&'static str]| names.first().copied().unwrap_or_default();
        let template = match self.engine.chat_template() {
            Some(template) if template.problem().is_none() => "that of the checkpoint",
            _ => "none",
        };
        let (tools, reasoning) = (name(self.tool_format.names()), name(self.reasoning.names()));
        format!("chat template: {template}; tool calls: {tools}; reasoning: {reasoning}")
    }

    /// Returns a unique id for a response or a call.
    pub(super) fn fresh_id(&self, prefix: &str) -> String {
        format!("{prefix}-{:016x}{:08x}", self.id_base, self.ids.fetch_add(1, Ordering::Relaxed))
    }

    /// Tokenizer of the model.
    pub(super) fn tokenizer(&self) -> &Tokenizer {
        self.engine.tokenizer()
    }

    /// Log probabilities of a token with `asked` alternatives, for the cost of a request.
    pub(super) fn logprob_entries(&self, asked: Option<usize>, format: Format) -> Entries {
        let Some(alternatives) = asked else { return Entries::default() };
        self.logprob_sizes().entries(alternatives, format)
    }

    /// Sizes of log probabilities, which take a while to compute for a large vocabulary.
    pub(super) fn logprob_sizes(&self) -> &Sizes {
        let most = self.options.limits.max_logprobs;
        self.logprob_sizes.get_or_init(|| Sizes::new(self.tokenizer(), self.vocab(), most))
    }

    /// Maximum context length, prompt plus output, in tokens.
    pub(super) fn context(&self) -> usize {
        self.engine.info().max_model_len
    }

    /// Vocabulary size: token ids are below it.
    pub(super) fn vocab(&self) -> usize {
        self.engine.info().vocab_size
    }

    /// Whether this is a name of the model itself.
    pub(super) fn is_model(&self, name: &str) -> bool {
        self.model == name || self.aliases.iter().any(|alias| alias == name)
    }

    /// Reads the field `model`, which is optional: the LoRA adapter that it names, or `None` for the model as it is.
    pub(super) fn choose_model(&self, fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
        let description = "Name of the served model or of a LoRA adapter; may be omitted.";
        match fields.str("model", usize::MAX, description)?.filter(|name| !self.is_model(name)) {
            Some(name) if self.adapter(name).is_none() => Err(ApiError::unknown_model(name, &self.model)),
            other => Ok(other.map(str::to_string)),
        }
    }

    /// The LoRA adapter of this name that takes requests.
    pub(super) fn adapter(&self, name: &str) -> Option<AdapterInfo> {
        self.engine.adapters().into_iter().find(|adapter| adapter.name == name && !adapter.is_unloading)
    }
}

/// Current Unix time in seconds.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
