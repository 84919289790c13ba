//! The drafts of a step while its tokens are published.

use std::collections::HashMap;

use sampling::Sampled;
use sched::{SeqId, Span};

use crate::speculate::Speculator;

/// For each sequence with drafts those that its next tokens are compared with.
pub(super) struct Drafts<'a>(HashMap<SeqId, &'a [u32]>);

impl<'a> Drafts<'a> {
    /// The drafts of a plan's spans. Reports to the speculator how many of them were right.
    pub fn new(spans: &'a [Span], drawn: &[(SeqId, Sampled)], speculator: Option<&mut Speculator>) -> Drafts<'a> {
        let Some(speculator) = speculator else { return Drafts(HashMap::new()) };
        let drafts = |span: &'a Span| (span.seq, &span.tokens[span.tokens.len() - span.drafts..]);
        let of_spans: HashMap<SeqId, &[u32]> = spans.iter().filter(|span| span.drafts > 0).map(drafts).collect();
        for tokens in drawn.chunk_by(|(a, _), (b, _)| a == b) {
            let seq = tokens[0].0;
            if let Some(drafts) = of_spans.get(&seq) {
                // The last token follows the drafts that were right.
                speculator.verified(seq, drafts.len(), tokens.len() - 1);
            }
        }
        Drafts(of_spans)
    }

    /// The drafts that the next token of a sequence and those after it are compared with.
    pub fn next(&mut self, seq: SeqId) -> &'a [u32] {
        let Some(drafts) = self.0.get_mut(&seq) else { return &[] };
        let next = *drafts;
        *drafts = next.get(1..).unwrap_or_default();
        next
    }
}
