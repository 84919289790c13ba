//! The extension module `quire._quire` of the Python package: the engine behind a handle that takes the JSON of the HTTP API and
//! returns numbers as bytes. Names, defaults and results for people are in the Python files of `quire/`.
//!
//! No step runs under the GIL: the engine has a thread of its own, and calls that wait release it and look for signals every
//! 20 ms. An object that was made before a fork is refused after it, and left alone when it is dropped.
//!
//! ```
//! // The settings that `LLM(...)` takes are the flags of the program:
//! assert!(cli::embed::Purpose::Engine.names().contains(&"max_num_seqs".to_string()));
//! ```
//!
//! | file | what it owns |
//! |---|---|
//! | `engine` | `Engine`: start, requests, tokenizer, adapters, end |
//! | `stream` | `Stream`: the events of requests; `Ready`: which streams have some |
//! | `answer` | what a stream returns, as Python objects |
//! | `http` | `Server`: `quire serve` in this process |
//! | `wait` | waiting without the GIL; processes and forks |

mod answer;
mod engine;
mod http;
mod stream;
mod wait;

use std::ffi::OsString;

use pyo3::prelude::*;

pyo3::create_exception!(
    quire._quire,
    EngineDeadError,
    pyo3::exceptions::PyRuntimeError,
    "The engine has ended: it was closed, or its thread has failed."
);
pyo3::create_exception!(
    quire._quire,
    QueueOverflowError,
    pyo3::exceptions::PyRuntimeError,
    "The queue of the engine is full; a later attempt may succeed."
);

/// The exception of a refused or failed request.
fn exception(error: &server::ApiError) -> PyErr {
    let message = error.message().to_string();
    match error.status().as_u16() {
        429 => QueueOverflowError::new_err(message),
        503 => EngineDeadError::new_err(message),
        400..500 => pyo3::exceptions::PyValueError::new_err(message),
        _ => pyo3::exceptions::PyRuntimeError::new_err(message),
    }
}

/// Runs the program with its arguments, the first of which is its name. Returns the exit code.
#[pyfunction]
fn main(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    let code = py.detach(|| cli::main(arguments));
    u8::from(code != std::process::ExitCode::SUCCESS)
}

/// Names of the settings of an engine, or of a server.
#[pyfunction]
fn settings(server: bool) -> Vec<String> {
    let purpose = if server { cli::embed::Purpose::Server } else { cli::embed::Purpose::Engine };
    purpose.names()
}

/// Settings of vLLM that have no counterpart here: name, values that are accepted without effect (`None`: all), and the reason.
#[pyfunction]
fn vllm_settings() -> Vec<(String, Option<Vec<&'static str>>, &'static str)> {
    let all = cli::embed::vllm_settings().into_iter();
    all.map(|setting| (setting.name, setting.values, setting.reason)).collect()
}

#[pymodule]
mod _quire {
    #[pymodule_export]
    use super::answer::{Answer, Logprobs, Sequence};
    #[pymodule_export]
    use super::engine::Engine;
    #[pymodule_export]
    use super::http::Server;
    #[pymodule_export]
    use super::stream::{Ready, Stream};
    #[pymodule_export]
    use super::{EngineDeadError, QueueOverflowError, main, settings, vllm_settings};

    /// Version of the package.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
