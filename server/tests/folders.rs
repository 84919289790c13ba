//! The folders of the sources.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

#[test]
fn imports_between_folders_go_down_in_the_table_of_the_documentation() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let text = fs::read_to_string(source.join("lib.rs")).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("//! | `")?.split(" | ").next()).enumerate();
    let ranks: HashMap<&str, usize> =
        rows.flat_map(|(rank, names)| names.split('`').step_by(2).map(move |name| (name, rank))).collect();
    let (mut places, mut imports) = (vec![source.clone()], 0);
    while let Some(place) = places.pop() {
        if place.is_dir() {
            places.extend(fs::read_dir(place).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let own = place.strip_prefix(&source).unwrap().iter().next().unwrap().to_str().unwrap();
        let own = own.trim_end_matches(".rs");
        if own == "lib" {
            continue;
        }
        let code = fs::read_to_string(&place).unwrap();
        for path in code.split("crate::").skip(1) {
            // One name, or a list of names.
            let names = path.strip_prefix('{').map_or_else(
                || path.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap(),
                |list| list.split('}').next().unwrap(),
            );
            for name in names.split(", ").filter(|name| ranks.contains_key(name)) {
                assert!(name == own || ranks[name] > ranks[own], "{}: {own} imports {name}", place.display());
                imports += 1;
            }
        }
    }
    assert!(imports > 80, "{imports}");
}
