//! Which files belong to the workspace, and what its README says.

use std::path::Path;
use std::process::Command;

/// The line before the fenced block of the README that holds the test command.
pub const TEST_COMMAND_MARK: &str = "<!-- test-command -->";

/// Paths of all files of the tree relative to `root`, with `/` between folders, sorted. As git sees them (new files
/// too, ignored ones not); without git, all files outside of `target/` and `.git/`.
pub fn files(root: &Path) -> Vec<String> {
    let mut paths = from_git(root).unwrap_or_else(|| {
        let mut found = Vec::new();
        walk(root, "", &mut found);
        found
    });
    paths.retain(|path| root.join(path).is_file());
    paths.sort();
    paths
}

fn from_git(root: &Path) -> Option<Vec<String>> {
    // Inside the folder of another repository git answers too, with no files.
    let args = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").args(args).current_dir(root).output().ok()?;
    let paths: Vec<String> = String::from_utf8(output.stdout).ok()?.split_terminator('\0').map(str::to_owned).collect();
    (output.status.success() && !paths.is_empty()).then_some(paths)
}

fn walk(root: &Path, folder: &str, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && name != "target" && name != ".git" => walk(root, &path, found),
            Ok(kind) if kind.is_file() => found.push(path),
            _ => {}
        }
    }
}

/// The test command that a README states: the line that begins `cargo test --workspace` in the first fenced block
/// behind [`TEST_COMMAND_MARK`].
///
/// # Errors
/// Says what the README lacks.
pub fn test_command(readme: &str) -> Result<String, String> {
    let behind = readme.split_once(TEST_COMMAND_MARK).map(|(_, rest)| rest);
    let block = behind.and_then(|rest| rest.split("```").nth(1));
    let line =
        block.and_then(|block| block.lines().map(str::trim).find(|line| line.starts_with("cargo test --workspace")));
    line.map(str::to_owned).ok_or_else(|| {
        format!("README.md: no line `cargo test --workspace` in a fenced block after {TEST_COMMAND_MARK}; add both, CI runs what the README says")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_command_is_the_line_of_the_block_behind_the_mark() {
        let readme = "# Q\n```\ncargo test --workspace --no\n```\n<!-- test-command -->\n```sh\ncd x\ncargo test --workspace\n```\n";
        assert_eq!(test_command(readme).as_deref(), Ok("cargo test --workspace"));
        assert!(test_command("```\ncargo test --workspace\n```").is_err());
        assert!(test_command("<!-- test-command -->\n```\ncargo run\n```\ncargo test --workspace\n").is_err());
    }

    #[test]
    fn without_git_the_walk_finds_this_file_and_no_build_output() {
        let mut found = Vec::new();
        walk(&testkit::workspace::root(), "", &mut found);
        assert!(found.iter().any(|path| path == "xtask/src/workspace.rs"));
        assert!(!found.iter().any(|path| path.starts_with("target/") || path.starts_with(".git/")));
    }
}
