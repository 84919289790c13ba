//! `cargo xtask doctor`, and the table of the longest parts.

use testkit::capability::Capability;
use testkit::not_run::Required;
use testkit::workspace;
use xtask::parts::{of_log, ran_some, table};
use xtask::{bundle, doctor};

#[test]
fn ci_requires_what_every_machine_needs_and_what_this_one_has() {
    let required = Required::parse(&doctor::require()).unwrap();
    for capability in Capability::ALL {
        let wanted = Capability::OF_CI.contains(&capability) || capability.is_present();
        assert_eq!(required.has(capability), wanted, "{}", capability.name());
    }
}

#[test]
fn the_doctor_prints_every_line_on_any_machine() {
    let report = doctor::report(&workspace::root());
    let names = ["rust", "lints", "components", "C compiler", "cores", "CPU", "nvcc", "GPU driver"];
    for name in names.into_iter().chain(Capability::ALL.map(Capability::name)) {
        assert!(report.lines().any(|line| line.starts_with(name)), "{name} is missing in\n{report}");
    }
}

const LOG: &str = "   Compiling device v0.1.0\n    Finished `test` profile [optimized] target(s) in 1m 02.50s\n     \
    Running tests/all.rs (/t/debug/deps/all-9f)\n\
    test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 12.00s\n     \
    Running unittests src/lib.rs (/t/debug/deps/device-0a1b)\n\nrunning 4 tests\ntest a ... ok\ntest c ... ok\n\
    test d ... FAILED\ntest b ... ok\n\n\
    test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 3.25s\n\n     \
    Running unittests src/main.rs (/t/debug/deps/quire-77)\n\
    test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n   \
    Doc-tests attention_kernels\n\
    test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.75s\n";

#[test]
fn a_log_is_split_by_program() {
    // Two at once: a and b start, c follows a, d follows c.
    let time = |line: &str| match line.strip_prefix("test ").map(|test| test.split(' ').next()) {
        Some(Some("a")) => 11.0,
        Some(Some("c")) => 11.5,
        Some(Some("d")) => 15.0,
        Some(Some("b")) => 17.0,
        _ => 10.0,
    };
    let times: Vec<f64> = LOG.lines().map(time).collect();
    let found = of_log(LOG, &times, 2).into_iter().map(|part| (part.name, part.seconds)).collect::<Vec<_>>();
    let want = [
        ("building the tests", 62.5),
        ("attention-kernels, tests/all.rs", 12.0),
        ("device, unit tests", 3.25),
        ("device, unit tests: b", 7.0),
        ("device, unit tests: d", 3.5),
        ("quire, unit tests", 0.0),
        ("attention-kernels, examples in docs", 0.75),
    ];
    assert_eq!(found, want.map(|(name, seconds)| (name.to_owned(), seconds)));
}

#[test]
fn a_filter_that_matches_no_test_of_a_program_is_a_failure() {
    assert_eq!(ran_some(LOG, None), Ok(()));
    let with =
        |counts: &str| format!("{LOG}     Running tests/b.rs (/t/b-1)\ntest result: ok. {counts}; finished in 0s\n");
    let of_counts = |counts: &str| ran_some(&with(counts), None);
    assert_eq!(of_counts("1 passed; 0 failed; 0 ignored; 0 measured; 7 filtered out"), Ok(()));
    // All tests of the program of the page are ignored, and no filter says so.
    assert_eq!(of_counts("0 passed; 0 failed; 9 ignored; 0 measured; 0 filtered out"), Ok(()));
    let problem = of_counts("0 passed; 0 failed; 3 ignored; 0 measured; 7 filtered out").unwrap_err();
    assert!(problem.starts_with("tests/b.rs (/t/b-1): found no test that the filter matches"), "{problem}");
    // A filter for some programs of many.
    let of_programs =
        |programs| ran_some(&with("0 passed; 0 failed; 3 ignored; 0 measured; 7 filtered out"), Some(programs));
    let ran = (0..9).find(|programs| of_programs(*programs).is_ok()).unwrap();
    let problem = of_programs(ran + 1).unwrap_err();
    assert!(problem.starts_with(&format!("found tests that the filter matches in {ran} programs")), "{problem}");
}

#[test]
fn the_table_has_the_longest_first() {
    let expected = "    62.5 s  building the tests\n    12.0 s  attention-kernels, tests/all.rs\n";
    assert_eq!(table(of_log(LOG, &[], 2), 2), expected);
}

#[cfg(unix)]
#[test]
fn the_compiler_that_build_kernels_downloads_counts_as_present() {
    let folder = tempfile::tempdir().unwrap();
    let required = || {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_xtask"));
        command
            .args(["doctor", "--require"])
            .env("CARGO_TARGET_DIR", folder.path())
            .env("PATH", "")
            .env_remove("CUDA_HOME");
        let names = String::from_utf8(command.output().unwrap().stdout).unwrap();
        names.trim().split(',').any(|name| name == "nvcc")
    };
    assert!(!required());
    let program = folder.path().join("cuda-toolkit/nvidia/cu13/bin/nvcc");
    std::fs::create_dir_all(program.parent().unwrap()).unwrap();
    bundle::script(&program, "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n").unwrap();
    assert!(required());
}

/// Returns the texts of the workflows.
fn workflows() -> Vec<String> {
    let folder = std::fs::read_dir(workspace::root().join(".github/workflows")).unwrap();
    folder.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect()
}

#[test]
fn only_the_toolchain_file_names_the_compiler_of_ci_and_of_the_image() {
    let read = |path: &str| std::fs::read_to_string(workspace::root().join(path)).unwrap();
    let file: toml::Table = read("rust-toolchain.toml").parse().unwrap();
    let channel = file["toolchain"]["channel"].as_str().unwrap();
    assert_eq!(channel.split('.').filter(|part| part.parse::<u32>().is_ok()).count(), 3, "{channel} is no version");
    let manifest: toml::Table = read("Cargo.toml").parse().unwrap();
    let oldest = manifest["workspace"]["package"]["rust-version"].as_str().unwrap();
    assert!(doctor::minor(channel) >= doctor::minor(oldest), "{channel} is older than {oldest}");
    for text in workflows().iter().chain([&read("deploy/Dockerfile")]) {
        assert!(text.contains("rustup toolchain install --no-self-update"), "{text}");
        let named = [channel, oldest].map(|version| text.contains(version));
        assert_eq!(named, [false; 2], "found a version of the compiler in\n{text}");
        assert!(!text.contains("install stable") && !text.contains("rustup default"), "{text}");
    }
}

#[test]
fn workflows_name_the_commits_of_actions() {
    // A tag of somebody else's repository can point to other code tomorrow.
    let texts = workflows();
    let actions = texts.iter().flat_map(|text| text.split("uses: ").skip(1)).filter_map(|rest| rest.lines().next());
    for (name, version) in actions.filter_map(|action| action.split_once('@')) {
        let hash = version.split(' ').next().unwrap();
        assert!(hash.len() == 40 && hash.chars().all(|c| c.is_ascii_hexdigit()), "{name}@{version}: expected a commit");
    }
    assert!(!texts.iter().any(|text| text.contains("cargo test --workspace\n")));
}

#[cfg(unix)]
#[test]
fn the_notes_of_a_release_are_the_section_of_its_version_and_without_one_there_is_no_release() {
    let workflow = std::fs::read_to_string(workspace::root().join(".github/workflows/release.yml")).unwrap();
    let at = workflow.find("awk -v").unwrap();
    let script = workflow[at..].split("\n      #").next().unwrap();
    assert!(script.ends_with("test -s NOTES.md"), "{script}");
    let folder = tempfile::tempdir().unwrap();
    let changes =
        "# Changelog\n\n## [1.10.0] - c\nsince [1.1.0]\n\n## [1.1.0] - b\n\n### Added\n- x\n\n## [1.1.0-rc1] - a\ny\n";
    std::fs::write(folder.path().join("CHANGELOG.md"), changes).unwrap();
    let notes = |tag: &str| {
        let mut shell = std::process::Command::new("sh");
        shell.args(["-ec", script]).current_dir(folder.path()).env("GITHUB_REF_NAME", tag);
        let found = shell.status().unwrap().success();
        found.then(|| std::fs::read_to_string(folder.path().join("NOTES.md")).unwrap())
    };
    assert_eq!(notes("v1.1.0").unwrap(), "## [1.1.0] - b\n\n### Added\n- x\n\n");
    assert_eq!(notes("v1.1.0-rc1").unwrap(), "## [1.1.0-rc1] - a\ny\n");
    assert_eq!(notes("v1.1"), None);
}

#[cfg(unix)]
#[test]
fn the_site_is_built_by_mdbook_and_without_it_one_line_says_how_to_install_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let run = || {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.arg("docs").env("PATH", at("bin")).env("CARGO_MANIFEST_DIR", at("xtask")).env_remove("QUIRE_BUNDLE");
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let (built, said) = run();
    assert!(
        !built && said.contains("found no mdbook on PATH; install it with `cargo install --locked mdbook`"),
        "{said}"
    );
    std::fs::create_dir(at("bin")).unwrap();
    bundle::script(&at("bin/mdbook"), "#!/bin/sh\necho \"$1 in $PWD\" > built\n").unwrap();
    let (built, said) = run();
    assert!(!built && said.contains("found no book.toml") && said.lines().count() == 1, "{said}");
    std::fs::write(at("book.toml"), "").unwrap();
    assert_eq!(run(), (true, String::new()));
    let root = folder.path().canonicalize().unwrap();
    assert_eq!(std::fs::read_to_string(at("built")).unwrap(), format!("build in {}\n", root.display()));
}
