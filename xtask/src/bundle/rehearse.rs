//! `cargo xtask gpu-bundle --rehearse`: both runs of a bundle on `cuda-sim`, with faults, of which each may cost only its own line.
//!
//! The programs are those that `cargo test` builds, the kernels the host libraries. `inject` puts scripts before three programs:
//!
//! ```text
//! sampling   lists three more tests: one hangs, one aborts, one prints a failed look and fails
//! device     does not start, because it needs a library that does not exist
//! quire      hangs in `bench kernels --op linear` of run one, behind a cell and half of a line
//! ```
//!
//! `check` reads the lines that both runs have written.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use testkit::kernels::{self, host};
use testkit::model;

use super::{at, fresh, programs, scripts};
use crate::cargo;

const SAMPLING: &str = r#"case "$*" in
*--list*) "$real" "$@" && for test in hangs aborts looks; do echo "device::refusals::$test: test"; done ;;
*::hangs*) trap '' TERM INT; sleep 1000 & sleep 1000 ;;
*::aborts*) kill -ABRT $$ ;;
*::looks*) echo "test $2 ... look failed: {\"dtype\": \"bf16\", \"wrong\": 3}"; exit 101 ;;
*) exec "$real" "$@" ;;
esac"#;
const DEVICE: &str = r#"echo "$0: error while loading shared libraries: libnone.so.1: cannot open shared object file" >&2
exit 127"#;
const QUIRE: &str = r#"case "$*" in
*"--op linear"*"--weights numbers"*)
    for file; do :; done
    echo '{"kind": "cell", "operation": "linear", "variant": "rehearsed", "query_len": 4, "outputs": 128, "median_seconds": 7e-6}' >"$file"
    printf '{"kind": "cell", "operat' >>"$file"
    sleep 1000 ;;
*) exec "$real" "$@" ;;
esac"#;
const FAULTS: [(&str, &str); 3] = [("sampling", SAMPLING), ("device", DEVICE), ("quire", QUIRE)];

/// Builds the programs, and runs a rehearsal with them. Returns the folder of its results.
///
/// # Errors
/// One line: what does not build, or which line a run should have written and has not.
pub fn run(root: &Path, jobs: usize) -> Result<PathBuf, String> {
    let bundle = kernels::target(root).join("gpu-rehearsal");
    fresh(&bundle)?;
    scripts(&bundle)?;
    let (bin, libraries) = (bundle.join("bin"), bundle.join("kernels"));
    [&bin, &libraries].into_iter().try_for_each(|folder| std::fs::create_dir_all(folder).map_err(at(folder)))?;
    link(&cargo::build_quire(root, "dev")?, &bin.join("quire"))?;
    for (package, file) in programs::tests(root, &[])? {
        link(&file, &bin.join(package))?;
    }
    let compiler = host::compiler()?;
    for manifest in &kernels::manifests(root)? {
        let library = host::library(root, manifest, &compiler, host::Instrument::None, jobs)?;
        link(&library, &libraries.join(library.file_name().unwrap_or_default()))?;
    }
    let tiny = bundle.join("shapes/tiny");
    model::write(&model::Shape::named("tiny")?, &tiny, 0)?;
    std::fs::write(tiny.join("ready"), "").map_err(at(&tiny))?;
    rehearse(&bundle, root, [150, 240])
}

/// Puts faults into a bundle, runs both runs with limits in seconds, checks the lines, and returns the folder of the results.
///
/// # Errors
/// Which line is missing or wrong.
pub fn rehearse(bundle: &Path, tree: &Path, limits: [u32; 2]) -> Result<PathBuf, String> {
    inject(bundle)?;
    let out = bundle.join("out");
    for (run, limit) in ["one", "two"].into_iter().zip(limits) {
        let mut command = Command::new("python3");
        command.arg(bundle.join("run.py")).args([run, "--device", "cuda-sim", "--resume", "--tree"]).arg(tree);
        command.arg("--limit").arg(limit.to_string()).arg("--out").arg(&out);
        let status = command.status().map_err(|error| format!("python3: {error}; install python3"))?;
        if status.code() != Some(1) {
            return Err(format!("run {run}: found {status}, expected exit code 1, because programs have faults"));
        }
    }
    check(&out)?;
    Ok(out)
}

/// Puts a script with faults before programs of a bundle.
fn inject(bundle: &Path) -> Result<(), String> {
    for (name, text) in FAULTS {
        let (program, real) = (bundle.join("bin").join(name), bundle.join("real").join(name));
        std::fs::create_dir_all(bundle.join("real")).map_err(at(bundle))?;
        std::fs::rename(&program, &real).map_err(at(&program))?;
        programs::script(&program, &format!("#!/bin/bash\nreal={}\n{text}\n", real.display()))?;
    }
    Ok(())
}

fn link(from: &Path, to: &Path) -> Result<(), String> {
    std::fs::hard_link(from, to).map_err(at(to))
}

/// Checks that each fault has its line, and that nothing else is missing or failed.
fn check(out: &Path) -> Result<(), String> {
    let read = |name: &str| std::fs::read_to_string(out.join(name)).map_err(at(&out.join(name)));
    let text = read("results.jsonl")?;
    let lines: Vec<Value> =
        text.lines().map(serde_json::from_str).collect::<Result<_, _>>().map_err(|error| error.to_string())?;
    let of = |kind: &'static str| lines.iter().filter(move |line| line["kind"] == kind);
    let key = |line: &Value, names: [&str; 2]| names.map(|name| line[name].as_str().unwrap_or_default().to_owned());

    let mut wrong = Vec::new();
    let mut runs: BTreeMap<[String; 2], Vec<&Value>> = BTreeMap::new();
    of("test").for_each(|line| runs.entry(key(line, ["program", "test"])).or_default().push(line));
    for ([program, test], found) in &runs {
        let expected = match test.strip_prefix("device::refusals::").filter(|_| program == "sampling") {
            Some("hangs") => ("limit", 2),
            Some("aborts" | "looks") => ("failed", 2),
            // The second run skips what passed.
            _ if found[0]["result"] == "not run" => ("not run", 2),
            _ => ("ok", 1),
        };
        if found.iter().any(|line| line["result"] != expected.0) || found.len() != expected.1 {
            let results: Vec<&Value> = found.iter().map(|line| &line["result"]).collect();
            wrong.push(format!("{program} {test}: found {results:?}, expected {} times {}", expected.1, expected.0));
        }
    }
    let sampling =
        |test: &str| runs.get(&["sampling".to_owned(), format!("device::refusals::{test}")]).map(|found| found[0]);
    if sampling("looks").is_none_or(|line| line["looks"][0]["wrong"] != 3) {
        wrong.push("sampling device::refusals::looks: expected the failed look".into());
    }
    if sampling("aborts").is_none_or(|line| line["code"] != -6) {
        wrong.push("sampling device::refusals::aborts: expected code -6".into());
    }
    let programs: BTreeSet<&str> = runs.keys().map(|[program, _]| program.as_str()).collect();
    for name in programs::TESTED.iter().filter(|name| **name != "device" && !programs.contains(**name)) {
        wrong.push(format!("{name}: expected a test"));
    }
    let listed = of("tests").filter_map(|line| line["count"].as_u64()).max();
    if listed != Some(runs.len() as u64) {
        wrong.push(format!("found lines of {} tests, expected {listed:?}", runs.len()));
    }

    let parts: BTreeMap<[String; 2], &Value> = of("part").map(|line| (key(line, ["step", "part"]), line)).collect();
    let planned = of("plan").flat_map(|line| line["parts"].as_array().into_iter().flatten());
    let planned = planned.map(|part| [0, 1].map(|at| part[at].as_str().unwrap_or_default().to_owned()));
    for part in planned.chain([["tests".into(), "device".into()]]).collect::<BTreeSet<_>>() {
        let found = parts.get(&part).map_or("no line", |line| line["result"].as_str().unwrap_or_default());
        let expected: &[&str] = match part.each_ref().map(String::as_str) {
            ["tests", "device"] => &["failed"],
            ["linear", "linear"] => &["limit"],
            _ => &["ok", "not run"],
        };
        if !expected.contains(&found) {
            let why = parts.get(&part).map_or(&Value::Null, |line| &line["reason"]);
            wrong.push(format!("{}: found {found} ({why}), expected {}", part.join(" "), expected.join(" or ")));
        }
    }
    for kind in ["http", "start"] {
        if of(kind).next().is_none() {
            wrong.push(format!("expected a line of kind {kind}"));
        }
    }
    let page = read("page.md")?;
    for words in
        ["libnone.so.1", "| rehearsed |", "**sampling device::refusals::hangs**: limit", "\"wrong\": 3", "## Parts"]
    {
        if !page.contains(words) {
            wrong.push(format!("page.md: expected {words}"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(format!("{}: {}", out.display(), wrong.join("; "))) }
}
