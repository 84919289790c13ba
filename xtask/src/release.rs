//! `cargo xtask release`: the archive of a release for this machine, with its checksum, and what a user does with it.
//!
//! ```text
//! quire-v0.1.0-x86_64-linux/
//!   quire  README.md  CHANGELOG.md  LICENSE-APACHE  LICENSE-MIT
//!   completions/quire.bash  _quire  quire.fish
//!   man/quire.1  quire-serve.1 …
//! ```
//!
//! The archive is then unpacked in an empty folder, and the program of that folder must answer.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::kernels;

use crate::cargo;

/// Files of the repository that an archive has.
const FILES: [&str; 4] = ["README.md", "CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT"];

/// Shells whose completions an archive has, and the names of the files, by which the shells find them.
const COMPLETIONS: [(&str, &str); 3] = [("bash", "quire.bash"), ("zsh", "_quire"), ("fish", "quire.fish")];

/// Name of the file of checksums.
const SUMS: &str = "SHA256SUMS";

/// What an archive is for.
pub struct Options {
    /// Machine and system, as in `x86_64-linux`.
    pub name: String,
    /// How the program is built.
    pub profile: String,
}

/// The name of this machine and system.
pub fn here() -> String {
    format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)
}

/// Builds the archive and checks it. It and the checksum are in `release-archives/` in the target folder.
///
/// # Errors
/// The program cannot be built, a tool is missing, or the archive does not hold what it should.
pub fn run(root: &Path, options: &Options) -> Result<(), String> {
    let program = cargo::build_quire(root, &options.profile)?;
    let version = output(Command::new(&program).arg("--version"))?;
    let version = version.split_whitespace().last().unwrap_or_default();
    let folder = kernels::target(root).join("release-archives");
    let name = format!("quire-v{version}-{}", options.name);
    let archive = pack(root, &program, &folder, &name)?;
    let size = fs::metadata(&archive).map_err(|error| in_file(&archive, error))?.len();
    check(&folder, &name, version)?;
    println!("xtask: passed; {}, {:.1} MiB", archive.display(), size as f64 / f64::from(1 << 20));
    Ok(())
}

/// Writes the archive and its checksum.
fn pack(root: &Path, program: &Path, folder: &Path, name: &str) -> Result<PathBuf, String> {
    let contents = folder.join(name);
    // What an earlier run left may be of another version.
    let _ = fs::remove_dir_all(folder);
    for part in ["completions", "man"] {
        let part = contents.join(part);
        fs::create_dir_all(&part).map_err(|error| in_file(&part, error))?;
    }
    let mut copies: Vec<(PathBuf, PathBuf)> = FILES.iter().map(|file| (root.join(file), contents.join(file))).collect();
    copies.push((program.to_owned(), contents.join("quire")));
    for (from, to) in copies {
        fs::copy(&from, &to).map_err(|error| in_file(&from, error))?;
    }
    for (shell, file) in COMPLETIONS {
        let script = output(Command::new(program).args(["completions", shell]))?;
        let to = contents.join("completions").join(file);
        fs::write(&to, script).map_err(|error| in_file(&to, error))?;
    }
    output(Command::new(program).arg("man").arg(contents.join("man")))?;
    let archive = folder.join(format!("{name}.tar.gz"));
    output(Command::new("tar").arg("-czf").arg(&archive).arg("-C").arg(folder).arg(name))?;
    let sum = sha256(folder, archive.file_name().unwrap_or_default())?;
    let sums = folder.join(SUMS);
    fs::write(&sums, sum).map_err(|error| in_file(&sums, error))?;
    Ok(archive)
}

/// Does what a user does: compares the checksum, unpacks the archive, and asks the program.
fn check(folder: &Path, name: &str, version: &str) -> Result<(), String> {
    let sums = fs::read_to_string(folder.join(SUMS)).map_err(|error| in_file(&folder.join(SUMS), error))?;
    let archive = format!("{name}.tar.gz");
    if sha256(folder, OsStr::new(&archive))? != sums {
        return Err(format!("{archive}: its checksum is not that of {SUMS}"));
    }
    let unpacked = folder.join("unpacked");
    fs::create_dir(&unpacked).map_err(|error| in_file(&unpacked, error))?;
    output(Command::new("tar").arg("-xzf").arg(folder.join(&archive)).arg("-C").arg(&unpacked))?;
    let contents = unpacked.join(name);
    let pages = ["quire.1", "quire-serve.1"].map(|page| format!("man/{page}"));
    let scripts = COMPLETIONS.map(|(_, file)| format!("completions/{file}"));
    for file in FILES.iter().map(|file| file.to_string()).chain(pages).chain(scripts) {
        let path = contents.join(&file);
        let text = fs::read_to_string(&path).map_err(|error| in_file(&path, error))?;
        if text.trim().is_empty() {
            return Err(format!("{file}: found nothing in it"));
        }
    }
    output(Command::new("bash").arg("-n").arg(contents.join("completions/quire.bash")))?;
    let program = contents.join("quire");
    let said = output(Command::new(&program).arg("--version"))?;
    if said.split_whitespace().last() != Some(version) {
        return Err(format!("{}: says {said:?}, expected version {version}", program.display()));
    }
    let question = ["generate", "-p", "The capital of France is", "--temperature", "0", "--max-tokens", "12"];
    let answer = output(Command::new(&program).args(question))?;
    match answer.contains("Paris") {
        true => Ok(()),
        false => Err(format!("{}: answered {answer:?}, expected Paris", program.display())),
    }
}

/// The line of a file in a list of SHA-256 sums.
fn sha256(folder: &Path, file: &OsStr) -> Result<String, String> {
    // macOS has the second.
    let tools: [(&str, &[&str]); 2] = [("sha256sum", &[]), ("shasum", &["-a", "256"])];
    let mut reasons = Vec::new();
    for (tool, args) in tools {
        match output(Command::new(tool).args(args).arg(file).current_dir(folder)) {
            Ok(sum) => return Ok(sum),
            Err(reason) => reasons.push(reason),
        }
    }
    Err(reasons.join("; "))
}

/// The standard output of a command that must succeed.
fn output(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = command.output().map_err(|error| format!("{program} did not start: {error}"))?;
    match done.status.success() {
        true => Ok(String::from_utf8_lossy(&done.stdout).into_owned()),
        false => Err(format!("{program} ended with {}: {}", done.status, String::from_utf8_lossy(&done.stderr).trim())),
    }
}

fn in_file(path: &Path, error: std::io::Error) -> String {
    format!("{}: {error}", path.display())
}
