//! Trees of drafts: query rows of a sequence of which each sees only those on its path.
//!
//! Speculative decoding verifies several guesses in one step. If they form a tree, a row's *path* is the rows from a root to
//! itself, and it sees the tokens before the query rows and its path. A tree mask states the paths (SpecInfer, Miao et al.,
//! 2024):
//!
//! ```text
//! row          0   1   2   3   4         row 4's path is 0, 2, 4, so its mask is 0b10101,
//! parent       -   0   0   1   2         and it is at the position (tokens before the rows) + 2
//! ```
//!
//! A row has the bits that it would have if the sequence ended with its path: kernels map a position to the token of the path
//! that is there, and the order of every sum depends on positions only. So windows, ALiBi and sparse blocks need no rule for
//! trees.

use crate::error::{KernelError, at_least, expect};

/// Most query rows of a sequence with a tree: the bits of a mask.
pub(crate) const MOST_ROWS: usize = u64::BITS as usize;

/// The tokens that a row of a tree sees, in the order of their positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Tokens of the sequence before its query rows.
    before: usize,
    /// Bit i: row i of the sequence.
    rows: u64,
}

impl Path {
    /// The path of a row with this mask.
    pub fn new(before: usize, rows: u64) -> Path {
        Path { before, rows }
    }

    /// Returns the position of the row itself.
    pub fn position(&self) -> usize {
        (self.before + self.rows.count_ones() as usize).saturating_sub(1)
    }

    /// Returns for how many positions from one on the tokens are certainly adjacent; at least 1.
    pub fn adjacent(&self, position: usize) -> usize {
        self.before.saturating_sub(position).max(1)
    }

    /// Returns the token of the sequence at a position up to the row's own.
    pub fn token(&self, position: usize) -> usize {
        let Some(index) = position.checked_sub(self.before) else { return position };
        let mut rest = self.rows;
        for _ in 0..index {
            rest &= rest.wrapping_sub(1);
        }
        self.before + rest.trailing_zeros() as usize
    }
}

/// Checks the masks of the query rows of one sequence: all zero (a chain), or a tree whose rows follow their parents.
pub fn check(masks: &[u64]) -> Result<(), KernelError> {
    if masks.iter().all(|mask| *mask == 0) {
        return Ok(());
    }
    at_least("rows that a tree may have", MOST_ROWS, masks.len())?;
    for (row, mask) in masks.iter().enumerate() {
        let own = 1 << row;
        let ancestors = mask & (own - 1);
        // The path of a row is that of its parent, its last ancestor, and itself.
        let parent = ancestors.checked_ilog2().map_or(0, |parent| masks[parent as usize]);
        expect("tree mask of a row, given its parent's", *mask as usize, (parent | own) as usize)?;
    }
    Ok(())
}
