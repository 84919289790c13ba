//! `--api-key`: every route but the free ones wants `Authorization: Bearer KEY` with one of the keys.

use std::hint::black_box;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::app::App;
use super::error::ApiError;

/// Probes and scrapers come without a key.
const FREE: [&str; 3] = ["/health", "/version", "/metrics"];

/// Middleware: lets a request through, or answers 401.
pub async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let keys = &app.api_keys;
    let allowed = keys.is_empty()
        || FREE.contains(&request.uri().path())
        || bearer(request.headers()).is_some_and(|sent| is_one_of(sent.as_bytes(), keys));
    if allowed { next.run(request).await } else { ApiError::unauthorized().into_response() }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Compares with every key, whether one has matched or not.
fn is_one_of(sent: &[u8], keys: &[String]) -> bool {
    keys.iter().fold(false, |found, key| found | equal(sent, key.as_bytes()))
}

/// Compares without an early exit: the time depends on what was sent, not on how much of it is right.
fn equal(sent: &[u8], key: &[u8]) -> bool {
    let mut difference = u8::from(sent.len() != key.len());
    for (i, &byte) in sent.iter().enumerate() {
        let expected = if key.is_empty() { 0 } else { key[i % key.len()] };
        difference |= black_box(byte ^ expected);
    }
    black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_the_exact_key_is_equal() {
        assert!(equal(b"s3cret", b"s3cret"));
        for wrong in [&b""[..], b"s3cre", b"s3crets", b"s3crets3cret", b"S3cret"] {
            assert!(!equal(wrong, b"s3cret"));
        }
        assert!(!equal(b"a", b""));
    }

    #[test]
    fn any_of_several_keys_will_do() {
        let keys = ["one".to_string(), "two".to_string()];
        assert!(is_one_of(b"one", &keys) && is_one_of(b"two", &keys));
        assert!(!is_one_of(b"onetwo", &keys) && !is_one_of(b"", &keys) && !is_one_of(b"one", &[]));
    }

    #[test]
    fn the_scheme_is_bearer_in_any_case() {
        let header = |value: &str| HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())]);
        assert_eq!(bearer(&header("Bearer k")), Some("k"));
        assert_eq!(bearer(&header("bearer k")), Some("k"));
        for wrong in ["k", "Bearer", "Basic k"] {
            assert_eq!(bearer(&header(wrong)), None);
        }
    }
}
