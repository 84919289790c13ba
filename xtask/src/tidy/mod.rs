//! `cargo xtask tidy`: rules of the workspace that no compiler checks. Every message says what was found, what was expected and
//! what to do.
//!
//! The tree is read into memory once. Each check is a pure function from a [`Tree`] to [`Finding`]s, in a file of its own. All
//! together take a few seconds. They also run as a test of this crate.

mod configuration;
mod docs;
mod graph;
mod named_tests;
mod rust;
mod skips;
mod tokens;
mod untested;

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use crate::workspace;
pub(crate) use graph::packages;
pub use graph::{Dependency, Package};

/// A text file of the tree.
#[derive(Clone, Debug)]
pub struct File {
    /// Path from the root, with `/` between folders.
    pub path: String,
    /// Contents.
    pub text: String,
}

impl File {
    /// Makes a file with this path and these contents.
    pub fn new(path: impl Into<String>, text: impl Into<String>) -> File {
        File { path: path.into(), text: text.into() }
    }

    /// Returns whether the name ends in `.rs`.
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Returns the top-level folder.
    fn top(&self) -> &str {
        self.path.split('/').next().unwrap_or_default()
    }

    /// Returns whether the file is compiled into a library or a binary, or runs before: `<crate>/src/` and `<crate>/build.rs`.
    fn is_source(&self) -> bool {
        let rest = self.path.strip_prefix(self.top());
        self.is_rust() && rest.is_some_and(|rest| rest.starts_with("/src/") || rest == "/build.rs")
    }

    /// Makes a finding about the whole file.
    fn finding(&self, message: impl Into<String>) -> Finding {
        Finding { path: self.path.clone(), line: None, message: message.into() }
    }

    /// Makes a finding about the line with this index, counted from 0.
    fn at(&self, index: usize, message: impl Into<String>) -> Finding {
        Finding { path: self.path.clone(), line: Some(index + 1), message: message.into() }
    }
}

/// The text files and crates of the workspace.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    /// In order of their paths.
    pub files: Vec<File>,
    /// Crates of the workspace.
    pub packages: Vec<Package>,
}

impl Tree {
    /// Reads the files under `root` that are UTF-8, and the crates from `cargo metadata`.
    ///
    /// # Errors
    /// One line: cargo does not start, or a manifest is wrong.
    pub fn read(root: &Path) -> Result<Tree, String> {
        let read = |path: String| std::fs::read_to_string(root.join(&path)).ok().map(|text| File { path, text });
        let files = workspace::files(root).into_iter().filter_map(read).collect();
        Ok(Tree { files, packages: graph::packages(root)? })
    }

    /// Returns everything that is wrong, in order of path and line.
    pub fn findings(&self) -> Vec<Finding> {
        let functions = skips::functions(self);
        let mut findings =
            [rust::check, graph::check, docs::check, configuration::check].map(|check| check(self)).concat();
        findings.extend(named_tests::check(self, &functions));
        findings.extend(untested::check(self, &functions));
        findings.extend(skips::check(self, &functions));
        findings.sort_by(|a, b| (&a.path, a.line).cmp(&(&b.path, b.line)));
        findings
    }

    /// Returns the tests of the sources and of pages that are not among `tests`: packages, and the last parts of the names of their
    /// tests.
    pub fn findings_about_tests(&self, tests: &BTreeSet<(String, String)>) -> Vec<Finding> {
        let names: BTreeSet<&str> = tests.iter().map(|(_, name)| name.as_str()).collect();
        [named_tests::against(self, &names), untested::unlisted(self, tests)].concat()
    }

    fn get(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    /// Returns the file, or a finding that it is missing.
    fn require(&self, path: &str) -> Result<&File, Finding> {
        let message = "found no such file, expected one, because tidy checks it; add it".to_owned();
        self.get(path).ok_or_else(|| Finding { path: path.to_owned(), line: None, message })
    }

    fn has_folder(&self, path: &str) -> bool {
        self.files.iter().any(|file| file.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('/')))
    }

    /// Returns the names of the workspace's crates. Each is in the folder of its name.
    fn crates(&self) -> Vec<&str> {
        self.packages.iter().map(|package| package.name.as_str()).collect()
    }
}

/// Something that is wrong, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Path of the file from the root.
    pub path: String,
    /// Line, counted from 1; `None` for the whole file.
    pub line: Option<usize>,
    /// What was found, what was expected, and what to do.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.path, self.message),
            None => write!(f, "{}: {}", self.path, self.message),
        }
    }
}

/// Prints the findings about the tree under `root`.
///
/// # Errors
/// The number of findings, if there are any.
pub fn run(root: &Path) -> Result<(), String> {
    let tree = Tree::read(root)?;
    print(&tree.findings())?;
    println!("tidy: {} files, no findings", tree.files.len());
    Ok(())
}

/// Prints findings.
///
/// # Errors
/// Their number, if there are any.
pub(crate) fn print(findings: &[Finding]) -> Result<(), String> {
    findings.iter().for_each(|finding| println!("{finding}"));
    match findings.len() {
        0 => Ok(()),
        count => Err(format!("findings: {count}; each line above says what to do")),
    }
}
