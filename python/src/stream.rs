//! The events of requests that were submitted together.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use engine::Event;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use server::local::{Run, failed};

use crate::answer::{Answer, Pending, bytes};
use crate::exception;
use crate::wait::{LOOK, Owned, Signal, lock};

/// The events of requests that were submitted together. Dropping it, or `cancel()`, ends the requests.
#[pyclass(frozen, module = "quire._quire")]
pub struct Stream {
    state: Owned<Mutex<State>>,
    prompts: Vec<Vec<u32>>,
    /// Requests are returned whole.
    whole: bool,
}

struct State {
    /// `None` after the end.
    run: Option<Run>,
    requests: Vec<Pending>,
}

impl State {
    /// Takes the events that are there. Returns whether more may come.
    fn advance(&mut self, waker: &Waker) -> Result<bool, Box<server::ApiError>> {
        let Some(run) = &mut self.run else { return Ok(false) };
        loop {
            match run.poll_next(&mut Context::from_waker(waker)) {
                Poll::Pending => return Ok(true),
                Poll::Ready(Some((request, event))) => {
                    if let Event::Delta(delta) = &event
                        && let Err(error) = failed(delta)
                    {
                        self.run = None;
                        return Err(Box::new(error));
                    }
                    if let Some(pending) = self.requests.get_mut(request) {
                        pending.add(event);
                    }
                }
                Poll::Ready(None) => {
                    let failure = run.failure();
                    self.run = None;
                    return failure.map_or(Ok(false), |error| Err(Box::new(error)));
                }
            }
        }
    }

    fn take(&mut self, py: Python<'_>, whole: bool) -> PyResult<Vec<Answer>> {
        let due = self.requests.iter_mut().enumerate().filter(|(_, pending)| pending.is_due(whole));
        due.map(|(index, pending)| pending.take(py, index)).collect()
    }

    fn is_due(&self, whole: bool) -> bool {
        self.requests.iter().any(|pending| pending.is_due(whole))
    }
}

impl Stream {
    /// The stream of a run with these prompts and numbers of sequences.
    pub fn new(run: Run, prompts: Vec<Vec<u32>>, sequences: &[usize], whole: bool) -> Stream {
        let requests = sequences.iter().map(|&n| Pending::new(n)).collect();
        Stream { state: Owned::new(Mutex::new(State { run: Some(run), requests })), prompts, whole }
    }
}

#[pymethods]
impl Stream {
    /// Token ids of a request's prompt, as uint32.
    fn prompt_token_ids(&self, py: Python<'_>, request: usize) -> PyResult<Py<PyBytes>> {
        let ids = self.prompts.get(request).ok_or_else(|| PyIndexError::new_err("request index out of range"))?;
        Ok(bytes(py, ids.iter().map(|id| id.to_ne_bytes())))
    }

    /// Waits for the next answers; an empty list after the end.
    fn wait(&self, py: Python<'_>) -> PyResult<Vec<Answer>> {
        let (state, signal) = (self.state.get()?, Arc::new(Signal::default()));
        let (waker, whole) = (signal.waker(), self.whole);
        loop {
            let advanced = py.detach(|| {
                let advanced = {
                    let mut state = lock(state);
                    state.advance(&waker).map(|goes_on| goes_on && !state.is_due(whole))
                };
                if advanced.as_ref().is_ok_and(|waits| *waits) {
                    signal.wait(LOOK);
                }
                advanced
            });
            match advanced {
                Ok(true) => py.check_signals()?,
                Ok(false) => return lock(state).take(py, whole),
                Err(error) => return Err(exception(&error)),
            }
        }
    }

    /// The answers that are there. If more may come, `ready` will have `key`; otherwise the second value is true.
    fn poll(&self, py: Python<'_>, ready: &Ready, key: u64) -> PyResult<(Vec<Answer>, bool)> {
        let state = self.state.get()?;
        let waker = Waker::from(Arc::new(Notice { queue: ready.queue.get()?.clone(), key }));
        let advanced = py.detach(|| lock(state).advance(&waker));
        match advanced {
            Ok(goes_on) => Ok((lock(state).take(py, self.whole)?, !goes_on)),
            Err(error) => Err(exception(&error)),
        }
    }

    /// Ends the requests.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let state = self.state.get()?;
        py.detach(|| lock(state).run = None);
        Ok(())
    }
}

/// Keys of streams that have events.
#[derive(Default)]
struct Queue {
    /// The keys, and whether no more are wanted.
    state: Mutex<(Vec<u64>, bool)>,
    changed: Condvar,
}

/// Adds a key when its stream has events. It runs on the engine's thread, so it takes no GIL.
struct Notice {
    queue: Arc<Queue>,
    key: u64,
}

impl Wake for Notice {
    fn wake(self: Arc<Self>) {
        lock(&self.queue.state).0.push(self.key);
        self.queue.changed.notify_all();
    }
}

/// Which streams have events, for a thread that tells their event loops.
#[pyclass(frozen, module = "quire._quire")]
pub struct Ready {
    queue: Owned<Arc<Queue>>,
}

#[pymethods]
impl Ready {
    #[new]
    fn new() -> Ready {
        Ready { queue: Owned::new(Arc::default()) }
    }

    /// Waits for keys; `None` after `close()`. With `signals`, as for the main thread, it looks for signals while it waits.
    fn wait(&self, py: Python<'_>, signals: bool) -> PyResult<Option<Vec<u64>>> {
        let queue = self.queue.get()?;
        loop {
            let (keys, is_closed) = py.detach(|| {
                let idle = |(keys, is_closed): &mut (Vec<u64>, bool)| keys.is_empty() && !*is_closed;
                let guard = lock(&queue.state);
                let mut guard = if signals {
                    queue.changed.wait_timeout_while(guard, LOOK, idle).unwrap_or_else(PoisonError::into_inner).0
                } else {
                    queue.changed.wait_while(guard, idle).unwrap_or_else(PoisonError::into_inner)
                };
                (std::mem::take(&mut guard.0), guard.1)
            });
            if is_closed || !keys.is_empty() {
                return Ok((!is_closed).then_some(keys));
            }
            py.check_signals()?;
        }
    }

    /// Ends the waiting.
    fn close(&self) -> PyResult<()> {
        let queue = self.queue.get()?;
        lock(&queue.state).1 = true;
        queue.changed.notify_all();
        Ok(())
    }
}
