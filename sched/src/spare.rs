//! Lists of completed steps, kept for later ones: a decode step as large as the one before it allocates almost nothing.

use kvblock::BlockId;

use crate::SeqId;
use crate::draft::Choice;
use crate::flight::InFlight;
use crate::plan::{GroupSpan, Span};

/// The lists. All are empty except `spans`, whose contents are stale.
#[derive(Default)]
pub(crate) struct Spare {
    pub choices: Vec<Choice>,
    pub in_flight: Vec<InFlight>,
    pub list: Vec<Span>,
    pub spans: Vec<Span>,
}

impl Spare {
    /// An empty list of spans.
    pub fn list(&mut self) -> Vec<Span> {
        std::mem::take(&mut self.list)
    }

    /// A span of these tokens with `groups` cache groups; the caller fills in the rest.
    pub fn span(&mut self, seq: SeqId, tokens: &[u32], groups: usize) -> Span {
        let fresh = || Span {
            seq,
            start: 0,
            tokens: Vec::new(),
            drafts: 0,
            awaits: None,
            groups: Vec::new(),
            cached: 0,
            sample: 0..0,
        };
        let mut span = self.spans.pop().unwrap_or_else(fresh);
        span.seq = seq;
        span.tokens.clear();
        span.tokens.extend_from_slice(tokens);
        span.groups.resize_with(groups, GroupSpan::default);
        span
    }
}

impl GroupSpan {
    /// Becomes one of these blocks and slots.
    pub(crate) fn refill(
        &mut self,
        holes: usize,
        keep: usize,
        append: impl Iterator<Item = BlockId>,
        slots: impl Iterator<Item = i64>,
    ) {
        (self.table.holes, self.table.keep) = (holes, keep);
        self.table.append.clear();
        self.table.append.extend(append);
        self.slots.clear();
        self.slots.extend(slots);
    }
}
