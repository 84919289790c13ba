//! What a user names: a model on the hub, possibly one GGUF file of it, and a revision.

use std::fmt;
use std::str::FromStr;

use crate::error::{HubError, shown};
use crate::path::RepoPath;

/// Longest `ORG/NAME` of the hub.
const MAX_BYTES: usize = 96;

/// A model on the hub, `ORG/NAME`, or a GGUF file of it, `ORG/NAME:FILE.gguf` or `ORG/NAME:Q4_K_M`.
///
/// ```
/// let model: hub::ModelId = "unsloth/Qwen3-0.6B-GGUF:Q4_K_M".parse()?;
/// assert_eq!((model.repo(), model.gguf()), ("unsloth/Qwen3-0.6B-GGUF", Some("Q4_K_M")));
/// assert!("../Qwen3-0.6B".parse::<hub::ModelId>().is_err());
/// # Ok::<(), hub::HubError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelId {
    repo: String,
    gguf: Option<String>,
}

impl ModelId {
    /// `ORG/NAME`.
    pub fn repo(&self) -> &str {
        &self.repo
    }

    /// Name of the GGUF file, or the quantisation in its name.
    pub fn gguf(&self) -> Option<&str> {
        self.gguf.as_deref()
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.gguf {
            Some(gguf) => write!(f, "{}:{gguf}", self.repo),
            None => f.write_str(&self.repo),
        }
    }
}

impl FromStr for ModelId {
    type Err = HubError;

    /// Checks the rules of the hub, with which `ORG--NAME` is unique.
    fn from_str(text: &str) -> Result<ModelId, HubError> {
        let (repo, gguf) = match text.split_once(':') {
            Some((repo, gguf)) => (repo, Some(gguf)),
            None => (text, None),
        };
        let is_good = |part: &str| {
            let edge = |c: char| c.is_ascii_alphanumeric() || c == '_';
            part.starts_with(edge)
                && part.ends_with(edge)
                && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
                && !part.contains("--")
                && !part.contains("..")
        };
        let is_id = repo.len() <= MAX_BYTES
            && !repo.ends_with(".git")
            && repo.split_once('/').is_some_and(|(org, name)| is_good(org) && is_good(name))
            && gguf.is_none_or(|gguf| RepoPath::parse(gguf).is_some());
        if !is_id {
            return Err(HubError::Id { found: shown(text) });
        }
        Ok(ModelId { repo: repo.to_string(), gguf: gguf.map(str::to_string) })
    }
}

/// A branch, a tag, a reference such as `refs/pr/1`, or a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision(RepoPath);

impl Revision {
    /// Name of the revision.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// The revision as a path below `refs/`.
    pub(crate) fn path(&self) -> &RepoPath {
        &self.0
    }

    /// The full hash of a commit, if this is one.
    pub(crate) fn commit(&self) -> Option<Commit> {
        Commit::parse(self.as_str())
    }
}

impl Default for Revision {
    fn default() -> Self {
        Revision(RepoPath::known("main"))
    }
}

impl FromStr for Revision {
    type Err = HubError;

    /// Checks the rules of git for names of references.
    fn from_str(text: &str) -> Result<Revision, HubError> {
        let is_good = !text.contains("..")
            && !text.starts_with('-')
            && !text.chars().any(|c| c.is_whitespace() || matches!(c, '~' | '^' | '?' | '*' | '['))
            && !text.split('/').any(|part| part.starts_with('.') || part.ends_with('.'));
        let path = RepoPath::parse(text).filter(|_| is_good);
        path.map(Revision).ok_or_else(|| HubError::Revision { found: shown(text) })
    }
}

/// Full hash of a commit: 40 lowercase hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Commit(String);

impl Commit {
    pub fn parse(text: &str) -> Option<Commit> {
        is_hex(text, 40).then(|| Commit(text.to_string()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether `text` consists of `len` lowercase hexadecimal digits.
pub(crate) fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}
