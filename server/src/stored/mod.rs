//! What the server keeps: responses, conversations, files and batches, in a folder or in memory.
//!
//! | file | what it owns |
//! |---|---|
//! | `live` | work that runs now, which can be watched, cancelled and stopped |
//! | `query` | parameters of a URL, and pages of a list |
//!
//! Whose a record is follows from the API key of its request. What belongs to another key does not exist: its id is answered like one
//! that was never given out. Ids tell their time, so that a missing one can be explained without a trace of what was removed.

mod live;
mod query;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use sha2::{Digest, Sha256};
use store::{Change, Kind, OWNER_BYTES, Record, Store, StoreError, created_at};

use crate::http::call::StoredWork;
use crate::http::{ApiError, Client, excerpt};
use crate::metrics::StoredStats;
use crate::settings::StateOptions;
pub use live::{Ended, Latest, Live, Running};
pub use query::{Query, page_json};

/// Name of who owns something.
pub type Owner = [u8; OWNER_BYTES];

/// The store, and the work whose results it will have.
pub struct Stored {
    store: Store,
    /// Whether it outlives the process.
    pub is_durable: bool,
    running: Running,
    began: Instant,
}

impl Stored {
    /// Keeps everything in this store.
    pub fn new(store: Store, is_durable: bool) -> Stored {
        Stored { store, is_durable, running: Running::default(), began: Instant::now() }
    }

    /// Keeps everything until the process ends.
    pub fn in_memory(options: &StateOptions) -> Result<Stored, ApiError> {
        Ok(Stored::new(Store::in_memory(options.limits()).map_err(refused)?, false))
    }

    /// The work that runs.
    pub fn running(&self) -> &Running {
        &self.running
    }

    /// What is stored and runs, for metrics.
    pub fn stats(&self) -> StoredStats {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Running { resumed, left, .. } = &self.running;
        let running = self.running.len() as u64;
        StoredStats { store: self.store.stats(), running, resumed: count(resumed), left: count(left) }
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Who owns what a client stores.
    pub fn owner(&self, client: &Client) -> Owner {
        match client {
            Client::Owner(owner) => *owner,
            // One owner for all, who is none of those with keys.
            Client::Key(None) => [0; OWNER_BYTES],
            Client::Key(Some(key)) => {
                Sha256::new().chain_update(self.store.secret()).chain_update(&**key).finalize().into()
            }
        }
    }

    /// Returns a new id.
    pub fn fresh_id(&self, prefix: &str) -> Result<String, ApiError> {
        store::fresh_id(prefix, self.store.now()).map_err(refused)
    }

    /// The next of the instants that are `period` apart, at which work that may wait is written together.
    pub fn next_tick(&self, period: Duration) -> Instant {
        let passed = self.began.elapsed().as_nanos() / period.as_nanos().max(1);
        self.began + period * u32::try_from(passed + 1).unwrap_or(u32::MAX)
    }

    /// Makes changes, all or none. They are on the disk when this returns.
    pub async fn apply(&self, changes: Vec<Change>) -> Result<(), ApiError> {
        self.store.apply(changes).await.map_err(refused)
    }

    /// Reads from the store, on a thread that may wait for the disk.
    pub async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let store = self.store.clone();
        let done = tokio::task::spawn_blocking(move || read(&store)).await;
        done.map_err(|error| ApiError::internal(format!("reading the store failed: {error}")))?.map_err(refused)
    }

    /// The record of an owner, on a thread that may wait.
    pub fn find(&self, kind: Kind, id: &str, owner: &Owner) -> Result<Record, ApiError> {
        let found = self.store.get(id).map_err(refused)?.filter(|record| record.is_of(kind, owner));
        found.ok_or_else(|| self.missing(id, kind))
    }

    /// 404 for an id that this owner has not. What it says follows from the id alone.
    pub fn missing(&self, id: &str, kind: Kind) -> ApiError {
        let what = kind.name();
        let ttl = self.store.limits().ttl.as_secs();
        let why = match created_at(id) {
            Some(created) if created.saturating_add(ttl) <= self.store.now() => {
                format!("it has expired: a {what} is kept for {ttl} s (--state-ttl)")
            }
            Some(created) if self.store.was_evicted(created) => {
                "expected a newer one: those of its time were dropped to make room (--state-max-bytes)".to_string()
            }
            _ => "expected an id that this server returned, to a request with the same API key".to_string(),
        };
        let message = format!("No {what} found with id {}: {why}", excerpt(&id.into()));
        ApiError::new(StatusCode::NOT_FOUND, message).with_param("id")
    }
}

/// What stored work with this id draws.
pub fn work_of(id: &str, yields: bool) -> StoredWork {
    let digest: [u8; 32] = Sha256::new().chain_update("seed").chain_update(id).finalize().into();
    let seed = digest.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    StoredWork { seed, yields }
}

/// The error of an API for one of the store.
pub fn refused(error: StoreError) -> ApiError {
    match error {
        StoreError::Full { .. } => {
            ApiError::bad_request(format!("the store is full: {error}, or raise --state-max-bytes"))
        }
        StoreError::Missing(_) | StoreError::Ended(_) | StoreError::Exists(_) => {
            ApiError::new(StatusCode::CONFLICT, format!("{error}: another request has changed it"))
        }
        other => {
            tracing::error!("the store refuses: {other}");
            ApiError::unavailable(format!("what this request needs cannot be stored: {other}"))
        }
    }
}

/// Whether work that failed with this error can be tried again.
pub fn is_passing(error: &ApiError) -> bool {
    matches!(error.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
}

/// Removes what is over its time, as long as there is any.
pub async fn sweep(stored: &Stored) {
    loop {
        match stored.store.sweep().await {
            Ok(true) => {}
            Ok(false) | Err(StoreError::Closed) => return,
            Err(error) => return tracing::error!("the store cannot remove what has expired: {error}"),
        }
    }
}
