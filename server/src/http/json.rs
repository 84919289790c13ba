//! JSON responses. Long lists become text item by item, so that they are never held as JSON of their own.

use std::cell::Cell;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::{Serialize, Serializer};

use super::ApiError;

/// Size of the pieces in which longer responses are sent as the client reads.
const PIECE: usize = 256 << 10;

/// A list that is written once, from an iterator.
pub struct Items<I>(Cell<Option<I>>);

impl<I: IntoIterator<Item: Serialize>> Items<I> {
    /// The items of a list.
    pub fn new(items: I) -> Items<I> {
        Items(Cell::new(Some(items)))
    }
}

impl<I: IntoIterator<Item: Serialize>> Serialize for Items<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.take().into_iter().flatten())
    }
}

/// Appends the JSON of a value whose keys are strings.
pub fn put(text: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    // Writing to a `Vec` cannot fail.
    let _ = serde_json::to_writer(text, value);
}

/// The response whose body is this value.
pub fn response(value: &impl Serialize) -> Response {
    let mut text = Vec::new();
    put(&mut text, value);
    respond(text)
}

/// The response with this JSON text.
pub fn respond(text: Vec<u8>) -> Response {
    respond_with("application/json", text)
}

/// The response with these bytes of a media type.
pub fn respond_with(media_type: &str, bytes: Vec<u8>) -> Response {
    let bytes = Bytes::from(bytes);
    let headers = [(header::CONTENT_TYPE, media_type.to_string()), (header::CONTENT_LENGTH, bytes.len().to_string())];
    if bytes.len() <= PIECE {
        return (headers, bytes).into_response();
    }
    let pieces = (0..bytes.len())
        .step_by(PIECE)
        .map(move |at| Ok::<_, std::convert::Infallible>(bytes.slice(at..bytes.len().min(at + PIECE))));
    (headers, Body::from_stream(stream::iter(pieces))).into_response()
}

/// Runs `work`, on another thread if it is `large`.
pub async fn off_reactor<T: Send + 'static>(
    large: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    if !large {
        return Ok(work());
    }
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ApiError::internal(format!("writing the response failed: {error}")))
}
