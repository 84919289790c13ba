//! A crate outside the workspace that depends only on kvblock builds and runs, with two dependencies in total.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn cargo(arguments: &[&str]) -> Output {
    let manifest: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/outside-user/Cargo.toml");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("outside-user");
    // All dependencies were fetched to build this test. A build that needs more must fail.
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .args(["--offline", "--locked", "--manifest-path"])
        .arg(manifest)
        .env("CARGO_TARGET_DIR", target)
        .output();
    output.unwrap_or_else(|error| panic!("cargo did not start: {error}"))
}

#[test]
fn a_crate_outside_the_workspace_builds_and_runs() {
    let output = cargo(&["run", "--quiet"]);
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{error}");
    assert_eq!(out, "computed 28 of 44 tokens; 16 came from the prefix cache\n");
}

#[test]
fn the_default_build_depends_only_on_a_hasher() {
    let output = cargo(&["tree", "--prefix", "none", "--edges", "normal,build", "--format", "{p}"]);
    let out = String::from_utf8_lossy(&output.stdout);
    let names: Vec<&str> = out.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(names, ["outside-user", "kvblock", "siphasher"], "{}", String::from_utf8_lossy(&output.stderr));
}
