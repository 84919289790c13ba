//! A live request and its sequences: which tokens are known, computed, and still to compute.
//!
//! ```text
//!            prompt stage                     forked stage
//! seq 0      [ prompt.......|  ]    fork      [ prompt | out out out | next ]
//! seq 1      (no table)             ---->     [ prompt | out         | next ]
//! seq 2      (no table)                       [ prompt | out out     | next ]
//! ```
//!
//! The prompt is computed once, as sequence 0, even if sequence 0 has finished and the request is computed again after
//! a preemption because of other sequences. At its end the live sequences fork from it. A preemption keeps the outputs,
//! but not the tables.
//!
//! While steps are in flight, a sequence can have tokens that are scheduled but not committed, and output tokens that
//! are not known yet:
//!
//! ```text
//! tokens     [ prompt | out out | ?? ]      ??  output placeholder: drawn by a step in flight
//! computed   ^--- committed --^    ^
//!            ^- num_computed_tokens^        committed once the steps in flight are
//! ```

use std::borrow::Cow;
use std::ops::Range;

use kvblock::{BlockTable, PromptHashes, Swapped};

use crate::{Request, SeqId, StepId};

/// Position in the queue: priority (0 under FCFS), then order of arrival.
pub(crate) type QueueKey = (i32, u64);

pub(crate) struct Sequence {
    /// The tokens drawn so far.
    pub output: Vec<u32>,
    /// Number of output tokens that steps in flight will draw.
    pub num_output_placeholders: usize,
    /// `Some` while the sequence owns blocks.
    pub table: Option<BlockTable>,
    /// Number of leading tokens that are computed, by steps in flight included.
    pub num_computed_tokens: usize,
    /// Number of leading table entries that the executor has.
    pub num_sent_entries: usize,
    /// Draft tokens proposed to follow the last known token.
    pub drafts: Vec<u32>,
    /// Number of drafts accepted by the last verification that have to be computed again
    /// ([`SchedConfig::recompute_drafts`](crate::SchedConfig::recompute_drafts)).
    pub num_accepted: usize,
    /// The last step with a span of this sequence.
    pub last_step: StepId,
    /// Number of drafts in that span.
    pub num_last_drafts: usize,
    /// Whether the sequence has not finished.
    pub live: bool,
    /// Whether its last known token is left out of plans ([`Scheduler::hold`](crate::Scheduler::hold)).
    pub is_held: bool,
}

impl Sequence {
    fn new() -> Sequence {
        Sequence {
            output: Vec::new(),
            num_output_placeholders: 0,
            table: None,
            num_computed_tokens: 0,
            num_sent_entries: 0,
            drafts: Vec::new(),
            num_accepted: 0,
            last_step: StepId(0),
            num_last_drafts: 0,
            live: true,
            is_held: false,
        }
    }

    /// Returns whether a step in flight has a span of this sequence. `oldest` is the oldest step in flight.
    pub fn is_in_flight(&self, oldest: Option<StepId>) -> bool {
        oldest.is_some_and(|oldest| self.last_step >= oldest)
    }
}

/// The phase of a request.
///
/// ```text
///  Waiting ──admit──▶ Running ──preempt──▶ Waiting
///                        │  ▲
///                 preempt│  └──────────────admit─────┐
///                        ▼                           │
///                    SwappingOut ──last commit──▶ Swapped
/// ```
pub(crate) enum Phase {
    /// It owns no blocks.
    Waiting,
    /// It owns blocks and can compute. `position` is its position in the order of admission.
    Running { position: u64, stage: Stage },
    /// It will be swapped out. Its tables still own blocks, because steps in flight write to them.
    SwappingOut { stage: Stage },
    /// Its contents are in host memory: the tables of the sequences with these indices.
    Swapped { stage: Stage, indices: Vec<usize>, swapped: Swapped },
}

/// Which sequences of a request have tables.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Only the first: the prompt is being computed.
    Prompt,
    /// All live ones.
    Forked,
}

pub(crate) struct LiveRequest {
    pub request: Request,
    pub arrival: u64,
    pub phase: Phase,
    /// Hashes of its prompt, kept from the first failed admission until it is admitted.
    pub hashes: Option<PromptHashes>,
    pub seqs: Vec<Sequence>,
    /// Number of tokens that the last admission took from the prefix cache.
    pub num_cached_tokens: usize,
    /// Whether it was admitted before. Its later prefix lookups are counted separately.
    pub has_run: bool,
    pub num_preemptions: u32,
    /// Number of requests with adapters that were admitted before it while it waited for its adapter.
    pub num_passed: u32,
    /// Whether a span can compute a token that a step in flight draws, with a placeholder for it.
    pub can_await: bool,
}

impl LiveRequest {
    /// Creates a waiting request. In a pipeline the tokens of steps in flight are not awaited. Nor are those of a beam,
    /// because the next token may continue another beam.
    pub fn new(request: Request, arrival: u64, is_pipeline: bool) -> LiveRequest {
        LiveRequest {
            seqs: (0..request.n).map(|_| Sequence::new()).collect(),
            can_await: !is_pipeline && !request.beam_search,
            request,
            arrival,
            phase: Phase::Waiting,
            hashes: None,
            num_cached_tokens: 0,
            has_run: false,
            num_preemptions: 0,
            num_passed: 0,
        }
    }

    pub fn seq_id(&self, index: usize) -> SeqId {
        SeqId { request: self.request.id, index: index as u32 }
    }

    pub fn stage(&self) -> Stage {
        match self.phase {
            Phase::Waiting => Stage::Prompt,
            Phase::Running { stage, .. } | Phase::SwappingOut { stage } | Phase::Swapped { stage, .. } => stage,
        }
    }

    pub fn set_stage(&mut self, to: Stage) {
        match &mut self.phase {
            Phase::Waiting => {}
            Phase::Running { stage, .. } | Phase::SwappingOut { stage } | Phase::Swapped { stage, .. } => *stage = to,
        }
    }

    pub fn is_forked(&self) -> bool {
        self.stage() == Stage::Forked
    }

    pub fn num_live(&self) -> usize {
        self.seqs.iter().filter(|s| s.live).count()
    }

    /// Number of sequences that count against `max_num_seqs`. An ended beam counts, because it may be forked again.
    pub fn num_running_seqs(&self) -> usize {
        if self.request.beam_search { self.seqs.len() } else { self.num_live() }
    }

    pub fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        self.seqs.iter().filter_map(|s| s.table.as_ref())
    }

    /// Returns whether a step in flight has a span of this request. `oldest` is the oldest step in flight.
    pub fn is_in_flight(&self, oldest: Option<StepId>) -> bool {
        self.seqs.iter().any(|s| s.is_in_flight(oldest))
    }

    /// Number of computed tokens that a preemption would discard. Shared ones count once, cached ones not at all.
    pub fn work(&self) -> usize {
        let prompt = self.request.prompt.len();
        let all = if self.is_forked() {
            prompt + self.seqs.iter().map(|s| s.num_computed_tokens.saturating_sub(prompt)).sum::<usize>()
        } else {
            self.seqs[0].num_computed_tokens
        };
        all.saturating_sub(self.num_cached_tokens)
    }

    /// Number of tokens of sequence `index` to compute in the current stage: the known tokens and, if they can be awaited,
    /// the placeholders, except for the last possible token, which no token follows.
    pub fn target(&self, index: usize) -> usize {
        let Sequence { output, num_output_placeholders, .. } = &self.seqs[index];
        let placeholders = if self.can_await { *num_output_placeholders } else { 0 };
        let outputs = if self.is_forked() || self.only_first_is_live() { output.len() + placeholders } else { 0 };
        self.request.prompt.len() + outputs.min(self.request.max_tokens - 1)
    }

    /// Indices of the sequences with tokens to schedule, and how many. A held sequence does not get its last token. All beams of a
    /// search draw in one step, because the best of all their candidates survive. So while a beam has more to compute than its last
    /// token, no beam gets that one.
    pub fn pending(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let pending = |(index, s): (usize, &Sequence)| {
            let all = s.table.is_some().then(|| self.target(index).saturating_sub(s.num_computed_tokens));
            (index, all.unwrap_or(0).saturating_sub(usize::from(s.is_held && s.live)))
        };
        let all = move || self.seqs.iter().enumerate().map(pending);
        let held_back =
            usize::from(self.request.beam_search && self.is_forked() && all().any(|(_, pending)| pending > 1));
        all()
            .map(move |(index, pending)| (index, pending.saturating_sub(held_back)))
            .filter(|(_, pending)| *pending > 0)
    }

    /// Returns whether a span of `num_tokens` known tokens of sequence `index` is a decode: one token, or the accepted
    /// drafts that are computed again and the token after them.
    pub fn is_decode(&self, index: usize, num_tokens: usize) -> bool {
        let is_recomputed = num_tokens <= 1 + self.seqs[index].num_accepted;
        num_tokens == 1 || is_recomputed && self.computes_last_known(index, num_tokens)
    }

    /// Number of drafts of sequence `index` that can be verified in a span that begins with `num_tokens` known tokens.
    pub fn num_drafts(&self, index: usize, num_tokens: usize) -> usize {
        let Sequence { output, drafts, .. } = &self.seqs[index];
        let can_verify = self.is_decode(index, num_tokens) && self.computes_last_known(index, num_tokens);
        // A verification can draw one token more than there are drafts.
        let most = self.request.max_tokens.saturating_sub(output.len() + 1);
        if can_verify && !output.is_empty() { drafts.len().min(most) } else { 0 }
    }

    fn computes_last_known(&self, index: usize, num_tokens: usize) -> bool {
        let Sequence { output, num_computed_tokens, .. } = &self.seqs[index];
        num_computed_tokens + num_tokens == self.request.prompt.len() + output.len()
    }

    /// Returns whether the prompt of a running request is partly computed.
    pub fn is_partial(&self) -> bool {
        !self.is_forked() && self.seqs[0].num_computed_tokens < self.request.prompt.len()
    }

    /// The tokens of sequence 0 to compute in the prompt stage.
    pub fn prefill_tokens(&self) -> Cow<'_, [u32]> {
        let (prompt, target) = (&self.request.prompt, self.target(0));
        if target == prompt.len() {
            return Cow::Borrowed(prompt);
        }
        let mut tokens = Vec::with_capacity(target);
        self.copy_tokens(0, 0..target, &mut tokens);
        Cow::Owned(tokens)
    }

    /// Appends the tokens of sequence `index` at these positions to `tokens`; 0 for placeholders.
    pub fn copy_tokens(&self, index: usize, positions: Range<usize>, tokens: &mut Vec<u32>) {
        let (prompt, output) = (&self.request.prompt, &self.seqs[index].output);
        let known = prompt.len() + output.len();
        tokens.extend_from_slice(&prompt[positions.start.min(prompt.len())..positions.end.min(prompt.len())]);
        let outputs = positions.start.clamp(prompt.len(), known)..positions.end.clamp(prompt.len(), known);
        tokens.extend_from_slice(&output[outputs.start - prompt.len()..outputs.end - prompt.len()]);
        tokens.extend(std::iter::repeat_n(0, positions.end.saturating_sub(positions.start.max(known))));
    }

    /// Indices of the sequences that draw from the last row of a span of sequence `index` that ends at `end`.
    pub fn sample(&self, index: usize, end: usize) -> Range<u32> {
        let has_sampled = self.seqs.iter().any(|s| !s.output.is_empty() || s.num_output_placeholders > 0);
        if end < self.target(index) {
            0..0
        } else if !has_sampled {
            0..self.request.n as u32
        } else if self.is_forked() || self.only_first_is_live() {
            index as u32..index as u32 + 1
        } else {
            0..0
        }
    }

    fn only_first_is_live(&self) -> bool {
        self.seqs[0].live && self.seqs[1..].iter().all(|s| !s.live)
    }
}
