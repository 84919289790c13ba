//! A CPU without the vector units that this machine has: the program under an emulator of one. It says what it takes, answers
//! the same, and refuses by name what it cannot run.
use std::process::{Command, Output};

use testkit::capability::Capability;

/// From before AVX.
const OLD: [&str; 2] = ["-cpu", "Nehalem"];

/// `None`, and a report, where this is no x86-64 or there is no emulator.
fn emulator() -> Option<Command> {
    let mut command = Command::new("qemu-x86_64");
    let found = cfg!(target_arch = "x86_64") && command.arg("--version").output().is_ok_and(|it| it.status.success());
    if !found {
        testkit::not_run::report(Capability::Qemu, "found no qemu-x86_64 on PATH, or a CPU of another kind");
        return None;
    }
    let mut command = Command::new("qemu-x86_64");
    command.args(OLD).arg(env!("CARGO_BIN_EXE_quire"));
    Some(command)
}

fn asked(mut quire: Command, more: &[&str]) -> Output {
    let question = ["generate", "-p", "What is the capital of France?", "--temperature", "0", "--max-tokens", "12"];
    quire.args(question).args(["--kv-cache-memory-bytes", "16M", "--threads", "1"]).args(more).output().unwrap()
}

#[test]
fn a_cpu_without_vector_units_gives_the_same_answer_in_every_form_of_weights() {
    for more in [&[][..], &["--quantization", "q8"], &["--quantization", "q4"]] {
        let Some(old) = emulator() else { return };
        let (old, new) = (asked(old, more), asked(Command::new(env!("CARGO_BIN_EXE_quire")), more));
        let said = String::from_utf8_lossy(&old.stderr);
        assert!(old.status.success() && new.status.success() && !new.stdout.is_empty(), "{said}");
        assert!(said.contains("vector unit portable") && said.contains("linear cpu.portable"), "{said}");
        assert_eq!(old.stdout, new.stdout, "{more:?}");
    }
}

#[test]
fn a_kernel_for_units_that_the_cpu_lacks_is_refused_by_name_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("quire.toml");
    for name in ["cpu.avx512", "cpu.avx2"] {
        std::fs::write(&file, format!("[kernels]\nlinear = \"{name}\"\n")).unwrap();
        let Some(old) = emulator() else { return };
        let output = asked(old, &["--config", file.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{said}");
        let unit = name.trim_start_matches("cpu.");
        assert!(said.contains(name) && said.contains(&format!("this CPU has no {unit}")), "{said}");
        assert!(said.contains("cpu.portable") && said.lines().count() == 1, "{said}");
    }
}
