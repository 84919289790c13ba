//! Settings of downloads, which come from the variables that other tools of the hub read.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{HubError, shown};
use crate::id::Revision;
use crate::url::Url;

/// Longest token, and largest file of one, in bytes.
const MAX_TOKEN_BYTES: usize = 4096;

/// Longer than the hash of a large file takes, during which nothing is written.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Where and how models are fetched.
#[derive(Clone, Debug)]
pub struct Options {
    /// Revision to fetch.
    pub revision: Revision,
    /// Folder of the cache (`HF_HUB_CACHE`, `HF_HOME`). `None`: there is not even a home folder.
    pub cache: Option<PathBuf>,
    /// Sent to the endpoint, never to another host.
    pub token: Option<Token>,
    /// Uses only the cache (`HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE`).
    pub offline: bool,
    /// Moves files into the snapshot instead of linking them (`HF_HUB_DISABLE_SYMLINKS`).
    pub no_symlinks: bool,
    /// Longest wait for the answer to a request for metadata (`HF_HUB_ETAG_TIMEOUT`).
    pub metadata_timeout: Duration,
    /// Longest pause of a transfer (`HF_HUB_DOWNLOAD_TIMEOUT`).
    pub read_timeout: Duration,
    /// Number of files that are downloaded at once.
    pub connections: usize,
    /// Pause before the first repetition of a failed request; it doubles each time.
    pub retry_delay: Duration,
    /// Longest wait for a file that another process downloads without writing anything.
    pub lock_timeout: Duration,
    /// File of certificates that replaces the built-in ones (`SSL_CERT_FILE`, `REQUESTS_CA_BUNDLE`).
    pub certificates: Option<PathBuf>,
    pub(crate) endpoint: Url,
}

impl Options {
    /// Reads the settings with `variable`, which looks up an environment variable.
    ///
    /// # Errors
    /// A variable has an invalid value.
    pub fn from_env(variable: &dyn Fn(&str) -> Option<String>) -> Result<Options, HubError> {
        let value = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let is_on = |name: &str| value(name).is_some_and(|value| is_true(&value));
        let folder = |name: &str| value(name).map(|path| expand(&path, variable));
        let caches = || folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
        let home = folder("HF_HOME").or_else(|| Some(caches()?.join("huggingface")));
        let cache = folder("HF_HUB_CACHE").or_else(|| folder("HUGGINGFACE_HUB_CACHE"));
        let seconds = |name: &'static str, default: u64| match value(name) {
            None => Ok(Duration::from_secs(default)),
            Some(text) => {
                text.trim().parse().ok().filter(|s| *s > 0.0 && *s <= 86400.0).map(Duration::from_secs_f64).ok_or(
                    HubError::Setting {
                        name,
                        problem: format!("found {:?}, expected seconds from 0 to 86400", shown(&text)),
                    },
                )
            }
        };
        let endpoint = value("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
        let token = if is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            None
        } else {
            let file = || folder("HF_TOKEN_PATH").or_else(|| Some(home.as_ref()?.join("token")));
            let named = |name: &'static str| value(name).map(|text| (name, text));
            let found = named("HF_TOKEN").or_else(|| named("HUGGING_FACE_HUB_TOKEN")).or_else(|| read_token(&file()?));
            found.map(|(name, text)| Token::named(name, &text)).transpose()?.flatten()
        };
        Ok(Options {
            revision: Revision::default(),
            cache: cache.or_else(|| Some(home.as_ref()?.join("hub"))),
            token,
            offline: is_on("HF_HUB_OFFLINE") || is_on("TRANSFORMERS_OFFLINE"),
            no_symlinks: is_on("HF_HUB_DISABLE_SYMLINKS"),
            metadata_timeout: seconds("HF_HUB_ETAG_TIMEOUT", 10)?,
            read_timeout: seconds("HF_HUB_DOWNLOAD_TIMEOUT", 10)?,
            connections: 4,
            retry_delay: Duration::from_millis(500),
            lock_timeout: LOCK_TIMEOUT,
            certificates: folder("SSL_CERT_FILE").or_else(|| folder("REQUESTS_CA_BUNDLE")),
            endpoint: Url::endpoint(&endpoint)?,
        })
    }
}

/// An access token. It is shown nowhere.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Checks a token of the flag `--hf-token`.
    ///
    /// # Errors
    /// It is empty or has characters that no header can hold. The message does not contain it.
    pub fn new(text: &str) -> Result<Token, HubError> {
        let empty = || HubError::Setting { name: "--hf-token", problem: "found nothing, expected a token".to_string() };
        Token::named("--hf-token", text)?.ok_or_else(empty)
    }

    fn named(name: &'static str, text: &str) -> Result<Option<Token>, HubError> {
        let text = text.trim();
        if text.len() > MAX_TOKEN_BYTES || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            let problem = "found characters that no token has, expected one such as hf_... (not shown)".to_string();
            return Err(HubError::Setting { name, problem });
        }
        Ok((!text.is_empty()).then(|| Token(text.to_string())))
    }

    /// The value of the header `Authorization`.
    pub(crate) fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(not shown)")
    }
}

/// The token in the file that `hf auth login` writes. A file that cannot be read counts as absent, as in other tools.
fn read_token(path: &Path) -> Option<(&'static str, String)> {
    let size = fs::metadata(path).ok()?.len();
    let text = (size <= MAX_TOKEN_BYTES as u64).then(|| fs::read_to_string(path).ok())??;
    Some(("HF_TOKEN_PATH", text))
}

fn is_true(value: &str) -> bool {
    ["1", "ON", "YES", "TRUE"].contains(&value.trim().to_ascii_uppercase().as_str())
}

/// Replaces a leading `~`, `$NAME` and `${NAME}`. What is not set stays as it is.
fn expand(path: &str, variable: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    let mut rest = path;
    let mut expanded = String::new();
    if let Some(after) = path.strip_prefix('~').filter(|after| after.is_empty() || after.starts_with('/')) {
        expanded.push_str(&variable("HOME").unwrap_or_else(|| "~".to_string()));
        rest = after;
    }
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let braced = after.strip_prefix('{').and_then(|inner| inner.split_once('}'));
        let (name, behind) =
            braced.unwrap_or_else(|| after.split_at(after.find(|c| !is_part(c)).unwrap_or(after.len())));
        let end = after.len() - behind.len();
        match variable(name) {
            Some(value) => expanded.push_str(&value),
            None => expanded.extend(["$", &after[..end]]),
        }
        rest = behind;
    }
    expanded.push_str(rest);
    expanded.into()
}
