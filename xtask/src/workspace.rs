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
    let paths = paths(git(root, &["ls-files", "-z", "--cached", "--others", "--exclude-standard"])?);
    // In an ignored folder of another repository, git succeeds and lists nothing.
    (!paths.is_empty()).then_some(paths)
}

/// Returns the paths of the files that differ from the commit at which the branch left `origin/main`, or from HEAD if there is no such
/// branch: committed or not, new ones that git does not ignore, and deleted ones.
///
/// # Errors
/// `root` is not part of a repository with a commit.
pub fn changed(root: &Path) -> Result<Vec<String>, String> {
    let base = git(root, &["merge-base", "HEAD", "origin/main"]).unwrap_or_else(|| "HEAD".to_owned());
    let tracked = git(root, &["diff", "--name-only", "--relative", "--no-renames", "-z", base.trim_end()]);
    let new = git(root, &["ls-files", "-z", "--others", "--exclude-standard"]);
    let lists = tracked.zip(new).ok_or("found no commit of git to compare with, expected one; pass --all")?;
    Ok(paths(lists.0 + &lists.1))
}

/// Returns what git prints, or `None` if it fails.
fn git(root: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).current_dir(root).output().ok()?;
    output.status.success().then(|| String::from_utf8(output.stdout).ok())?
}

fn paths(list: String) -> Vec<String> {
    list.split_terminator('\0').map(str::to_owned).collect()
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
