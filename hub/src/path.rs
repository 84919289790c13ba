//! Names of files in a repository. A name is checked once, here; every path in the cache is made of checked parts.

use std::fmt;
use std::path::{Path, PathBuf};

/// Longest name of a file with its folders, in bytes.
const MAX_BYTES: usize = 1024;
/// Longest part of a name, which is the limit of common file systems.
const MAX_PART_BYTES: usize = 255;

/// Name of a file in a repository: relative, its parts separated by `/`, none of them `.` or `..`.
///
/// ```
/// assert!(hub::RepoPath::parse("onnx/model.onnx").is_some());
/// assert!(hub::RepoPath::parse("../model.onnx").is_none());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RepoPath(String);

impl RepoPath {
    /// Checks a name. `None`: it is absolute or too long, has an empty part, `.` or `..`, or a character that is special on some
    /// system (`\`, `:`, control characters).
    pub fn parse(name: &str) -> Option<RepoPath> {
        let is_good = |part: &str| {
            !part.is_empty()
                && part != "."
                && part != ".."
                && part.len() <= MAX_PART_BYTES
                && !part.chars().any(|c| c.is_control() || matches!(c, '\\' | ':'))
        };
        (name.len() <= MAX_BYTES && name.split('/').all(is_good)).then(|| RepoPath(name.to_string()))
    }

    /// A name that is known to be good.
    pub(crate) fn known(name: &'static str) -> RepoPath {
        debug_assert!(RepoPath::parse(name).is_some(), "{name}");
        RepoPath(name.to_string())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Number of folders around the file.
    pub fn depth(&self) -> usize {
        self.0.matches('/').count()
    }

    /// The path of this file below `folder`.
    pub fn below(&self, folder: &Path) -> PathBuf {
        folder.join(&self.0)
    }
}

impl fmt::Display for RepoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
