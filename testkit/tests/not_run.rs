//! Capabilities, and reports of tests that cannot run.

use testkit::capability::Capability;
use testkit::not_run::{self, Report, Required, summary};
use testkit::{kernels, workspace};

fn line(capability: Capability, reason: &str, test: &str) -> Report {
    Report { capability, reason: reason.into(), test: test.into() }
}

#[test]
fn every_name_is_unique_and_leads_back_to_its_capability() {
    for capability in Capability::ALL {
        assert_eq!(Capability::named(capability.name()), Ok(capability));
    }
}

#[test]
fn an_unknown_name_suggests_the_nearest() {
    let problem = Capability::named("tsam").unwrap_err();
    assert!(problem.starts_with("found no capability \"tsam\"; did you mean \"tsan\"?"), "{problem}");
    assert!(Capability::named("chrome").unwrap_err().contains("did you mean \"chromium\"?"));
    assert!(Capability::named("").is_err());
    let problem = Required::parse("cxx,asam").unwrap_err();
    assert!(problem.starts_with("QUIRE_REQUIRE: found no capability \"asam\"; did you mean \"asan\"?"), "{problem}");
}

#[test]
fn a_required_capability_turns_a_report_into_a_failure() {
    let required = Required::parse("cxx, tsan").unwrap();
    let problem = required.check(&line(Capability::Tsan, "cannot find -ltsan", "device races")).unwrap_err();
    assert_eq!(
        problem,
        "device races needs tsan (the thread sanitizer of the C++ compiler), which QUIRE_REQUIRE requires: cannot find -ltsan; install g++ with libtsan (Debian: g++)"
    );
    assert_eq!(required.check(&line(Capability::Asan, "cannot find -lasan", "device races")), Ok(()));
    for capability in Capability::ALL {
        let report = line(capability, "a", "b");
        assert!(Required::parse("all").unwrap().check(&report).is_err());
        assert!(Required::parse("").unwrap().check(&report).is_ok());
    }
}

#[test]
fn the_environment_of_this_run_requires_capabilities_that_exist() {
    assert_eq!(Required::from_environment().err(), None);
}

#[test]
fn the_summary_counts_by_capability_and_reason() {
    assert_eq!(summary(&[]), "");
    let lines = [
        line(Capability::Cxx, "found none", "device one"),
        line(Capability::Cxx, "found none", "engine two"),
        line(Capability::Cxx, "it crashed", "device three"),
        line(Capability::Python3, "found none", "xtask four"),
    ];
    assert_eq!(
        summary(&lines),
        "NOT RUN: 3 × cxx, without a C++ compiler; install g++ or clang++, or name one in CXX\n  \
         2 × found none\n      device one, engine two\n  1 × it crashed\n      device three\n\
         NOT RUN: 1 × python3, without Python 3; install python3\n  1 × found none\n      xtask four\n"
    );
}

#[test]
fn a_report_is_kept_once_for_the_summary() {
    // No other test reports this reason.
    let reason = format!("this test of reports, process {}", std::process::id());
    if Required::from_environment().unwrap().has(Capability::AnyDevice) {
        return assert!(not_run::check(Capability::AnyDevice, &reason).unwrap_err().contains(&reason));
    }
    not_run::report(Capability::AnyDevice, &reason);
    not_run::report(Capability::AnyDevice, &reason);
    let root = workspace::root();
    let found: Vec<Report> = not_run::reports(&root).into_iter().filter(|line| line.reason == reason).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].test.ends_with("a_report_is_kept_once_for_the_summary"), "{found:?}");
    // This test did run, so its report must not be counted.
    for entry in std::fs::read_dir(kernels::target(&root).join("not-run")).unwrap().flatten() {
        if std::fs::read_to_string(entry.path()).is_ok_and(|text| text.contains(&reason)) {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
}
