//! The hash that the hub states for a file, and the computation of the same hash over a download.

use std::fmt::{self, Write};

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::id::is_hex;

/// Hash of a file's contents, which is also the name of its blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Etag {
    /// SHA-256 of the contents: a large file.
    Sha256(String),
    /// Hash of git's blob object, SHA-1 of `blob SIZE\0` and the contents: a small file.
    Git(String),
}

impl Etag {
    /// The value of an `ETag` or `X-Linked-Etag` header. `None`: it is no such hash, so nothing could be verified with it.
    pub fn parse(header: &str) -> Option<Etag> {
        let text = header.trim();
        let text = text.strip_prefix("W/").unwrap_or(text);
        let text = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(text);
        match text.len() {
            64 if is_hex(text, 64) => Some(Etag::Sha256(text.to_string())),
            40 if is_hex(text, 40) => Some(Etag::Git(text.to_string())),
            _ => None,
        }
    }

    pub fn as_str(&self) -> &str {
        match self {
            Etag::Sha256(hex) | Etag::Git(hex) => hex,
        }
    }

    /// A hasher for contents of `size` bytes.
    pub fn hasher(&self, size: u64) -> Hasher {
        match self {
            Etag::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Etag::Git(_) => Hasher::Git(Sha1::new_with_prefix(format!("blob {size}\0"))),
        }
    }
}

impl fmt::Display for Etag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The state of one of the two hashes.
pub(crate) enum Hasher {
    Sha256(Sha256),
    Git(Sha1),
}

impl Hasher {
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hasher) => hasher.update(bytes),
            Hasher::Git(hasher) => hasher.update(bytes),
        }
    }

    /// The hash in hexadecimal digits.
    pub fn finish(self) -> String {
        match self {
            Hasher::Sha256(hasher) => hex(&hasher.finalize()),
            Hasher::Git(hasher) => hex(&hasher.finalize()),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
