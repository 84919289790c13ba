//! The blocks of one sequence in one cache group.

/// The blocks of one sequence in one cache group: holes, then blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupTable<B> {
    pub(crate) holes: usize,
    pub(crate) blocks: Vec<B>,
}

impl<B: Copy> GroupTable<B> {
    /// Leading entries that lie behind the group's window; always 0 in a full group.
    pub fn holes(&self) -> usize {
        self.holes
    }

    /// The blocks behind the holes, in order of position.
    pub fn blocks(&self) -> &[B] {
        &self.blocks
    }

    /// Entries, holes included.
    pub fn num_entries(&self) -> usize {
        self.holes + self.blocks.len()
    }

    /// The block that holds positions from `entry * block_size` on; `None` for a hole or past the end.
    pub fn entry(&self, entry: usize) -> Option<B> {
        self.blocks.get(entry.checked_sub(self.holes)?).copied()
    }
}
