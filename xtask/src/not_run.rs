//! Tests that could not run on this machine: named at once, and counted when a run of CI ends.
//!
//! The test harness shows what a passing test prints to nobody. So the line goes to standard error past the harness, and
//! stays in a file under `target/not-run/` until CI's summary has counted it.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::{kernels, workspace};

/// Says that the calling test, or a part of it, can not run here, and why. The line begins with `NOT RUN:`.
pub fn report(reason: &str) {
    let thread = std::thread::current();
    // The harness runs each test on a thread of its name.
    let line = format!("NOT RUN: {}: {}", thread.name().unwrap_or("a test"), reason.replace('\n', " "));
    let mut errors = std::io::stderr().lock();
    // Where nobody listens there is nobody to tell.
    let _ = writeln!(errors, "{line}");
    let folder = folder(&workspace::root());
    let name: String = line.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(180).collect();
    if let Err(error) = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(folder.join(name), &line)) {
        let _ = writeln!(errors, "NOT RUN: and it will not be counted: {}: {error}", folder.display());
    }
}

/// Forgets what earlier runs could not run.
///
/// # Errors
/// The folder could not be removed.
pub fn clear(root: &Path) -> Result<(), String> {
    let folder = folder(root);
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(format!("{}: {error}", folder.display())),
        _ => Ok(()),
    }
}

/// The lines since the last [`clear`], in order.
pub fn lines(root: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder(root)).into_iter().flatten().flatten();
    let mut lines: Vec<String> = entries.filter_map(|entry| std::fs::read_to_string(entry.path()).ok()).collect();
    lines.sort();
    lines
}

fn folder(root: &Path) -> PathBuf {
    kernels::target(root).join("not-run")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_run_is_named_and_kept_for_the_summary() {
        report("for the sake of the test of this");
        let expected = "NOT RUN: not_run::tests::what_could_not_run_is_named_and_kept_for_the_summary: for the sake of the test of this";
        let all = lines(&workspace::root());
        assert!(all.iter().any(|line| line == expected), "{all:?}");
        let own = std::fs::read_dir(folder(&workspace::root())).unwrap().flatten();
        // It did run.
        own.filter(|entry| std::fs::read_to_string(entry.path()).is_ok_and(|line| line == expected))
            .for_each(|entry| std::fs::remove_file(entry.path()).unwrap());
    }
}
