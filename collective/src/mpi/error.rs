//! Errors of an MPI library; each is one line.

/// An error of the MPI library, or of what it needs.
#[derive(Debug, thiserror::Error)]
pub enum MpiError {
    /// No library was found.
    #[error(
        "found no MPI library ({0}); install one (Debian: libopenmpi3 or libmpich12; pip install mpich) and start all ranks with its mpiexec, or name the library's file in QUIRE_MPI_LIBRARY"
    )]
    NoLibrary(String),
    /// The library cannot be opened.
    #[error(
        "MPI library {file}: {problem}; expected a libmpi_abi.so.1, a libmpi.so.12 or a libmpi.so.40 that can be opened; QUIRE_MPI_LIBRARY names the file"
    )]
    Open {
        /// Its name or path.
        file: String,
        /// What the loader says.
        problem: String,
    },
    /// The library lacks a function or a constant.
    #[error(
        "{file}: found no {symbol}, expected an MPI library of version 3 or newer; name another in QUIRE_MPI_LIBRARY"
    )]
    Symbol {
        /// The library.
        file: String,
        /// What it lacks.
        symbol: String,
    },
    /// The library does not allow calls of more than one thread.
    #[error(
        "{library} allows calls of its first thread only, expected MPI_THREAD_SERIALIZED; build or choose one with threads"
    )]
    Threads {
        /// The library and its version.
        library: String,
    },
    /// The library belongs to another MPI than the program that started the ranks.
    #[error(
        "{launcher} started {expected} ranks, but {library} finds {found}, because it belongs to another MPI; start the ranks with its own mpiexec (with srun: --mpi=pmix or --mpi=pmi2), or set QUIRE_MPI_LIBRARY to the library of {launcher}"
    )]
    OtherLauncher {
        /// What started the ranks.
        launcher: &'static str,
        /// Number of ranks that it started.
        expected: usize,
        /// The library and its version.
        library: String,
        /// Number of ranks that the library finds.
        found: usize,
    },
    /// MPI was started before in this process.
    #[error("MPI was started before in this process, and can be started once; share the first group or split it")]
    Started,
    /// A call failed.
    #[error("MPI: {what}: {problem}")]
    Call {
        /// What was being done.
        what: &'static str,
        /// What the library says.
        problem: String,
    },
}
