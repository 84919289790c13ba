//! MPI in this process: calls, waits, messages under way, and the end.
//!
//! All calls are made under one mutex, so a library that allows one thread at a time is enough; none of them waits for another rank,
//! except when a group is split and at the end. A message is sent from a copy, which is kept until the library has sent it; this is
//! looked at in later calls. At most [`MOST_UNDER_WAY`] bytes are kept: a rank that sends more waits until others have received.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, TryLockError};
use std::time::Duration;

use simd::lock;

use super::abi::{Api, Functions, Handle, Status, count};
use super::backoff::Backoff;
use super::error::MpiError;
use crate::CollectiveError;

/// Most bytes of messages that are kept until the library has sent them.
pub(super) const MOST_UNDER_WAY: usize = 256 << 20;
/// Exit code of a job that a rank has ended.
const EXIT_CODE: c_int = 70;
/// Time in which the library must end the process, or the messages under way must arrive at the end.
const LIMIT: Duration = Duration::from_secs(3);
/// Time in which a launcher forwards a line.
const FORWARDING: Duration = Duration::from_millis(100);

/// The library, started. Dropping it stops the library, or ends the job if something has failed.
pub(super) struct World<H: Handle> {
    pub api: Api<H>,
    pub rank: usize,
    pub size: usize,
    calls: Mutex<()>,
    under_way: Mutex<UnderWay<H>>,
    /// Why no more calls are made.
    ended: OnceLock<String>,
    aborting: AtomicBool,
}

struct UnderWay<H> {
    messages: VecDeque<(H, Vec<u8>)>,
    bytes: usize,
}

impl<H: Handle> World<H> {
    /// Starts the library.
    pub fn start(api: Api<H>) -> Result<World<H>, CollectiveError> {
        let under_way = Mutex::new(UnderWay { messages: VecDeque::new(), bytes: 0 });
        let (calls, ended, aborting) = (Mutex::default(), OnceLock::new(), AtomicBool::new(false));
        let mut world = World { api, rank: 0, size: 0, calls, under_way, ended, aborting };
        let (constants, mut allows) = (world.api.constants, 0);
        let started = world.call("starting", |mpi| {
            // SAFETY: no arguments are passed; the level is written.
            unsafe { (mpi.init_thread)(std::ptr::null_mut(), std::ptr::null_mut(), constants.multiple, &mut allows) }
        });
        if let Err(error) = started {
            // There is nothing to stop.
            std::mem::forget(world);
            return Err(error);
        }
        if allows < constants.serialized {
            return Err(MpiError::Threads { library: world.api.name.clone() }.into());
        }
        (world.rank, world.size) = world.place(constants.world)?;
        Ok(world)
    }

    /// Returns this process's rank in a communicator, and its size. Errors in it are returned from then on, not fatal.
    pub fn place(&self, communicator: H) -> Result<(usize, usize), CollectiveError> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the handles are those of the library; the numbers are written.
        unsafe {
            self.call("setting the error handler", |mpi| {
                (mpi.comm_set_errhandler)(communicator, self.api.constants.errors_return)
            })?;
            self.call("asking for the rank", |mpi| (mpi.comm_rank)(communicator, &mut rank))?;
            self.call("asking for the number of ranks", |mpi| (mpi.comm_size)(communicator, &mut size))?;
        }
        Ok((rank.unsigned_abs() as usize, size.unsigned_abs() as usize))
    }

    /// Calls a function. An error of the library ends all groups of this rank.
    pub fn call(&self, what: &'static str, f: impl FnOnce(&Functions<H>) -> c_int) -> Result<(), CollectiveError> {
        if let Some(reason) = self.ended.get() {
            return Err(CollectiveError::Aborted(reason.clone()));
        }
        let _one = lock(&self.calls);
        let code = f(&self.api.functions);
        if code == 0 {
            return Ok(());
        }
        Err(self.end(MpiError::Call { what, problem: self.text(code) }.into()))
    }

    /// Ends all groups of this rank with an error: the other ranks may wait for it, so it must not go on.
    pub fn end(&self, error: CollectiveError) -> CollectiveError {
        let _ = self.ended.set(error.to_string());
        error
    }

    /// Starts an operation.
    pub fn begin(
        &self,
        what: &'static str,
        f: impl FnOnce(&Functions<H>, &mut H) -> c_int,
    ) -> Result<H, CollectiveError> {
        let mut request = self.api.constants.request_null;
        self.call(what, |mpi| f(mpi, &mut request)).map(|()| request)
    }

    /// Waits until an operation is done. Does not return before, because the library uses its memory until then.
    pub fn finish(&self, what: &'static str, mut request: H) -> Result<(), CollectiveError> {
        let waiting = Backoff::new();
        loop {
            if self.is_done(what, &mut request)? {
                return self.look_after_messages();
            }
            waiting.pause();
        }
    }

    fn is_done(&self, what: &'static str, request: &mut H) -> Result<bool, CollectiveError> {
        while self.aborting.load(Ordering::Acquire) {
            // Another thread is ending the process.
            std::thread::park();
        }
        let (mut is_done, mut status) = (0, Status::default());
        let code = {
            let _one = lock(&self.calls);
            // SAFETY: the request is that of an operation under way; the other two are written.
            unsafe { (self.api.functions.test)(request, &mut is_done, &mut status) }
        };
        // An operation with an error is over.
        if code != 0 {
            return Err(self.end(MpiError::Call { what, problem: self.text(code) }.into()));
        }
        Ok(is_done != 0)
    }

    /// Sends a copy of `bytes`.
    pub fn send(&self, communicator: H, to: c_int, tag: c_int, bytes: &[u8]) -> Result<(), CollectiveError> {
        let length = count("a message", self.rank, bytes.len())?;
        let waiting = Backoff::new();
        while !self.has_room(bytes.len()) {
            self.look_after_messages()?;
            waiting.pause();
        }
        let copy = bytes.to_vec();
        let request = self.begin("sending", |mpi, request| {
            // SAFETY: the copy has this length, and is kept until the request is done.
            unsafe {
                (mpi.isend)(copy.as_ptr().cast(), length, self.api.constants.byte, to, tag, communicator, request)
            }
        })?;
        let mut under_way = lock(&self.under_way);
        under_way.bytes += copy.len();
        under_way.messages.push_back((request, copy));
        Ok(())
    }

    fn has_room(&self, bytes: usize) -> bool {
        let under_way = lock(&self.under_way);
        under_way.messages.is_empty() || under_way.bytes + bytes <= MOST_UNDER_WAY
    }

    /// Drops the copies of messages that the library has sent, in the order in which they were sent.
    pub fn look_after_messages(&self) -> Result<(), CollectiveError> {
        let mut under_way = lock(&self.under_way);
        while let Some((request, _)) = under_way.messages.front_mut() {
            if !self.is_done("sending", request)? {
                break;
            }
            under_way.bytes -= under_way.messages.pop_front().map_or(0, |(_, copy)| copy.len());
        }
        Ok(())
    }

    /// Prints the reason and ends the processes of all ranks.
    pub fn abort(&self, reason: &str) {
        let _ = self.ended.set(reason.to_owned());
        if self.aborting.swap(true, Ordering::AcqRel) {
            return;
        }
        let line = reason.replace(['\n', '\r'], " ");
        // Nobody may read it. The harness of tests keeps what `eprintln` prints, and loses it when the process ends.
        let _ = writeln!(std::io::stderr(), "quire: rank {} of {} ended all ranks: {line}", self.rank, self.size);
        // A launcher may lose what a rank has just printed when it ends the rank.
        std::thread::sleep(FORWARDING);
        std::thread::spawn(|| {
            std::thread::sleep(LIMIT);
            std::process::abort();
        });
        // Another thread should not be inside of the library, but one that hangs there must not prevent the end.
        let waiting = Backoff::new();
        let _one = loop {
            match self.calls.try_lock() {
                Err(TryLockError::WouldBlock) if waiting.waited() < LIMIT / 10 => waiting.pause(),
                outcome => break outcome,
            }
        };
        // SAFETY: the handle is that of all ranks.
        unsafe { (self.api.functions.abort)(self.api.constants.world, EXIT_CODE) };
        std::process::exit(EXIT_CODE);
    }

    /// Returns the library's text of an error.
    fn text(&self, code: c_int) -> String {
        // `MPI_MAX_ERROR_STRING` of every interface is at most this.
        let (mut text, mut length) = ([0u8; 512], 0);
        // SAFETY: the text has the room it needs.
        unsafe { (self.api.functions.error_string)(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
        let text = String::from_utf8_lossy(&text[..length.clamp(0, 512) as usize]).into_owned();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Waits until all messages are sent.
    fn send_the_rest(&self) -> Result<(), String> {
        let waiting = Backoff::new();
        loop {
            self.look_after_messages().map_err(|error| error.to_string())?;
            match lock(&self.under_way).messages.len() {
                0 => return Ok(()),
                count if waiting.waited() > LIMIT => {
                    return Err(format!("found {count} messages that no rank has received, expected none at the end"));
                }
                _ => waiting.pause(),
            }
        }
    }
}

impl<H: Handle> Drop for World<H> {
    fn drop(&mut self) {
        if self.aborting.load(Ordering::Acquire) {
            return;
        }
        if std::thread::panicking() {
            return self.abort("a thread panicked; its message is above");
        }
        if let Some(reason) = self.ended.get() {
            return self.abort(reason);
        }
        match self.send_the_rest() {
            // SAFETY: nothing is under way, and no group is left that could make another call.
            Ok(()) => drop(unsafe { (self.api.functions.finalize)() }),
            Err(reason) => self.abort(&reason),
        }
    }
}
