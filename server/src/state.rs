//! `GET /quire/state` and `GET /quire/events`: the engine as whoever watches it sees it, once or as a stream.
//!
//! Both give an [`engine::watch::Snapshot`] with the model's name, its context and the version beside it; counts and ids, never a
//! prompt or an answer. They want the API key like the rest of the API. What they cost the engine is said in `engine::watch`;
//! at most [`MAX_WATCHERS`] look at a time. The stream sends a snapshot about five times a second while steps run and one a second
//! while none do; who reads slowly misses those between.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use engine::Watcher;
use engine::watch::Snapshot;
use futures_util::stream;
use serde::Serialize;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::app::{App, MAX_WATCHERS};
use super::error::ApiError;

/// A stream that has had nothing for so long asks, so that rates fall to nothing when work has ended.
const IDLE: Duration = Duration::from_secs(1);

/// One step may take seconds on a slow machine; an engine without a step for longer shows what it showed last.
const PATIENCE: Duration = Duration::from_secs(10);

/// The document of both routes.
#[derive(Serialize)]
struct Document<'a> {
    model: &'a str,
    max_model_len: usize,
    version: &'static str,
    #[serde(flatten)]
    snapshot: &'a Snapshot,
}

impl<'a> Document<'a> {
    fn new(app: &'a App, snapshot: &'a Snapshot) -> Document<'a> {
        Document { model: &app.model, max_model_len: app.context(), version: env!("CARGO_PKG_VERSION"), snapshot }
    }
}

/// The engine now.
pub async fn state(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let (_permit, mut watcher) = watch(&app)?;
    let next = timeout(PATIENCE, watcher.next()).await;
    let snapshot =
        next.ok().flatten().ok_or_else(|| ApiError::unavailable("the engine has ended or makes no progress"))?;
    Ok(([(header::CACHE_CONTROL, "no-store")], Json(Document::new(&app, &snapshot))).into_response())
}

/// The engine from now on, as server-sent events, until the client or the server ends.
pub async fn events(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let (permit, watcher) = watch(&app)?;
    let events = stream::unfold((app, permit, watcher), |(app, permit, mut watcher)| async move {
        let snapshot = loop {
            match timeout(IDLE, watcher.next()).await {
                Ok(next) => break next?,
                // Nobody waits for a watcher when the server stops.
                Err(_) if app.engine.is_draining() => return None,
                Err(_) => watcher.look(),
            }
        };
        let event = Event::default().json_data(Document::new(&app, &snapshot)).ok()?;
        Some((Ok::<_, Infallible>(event), (app, permit, watcher)))
    });
    let mut response = Sse::new(events).into_response();
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

fn watch(app: &App) -> Result<(OwnedSemaphorePermit, Watcher), ApiError> {
    let permit = app.watchers.clone().try_acquire_owned();
    let permit =
        permit.map_err(|_| ApiError::unavailable(format!("{MAX_WATCHERS} clients watch the engine already")))?;
    Ok((permit, app.engine.watch()))
}
