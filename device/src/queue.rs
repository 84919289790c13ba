//! The two streams of a device, and what the host knows of their progress.
//!
//! Work on one [`Queue`] runs in order. Work on two is ordered by events alone:
//! [`Device::record`](crate::Device::record) marks a point of one, [`Device::wait`](crate::Device::wait) lets the other
//! go no further before it, and [`Event::synchronize`] lets the host wait.
//!
//! ```text
//! Copy     ── upload ── record e ─────────────────────────
//!                              \
//! Compute  ──────────────────── wait e ── launch ── record f
//!                                                         \
//! host     ──────────────────────────────────────────────── f.synchronize(): the upload is over too
//! ```
//!
//! [`Progress`] counts the asynchronous copies of each queue and what each queue and the host know to be over (a vector
//! clock, after Fidge and Mattern, 1988). So page-locked memory that may still be read or written is found by
//! comparing numbers, the same on a device where copies take time and on one where they are over at once. A count costs
//! a lock that nobody holds for long.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::DeviceError;
use crate::cuda::Point;
use crate::stream::Queue;

/// For each queue: that many of its copies are over.
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

/// What is known of the queues of one device.
#[derive(Default)]
pub(crate) struct Progress(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// What is over when a queue has done all that it was given so far.
    queues: [Clock; 2],
    /// What the host has waited for.
    host: Clock,
}

impl Progress {
    /// A copy was given to the queue; returns what must be over before the host may look. Call it after the queue has
    /// the copy: an event that is recorded in between may promise too little, never too much.
    pub fn copied(&self, queue: Queue) -> Clock {
        let mut known = self.lock();
        let own = &mut known.queues[queue as usize].0[queue as usize];
        *own += 1;
        let mut clock = Clock::default();
        clock.0[queue as usize] = *own;
        clock
    }

    /// What an event promises that is recorded now.
    pub fn of(&self, queue: Queue) -> Clock {
        self.lock().queues[queue as usize]
    }

    /// The queue goes no further before these are over.
    pub fn waits(&self, queue: Queue, clock: Clock) {
        self.lock().queues[queue as usize].join(clock);
    }

    /// The host knows that these are over.
    pub fn seen(&self, clock: Clock) {
        self.lock().host.join(clock);
    }

    /// What a wait for all queues promises.
    pub fn all(&self) -> Clock {
        let known = self.lock();
        let mut clock = known.queues[0];
        clock.join(known.queues[1]);
        clock
    }

    /// Whether the host has waited for these.
    pub fn over(&self, clock: Clock) -> bool {
        self.lock().host.covers(clock)
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // Numbers that only grow: a panic elsewhere leaves them whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A point of a queue; made by [`Device::record`](crate::Device::record).
pub struct Event {
    pub(crate) progress: Arc<Progress>,
    pub(crate) clock: Clock,
    pub(crate) mark: Mark,
}

/// How a backend marks a point of a queue.
pub(crate) enum Mark {
    /// Where work is over when the call returns.
    Host(&'static str, Instant),
    /// In the streams of a GPU.
    Cuda(Point),
}

impl Mark {
    /// Backend name.
    pub fn device(&self) -> &'static str {
        match self {
            Mark::Host(device, _) => device,
            Mark::Cuda(_) => "cuda",
        }
    }
}

impl Event {
    /// Waits until all that was given to the queue before this point is over.
    ///
    /// # Errors
    /// Of the work, if a kernel went wrong.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        match &self.mark {
            Mark::Host(..) => {}
            Mark::Cuda(point) => point.synchronize()?,
        }
        self.progress.seen(self.clock);
        Ok(())
    }

    /// Whether it is over, without waiting.
    ///
    /// # Errors
    /// As [`Event::synchronize`].
    pub fn is_done(&self) -> Result<bool, DeviceError> {
        let done = match &self.mark {
            Mark::Host(..) => true,
            Mark::Cuda(point) => point.is_done()?,
        };
        if done {
            self.progress.seen(self.clock);
        }
        Ok(done)
    }

    /// The time between two points of the same device; waits for both. On `cuda` it is the device's own, to about half
    /// a microsecond.
    ///
    /// # Errors
    /// As [`Event::synchronize`], and [`DeviceError::WrongDevice`].
    pub fn since(&self, earlier: &Event) -> Result<Duration, DeviceError> {
        if !Arc::ptr_eq(&self.progress, &earlier.progress) {
            let (expected, found) = (self.mark.device(), earlier.mark.device());
            return Err(DeviceError::WrongDevice { expected, found });
        }
        earlier.synchronize()?;
        self.synchronize()?;
        match (&self.mark, &earlier.mark) {
            (Mark::Host(_, end), Mark::Host(_, start)) => Ok(end.saturating_duration_since(*start)),
            (Mark::Cuda(end), Mark::Cuda(start)) => Ok(end.since(start)?),
            (end, start) => Err(DeviceError::WrongDevice { expected: end.device(), found: start.device() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_knows_what_it_waited_for_and_what_that_waited_for() {
        let progress = Progress::default();
        let first = progress.copied(Queue::Copy);
        let mark = progress.of(Queue::Copy);
        let second = progress.copied(Queue::Copy);
        let other = progress.copied(Queue::Compute);
        assert!(![first, second, other].iter().any(|clock| progress.over(*clock)));
        // Compute waits for the mark on Copy, the host for Compute.
        progress.waits(Queue::Compute, mark);
        progress.seen(progress.of(Queue::Compute));
        assert!(progress.over(first) && progress.over(other) && !progress.over(second));
        progress.seen(progress.all());
        assert!(progress.over(second));
    }
}
