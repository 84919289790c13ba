//! `GET /quire/state` and `GET /quire/events`: the state of the engine, once or as a stream.
//!
//! Both send an [`engine::watch::Snapshot`] with the model's name, its context length, its ranks and adapters, and the
//! version: counts, ids and names, never text. They require the API key. `engine::watch` states their cost; at most [`MAX_WATCHERS`] clients are served
//! at a time. The stream sends a snapshot about five times a second while steps run and once a second otherwise; a slow
//! reader misses snapshots.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use engine::watch::Snapshot;
use engine::{AdapterInfo, Watcher};
use futures_util::stream::unfold;
use serde::Serialize;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use crate::app::{App, MAX_WATCHERS};
use crate::http::json::put;
use crate::http::{ApiError, sse};
use crate::metrics::StoredStats;

/// After this time without a step a stream requests a snapshot, so that rates fall to zero.
const IDLE: Duration = Duration::from_secs(1);

/// Time limit for a snapshot: a step may take seconds on a slow machine.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(10);

/// Greatest number of adapters in a response. The others are counted.
const MAX_ADAPTERS: usize = 64;

/// The response of both routes.
#[derive(Serialize)]
struct Document<'a> {
    model: &'a str,
    max_model_len: usize,
    version: &'static str,
    ranks: Ranks,
    adapters: Vec<Adapter>,
    adapters_left_out: usize,
    stored: Summary,
    #[serde(flatten)]
    snapshot: &'a Snapshot,
}

/// The ranks that compute the model together.
#[derive(Serialize)]
struct Ranks {
    tensor_parallel: usize,
    pipeline_parallel: usize,
}

/// A LoRA adapter, and its requests.
#[derive(Serialize)]
struct Adapter {
    name: String,
    rank: usize,
    bytes: usize,
    running: usize,
    waiting: usize,
}

impl Adapter {
    fn new(app: &App, info: AdapterInfo) -> Adapter {
        let AdapterInfo { name, rank, bytes, .. } = info;
        let [running, waiting] = app.metrics.requests_of_adapter(&name);
        Adapter { name, rank, bytes, running, waiting }
    }
}

/// What is stored, and the work whose results will be.
#[derive(Serialize)]
struct Summary {
    records: u64,
    bytes: u64,
    running: u64,
    resumed: u64,
    left: u64,
}

impl<'a> Document<'a> {
    fn new(app: &'a App, snapshot: &'a Snapshot) -> Document<'a> {
        let summary = |stats: StoredStats| Summary {
            records: stats.store.records.iter().sum(),
            bytes: stats.store.bytes + stats.store.reserved,
            running: stats.running,
            resumed: stats.resumed,
            left: stats.left,
        };
        let (info, all) = (app.engine.info(), app.engine.adapters());
        let adapters_left_out = all.len().saturating_sub(MAX_ADAPTERS);
        Document {
            model: &app.model,
            max_model_len: app.context(),
            version: env!("CARGO_PKG_VERSION"),
            ranks: Ranks { tensor_parallel: info.tensor_parallel_size, pipeline_parallel: info.pipeline_parallel_size },
            adapters: all.into_iter().take(MAX_ADAPTERS).map(|info| Adapter::new(app, info)).collect(),
            adapters_left_out,
            stored: summary(app.stored_so_far().map(|stored| stored.stats()).unwrap_or_default()),
            snapshot,
        }
    }
}

/// `GET /quire/state`.
pub async fn state(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let (_permit, mut watcher) = watch(&app)?;
    let next = timeout(SNAPSHOT_TIMEOUT, watcher.next()).await;
    let snapshot = next
        .ok()
        .flatten()
        .ok_or_else(|| ApiError::unavailable("the engine has stopped or makes no progress; see /health"))?;
    Ok(([(header::CACHE_CONTROL, "no-store")], Json(Document::new(&app, &snapshot))).into_response())
}

/// `GET /quire/events`: streams until the client disconnects or the server stops.
pub async fn events(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let (permit, watcher) = watch(&app)?;
    let events = unfold((app, permit, watcher), |(app, permit, mut watcher)| async move {
        let snapshot = loop {
            match timeout(IDLE, watcher.next()).await {
                Ok(next) => break next?,
                // A shutdown does not wait for watchers.
                Err(_) if app.engine.is_draining() => return None,
                Err(_) => watcher.look(),
            }
        };
        let mut lines = Vec::new();
        sse::event(&mut lines, None, |text| put(text, &Document::new(&app, &snapshot)));
        Some((lines, (app, permit, watcher)))
    });
    Ok(sse::respond(Box::pin(events)))
}

fn watch(app: &App) -> Result<(OwnedSemaphorePermit, Watcher), ApiError> {
    let permit = app.watchers.clone().try_acquire_owned();
    let permit = permit.map_err(|_| {
        ApiError::unavailable(format!("{MAX_WATCHERS} clients watch the engine, the limit; try again later"))
    })?;
    Ok((permit, app.engine.watch()))
}
