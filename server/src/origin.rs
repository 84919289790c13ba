//! Refuses requests that a web page of another site may have sent.
//!
//! A page that a user visits can reach a server on the user's own machine in two ways. The browser sends requests to any
//! address for it, the simple ones (forms, `text/plain`, no media type) without asking the server first; they carry the page's
//! `Origin`. Or the page's own name is made to resolve to this machine (DNS rebinding); for the browser the page and the server
//! are then one site, and only `Host` tells them apart.
//!
//! | check | made |
//! |---|---|
//! | `Host` is a loopback name or address, or named by `--allowed-hosts` | on a loopback address without keys, or with the flag |
//! | `Origin` is the server's own, a loopback one, or named by `--allowed-origins` | without keys |
//! | `Sec-Fetch-Site` is not `cross-site` where there is no `Origin`, except for a link to a page | without keys |
//! | a body's media type is JSON, which a page of another site can send only if the server allows it | always |
//!
//! With keys there is nothing to protect here: a page of another site does not have one.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::app::App;
use super::error::ApiError;
use super::settings::Cors;

/// Middleware: answers 403 to what a page of another site may have sent. The state says whether the server listens on a loopback
/// address.
pub async fn check(State((app, loopback)): State<(Arc<App>, bool)>, request: Request, next: Next) -> Response {
    let policy = Policy { hosts: &app.allowed_hosts, cors: &app.cors, has_keys: !app.api_keys.is_empty(), loopback };
    match policy.check(&request) {
        Ok(()) => next.run(request).await,
        Err(error) => {
            app.metrics.rejected("origin");
            error.into_response()
        }
    }
}

/// Refuses a body that is not declared as JSON. Without a declaration too: that is how a page sends a body without asking.
pub fn check_media_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let found = headers.get(header::CONTENT_TYPE).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let essence = found.as_deref().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let subtype = essence.to_ascii_lowercase();
    let is_json = subtype.strip_prefix("application/").is_some_and(|name| name == "json" || name.ends_with("+json"));
    if is_json && headers.get_all(header::CONTENT_TYPE).iter().count() == 1 {
        return Ok(());
    }
    Err(ApiError::media_type(found.as_deref()))
}

/// Which hosts and origins a server takes requests for.
struct Policy<'a> {
    hosts: &'a [String],
    cors: &'a Cors,
    has_keys: bool,
    loopback: bool,
}

impl Policy<'_> {
    fn check<B>(&self, request: &axum::http::Request<B>) -> Result<(), ApiError> {
        let headers = request.headers();
        let host = headers.get(header::HOST).map(|value| String::from_utf8_lossy(value.as_bytes()));
        // A target in absolute form names the host as well (RFC 9112, section 3.2.2).
        let target = request.uri().authority().map(|authority| authority.as_str().into());
        let checked = !self.hosts.is_empty() || self.loopback && !self.has_keys;
        for named in [host.clone(), target].into_iter().flatten().filter(|_| checked) {
            let is_served = self.serves(&named) || (is_bare_name(&named) && is_no_page(request));
            if !is_served {
                return Err(ApiError::forbidden_host(&named));
            }
        }
        if self.has_keys {
            return Ok(());
        }
        for origin in headers.get_all(header::ORIGIN) {
            let origin = String::from_utf8_lossy(origin.as_bytes());
            if !self.cors.allows(&origin) && !is_own(&origin, host.as_deref()) {
                return Err(ApiError::forbidden_origin(&origin));
            }
        }
        let says = |name: &str, value: &str| headers.get(name).is_some_and(|found| found == value);
        let is_link = request.method() == Method::GET && says("sec-fetch-mode", "navigate");
        if !headers.contains_key(header::ORIGIN)
            && says("sec-fetch-site", "cross-site")
            && !(is_link && says("sec-fetch-dest", "document"))
        {
            return Err(ApiError::forbidden_origin("a page of another site"));
        }
        Ok(())
    }

    /// Whether the server is meant by this `Host`. An address cannot be rebound, so one is refused on loopback alone, where a
    /// request for another address has taken a way that nobody meant.
    fn serves(&self, authority: &str) -> bool {
        let Some(host) = Host::parse(authority) else { return false };
        let is_allowed = |allowed: &String| allowed == "*" || Host::parse(allowed).as_ref() == Some(&host);
        host.is_loopback() || (host.is_address() && !self.loopback) || self.hosts.iter().any(is_allowed)
    }
}

/// Whether a page of this origin belongs to the server or to its machine.
fn is_own(origin: &str, host: Option<&str>) -> bool {
    let Some((scheme, authority)) = origin.split_once("://") else { return false };
    (scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https"))
        && Host::parse(authority)
            .is_some_and(|page| page.is_loopback() || host.is_some_and(|host| host.eq_ignore_ascii_case(authority)))
}

/// Whether this is no request of a browser, which sends `Origin` with every POST.
fn is_no_page<B>(request: &axum::http::Request<B>) -> bool {
    let headers = request.headers();
    request.method() == Method::POST
        && !headers.contains_key(header::ORIGIN)
        && !headers.keys().any(|name| name.as_str().starts_with("sec-fetch-"))
}

/// Whether this is a name without a dot, as a hosts file has. Public names, which can be rebound, have one.
fn is_bare_name(authority: &str) -> bool {
    matches!(Host::parse(authority), Some(Host::Name(name)) if !name.contains('.'))
}

/// The host of an authority.
#[derive(Debug, PartialEq, Eq)]
pub enum Host {
    /// In lower case and without the dot of the root.
    Name(String),
    /// An address.
    Address(IpAddr),
}

impl Host {
    /// The host of `host` or `host:port`. `None` for anything else, such as an authority with user information.
    pub fn parse(authority: &str) -> Option<Host> {
        let bracketed = authority.strip_prefix('[').and_then(|rest| rest.split_once(']'));
        let (host, port) =
            bracketed.unwrap_or_else(|| authority.split_at(authority.find(':').unwrap_or(authority.len())));
        let port = port.strip_prefix(':').unwrap_or(port);
        if !port.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        if bracketed.is_some() {
            return Some(Host::Address(IpAddr::V6(host.parse().ok()?)));
        }
        if let Ok(address) = host.parse() {
            return Some(Host::Address(IpAddr::V4(address)));
        }
        let name = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        (!name.is_empty() && name.bytes().all(is_name)).then_some(Host::Name(name))
    }

    fn is_loopback(&self) -> bool {
        match self {
            Host::Name(name) => name == "localhost" || name.ends_with(".localhost"),
            Host::Address(address) => address.to_canonical().is_loopback(),
        }
    }

    fn is_address(&self) -> bool {
        matches!(self, Host::Address(_))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_whole_names_and_addresses_of_this_machine_are_loopback() {
        let is_loopback = |text: &str| Host::parse(text).is_some_and(|host| host.is_loopback());
        for own in [
            "localhost",
            "LOCALHOST:8000",
            "localhost.",
            "a.localhost:1",
            "127.0.0.1",
            "127.9.9.9:80",
            "[::1]:8000",
            "[::1]",
            "[::ffff:127.0.0.1]:8000",
        ] {
            assert!(is_loopback(own), "{own}");
        }
        for foreign in [
            "",
            ".",
            ":8000",
            "attacker.example",
            "localhost.attacker.example",
            "notlocalhost",
            "localhost..",
            "localhost@attacker.example",
            "attacker.example@localhost",
            "user:localhost@attacker.example:80",
            "localhost:80@attacker.example",
            "localhost/",
            "localhost:80:80",
            "localhost:x",
            "localhost ",
            "127.0.0.1.attacker.example",
            "127.1",
            "0x7f.0.0.1",
            "128.0.0.1",
            "0.0.0.0",
            "::1",
            "[localhost]",
            "[::1",
            "[::1]x",
            "[::2]:8000",
            "[::ffff:10.0.0.1]",
            "ｌocalhost",
        ] {
            assert!(!is_loopback(foreign), "{foreign}");
        }
    }

    #[test]
    fn json_is_declared_by_its_media_type_or_a_suffix() {
        let check = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            values.iter().for_each(|value| {
                headers.append(header::CONTENT_TYPE, value.parse().unwrap());
            });
            check_media_type(&headers).is_ok()
        };
        for good in ["application/json", "Application/JSON ; charset=utf-8", "application/vnd.api+json"] {
            assert!(check(&[good]), "{good}");
        }
        for bad in [
            "",
            "text/plain",
            "text/plain; application/json",
            "text/json",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=application/json",
            "application/jsonx",
            "application/json, text/plain",
        ] {
            assert!(!check(&[bad]), "{bad}");
        }
        assert!(!check(&[]) && !check(&["application/json", "text/plain"]));
    }
}
