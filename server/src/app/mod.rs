//! State shared by all handlers: the engine, the server's settings and its metrics.

mod logprob_sizes;
mod running;

use std::sync::{Arc, OnceLock};

use engine::{AdapterInfo, AsyncEngine, Pooler, Pooling};
use serde_json::Value;
use store::Store;
use text::{ChatTemplate, ReasoningFormat, Tokenizer, ToolFormat};
use tokio::sync::Semaphore;

use crate::http::{ApiError, Budget, ParsePool};
use crate::metrics::Metrics;
use crate::settings::ServerOptions;
use crate::stored::Stored;
pub(crate) use logprob_sizes::{Entries, KEPT_TOKEN, LogprobFormat, Sizes};
pub(crate) use running::{Registered, Running};

/// Maximum number of clients of `/quire/state` and `/quire/events` at a time.
pub const MAX_WATCHERS: usize = 32;

/// State shared by all handlers.
pub struct App {
    pub(crate) engine: AsyncEngine,
    pub(crate) options: Arc<ServerOptions>,
    pub(crate) metrics: Arc<Metrics>,
    /// Name of the model in responses.
    pub(crate) model: String,
    /// Further names of the model in requests.
    pub(crate) aliases: Vec<String>,
    /// Permits for streaming responses, if they are limited.
    pub(crate) streams: Option<Arc<Semaphore>>,
    pub(crate) tool_format: ToolFormat,
    pub(crate) reasoning: ReasoningFormat,
    /// Pooling of embeddings; `None` if the checkpoint requires an unsupported one.
    pub(crate) pooling: Option<Pooling>,
    /// Unix time of the start, in seconds.
    pub(crate) created: u64,
    /// Responses that a shutdown waits for hold clones while they are computed or written.
    pub(crate) activity: Arc<()>,
    pub(crate) parse_pool: ParsePool,
    pub(crate) budget: Budget,
    /// Made on first use, or soon after the start.
    logprob_sizes: OnceLock<Sizes>,
    /// The OpenAPI document, made on first use.
    pub(crate) openapi: OnceLock<Value>,
    /// Permits for [`MAX_WATCHERS`] clients.
    pub(crate) watchers: Arc<Semaphore>,
    /// Without a store that was given, made on first use.
    stored: OnceLock<Arc<Stored>>,
    /// The calls whose requests run.
    pub(crate) running: Arc<Running>,
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
            metrics: Arc::new(Metrics::new(&model, info)),
            model,
            aliases,
            streams: limits.max_concurrent_streams.map(|most| Arc::new(Semaphore::new(most))),
            tool_format: chosen(options.tool_call_parser, template.and_then(ToolFormat::of), ToolFormat::Hermes).0,
            reasoning: chosen(options.reasoning_parser, template.and_then(ReasoningFormat::of), ReasoningFormat::Off).0,
            pooling: options.pooling_type.or(info.pooler.pooling),
            created: store::unix_seconds(),
            activity: Arc::default(),
            parse_pool: ParsePool::default(),
            budget: Budget::new(limits.max_inflight_bytes, limits.max_body_bytes),
            logprob_sizes: OnceLock::new(),
            openapi: OnceLock::new(),
            watchers: Arc::new(Semaphore::new(MAX_WATCHERS)),
            stored: OnceLock::new(),
            running: Arc::default(),
            engine,
            options: Arc::new(options),
        }
    }

    /// Keeps responses, files and batches in this store, over the end of the process.
    pub fn with_store(self, store: Store) -> App {
        App { stored: OnceLock::from(Arc::new(Stored::new(store, true))), ..self }
    }

    /// What the server keeps.
    pub(crate) fn stored(&self) -> Result<&Arc<Stored>, ApiError> {
        if let Some(stored) = self.stored.get() {
            return Ok(stored);
        }
        let made = Arc::new(Stored::in_memory(&self.options.state)?);
        Ok(self.stored.get_or_init(|| made))
    }

    /// What the server keeps, if anything has been kept.
    pub(crate) fn stored_so_far(&self) -> Option<&Arc<Stored>> {
        self.stored.get()
    }

    /// How chats are written and read, and why so, in one line.
    pub fn formats(&self) -> String {
        let name = |names: &[&'static str]| names.first().copied().unwrap_or_default();
        let template = self.engine.chat_template().map(AsRef::as_ref).filter(|template| template.problem().is_none());
        let (tools, why_tools) =
            chosen(self.options.tool_call_parser, template.and_then(ToolFormat::of), ToolFormat::Hermes);
        let (reasoning, why_reasoning) =
            chosen(self.options.reasoning_parser, template.and_then(ReasoningFormat::of), ReasoningFormat::Off);
        let origin = template.map_or("none", ChatTemplate::origin);
        let (tools, reasoning) = (name(tools.names()), name(reasoning.names()));
        format!("chat template: {origin}; tool calls: {tools} ({why_tools}); reasoning: {reasoning} ({why_reasoning})")
    }

    /// All metrics, in Prometheus' text format.
    pub(crate) fn metrics_page(&self) -> String {
        let stored = self.stored_so_far().map(|stored| stored.stats()).unwrap_or_default();
        let progress = (self.engine.step_age(), self.engine.sleeping());
        self.metrics.render(&self.engine.stats(), self.engine.info(), progress, &stored)
    }

    /// Tokenizer of the model.
    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        self.engine.tokenizer()
    }

    /// Log probabilities of a token with `asked` alternatives, for the cost of a request.
    pub(crate) fn logprob_entries(&self, asked: Option<usize>, format: LogprobFormat) -> Entries {
        let Some(alternatives) = asked else { return Entries::default() };
        self.logprob_sizes().entries(alternatives, format)
    }

    /// Sizes of log probabilities, which take a while to compute for a large vocabulary.
    pub(crate) fn logprob_sizes(&self) -> &Sizes {
        let most = self.options.limits.max_logprobs;
        self.logprob_sizes.get_or_init(|| Sizes::new(self.tokenizer(), self.vocab(), most))
    }

    /// Maximum context length, prompt plus output, in tokens.
    pub(crate) fn context(&self) -> usize {
        self.engine.info().max_model_len
    }

    /// Maximum number of tokens of a prompt.
    pub(crate) fn longest_prompt(&self) -> usize {
        self.engine.info().longest_prompt
    }

    /// From hidden states to embeddings or to labels.
    pub(crate) fn pooler(&self) -> &Pooler {
        &self.engine.info().pooler
    }

    /// Vocabulary size: token ids are below it.
    pub(crate) fn vocab(&self) -> usize {
        self.engine.info().vocab_size
    }

    /// Whether this is a name of the model itself.
    pub(crate) fn is_model(&self, name: &str) -> bool {
        self.model == name || self.aliases.iter().any(|alias| alias == name)
    }

    /// The LoRA adapter of this name that takes requests.
    pub(crate) fn adapter(&self, name: &str) -> Option<AdapterInfo> {
        self.engine.adapters().into_iter().find(|adapter| adapter.name == name && !adapter.is_unloading)
    }
}

/// A format, and why it is chosen: it is set, or a text of the template tells it, or nothing does.
fn chosen<F>(set: Option<F>, told: Option<(F, &str)>, usual: F) -> (F, String) {
    match (set, told) {
        (Some(format), _) => (format, "set".to_string()),
        (None, Some((format, text))) => (format, format!("the template has {text}")),
        (None, None) => (usual, "assumed, because no template tells it".to_string()),
    }
}
