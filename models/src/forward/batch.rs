//! The tokens of one step, laid side by side.

use attention_kernels::AttentionBatch;

/// All tokens of a step. Sequences with one token come first, so that they form one call of the decode kernel.
/// Reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct ForwardBatch {
    /// `[rows]` token ids.
    pub tokens: Vec<u32>,
    /// `[rows]` absolute positions.
    pub positions: Vec<u32>,
    /// `[rows]` cache slots, −1 to skip.
    pub slot_mapping: Vec<i64>,
    /// Which rows, context and blocks belong to which sequence.
    pub attention: AttentionBatch,
    /// The first so many sequences have one row each.
    pub decodes: usize,
}

impl ForwardBatch {
    /// Empties the batch for sequences of up to `max_blocks` blocks, keeping its memory.
    pub fn clear(&mut self, max_blocks: usize) {
        self.tokens.clear();
        self.positions.clear();
        self.slot_mapping.clear();
        self.attention.query_starts.clear();
        self.attention.query_starts.push(0);
        self.attention.context_lens.clear();
        self.attention.block_tables.clear();
        self.attention.max_blocks = max_blocks;
        self.decodes = 0;
    }

    /// Adds a sequence: its new tokens from position `start` on, their slots, and its block table (at most
    /// `max_blocks` long). Sequences of one token must come before longer ones. Returns the sequence's last row.
    pub fn push(
        &mut self,
        start: usize,
        tokens: &[u32],
        slots: &[i64],
        table: impl ExactSizeIterator<Item = u32>,
    ) -> u32 {
        debug_assert_eq!(tokens.len(), slots.len(), "one slot per token");
        debug_assert!(tokens.len() != 1 || self.decodes == self.attention.num_seqs(), "single tokens come first");
        self.decodes += usize::from(tokens.len() == 1);
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((start..start + tokens.len()).map(|p| p as u32));
        self.slot_mapping.extend_from_slice(slots);
        let padding = self.attention.max_blocks - table.len();
        self.attention.block_tables.extend(table.map(|block| block as i32));
        self.attention.block_tables.extend(std::iter::repeat_n(-1, padding));
        self.attention.context_lens.push((start + tokens.len()) as u32);
        self.attention.query_starts.push(self.tokens.len() as u32);
        self.tokens.len() as u32 - 1
    }
}
