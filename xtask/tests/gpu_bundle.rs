//! `cargo xtask gpu-bundle`: its script with shell scripts instead of the real programs, and, under `cargo xtask test-all`, a whole
//! bundle that runs in another folder with an empty environment.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use testkit::capability::Capability;
use testkit::{kernels, not_run, workspace};
use xtask::bundle::{self, Version};

/// A folder that is deleted at the end of the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("quire-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    /// A bundle of shell scripts.
    fn pretend(name: &str, needed: Version, quire: &str, conformance: &str) -> Folder {
        let folder = Folder::new(name);
        bundle::script(&folder.0.join("run.sh"), needed).unwrap();
        for name in ["sampling", "models"] {
            folder.program(&format!("bin/{name}"), "echo 'test result: ok. 5 passed'");
        }
        folder.program("bin/engine", "echo \"test result: ok. $*\"");
        folder.program("bin/quire", quire);
        folder.program("bin/attention-kernels", conformance);
        // A Python without torch, whatever this machine has.
        folder.program("python3", "exit 1");
        folder
    }

    /// Adds a shell script.
    fn program(&self, name: &str, text: &str) {
        let file = self.0.join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::copy(self.0.join("run.sh"), &file).unwrap(); // for its permissions
        std::fs::write(file, format!("#!/bin/bash\n{text}\n")).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a bundle from another folder. The environment has only its output folder, and a PATH on which the bundle comes first.
fn run(bundle: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(bundle.join("run.sh"));
    let path = format!("{}:/usr/local/bin:/usr/bin:/bin", bundle.display());
    command.args(args).env_clear().env("PATH", path).env("OUT", bundle.join("kept")).current_dir("/").output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

const QUIRE: &str =
    "case $2 in roofline) echo 'peaks: read 1 GB/s' ;; kernels) echo 'decode      cuda.paged_gqa 7 us' ;; esac";
const CONFORMANCE: &str =
    "echo \"cuda decode cuda.paged_gqa 9 comparisons in $QUIRE_BUNDLE on $QUIRE_TEST_DEVICE\"; echo 'test result: ok.'";

#[test]
fn the_script_runs_its_parts_and_ends_with_a_table() {
    let bundle = Folder::pretend("bundle-good", Version(2, 17), QUIRE, CONFORMANCE);
    let output = run(&bundle.0, &["--device", "cuda-sim"]);
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    let place = bundle.0.canonicalize().unwrap();
    for words in [
        "C library: glibc 2.",
        "peaks: read 1 GB/s",
        &format!("9 comparisons in {} on cuda-sim", place.display()),
        "test result: ok.",
        "sanitizers                 not run",
        "weights                    not run        no python3 with torch and transformers",
        "sweep-tiny                 not run        found no weights",
    ] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
    let parts = said.split_once("## Parts\n").unwrap().1;
    for part in ["roofline", "conformance", "kernels", "models-forward", "engine-bits"] {
        assert!(parts.contains(&format!("{part:<26} ok")), "{part:?} is not in {parts}");
    }
    assert!(std::fs::read_to_string(bundle.0.join("kept/results.md")).unwrap().contains("## Parts"));
    let log = std::fs::read_to_string(bundle.0.join("kept/log.txt")).unwrap();
    assert!(log.contains("=== conformance\n") && log.contains("decode      cuda.paged_gqa 7 us"), "{log}");
    assert!(std::fs::read_dir(bundle.0.join("kept")).unwrap().count() <= 8, "few files to copy back");
}

#[test]
fn a_part_that_fails_is_named_and_the_others_still_run() {
    let panics = "echo 'test attention::x ... FAILED'; exit 101";
    let bundle = Folder::pretend("bundle-bad", Version(2, 17), QUIRE, panics);
    let output = run(&bundle.0, &[]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for words in
        ["conformance                failed (101)", "kernels                    ok", "test attention::x ... FAILED"]
    {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
}

#[test]
fn a_filter_that_matches_no_test_is_a_failure() {
    let bundle = Folder::pretend("bundle-none", Version(2, 17), QUIRE, "echo 'test result: ok. 0 passed; 0 failed'");
    let output = run(&bundle.0, &["--only", "conformance"]);
    let said = text(&output);
    assert!(said.contains(&format!("{:<26} ran no test", "conformance")), "{said}");
    assert_eq!(output.status.code(), Some(1), "{said}");
}

#[test]
fn a_missing_requirement_is_one_line() {
    let bundle = Folder::pretend("bundle-new", Version(9, 99), QUIRE, CONFORMANCE);
    let output = run(&bundle.0, &[]);
    let said = text(&output);
    assert!(output.status.code() == Some(1) && said.lines().count() == 1, "{said}");
    assert!(said.contains("found the C library glibc 2.") && said.contains("expected 9.99 or newer"), "{said}");

    let no_driver = "echo 'quire: --device cuda: found no NVIDIA driver' >&2; exit 1";
    let bundle = Folder::pretend("bundle-driver", Version(2, 17), no_driver, CONFORMANCE);
    let output = run(&bundle.0, &[]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1));
    for words in [
        "quire: --device cuda: found no NVIDIA driver\n",
        "roofline                   failed (1)",
        "conformance                not run",
    ] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
    let output = run(&bundle.0, &["--device", "abacus"]);
    assert!(output.status.code() == Some(2) && text(&output).contains("found 'abacus', expected cuda or cuda-sim"));
}

#[test]
fn a_part_that_takes_too_long_is_stopped_and_the_table_still_comes_last() {
    let bundle = Folder::pretend("bundle-slow", Version(2, 17), QUIRE, "echo 'test result: begun'; sleep 60");
    let said = text(&run(&bundle.0, &["--device", "cuda-sim", "--limit", "1"]));
    let parts = said.split_once("## Parts\n").unwrap().1;
    let ended = |part: &str, how: &str| parts.contains(&format!("{part:<26} {how}"));
    assert!(ended("conformance", "over 1 s") && ended("kernels", "ok"), "{said}");
    assert!(said.contains("test result: begun"), "what it said until then: {said}");
    for wrong in ["0", "", "ten"] {
        let output = run(&bundle.0, &["--limit", wrong]);
        assert!(output.status.code() == Some(2) && text(&output).contains("expected a number of seconds"), "{wrong}");
    }
}

#[test]
fn a_machine_with_the_sanitizers_of_cuda_runs_them() {
    let bundle = Folder::pretend("bundle-memcheck", Version(2, 17), QUIRE, CONFORMANCE);
    let found = "echo \"========= ERROR SUMMARY: 0 errors of $2\"; [ $2 = memcheck ] || exit 9";
    bundle.program("compute-sanitizer", found);
    let output = run(&bundle.0, &[]);
    let said = text(&output);
    for words in ["0 errors of racecheck", "memcheck                   ok", "racecheck                  failed (9)"] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
    assert_eq!(output.status.code(), Some(1), "{said}");
}

#[test]
fn a_missing_library_of_the_host_kernels_is_one_line() {
    let bundle = Folder::pretend("bundle-lacks", Version(2, 17), QUIRE, CONFORMANCE);
    bundle.program("ldd", "echo '  libstdc++.so.6 => not found'");
    let output = run(&bundle.0, &["--device", "cuda-sim"]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("--device cuda-sim: libstdc++.so.6 => not found; install libstdc++"), "{said}");
    assert!(run(&bundle.0, &[]).status.success(), "a GPU does not need it");
}

#[test]
fn parts_that_are_not_requested_are_listed_and_none_starts_without_time_left() {
    let bundle = Folder::pretend("bundle-only", Version(2, 17), QUIRE, CONFORMANCE);
    let said = text(&run(&bundle.0, &["--only", "kernels,engine-bits"]));
    for (part, how) in [("kernels", "ok"), ("engine-bits", "ok"), ("conformance", "not run        not requested")] {
        assert!(said.contains(&format!("{part:<26} {how}")), "{said}");
    }
    let script = bundle.0.join("run.sh");
    let text_of = std::fs::read_to_string(&script).unwrap();
    std::fs::write(&script, text_of.replace("\nend=535\n", "\nend=0\n")).unwrap();
    let said = text(&run(&bundle.0, &[]));
    assert!(said.contains(&format!("{:<26} not run        no time left", "roofline")), "{said}");
}

#[test]
fn a_bundle_without_peers_says_how_to_make_them_and_a_peer_that_fails_stops_nothing() {
    let bundle = Folder::pretend("bundle-peers", Version(2, 17), QUIRE, CONFORMANCE);
    let said = text(&run(&bundle.0, &[]));
    let none = format!("{:<26} not run        the bundle has no peers; run cargo xtask gpu-peers", "peers");
    assert!(said.contains(&none), "{said}");
    // A Python with torch, whose peers fail.
    bundle.program("python3", "case $1 in *peers.py) ls \"$2\"; exit 1 ;; esac");
    bundle.program("peers/libvllm.so", "");
    // The machine need not have xz.
    let pack = "import lzma, os, sys; name = sys.argv[1]; data = open(name, 'rb').read(); \
                open(name + '.xz', 'wb').write(lzma.compress(data)); os.remove(name)";
    let packed = Command::new("python3").args(["-c", pack]).arg(bundle.0.join("peers/libvllm.so")).status().unwrap();
    assert!(packed.success());
    let said = text(&run(&bundle.0, &[]));
    for (part, how) in [("peers", "failed (1)"), ("prefill", "ok"), ("engine-bits", "ok")] {
        assert!(said.contains(&format!("{part:<26} {how}")), "{part} in {said}");
    }
    let log = std::fs::read_to_string(bundle.0.join("kept/log.txt")).unwrap();
    assert!(log.contains("=== peers\nlibvllm.so\nlibvllm.so.xz\n"), "unpacked: {log}");
}

#[test]
fn the_table_names_the_shapes_that_a_sweep_did_not_measure() {
    let bundle = Folder::new("bundle-table");
    let work = |name: &str, text: &str| std::fs::write(bundle.0.join(name), text).unwrap();
    work("table.py", include_str!("../src/bundle/table.py"));
    work("sweep-1b.planned", "--batch-size 1,8 --context 512 --prefill 2048 --steps 32");
    // The second line was cut off when its process was stopped.
    work(
        "sweep-1b.jsonl",
        "{\"kind\":\"decode\",\"batch\":1,\"tokens\":512,\"steps\":2,\"seconds\":0.004,\"tokens_per_second\":500,\
         \"bytes\":4000000000,\"operations\":1000}\n{\"kind\":\"dec",
    );
    work("roofline.json", "{\"peaks\":{\"read_bytes_per_second\":4e12,\"bf16_operations_per_second\":1e12}}");
    work("bundle.txt", "Quire, commit 1\n");
    let place = bundle.0.to_str().unwrap();
    let started = Command::new("python3")
        .arg(bundle.0.join("table.py"))
        .args([place, place, "cuda", "a card"])
        .arg(bundle.0.join("bundle.txt"))
        .output();
    let output = match started {
        Ok(output) => output,
        Err(missing) => return not_run::report(Capability::Python3, &format!("python3: {missing}")),
    };
    let said = text(&output);
    for row in [
        "| 1b | 1 | 512 | 500.0 | 2.000 | 0.500 | 4.00 × |",
        "| 1b | 8 | 512 | not run: the time limit of its part |",
        "| 1b | 2048 | not run: the time limit of its part |",
    ] {
        assert!(output.status.success() && said.contains(row), "{row:?} is not in {said}");
    }
}

#[test]
fn the_newest_named_version_of_the_c_library_counts() {
    assert_eq!(bundle::newest(b"..GLIBC_2.4\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBC_2.9\0"), Version(2, 34));
    assert_eq!(bundle::newest(b"nothing GLIBC_"), Version(0, 0));
    assert!(Version(2, 9) < Version(2, 34));
    assert_eq!(Version(2, 34).to_string(), "2.34");
}

#[test]
fn a_bundle_that_is_too_large_names_its_largest_files() {
    let folder = Folder::new("bundle-size");
    std::fs::create_dir(folder.0.join("in")).unwrap();
    for (name, bytes) in [("a", 10), ("in/b", 3000), ("c", 20)] {
        std::fs::write(folder.0.join(name), vec![0; bytes]).unwrap();
    }
    assert_eq!(bundle::check_size(&folder.0, 3030), Ok(3030));
    let problem = bundle::check_size(&folder.0, 3029).unwrap_err();
    assert!(problem.contains("the largest files: ") && problem.contains("in/b 0.0"), "{problem}");
}

#[test]
fn a_whole_bundle_tests_the_kernels_without_a_gpu_and_reports_a_missing_driver() {
    if !testkit::everything() {
        return not_run::report(Capability::TestAll, "a bundle takes minutes to build");
    }
    let options = bundle::Options { architectures: Vec::new(), fetch: false, jobs: kernels::cores() };
    let made = match bundle::run(&workspace::root(), &options) {
        Ok(made) => made,
        Err(missing) if missing.starts_with("found no nvcc") => return not_run::report(Capability::Nvcc, &missing),
        Err(missing) if missing.starts_with("found no C++") => return not_run::report(Capability::Cxx, &missing),
        Err(problem) => panic!("{problem}"),
    };
    assert!(bundle::check_size(&made, bundle::MOST_BYTES).unwrap() > 1 << 20);
    for card in ["H200", "H100"] {
        let decode = std::fs::read_to_string(made.join(format!("predicted/{card}-decode-64.json"))).unwrap();
        assert!(decode.contains(&format!("\"card\": \"{card}\"")) && decode.contains("cuda.paged_gqa"), "{decode}");
    }
    // Nothing in it may refer to the folder where it was made.
    let elsewhere = Folder::new("bundle-whole");
    let copied = Command::new("cp").arg("-r").arg(&made).arg(elsewhere.0.join("b")).status().unwrap();
    assert!(copied.success());
    let bundle = elsewhere.0.join("b");
    let output = run(&bundle, &["--device", "cuda-sim", "--short"]);
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    for words in [
        "cuda-sim: 86 comparisons",
        "test result: ok. 2 passed",
        "conformance                ok",
        "models-forward             ok",
        "sampling                   ok",
        "engine-fast                ok",
    ] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
    // On a machine with a GPU the whole run must succeed.
    let output = run(&bundle, &["--short"]);
    let said = text(&output);
    assert!(output.status.success() || said.contains("--device cuda: found no NVIDIA driver (libcuda.so.1)"), "{said}");
}
