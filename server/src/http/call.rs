//! One HTTP call: its id, which comes from the client or is made here and goes back with the answer, and the place that its
//! stream takes.
//!
//! The call is a task-local value, so that what runs on its behalf can name it without every function carrying it.

use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::middleware::Next;
use axum::response::Response;
use futures_util::StreamExt;
use tokio::sync::OwnedSemaphorePermit;

use super::app::App;
use super::error::ApiError;

/// The header of the id, both ways.
const REQUEST_ID: &str = "x-request-id";

/// Longest id that is taken over from a client.
const MAX_ID: usize = 128;

/// The call under way.
pub struct Call {
    id: String,
    place: Mutex<Option<OwnedSemaphorePermit>>,
}

tokio::task_local! {
    static CALL: Arc<Call>;
}

/// The id of the call under way; empty outside of one.
pub fn id() -> String {
    CALL.try_with(|call| call.id.clone()).unwrap_or_default()
}

/// Takes a place among the streams, or answers 429. The place is given back when the body of the answer is dropped.
pub fn take_stream_place(app: &App) -> Result<(), ApiError> {
    let Some(places) = &app.streams else { return Ok(()) };
    let place = places.clone().try_acquire_owned().map_err(|_| {
        app.metrics.rejected("streams");
        ApiError::busy("as many answers stream as may (--max-concurrent-streams): try again later")
    })?;
    // Outside of a call there is no body to wait for.
    let _ = CALL.try_with(|call| *call.place.lock().unwrap_or_else(PoisonError::into_inner) = Some(place));
    Ok(())
}

/// Middleware: names the call, and keeps its place to the end of its body.
pub async fn name(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let sent = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let sent = sent.filter(|id| !id.is_empty() && id.len() <= MAX_ID && id.bytes().all(|byte| byte.is_ascii_graphic()));
    let call = Arc::new(Call { id: sent.map_or_else(|| app.fresh_id("req"), str::to_string), place: Mutex::new(None) });
    let mut response = CALL.scope(call.clone(), next.run(request)).await;
    if let Ok(id) = HeaderValue::from_str(&call.id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    let place = call.place.lock().unwrap_or_else(PoisonError::into_inner).take();
    match place {
        None => response,
        Some(place) => response.map(|body| {
            Body::from_stream(body.into_data_stream().map(move |part| {
                let _ = &place;
                part
            }))
        }),
    }
}
