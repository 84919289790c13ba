//! The sequences of a step: query rows, contexts and block tables.

use std::ops::Range;

use crate::error::{KernelError, at_least, expect};
use crate::tables::BlockTables;

/// Query rows, context and blocks of each sequence. The rows of sequence s are `query_starts[s]..query_starts[s + 1]`; they
/// are the *last* tokens of its context.
#[derive(Clone, Debug, Default)]
pub struct AttentionBatch {
    /// First row of each sequence, `[num_seqs + 1]`: starts at 0 and does not decrease.
    pub query_starts: Vec<u32>,
    /// Context length of each sequence in tokens, query rows included, `[num_seqs]`. 0 marks padding, whose output rows are
    /// zero.
    pub context_lens: Vec<u32>,
    /// Table of block ids of each sequence, −1 for released blocks behind a window. A table may be longer than its context
    /// needs.
    pub block_tables: BlockTables,
}

impl AttentionBatch {
    /// Number of sequences.
    pub fn num_seqs(&self) -> usize {
        self.context_lens.len()
    }

    /// Number of query rows of all sequences.
    pub fn num_rows(&self) -> usize {
        self.query_starts.last().map_or(0, |&rows| rows as usize)
    }

    /// Returns the block table of a sequence.
    pub fn table(&self, seq: usize) -> &[i32] {
        self.block_tables.table(seq)
    }

    /// Checks the lengths of the arrays.
    pub(crate) fn check_sizes(&self) -> Result<(), KernelError> {
        expect("query_starts", self.query_starts.len(), self.num_seqs() + 1)?;
        expect("first of query_starts", self.query_starts[0] as usize, 0)?;
        expect("block_tables", self.block_tables.len(), self.num_seqs())
    }

    /// Checks lengths and block ids of some sequences, as far as a kernel with that window reads them. Call
    /// [`AttentionBatch::check_sizes`] first.
    pub(crate) fn check_seqs(
        &self,
        seqs: Range<usize>,
        shape: (usize, usize),
        window: Option<usize>,
    ) -> Result<(), KernelError> {
        let (num_blocks, block_size) = shape;
        for seq in seqs {
            let (start, end) = (self.query_starts[seq] as usize, self.query_starts[seq + 1] as usize);
            at_least("query_starts", end, start)?;
            let (rows, context) = (end - start, self.context_lens[seq] as usize);
            if context == 0 {
                continue;
            }
            at_least("context length", context, rows)?;
            let blocks = context.div_ceil(block_size);
            let table = self.table(seq);
            at_least("blocks in a table", table.len(), blocks)?;
            // Blocks behind a window may have been released; their entries are not read.
            let first = window.map_or(0, |w| (context - rows + 1).saturating_sub(w)) / block_size;
            for &block in table.get(first..blocks).unwrap_or_default() {
                if block < 0 || block as usize >= num_blocks {
                    return Err(KernelError::Shape { what: "block id", found: block as usize, expected: num_blocks });
                }
            }
        }
        Ok(())
    }
}
