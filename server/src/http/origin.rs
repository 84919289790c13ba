//! Rejects requests that a web page of another site may have sent.
//!
//! A web page can reach a server on its user's machine in two ways. The browser sends requests to any address for it,
//! simple ones (forms, `text/plain`, no media type) without asking the server first; they carry the page's `Origin`. Or
//! the page's own name is made to resolve to this machine (DNS rebinding): the browser then considers the page and the
//! server one site, and only `Host` tells them apart.
//!
//! | check | when |
//! |---|---|
//! | `Host` is a loopback name or address, the address 0.0.0.0 or [::], which is this machine too, or allowed by `--allowed-hosts`; of a server that does not listen on loopback also any address and a name without a dot | without keys, or with the flag |
//! | `Origin` is the server's own, a loopback one, or allowed by `--allowed-origins` | without keys |
//! | without `Origin`, `Sec-Fetch-Site` is not `cross-site`, except for a link to a page | without keys |
//! | a body's media type is JSON, which a page of another site can send only if the server allows it | always; where clients do not declare it, of browsers |
//!
//! A server with keys needs no further protection: a page of another site does not have one.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::ApiError;
use crate::metrics::Metrics;
use crate::settings::{Host, ServerOptions};

/// State of [`check`]: settings, the counter of rejections, and whether the server listens on a loopback address.
pub type Checked = (Arc<ServerOptions>, Arc<Metrics>, bool);

/// Middleware: rejects requests that a page of another site may have sent with 403.
pub async fn check(State((options, metrics, loopback)): State<Checked>, request: Request, next: Next) -> Response {
    match check_request(&options, loopback, &request) {
        Ok(()) => next.run(request).await,
        Err(error) => {
            metrics.rejected("origin");
            error.into_response()
        }
    }
}

/// Rejects a body that is not declared as JSON. An undeclared body is what a page can send without asking.
pub fn check_media_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let found = headers.get(header::CONTENT_TYPE).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let essence = found.as_deref().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let subtype = essence.to_ascii_lowercase();
    let is_json = subtype.strip_prefix("application/").is_some_and(|name| name == "json" || name.ends_with("+json"));
    if is_json && headers.get_all(header::CONTENT_TYPE).iter().count() == 1 {
        return Ok(());
    }
    let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    Err(ApiError::header(status, "content-type", found.as_deref(), "application/json"))
}

/// Rejects a body that is not declared as JSON, unless no page can have sent it: a browser says where a request with a body comes
/// from.
pub fn check_undeclared(headers: &HeaderMap) -> Result<(), ApiError> {
    if is_of_browser(headers) { check_media_type(headers) } else { Ok(()) }
}

fn check_request(options: &ServerOptions, loopback: bool, request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    let host = headers.get(header::HOST).map(|value| String::from_utf8_lossy(value.as_bytes()));
    // An absolute request target names the host as well (RFC 9112, section 3.2.2).
    let target = request.uri().authority().map(|authority| authority.as_str().into());
    let has_keys = !options.api_keys.is_empty();
    let checked = !options.allowed_hosts.is_empty() || !has_keys;
    for named in [host.clone(), target].into_iter().flatten().filter(|_| checked) {
        let is_served = serves(&options.allowed_hosts, loopback, &named)
            || (is_bare_name(&named) && (!loopback || is_not_browser(request)));
        if !is_served {
            let expected = match loopback {
                true => "a loopback name such as localhost",
                false => "an IP address or a name without a dot",
            };
            return Err(forbidden("host", &named, expected, "--allowed-hosts NAME"));
        }
    }
    if has_keys {
        return Ok(());
    }
    let foreign = |page: &str| forbidden("origin", page, "a page of this server", "--allowed-origins ORIGIN");
    for origin in headers.get_all(header::ORIGIN) {
        let origin = String::from_utf8_lossy(origin.as_bytes());
        if !options.cors.allows(&origin) && !is_own(&origin, host.as_deref()) {
            return Err(foreign(&origin));
        }
    }
    let says = |name: &str, value: &str| headers.get(name).is_some_and(|found| found == value);
    let is_link = request.method() == Method::GET && says("sec-fetch-mode", "navigate");
    if !headers.contains_key(header::ORIGIN)
        && says("sec-fetch-site", "cross-site")
        && !(is_link && says("sec-fetch-dest", "document"))
    {
        return Err(foreign("a page of another site"));
    }
    Ok(())
}

/// Whether this `Host` names the server. An address cannot be rebound, so that only a loopback server rejects
/// addresses of others: a request for another address reached it by mistake.
fn serves(hosts: &[String], loopback: bool, authority: &str) -> bool {
    let Some(host) = Host::parse(authority) else { return false };
    let is_allowed = |allowed: &String| allowed == "*" || Host::parse(allowed).as_ref() == Some(&host);
    // Linux takes the unspecified address for this machine, and clients use it.
    let is_served = |address: IpAddr| !loopback || address.is_unspecified();
    host.is_loopback() || matches!(host, Host::Address(address) if is_served(address)) || hosts.iter().any(is_allowed)
}

/// 403 for a request whose header `name` is not allowed; `flag` allows it.
fn forbidden(name: &'static str, found: &str, expected: &str, flag: &str) -> ApiError {
    let expected = format!("{expected}; start the server with {flag} to allow it");
    let code = if name == "host" { "forbidden_host" } else { "forbidden_origin" };
    ApiError::header(StatusCode::FORBIDDEN, name, Some(found), &expected).with_code(code)
}

/// Whether an origin belongs to the server or to its machine.
fn is_own(origin: &str, host: Option<&str>) -> bool {
    let Some((scheme, authority)) = origin.split_once("://") else { return false };
    (scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https"))
        && Host::parse(authority)
            .is_some_and(|page| page.is_loopback() || host.is_some_and(|host| host.eq_ignore_ascii_case(authority)))
}

/// Whether the request is not from a browser, which sends `Origin` with every POST.
fn is_not_browser(request: &Request) -> bool {
    request.method() == Method::POST && !is_of_browser(request.headers())
}

fn is_of_browser(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) || headers.keys().any(|name| name.as_str().starts_with("sec-fetch-"))
}

/// Whether this is a name without a dot, such as those of a hosts file. Public names, which can be rebound, have a dot.
fn is_bare_name(authority: &str) -> bool {
    matches!(Host::parse(authority), Some(Host::Name(name)) if !name.contains('.'))
}
