//! Swaps in flight between the cache and host memory, and which steps have to wait for them.
//!
//! ```text
//! Copy      ┌ swap out 4, 7 ┐┌ swap in 9 ┐
//! Compute   step 6 (reads 1, 2) ──────────── step 7 (writes 4: waits) ── step 8 (reads 9: no longer waits)
//! ```
//!
//! No step in flight uses the blocks of a swap: blocks that are swapped out were computed by committed steps, and blocks are
//! swapped in to where no step in flight reads or writes. So a swap waits for no step, and a step waits for a swap only if it
//!
//! - writes a block that is still being copied to host memory, or
//! - reads or writes a block that is still being copied from host memory.
//!
//! A request is often swapped out because a step needs its blocks at once: the blocks that the step writes are copied first, as a
//! transfer of their own, and the others while the step runs.
//!
//! Transfers run in order, so waiting for one is waiting for all before it. A step drops the transfers of earlier steps that are
//! over, so that later steps spend no time on them. While a transfer is in flight, a step costs in proportion to its own block
//! tables: [`TouchedBlocks`] marks a block with a generation number, so nothing of the size of the pool is cleared.

use std::collections::VecDeque;

use device::{DeviceError, Event};
use sched::StepId;

/// Whether blocks are copied to host memory or from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Out,
    In,
}

/// Swaps that were ordered by one call.
pub(crate) struct Transfer {
    /// The step whose plan orders them.
    pub step: StepId,
    pub direction: Direction,
    /// Source and target blocks.
    pub pairs: Vec<(u32, u32)>,
    /// Recorded after the last copy.
    pub event: Event,
}

impl Transfer {
    /// Blocks of the cache.
    fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.pairs.iter().map(|&(src, dst)| if self.direction == Direction::Out { src } else { dst })
    }
}

/// Transfers that the compute queue has not waited for, oldest first.
#[derive(Default)]
pub(crate) struct Transfers(VecDeque<Transfer>);

impl Transfers {
    pub fn push(&mut self, transfer: Transfer) {
        self.0.push_back(transfer);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes the transfers of steps before `step` that are over, without waiting.
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

    /// Removes and returns all transfers up to the last one that conflicts with `touched`.
    pub fn drain_conflicting(
        &mut self,
        touched: &TouchedBlocks,
    ) -> impl DoubleEndedIterator<Item = Transfer> + '_ + use<'_> {
        let conflicts = |transfer: &Transfer| {
            let is_in = transfer.direction == Direction::In;
            transfer.blocks().any(|block| touched.is_written(block) || is_in && touched.is_read(block))
        };
        let count = self.0.iter().rposition(conflicts).map_or(0, |last| last + 1);
        self.0.drain(..count)
    }
}

/// Sets of blocks that a step, or a run of memory operations, reads and writes. Clearing them costs nothing: a mark is the
/// generation that it was made in.
#[derive(Default)]
pub(crate) struct TouchedBlocks {
    generation: u64,
    /// For each block, the last generation that read it and the last that wrote it.
    marks: Vec<[u64; 2]>,
}

impl TouchedBlocks {
    /// Clears all marks. `num_blocks` is the size of the pool.
    pub fn clear(&mut self, num_blocks: usize) {
        self.generation += 1;
        // Allocates only once, because the pool keeps its size.
        self.marks.resize(num_blocks, [0; 2]);
    }

    pub fn mark_read(&mut self, block: usize) {
        self.mark(block, 0);
    }

    pub fn mark_written(&mut self, block: usize) {
        self.mark(block, 1);
    }

    fn mark(&mut self, block: usize, which: usize) {
        if let Some(marks) = self.marks.get_mut(block) {
            marks[which] = self.generation;
        }
    }

    pub fn is_read(&self, block: u32) -> bool {
        self.is_marked(block, 0)
    }

    pub fn is_written(&self, block: u32) -> bool {
        self.is_marked(block, 1)
    }

    fn is_marked(&self, block: u32, which: usize) -> bool {
        self.marks.get(block as usize).is_some_and(|marks| marks[which] == self.generation)
    }
}
