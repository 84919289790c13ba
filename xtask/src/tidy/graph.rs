//! The crate graph is the one that ARCHITECTURE.md shows: arrows point one way, and no crate reaches round another.
//!
//! The last column of its crate table is compared with the manifests, both ways: backticked crates, or "all of the
//! above", or no crate of ours.

use super::markdown;
use super::{File, Finding, Tree};

const PAGE: &str = "ARCHITECTURE.md";

/// A row of the crate table.
struct Room<'a> {
    /// Index of its line.
    index: usize,
    name: &'a str,
    uses: Vec<&'a str>,
}

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    // That the page must exist, and which rows it must have, is said where the other tables of crates are checked.
    let Some(page) = tree.get(PAGE) else { return Vec::new() };
    let crates = tree.crates();
    let house = house(page, &crates);
    let mut findings = Vec::new();
    for (position, room) in house.iter().enumerate() {
        let name = room.name;
        let upward = room.uses.iter().filter(|used| !house[..position].iter().any(|above| above.name == **used));
        findings.extend(upward.map(|used| {
            page.at(
                room.index,
                format!("{name} uses {used}, which is not above it; turn the arrow round, or order the rows"),
            )
        }));
        let manifest = match tree.require(&format!("{name}/Cargo.toml")) {
            Ok(manifest) => manifest,
            Err(missing) => {
                findings.push(missing);
                continue;
            }
        };
        let found: Vec<(usize, &str)> = dependencies(manifest).filter(|(_, found)| crates.contains(found)).collect();
        for (index, used) in found.iter().filter(|(_, used)| !room.uses.contains(used)) {
            let message = format!(
                "{name} depends on {used}, which {PAGE} does not show; let its caller pass what it needs, or draw the arrow there"
            );
            findings.push(manifest.at(*index, message));
        }
        for used in room.uses.iter().filter(|used| !found.iter().any(|(_, found)| found == *used)) {
            findings.push(page.at(room.index, format!("{name} does not depend on {used}; take it out of the row")));
        }
    }
    findings
}

/// The crate table of the page.
fn house<'a>(page: &'a File, crates: &[&str]) -> Vec<Room<'a>> {
    let mut house: Vec<Room<'a>> = Vec::new();
    for row in markdown::rows(&page.text) {
        let Some(name) =
            row.code(0).next().and_then(|folder| folder.strip_suffix('/')).filter(|name| crates.contains(name))
        else {
            continue;
        };
        let uses = match row.cells.last() {
            Some(cell) if cell.contains("all of the above") => house.iter().map(|above| above.name).collect(),
            _ => row.code(row.cells.len() - 1).filter(|name| crates.contains(name)).collect(),
        };
        house.push(Room { index: row.index, name, uses });
    }
    house
}

/// Names under `[dependencies]` (of any target, not of tests and build scripts), with the index of the line.
fn dependencies(manifest: &File) -> impl Iterator<Item = (usize, &str)> {
    let mut inside = false;
    manifest.text.lines().enumerate().filter_map(move |(index, line)| {
        let line = line.trim();
        if let Some(section) = line.strip_prefix('[') {
            // `[dependencies]`, or `[dependencies.name]`, perhaps behind a target.
            let mut parts = section.trim_end_matches(']').rsplit('.');
            let (last, before) = (parts.next()?, parts.next());
            inside = last == "dependencies";
            return (before == Some("dependencies")).then_some((index, last));
        }
        let name =
            line.split(['.', ' ', '=']).next().filter(|name| inside && !name.is_empty() && !name.starts_with('#'))?;
        Some((index, name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_TEXT: &str = "| `kvblock/` | a `sched` | nothing of ours |\n| `sched/` | b | `kvblock` |\n| `engine/` | c | all of the above |\n";

    /// What is found with these manifests of kvblock and engine; sched uses kvblock.
    fn messages(page: &str, kvblock: &str, engine: &str) -> Vec<String> {
        let files = [
            ("Cargo.toml", "[workspace]\nmembers = [\"kvblock\", \"sched\", \"engine\"]\n"),
            ("kvblock/Cargo.toml", kvblock),
            ("sched/Cargo.toml", "[dependencies]\nkvblock.workspace = true\nserde = \"1\"\n"),
            ("engine/Cargo.toml", engine),
            (PAGE, page),
        ];
        let tree = Tree { files: files.map(|(path, text)| File::new(path, text)).to_vec() };
        check(&tree).iter().map(ToString::to_string).collect()
    }

    const ENGINE: &str = "[dependencies]\nkvblock.workspace = true\nsched = { workspace = true }\n";

    #[test]
    fn a_graph_as_the_page_shows_it_is_good() {
        let kvblock =
            "[package]\nname = \"sched\"\n[dependencies]\nserde = \"1\"\n[dev-dependencies]\nsched.workspace = true\n";
        assert_eq!(messages(PAGE_TEXT, kvblock, ENGINE), [""; 0]);
    }

    #[test]
    fn an_arrow_that_is_not_shown_is_found_in_each_spelling() {
        for bad in [
            "[dependencies]\nsched.workspace = true\n",
            "[dependencies]\nsched = { path = \"../sched\" }\n",
            "[target.'cfg(unix)'.dependencies]\nsched = \"1\"\n",
            "[dependencies.sched]\nworkspace = true\n",
        ] {
            let found = messages(PAGE_TEXT, bad, ENGINE);
            assert!(
                matches!(&found[..], [one] if one.contains("kvblock depends on sched, which ARCHITECTURE.md does not show")),
                "{bad}: {found:?}"
            );
        }
    }

    #[test]
    fn an_arrow_that_is_shown_must_exist_and_point_upward() {
        let found = messages(PAGE_TEXT, "", "[dependencies]\nsched.workspace = true\n");
        assert!(found[0].starts_with("ARCHITECTURE.md:3: engine does not depend on kvblock"), "{found:?}");
        let circle = PAGE_TEXT.replace("nothing of ours", "`sched`");
        let found = messages(&circle, "[dependencies]\nsched.workspace = true\n", ENGINE);
        assert!(found[0].starts_with("ARCHITECTURE.md:1: kvblock uses sched, which is not above it"), "{found:?}");
    }
}
