//! Installs the packages into a virtual environment under the target folder, each on its own: one that cannot be installed does not
//! prevent the others.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use testkit::capability::Capability;
use testkit::{kernels, not_run};

use crate::pip;

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
        for requirement in REQUIREMENTS.lines() {
            let (name, version) = requirement.split_once("==").unwrap_or((requirement, ""));
            match pip::install(python, &packages.folder, requirement, &[]) {
                Ok(()) => drop(packages.versions.insert(name, version)),
                Err(problem) => {
                    not_run::check(Capability::Routers, &format!("{requirement} cannot be installed: {problem}"))?;
                }
            }
        }
        Ok(packages)
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
