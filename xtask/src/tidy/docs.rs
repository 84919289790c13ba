//! Rules for pages: the README is short, tables and links name what exists, the docs of a crate have an example, and no
//! file names a path of the machine that it was written on.

use testkit::markdown;

use super::{File, Finding, Tree};

/// Longest README, in lines.
const MAX_README_LINES: usize = 120;

/// Top-level folders that exist only on the machine of the author.
const MACHINE_FOLDERS: [&str; 3] = ["work", "root", "home"];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings: Vec<Finding> = readme(tree).into_iter().collect();
    for page in ["README.md", "ARCHITECTURE.md"] {
        findings.extend(tree.require(page).map_or_else(|missing| vec![missing], |file| crate_rows(tree, file)));
    }
    findings.extend(tree.crates().into_iter().filter_map(|name| example(tree, name)));
    findings.extend(tree.files.iter().flat_map(machine_paths));
    let pages = tree.files.iter().filter(|file| file.path.ends_with(".md"));
    findings.extend(pages.flat_map(|file| dead_links(tree, file)));
    findings
}

fn readme(tree: &Tree) -> Option<Finding> {
    let readme = tree.get("README.md")?;
    let length = readme.text.lines().count();
    (length > MAX_README_LINES).then(|| {
        readme.finding(format!(
            "found {length} lines, expected at most {MAX_README_LINES}; move detail to ARCHITECTURE.md or docs/"
        ))
    })
}

/// The rows that begin with folders, "| `kvblock/` |", name every crate, and no folder that does not exist.
fn crate_rows(tree: &Tree, page: &File) -> Vec<Finding> {
    let rows = markdown::rows(&page.text);
    let folders = rows.iter().flat_map(|row| row.code(0).map(move |code| (row.index, code)));
    let named: Vec<(usize, &str)> =
        folders.filter_map(|(index, code)| Some((index, code.strip_suffix('/')?))).collect();
    let crates = tree.crates();
    let missing = crates.iter().filter(|name| !named.iter().any(|(_, named)| named == *name));
    let missing = missing
        .map(|name| page.finding(format!("found no row for the crate {name}; add one that begins | `{name}/` |")));
    let gone = named.iter().filter(|(_, name)| !tree.has_folder(name));
    let gone = gone.map(|(index, name)| {
        page.at(*index, format!("found `{name}/` in a table, but no such folder; correct or remove the row"))
    });
    missing.chain(gone).collect()
}

/// The docs in a crate's `lib.rs` have an example that is compiled.
fn example(tree: &Tree, name: &str) -> Option<Finding> {
    let lib = match tree.require(&format!("{name}/src/lib.rs")) {
        Ok(file) => file,
        Err(missing) => return Some(missing),
    };
    let docs = lib.text.lines().filter_map(|line| line.strip_prefix("//!")).map(str::trim);
    // Every second fence opens a block. Blocks with other words than these are not compiled.
    let is_compiled = |fence: &str| ["", "rust", "no_run", "should_panic"].contains(&fence);
    let mut fences = docs.filter_map(|line| line.strip_prefix("```")).step_by(2);
    let message =
        "found no example in the docs of the crate; show the first call of a user in a ``` block that compiles";
    (!fences.any(is_compiled)).then(|| lib.finding(message))
}

fn machine_paths(file: &File) -> Vec<Finding> {
    let found = |line: &str| {
        MACHINE_FOLDERS.into_iter().find(|folder| {
            let path = format!("/{folder}/");
            line.match_indices(&path)
                .any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "_.-}/".contains(c)))
        })
    };
    let lines = file.text.lines().enumerate().filter_map(|(index, line)| Some((index, found(line)?)));
    lines
        .map(|(index, folder)| {
            file.at(index, format!("found /{folder}/…, a path of one machine; write it relative to the root"))
        })
        .collect()
}

/// Links to files that do not exist.
fn dead_links(tree: &Tree, page: &File) -> Vec<Finding> {
    let folder = page.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut findings = Vec::new();
    for (index, line) in page.text.lines().enumerate() {
        for target in line.split("](").skip(1).filter_map(|rest| rest.split([')', '#', ' ']).next()) {
            if target.is_empty() || target.contains(':') {
                continue;
            }
            let path = resolve(folder, target);
            if tree.get(&path).is_none() && !tree.has_folder(&path) {
                findings
                    .push(page.at(index, format!("found a link to {target}, which does not exist; correct the link")));
            }
        }
    }
    findings
}

/// Returns a relative link as a path from the root.
fn resolve(folder: &str, target: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}
