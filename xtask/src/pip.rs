//! Python packages in virtual environments under the target folder.

use std::path::Path;
use std::process::Command;

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
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"];
    finish(Command::new(folder.join("bin/python")).args(pip).args(more).arg(package))
}

fn finish(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{name}: {error}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let last = errors.trim().lines().last().unwrap_or("no message");
    if output.status.success() { Ok(()) } else { Err(format!("{name} ended with {}: {last}", output.status)) }
}
