//! `quire serve` in this process.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use cli::embed::{Purpose, Setup, SetupError};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::sync::oneshot;

use crate::engine::{parsed, setup_exception};
use crate::wait::{LOOK, Owned, lock, receive, return_memory};

/// A server of this process, as `quire serve` starts it.
#[pyclass(frozen, module = "quire._quire")]
pub struct Server {
    address: SocketAddr,
    state: Owned<Mutex<State>>,
}

struct State {
    /// Dropping it stops the server.
    stop: Option<oneshot::Sender<()>>,
    /// Gets how the server ended.
    ended: Receiver<Result<(), SetupError>>,
    outcome: Option<Result<(), String>>,
}

enum Start {
    Ready(SocketAddr),
    Ended(Result<(), SetupError>),
}

#[pymethods]
impl Server {
    /// Starts a server with these settings, a JSON object, and waits until it serves.
    #[new]
    fn new(py: Python<'_>, settings: &str) -> PyResult<Server> {
        let setup = Setup::read(parsed(settings)?, Purpose::Server).map_err(setup_exception)?;
        return_memory();
        let (stop, stopped) = oneshot::channel::<()>();
        let ((ready, events), (end, ended)) = (channel(), channel());
        let run = move || {
            let stop = || Ok(async move { drop(stopped.await) });
            let told = ready.clone();
            let outcome = setup.serve(stop, move |address| drop(told.send(Start::Ready(address))));
            // One of the two is read.
            if let Err(unsent) = ready.send(Start::Ended(outcome))
                && let Start::Ended(outcome) = unsent.0
            {
                let _ = end.send(outcome);
            }
        };
        std::thread::Builder::new().name("quire-serve".to_string()).spawn(run)?;
        let events = Mutex::new(events);
        loop {
            match receive(py, &events) {
                Ok(Start::Ready(address)) => {
                    let state = State { stop: Some(stop), ended, outcome: None };
                    return Ok(Server { address, state: Owned::new(Mutex::new(state)) });
                }
                Ok(Start::Ended(Err(error))) => return Err(setup_exception(error)),
                Ok(Start::Ended(Ok(()))) | Err(RecvTimeoutError::Disconnected) => {
                    return Err(PyRuntimeError::new_err("the server ended while it started; standard error says why"));
                }
                Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            }
        }
    }

    /// Host of the address.
    #[getter]
    fn host(&self) -> String {
        self.address.ip().to_string()
    }

    /// Port of the address.
    #[getter]
    fn port(&self) -> u16 {
        self.address.port()
    }

    /// Asks the server to stop: running requests may finish within `shutdown_timeout`.
    fn stop(&self) -> PyResult<()> {
        lock(self.state.get()?).stop = None;
        Ok(())
    }

    /// Waits until the server has ended, at most for so many seconds. Returns whether it has.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let state = self.state.get()?;
        let mut left = timeout.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default());
        loop {
            let slice = left.map_or(LOOK, |left| left.min(LOOK));
            let outcome = py.detach(|| {
                let mut state = lock(state);
                if state.outcome.is_none() {
                    state.outcome = match state.ended.recv_timeout(slice) {
                        Ok(outcome) => Some(outcome.map_err(|error| error.to_string())),
                        Err(RecvTimeoutError::Timeout) => None,
                        Err(RecvTimeoutError::Disconnected) => {
                            Some(Err("the thread of the server has panicked".into()))
                        }
                    };
                }
                state.outcome.clone()
            });
            match outcome {
                Some(Ok(())) => return Ok(true),
                Some(Err(message)) => return Err(PyRuntimeError::new_err(message)),
                None => {}
            }
            py.check_signals()?;
            if let Some(left) = &mut left {
                *left = left.saturating_sub(slice);
                if left.is_zero() {
                    return Ok(false);
                }
            }
        }
    }
}
