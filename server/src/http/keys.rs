//! `--api-key`: all routes except [`PUBLIC`] require the header `Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::ConstantTimeEq;

use super::ApiError;
use crate::settings::ServerOptions;

/// Routes of probes and scrapers, which send no key.
const PUBLIC: [&str; 4] = ["/health", "/ping", "/version", "/metrics"];

/// Who sent a request, as an extension of it.
#[derive(Clone, Debug)]
pub enum Client {
    /// The client with this key, or anyone if the server has no keys.
    Key(Option<Arc<str>>),
    /// Whoever owns the stored work that the request is part of.
    Owner([u8; 32]),
}

/// Middleware: rejects requests without a valid key with 401.
pub async fn check(State(options): State<Arc<ServerOptions>>, mut request: Request, next: Next) -> Response {
    let keys = &options.api_keys;
    // Compares with every key, in time that does not depend on which one matches or on how much of it does.
    let is_key =
        |sent: &str| keys.iter().fold(false, |found, key| found | bool::from(sent.as_bytes().ct_eq(key.as_bytes())));
    let key: Option<Arc<str>> = sent(request.headers()).find(|sent| is_key(sent)).map(Arc::from);
    if keys.is_empty() || PUBLIC.contains(&request.uri().path()) || key.is_some() {
        request.extensions_mut().insert(Client::Key(key));
        return next.run(request).await;
    }
    let message = "Incorrect or missing API key, expected one of --api-key; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`";
    ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key").into_response()
}

/// The keys that a request has: clients of Anthropic's API send one in either header.
fn sent(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let bearer = || {
        let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    };
    let plain = || Some(headers.get("x-api-key")?.to_str().ok()?.trim());
    bearer().into_iter().chain(plain())
}
