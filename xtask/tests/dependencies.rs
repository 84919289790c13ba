//! `deny.toml` without cargo-deny: the licences and sources of every dependency on this system, from `cargo metadata`.

use serde_json::Value;
use testkit::workspace;
use xtask::cargo;

/// Returns whether an SPDX expression can be met with these licences. `AND` binds more tightly than `OR`; the older `/` means `OR`.
fn is_met(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    // "Apache-2.0 WITH LLVM-exception" is one licence.
    let joined = spaced.replace(" WITH ", "+WITH+");
    let mut words = joined.split_whitespace().peekable();
    let met = either(&mut words, allowed);
    assert_eq!(words.next(), None, "{expression}");
    met
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn either(words: &mut Words<'_>, allowed: &[String]) -> bool {
    let mut met = both(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        met |= both(words, allowed);
    }
    met
}

fn both(words: &mut Words<'_>, allowed: &[String]) -> bool {
    let mut met = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        met &= one(words, allowed);
    }
    met
}

fn one(words: &mut Words<'_>, allowed: &[String]) -> bool {
    match words.next().unwrap() {
        "(" => {
            let met = either(words, allowed);
            assert_eq!(words.next(), Some(")"));
            met
        }
        name => allowed.iter().any(|allowed| allowed == name),
    }
}

fn strings(value: &toml::Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

#[test]
fn every_dependency_has_a_licence_that_deny_toml_allows_and_comes_from_an_allowed_registry() {
    let root = workspace::root();
    let deny: toml::Table = std::fs::read_to_string(root.join("deny.toml")).unwrap().parse().unwrap();
    let (allowed, registries) = (strings(&deny["licenses"]["allow"]), strings(&deny["sources"]["allow-registry"]));
    // Crates for other systems are not on this machine after a build.
    let command = ["metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", "host-tuple"];
    let text = cargo::run(&root, &command).unwrap();
    let metadata: Value = serde_json::from_str(&text).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 100, "{} packages", packages.len());
    for package in packages.iter().filter(|package| !package["source"].is_null()) {
        let (name, licence) = (&package["name"], package["license"].as_str().unwrap_or("none stated"));
        assert!(
            is_met(licence, &allowed),
            "{name}: found the licence {licence}, expected one of {allowed:?}; allow it in deny.toml, or remove the crate"
        );
        let source = package["source"].as_str().unwrap();
        assert!(registries.iter().any(|url| source == format!("registry+{url}")), "{name} comes from {source}");
    }
    // Every allowed licence is that of some crate.
    let named =
        |licence: &String| packages.iter().any(|package| package["license"].as_str().unwrap().contains(&licence[..]));
    assert!(allowed.iter().all(named), "{allowed:?}");
}

#[test]
fn an_expression_is_met_by_either_side_of_or_and_both_sides_of_and() {
    let allowed = ["MIT", "Apache-2.0"].map(str::to_owned);
    for met in ["MIT", "GPL-3.0 OR MIT", "MIT/GPL-3.0", "MIT AND Apache-2.0", "(GPL-3.0 OR MIT) AND Apache-2.0"] {
        assert!(is_met(met, &allowed), "{met}");
    }
    let unmet = ["GPL-3.0", "MIT AND GPL-3.0", "MIT AND (GPL-3.0 OR ISC)", "Apache-2.0 WITH LLVM-exception", "MITx"];
    for unmet in unmet {
        assert!(!is_met(unmet, &allowed), "{unmet}");
    }
}
