//! `docs/configuration.md` lists every environment variable that the code reads, and no other.
//!
//! A variable is a string literal `"QUIRE_…"`. Those of flags, which are in the second column, are written from the command line by
//! `cli/tests/configuration.rs`.

use std::collections::{BTreeMap, BTreeSet};

use testkit::markdown;

use super::{File, Finding, Tree};

const PAGE: &str = "docs/configuration.md";
const PREFIX: &str = "QUIRE_";

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let page = match tree.require(PAGE) {
        Ok(page) => page,
        Err(missing) => return vec![missing],
    };
    let product = tree.files.iter().filter(|file| file.is_rust() && !["testkit", "xtask"].contains(&file.top()));
    let declared: BTreeSet<&str> = product.flat_map(variables).collect();
    let rows = markdown::rows(&page.text);
    let of_flags: BTreeSet<&str> = rows.iter().flat_map(|row| row.code(1)).collect();
    let codes = rows.iter().flat_map(|row| row.code(0).map(|code| (code, row.index)));
    let documented: BTreeMap<&str, usize> = codes.filter(|(code, _)| code.starts_with(PREFIX)).collect();
    let missing = declared.iter().filter(|name| !documented.contains_key(*name) && !of_flags.contains(*name));
    let missing = missing.map(|name| {
        page.finding(format!("found the variable `{name}` in the code, but in no table; add a row with its default"))
    });
    let gone = documented.iter().filter(|(name, _)| !declared.contains(*name));
    let gone = gone.map(|(name, index)| {
        page.at(*index, format!("found the variable `{name}`, which the code does not read; remove the row"))
    });
    missing.chain(gone).collect()
}

/// Names of environment variables that are whole string literals of a file.
fn variables(file: &File) -> impl Iterator<Item = &str> {
    let texts = file.text.split('"').skip(1);
    texts.filter(|text| {
        text.starts_with(PREFIX) && text.chars().all(|c| c.is_ascii_uppercase() || c == '_' || c.is_ascii_digit())
    })
}
