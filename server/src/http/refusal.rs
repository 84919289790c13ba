//! Error responses to connections and bytes that never become a request: the error object, written by hand. Also how
//! connections are closed.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::{Accepted, ApiError, Stream};
use crate::settings::Limits;

/// Time limit for the client to take the response and to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Number of rejected connections that get a response at a time; further ones are closed at once.
const MAX_REJECTIONS: usize = 64;

/// Rejects connections with 503.
pub struct Rejector {
    permits: Arc<Semaphore>,
    message: String,
}

impl Rejector {
    /// Rejector that says why. Responses are few at a time, so that a flood of connections costs little.
    pub fn new(message: String) -> Rejector {
        Rejector { permits: Arc::new(Semaphore::new(MAX_REJECTIONS)), message }
    }

    /// Rejector of connections over this limit.
    pub fn over(max_connections: usize) -> Rejector {
        let limit = "the limit of --max-connections; try again later";
        Rejector::new(format!("{max_connections} connections are open, {limit}"))
    }

    /// Closes the connection, with a response if a permit is free.
    pub fn reject(&self, client: Accepted) {
        let Ok(permit) = self.permits.clone().try_acquire_owned() else { return };
        let error = ApiError::unavailable(self.message.clone());
        tokio::spawn(async move {
            if let Some(stream) = client.open(CLOSE_TIMEOUT).await {
                send(stream, &error).await;
            }
            drop(permit);
        });
    }
}

/// The error for a request that `hyper` could not read: `error` is hyper's error, `suppressed` the status of
/// its response, `rest` the bytes received. `None` if the client expects no response.
pub fn explain(error: &hyper::Error, suppressed: Option<StatusCode>, rest: &[u8], limits: &Limits) -> Option<ApiError> {
    let most = limits.max_header_bytes;
    match suppressed {
        Some(StatusCode::URI_TOO_LONG) => Some(ApiError::long_target(most)),
        Some(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE) => {
            let (count, advice) =
                (limits.max_header_count, "send fewer or raise --max-header-count or --max-header-bytes");
            let message =
                format!("the headers are too large, expected at most {count} with {most} bytes in total; {advice}");
            Some(ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, message))
        }
        Some(_) => {
            Some(ApiError::bad_request(format!("the request is not valid HTTP/1.1: {error}; send valid HTTP/1.1")))
        }
        None if error.is_parse_version_h2() => {
            let message = "found HTTP/2, which is not supported, expected HTTP/1.1; send HTTP/1.1";
            Some(ApiError::new(StatusCode::HTTP_VERSION_NOT_SUPPORTED, message))
        }
        // A client that has sent nothing expects no response.
        None if rest.is_empty() => None,
        None if error.is_timeout() => {
            let seconds = limits.header_timeout.as_secs_f64();
            let message =
                format!("the request head is incomplete, expected all of it within {seconds} s (--header-timeout)");
            Some(ApiError::new(StatusCode::REQUEST_TIMEOUT, message))
        }
        None if error.is_incomplete_message() => {
            Some(ApiError::bad_request("the request ends within its head, expected a complete request"))
        }
        None => None,
    }
}

/// Sends the error and closes the connection.
pub async fn send(mut stream: Stream, error: &ApiError) {
    let body = error.to_json().to_string();
    let retry = error.retry_after().map_or(String::new(), |seconds| format!("retry-after: {seconds}\r\n"));
    let answer = format!(
        "HTTP/1.1 {}\r\ncontent-type: application/json\r\n{retry}connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        error.status(),
        body.len()
    );
    let _ = timeout(CLOSE_TIMEOUT, async {
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await?;
        drain(&mut stream).await
    })
    .await;
}

/// Closes a connection after its last response: at once for the client, and here once the client has closed it too. If it was
/// dropped at once, the rest of a body that nobody has read, as after a 401, would reset it, and the client could lose the
/// response (RFC 9112, section 9.6).
pub async fn close(mut stream: Stream) {
    let _ = timeout(CLOSE_TIMEOUT, async {
        // Hyper leaves this out for a request with `Upgrade`.
        stream.shutdown().await?;
        drain(&mut stream).await
    })
    .await;
}

/// Reads until the client closes the connection.
async fn drain(stream: &mut Stream) -> io::Result<()> {
    let mut rest = [0; 4096];
    while stream.read(&mut rest).await? > 0 {}
    Ok(())
}

#[cfg(test)]
#[path = "../../tests/unit/refusal.rs"]
mod tests;
