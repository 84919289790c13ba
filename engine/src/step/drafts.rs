//! The drafts of a step: before it is planned, while it is, and while its tokens are published.

use std::collections::HashMap;
use std::time::Instant;

use sampling::Sampled;
use sched::{SeqId, Span};

use super::Engine;
use super::guide::MASK_WAIT;
use super::request::EngineRequest;
use crate::speculate::{Proposal, Speculator};
use crate::worker::StepInput;

impl Engine {
    /// Gives the scheduler drafts for the next step, if every token of the steps before it is known.
    pub(super) fn propose_drafts(&mut self) {
        let Engine { speculator: Some(speculator), requests, scheduler, in_flight, .. } = self else { return };
        if !in_flight.is_empty() {
            return;
        }
        let (are_known, deadline) = (!speculator.is_by_worker(), Instant::now() + MASK_WAIT);
        let limits = |seq: SeqId| requests.get(&seq.request).map_or(0, |request| request.num_usable_drafts(seq.index));
        for Proposal { seq, mut drafts, .. } in speculator.propose(limits) {
            if let Some(EngineRequest { guides: Some(guides), .. }) = requests.get_mut(&seq.request)
                && are_known
            {
                guides.look_ahead(seq.index, &mut drafts, deadline);
            }
            scheduler.propose(seq, drafts);
        }
    }

    /// Replaces the placeholders in a plan with the drafts that the worker computes. Where a grammar forbids a draft, nothing is drawn
    /// from the rows behind it.
    pub(super) fn compute_drafts(&mut self, input: &mut StepInput) {
        let Engine { speculator: Some(speculator), worker, scheduler, requests, .. } = self else { return };
        let most = input.plan.spans.iter().map(|span| span.drafts).max().unwrap_or(0);
        if most == 0 || !speculator.is_by_worker() {
            return;
        }
        let start = Instant::now();
        match worker.draft(input) {
            Ok(drafts) => {
                scheduler.replace_drafts(&mut input.plan, &drafts);
                speculator.computed(most, start.elapsed());
            }
            // The placeholders are verified, and found wrong.
            Err(problem) => speculator.fail(&problem),
        }
        let deadline = Instant::now() + MASK_WAIT;
        for span in input.plan.spans.iter().filter(|span| span.drafts > 0) {
            if let Some(EngineRequest { guides: Some(guides), .. }) = requests.get_mut(&span.seq.request) {
                let mut drafts = span.tokens[span.tokens.len() - span.drafts..].to_vec();
                guides.look_ahead(span.seq.index, &mut drafts, deadline);
            }
        }
    }
}

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
