//! Addresses: joining, encoding, origins, and what a redirect may do.

use std::fmt::{self, Write};

use ureq::http::Uri;

use crate::error::{HubError, shown};

/// An `http` or `https` address with a host and without user information.
#[derive(Clone, Debug)]
pub(crate) struct Url(Uri);

/// Scheme, host and port. A token is sent to one origin only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    is_secure: bool,
    host: String,
    port: u16,
}

impl Url {
    fn parse(text: &str) -> Option<Url> {
        let uri: Uri = text.parse().ok()?;
        let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
        let authority = uri.authority()?;
        (is_http && !authority.host().is_empty() && !authority.as_str().contains('@')).then_some(Url(uri))
    }

    /// The value of `HF_ENDPOINT`.
    pub fn endpoint(text: &str) -> Result<Url, HubError> {
        let text = text.trim().trim_end_matches('/');
        let url = Url::parse(text).filter(|url| url.0.query().is_none());
        url.ok_or_else(|| HubError::Setting {
            name: "HF_ENDPOINT",
            problem: "found no usable address, expected one such as https://huggingface.co".to_string(),
        })
    }

    /// This address with further parts, which are encoded; a `/` in a part too.
    pub fn join<'a>(&self, parts: impl IntoIterator<Item = &'a str>) -> Result<Url, HubError> {
        let mut text = self.to_string();
        for part in parts {
            text.push('/');
            for byte in part.bytes() {
                if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                    text.push(char::from(byte));
                } else {
                    // Writing to a string does not fail.
                    let _ = write!(text, "%{byte:02X}");
                }
            }
        }
        Url::parse(&text).ok_or_else(|| HubError::Answer {
            host: self.host().to_string(),
            found: format!("the address {}", shown(&text)),
            expected: "a shorter one",
        })
    }

    /// The address with a query.
    pub fn with_query(&self, query: &str) -> Result<Url, HubError> {
        let text = format!("{self}?{query}");
        Url::parse(&text).ok_or_else(|| HubError::Answer {
            host: self.host().to_string(),
            found: format!("the address {}", shown(&text)),
            expected: "a shorter one",
        })
    }

    /// The address that a `Location` header names, if it may be followed: not from https to http.
    pub fn redirect(&self, location: &str) -> Result<Url, HubError> {
        let scheme = self.0.scheme_str().unwrap_or("https");
        let target = if location.starts_with("//") {
            Url::parse(&format!("{scheme}:{location}"))
        } else if location.starts_with('/') {
            Url::parse(&format!("{scheme}://{}{location}", self.host()))
        } else {
            Url::parse(location)
        };
        let allowed = target.filter(|url| url.origin().is_secure || !self.origin().is_secure);
        // The query of a signed address is as good as a password.
        let plain = location.split(['?', '#']).next().unwrap_or_default();
        allowed.ok_or_else(|| HubError::Answer {
            host: self.host().to_string(),
            found: format!("a redirect to {:?}", shown(plain)),
            expected: "one to a path, or to an address that is as secure",
        })
    }

    pub fn origin(&self) -> Origin {
        let is_secure = self.0.scheme_str() == Some("https");
        let port = self.0.port_u16().unwrap_or(if is_secure { 443 } else { 80 });
        Origin { is_secure, host: self.0.host().unwrap_or_default().to_ascii_lowercase(), port }
    }

    /// Host and port, for messages.
    pub fn host(&self) -> &str {
        self.0.authority().map_or("", |authority| authority.as_str())
    }

    pub fn uri(&self) -> &Uri {
        &self.0
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without a path, `Uri` shows one.
        f.write_str(self.0.to_string().trim_end_matches('/'))
    }
}
