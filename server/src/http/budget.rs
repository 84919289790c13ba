//! Memory of all requests in flight: one budget ([`Limits::max_inflight_bytes`](crate::settings::Limits)), shared so
//! that nobody can take all of it.
//!
//! ```text
//! |<----------------------- --max-inflight-bytes ----------------------->|
//! | parts of up to 64 KiB may use all of it                              |
//! | parts of up to 1 MiB seven eighths                          |
//! | larger parts six eighths                           |
//! | bodies of more than 64 KiB that are incomplete: half |
//! ```
//!
//! A part is the body of a request while it arrives and is read, and then what is held until the request is answered.
//! While a body waits for memory, other incomplete bodies that do not arrive at `request::body`'s rate give way to it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::ApiError;

/// Greatest sizes of parts in bytes, and the eighths of the budget that parts of this size and larger ones may use.
const SHARES: [(usize, usize); 3] = [(64 << 10, 8), (1 << 20, 7), (usize::MAX, 6)];

/// Number of shares: those of [`SHARES`], and that of incomplete bodies.
const COUNT: usize = SHARES.len() + 1;

/// After the return of a part of this many bytes, the allocator may hold free memory.
const LARGE_PART: usize = 256 << 10;

fn share(budget: usize, eighths: usize) -> usize {
    budget / 8 * eighths + budget % 8
}

/// Size of the largest part that a budget of this many bytes has space for, however little others hold.
pub fn largest(budget: usize) -> usize {
    SHARES.iter().map(|&(most, eighths)| most.min(share(budget, eighths))).max().unwrap_or(budget)
}

/// Memory budget of all requests in flight.
pub struct Budget {
    shares: Arc<Shares>,
    /// Bodies that wait for memory hold clones.
    waiting: Arc<()>,
}

#[derive(Debug)]
struct Shares {
    /// Maximum number of bytes of each share.
    most: [usize; COUNT],
    used: Mutex<[usize; COUNT]>,
    /// Set when a large part has been returned.
    freed: AtomicBool,
}

impl Shares {
    fn used(&self) -> MutexGuard<'_, [usize; COUNT]> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of the budget, returned when it is dropped.
#[derive(Debug, Default)]
pub struct Reserved {
    shares: Option<Arc<Shares>>,
    /// Bytes of each share.
    bytes: [usize; COUNT],
    /// Maximum size so far.
    most: usize,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let Some(shares) = &self.shares else { return };
        shares.used().iter_mut().zip(self.bytes).for_each(|(used, bytes)| *used -= bytes);
        if self.most >= LARGE_PART {
            shares.freed.store(true, Ordering::Release);
        }
    }
}

impl Reserved {
    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes == [0; COUNT]
    }
}

impl Budget {
    /// Budget of this many bytes for requests whose bodies have at most `body` bytes.
    pub fn new(bytes: usize, body: usize) -> Budget {
        // At least one body fits.
        let incomplete = share(bytes, 4).max(body.min(largest(bytes)));
        let [all, medium, large] = SHARES.map(|(_, eighths)| share(bytes, eighths));
        let (used, freed) = (Mutex::default(), AtomicBool::new(false));
        let shares = Arc::new(Shares { most: [all, medium, large, incomplete], used, freed });
        Budget { shares, waiting: Arc::default() }
    }

    /// Resizes `reserved` to `bytes`, for a body that is incomplete or for anything else. Fails with 429 and leaves it
    /// unchanged if a share is exhausted.
    pub fn resize(&self, reserved: &mut Reserved, bytes: usize, is_incomplete: bool) -> Result<(), ApiError> {
        let if_over = |most: usize| if bytes > most { bytes } else { 0 };
        let [(small, _), (medium, _), _] = SHARES;
        let wanted = [bytes, if_over(small), if_over(medium), if is_incomplete { if_over(small) } else { 0 }];
        let before = reserved.bytes;
        let mut used = self.shares.used();
        let after: [usize; COUNT] = std::array::from_fn(|i| used[i] - before[i] + wanted[i]);
        if (0..COUNT).any(|i| wanted[i] > before[i] && after[i] > self.shares.most[i]) {
            return Err(ApiError::busy("requests in flight use all memory of --max-inflight-bytes; try again later"));
        }
        *used = after;
        reserved.bytes = wanted;
        reserved.most = reserved.most.max(bytes);
        reserved.shares.get_or_insert_with(|| self.shares.clone());
        Ok(())
    }

    /// Tells stalled bodies that another waits for their memory, until the result is dropped.
    pub fn wait(&self) -> Arc<()> {
        self.waiting.clone()
    }

    /// Whether a body waits for memory.
    pub fn is_wanted(&self) -> bool {
        Arc::strong_count(&self.waiting) > 1
    }

    /// Whether a large part has been returned since the last call.
    pub fn was_freed(&self) -> bool {
        self.shares.freed.swap(false, Ordering::AcqRel)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/budget.rs"]
mod tests;
