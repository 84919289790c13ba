//! The programs of a bundle: built, stripped and compressed.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Version, at, newest};
use crate::cargo;

/// Crates whose integration tests are in the bundle, each as one program with the crate's name.
pub(super) const TESTED: [&str; 5] = ["attention-kernels", "models", "sampling", "engine", "device"];

/// Builds all programs into an archive, and returns the C library that they need. `quire` is that of a release; the tests have a profile
/// that compiles in a fraction of the time.
pub(super) fn build(root: &Path, archive: &Path) -> Result<Version, String> {
    let mut files = vec![("quire", cargo::build_quire(root, "release")?)];
    files.extend(tests(root, &["--profile", "bundle"])?);
    archive_of(&files, archive)
}

/// Writes `archive.xz`, a tar file of programs without symbols. Together they are a third smaller than alone, because crates are in
/// several of them. Returns the C library that they need.
///
/// # Errors
/// `strip`, `tar` or `xz` is missing or fails.
pub fn archive_of(files: &[(&str, PathBuf)], archive: &Path) -> Result<Version, String> {
    let folder = archive.with_extension("d");
    super::fresh(&folder)?;
    let mut needed = Version::default();
    for (name, file) in files {
        needed = needed.max(strip(file, &folder.join(name))?);
    }
    self::archive(&folder, archive)?;
    Ok(needed)
}

/// Replaces a folder by `archive.xz`, a tar file of what is in it.
pub(super) fn archive(folder: &Path, archive: &Path) -> Result<(), String> {
    let same = ["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"];
    call(Command::new("tar").args(same).arg("-C").arg(folder).arg("-cf").arg(archive).arg("."), "tar")?;
    std::fs::remove_dir_all(folder).map_err(at(folder))?;
    compress(archive)
}

/// Writes a program or library without symbols, and returns the C library that it needs.
fn strip(program: &Path, to: &Path) -> Result<Version, String> {
    call(Command::new("strip").arg("--strip-all").arg("-o").arg(to).arg(program), "binutils")?;
    Ok(newest(&std::fs::read(to).map_err(at(to))?))
}

/// Builds the test programs with further arguments of `cargo test`, and returns the name of the crate and the file of each. One call of
/// cargo builds them all: with each alone, other features of shared crates would be in use, and the kernels compiled once for each.
pub(super) fn tests(root: &Path, args: &[&str]) -> Result<Vec<(&'static str, PathBuf)>, String> {
    let packages = TESTED.map(|package| ["--package", package]).concat();
    let programs = cargo::test_programs(root, &[args, &packages, &["--test", "all"]].concat())?;
    let one = |package: &'static str| {
        let program = programs.iter().find(|program| program.package == package && program.target == "all");
        let program = program.ok_or_else(|| format!("cargo built no test program `all` of {package}"))?;
        Ok((package, program.file.clone()))
    };
    TESTED.into_iter().map(one).collect()
}

/// Writes `to.xz`, a library without symbols, and returns the C library that it needs.
pub(super) fn pack(library: &Path, to: &Path) -> Result<Version, String> {
    let needed = strip(library, to)?;
    compress(to)?;
    Ok(needed)
}

/// Replaces a file by `file.xz`. The dictionary is as large as all programs.
pub(super) fn compress(file: &Path) -> Result<(), String> {
    call(Command::new("xz").args(["--force", "--lzma2=preset=9e,dict=192MiB"]).arg(file), "xz-utils")
}

/// Writes a program that is a script.
///
/// # Errors
/// The file cannot be written.
pub fn script(file: &Path, text: &str) -> Result<(), String> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(file, text).map_err(at(file))?;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o755)).map_err(at(file))
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
