//! The block tables of a step.
//!
//! ```text
//! blocks  [ 4 7 2 | 4 7 9 | 1 ]      tables of 3, 3 and 1 blocks
//! ends    [       3       6   7 ]
//! ```
//!
//! Tables lie one behind another without padding, so to build, copy and compare them costs what the sequences hold, however
//! long the longest is. A plug-in reads a rectangle, as its C structure says; that is made once for a step, when the first
//! plug-in is called.

use std::sync::OnceLock;

/// Block tables, one for each sequence of a batch.
#[derive(Clone, Debug, Default)]
pub struct BlockTables {
    blocks: Vec<i32>,
    /// Where each table ends in `blocks`.
    ends: Vec<usize>,
    rectangle: OnceLock<Vec<i32>>,
}

impl BlockTables {
    /// Removes all tables and keeps their memory.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.ends.clear();
        self.rectangle.take();
    }

    /// Adds the table of the next sequence.
    pub fn push(&mut self, table: &[i32]) {
        self.blocks.extend_from_slice(table);
        self.ends.push(self.blocks.len());
        self.rectangle.take();
    }

    /// Number of tables.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no table.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Number of entries in all tables together: what a step copies and compares.
    pub fn num_entries(&self) -> usize {
        self.blocks.len()
    }

    /// Number of entries of the longest table.
    pub fn longest(&self) -> usize {
        (0..self.len()).map(|seq| self.table(seq).len()).max().unwrap_or(0)
    }

    /// The table of a sequence; empty where there is none.
    pub fn table(&self, seq: usize) -> &[i32] {
        let start = seq.checked_sub(1).and_then(|before| self.ends.get(before)).map_or(0, |end| *end);
        self.ends.get(seq).and_then(|end| self.blocks.get(start..*end)).unwrap_or_default()
    }

    /// All tables in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[i32]> {
        (0..self.len()).map(|seq| self.table(seq))
    }

    /// All tables as rows of [`BlockTables::longest`] entries, padded with −1.
    pub(crate) fn rectangle(&self) -> &[i32] {
        self.rectangle.get_or_init(|| {
            let width = self.longest();
            let padded = |table: &[i32]| {
                let mut row = table.to_vec();
                row.resize(width, -1);
                row
            };
            self.iter().flat_map(padded).collect()
        })
    }
}

impl<T: AsRef<[i32]>> FromIterator<T> for BlockTables {
    fn from_iter<I: IntoIterator<Item = T>>(tables: I) -> BlockTables {
        let mut all = BlockTables::default();
        tables.into_iter().for_each(|table| all.push(table.as_ref()));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_hold_what_was_pushed_and_nothing_between_and_a_rectangle_follows_them() {
        let mut tables: BlockTables = [vec![4, 7, 2], vec![], vec![1]].into_iter().collect();
        assert_eq!((tables.len(), tables.num_entries(), tables.longest()), (3, 4, 3));
        assert_eq!(tables.iter().collect::<Vec<_>>(), [&[4, 7, 2][..], &[], &[1]]);
        assert_eq!(tables.table(3), [0i32; 0], "there is no such sequence");
        assert_eq!(tables.rectangle(), [4, 7, 2, -1, -1, -1, 1, -1, -1]);
        tables.push(&[5, 6]);
        assert_eq!(tables.rectangle(), [4, 7, 2, -1, -1, -1, 1, -1, -1, 5, 6, -1]);
        tables.clear();
        assert!(tables.is_empty() && tables.rectangle().is_empty());
    }
}
