//! The programs of a bundle: release, stripped, pressed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Version, at, newest};
use testkit::kernels;

/// Crates whose integration tests are in the bundle, each as one program of the crate's name.
const TESTED: [&str; 4] = ["attention-kernels", "models", "sampling", "engine"];
/// Name of the test target of each.
const TARGET: &str = "all";

/// Builds them all into a folder, and returns the C library that they need.
pub(super) fn build(root: &Path, folder: &Path) -> Result<Version, String> {
    std::fs::create_dir_all(folder).map_err(|error| at(folder, error))?;
    let release = ["--release", "--locked"];
    cargo(root, &[&["build", "--package", "cli", "--bin", "quire"], &release[..]].concat())?;
    let mut needed = pack(&kernels::target(root).join("release/quire"), &folder.join("quire"))?;
    for package in TESTED {
        let build = ["test", "--package", package, "--test", TARGET, "--no-run", "--message-format=json"];
        let program = executable(&cargo(root, &[&build, &release[..]].concat())?, TARGET)?;
        needed = needed.max(pack(&program, &folder.join(package))?);
    }
    Ok(needed)
}

/// A copy without symbols, in half of its size: `to.gz`. Returns the C library that it needs.
fn pack(program: &Path, to: &Path) -> Result<Version, String> {
    call(Command::new("strip").arg("--strip-all").arg("-o").arg(to).arg(program), "binutils")?;
    let needed = newest(&std::fs::read(to).map_err(|error| at(to, error))?);
    press(to)?;
    Ok(needed)
}

/// `file.gz` in its place, pressed hardest, and without the time, so that the same file gives the same bytes.
pub(super) fn press(file: &Path) -> Result<(), String> {
    call(Command::new("gzip").args(["-9", "--no-name"]).arg(file), "gzip")
}

fn call(command: &mut Command, package: &str) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{name} {:?} ended with {status}", command.get_args().last().unwrap_or_default())),
        Err(error) => Err(format!("{name}: {error}; install {package}")),
    }
}

/// Runs the cargo that started this program, and returns its standard output.
fn cargo(root: &Path, args: &[&str]) -> Result<String, String> {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    println!("xtask: cargo {}", args.join(" "));
    let output = Command::new(program).args(args).current_dir(root).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("cargo did not start: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo {} ended with {}", args.join(" "), output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The test program that cargo's messages name.
fn executable(messages: &str, test: &str) -> Result<PathBuf, String> {
    let (field, name) = ("\"executable\":\"", format!("\"name\":\"{test}\""));
    let named = messages.lines().filter(|line| line.contains(&name));
    let path = named.filter_map(|line| line.split_once(field)?.1.split('"').next()).next_back();
    path.map(PathBuf::from).ok_or_else(|| format!("cargo named no program of the tests {test}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_program_is_the_one_that_cargo_names() {
        let messages = "{\"reason\":\"x\",\"target\":{\"name\":\"device\"},\"executable\":null}\n\
                        {\"target\":{\"name\":\"conformance\"},\"executable\":\"/t/deps/conformance-1\",\"fresh\":true}\n";
        assert_eq!(executable(messages, "conformance"), Ok(PathBuf::from("/t/deps/conformance-1")));
        assert!(executable(messages, "device").is_err() && executable("{}", "conformance").is_err());
    }
}
