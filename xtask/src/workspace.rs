//! The files of the workspace.

use std::path::Path;
use std::process::Command;

/// Returns the paths of all files relative to `root`, with `/` between folders, sorted: those that git tracks, and new files that it
/// does not ignore. Without git, returns all files outside of `target/` and `.git/`.
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
    let args = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").args(args).current_dir(root).output().ok()?;
    let paths: Vec<String> = String::from_utf8(output.stdout).ok()?.split_terminator('\0').map(str::to_owned).collect();
    // In an ignored folder of another repository, git succeeds and lists nothing.
    (output.status.success() && !paths.is_empty()).then_some(paths)
}

/// Adds the files below a folder to `found`, without build output and the files of git.
pub fn walk(root: &Path, folder: &str, found: &mut Vec<String>) {
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
