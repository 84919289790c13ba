//! `cargo xtask gpu-bundle`: one folder that proves and times the CUDA kernels on a bare GPU machine.
//!
//! ```text
//! target/gpu-bundle/  run.sh         what to start there; it says how
//!                     quire.gz       release, stripped; run.sh unpacks it beside itself
//!                     conformance    the conformance tests, release, stripped
//!                     kernels/       fat binaries, and the host libraries for `run.sh --device cuda-sim`
//!                     reference/     the cases of attention-kernels/tests/reference
//!                     bundle.txt     what it was made of
//! ```
//!
//! It takes no toolchain and no network there: a driver, bash, gzip, coreutils, and a C library as new as the newest symbol that the
//! programs ask for, which is read from them ([`newest`]), written into `run.sh` and checked by it first. Rust's standard
//! library and `libcuda` need the shared C library, so the programs are not static; a bundle made on an older system runs
//! on older ones.

mod glibc;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::kernels::{self, cuda, host, resources, toolkit};
use crate::workspace;

pub use glibc::{Version, newest};

/// Most bytes of a bundle: what is carried to a machine whose lease counts every minute.
pub const MOST_BYTES: u64 = 25 << 20;
const SCRIPT: &str = include_str!("run.sh");

/// What to put into it.
#[derive(Clone, Debug)]
pub struct Options {
    /// As nvcc names architectures, without `sm_`; none: 90a alone, an H100 or H200.
    pub architectures: Vec<String>,
    /// Install the pinned compiler under `target/` where none is found.
    pub fetch: bool,
    /// Compilers that run at once.
    pub jobs: usize,
}

/// Makes the bundle anew and returns its folder.
///
/// # Errors
/// One line: what is missing, what did not compile, or that the bundle is too large.
pub fn run(root: &Path, options: &Options) -> Result<PathBuf, String> {
    let folder = kernels::target(root).join("gpu-bundle");
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(at(&folder, error)),
        _ => {}
    }
    let into = |name: &str| folder.join(name);
    std::fs::create_dir_all(into("kernels")).map_err(|error| at(&folder, error))?;

    let names: Vec<&str> = options.architectures.iter().map(String::as_str).collect();
    let architectures = if names.is_empty() { &["90a"][..] } else { &names };
    let toolkit = toolkit::find(root, options.fetch)?;
    let compiler = host::compiler()?;
    for manifest in &kernels::manifests(root)? {
        let built = cuda::build(root, manifest, &toolkit, architectures, options.jobs)?;
        resources::within_limits(&built.kernels)?;
        cuda::write(root, &into("kernels"), manifest, &built)?;
        let library = host::library(root, manifest, &compiler, host::Sanitizer::None, options.jobs)?;
        copy(&library, &into("kernels"))?;
    }

    cargo(root, &["build", "--release", "--locked", "--package", "server", "--bin", "quire"])?;
    let quire = kernels::target(root).join("release/quire");
    let tests =
        ["test", "--release", "--locked", "--package", "attention-kernels", "--test", "conformance", "--no-run"];
    let conformance = executable(&cargo(root, &[&tests[..], &["--message-format=json"]].concat())?)?;
    let mut needed = Version::default();
    for (program, name) in [(quire, "quire"), (conformance, "conformance")] {
        strip(&program, &into(name))?;
        let bytes = std::fs::read(into(name)).map_err(|error| at(&into(name), error))?;
        needed = needed.max(newest(&bytes));
    }

    // Half of its size. Pressed hardest, and without the time, so that the same program gives the same file.
    let status = Command::new("gzip").args(["-9", "--no-name"]).arg(into("quire")).status();
    if !status.map_err(|error| format!("gzip: {error}; install it"))?.success() {
        return Err(format!("gzip failed on {}", into("quire").display()));
    }

    let cases = root.join("attention-kernels/tests/reference");
    std::fs::create_dir_all(into("reference")).map_err(|error| at(&folder, error))?;
    for entry in std::fs::read_dir(&cases).map_err(|error| at(&cases, error))?.flatten() {
        copy(&entry.path(), &into("reference"))?;
    }
    script(&into("run.sh"), needed)?;
    let commit = Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(root).output();
    let commit = commit.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    let text = format!(
        "Quire, commit {commit}\narchitectures: {}\nnvcc: {}\nC library: glibc {needed} or newer\nstart ./run.sh\n",
        architectures.join(", "),
        toolkit.version.lines().last().unwrap_or_default()
    );
    std::fs::write(into("bundle.txt"), text).map_err(|error| at(&folder, error))?;

    let bytes = check_size(&folder, MOST_BYTES)?;
    println!("xtask: {}: {:.1} MiB, for glibc {needed} or newer", folder.display(), mib(bytes));
    Ok(folder)
}

/// Writes `run.sh` for programs that need that C library.
///
/// # Errors
/// The file could not be written.
pub fn script(file: &Path, needed: Version) -> Result<(), String> {
    std::fs::write(file, SCRIPT.replace("@GLIBC@", &needed.to_string())).map_err(|error| at(file, error))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let may_run = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(file, may_run).map_err(|error| at(file, error))?;
    }
    Ok(())
}

/// The bytes of all files of a folder.
///
/// # Errors
/// More than `most`, and which files are the largest.
pub fn check_size(folder: &Path, most: u64) -> Result<u64, String> {
    let mut files: Vec<(u64, PathBuf)> = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).map_err(|error| at(&folder, error))?.flatten() {
            match entry.metadata() {
                Ok(found) if found.is_dir() => folders.push(entry.path()),
                Ok(found) => files.push((found.len(), entry.path())),
                Err(error) => return Err(at(&entry.path(), error)),
            }
        }
    }
    files.sort();
    let bytes = files.iter().map(|(bytes, _)| bytes).sum();
    if bytes <= most {
        return Ok(bytes);
    }
    let largest = files.iter().rev().take(3);
    let largest: Vec<String> = largest.map(|(bytes, path)| format!("{} {:.1}", path.display(), mib(*bytes))).collect();
    Err(format!(
        "the bundle has {:.1} MiB, at most {:.1} are carried; the largest files: {}; name fewer --arch",
        mib(bytes),
        mib(most),
        largest.join(", ")
    ))
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn at(path: &Path, error: impl std::fmt::Display) -> String {
    format!("{}: {error}", path.display())
}

fn copy(file: &Path, folder: &Path) -> Result<(), String> {
    let name = file.file_name().unwrap_or_default();
    std::fs::copy(file, folder.join(name)).map(|_| ()).map_err(|error| at(file, error))
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
fn executable(messages: &str) -> Result<PathBuf, String> {
    let field = "\"executable\":\"";
    let named = messages.lines().filter(|line| line.contains("\"name\":\"conformance\""));
    let path = named.filter_map(|line| line.split_once(field)?.1.split('"').next()).next_back();
    path.map(PathBuf::from).ok_or_else(|| "cargo named no program of the conformance tests".to_owned())
}

/// A copy without symbols.
fn strip(program: &Path, to: &Path) -> Result<(), String> {
    let status = Command::new("strip").arg("--strip-all").arg("-o").arg(to).arg(program).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("strip {} ended with {status}", program.display())),
        Err(error) => Err(format!("strip: {error}; install binutils")),
    }
}

/// For tests: the workspace's bundle with default options.
///
/// # Errors
/// Those of [`run`].
pub fn default(jobs: usize) -> Result<PathBuf, String> {
    run(&workspace::root(), &Options { architectures: Vec::new(), fetch: false, jobs })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_program_is_the_one_that_cargo_names() {
        let messages = "{\"reason\":\"x\",\"target\":{\"name\":\"device\"},\"executable\":null}\n\
                        {\"target\":{\"name\":\"conformance\"},\"executable\":\"/t/deps/conformance-1\",\"fresh\":true}\n";
        assert_eq!(executable(messages), Ok(PathBuf::from("/t/deps/conformance-1")));
        assert!(executable("{}").is_err());
    }
}
