//! Files that import each other in a circle.

use super::messages;

fn findings(files: &[(&str, &str)]) -> Vec<String> {
    let files: Vec<(String, &str)> = files.iter().map(|(path, text)| (format!("kvblock/src/{path}"), *text)).collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
    messages(&files, &["circle"])
}

#[test]
fn a_circle_is_found_through_lists_facades_macros_and_paths_in_code() {
    for g in ["super::super::b::f()", "vec![super::super::b::f()]", "g(super::super::b::f())"] {
        let d = format!("pub struct Deep;\nfn g() {{ {g} }}\n");
        let files = [
            ("lib.rs", "mod b;\npub mod c;\npub use c::d::Deep;\n"),
            ("b.rs", "use crate::{Deep as Other, c};\nfn f() {}\n"),
            ("c/mod.rs", "pub mod d;\n"),
            ("c/d.rs", &d),
        ];
        let found = findings(&files);
        assert!(matches!(&found[..], [one] if one.contains("circle: b.rs -> c/d.rs -> b.rs; move")), "{found:?}");
    }
}

#[test]
fn re_exports_tests_and_other_crates_are_not_imports() {
    let files = [
        ("lib.rs", "mod b;\npub use b::B;\npub struct Own;\n"),
        ("b.rs", "use super::Own;\nuse std::c;\n#[cfg(test)]\nmod tests { use crate::b::e; }\n"),
        ("b/e.rs", "use crate::b::B;\n"),
        ("c.rs", "pub(crate) struct C;\nmod inner {\n use super::C;\n use super::super::b::B;\n}\n"),
        ("d.rs", "#![cfg(test)]\nuse crate::f;\n"),
        ("f.rs", "use super::d;\nmacro_rules! f { () => { $crate::d::g() }; }\n"),
    ];
    assert_eq!(findings(&files), [""; 0]);
}
