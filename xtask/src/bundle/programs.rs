//! The programs of a bundle: built for release, stripped and compressed.

use std::path::Path;
use std::process::Command;

use super::{Version, at, newest};
use crate::cargo;

/// Crates whose integration tests are in the bundle, each as one program with the crate's name.
const TESTED: [&str; 4] = ["attention-kernels", "models", "sampling", "engine"];

/// Builds all programs into a folder, and returns the C library that they need.
pub(super) fn build(root: &Path, folder: &Path) -> Result<Version, String> {
    std::fs::create_dir_all(folder).map_err(at(folder))?;
    let mut needed = pack(&cargo::build_quire(root, "release")?, &folder.join("quire"))?;
    for package in TESTED {
        let programs = cargo::test_programs(root, &["--release", "--package", package, "--test", "all"])?;
        let program = programs.iter().find(|program| program.target == "all");
        let program = program.ok_or_else(|| format!("cargo built no test program `all` of {package}"))?;
        needed = needed.max(pack(&program.file, &folder.join(package))?);
    }
    Ok(needed)
}

/// Writes `to.xz`, the program or library without symbols, and returns the C library that it needs.
pub(super) fn pack(program: &Path, to: &Path) -> Result<Version, String> {
    call(Command::new("strip").arg("--strip-all").arg("-o").arg(to).arg(program), "binutils")?;
    let needed = newest(&std::fs::read(to).map_err(at(to))?);
    compress(to)?;
    Ok(needed)
}

/// Replaces a file by `file.xz`, which is a quarter smaller than with gzip.
pub(super) fn compress(file: &Path) -> Result<(), String> {
    call(Command::new("xz").args(["-6", "--threads=0", "--force"]).arg(file), "xz-utils")
}

/// Replaces folders of a bundle by `cases.tar.xz`.
pub(super) fn pack_cases(bundle: &Path, folders: &[&str]) -> Result<(), String> {
    let archive = bundle.join("cases.tar");
    let same = ["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"];
    call(Command::new("tar").args(same).arg("-C").arg(bundle).arg("-cf").arg(&archive).args(folders), "tar")?;
    for top in folders.iter().filter_map(|folder| folder.split('/').next()) {
        std::fs::remove_dir_all(bundle.join(top)).map_err(at(bundle))?;
    }
    compress(&archive)
}

/// Runs a program; if it does not start, the error names the package to install.
pub(super) fn call(command: &mut Command, package: &str) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{name} {:?} ended with {status}", command.get_args().last().unwrap_or_default())),
        Err(error) => Err(format!("{name}: {error}; install {package}")),
    }
}
