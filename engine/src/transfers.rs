//! Copies between the cache and host memory that are under way while steps are computed, and who has to wait for them.
//!
//! ```text
//! Copy      ┌ swap out 4, 7 ┐┌ swap in 9 ┐
//! Compute   step 6 (reads 1, 2) ──────────── step 7 (writes 4: waits) ── step 8 (reads 9: waits no more)
//! ```
//!
//! The blocks of a swap are nobody's while it runs, as far as the steps before it go: what is swapped out was computed by steps
//! that are committed, and what is swapped in goes to blocks that no step in flight has. So a copy waits for none of these,
//! and a step waits for a copy only if it
//!
//! - writes to a block that is still read for host memory, or
//! - looks at a block that host memory still comes to.
//!
//! Who is swapped out gives way to a step that needs a block now: the blocks that it writes go first, by themselves, and the
//! others go while it runs.
//!
//! Copies run in order, so that to have waited for one is to have waited for those before it. Nothing is looked at, and no
//! event made, in a step without swaps behind it.

use std::collections::VecDeque;

use device::Event;

/// Where a block goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Out,
    In,
}

/// Copies of one call.
pub(crate) struct Transfer {
    pub direction: Direction,
    /// Source and target blocks.
    pub pairs: Vec<(u32, u32)>,
    /// Recorded behind them.
    pub event: Event,
}

impl Transfer {
    /// The blocks of the cache.
    fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.pairs.iter().map(|&(src, dst)| if self.direction == Direction::Out { src } else { dst })
    }
}

/// What the compute queue has not waited for, oldest first.
#[derive(Default)]
pub(crate) struct Transfers(VecDeque<Transfer>);

impl Transfers {
    pub fn push(&mut self, transfer: Transfer) {
        self.0.push_back(transfer);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes out all transfers up to the last that someone has to wait for who writes the blocks of which `writes` holds and
    /// looks at those of which `reads` does.
    pub fn take(
        &mut self,
        writes: impl Fn(u32) -> bool,
        reads: impl Fn(u32) -> bool,
    ) -> impl DoubleEndedIterator<Item = Transfer> + '_ {
        let conflicts = |transfer: &Transfer| {
            transfer.blocks().any(|block| writes(block) || transfer.direction == Direction::In && reads(block))
        };
        let count = self.0.iter().rposition(conflicts).map_or(0, |last| last + 1);
        self.0.drain(..count)
    }
}
