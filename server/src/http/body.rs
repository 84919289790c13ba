//! A request's body becomes [`Fields`]: content type, size and JSON are checked here, once for all routes.
//!
//! JSON takes time to parse, to read and even to drop. All of that happens in one place, [`Received::read`], which moves
//! large bodies off the threads that serve everybody else.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use futures_util::StreamExt;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::app::App;
use super::call;
use super::connection::Busy;
use super::error::ApiError;
use super::fields::Fields;
use super::origin;

/// A body that is too large is read and dropped up to so many times the limit, so that most clients get to see the 413
/// instead of a closed connection.
const DRAINED: usize = 8;

/// Bodies up to this many bytes are read where they arrive (well under a millisecond, tokenising included); larger ones
/// go to the blocking pool.
const INLINE_BYTES: usize = 16 << 10;

/// A body that has arrived in whole. A handler keeps it until it has its answer, which a stop waits for.
pub struct Received {
    bytes: Vec<u8>,
    _busy: Busy,
}

/// Receives the body.
pub async fn receive(app: &App, request: Request) -> Result<Received, ApiError> {
    let limits = &app.limits;
    let bytes = timeout(limits.body_timeout, checked_bytes(request, limits.max_body_bytes)).await.map_err(|_| {
        app.metrics.rejected("timeout");
        ApiError::slow(format!("the body did not arrive within {} s", limits.body_timeout.as_secs_f64()))
    })??;
    Ok(Received { bytes, _busy: app.activity.begin() })
}

impl Received {
    /// Parses the body and makes of its fields what the handler needs. All heavy work on a request belongs in `read`.
    pub async fn read<T: Send + 'static>(
        &mut self,
        app: &Arc<App>,
        read: impl FnOnce(&Arc<App>, &Fields) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (bytes, handle) = (std::mem::take(&mut self.bytes), app.clone());
        let bytes_len = bytes.len();
        let read = move || {
            let fields = parse(bytes)?;
            handle.limits.check(&fields)?;
            let streams = fields.bool("stream").unwrap_or_default().unwrap_or_default();
            Ok((read(&handle, &fields)?, streams))
        };
        let (read, streams) = off_thread(&app.large_bodies, bytes_len, read).await?;
        if streams {
            call::take_stream_place(app)?;
        }
        Ok(read)
    }
}

/// Runs `work`; if its input of `bytes` bytes is large, on the blocking pool and with a permit. The permit is kept to the
/// end of the work even if nobody waits for it any more.
async fn off_thread<T: Send + 'static>(
    permits: &Arc<Semaphore>,
    bytes: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if bytes <= INLINE_BYTES {
        return work();
    }
    let failed = |error: &dyn std::fmt::Display| ApiError::internal(format!("reading the request failed: {error}"));
    let permit = permits.clone().acquire_owned().await.map_err(|error| failed(&error))?;
    let task = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work()
    });
    task.await.unwrap_or_else(|error| Err(failed(&error)))
}

fn parse(bytes: Vec<u8>) -> Result<Fields, ApiError> {
    // RFC 8259 lets a reader pass over a byte order mark, and some editors write one.
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let value =
        serde_json::from_slice(text).map_err(|error| ApiError::body(format!("the body is not valid JSON: {error}")))?;
    Fields::new(value)
}

async fn checked_bytes(request: Request, most: usize) -> Result<Vec<u8>, ApiError> {
    origin::check_media_type(request.headers())?;
    if let Some(found) = request.headers().get(header::CONTENT_ENCODING)
        && !found.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        return Err(ApiError::content_encoding(&String::from_utf8_lossy(found.as_bytes())));
    }
    read_bytes(request.into_body(), most).await
}

async fn read_bytes(body: Body, most: usize) -> Result<Vec<u8>, ApiError> {
    let mut chunks = body.into_data_stream();
    let (mut bytes, mut seen) = (Vec::new(), 0);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| ApiError::body(format!("the body could not be read: {error}")))?;
        seen += chunk.len();
        if seen <= most {
            bytes.extend_from_slice(&chunk);
        } else if seen <= most.saturating_mul(DRAINED) {
            bytes = Vec::new();
        } else {
            break;
        }
    }
    if seen > most { Err(ApiError::too_large(most)) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    const MAX_BODY: usize = 1 << 20;

    async fn read(request: Request) -> Result<Fields, ApiError> {
        parse(checked_bytes(request, MAX_BODY).await?)
    }

    #[tokio::test]
    async fn large_bodies_leave_the_thread_and_few_are_worked_on_at_once() {
        let thread = || Ok(std::thread::current().id());
        let (permits, here) = (Arc::new(Semaphore::new(2)), std::thread::current().id());
        assert_eq!(off_thread(&permits, INLINE_BYTES, thread).await, Ok(here));
        assert_ne!(off_thread(&permits, INLINE_BYTES + 1, thread).await, Ok(here));
        let running = Arc::new(AtomicUsize::new(0));
        let works = (0..6).map(|_| {
            let running = running.clone();
            off_thread(&permits, MAX_BODY, move || {
                let found = running.fetch_add(1, Ordering::SeqCst) + 1;
                std::thread::sleep(Duration::from_millis(20));
                running.fetch_sub(1, Ordering::SeqCst);
                Ok(found)
            })
        });
        let found = futures_util::future::join_all(works).await;
        assert_eq!(found.into_iter().map(Result::unwrap).max(), Some(2));
    }

    fn request(content_type: &str, body: impl Into<Body>) -> Request {
        Request::builder().header(header::CONTENT_TYPE, content_type).body(body.into()).unwrap()
    }

    #[tokio::test]
    async fn what_is_not_a_json_object_is_refused() {
        for bad in [
            &b""[..],
            b"{",
            b"[]",
            b"null",
            b"42",
            b"{\"a\": NaN}",
            b"{\"a\": 1e999}",
            b"{\"a\": \"\xff\"}",
            b"{\"a\":1,}",
        ] {
            assert!(read(request("application/json", bad)).await.is_err(), "{}", String::from_utf8_lossy(bad));
        }
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused() {
        let error = read(request("application/json", " ".repeat(MAX_BODY + 1))).await.unwrap_err();
        assert_eq!(error, ApiError::too_large(MAX_BODY));
    }
}
