//! A request's body becomes [`Fields`]: content type, size and JSON are checked here, once for all routes.

use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use futures_util::StreamExt;

use super::error::ApiError;
use super::fields::Fields;

/// Greatest body that is read, in bytes. Parsed JSON takes many times its text, so this is generous rather than large:
/// a prompt of a million tokens is about 4 MB.
pub const MAX_BODY: usize = 16 << 20;

/// How much of a body that is too large is read and dropped, so that most clients get to see the 413 instead of a
/// closed connection.
const MAX_DRAINED: usize = 8 * MAX_BODY;

/// Reads and parses the body.
pub async fn read(request: Request) -> Result<Fields, ApiError> {
    if let Some(found) = request.headers().get(header::CONTENT_TYPE) {
        let found = String::from_utf8_lossy(found.as_bytes());
        let essence = found.split(';').next().unwrap_or_default().trim();
        if !essence.eq_ignore_ascii_case("application/json") {
            return Err(ApiError::media_type(&found));
        }
    }
    let bytes = read_bytes(request.into_body()).await?;
    let value = serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::body(format!("the body is not valid JSON: {error}")))?;
    Fields::new(value)
}

async fn read_bytes(body: Body) -> Result<Vec<u8>, ApiError> {
    let mut chunks = body.into_data_stream();
    let (mut bytes, mut seen) = (Vec::new(), 0);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| ApiError::body(format!("the body could not be read: {error}")))?;
        seen += chunk.len();
        if seen <= MAX_BODY {
            bytes.extend_from_slice(&chunk);
        } else if seen <= MAX_DRAINED {
            bytes = Vec::new();
        } else {
            break;
        }
    }
    if seen > MAX_BODY { Err(ApiError::too_large(MAX_BODY)) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn request(content_type: &str, body: impl Into<Body>) -> Request {
        Request::builder().header(header::CONTENT_TYPE, content_type).body(body.into()).unwrap()
    }

    #[tokio::test]
    async fn content_types_are_compared_without_case_and_parameters() {
        for good in ["application/json", "Application/JSON", "application/json; charset=utf-8"] {
            assert!(read(request(good, "{}")).await.is_ok());
        }
        for bad in ["text/plain", "application/x-www-form-urlencoded", "application/jsonx"] {
            assert!(read(request(bad, "{}")).await.is_err());
        }
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
