//! Answers to bytes that are no request, and so reach no handler: the error object, written by hand. Then the connection is
//! closed.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::error::ApiError;
use super::settings::Limits;

/// Time for a client to take the answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Connections over the limit that are told so at a time; further ones are closed without a word.
const TURNED_AWAY_AT_ONCE: usize = 64;

/// Tells connections that there is no place for them.
pub struct Door(Arc<Semaphore>);

impl Door {
    /// A door at which few are spoken to at once, so that a flood costs little.
    pub fn new() -> Door {
        Door(Arc::new(Semaphore::new(TURNED_AWAY_AT_ONCE)))
    }

    /// Closes the connection, with an answer if there is time for one.
    pub fn turn_away(&self, stream: TcpStream) {
        let Ok(permit) = self.0.clone().try_acquire_owned() else { return };
        let message = "the limit of open connections (--max-connections) is reached: try again later";
        tokio::spawn(async move {
            refuse(stream, &ApiError::unavailable(message)).await;
            drop(permit);
        });
    }
}

/// What to say to a request that `hyper` could not read: `error` is what it made of it, `bare` the status that it would have
/// answered with, `rest` what came of the request. `None` where there is nobody to talk to.
pub fn of(error: &hyper::Error, bare: Option<StatusCode>, rest: &[u8], limits: &Limits) -> Option<ApiError> {
    let most = limits.max_header_bytes;
    match bare {
        Some(StatusCode::URI_TOO_LONG) => Some(ApiError::long_target(most)),
        Some(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE) => {
            let (found, count) = ("found more headers than can be read", limits.max_header_count);
            Some(ApiError::large_head(format!("{found}, expected at most {count} with {most} bytes together")))
        }
        Some(_) => Some(ApiError::body(format!("the request is not valid HTTP/1.1: {error}"))),
        None if error.is_parse_version_h2() => Some(ApiError::version()),
        // Whoever has sent nothing expects nothing.
        None if rest.is_empty() => None,
        None if error.is_timeout() => {
            let seconds = limits.header_timeout.as_secs_f64();
            Some(ApiError::slow(format!("the head of the request did not arrive within {seconds} s")))
        }
        None if error.is_incomplete_message() => Some(ApiError::body("the request ends within its head")),
        None => None,
    }
}

/// Answers with the error, and closes the connection.
pub async fn refuse(mut stream: TcpStream, error: &ApiError) {
    let body = error.to_json().to_string();
    let retry = error.retry_after().map_or(String::new(), |seconds| format!("retry-after: {seconds}\r\n"));
    let answer = format!(
        "HTTP/1.1 {}\r\ncontent-type: application/json\r\n{retry}connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        error.status(),
        body.len()
    );
    let _ = timeout(PATIENCE, async {
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await?;
        // What the client has sent is taken, or the system would throw the answer away with it.
        let mut rest = [0; 4096];
        while stream.read(&mut rest).await? > 0 {}
        io::Result::Ok(())
    })
    .await;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn a_flood_is_turned_away_by_few_and_without_a_word_beyond_them() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (door, mut clients) = (Door::new(), Vec::new());
        let mut streams = Vec::new();
        for _ in 0..TURNED_AWAY_AT_ONCE + 2 {
            clients.push(TcpStream::connect(address).await.unwrap());
            streams.push(listener.accept().await.unwrap().0);
        }
        // None of the answers is given before the last has asked.
        streams.into_iter().for_each(|stream| door.turn_away(stream));
        for (i, client) in clients.iter_mut().enumerate() {
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            let spoken_to = i < TURNED_AWAY_AT_ONCE;
            assert_eq!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("retry-after: 1"), spoken_to, "{i}");
            assert_eq!(answer.is_empty(), !spoken_to, "{i}");
        }
    }
}
