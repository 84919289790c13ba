//! Drafts that the worker computes with a model: here only their number is decided.

use std::collections::HashMap;

use sched::SeqId;

use super::proposer::{DraftScope, Proposal, ProposeError, Proposer};

/// See the [module](self).
pub(super) struct ByWorker {
    /// Greatest number of tokens of a text with drafts.
    max_len: usize,
    /// Number of tokens of each sequence.
    lens: HashMap<SeqId, usize>,
}

impl ByWorker {
    pub fn new(max_len: usize) -> ByWorker {
        ByWorker { max_len, lens: HashMap::new() }
    }
}

impl Proposer for ByWorker {
    fn by_worker(&self) -> bool {
        true
    }

    fn begin(&mut self, seq: SeqId, _: &DraftScope, prompt: &[u32]) {
        self.lens.insert(seq, prompt.len());
    }

    fn extend(&mut self, seq: SeqId, _: u32) {
        self.lens.entry(seq).and_modify(|len| *len += 1);
    }

    fn end(&mut self, seq: SeqId) {
        self.lens.remove(&seq);
    }

    fn propose(&mut self, wanted: &mut [Proposal]) -> Result<(), ProposeError> {
        for Proposal { seq, most, drafts } in wanted {
            let len = self.lens.get(seq).copied().unwrap_or(self.max_len);
            drafts.resize((*most).min(self.max_len.saturating_sub(len)), 0);
        }
        Ok(())
    }
}
