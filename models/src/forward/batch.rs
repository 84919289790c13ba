//! The tokens of one step.

use std::ops::Range;

use attention_kernels::{AttentionBatch, KernelError};

/// The tokens of all sequences of a step, concatenated. Sequences with up to [`Model::decode_rows`](crate::Model::decode_rows)
/// tokens come first, so that they form one call of the decode kernel. Reuse one batch from step to step: it keeps its memory.
#[derive(Clone, Debug, Default)]
pub struct ForwardBatch {
    /// `[rows]` token ids; [`ForwardBatch::AWAITED`] for a token that only the device knows.
    pub tokens: Vec<u32>,
    /// `[rows]` absolute positions.
    pub positions: Vec<u32>,
    /// Slots and block tables, for each group of layers ([`PageLayout`](crate::PageLayout)).
    pub groups: Vec<GroupBatch>,
    /// Slot of each sequence's adapter ([`Model::set_adapter`](crate::Model::set_adapter)), or [`ForwardBatch::NO_ADAPTER`].
    pub adapters: Vec<u32>,
    /// Number of last rows of each sequence that are drafts, fewer than it has rows; a missing number is 0. The rows of drafts do
    /// not change the states of recurrent layers; they write keys and values as others do.
    pub drafts: Vec<u32>,
    /// Position of each sequence from which on its tokens are of type 1, the second text of a pair; a missing number is none.
    pub seconds: Vec<u32>,
    /// Rows whose logits may be requested, ascending; `None`: any row.
    pub needed: Option<Vec<u32>>,
}

/// The part of a batch that differs between groups of layers.
#[derive(Clone, Debug, Default)]
pub struct GroupBatch {
    /// `[rows]` cache slots; −1: the row is not written.
    pub slot_mapping: Vec<i64>,
    /// Rows, context length and block table of each sequence.
    pub attention: AttentionBatch,
}

impl ForwardBatch {
    /// Placeholder for a token that a kernel writes to the device's token array before the forward pass
    /// ([`Model::forward_with`](crate::Model::forward_with)). It is no valid id, so the host never assumes that the array holds
    /// a token that it does not.
    pub const AWAITED: u32 = u32::MAX;

    /// Placeholder for the slot of a sequence without an adapter.
    pub const NO_ADAPTER: u32 = u32::MAX;

    /// Empties the batch and keeps its memory; the next sequences have `groups` block tables each. `needed`, if it is a list,
    /// becomes an empty list.
    pub fn clear(&mut self, groups: usize) {
        self.tokens.clear();
        self.positions.clear();
        self.groups.resize_with(groups, GroupBatch::default);
        for GroupBatch { slot_mapping, attention } in &mut self.groups {
            slot_mapping.clear();
            attention.query_starts.clear();
            attention.query_starts.push(0);
            attention.context_lens.clear();
            attention.block_tables.clear();
        }
        self.adapters.clear();
        self.drafts.clear();
        self.seconds.clear();
        self.needed.iter_mut().for_each(Vec::clear);
    }

    /// Appends a sequence: its new tokens, which begin at position `start`, and for each group their slots and its block table
    /// (−1 for blocks that have left the window). Returns the sequence's last row.
    pub fn push<'a>(
        &mut self,
        start: usize,
        tokens: &[u32],
        groups: impl IntoIterator<Item = (&'a [i64], &'a [i32])>,
    ) -> u32 {
        self.adapters.push(ForwardBatch::NO_ADAPTER);
        self.drafts.push(0);
        self.seconds.push(u32::MAX);
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((start..start + tokens.len()).map(|p| p as u32));
        let rows = self.tokens.len() as u32;
        for (GroupBatch { slot_mapping, attention }, (slots, table)) in self.groups.iter_mut().zip(groups) {
            debug_assert_eq!(tokens.len(), slots.len(), "one slot per token");
            slot_mapping.extend_from_slice(slots);
            attention.block_tables.push(table);
            attention.context_lens.push((start + tokens.len()) as u32);
            attention.query_starts.push(rows);
        }
        rows - 1
    }

    /// Sets the slot of the adapter of the sequence that was appended last.
    pub fn set_adapter(&mut self, slot: u32) {
        if let Some(last) = self.adapters.last_mut() {
            *last = slot;
        }
    }

    /// Sets the position from which on the tokens of the sequence that was appended last are of type 1.
    pub fn set_second(&mut self, position: u32) {
        if let Some(last) = self.seconds.last_mut() {
            *last = position;
        }
    }

    /// Sets the number of drafts of the sequence that was appended last.
    pub fn set_drafts(&mut self, drafts: usize) {
        if let Some(last) = self.drafts.last_mut() {
            *last = drafts as u32;
        }
    }

    /// Becomes a copy of a batch, padded to `rows` rows and as many sequences: one for each row of padding, and as many without
    /// rows as are missing. Padding is token 0 at position 0 with a context of 0, slot −1 and no block. No row is dropped on the
    /// way ([`ForwardBatch::needed`] is `None`).
    pub fn pad(&mut self, from: &ForwardBatch, rows: usize) {
        self.tokens.clone_from(&from.tokens);
        self.tokens.resize(rows, 0);
        self.positions.clone_from(&from.positions);
        self.positions.resize(rows, 0);
        self.groups.resize_with(from.groups.len(), GroupBatch::default);
        for (GroupBatch { slot_mapping, attention }, from) in self.groups.iter_mut().zip(&from.groups) {
            slot_mapping.clone_from(&from.slot_mapping);
            slot_mapping.resize(rows, -1);
            attention.query_starts.clone_from(&from.attention.query_starts);
            attention.query_starts.extend(from.attention.num_rows() as u32 + 1..=rows as u32);
            attention.query_starts.resize(rows + 1, rows as u32);
            attention.context_lens.clone_from(&from.attention.context_lens);
            attention.context_lens.resize(rows, 0);
            attention.block_tables.clear();
            from.attention.block_tables.iter().for_each(|table| attention.block_tables.push(table));
            (from.attention.num_seqs()..rows).for_each(|_| attention.block_tables.push(&[]));
        }
        self.adapters.clone_from(&from.adapters);
        self.adapters.resize(rows, ForwardBatch::NO_ADAPTER);
        // Only models without recurrent layers run drafts as a graph.
        self.drafts.clear();
        self.seconds.clear();
        self.needed = None;
    }

    /// The rows of each sequence.
    pub(super) fn sequences(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let starts = self.groups.first().map_or(&[][..], |group| &group.attention.query_starts);
        starts.windows(2).map(|row| row[0] as usize..row[1] as usize)
    }

    /// The type of each row's token.
    pub(super) fn types(&self) -> impl Iterator<Item = usize> + '_ {
        let seconds = self.seconds.iter().copied().chain(std::iter::repeat(u32::MAX));
        let rows = self.sequences().zip(seconds).flat_map(|(rows, second)| rows.map(move |row| (row, second)));
        rows.map(|(row, second)| usize::from(self.positions[row] >= second))
    }

    /// Checks that the rows of each sequence are all of its tokens, which layers without a cache need.
    pub(super) fn check_whole(&self) -> Result<(), KernelError> {
        for rows in self.sequences() {
            let first = self.positions.get(rows.start).copied().unwrap_or(0) as usize;
            let starts_late = !rows.is_empty() && first > 0;
            if starts_late {
                let what = "first position of a sequence of an encoder, which computes whole prompts";
                return Err(KernelError::Shape { what, found: first, expected: 0 });
            }
        }
        Ok(())
    }

    /// Checks that each sequence has a row before its drafts.
    pub(super) fn check_drafts(&self) -> Result<(), KernelError> {
        let starts = self.groups.first().map_or(&[][..], |group| &group.attention.query_starts);
        for (row, drafts) in starts.windows(2).zip(&self.drafts) {
            let most = (row[1] - row[0]).saturating_sub(1);
            if *drafts > most {
                let (what, found, expected) = ("drafts of a sequence", *drafts as usize, most as usize);
                return Err(KernelError::Shape { what, found, expected });
            }
        }
        Ok(())
    }

    /// Number of last rows of a sequence that are drafts.
    pub(super) fn num_drafts(&self, seq: usize) -> u32 {
        self.drafts.get(seq).copied().unwrap_or(0)
    }

    /// Number of sequences in the batch.
    pub fn num_seqs(&self) -> usize {
        self.groups.first().map_or(0, |group| group.attention.num_seqs())
    }
}
