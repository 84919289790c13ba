//! What every handler sees: the engine, the names it is served under, and the numbers kept for `/metrics`.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use engine::{AsyncEngine, Tokenizer};

use super::error::ApiError;
use super::fields::Fields;
use super::metrics::Metrics;

/// Inputs up to this many bytes are tokenised where they arrive (well under a millisecond); larger ones go to the
/// blocking pool, so that they hold no other request up.
const INLINE_BYTES: usize = 16 << 10;

/// How a server presents itself.
#[derive(Clone, Debug, Default)]
pub struct ServerOptions {
    /// `model` in requests and answers; `None` takes the model's own name.
    pub served_model_name: Option<String>,
    /// Where the model came from, told in `/v1/models`.
    pub root: String,
    /// Asked of every request except `/health`, `/version` and `/metrics`.
    pub api_key: Option<String>,
}

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
    /// The key that clients must send, if any.
    pub(super) api_key: Option<String>,
    /// Unix seconds of the start.
    pub(super) created: u64,
    ids: AtomicU64,
    id_base: u64,
}

impl App {
    /// State around a running engine.
    pub fn new(engine: AsyncEngine, options: ServerOptions) -> App {
        let model = options.served_model_name.unwrap_or_else(|| engine.info().name.clone());
        App {
            engine,
            metrics: Metrics::new(&model),
            model,
            root: options.root,
            api_key: options.api_key,
            created: unix_seconds(),
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
    pub(super) fn check_model(&self, fields: &Fields) -> Result<(), ApiError> {
        match fields.str("model")? {
            Some(name) if name != self.model => Err(ApiError::unknown_model(name, &self.model)),
            _ => Ok(()),
        }
    }
}

/// Runs `work`, on the blocking pool if its input of `bytes` bytes is large.
pub async fn off_thread<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if bytes <= INLINE_BYTES {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(ApiError::internal(format!("preparing the prompt failed: {error}"))),
    }
}

/// Now, in whole seconds.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
