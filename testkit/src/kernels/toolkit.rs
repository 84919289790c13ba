//! Finds nvcc, or installs it.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::target;
use crate::at;

/// The oldest version that knows every architecture of [`super::cuda::RELEASE`].
const OLDEST: (u32, u32) = (12, 8);
/// The pinned wheels of the compiler, for `pip install -r`; of the run-time libraries they have only the small one.
const REQUIREMENTS: &str = "testkit/requirements-cuda.txt";

/// A CUDA compiler that is new enough.
#[derive(Clone, Debug)]
pub struct Toolkit {
    /// The program.
    pub nvcc: PathBuf,
    /// The output of `nvcc --version`.
    pub version: String,
}

/// Returns the first of: nvcc on PATH, under `CUDA_HOME`, installed by an earlier call, and, with `fetch`, installed now.
///
/// # Errors
/// There is none, it is too old, or it cannot be installed.
pub fn find(root: &Path, fetch: bool) -> Result<Toolkit, String> {
    let fetched = target(root).join("cuda-toolkit");
    let program = fetched.join("nvidia/cu13/bin/nvcc");
    let home = std::env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin/nvcc"));
    let files = on_path("nvcc").into_iter().chain(home).chain([program.clone()]);
    if let Some(nvcc) = files.into_iter().find(|file| file.is_file()) {
        return examine(nvcc);
    }
    if !fetch {
        return Err(
            "found no nvcc on PATH, under CUDA_HOME or in target/cuda-toolkit; install CUDA 12.8 or newer, or download the pinned compiler (100 MB) with `cargo xtask build-kernels --fetch`"
                .into(),
        );
    }
    install(root, &fetched)?;
    examine(program)
}

/// Returns the path of a program on PATH.
pub fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

fn examine(nvcc: PathBuf) -> Result<Toolkit, String> {
    let output = Command::new(&nvcc).arg("--version").output().map_err(at(&nvcc))?;
    let version = String::from_utf8_lossy(&output.stdout).into_owned();
    let name = nvcc.display();
    match release(&version) {
        None => Err(format!(
            "{name} --version: found {version:?}, expected `release` and a number; install CUDA 12.8 or newer"
        )),
        Some(found) if found < OLDEST => Err(format!(
            "{name}: found CUDA {}.{}, expected {}.{} or newer for sm_100 and sm_120; update it, or remove it from PATH and CUDA_HOME and pass --fetch",
            found.0, found.1, OLDEST.0, OLDEST.1
        )),
        Some(_) => Ok(Toolkit { nvcc, version }),
    }
}

/// Returns the two numbers after `release`.
fn release(version: &str) -> Option<(u32, u32)> {
    let number = version.split_once("release ")?.1.split([',', ' ', '\n']).next()?;
    let (major, minor) = number.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn install(root: &Path, target: &Path) -> Result<(), String> {
    let pips: [&[&str]; 3] = [&["pip"], &["pip3"], &["python3", "-m", "pip"]];
    let pip = pips.into_iter().find(|pip| on_path(pip[0]).is_some());
    let pip = pip.ok_or("--fetch: found no pip on PATH; install python3-pip")?;
    println!("xtask: {} installs {REQUIREMENTS} into {}", pip.join(" "), target.display());
    let status = Command::new(pip[0])
        .args(&pip[1..])
        .args(["install", "--no-deps", "--no-compile", "--quiet", "--disable-pip-version-check", "--target"])
        .arg(target)
        .arg("-r")
        .arg(root.join(REQUIREMENTS))
        .status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("--fetch: pip ended with {status}; its messages are above")),
        Err(error) => Err(format!("--fetch: {}: {error}", pip[0])),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_release_is_two_numbers() {
        let text = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\n";
        assert_eq!(release(text), Some((13, 0)));
        assert_eq!(release("gcc 12"), None);
    }

    #[cfg(unix)]
    #[test]
    fn a_compiler_that_is_too_old_is_one_clear_line() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("nvcc");
        std::fs::write(&program, "#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let problem = examine(program).unwrap_err();
        assert!(problem.contains("found CUDA 11.8, expected 12.8 or newer for sm_100 and sm_120"), "{problem}");
        assert!(!problem.contains('\n'), "{problem}");
    }
}
