//! The crate graph and the crate table of ARCHITECTURE.md.

use super::about_these;
use xtask::tidy::{Dependency, File, Package, Tree};

const PAGE: &str = "| `kvblock/` | a `sched` | nothing of ours |\n| `sched/` | b | `kvblock` |\n| `engine/` | c | all of the above |\n";
const ENGINE: &[(&str, Option<&str>)] = &[("kvblock", None), ("sched", None), ("testkit", Some("dev"))];

fn package(name: &str, dependencies: &[(&str, Option<&str>)]) -> Package {
    let dependency =
        |(name, kind): &(&str, Option<&str>)| Dependency { name: (*name).into(), kind: kind.map(str::to_owned) };
    Package { name: name.into(), dependencies: dependencies.iter().map(dependency).collect() }
}

/// Returns the findings for these dependencies of kvblock and engine; sched depends on kvblock.
fn messages(page: &str, kvblock: &[(&str, Option<&str>)], engine: &[(&str, Option<&str>)]) -> Vec<String> {
    let sched = package("sched", &[("kvblock", None), ("serde", None)]);
    let xtask = package("xtask", &[("testkit", None)]);
    let packages = vec![package("kvblock", kvblock), sched, package("engine", engine), xtask];
    let tree = Tree { files: vec![File::new("ARCHITECTURE.md", page)], packages };
    about_these(&tree, &["in the row of", "a dependency on", "testkit under"])
}

#[test]
fn a_graph_as_the_page_shows_it_is_good() {
    assert_eq!(messages(PAGE, &[("serde", None), ("sched", Some("dev"))], ENGINE), [""; 0]);
}

#[test]
fn an_arrow_that_is_not_shown_is_found() {
    for kind in [None, Some("build")] {
        let found = messages(PAGE, &[("sched", kind)], ENGINE);
        let expected = "kvblock/Cargo.toml: found a dependency on sched, which ARCHITECTURE.md does not show";
        assert!(matches!(&found[..], [one] if one.starts_with(expected)), "{found:?}");
    }
}

#[test]
fn an_arrow_that_is_shown_must_exist_and_point_upward() {
    let found = messages(PAGE, &[], &[("sched", None)]);
    assert!(found[0].starts_with("ARCHITECTURE.md:3: found kvblock in the row of engine, which"), "{found:?}");
    let found = messages(&PAGE.replace("nothing of ours", "`sched`"), &[("sched", None)], ENGINE);
    assert!(found[0].starts_with("ARCHITECTURE.md:1: found sched in the row of kvblock, but not above"), "{found:?}");
}

#[test]
fn test_crates_stay_out_of_the_product() {
    let found = messages(PAGE, &[("xtask", Some("dev"))], ENGINE);
    assert!(matches!(&found[..], [one] if one.contains("found a dependency on xtask")), "{found:?}");
    let found = messages(PAGE, &[("testkit", None)], ENGINE);
    assert!(matches!(&found[..], [one] if one.contains("found testkit under [dependencies]")), "{found:?}");
}
