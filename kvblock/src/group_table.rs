//! The blocks of one sequence in one cache group.

/// The block table of one sequence in one cache group: holes, then blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupTable<B> {
    pub(crate) holes: usize,
    pub(crate) blocks: Vec<B>,
}

impl<B: Copy> GroupTable<B> {
    /// Number of leading entries behind the group's window; always 0 in a full group.
    pub fn holes(&self) -> usize {
        self.holes
    }

    /// The blocks after the holes, in order of position.
    pub fn blocks(&self) -> &[B] {
        &self.blocks
    }

    /// Number of entries, including holes.
    pub fn num_entries(&self) -> usize {
        self.holes + self.blocks.len()
    }

    /// Returns the block of the positions from `entry * block_size` on; `None` for a hole or past the end.
    pub fn entry(&self, entry: usize) -> Option<B> {
        self.blocks.get(entry.checked_sub(self.holes)?).copied()
    }

    /// Returns the first entry whose block satisfies `which`.
    pub(crate) fn position(&self, which: impl Fn(&B) -> bool) -> Option<usize> {
        self.blocks.iter().position(which).map(|at| self.holes + at)
    }

    /// Maps each block through `f`, leaving out those for which it returns `None`. Holes are kept.
    pub(crate) fn filter_map<C>(&self, f: impl Fn(&B) -> Option<C>) -> GroupTable<C> {
        GroupTable { holes: self.holes, blocks: self.blocks.iter().filter_map(f).collect() }
    }
}
