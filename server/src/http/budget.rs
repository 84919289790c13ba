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
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const BUDGET: usize = 128 << 20;

    /// Takes parts of this size until none is left.
    fn fill(budget: &Budget, bytes: usize, is_incomplete: bool) -> Vec<Reserved> {
        let take = || {
            let mut part = Reserved::default();
            budget.resize(&mut part, bytes, is_incomplete).ok().map(|()| part)
        };
        std::iter::from_fn(take).collect()
    }

    #[test]
    fn parts_leave_space_for_smaller_ones_and_return_what_they_held() {
        let budget = Budget::new(BUDGET, 16 << 20);
        for _ in 0..2 {
            let held: Vec<Vec<Reserved>> =
                [(16 << 20, true), (16 << 20, false), (1 << 20, true), (1 << 20, false), (64 << 10, true)]
                    .map(|(bytes, is_incomplete)| fill(&budget, bytes, is_incomplete))
                    .into();
            // Incomplete bodies stop at half, all large parts at six eighths; then there is space for the smaller ones.
            assert_eq!(held.iter().map(Vec::len).collect::<Vec<_>>(), [4, 2, 0, 16, 256]);
        }
        assert!(budget.was_freed());
        let (whole, mut part) = (largest(BUDGET), Reserved::default());
        budget.resize(&mut part, whole, false).unwrap();
        assert!(budget.resize(&mut Reserved::default(), 2 << 20, false).is_err());
    }

    #[test]
    fn a_part_that_cannot_grow_keeps_its_size() {
        let budget = Budget::new(BUDGET, 16 << 20);
        let mut part = Reserved::default();
        budget.resize(&mut part, 8 << 20, true).unwrap();
        let others = fill(&budget, 16 << 20, false);
        assert!(budget.resize(&mut part, 100 << 20, false).is_err());
        assert_eq!(part.bytes, [8 << 20; COUNT]);
        drop(others);
        budget.resize(&mut part, 1 << 20, false).unwrap();
        assert_eq!(part.bytes, [1 << 20, 1 << 20, 0, 0]);
        budget.resize(&mut part, 0, false).unwrap();
        assert!(part.is_empty() && fill(&budget, 16 << 20, false).len() == 6);
    }

    #[test]
    fn a_small_budget_has_space_for_a_small_part() {
        assert_eq!([32 << 10, 64 << 10, 256 << 10, BUDGET].map(largest), [32 << 10, 64 << 10, 224 << 10, 96 << 20]);
        let budget = Budget::new(15 << 20, 16 << 20);
        assert!(budget.resize(&mut Reserved::default(), 9_000_000, true).is_ok());
    }
}
