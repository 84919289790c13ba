//! `cargo xtask doctor`: what this machine has, and what that means for Quire. It never fails: what is missing is a
//! line that says so.

use std::fmt::Write;
use std::path::Path;

use testkit::capability::{Capability, driver, first_line};
use testkit::kernels::toolkit;

/// One line per thing, ending in a line break.
pub fn report(root: &Path) -> String {
    let mut text = String::new();
    let mut line = |name: &str, found: String, meaning: &str| {
        // Writing to a String can not fail.
        let _ = writeln!(text, "{name:<12} {found}\n{:<12}   {meaning}", "");
    };

    let (rust, meaning) = rust(root);
    line("rust", rust, &meaning);
    line("lints", pinned(root), "the compiler that CI pins, as lints change from one to the next");
    let components = ["fmt", "clippy"].map(|tool| (tool, first_line("cargo", &[tool, "--version"]).is_some()));
    let missing: Vec<&str> = components.iter().filter(|(_, there)| !there).map(|(tool, _)| *tool).collect();
    if missing.is_empty() {
        line("components", "rustfmt, clippy".into(), "`cargo xtask ci` can run");
    } else {
        line(
            "components",
            format!("missing: {}", missing.join(", ")),
            "`cargo xtask ci` needs them: rustup component add rustfmt clippy",
        );
    }

    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    match first_line(&compiler, &["--version"]) {
        Some(version) => line("C compiler", version, "enough to build and run Quire; its tests need more, see below"),
        None => line(
            "C compiler",
            format!("{compiler}: not found"),
            "needed to link and by a dependency; install gcc or clang",
        ),
    }

    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    line("cores", cores.to_string(), "--threads takes all of them unless told otherwise");
    let features = cpu_features();
    let (names, variants): (Vec<&str>, Vec<&str>) = features.iter().copied().unzip();
    let names =
        if names.is_empty() { "no vector unit that kernels are written for".to_string() } else { names.join(", ") };
    let best = variants.last().unwrap_or(&"cpu.portable");
    line(
        "CPU",
        format!("{}: {names}", std::env::consts::ARCH),
        &format!("the fastest kernels here are {best}; `quire kernels` shows the choice"),
    );

    let gpu = "not used: this version computes on the CPU alone";
    line(
        "nvcc",
        toolkit::installed().map_or("not on PATH, nor under CUDA_HOME".into(), |path| path.display().to_string()),
        gpu,
    );
    line("GPU driver", driver().map_or("no libcuda.so.1 in the usual folders".into(), str::to_owned), gpu);

    let _ = writeln!(
        text,
        "\nWhat tests need (a test that lacks it reports NOT RUN, or fails where QUIRE_REQUIRE names it):"
    );
    for capability in Capability::ALL {
        let (mark, how) = match capability.is_present() {
            true => ("yes", String::new()),
            false => ("no", format!("; {}", capability.how())),
        };
        let _ = writeln!(text, "{:<12} {mark:<3} {}{how}", capability.name(), capability.what());
    }
    text
}

/// The value of `QUIRE_REQUIRE` for CI on this machine: what every machine of CI must have, and what this one has besides.
pub fn require() -> String {
    let wanted = |capability: &Capability| Capability::OF_CI.contains(capability) || capability.is_present();
    let names: Vec<&str> = Capability::ALL.into_iter().filter(wanted).map(Capability::name).collect();
    names.join(",")
}

/// The compiler's version, and whether the workspace builds with it.
fn rust(root: &Path) -> (String, String) {
    let Some(found) = first_line("rustc", &["--version"]) else {
        return ("rustc: not found".into(), "install a toolchain from https://rustup.rs".into());
    };
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap_or_default();
    let wanted =
        manifest.lines().find_map(|line| line.strip_prefix("rust-version = ")).unwrap_or_default().trim_matches('"');
    let meaning = match (minor(found.split_whitespace().nth(1).unwrap_or_default()), minor(wanted)) {
        (Some(found), Some(least)) if found < least => {
            format!("older than {wanted}, the least that Quire builds with: rustup update")
        }
        _ => format!("Quire needs {wanted} or newer"),
    };
    (found, meaning)
}

/// The compiler that the lints of CI run with, and whether this one is the same.
fn pinned(root: &Path) -> String {
    let workflow = std::fs::read_to_string(root.join(".github/workflows/ci.yml")).unwrap_or_default();
    let line = workflow.lines().find_map(|line| line.trim().strip_prefix("PINNED: "));
    let pinned = line.unwrap_or("none").trim_matches('"');
    let found = first_line("rustc", &["--version"]).unwrap_or_default();
    match found.split_whitespace().nth(1) {
        Some(version) if version == pinned => format!("{pinned}, and rustc here is the same"),
        Some(version) => {
            format!("{pinned}; rustc here is {version}, so lints may differ: rustup toolchain install {pinned}")
        }
        None => pinned.to_owned(),
    }
}

/// Major and minor number of a version.
fn minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Vector units of this CPU that a kernel variant is written for, with its name, the slowest first.
fn cpu_features() -> Vec<(&'static str, &'static str)> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            found.push(("AVX2 with FMA", "cpu.avx2"));
        }
        let wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
        if wide && is_x86_feature_detected!("avx512dq") && is_x86_feature_detected!("avx512vl") {
            found.push(("AVX-512", "cpu.avx512"));
        }
    }
    #[cfg(target_arch = "aarch64")]
    found.push(("NEON", "cpu.neon"));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::not_run::Required;

    #[test]
    fn ci_requires_its_least_and_all_that_the_machine_has() {
        let required = Required::parse(&require()).unwrap_or_default();
        for capability in Capability::ALL {
            let wanted = Capability::OF_CI.contains(&capability) || capability.is_present();
            assert_eq!(required.has(capability), wanted, "{}", capability.name());
        }
    }

    #[test]
    fn versions_compare_by_number() {
        assert!(minor("1.100.0") > minor("1.89"));
        assert_eq!(minor("1.95.0-nightly"), Some((1, 95)));
        assert_eq!(minor("unknown"), None);
    }

    #[test]
    fn every_line_is_there_on_any_machine() {
        let report = report(&testkit::workspace::root());
        let names = ["rust", "lints", "components", "C compiler", "cores", "CPU", "nvcc", "GPU driver"];
        for name in names.into_iter().chain(Capability::ALL.map(Capability::name)) {
            assert!(report.lines().any(|line| line.starts_with(name)), "{name} is missing in\n{report}");
        }
    }
}
