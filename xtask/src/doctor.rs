//! `cargo xtask doctor`: what this machine has, and what that means for Quire. It never fails; for something missing it prints a line.

use std::fmt::Write;
use std::path::Path;

use testkit::capability::{Capability, driver, first_line};
use testkit::kernels::{self, toolkit};

/// Returns two lines per subject, and a line per capability.
pub fn report(root: &Path) -> String {
    let mut text = String::new();
    let mut line = |name: &str, found: String, meaning: &str| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<12} {found}\n{:<12}   {meaning}", "");
    };

    let (rust, meaning) = rust(root);
    line("rust", rust, &meaning);
    line("lints", pinned(root), "rust-toolchain.toml pins the compiler, because lints differ between compilers");
    let missing: Vec<&str> =
        ["fmt", "clippy"].into_iter().filter(|tool| first_line("cargo", &[tool, "--version"]).is_none()).collect();
    match missing.is_empty() {
        true => line("components", "rustfmt, clippy".into(), "`cargo xtask ci` can run"),
        false => line(
            "components",
            format!("missing: {}", missing.join(", ")),
            "`cargo xtask ci` needs them; run rustup component add rustfmt clippy",
        ),
    }

    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    match first_line(&compiler, &["--version"]) {
        Some(version) => line("C compiler", version, "enough to build and run Quire; the tests need more, see below"),
        None => line(
            "C compiler",
            format!("{compiler}: not found"),
            "needed to link and by a dependency; install gcc or clang",
        ),
    }

    line("cores", kernels::cores().to_string(), "the default of --threads");
    let (names, variants): (Vec<&str>, Vec<&str>) = vector_units().into_iter().unzip();
    let names =
        if names.is_empty() { "no vector unit that Quire has kernels for".to_owned() } else { names.join(", ") };
    let best = variants.last().unwrap_or(&"cpu.portable");
    let meaning = format!("the fastest kernels here are {best}; `quire kernels` shows which are chosen");
    line("CPU", format!("{}: {names}", std::env::consts::ARCH), &meaning);

    let gpu = "not used by default: --device auto takes the CPU";
    let nvcc = toolkit::find(root, false).map(|found| found.nvcc.display().to_string());
    line("nvcc", nvcc.unwrap_or_else(|problem| problem), gpu);
    line("GPU driver", driver().unwrap_or("no libcuda.so.1 in the usual folders").to_owned(), gpu);

    text += "\nWhat tests need (a test without it reports NOT RUN, or fails if QUIRE_REQUIRE names it):\n";
    for capability in Capability::ALL {
        let (mark, how) = match capability.is_present() {
            true => ("yes", String::new()),
            false => ("no", format!("; {}", capability.how())),
        };
        let _ = writeln!(text, "{:<12} {mark:<3} {}{how}", capability.name(), capability.what());
    }
    text
}

/// Returns the value of `QUIRE_REQUIRE` for CI on this machine: what every machine of CI must have, and what this one has.
pub fn require() -> String {
    let wanted = |capability: &Capability| Capability::OF_CI.contains(capability) || capability.is_present();
    let names: Vec<&str> = Capability::ALL.into_iter().filter(wanted).map(Capability::name).collect();
    names.join(",")
}

/// Returns the compiler's version, and whether it builds the workspace.
fn rust(root: &Path) -> (String, String) {
    let Some(found) = first_line("rustc", &["--version"]) else {
        return ("rustc: not found".into(), "install a toolchain from https://rustup.rs".into());
    };
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap_or_default();
    let wanted =
        manifest.lines().find_map(|line| line.strip_prefix("rust-version = ")).unwrap_or_default().trim_matches('"');
    let meaning = match (minor(found.split_whitespace().nth(1).unwrap_or_default()), minor(wanted)) {
        (Some(found), Some(least)) if found < least => {
            format!("older than {wanted}, the oldest version that builds Quire; run rustup update")
        }
        _ => format!("Quire needs {wanted} or newer"),
    };
    (found, meaning)
}

/// Returns the compiler that CI lints with, and whether this one is the same.
fn pinned(root: &Path) -> String {
    let file = std::fs::read_to_string(root.join("rust-toolchain.toml")).unwrap_or_default();
    let line = file.lines().find_map(|line| line.strip_prefix("channel = "));
    let pinned = line.unwrap_or("none").trim_matches('"');
    let found = first_line("rustc", &["--version"]).unwrap_or_default();
    match found.split_whitespace().nth(1) {
        Some(version) if version == pinned => format!("{pinned}, the same as rustc here"),
        Some(version) => format!("{pinned}, but rustc here is {version}; run rustup toolchain install {pinned}"),
        None => pinned.to_owned(),
    }
}

/// Returns the major and minor number of a version.
pub fn minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Returns the vector units of this CPU that kernels are written for, each with the name of its variant, slowest first.
fn vector_units() -> Vec<(&'static str, &'static str)> {
    let units = [
        (Capability::Avx2, "AVX2 with FMA", "cpu.avx2"),
        (Capability::Avx512, "AVX-512", "cpu.avx512"),
        (Capability::Amx, "AMX", "cpu.amx_bf16"),
        (Capability::Neon, "NEON", "cpu.neon"),
    ];
    units.into_iter().filter(|(unit, ..)| unit.is_present()).map(|(_, name, variant)| (name, variant)).collect()
}
