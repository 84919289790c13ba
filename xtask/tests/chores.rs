//! Parts of the chores: test programs, reports, versions and figures.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use xtask::bench_cpu::{self, Series, measure, shown, times};
use xtask::bundle;
use xtask::cargo::{TestProgram, programs};
use xtask::doctor::minor;
use xtask::flakes::{Failures, Options, beside, failed_tests, table};
use xtask::pip;
use xtask::workspace::{changed, walk};

#[cfg(unix)]
#[test]
fn a_program_runs_in_its_folder_and_its_failed_tests_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let script = |name: &str, text: &str| {
        let file = folder.path().join(name);
        bundle::script(&file, &format!("#!/bin/sh\n{text}\n")).unwrap();
        TestProgram { package: "device".into(), target: name.into(), file, folder: folder.path().to_owned() }
    };
    // While another test starts a program, the script may still be open for writing in a copy of this process.
    let failed_tests = |program: &TestProgram| loop {
        match failed_tests(program) {
            Err(error) if error.contains("busy") => std::thread::sleep(Duration::from_millis(10)),
            outcome => return outcome,
        }
    };
    let failing = script("all", "echo \"test a::b ... ok\"; echo \"test c::$CARGO_PKG_NAME ... FAILED\"; exit 101");
    assert_eq!(failed_tests(&failing).unwrap(), ["device all: c::device"]);
    assert_eq!(failed_tests(&script("good", "test -f good")).unwrap(), [""; 0]);
    let crashed = failed_tests(&script("crash", "kill -9 $$")).unwrap();
    assert!(matches!(&crashed[..], [one] if one.starts_with("device crash: the program ended with ")), "{crashed:?}");
}

#[test]
fn the_table_counts_quiet_and_busy_failures() {
    let failures = Failures::from([("device all: a".into(), [0, 2])]);
    let table = table(&failures, Options { quiet: 10, busy: 5, loops: 3 });
    assert_eq!(table, "failed in 10 quiet runs, in 5 runs beside 3 busy loops, test\n    0     2  device all: a\n");
    assert_eq!(beside(2, || 7), 7);
}

#[test]
fn test_programs_are_found_in_the_messages_of_cargo() {
    let messages = concat!(
        r#"{"reason":"compiler-artifact","manifest_path":"/q/device/Cargo.toml","target":{"name":"all"},"profile":{"test":true},"executable":"/t/all-1"}"#,
        "\n",
        r#"{"reason":"compiler-artifact","manifest_path":"/q/cli/Cargo.toml","target":{"name":"quire"},"profile":{"test":false},"executable":"/t/quire"}"#,
        "\n",
        r#"{"reason":"compiler-artifact","manifest_path":"/q/sched/Cargo.toml","target":{"name":"sched"},"profile":{"test":true},"executable":null}"#,
        "\n",
        r#"{"reason":"build-finished","success":true}"#,
        "\n"
    );
    let expected = TestProgram {
        package: "device".into(),
        target: "all".into(),
        file: "/t/all-1".into(),
        folder: "/q/device".into(),
    };
    assert_eq!(programs(messages), [expected]);
}

#[test]
fn versions_compare_by_number() {
    assert!(minor("1.100.0") > minor("1.89"));
    assert_eq!(minor("1.95.0-nightly"), Some((1, 95)));
    assert_eq!(minor("unknown"), None);
}

#[test]
fn rounds_are_shown_by_median_and_range() {
    assert_eq!(shown(&[3.2, 1.0, 2.0, 9.0, 2.4]), "2 (1–9)");
    let peers: [(&str, &[f64]); 2] = [("theirs", &[0.5]), ("missing", &[])];
    assert_eq!(times(&[3.0, 1.0, 2.0], &peers), ", **4.00 ×** theirs");
    let mut series = Series::default();
    let mut shell = |script: &str| measure(Command::new("sh").args(["-c", script]), &["a", "b"], &mut series);
    let problem = shell("echo it is broken >&2; exit 3").err().unwrap_or_default();
    assert!(problem.contains("it is broken") && problem.contains('3'), "{problem}");
    assert_eq!(shell("echo first; echo '{\"b\": 2, \"a\": 1}'"), Ok(()));
    assert_eq!(series, [vec![1.0], vec![2.0], vec![], vec![]]);
}

#[test]
fn a_form_that_bench_cpu_does_not_have_is_refused_before_anything_is_built() {
    let (folder, llama, vllm) = Default::default();
    let forms = vec!["q9".to_owned()];
    let options = bench_cpu::Options {
        models: Vec::new(),
        forms,
        folder,
        llama,
        vllm,
        rounds: 1,
        threads: 1,
        steps: true,
        serving: true,
    };
    let problem = bench_cpu::run(&testkit::workspace::root(), &options).unwrap_err();
    assert!(problem.contains("--forms: found q9; expected some of bf16, q8 and q4"), "{problem}");
}

#[test]
fn without_git_the_walk_finds_this_file_and_no_build_output() {
    let mut found = Vec::new();
    walk(&testkit::workspace::root(), "", &mut found);
    assert!(found.iter().any(|path| path == "xtask/src/workspace.rs"));
    assert!(!found.iter().any(|path| path.starts_with("target/") || path.starts_with(".git/")));
}

#[cfg(unix)]
#[test]
fn a_package_goes_into_an_environment_that_is_made_once_and_an_error_is_the_last_line_of_python() {
    let folder = tempfile::tempdir().unwrap();
    let (python, environment) = (folder.path().join("python"), folder.path().join("environment"));
    let fake = "#!/bin/sh\nfor last; do :; done\ncase \"$2\" in\n\
        venv) mkdir -p \"$last/bin\" && cp \"$0\" \"$last/bin/python\" && touch \"$last/bin/pip\" && echo >> \"$0.made\" ;;\n\
        pip) printf 'a traceback\\nno %s\\n' \"$last\" >&2; test \"$last\" = good==1 ;;\nesac\n";
    bundle::script(&python, fake).unwrap();
    // While another test starts a program, the script may still be open for writing in a copy of this process.
    let install = |package: &str| loop {
        match pip::install(&python, &environment, package, &["--no-deps"]) {
            Err(problem) if problem.contains("busy") => std::thread::sleep(Duration::from_millis(10)),
            outcome => return outcome,
        }
    };
    assert_eq!(install("good==1"), Ok(()));
    assert!(
        install("bad==1").is_err_and(|problem| problem.ends_with("bin/python ended with exit status: 1: no bad==1"))
    );
    assert_eq!(std::fs::read_to_string(folder.path().join("python.made")).unwrap(), "\n");
    assert!(pip::install(Path::new("no-such-python"), folder.path(), "good==1", &[]).is_err());
}

#[test]
fn files_of_a_change_are_those_that_differ_from_where_the_branch_left_main_in_a_commit_or_not() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("inner");
    let git = |args: &str| {
        let settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"];
        let mut command = Command::new("git");
        command.current_dir(&root).args(settings).args(args.split(' '));
        assert!(command.output().unwrap().status.success(), "{args}");
    };
    let write = |name: &str, text: &str| std::fs::write(root.join(name), text).unwrap();
    std::fs::create_dir(&root).unwrap();
    assert!(changed(&root).unwrap_err().ends_with("pass --all"));
    git("init -q ..");
    for name in ["kept", "edited", "deleted", "committed"] {
        write(name, name);
    }
    write(".gitignore", "ignored");
    git("add .");
    git("commit -qm base");
    write("committed", "by this branch");
    git("commit -qam own");
    write("edited", "but not committed");
    write("new", "");
    write("ignored", "");
    std::fs::remove_file(root.join("deleted")).unwrap();
    assert_eq!(changed(&root).unwrap(), ["deleted", "edited", "new"], "without origin/main");
    git("update-ref refs/remotes/origin/main HEAD~1");
    assert_eq!(changed(&root).unwrap(), ["committed", "deleted", "edited", "new"]);
}
