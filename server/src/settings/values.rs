//! Parsers of flag values. The command line parser names the flag and what was found; the errors here say what was expected.

use std::net::IpAddr;
use std::time::Duration;

use serde_json::{Map, Value};

/// Parses a number from 0.
pub(crate) fn whole(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}", usize::MAX))
}

/// Parses a number of alternatives per token; -1 is all of the vocabulary.
pub(crate) fn alternatives(text: &str) -> Result<usize, String> {
    if text == "-1" { Ok(usize::MAX) } else { whole(text) }
}

/// Parses a number from 1.
///
/// # Errors
/// The text is no such number.
pub fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| *count > 0).ok_or_else(|| "expected a whole number from 1".to_string())
}

/// Returns a text that is not empty.
///
/// # Errors
/// It is empty.
pub fn filled(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("expected at least one character".to_string()) } else { Ok(text.to_string()) }
}

/// Parses a number that may end in a letter, as in vLLM: `k m g t` are powers of 1000, `K M G T` of 1024.
pub fn human(text: &str) -> Option<f64> {
    let (digits, unit) = match text.char_indices().last()? {
        (end, letter) if letter.is_ascii_alphabetic() => {
            let power = |letters: &str| letters.find(letter).map(|index| 1 + index as i32);
            let decimal = power("kmgt").map(|power| 1000f64.powi(power));
            (&text[..end], decimal.or_else(|| power("KMGT").map(|power| 1024f64.powi(power)))?)
        }
        _ => (text, 1.0),
    };
    let number: f64 = digits.trim().parse().ok()?;
    // `1.001k` is 1000.9999999999999.
    Some((number * unit).round()).filter(|number| number.is_finite())
}

/// Parses a number of bytes such as `512M`, `2G` or `1.5GiB`. Letters are those of [`human`]; with `B` or `iB` behind them they are
/// powers of 1024.
///
/// # Errors
/// The text is no such number, or it is 0 or above 2^53.
pub fn bytes<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let problem = || "expected bytes such as 512M or 2G".to_string();
    let text = text.trim();
    let binary = text.strip_suffix(['B', 'b']).map(|unit| unit.trim_end_matches(['i', 'I']).to_ascii_uppercase());
    let number = human(binary.as_deref().unwrap_or(text)).ok_or_else(problem)?;
    if number == 0.0 {
        return Err("expected bytes above 0, such as 512M or 2G".to_string());
    }
    // A double represents whole numbers exactly up to 2^53.
    let bytes = (1.0..=(1u64 << 53) as f64).contains(&number).then_some(number as u64);
    bytes.and_then(|bytes| T::try_from(bytes).ok()).ok_or_else(problem)
}

/// Parses a number of seconds such as 30 or 0.5, above 0 and at most a year.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|n| *n > 0.0 && *n <= 366.0 * 86400.0);
    let problem = || "expected a number of seconds above 0, such as 30 or 0.5".to_string();
    seconds.map(Duration::from_secs_f64).ok_or_else(problem)
}

/// Returns an origin, method or header name.
pub(crate) fn header(text: &str) -> Result<String, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b',') {
        return Ok(text.to_string());
    }
    Err("expected one origin, method or header name without spaces and commas; repeat the flag for several".to_string())
}

/// Returns a path under which a proxy offers the routes, without a slash at its end; empty for none.
pub(crate) fn prefix(text: &str) -> Result<String, String> {
    let path = text.trim_end_matches('/');
    let is_segment = |segment: &str| {
        !segment.is_empty() && segment.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte))
    };
    if path.is_empty() || path.strip_prefix('/').is_some_and(|rest| rest.split('/').all(is_segment)) {
        return Ok(path.to_string());
    }
    Err("expected a path such as /llm, of letters, digits and -._~".to_string())
}

/// Parses a JSON object.
pub(crate) fn object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text)
        .map_err(|error| format!("expected a JSON object such as {{\"enable_thinking\": false}}: {error}"))
}

/// Returns a host name, or `*`.
pub(crate) fn host(text: &str) -> Result<String, String> {
    if text == "*" || Host::parse(text).is_some() {
        return Ok(text.to_string());
    }
    Err("expected a host name without a scheme, such as models.example.org, or *".to_string())
}

/// The host of an authority.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Host {
    /// A name in lower case, without the dot of the root.
    Name(String),
    /// An IP address.
    Address(IpAddr),
}

impl Host {
    /// Parses `host` or `host:port`. Returns `None` for anything else, such as an authority with user information.
    pub(crate) fn parse(authority: &str) -> Option<Host> {
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

    /// Whether it is this machine.
    pub(crate) fn is_loopback(&self) -> bool {
        match self {
            Host::Name(name) => name == "localhost" || name.ends_with(".localhost"),
            Host::Address(address) => address.to_canonical().is_loopback(),
        }
    }
}
