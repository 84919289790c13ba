//! Errors that end the program, each one line.

use std::io;
use std::path::PathBuf;

use engine::{EngineError, SubmitError};

/// Reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    #[error("{0}")]
    Usage(String),
    /// The file that a flag names cannot be read or is invalid.
    #[error("{flag} {}: {message}", path.display())]
    File { flag: &'static str, path: PathBuf, message: String },
    #[error("{0}")]
    Serve(io::Error),
    #[error("standard input is not UTF-8")]
    NotUtf8,
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The server cannot listen on its address.
    #[error("--host {host} --port {port}: {source}{}", advice(source))]
    Bind { host: String, port: u16, source: io::Error },
    #[error("{0}")]
    Refused(#[from] SubmitError),
    /// `quire bench serve` or `quire top` failed.
    #[error(transparent)]
    Client(#[from] ::bench::Error),
    /// A benchmark, a generation or another part of a command failed.
    #[error("{0}")]
    Failed(String),
    /// The model cannot be fetched from the hub.
    #[error(transparent)]
    Hub(#[from] hub::HubError),
    #[error("input or output failed: {0}")]
    Io(#[from] io::Error),
}

impl CliError {
    pub fn failed(error: impl std::fmt::Display) -> CliError {
        CliError::Failed(error.to_string())
    }

    /// Whether the reader of our output has closed the pipe, which is no failure.
    pub fn is_closed_pipe(&self) -> bool {
        matches!(self, CliError::Io(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; choose another port, or stop the program that uses this one",
        io::ErrorKind::PermissionDenied => "; ports below 1024 are reserved for the system",
        _ => "",
    }
}
