//! The crate graph: arrows point one way, and no crate reaches round another.

use super::{File, Finding, Tree};

/// Every crate, and which of ours it may depend on. A crate may only name crates above it, so there is no circle.
const HOUSE: [(&str, &[&str]); 9] = [
    ("kvblock", &[]),
    ("sched", &["kvblock"]),
    ("device", &[]),
    ("attention-kernels", &["device"]),
    ("models", &["device", "attention-kernels"]),
    ("sampling", &["device"]),
    ("engine", &["kvblock", "sched", "device", "attention-kernels", "models", "sampling"]),
    ("server", &["engine"]),
    ("xtask", &[]),
];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let crates = tree.crates();
    for name in &crates {
        let Some((_, allowed)) = HOUSE.iter().find(|(known, _)| known == name) else {
            let message = format!("the crate {name} is not in the house; add it to HOUSE in {} and to ARCHITECTURE.md", file!());
            findings.push(Finding { path: "Cargo.toml".to_owned(), line: None, message });
            continue;
        };
        match tree.require(&format!("{name}/Cargo.toml")) {
            Ok(manifest) => findings.extend(
                dependencies(manifest).filter(|(_, found)| crates.contains(found) && !allowed.contains(found)).map(|(index, found)| {
                    let may = if allowed.is_empty() { "none of ours".to_owned() } else { allowed.join(", ") };
                    manifest.at(index, format!("{name} depends on {found}, may depend on {may}; pass what is needed through its caller"))
                }),
            ),
            Err(missing) => findings.push(missing),
        }
    }
    findings
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
        let name = line.split(['.', ' ', '=']).next().filter(|name| inside && !name.is_empty() && !name.starts_with('#'))?;
        Some((index, name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arrows_of_the_house_point_one_way() {
        for (index, (name, allowed)) in HOUSE.iter().enumerate() {
            for target in *allowed {
                assert!(HOUSE[..index].iter().any(|(above, _)| above == target), "{name} names {target}, which is not above it");
            }
        }
    }

    #[test]
    fn an_arrow_that_is_not_allowed_is_found_in_each_spelling() {
        let root = File::new("Cargo.toml", "[workspace]\nmembers = [\"kvblock\", \"sched\"]\n");
        let sched = File::new("sched/Cargo.toml", "[dependencies]\nkvblock.workspace = true\nserde = \"1\"\n");
        let tree = |kvblock: &str| Tree { files: vec![root.clone(), sched.clone(), File::new("kvblock/Cargo.toml", kvblock)] };
        for bad in [
            "[dependencies]\nsched.workspace = true\n",
            "[dependencies]\nsched = { path = \"../sched\" }\n",
            "[target.'cfg(unix)'.dependencies]\nsched = \"1\"\n",
            "[dependencies.sched]\nworkspace = true\n",
        ] {
            let findings = check(&tree(bad));
            assert_eq!(findings.len(), 1, "{bad}: {findings:?}");
            assert!(findings[0].message.starts_with("kvblock depends on sched, may depend on none of ours"));
        }
        assert!(
            check(&tree("[package]\nname = \"sched\"\n[dependencies]\nserde = \"1\"\n[dev-dependencies]\nsched.workspace = true\n"))
                .is_empty()
        );
    }

    #[test]
    fn a_crate_that_nobody_knows_is_found() {
        let tree = Tree { files: vec![File::new("Cargo.toml", "[workspace]\nmembers = [\"utils\"]\n")] };
        assert!(check(&tree)[0].message.starts_with("the crate utils is not in the house"));
    }
}
