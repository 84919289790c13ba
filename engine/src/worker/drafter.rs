//! Drafts from a second model, with its keys and values in the pages of the worker's pool: a smaller model, or a predictor, which reads
//! hidden states of the worker's model, its *target*.
//!
//! A page of the pool has a part for each place of the target and for each place of the draft model, and both use the block table of
//! the same group. So the draft model needs no tables of its own: shared prefixes, copies, swaps and preemption of a sequence
//! apply to its keys and values too.
//!
//! ```text
//! known text      t0 t1 … t(m-1)      the last token is not computed yet
//! pass 1          what the draft model lacks of t0 … t(m-1), or t(m-1) with the last hidden state   ─▶ d1
//! pass 2          d1, or d1 with the predictor's own output                                         ─▶ d2
//! pass k          d(k-1)                                                                            ─▶ dk
//! ```
//!
//! A draft is drawn as the token would be: with the sampling parameters of the request, and with the noise of its position. So also at a
//! temperature the draft is right as often as the two models agree.
//!
//! **What a draft model lacks.** It computes prompts in the steps that compute them for the target, and other tokens when drafts
//! are next wanted. `filled` says which blocks have its keys and values for all their tokens, so that a sequence that finds blocks
//! in the prefix cache computes the others again. Such a block may have several owners. They have the same tokens, so it does not matter
//! which one writes.
//!
//! **Predictors** compute every step after its draws, because only then the target's hidden states are at hand. The state of a sequence's
//! last token is kept for the next drafts. A sequence that was not in the last step gets none.
//!
//! Nothing here can change a token or end a request: an error or a panic is reported, and no more drafts are asked for.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use attention_kernels::KernelError;
use device::Device;
use kvblock::MemOp;
use models::Model;
use sched::{SeqId, Span, StepPlan};

use super::draft_pass::{InputStates, KnownTokens, Passes, SequenceRows, Sizes, table_of};
use super::executor::{ForDrafts, Tables};
use super::phase;
use super::request::{RequestState, Requests};
use crate::speculate::ProposeError;

/// See the [module](self).
pub(crate) struct Drafter {
    passes: Passes,
    sequences: HashMap<SeqId, Progress>,
    /// For each block whether it has keys and values of this model for all its tokens.
    filled: Vec<bool>,
    /// The place of the state of each sequence of the last step.
    places: HashMap<SeqId, u32>,
    failed: Option<ProposeError>,
}

/// How much of a sequence has keys and values of the draft model.
#[derive(Default)]
struct Progress {
    /// Number of known tokens.
    len: usize,
    /// Drafts behind them.
    ahead: Vec<u32>,
}

impl Drafter {
    /// Creates a drafter for a model. `head_tokens` are the tokens of its head's rows; `None`: a row for every token.
    ///
    /// # Errors
    /// The device is out of memory.
    pub fn new(
        device: Arc<dyn Device>,
        model: Model,
        sizes: Sizes,
        head_tokens: Option<Vec<u32>>,
    ) -> Result<Drafter, KernelError> {
        let num_blocks = sizes.num_blocks;
        Ok(Drafter {
            passes: Passes::new(device, model, sizes, head_tokens)?,
            sequences: HashMap::new(),
            filled: vec![false; num_blocks],
            places: HashMap::new(),
            failed: None,
        })
    }

    /// Whether it reads hidden states of the target: the next step must not be submitted before this one is collected, and all of its
    /// rows are needed.
    pub fn reads_states(&self) -> bool {
        self.passes.kept.is_some()
    }

    /// Number of sequences that it keeps state of.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len().max(self.places.len())
    }

    /// Sequences have ended, or have lost their blocks.
    pub fn forget(&mut self, sequences: &[SeqId]) {
        for seq in sequences {
            self.sequences.remove(seq);
            self.places.remove(seq);
        }
    }

    /// Records which blocks get other contents in a step that begins.
    pub fn begin(&mut self, plan: &StepPlan) {
        let (slots, size) = (plan.spans.iter().flat_map(|span| &span.groups), self.passes.sizes.block_size);
        let slots = slots.flat_map(|group| &group.slots).filter_map(|slot| usize::try_from(*slot).ok());
        let moved = plan.memory.iter().filter_map(|op| match op {
            MemOp::Copy { dst, .. } | MemOp::SwapIn { dst, .. } => Some(dst.index()),
            _ => None,
        });
        for block in slots.filter(|slot| slot % size == 0).map(|slot| slot / size).chain(moved) {
            if let Some(filled) = self.filled.get_mut(block) {
                *filled = false;
            }
        }
    }

    /// Computes the prompts of a step for the draft model too.
    pub(super) fn follow(&mut self, plan: &StepPlan, requests: &Requests, mut on: ForDrafts<'_>) {
        let max_len = self.passes.sizes.max_len;
        let is_followed = |span: &&Span| {
            let state = requests.get(&span.seq.request).filter(|state| state.request.speculative);
            let is_text = |state: &RequestState| span.start < state.request.prompt.len() || span.tokens.len() > 1;
            let is_known = span.drafts == 0 && span.awaits.is_none() && span.start < max_len;
            is_known && state.is_some_and(is_text)
        };
        if self.failed.is_some() || self.reads_states() || !plan.spans.iter().any(|span| is_followed(&span)) {
            return;
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let spans = plan.spans.iter().filter(is_followed);
            let end = |span: &Span| (span.start + span.tokens.len()).min(max_len);
            let mut work = self.lacking(spans, requests, on.tables, |span| (end(span), 0));
            while self.passes.pass(&mut work, requests, &mut on, InputStates::Nothing)?.is_some() {}
            self.finish(work, on.tables);
            Ok(())
        }));
        self.check(outcome);
    }

    /// Computes a collected step for the predictor too: every row whose next token is known. Keeps the states at the last of them.
    pub(super) fn follow_states(&mut self, plan: &StepPlan, requests: &Requests, mut on: ForDrafts<'_>) {
        self.places.clear();
        if self.failed.is_some() || !self.reads_states() {
            return;
        }
        let (mut work, mut last) = (Vec::new(), Vec::new());
        for (span, last_row) in plan.spans.iter().zip(on.last_rows) {
            let speculative = requests.get(&span.seq.request).is_some_and(|state| state.request.speculative);
            let Some(text) = KnownTokens::of(requests, span.seq).filter(|_| speculative) else { continue };
            let (seq, at, computed) = (span.seq, span.start, span.start + span.tokens.len());
            // The row at position p reads the token p + 1.
            let end = computed.min(text.len().saturating_sub(1)).min(self.passes.sizes.max_len);
            let state = last_row + 1 - span.tokens.len() as u32;
            if end <= at {
                continue;
            }
            if end + 1 == text.len() {
                self.places.insert(seq, last.len() as u32);
                last.push(state + (end - 1 - at) as u32);
            }
            work.push(SequenceRows { seq, at, end, wanted: 0, drafts: Vec::new(), state });
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            if let Some(kept) = &mut self.passes.kept {
                on.target.copy_states(&last, &mut kept.of_target)?;
            }
            while self.passes.pass(&mut work, requests, &mut on, InputStates::Step)?.is_some() {}
            Ok(())
        }));
        self.check(outcome);
    }

    /// Computes the drafts of a step that has begun.
    pub(super) fn propose(
        &mut self,
        plan: &StepPlan,
        requests: &mut Requests,
        on: ForDrafts<'_>,
    ) -> Result<Vec<u32>, ProposeError> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        let _phase = phase(&*self.passes.device.clone(), "draft");
        let spans = || plan.spans.iter().filter(|span| span.drafts > 0);
        let outcome = catch_unwind(AssertUnwindSafe(|| self.drafts(spans(), requests, on)));
        // The drafts are no output yet.
        for span in spans() {
            if let Some(state) = requests.get_mut(&span.seq.request)
                && let Some(Some(output)) = state.outputs.get_mut(span.seq.index as usize)
            {
                output.truncate(known(span) - state.request.prompt.len());
            }
        }
        match self.check(outcome) {
            Some(drafts) => Ok(drafts),
            None => Err(self.failed.clone().unwrap_or_else(|| ProposeError("it failed".to_string()))),
        }
    }

    /// Records why a pass failed, if it did.
    fn check<T>(&mut self, outcome: std::thread::Result<Result<T, KernelError>>) -> Option<T> {
        let problem = match outcome {
            Ok(Ok(done)) => return Some(done),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the model for drafts panicked".to_string(),
        };
        self.failed = Some(ProposeError(problem));
        None
    }

    fn drafts<'a>(
        &mut self,
        spans: impl Iterator<Item = &'a Span> + Clone,
        requests: &mut Requests,
        mut on: ForDrafts<'_>,
    ) -> Result<Vec<u32>, KernelError> {
        let (mut work, first, next) = match self.reads_states() {
            false => {
                let wants = |span: &Span| (known(span), span.drafts);
                (self.lacking(spans.clone(), requests, on.tables, wants), InputStates::Nothing, InputStates::Nothing)
            }
            true => {
                let work = |span: &Span| {
                    let (state, end) = (*self.places.get(&span.seq)?, known(span) - 1);
                    let drafts = Vec::with_capacity(span.drafts);
                    Some(SequenceRows { seq: span.seq, at: end - 1, end, wanted: span.drafts, drafts, state })
                };
                (spans.clone().filter_map(work).collect(), InputStates::Kept, InputStates::Own)
            }
        };
        let mut states = first;
        while let Some(drawn) = self.passes.pass(&mut work, requests, &mut on, states)? {
            states = next;
            for (at, token) in drawn {
                let SequenceRows { seq, drafts, .. } = &mut work[at];
                drafts.push(token);
                if let Some(state) = requests.get_mut(&seq.request)
                    && let Some(Some(output)) = state.outputs.get_mut(seq.index as usize)
                {
                    output.push(token);
                }
            }
        }
        let mut all = Vec::new();
        let mut done = work.iter().peekable();
        for span in spans {
            let own = done.next_if(|work| work.seq == span.seq).map_or(&[][..], |work| &work.drafts);
            // A sequence that lacks too much gets no drafts this time.
            all.extend(own.iter().copied().chain(std::iter::repeat(0)).take(span.drafts));
        }
        if !self.reads_states() {
            self.finish(work, on.tables);
        }
        Ok(all)
    }

    /// Returns the rows that a draft model lacks. `wants` returns how many tokens of a span it needs, and how many drafts follow.
    fn lacking<'a>(
        &mut self,
        spans: impl Iterator<Item = &'a Span>,
        requests: &Requests,
        tables: &Tables,
        wants: impl Fn(&Span) -> (usize, usize),
    ) -> Vec<SequenceRows> {
        let Drafter { sequences, filled, passes: Passes { sizes, .. }, .. } = self;
        let mut left = sizes.max_rows;
        let mut all = Vec::new();
        for span in spans {
            let (seq, (end, wanted)) = (span.seq, wants(span));
            let (Some(text), Some(table)) = (KnownTokens::of(requests, seq), table_of(tables, seq, sizes.group)) else {
                continue;
            };
            let progress = sequences.entry(seq).or_insert_with(|| {
                let is_filled = |block: &&i32| usize::try_from(**block).is_ok_and(|block| filled[block]);
                Progress { len: table.iter().take_while(is_filled).count() * sizes.block_size, ahead: Vec::new() }
            });
            let right = progress.ahead.iter().zip(progress.len..).take_while(|(d, at)| text.token(*at) == Some(**d));
            // The last token is computed in any case: a draft follows from its row.
            let at = (progress.len + right.count()).min(end.saturating_sub(1));
            let (rows, is_all) = ((end - at).min(left), end - at <= left && text.len() >= end);
            left -= rows;
            if rows > 0 {
                let wanted = if is_all { wanted } else { 0 };
                all.push(SequenceRows {
                    seq,
                    at,
                    end: at + rows,
                    wanted,
                    drafts: Vec::with_capacity(wanted),
                    state: 0,
                });
            }
        }
        all
    }

    /// Records what the draft model has computed.
    fn finish(&mut self, work: Vec<SequenceRows>, tables: &Tables) {
        for SequenceRows { seq, end, mut drafts, .. } in work {
            // The last draft has not been computed.
            drafts.pop();
            let table = table_of(tables, seq, self.passes.sizes.group).unwrap_or_default();
            let whole = table.iter().take(end / self.passes.sizes.block_size);
            for block in whole.filter_map(|block| usize::try_from(*block).ok()) {
                if let Some(filled) = self.filled.get_mut(block) {
                    *filled = true;
                }
            }
            self.sequences.insert(seq, Progress { len: end, ahead: drafts });
        }
    }
}

/// Number of tokens before the drafts of a span.
fn known(span: &Span) -> usize {
    span.start + span.tokens.len() - span.drafts
}
