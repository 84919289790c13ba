//! Addresses of the form `tcp://HOST:PORT`, as ZeroMQ writes them.

use std::str::FromStr;

/// A malformed address. Displays as one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("found {found:?}, expected tcp://HOST:PORT, such as \"tcp://*:5557\"; other transports are not supported")]
pub struct EndpointError {
    /// What was given.
    pub found: String,
}

/// A parsed address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// A name, an IP address without brackets, or `*` for all interfaces.
    pub host: String,
    pub port: u16,
    /// Whether the text asks for a listening socket by vLLM's rule: it contains `*` or `::`.
    pub binds: bool,
}

impl Endpoint {
    /// What to listen at or connect to.
    pub fn address(&self) -> (&str, u16) {
        (if self.host == "*" { "0.0.0.0" } else { &self.host }, self.port)
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Endpoint, EndpointError> {
        let parse = || {
            let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
            let port = if port == "*" { 0 } else { port.parse().ok()? };
            let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
            let is_host = |c: char| c.is_ascii_alphanumeric() || ".-_:%".contains(c);
            if host != "*" && (host.is_empty() || !host.chars().all(is_host)) {
                return None;
            }
            Some(Endpoint { host: host.to_string(), port, binds: text.contains('*') || text.contains("::") })
        };
        parse().ok_or_else(|| EndpointError { found: text.to_string() })
    }
}
