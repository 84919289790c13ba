//! Rules for prose: the README stays short and true, tables name what exists, links lead somewhere, and no page or
//! file tells of the machine that it was written on.

use testkit::markdown;

use super::{File, Finding, Tree};
use crate::workspace;

/// Longest README, in lines.
const MAX_README_LINES: usize = 120;

/// Top-level folders that only exist on the machine of whoever wrote the file.
const MACHINE_FOLDERS: [&str; 3] = ["work", "root", "home"];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = readme(tree);
    for page in ["README.md", "ARCHITECTURE.md"] {
        findings.extend(tree.require(page).map_or_else(|missing| vec![missing], |file| crate_rows(tree, file)));
    }
    findings.extend(tree.crates().into_iter().filter_map(|name| example(tree, name)));
    findings.extend(tree.files.iter().flat_map(machine_paths));
    findings
        .extend(tree.files.iter().filter(|file| file.path.ends_with(".md")).flat_map(|file| dead_links(tree, file)));
    findings
}

fn readme(tree: &Tree) -> Vec<Finding> {
    // That it must exist is said where its table is checked.
    let Some(readme) = tree.get("README.md") else { return Vec::new() };
    let mut findings = Vec::new();
    let length = readme.text.lines().count();
    if length > MAX_README_LINES {
        findings.push(
            readme.finding(format!(
                "{length} lines, at most {MAX_README_LINES}; move detail to ARCHITECTURE.md or docs/"
            )),
        );
    }
    match (workspace::test_command(&readme.text), tree.require(".ci/run")) {
        (Err(problem), _) => findings.push(readme.finding(problem)),
        (_, Err(missing)) => findings.push(missing),
        (Ok(command), Ok(script)) if !script.text.lines().any(|line| line == command) => {
            findings.push(script.finding(format!("does not run the README's test command; add the line `{command}`")));
        }
        _ => {}
    }
    findings
}

/// The rows that begin with a folder, "| `kvblock/` |", name exactly the crates. Other folders may have rows too.
fn crate_rows(tree: &Tree, page: &File) -> Vec<Finding> {
    let rows = markdown::rows(&page.text);
    let folders = rows.iter().flat_map(|row| row.code(0).map(move |code| (row.index, code)));
    let named: Vec<(usize, &str)> =
        folders.filter_map(|(index, code)| Some((index, code.strip_suffix('/')?))).collect();
    let crates = tree.crates();
    let missing = crates.iter().filter(|name| !named.iter().any(|(_, named)| named == *name));
    let mut findings: Vec<Finding> = missing
        .map(|name| page.finding(format!("its crate table has no row for {name}; add one that begins | `{name}/` |")))
        .collect();
    for (index, name) in named {
        if !tree.files.iter().any(|file| file.path.starts_with(&format!("{name}/"))) {
            findings.push(page.at(index, format!("there is no folder {name}/; remove the row or mend its name")));
        }
    }
    findings
}

/// The docs of a crate open with an example that compiles: in `lib.rs`, or in the README that it includes.
fn example(tree: &Tree, name: &str) -> Option<Finding> {
    let lib = match tree.require(&format!("{name}/src/lib.rs")) {
        Ok(file) => file,
        Err(missing) => return Some(missing),
    };
    let docs = lib.text.lines().filter_map(|line| line.strip_prefix("//!")).map(str::trim);
    // Every second fence opens a block; only these words after it leave it an example.
    let compiles = |fence: &str| ["", "rust", "no_run", "should_panic"].contains(&fence);
    let mut fences = docs.filter_map(|line| line.strip_prefix("```")).step_by(2);
    if fences.any(compiles) {
        return None;
    }
    Some(lib.finding(
        "its docs have no example; show the first thing that a caller would write, in a ``` block that compiles",
    ))
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
            file.at(index, format!("a path of one machine, /{folder}/…; write it relative to the root"))
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
            if !tree.files.iter().any(|file| file.path == path || file.path.starts_with(&format!("{path}/"))) {
                findings.push(page.at(index, format!("links to {target}, which does not exist; mend the link")));
            }
        }
    }
    findings
}

/// A relative link as a path from the root.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::Package;

    fn tree(files: &[(&str, &str)]) -> Tree {
        let files = files.iter().map(|(path, text)| File::new(*path, *text)).collect();
        let packages = ["kvblock", "sched"].map(|name| Package { name: name.into(), dependencies: Vec::new() });
        Tree { files, packages: packages.to_vec() }
    }

    #[test]
    fn the_crate_table_names_exactly_the_crates() {
        let page = |text: &str| tree(&[("README.md", text), ("kvblock/src/lib.rs", ""), ("docs/a.md", "")]);
        let check = |text: &str| {
            let tree = page(text);
            crate_rows(&tree, &tree.files[0]).len()
        };
        assert_eq!(check("| `kvblock/` | a |\n| `docs/` | b |\n"), 1, "sched has no row");
        assert_eq!(check("| `kvblock/` | a |\n| `sched/` | b |\n"), 1, "there is no folder sched");
        assert_eq!(check("| feature | x |\n| `sched` | `kvblock/` |\n"), 2);
    }

    #[test]
    fn ci_runs_what_the_readme_says() {
        let text = "<!-- test-command -->\n```\ncargo test --workspace\n```\n";
        assert!(readme(&tree(&[("README.md", text), (".ci/run", "set -e\ncargo test --workspace\n")])).is_empty());
        assert_eq!(readme(&tree(&[("README.md", text), (".ci/run", "# cargo test --workspace\n")])).len(), 1);
        assert_eq!(readme(&tree(&[("README.md", text)])).len(), 1);
        assert_eq!(readme(&tree(&[("README.md", &"\n".repeat(121)), (".ci/run", "")])).len(), 2);
    }

    #[test]
    fn the_docs_of_a_crate_have_an_example() {
        let lib = |text: &str| example(&tree(&[("a/src/lib.rs", text)]), "a");
        assert!(lib("//! A.\n//! ```\n//! a::b();\n//! ```\n").is_none());
        assert!(lib("//! ```text\n//! picture\n//! ```\n//! ```no_run\n//! a();\n//! ```\n").is_none());
        assert!(lib("//! ```text\n//! picture\n//! ```\n").is_some());
        assert!(lib("//! ```ignore\n//! a();\n//! ```\n").is_some());
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        let lines = |text: &str| machine_paths(&File::new("a.md", text)).len();
        let path = |folder: &str| format!("/{folder}/x");
        assert_eq!(lines(&format!("see {}\n\"{}\"\n", path("home"), path("root"))), 2);
        assert_eq!(lines(&format!("https://a.example{} and art{}\n", path("home"), path("work"))), 0);
    }

    #[test]
    fn links_lead_to_files_and_folders() {
        let text = "[a](b.md) [c](../x/y.rs#z) [d](https://e.example) [f](#g) [h](../x) [i](gone.md)";
        let tree = tree(&[("docs/a.md", text), ("docs/b.md", ""), ("x/y.rs", "")]);
        let findings = dead_links(&tree, &tree.files[0]);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].message.starts_with("links to gone.md"));
    }
}
