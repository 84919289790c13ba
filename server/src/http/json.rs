//! JSON with parts that are already text: long lists are written once and shared by everything that repeats them.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::ApiError;

/// Size of the pieces in which longer responses are sent as the client reads.
const PIECE: usize = 256 << 10;

/// A JSON value.
#[derive(Clone, Debug)]
pub enum Json {
    /// A tree.
    Value(Value),
    /// JSON text.
    Text(Arc<RawValue>),
    /// An object.
    Object(Vec<(String, Json)>),
    /// A list.
    List(Vec<Json>),
}

impl Json {
    /// JSON text, which must be valid.
    pub fn text(text: String) -> Json {
        match RawValue::from_string(text) {
            Ok(raw) => Json::Text(Arc::from(raw)),
            Err(error) => {
                debug_assert!(false, "{error}");
                Json::Value(Value::Null)
            }
        }
    }

    /// JSON text of a list.
    pub fn list<T: Serialize>(items: impl Iterator<Item = T>) -> Json {
        let mut text = Vec::new();
        // Writing to a `Vec` cannot fail.
        let _ = serde_json::Serializer::new(&mut text).collect_seq(items);
        Json::text(String::from_utf8(text).unwrap_or_default())
    }

    /// Sets or replaces a field of an object.
    pub fn set(&mut self, name: &str, value: impl Into<Json>) {
        if let Json::Object(fields) = self {
            let value = value.into();
            match fields.iter_mut().find(|(found, _)| found == name) {
                Some((_, old)) => *old = value,
                None => fields.push((name.to_string(), value)),
            }
        }
    }

    /// The JSON text.
    pub fn write(&self) -> String {
        // Cannot fail: every key is a string.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The response with this body.
    pub fn into_response(self) -> Response {
        respond(self.write().into_bytes())
    }
}

/// Appends the JSON of a value whose keys are strings.
pub fn put(text: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    // Writing to a `Vec` cannot fail.
    let _ = serde_json::to_writer(text, value);
}

/// The response with this JSON text.
pub fn respond(text: Vec<u8>) -> Response {
    let text = Bytes::from(text);
    let headers =
        [(header::CONTENT_TYPE, "application/json".to_string()), (header::CONTENT_LENGTH, text.len().to_string())];
    if text.len() <= PIECE {
        return (headers, text).into_response();
    }
    let pieces = (0..text.len())
        .step_by(PIECE)
        .map(move |at| Ok::<_, std::convert::Infallible>(text.slice(at..text.len().min(at + PIECE))));
    (headers, Body::from_stream(stream::iter(pieces))).into_response()
}

impl From<Value> for Json {
    fn from(value: Value) -> Json {
        match value {
            Value::Object(fields) => {
                Json::Object(fields.into_iter().map(|(name, value)| (name, value.into())).collect())
            }
            value => Json::Value(value),
        }
    }
}

impl From<Vec<Json>> for Json {
    fn from(items: Vec<Json>) -> Json {
        Json::List(items)
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Json::Value(value) => value.serialize(serializer),
            Json::Text(text) => text.serialize(serializer),
            Json::List(items) => serializer.collect_seq(items),
            Json::Object(fields) => {
                let mut map = serializer.serialize_map(Some(fields.len()))?;
                fields.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))?;
                map.end()
            }
        }
    }
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
