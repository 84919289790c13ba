//! Python packages: in virtual environments under the target folder, and wheels that are only fetched.

use std::path::Path;
use std::process::Command;

/// What installs packages with other requirements than they state.
const UV: &str = "uv==0.13.9";

/// Installs a package with further arguments for pip, if it is missing, into the environment of a folder, which the interpreter `python`
/// makes if it is missing.
///
/// # Errors
/// The last line that Python printed, or that it does not start.
pub fn install(python: &Path, folder: &Path, package: &str, more: &[&str]) -> Result<(), String> {
    // The last file of a new environment.
    if !folder.join("bin/pip").is_file() {
        finish(Command::new(python).args(["-m", "venv", "--clear"]).arg(folder))?;
    }
    println!("xtask: pip installs {package} into {}, if it is missing", folder.display());
    finish(pip(&folder.join("bin/python"), "install").args(more).arg(package))
}

/// As [`install`], with other versions of packages than those that the package asks for. pip cannot do this; uv can, which comes from
/// the same index.
///
/// # Errors
/// As [`install`].
pub fn install_with(python: &Path, folder: &Path, package: &str, overrides: &str) -> Result<(), String> {
    install(python, folder, UV, &[])?;
    let file = folder.join("overrides.txt");
    std::fs::write(&file, overrides).map_err(|error| format!("{}: {error}", file.display()))?;
    println!("xtask: uv installs {package} into {}, if it is missing", folder.display());
    let mut command = Command::new(folder.join("bin/uv"));
    command.args(["pip", "install", "--quiet", "--python"]).arg(folder.join("bin/python"));
    finish(command.arg("--override").arg(&file).arg(package))
}

/// Downloads the wheel of a package into a folder. pip compares it with the hash that the index states.
///
/// # Errors
/// The last line that Python printed, or that it does not start.
pub fn download(python: &Path, folder: &Path, package: &str) -> Result<(), String> {
    // What pip would keep for later runs is as large as the wheel.
    finish(pip(python, "download").args(["--no-deps", "--no-cache-dir", "--dest"]).arg(folder).arg(package))
}

fn pip(python: &Path, task: &str) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "pip", task, "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]);
    command
}

/// Runs a program of Python.
///
/// # Errors
/// The last line that it printed, or that it does not start.
pub(crate) fn finish(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{name}: {error}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let last = errors.trim().lines().last().unwrap_or("no message");
    if output.status.success() { Ok(()) } else { Err(format!("{name} ended with {}: {last}", output.status)) }
}
