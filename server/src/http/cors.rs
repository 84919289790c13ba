//! CORS: browsers may use the server from the pages of allowed origins.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::settings::ServerOptions;

/// Middleware: answers preflights and adds CORS headers, for allowed origins. Preflights have no key, so it precedes `keys`.
pub async fn apply(State(options): State<Arc<ServerOptions>>, request: Request, next: Next) -> Response {
    let cors = &options.cors;
    let origin = request.headers().get(header::ORIGIN).cloned();
    let Some(origin) = origin.filter(|origin| origin.to_str().is_ok_and(|origin| cors.allows(origin))) else {
        return next.run(request).await;
    };
    let is_preflight =
        request.method() == Method::OPTIONS && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let asked = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = if is_preflight { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    let headers = response.headers_mut();
    let is_any = cors.origins.iter().any(|allowed| allowed == "*");
    if cors.credentials {
        headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
    }
    // With credentials a browser takes no `*`.
    let is_any = is_any && !cors.credentials;
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, if is_any { HeaderValue::from_static("*") } else { origin });
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id, retry-after"));
    if is_preflight {
        // Clients send headers of their own, such as the SDK's `x-stainless-os`. None of them means anything here, except
        // the key, which a page has to know.
        let asked = asked.filter(|_| cors.headers.is_empty());
        let allowed = asked.unwrap_or_else(|| list(&cors.headers, "authorization"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allowed);
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, list(&cors.methods, "GET, POST"));
        headers.append(header::VARY, HeaderValue::from_static("access-control-request-headers"));
        // Seconds for which a browser may cache the response.
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    }
    response
}

fn list(items: &[String], default: &'static str) -> HeaderValue {
    let all = if items.is_empty() { Ok(HeaderValue::from_static(default)) } else { items.join(", ").try_into() };
    all.unwrap_or(HeaderValue::from_static(default))
}
