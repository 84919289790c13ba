//! One HTTP call: its id, which comes from the client or is generated and is sent with the response; and the resources
//! that it holds until the response has been sent: a stream permit and a part of the memory budget. Work that outlives its
//! connection has a call too ([`scope`]).
//!
//! The call is a task-local value, so that code on its behalf can name it without passing it through every function.

use std::collections::BTreeSet;
use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use axum::body::Body;
use axum::extract::Request;
use axum::http::HeaderValue;
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::BodyExt;
use sha2::{Digest, Sha256};
use tokio::sync::OwnedSemaphorePermit;

use super::budget::Reserved;
use super::connection::REQUEST_ID;

/// Header of the W3C trace context.
const TRACE_PARENT: &str = "traceparent";

/// Header that names the keywords of JSON schemas that the answer does not keep to.
const UNENFORCED: &str = "x-quire-unenforced";

/// Maximum length of a client's id, in bytes.
const MAX_ID: usize = 128;

/// The current call.
pub struct Call {
    id: String,
    /// Whether the client chose the id.
    is_sent: bool,
    trace_parent: Option<String>,
    /// The work is done again after a restart: its ids and draws depend on nothing else.
    stored: Option<StoredWork>,
    held: Mutex<Held>,
}

/// What a call takes from a record instead of drawing it.
#[derive(Clone, Copy, Debug)]
pub struct StoredWork {
    /// Seed of what has none.
    pub seed: u64,
    /// It runs below everything else.
    pub yields: bool,
}

/// Resources released when the body of the response is dropped.
#[derive(Default)]
struct Held {
    stream: Option<OwnedSemaphorePermit>,
    memory: Reserved,
    /// `request_id` of the body.
    request_id: Option<String>,
    unenforced: String,
    /// Number of ids that stored work has made.
    ids: u64,
}

tokio::task_local! {
    static CALL: Arc<Call>;
}

/// Returns a unique id. Ids differ between runs of a server: `RandomState` is the standard library's source of entropy. Those of
/// stored work follow from its id.
pub fn fresh_id(prefix: &str) -> String {
    let number = |held: &mut Held| {
        held.ids += 1;
        held.ids
    };
    if stored_work().is_some()
        && let Some(number) = update(number)
    {
        return format!("{prefix}-{}", derived_id(&id(), number));
    }
    static BASE: LazyLock<u64> = LazyLock::new(|| RandomState::new().build_hasher().finish());
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{prefix}-{:016x}{:08x}", *BASE, NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Id of the current call; empty outside of a call.
pub fn id() -> String {
    CALL.try_with(|call| call.id.clone()).unwrap_or_default()
}

/// Id that the client chose for the current call: that of the header or, as in vLLM, `request_id` of the body.
pub fn sent_id() -> Option<String> {
    let sent = CALL.try_with(|call| match call.is_sent {
        true => Some(call.id.clone()),
        false => call.held.lock().unwrap_or_else(PoisonError::into_inner).request_id.clone(),
    });
    sent.unwrap_or_default()
}

/// Sets the `request_id` of the body.
pub fn set_request_id(id: Option<String>) {
    let _ = update(|held| held.request_id = id);
}

/// Whether a client's id may be part of headers and logs.
pub fn is_id(id: &str) -> bool {
    !id.is_empty() && id.len() <= MAX_ID && id.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Trace context `00-TRACE-PARENT-FLAGS` of the current call, if the client sent one.
pub fn trace_parent() -> Option<String> {
    CALL.try_with(|call| call.trace_parent.clone()).unwrap_or_default()
}

/// Whether a text is version 0 of a `traceparent` with non-zero ids.
fn is_trace_parent(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let is_hex = |part: &str, len: usize| {
        part.len() == len && part.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    let is_id = |part: &str, len: usize| is_hex(part, len) && part.bytes().any(|byte| byte != b'0');
    matches!(parts[..], ["00", trace, parent, flags] if is_id(trace, 32) && is_id(parent, 16) && is_hex(flags, 2))
}

/// Holds a permit for a streaming response until the body of the response is dropped.
pub fn hold_stream(permit: OwnedSemaphorePermit) {
    let _ = update(|held| held.stream = Some(permit));
}

/// Holds a part of the memory budget until the body of the response is dropped.
pub fn hold_memory(memory: Reserved) {
    let _ = update(|held| held.memory = memory);
}

/// Names in the response the keywords of JSON schemas that are not enforced.
pub fn name_unenforced(keywords: &BTreeSet<String>) {
    let keywords: Vec<&str> = keywords.iter().map(String::as_str).collect();
    let _ = update(|held| held.unenforced = keywords.join(", "));
}

/// The part behind the prefix of an id that follows from another one and a number. Its end is as random as its beginning.
pub fn derived_id(id: &str, number: u64) -> String {
    let digest = Sha256::new().chain_update(id).chain_update(number.to_le_bytes()).finalize();
    digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect()
}

/// What the current call takes from a record, if it does.
pub fn stored_work() -> Option<StoredWork> {
    CALL.try_with(|call| call.stored).unwrap_or_default()
}

/// Runs work that has no connection as a call of its own, whose resources are held until it ends.
pub async fn scope<T>(id: String, stored: StoredWork, work: impl Future<Output = T>) -> T {
    let call = Call { id, is_sent: true, trace_parent: None, stored: Some(stored), held: Mutex::default() };
    CALL.scope(Arc::new(call), work).await
}

fn update<T>(change: impl FnOnce(&mut Held) -> T) -> Option<T> {
    // Outside of a call there is no body to hold anything for.
    CALL.try_with(|call| change(&mut call.held.lock().unwrap_or_else(PoisonError::into_inner))).ok()
}

/// Middleware: sets the id of the call, and holds its resources until the body of its response is dropped.
pub async fn name(request: Request, next: Next) -> Response {
    let sent = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let sent = sent.filter(|id| is_id(id));
    let trace_parent = request.headers().get(TRACE_PARENT).and_then(|value| value.to_str().ok());
    let call = Arc::new(Call {
        trace_parent: trace_parent.filter(|text| is_trace_parent(text)).map(str::to_string),
        is_sent: sent.is_some(),
        id: sent.map_or_else(|| fresh_id("req"), str::to_string),
        stored: None,
        held: Mutex::default(),
    });
    let mut response = CALL.scope(call.clone(), next.run(request)).await;
    if let Ok(id) = HeaderValue::from_str(&call.id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    let mut held = std::mem::take(&mut *call.held.lock().unwrap_or_else(PoisonError::into_inner));
    let unenforced = std::mem::take(&mut held.unenforced);
    if let Some(keywords) = HeaderValue::try_from(unenforced).ok().filter(|keywords| !keywords.is_empty()) {
        response.headers_mut().insert(UNENFORCED, keywords);
    }
    if held.stream.is_none() && held.memory.is_empty() {
        return response;
    }
    response.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _ = &held;
            frame
        }))
    })
}

#[cfg(test)]
#[path = "../../tests/unit/call.rs"]
mod tests;
