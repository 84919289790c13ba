//! Events of the two queues, and what the host knows about finished copies.
//!
//! Work on one [`Queue`] runs in order. Work on different queues is ordered only by events:
//! [`Device::record`](crate::Device::record) marks a point of one queue, [`Device::wait`](crate::Device::wait) makes the other
//! queue wait for it, and [`Event::synchronize`] makes the host wait.
//!
//! ```text
//! Copy     ── upload ── record e ─────────────────────────
//!                              \
//! Compute  ──────────────────── wait e ── launch ── record f
//!                                                         \
//! host     ──────────────────────────────────────────────── f.synchronize(): the upload is done too
//! ```
//!
//! [`Progress`] counts the asynchronous copies of each queue, and which of them each queue and the host know to be done (a
//! vector clock: Fidge and Mattern, 1988). So whether page-locked memory may still be in use is a comparison of numbers, with
//! the same answer on devices where copies take time and where they are done at once. Each count takes a short-lived lock.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use simd::lock;

use crate::DeviceError;
use crate::driver::Point;
use crate::stream::Queue;

/// Number of finished copies of each queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock([u64; 2]);

impl Clock {
    pub fn join(&mut self, other: Clock) {
        for (own, other) in self.0.iter_mut().zip(other.0) {
            *own = (*own).max(other);
        }
    }

    fn covers(&self, other: Clock) -> bool {
        self.0.iter().zip(other.0).all(|(own, other)| *own >= other)
    }
}

/// What is known about the queues of one device. Its address identifies the device.
pub(crate) struct Progress {
    /// Backend name.
    pub device: &'static str,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// For each queue, the copies that are done once all its work so far is done.
    queues: [Clock; 2],
    /// The copies that the host has waited for.
    host: Clock,
}

impl Progress {
    pub fn new(device: &'static str) -> Progress {
        Progress { device, known: Mutex::default() }
    }

    /// Counts a copy; returns what must be done before the host may access its memory. Call it after the copy is enqueued: an
    /// event recorded in between may then promise too little, never too much.
    pub fn count_copy(&self, queue: Queue) -> Clock {
        let mut known = lock(&self.known);
        let own = &mut known.queues[queue as usize].0[queue as usize];
        *own += 1;
        let mut clock = Clock::default();
        clock.0[queue as usize] = *own;
        clock
    }

    /// Returns what an event on `queue` promises if it is recorded now.
    pub fn promise(&self, queue: Queue) -> Clock {
        lock(&self.known).queues[queue as usize]
    }

    /// Notes that the queue waits for these copies.
    pub fn note_queue_wait(&self, queue: Queue, clock: Clock) {
        lock(&self.known).queues[queue as usize].join(clock);
    }

    /// Notes that the host has waited for these copies.
    pub fn note_wait(&self, clock: Clock) {
        lock(&self.known).host.join(clock);
    }

    /// Returns what a wait for both queues promises.
    pub fn promise_all(&self) -> Clock {
        let known = lock(&self.known);
        let mut clock = known.queues[0];
        clock.join(known.queues[1]);
        clock
    }

    /// Returns whether the host has waited for these copies.
    pub fn is_waited_for(&self, clock: Clock) -> bool {
        lock(&self.known).host.covers(clock)
    }
}

/// A point of a queue, made by [`Device::record`](crate::Device::record).
pub struct Event {
    pub(crate) progress: Arc<Progress>,
    pub(crate) clock: Clock,
    pub(crate) mark: Mark,
}

/// How a backend marks a point of a queue.
pub(crate) enum Mark {
    /// A backend whose work is done when the call returns; with the time.
    Host(Instant),
    /// An event in a stream of a GPU.
    Cuda(Point),
}

impl Event {
    /// Waits until all work that was enqueued before the event is done.
    ///
    /// # Errors
    /// Errors of that work, such as a failed kernel.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        match &self.mark {
            Mark::Host(..) => {}
            Mark::Cuda(point) => point.synchronize()?,
        }
        self.progress.note_wait(self.clock);
        Ok(())
    }

    /// Returns whether that work is done, without waiting.
    ///
    /// # Errors
    /// As [`Event::synchronize`].
    pub fn is_done(&self) -> Result<bool, DeviceError> {
        let done = match &self.mark {
            Mark::Host(..) => true,
            Mark::Cuda(point) => point.is_done()?,
        };
        if done {
            self.progress.note_wait(self.clock);
        }
        Ok(done)
    }

    /// Returns the time since an earlier event of the same device; waits for both. On `cuda` the GPU measures it, to about half
    /// a microsecond.
    ///
    /// # Errors
    /// As [`Event::synchronize`], and [`DeviceError::WrongDevice`] for an event of another device.
    pub fn since(&self, earlier: &Event) -> Result<Duration, DeviceError> {
        if !Arc::ptr_eq(&self.progress, &earlier.progress) {
            let (expected, found) = (self.progress.device, earlier.progress.device);
            return Err(DeviceError::WrongDevice { expected, found });
        }
        earlier.synchronize()?;
        self.synchronize()?;
        match (&self.mark, &earlier.mark) {
            (Mark::Host(end), Mark::Host(start)) => Ok(end.saturating_duration_since(*start)),
            (Mark::Cuda(end), Mark::Cuda(start)) => Ok(end.since(start)?),
            _ => Err(DeviceError::WrongDevice { expected: self.progress.device, found: earlier.progress.device }),
        }
    }
}
