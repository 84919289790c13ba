//! `cargo xtask python`: builds the wheel of the Python package, installs it into a virtual environment under the target folder, runs its
//! tests there, and checks its types.
//!
//! The tools come from a package index, once. Where they cannot be installed, that is reported.

use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::capability::{self, Capability};
use testkit::not_run;

use crate::pip;

/// What builds and tests the package. NumPy is optional for users; the tests of arrays need it.
const TOOLS: [&str; 4] = ["maturin==1.16.0", "pytest==9.2.0", "numpy", "mypy==2.4.1"];
/// The second type checker, with the interpreter that runs it.
const PYRIGHT: &str = "pyright[nodejs]";

/// How the package is built.
pub struct Options {
    /// Interpreter that makes the environment.
    pub python: PathBuf,
    /// Builds as for users, which takes long, instead of with the profile of tests.
    pub dist: bool,
}

/// Builds and tests the package.
///
/// # Errors
/// The build or a test failed. Or the tools are required and cannot be installed.
pub fn run(root: &Path, options: &Options) -> Result<(), String> {
    let folder = capability::python_package();
    for tool in TOOLS {
        if let Err(reason) = pip::install(&options.python, &folder, tool, &[]) {
            return not_run::check(Capability::PythonPackage, &format!("xtask python needs {tool}: {reason}"));
        }
    }
    let wheel = build(root, &folder, options)?;
    pip::finish(Command::new(folder.join("bin/python")).args(REINSTALL).arg(&wheel))?;
    let package = root.join("python");
    let settings = package.join("pyproject.toml");
    step("tests", in_folder(&folder, "pytest", &package.join("tests")).args(["-q", "-p", "no:cacheprovider"]))?;
    let mypy = |arguments: &[&str]| {
        let mut command = in_folder(&folder, "mypy", &folder);
        command.arg("--config-file").arg(&settings).args(arguments);
        command
    };
    step("types of the package", &mut mypy(&[]))?;
    step("types of the tests", mypy(&["--follow-imports=silent"]).arg(package.join("tests")))?;
    step("stubs", in_folder(&folder, "stubtest", &folder).arg("quire._quire"))?;
    match pip::install(&options.python, &folder, PYRIGHT, &[]) {
        Ok(()) => {
            step("types by pyright", in_folder(&folder, "pyright", &folder).arg("--project").arg(&settings))?;
            // What users import is completely typed.
            let names = ["--ignoreexternal", "--verifytypes", "quire"];
            step("types that users see", in_folder(&folder, "pyright", &folder).args(names))?;
        }
        Err(reason) => not_run::check(Capability::PythonPackage, &format!("the check by pyright needs it: {reason}"))?,
    }
    println!("xtask: passed; {}", wheel.display());
    Ok(())
}

/// Arguments of Python that replace an installed package by a wheel.
const REINSTALL: [&str; 7] =
    ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--force-reinstall", "--no-deps"];

/// Builds the wheel. It is the only file of its folder.
fn build(root: &Path, folder: &Path, options: &Options) -> Result<PathBuf, String> {
    let wheels = folder.join("wheels");
    // A wheel of an earlier version has another name.
    let _ = std::fs::remove_dir_all(&wheels);
    let mut maturin = in_folder(folder, "maturin", &root.join("python"));
    maturin.args(["build", "--locked", "--interpreter"]).arg(folder.join("bin/python")).arg("--out").arg(&wheels);
    if !options.dist {
        maturin.args(["--profile", "dev", "--compatibility", "linux"]);
    }
    step("wheel", maturin.env("CARGO_TARGET_DIR", testkit::kernels::target(root)))?;
    let found = std::fs::read_dir(&wheels).map_err(|error| format!("{}: {error}", wheels.display()))?;
    let wheel = found.flatten().map(|entry| entry.path()).next();
    wheel.ok_or_else(|| format!("{}: found no wheel, expected the one that maturin has built", wheels.display()))
}

/// A program of the environment in a working folder from which Python cannot import the sources.
fn in_folder(environment: &Path, program: &str, working: &Path) -> Command {
    let programs = environment.join("bin");
    let mut command = Command::new(programs.join(program));
    // pyright asks the interpreter on the path where packages are.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(programs).chain(std::env::split_paths(&path));
    if let Ok(path) = std::env::join_paths(paths) {
        command.env("PATH", path);
    }
    command.current_dir(working);
    command
}

fn step(title: &str, command: &mut Command) -> Result<(), String> {
    println!("xtask: {title}");
    let status = command.status().map_err(|error| format!("{title}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{title} of the Python package ended with {status}")) }
}
