//! Installs the packages into a virtual environment under the target folder, each on its own: one that cannot be installed does not
//! prevent the others.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use testkit::capability::Capability;
use testkit::{kernels, not_run};

/// Names and versions, one per line.
const REQUIREMENTS: &str = include_str!("requirements.txt");

/// The virtual environment.
pub struct Packages {
    folder: PathBuf,
    /// Versions of what is installed, by name.
    versions: BTreeMap<&'static str, &'static str>,
}

impl Packages {
    /// Installs what is missing with the interpreter `python`.
    ///
    /// # Errors
    /// A package cannot be installed although `QUIRE_REQUIRE` names the capability `routers`.
    pub fn install(root: &Path, python: &Path) -> Result<Packages, String> {
        let folder = kernels::target(root).join("routers");
        let mut packages = Packages { folder, versions: BTreeMap::new() };
        let environment = match packages.program("python").is_file() {
            true => Ok(()),
            false => finish(Command::new(python).args(["-m", "venv"]).arg(&packages.folder)),
        };
        for requirement in REQUIREMENTS.lines() {
            let (name, version) = requirement.split_once("==").unwrap_or((requirement, ""));
            let installed = environment.clone().and_then(|()| packages.pip(requirement));
            match installed {
                Ok(()) => drop(packages.versions.insert(name, version)),
                Err(problem) => {
                    not_run::check(Capability::Routers, &format!("{requirement} cannot be installed: {problem}"))?;
                }
            }
        }
        Ok(packages)
    }

    fn pip(&self, requirement: &str) -> Result<(), String> {
        println!("xtask: pip installs {requirement} into {}, if it is missing", self.folder.display());
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"];
        finish(Command::new(self.program("python")).args(pip).arg(requirement))
    }

    /// Returns the version of a package, or nothing if it is not installed.
    pub fn version(&self, package: &str) -> Option<&'static str> {
        self.versions.get(package).copied()
    }

    /// Returns a program of the environment.
    pub fn program(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }

    /// Returns the file for what a program prints.
    pub fn log(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.log"))
    }
}

/// Runs a command to its end; an error is the last line that it printed.
fn finish(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let Output { status, stderr, .. } = command.output().map_err(|error| format!("{name}: {error}"))?;
    let errors = String::from_utf8_lossy(&stderr);
    match status.success() {
        true => Ok(()),
        false => Err(format!("{name} ended with {status}: {}", errors.lines().last().unwrap_or("no message"))),
    }
}
