//! What ends the program early, each as one line.

use std::io;
use std::path::PathBuf;

use engine::{EngineError, SubmitError};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The command line can not be understood.
    #[error("{0}")]
    Usage(String),
    /// A settings file is missing or wrong.
    #[error("--config {}: {message}", path.display())]
    ConfigFile {
        /// The file.
        path: PathBuf,
        /// What is wrong and what would be right.
        message: String,
    },
    /// A file of prompts is missing or wrong.
    #[error("--input {}: {message}", path.display())]
    Input {
        /// The file.
        path: PathBuf,
        /// What is wrong and what would be right.
        message: String,
    },
    /// A file of keys is missing or wrong.
    #[error("--api-key-file {}: {message}", path.display())]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// What is wrong and what would be right.
        message: String,
    },
    /// The server ended by itself.
    #[error("{0}")]
    Serve(io::Error),
    /// What came on standard input is no text.
    #[error("standard input is not UTF-8")]
    NotUtf8,
    /// The engine does not start.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The address can not be listened on.
    #[error("--host {host} --port {port}: {source}{}", advice(source))]
    Bind {
        /// As given.
        host: String,
        /// As given.
        port: u16,
        /// The system's reason.
        source: io::Error,
    },
    /// The prompt was refused.
    #[error("{0}")]
    Refused(#[from] SubmitError),
    /// The model or its text failed on the way.
    #[error("{0}")]
    Generation(String),
    /// Another server could not be measured or watched.
    #[error(transparent)]
    Client(#[from] ::bench::Error),
    /// What a benchmark runs on, or another server, is not as it should be.
    #[error("{0}")]
    Bench(String),
    /// Standard output or another stream failed.
    #[error("input or output failed: {0}")]
    Io(#[from] io::Error),
}

impl CliError {
    /// What ended a benchmark.
    pub fn bench(error: impl std::fmt::Display) -> CliError {
        CliError::Bench(error.to_string())
    }

    /// Whoever read our output has gone; nothing is wrong on this side.
    pub fn is_closed_pipe(&self) -> bool {
        matches!(self, CliError::Io(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; choose another port, or end the program that has this one",
        io::ErrorKind::PermissionDenied => "; ports below 1024 are for the system",
        _ => "",
    }
}
