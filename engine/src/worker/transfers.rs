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
//! Copies run in order, so waiting for one is waiting for all before it. A copy that is over is forgotten at the next step, so
//! that later steps do no work for it. While a copy runs, a step costs what its own block tables hold: [`Touched`] marks blocks
//! with the number of the step, and nothing of the size of the pool is written.

use std::collections::VecDeque;

use device::{DeviceError, Event};
use sched::StepId;

/// Where a block goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Out,
    In,
}

/// Copies of one call.
pub(crate) struct Transfer {
    /// The step whose plan asked for it.
    pub step: StepId,
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

    /// Removes the copies that are over; does not wait.
    ///
    /// # Errors
    /// A copy failed.
    pub fn forget_done(&mut self, step: StepId) -> Result<(), DeviceError> {
        while let Some(oldest) = self.0.front()
            && oldest.step != step
            && oldest.event.is_done()?
        {
            self.0.pop_front();
        }
        Ok(())
    }

    /// Takes out all transfers up to the last that someone has to wait for who writes the blocks of which `writes` holds and
    /// looks at those of which `reads` does.
    pub fn drain_conflicting(
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

/// Blocks that one step, or one run of memory operations, reads and writes. Beginning the next one costs nothing: a mark is the
/// number of the step that made it.
#[derive(Default)]
pub(crate) struct Touched {
    step: u64,
    /// For each block, the last step that read it and the last that wrote it.
    marks: Vec<[u64; 2]>,
}

impl Touched {
    /// Forgets all marks. `num_blocks` is the size of the pool.
    pub fn begin(&mut self, num_blocks: usize) {
        self.step += 1;
        // Allocates once: the pool keeps its size.
        self.marks.resize(num_blocks, [0; 2]);
    }

    pub fn read(&mut self, block: usize) {
        self.mark(block, 0);
    }

    pub fn write(&mut self, block: usize) {
        self.mark(block, 1);
    }

    fn mark(&mut self, block: usize, which: usize) {
        if let Some(marks) = self.marks.get_mut(block) {
            marks[which] = self.step;
        }
    }

    pub fn is_read(&self, block: u32) -> bool {
        self.is_marked(block, 0)
    }

    pub fn is_written(&self, block: u32) -> bool {
        self.is_marked(block, 1)
    }

    fn is_marked(&self, block: u32, which: usize) -> bool {
        self.marks.get(block as usize).is_some_and(|marks| marks[which] == self.step)
    }
}
