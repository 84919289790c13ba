//! What started the ranks, and which library belongs to it. A process with the library of another MPI finds itself alone.

use std::path::PathBuf;

use libloading::Library;

use super::abi::{self, Opened};
use super::error::MpiError;
use crate::symbols::reason;

/// Names the file of the library.
const LIBRARY: &str = "QUIRE_MPI_LIBRARY";

const STANDARD: &str = "libmpi_abi.so.1";
const MPICH: &str = "libmpi.so.12";
const OPEN_MPI: &str = "libmpi.so.40";

/// A program that starts ranks.
pub(super) struct Launcher {
    /// Its name.
    pub name: &'static str,
    /// Set in every rank that it starts.
    mark: &'static str,
    /// Set to the number of ranks, if the launcher says it.
    size: &'static str,
    /// Libraries that may belong to it, the most likely first.
    libraries: [&'static str; 3],
}

/// In this order: one launcher may start another, as srun starts mpiexec, and the inner ones come first.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "mpiexec of Open MPI",
        mark: "OMPI_COMM_WORLD_SIZE",
        size: "OMPI_COMM_WORLD_SIZE",
        libraries: [OPEN_MPI, STANDARD, MPICH],
    },
    Launcher { name: "mpiexec of MPICH", mark: "PMI_SIZE", size: "PMI_SIZE", libraries: [STANDARD, MPICH, OPEN_MPI] },
    Launcher {
        name: "srun --mpi=pmix",
        mark: "PMIX_RANK",
        size: "SLURM_STEP_NUM_TASKS",
        libraries: [OPEN_MPI, STANDARD, MPICH],
    },
    Launcher {
        name: "srun",
        mark: "SLURM_STEP_NUM_TASKS",
        size: "SLURM_STEP_NUM_TASKS",
        libraries: [STANDARD, MPICH, OPEN_MPI],
    },
];
const NO_LAUNCHER: Launcher =
    Launcher { name: "no launcher", mark: "", size: "", libraries: [STANDARD, MPICH, OPEN_MPI] };

impl Launcher {
    /// Returns the launcher of a process with these environment variables.
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Launcher {
        LAUNCHERS.into_iter().find(|launcher| variable(launcher.mark).is_some()).unwrap_or(NO_LAUNCHER)
    }

    /// Returns the number of ranks that it says it has started.
    pub fn size(&self, variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
        variable(self.size)?.parse().ok()
    }

    /// Opens the library that the user names, or else the first that the system finds, or else one beside an mpiexec on PATH.
    pub fn open(&self, variable: impl Fn(&str) -> Option<String>) -> Result<Opened, MpiError> {
        if let Some(file) = variable(LIBRARY) {
            let library = open(&file).map_err(|problem| MpiError::Open { file: file.clone(), problem })?;
            return abi::bind(library, &file);
        }
        let path = variable("PATH").unwrap_or_default();
        let folders: Vec<PathBuf> =
            std::env::split_paths(&path).filter(|folder| folder.join("mpiexec").is_file()).collect();
        let beside = |name| folders.iter().map(move |folder| folder.join("../lib").join(name));
        let named = self.libraries.iter().map(PathBuf::from).chain(self.libraries.iter().flat_map(beside));
        let mut unusable = None;
        for file in named.map(|file| file.to_string_lossy().into_owned()) {
            match open(&file) {
                Ok(library) => return abi::bind(library, &file),
                // A library that exists, but lacks another one, is named differently.
                Err(problem) if problem.contains(&file) && problem.contains("o such file") => {}
                Err(problem) => unusable = unusable.or(Some(MpiError::Open { file, problem })),
            }
        }
        Err(unusable.unwrap_or_else(|| MpiError::NoLibrary(self.libraries.join(", "))))
    }
}

/// Opens a library such that the plug-ins of Open MPI find its symbols.
fn open(file: &str) -> Result<Library, String> {
    // SAFETY: the initialisers of an MPI library are trusted.
    #[cfg(unix)]
    let library = unsafe {
        use libloading::os::unix;
        unix::Library::open(Some(file), unix::RTLD_NOW | unix::RTLD_GLOBAL).map(Library::from)
    };
    // SAFETY: as above.
    #[cfg(not(unix))]
    let library = unsafe { Library::new(file) };
    library.map_err(|error| reason(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_library(variables: &[(&str, &str)]) -> (&'static str, Option<usize>) {
        let variable = |name: &str| variables.iter().find(|it| it.0 == name).map(|it| it.1.to_owned());
        let launcher = Launcher::of(variable);
        (launcher.libraries[0], launcher.size(variable))
    }

    #[test]
    fn the_library_that_belongs_to_the_launcher_is_tried_first() {
        assert_eq!(first_library(&[]), (STANDARD, None));
        assert_eq!(first_library(&[("PMI_SIZE", "2"), ("PMI_RANK", "0")]), (STANDARD, Some(2)));
        let open_mpi = [("OMPI_COMM_WORLD_SIZE", "3"), ("PMIX_RANK", "0"), ("SLURM_STEP_NUM_TASKS", "1")];
        assert_eq!(first_library(&open_mpi), (OPEN_MPI, Some(3)));
        assert_eq!(first_library(&[("PMIX_RANK", "0"), ("SLURM_STEP_NUM_TASKS", "4")]), (OPEN_MPI, Some(4)));
        assert_eq!(first_library(&[("PMIX_RANK", "0")]), (OPEN_MPI, None));
        assert_eq!(first_library(&[("SLURM_STEP_NUM_TASKS", "4")]), (STANDARD, Some(4)));
    }

    #[test]
    fn a_missing_library_is_one_line_that_says_what_to_install_or_to_set() {
        let nothing = |name: &str| (name == LIBRARY).then(|| "/nonexistent/libmpi.so".to_owned());
        let line = |outcome: Result<Opened, MpiError>| outcome.err().map(|error| error.to_string()).unwrap_or_default();
        let named = line(NO_LAUNCHER.open(nothing));
        assert!(named.starts_with("MPI library /nonexistent/libmpi.so: ") && named.contains("o such file"), "{named}");
        assert!(named.ends_with("QUIRE_MPI_LIBRARY names the file") && !named.contains('\n'), "{named}");
        let nowhere =
            Launcher { libraries: ["libquire_none.so.1", "libquire_none.so.2", "libquire_none.so.3"], ..NO_LAUNCHER };
        let none = line(nowhere.open(|_| None));
        assert!(none.starts_with("found no MPI library (libquire_none.so.1, "), "{none}");
        assert!(none.contains("pip install mpich") && !none.contains('\n'), "{none}");
    }

    #[test]
    fn a_library_that_exists_but_cannot_be_opened_is_named() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        for (name, text) in [("bin/mpiexec", ""), ("lib/libquire_none.so.2", "no library")] {
            let file = folder.path().join(name);
            std::fs::create_dir_all(file.parent().unwrap_or(folder.path()))?;
            std::fs::write(file, text)?;
        }
        let path = folder.path().join("bin").to_string_lossy().into_owned();
        let libraries = ["libquire_none.so.1", "libquire_none.so.2", "libquire_none.so.3"];
        let outcome = Launcher { libraries, ..NO_LAUNCHER }.open(|name| (name == "PATH").then(|| path.clone()));
        let line = outcome.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(line.starts_with("MPI library ") && line.contains("/bin/../lib/libquire_none.so.2: "), "{line}");
        Ok(())
    }

    #[test]
    fn a_library_that_is_not_of_mpi_is_refused_by_what_it_lacks() {
        // Some library that every program of this platform has loaded.
        let libc = |name: &str| (name == LIBRARY).then(|| "libc.so.6".to_owned());
        match NO_LAUNCHER.open(libc) {
            Err(error @ MpiError::Symbol { .. }) => {
                assert!(error.to_string().starts_with("libc.so.6: found no MPI_Get_library_version, "), "{error}");
            }
            // Not a Linux with glibc.
            Err(MpiError::Open { .. }) => {}
            Ok(_) | Err(_) => panic!("found MPI in libc"),
        }
    }
}
