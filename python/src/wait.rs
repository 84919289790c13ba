//! Waiting without the GIL, and what a process may do with objects that another has made.

use std::future::Future;
use std::pin::pin;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Time between two looks for signals, such as Ctrl-C, while a call waits.
pub const LOOK: Duration = Duration::from_millis(20);

/// Locks; a panic of another thread leaves nothing half-done here.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A flag that a waiting thread sleeps on.
#[derive(Default)]
pub struct Signal {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    /// A waker that sets the flag.
    pub fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(self.clone())
    }

    /// Waits until the flag is set, at most for `limit`, and clears it.
    pub fn wait(&self, limit: Duration) {
        let guard = lock(&self.is_set);
        let (mut guard, _) =
            self.changed.wait_timeout_while(guard, limit, |is_set| !*is_set).unwrap_or_else(PoisonError::into_inner);
        *guard = false;
    }
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        *lock(&self.is_set) = true;
        self.changed.notify_all();
    }
}

/// Runs a future to its end without the GIL. A signal handler that raises, as Ctrl-C does, ends it early.
pub fn block_on<F: Future<Output: Send> + Send>(py: Python<'_>, future: F) -> PyResult<F::Output> {
    let (mut future, signal) = (pin!(future), Arc::new(Signal::default()));
    let waker = signal.waker();
    loop {
        let polled = py.detach(|| {
            let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
            if polled.is_pending() {
                signal.wait(LOOK);
            }
            polled
        });
        if let Poll::Ready(output) = polled {
            return Ok(output);
        }
        py.check_signals()?;
    }
}

/// Waits without the GIL for what a thread sends, at most until the next look for signals.
pub fn receive<T: Send>(py: Python<'_>, receiver: &Mutex<Receiver<T>>) -> Result<T, RecvTimeoutError> {
    py.detach(|| lock(receiver).recv_timeout(LOOK))
}

/// Runs a function on a thread of its own and waits for it. After a signal handler that raises, the thread goes on and its result is
/// dropped. A panic is a `RuntimeError`.
pub fn on_thread<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (sender, receiver) = channel();
    let run = move || drop(sender.send(work()));
    std::thread::Builder::new().name(name.to_string()).spawn(run)?;
    let receiver = Mutex::new(receiver);
    loop {
        match receive(py, &receiver) {
            Ok(done) => return Ok(done),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err(format!(
                    "the thread {name} has panicked; standard error has its message"
                )));
            }
        }
    }
}

/// Configures the allocator of the process before its first engine, so that what an engine frees at its end returns to the system. glibc
/// raises the size from which allocations have a mapping of their own with the first one that is freed, and keeps the rest.
pub fn return_memory() {
    static ONCE: Once = Once::new();
    ONCE.call_once(engine::allocator::limit_retention);
}

/// A value with threads, which exist only in the process that made it. In the child of a fork its locks may be held forever, so it is
/// neither used nor dropped there.
pub struct Owned<T> {
    process: u32,
    /// `None` only while it is dropped.
    value: Option<T>,
}

impl<T> Owned<T> {
    /// Owned by this process.
    pub fn new(value: T) -> Owned<T> {
        Owned { process: std::process::id(), value: Some(value) }
    }

    /// The value, in the process that made it.
    pub fn get(&self) -> PyResult<&T> {
        let here = std::process::id();
        match &self.value {
            Some(value) if self.process == here => Ok(value),
            _ => Err(PyRuntimeError::new_err(format!(
                "found an engine of process {} after a fork to process {here}, expected one of this process; start the engine in \
                 this process, or start processes with multiprocessing's method \"spawn\"",
                self.process
            ))),
        }
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.value.take());
        }
    }
}
