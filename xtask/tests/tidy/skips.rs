//! Tests that skip without a report.

const ABOUT: [&str; 4] = ["not_run::report", "ignored", "not counted", "expected a report"];
const WORDS: &str = concat!("NOT ", "RUN");

fn messages(files: &[(&str, &str)]) -> Vec<String> {
    super::messages(files, &ABOUT)
}

#[test]
fn a_test_that_may_end_early_leads_to_a_report() {
    let support = "fn compiler() -> Option<C> {\n find().map_err(|m| not_run::report(Cxx, m)).ok()\n}\n";
    let good = "#[test]\nfn a() {\n let Some(c) = compiler() else { return };\n}\n";
    let deep =
        "fn sim() -> Option<D> { compiler().map(open) }\n#[test]\nfn b() {\n if let Some(d) = sim() { return; }\n}\n";
    let bad = "#[test]\nfn c() {\n let Some(c) = somewhere() else { return };\n}\n";
    assert_eq!(messages(&[("x/tests/a.rs", good), ("x/tests/b.rs", deep), ("x/tests/support.rs", support)]), [""; 0]);
    let found = messages(&[("x/tests/a.rs", bad), ("x/tests/support.rs", support)]);
    assert_eq!(
        found,
        [
            "x/tests/a.rs:2: found `return}` in c, expected a report of what it skips; call testkit::not_run::report, or let it fail"
        ]
    );
    let unit = format!("fn f() {{ return; }}\n#[cfg(test)]\nmod tests {{\n{bad}}}\n");
    assert_eq!(messages(&[("x/src/a.rs", &unit)]).len(), 1);
    let property = format!("proptest! {{\n{bad}}}\n");
    assert_eq!(messages(&[("x/tests/a.rs", &property)]).len(), 1);
    assert_eq!(messages(&[("x/tests/a.rs", "#[test]\nfn c() { f(\"return;\"); }\n")]), [""; 0]);
    let helper = |name: &str| bad.replace("#[test]\nfn c", &format!("fn {name}"));
    assert_eq!(messages(&[("x/tests/a.rs", &helper("check_all"))]).len(), 1);
    assert_eq!(messages(&[("x/tests/a.rs", &helper("answer"))]), [""; 0]);
}

#[test]
fn a_test_that_prints_that_it_skips_is_found() {
    let text = format!("#[test]\nfn a() {{\n if no() {{ return println!(\"{WORDS}: none\"); }}\n}}\n");
    let found = messages(&[("x/tests/a.rs", &text)]);
    assert_eq!(found.len(), 2);
    assert!(found[0].starts_with("x/tests/a.rs:2: found `return println!`"), "{found:?}");
    assert!(found[1].starts_with("x/tests/a.rs:3: found a line that prints"), "{found:?}");
}

#[test]
fn a_probe_is_not_a_report_although_a_helper_has_its_name() {
    let support = "fn compiler() -> Option<C> {\n host::compiler().map_err(|m| not_run::report(Cxx, m)).ok()\n}\n";
    let bad = "#[test]\nfn a() {\n let Ok(compiler) = host::compiler() else { return };\n}\n";
    assert_eq!(messages(&[("x/tests/a.rs", bad), ("x/tests/support.rs", support)]).len(), 2);
    assert_eq!(messages(&[("x/tests/a.rs", &bad.replace("host::", "")), ("x/tests/support.rs", support)]), [""; 0]);
}

#[test]
fn a_probe_in_a_helper_of_tests_leads_to_a_report() {
    let bad = "fn isas() -> impl Iterator<Item = Isa> {\n ALL.into_iter().filter(|isa| isa.is_available())\n}\n";
    assert!(messages(&[("x/tests/a.rs", bad)])[0].contains("found `.is_available()` in isas, expected a report"));
    assert_eq!(messages(&[("x/src/a.rs", bad)]), [""; 0]);
    let good = bad.replace("ALL.", "not_run::report(a, b); ALL.");
    assert_eq!(messages(&[("x/tests/a.rs", &good)]), [""; 0]);
}

#[test]
fn an_ignored_test_says_which_test_starts_it() {
    let ignored = |why: &str| messages(&[("x/tests/a.rs", &format!("#[test]\n#[ignore{why}]\nfn a() {{}}\n"))]).len();
    assert_eq!([ignored(""), ignored(" = \"slow\""), ignored(" = \"only as a program of its own\"")], [1, 1, 0]);
}
