//! `cargo xtask gpu-bundle`: its programs for the GPU machine, with scripts instead of Quire, and, under `cargo xtask test-all`, with
//! Quire itself on the simulator.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::capability::Capability;
use testkit::{kernels, not_run, workspace};
use xtask::bundle::{self, Version};

/// Lists tests, and passes them.
const TESTS: &str = r#"case $1 in
--list) for test in TESTS; do echo "$test: test"; done ;;
*) echo "test result: ok. 1 passed in $PWD with $QUIRE_TEST_DEVICE" ;;
esac"#;
/// Measures nothing, but serves.
const QUIRE: &str = r#"case "$*" in
*--help*) echo 'Operations: decode, prefill, linear [default: all]' ;;
"bench roofline"*) echo '{"peaks": {"read_bytes_per_second": 4e12}}' >"${@: -1}" ;;
serve*) exec python3 -c 'import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()' "$6" ;;
"bench serve"*) echo '{"output_throughput": 5000, "failed": 0}' >"${@: -1}" ;;
esac"#;

/// A bundle of scripts in a temporary folder, and a checkout with what `run.py` looks for. `None` without Python.
fn pretend() -> Option<tempfile::TempDir> {
    if !Capability::Python3.is_present() {
        not_run::report(Capability::Python3, "found no python3");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("bundle");
    for name in ["bundle/bin", "bundle/kernels", "bundle/shapes/tiny", "models/tests/reference", "tools"] {
        std::fs::create_dir_all(folder.path().join(name)).unwrap();
    }
    for file in ["Cargo.toml", "bundle/shapes/tiny/ready"] {
        std::fs::write(folder.path().join(file), "").unwrap();
    }
    bundle::scripts(&bundle).unwrap();
    program(&bundle.join("bin/quire"), QUIRE);
    for (name, tests) in [
        ("device", "profile::times"),
        ("attention-kernels", "conformance::reference::cache_writes_equal_the_reference_cases"),
        ("models", "kernels::rows::gathered_rows_are_exact_copies"),
        ("sampling", "device::cuts::ties device::cuts::counts"),
        ("engine", "embeddings::a_text_is_refused other::test"),
    ] {
        program(&bundle.join("bin").join(name), &TESTS.replace("TESTS", tests));
    }
    Some(folder)
}

fn program(file: &Path, text: &str) {
    bundle::script(file, &format!("#!/bin/bash\n{text}\n")).unwrap();
}

/// `python3 run.py` with tools of its own before those of the machine, and its temporary files in the folder.
fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new("python3");
    let path = format!("{}:{}", folder.join("tools").display(), std::env::var("PATH").unwrap());
    command.arg(folder.join("bundle/run.py")).args(args).env("PATH", path).env("TMPDIR", folder).stdin(Stdio::null());
    command
}

fn run(folder: &Path, args: &[&str]) -> Output {
    command(folder, args).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn lines(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("bundle/out/results.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the results of the lines that have these words in their fields.
fn results(folder: &Path, words: &[&str]) -> Vec<String> {
    let has = |line: &Value| words.iter().all(|word| line.as_object().unwrap().values().any(|value| value == word));
    lines(folder).iter().filter(|line| has(line)).map(|line| line["result"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_hang_an_abort_a_limit_and_a_missing_library_cost_only_their_own_lines() {
    let Some(folder) = pretend() else { return };
    let bundle = folder.path().join("bundle");
    let out = bundle::rehearse::rehearse(&bundle, folder.path(), [14, 24]).unwrap();
    // A test runs in the folder of its crate, or in the checkout if that is not there.
    let said = std::fs::read_to_string(out.join("log.txt")).unwrap();
    assert!(
        said.contains("=== sampling device::refusals::looks: failed, code 101\ntest device::refusals::looks"),
        "{said}"
    );
    let page = std::fs::read_to_string(out.join("page.md")).unwrap();
    for row in [
        "| 2 × (8, 4) | 0 | 5,000 |",
        "| linear | linear | limit |",
        "From the start of the process to its first token",
    ] {
        assert!(page.contains(row), "{row:?} is not in {page}");
    }
}

#[test]
fn a_run_that_is_stopped_keeps_its_lines_and_leaves_no_process() {
    let Some(folder) = pretend() else { return };
    let mark = folder.path().join("begun");
    let hangs = format!("trap '' TERM; echo $$ >>{0}; sleep 1000 & echo $! >>{0}; wait; sleep 1000", mark.display());
    program(
        &folder.path().join("bundle/bin/models"),
        &TESTS.replace("TESTS", "kernels::rows::gathered_rows_are_exact_copies").replace("*)", &format!("*) {hangs};")),
    );
    let args = ["one", "--device", "cuda-sim", "--jobs", "8"];
    let child = command(folder.path(), &args).stdout(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    let has_ended = || results(folder.path(), &["test", "ok"]).len() == 5;
    while std::fs::read_to_string(&mark).map_or(0, |text| text.lines().count()) < 2 || !has_ended() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the tests did not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = text(&output);
    assert!(output.status.code() == Some(1) && begun.elapsed() < Duration::from_secs(60), "{said}");
    assert_eq!(results(folder.path(), &["gathered_rows_are_exact_copies"]).len(), 0);
    assert_eq!(results(folder.path(), &["kernels::rows::gathered_rows_are_exact_copies"]), ["no time"]);
    assert_eq!(results(folder.path(), &["part", "linear"]), ["no time"], "{said}");
    assert!(folder.path().join("bundle/out/page.md").is_file(), "{said}");
    for process in std::fs::read_to_string(&mark).unwrap().lines() {
        let state = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "{state}");
    }
}

#[test]
fn a_wrong_command_line_and_a_machine_that_cannot_run_are_one_line() {
    let Some(folder) = pretend() else { return };
    let file = folder.path().join("Cargo.toml");
    let wrong: [(&[&str], &str); 6] = [
        (
            &["one", "--out", &format!("{}/out", file.display())],
            "cannot be written: Not a directory; name a writable folder",
        ),
        (
            &["one", "--tree", "/"],
            "--tree: found no Cargo.toml and models/tests/reference in /; name the root of a checkout",
        ),
        (
            &["two", "--steps", "http,nothing"],
            "--steps: found 'nothing', expected some of roofline,weights,tests,quantised",
        ),
        (&["one", "--limit", "0"], "--limit: found 0.0, expected a number of seconds from 1"),
        (&["one", "--jobs", "0"], "--jobs: found 0, expected a number from 1"),
        (&["one", "--tests", "("], "--tests: missing ), unterminated subpattern"),
    ];
    for (args, words) in wrong {
        let output = run(folder.path(), args);
        let said = text(&output);
        assert!(
            output.status.code() == Some(2) && said.lines().count() == 1 && said.contains(words),
            "{args:?}: {said}"
        );
    }
    std::fs::write(folder.path().join("bundle/bundle.txt"), "C library: glibc 9.99 or newer\n").unwrap();
    let said = text(&run(folder.path(), &["one"]));
    assert!(
        said.starts_with("run.py: found the C library glibc ") && said.contains("expected 9.99 or newer"),
        "{said}"
    );
    std::fs::remove_file(folder.path().join("bundle/bundle.txt")).unwrap();

    // A Python without the module that unpacks programs.
    let without = "import runpy, sys; sys.modules['lzma'] = None; sys.path.insert(0, '.'); sys.argv = ['run.py', 'one']; \
                   runpy.run_path('run.py', run_name='__main__')";
    let mut command = Command::new("python3");
    command.args(["-c", without]).current_dir(folder.path().join("bundle")).env("TMPDIR", folder.path());
    let said = text(&command.output().unwrap());
    assert!(said.starts_with("run.py: found a python3 without the module lzma") && said.lines().count() == 1, "{said}");
}

#[test]
fn what_does_not_need_what_is_missing_runs() {
    let Some(folder) = pretend() else { return };
    std::fs::remove_dir_all(folder.path().join("models")).unwrap();
    let said = text(&run(folder.path(), &["one", "--short", "--steps", "roofline,tests,attention"]));
    assert_eq!(results(folder.path(), &["part", "prefill-2048"]), ["ok"], "{said}");
    assert!(said.contains("tests: not run (found no checkout above "), "{said}");

    let old =
        "echo 'quire: --device cuda: found a driver for CUDA 12.4, expected 13.0 or newer; update it' >&2; exit 1";
    program(&folder.path().join("bundle/bin/quire"), old);
    program(&folder.path().join("tools/nvidia-smi"), "exit 9");
    let said = text(&run(folder.path(), &["two", "--short"]));
    let why = "server: not run (the device does not open: quire: --device cuda: found a driver for CUDA 12.4";
    assert!(said.contains(why), "{said}");
    assert_eq!(results(folder.path(), &["part", "server"]), ["not run"]);
}

#[test]
fn libraries_are_found_in_python_s_packages_before_toolkits() {
    let Some(folder) = pretend() else { return };
    program(&folder.path().join("bundle/bin/quire"), "echo \"searched: $LD_LIBRARY_PATH\"");
    for place in ["packages/nvidia/cu13/lib", "toolkit/lib64"] {
        std::fs::create_dir_all(folder.path().join(place)).unwrap();
        std::fs::write(folder.path().join(place).join("libcublasLt.so.13"), "").unwrap();
    }
    std::fs::write(folder.path().join("toolkit/lib64/libnccl.so.2"), "").unwrap();
    let mut command = command(folder.path(), &["one", "--short", "--steps", "roofline"]);
    let at = |place: &str| folder.path().join(place);
    let output = command.env("PYTHONPATH", at("packages")).env("CUDA_HOME", at("toolkit")).output().unwrap();
    let environment = lines(folder.path()).swap_remove(0);
    assert_eq!(
        environment["libraries"]["cuBLASLt"],
        at("packages/nvidia/cu13/lib/libcublasLt.so.13").to_str().unwrap()
    );
    let searched = std::fs::read_to_string(at("bundle/out/log.txt")).unwrap();
    let line =
        searched.lines().find(|line| line.starts_with("searched: ")).unwrap_or_else(|| panic!("{}", text(&output)));
    let places: Vec<&str> = line["searched: ".len()..].split(':').collect();
    assert_eq!(places[0], at("packages/nvidia/cu13/lib").to_str().unwrap(), "{line}");
    // Unless a real package has it.
    let nccl = environment["libraries"]["NCCL"].as_str().unwrap();
    assert!(places.contains(&Path::new(nccl).parent().unwrap().to_str().unwrap()), "{nccl} in {line}");
}

#[test]
fn programs_are_unpacked_and_failed_tests_run_again_under_every_sanitizer() {
    let Some(folder) = pretend() else { return };
    let bin = folder.path().join("bundle/bin");
    // A real program, because a script has no symbols to strip. It lists no test.
    let packed = bundle::archive_of(&[("engine", "/bin/true".into())], &folder.path().join("bundle/bin.tar"));
    assert!(packed.unwrap() > Version(2, 0));
    std::fs::remove_file(bin.join("engine")).unwrap();
    program(
        &bin.join("models"),
        &TESTS.replace("TESTS", "kernels::rows::gathered_rows_are_exact_copies").replace("*)", "*) exit 3;"),
    );
    let skips = "*) echo 'NOT RUN: device::x: needs nccl: found no libnccl.so.2'; echo '1 passed';";
    program(&bin.join("device"), &TESTS.replace("TESTS", "profile::times").replace("*)", skips));
    let sanitizer = "case $2 in racecheck) echo 'RACECHECK SUMMARY: 1 hazard displayed (1 errors)'; exit 9 ;; esac
        echo '========= ERROR SUMMARY: 0 errors'; shift 6; exec \"$@\"";
    program(&folder.path().join("tools/compute-sanitizer"), sanitizer);
    let said = text(&run(folder.path(), &["one", "--short", "--steps", "tests"]));
    let of = |words: &[&str]| results(folder.path(), words);
    assert_eq!(of(&["tests", "engine"]), ["no test"], "{said}");
    assert_eq!(of(&["device", "profile::times"]), ["not run"], "{said}");
    assert_eq!(of(&["sanitizer", "racecheck"]), ["failed"], "{said}");
    for tool in ["memcheck", "synccheck", "initcheck"] {
        assert_eq!(of(&["sanitizer", tool]), ["ok"], "{said}");
    }
    // Its lines with the result `ok` are no passed test.
    let said = text(&run(folder.path(), &["one", "--short", "--steps", "tests", "--resume"]));
    assert!(said.contains("5 tests, 2 of them to run"), "{said}");
}

#[test]
fn the_page_has_every_figure_that_exists_beside_that_of_a_peer() {
    let Some(folder) = pretend() else { return };
    let (bundle, out) = (folder.path().join("bundle"), folder.path().join("out"));
    std::fs::create_dir(&out).unwrap();
    let put = |name: &str, text: &str| std::fs::write(out.join(name), text).unwrap();
    put(
        "decode.jsonl",
        r#"{"kind":"device","name":"cuda"}
{"kind":"cell","operation":"decode","variant":"cuda.paged_gqa","dtype":"bf16","kv_dtype":"same","heads":32,"kv_heads":8,"head_size":128,"batch":64,"context":512,"query_len":1,"median_seconds":40e-6,"bytes_per_second":3e12,"operations":4e7,"share_of_peak":0.69,"max_error_ulps":0.25}
{"kind":"not_measured","what":"prefill of cuda.x: no memory"}
{"kind":"cell","operation":"dec"#,
    );
    put(
        "peers.jsonl",
        r#"{"kind":"peer","operation":"decode","kernel":"FlashInfer","query_len":1,"batch":64,"context":512,"seconds":60e-6}"#,
    );
    put(
        "step-q4.jsonl",
        r#"{"kind":"decode","batch":64,"tokens":512,"seconds":0.2,"steps":32,"tokens_per_second":9000,"share_of_roofline":0.5}
{"kind":"decode","batch":256,"tokens":4096,"error":"137 GB of cache do not fit"}"#,
    );
    let page = || {
        let output = Command::new("python3").arg(bundle.join("page.py")).arg(&out).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        std::fs::read_to_string(out.join("page.md")).unwrap()
    };
    let said = page();
    for row in [
        "| cuda.paged_gqa | bf16/same | 32/8 × 128 | 64 | 512 | 1 | 40.0 | 3,000 | 1.0 | 69 | 0.25 | FlashInfer | 60.0 | 1.50 × |",
        "| prefill of cuda.x: no memory |",
        "| q4 | decode | 64 | 512 | 6.25 | 9,000 | 50 |",
        "| q4 | decode | 256 | 4096 | not run: 137 GB of cache do not fit |",
    ] {
        assert!(said.contains(row), "{row:?} is not in {said}");
    }
    // A line with other fields costs only its own table.
    put("results.jsonl", r#"{"kind":"part","step":"x"}"#);
    let said = page();
    assert!(said.contains("The part `parts` of this page failed") && said.contains("FlashInfer"), "{said}");
}

#[test]
fn the_steps_of_a_run_fit_into_its_time() {
    let Some(folder) = pretend() else { return };
    let sums = "import plan
for name, steps in plan.RUNS.items():
    total = sum(step.seconds for step in steps if step.name not in plan.BESIDE)
    assert total + 5 <= plan.SECONDS[name], f'{name}: {total} s'
    parts = [part for step in steps for part in step.names()]
    assert len(set(parts)) == len(parts), parts
assert plan.SECONDS['one'] <= 210 and plan.SECONDS['two'] <= 360";
    let output =
        Command::new("python3").args(["-B", "-c", sums]).current_dir(folder.path().join("bundle")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn the_newest_named_version_of_the_c_library_counts() {
    assert_eq!(bundle::newest(b"..GLIBC_2.4\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBC_2.9\0"), Version(2, 34));
    assert_eq!(bundle::newest(b"nothing GLIBC_"), Version(0, 0));
    assert!(Version(2, 9) < Version(2, 34));
    assert_eq!(Version(2, 34).to_string(), "2.34");
}

#[test]
fn tree_and_bundle_fit_together_and_one_that_does_not_names_its_largest_files() {
    let root = workspace::root();
    let tree = bundle::tree_bytes(&root);
    assert!(tree > 1 << 20, "{tree} bytes");
    let rest = bundle::MOST_BYTES.checked_sub(tree);
    let rest = rest.unwrap_or_else(|| panic!("found a tree of {tree} bytes, expected at most {}", bundle::MOST_BYTES));
    let packed = bundle::folder(&root);
    if packed.join("bundle.txt").is_file() {
        bundle::check_size(&packed, rest).unwrap();
    }

    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("in")).unwrap();
    for (name, bytes) in [("a", 10), ("in/b", 3000), ("c", 20)] {
        std::fs::write(folder.path().join(name), vec![0; bytes]).unwrap();
    }
    assert_eq!(bundle::check_size(folder.path(), 3030), Ok(3030));
    let problem = bundle::check_size(folder.path(), 3029).unwrap_err();
    assert!(problem.contains("the largest files: ") && problem.contains("in/b 0.0"), "{problem}");
}

#[test]
fn both_runs_of_a_bundle_work_on_the_simulator_and_faults_cost_only_their_own_lines() {
    if !testkit::everything() {
        return not_run::report(Capability::TestAll, "a rehearsal takes minutes");
    }
    match bundle::rehearse::run(&workspace::root(), kernels::cores()) {
        Err(missing) if missing.starts_with("found no C++") => not_run::report(Capability::Cxx, &missing),
        Err(missing) if missing.starts_with("python3: ") => not_run::report(Capability::Python3, &missing),
        done => drop(done.unwrap()),
    }
}
