//! A request and the sequences it makes: what is known, what is computed, what is still to compute.
//!
//! ```text
//!            prompt phase                     decode phase (forked)
//! seq 0      [ prompt.......|  ]    fork      [ prompt | out out out | next ]
//! seq 1      (no table)             ---->     [ prompt | out         | next ]
//! seq 2      (no table)                       [ prompt | out out     | next ]
//! ```
//!
//! The prompt is computed once, as sequence 0, also when sequence 0 itself has finished already and the
//! request comes back from a preemption for others' sake. At its end the live sequences fork from it. Outputs
//! survive a preemption; tables do not.
//!
//! While steps are in flight a sequence has tokens planned but not computed, and tokens promised but not known:
//!
//! ```text
//! tokens     [ prompt | out out | ?? ]      ??  promised: drawn by a step in flight, a placeholder if planned
//! computed   ^--- committed --^    ^
//! planned    ^----------------- ---^        computed once the steps in flight are
//! ```

use std::borrow::Cow;
use std::ops::Range;

use kvblock::{BlockTable, PromptHashes, Swapped};

use crate::{Request, SeqId, StepId};

/// Place in the waiting queue: priority (0 under FCFS), then order of arrival.
pub(crate) type QueueKey = (i32, u64);

pub(crate) struct Sequence {
    /// Tokens drawn so far.
    pub output: Vec<u32>,
    /// Tokens that steps in flight will draw.
    pub promised: usize,
    /// Set while the sequence owns blocks.
    pub table: Option<BlockTable>,
    /// Leading tokens of the table that are computed once the steps in flight are.
    pub planned: usize,
    /// Leading blocks of the table that the executor knows.
    pub sent: usize,
    /// Tokens proposed to follow the last known one, to be verified with the next span.
    pub drafts: Vec<u32>,
    /// The last step that computes some of it.
    pub last_step: StepId,
    /// Not finished.
    pub live: bool,
}

impl Sequence {
    fn new() -> Sequence {
        let last_step = StepId(0);
        let (output, drafts) = (Vec::new(), Vec::new());
        Sequence { output, promised: 0, table: None, planned: 0, sent: 0, drafts, last_step, live: true }
    }

    /// Whether a step in flight, the oldest of which is given, computes some of it.
    pub fn is_in_flight(&self, oldest: Option<StepId>) -> bool {
        oldest.is_some_and(|oldest| self.last_step >= oldest)
    }
}

/// Where a request stands.
///
/// ```text
///  Waiting ──admit──▶ Running ──preempt──▶ Waiting
///                        │  ▲
///                 preempt│  └──────────────admit─────┐
///                        ▼                           │
///                     Leaving ──last commit──▶ Swapped
/// ```
pub(crate) enum Phase {
    /// It owns no blocks.
    Waiting,
    /// It owns blocks, and may compute. Its place is the order of admission.
    Running { place: u64, stage: Stage },
    /// It is to be swapped out. Its keys and values are in its tables still, as steps in flight write to them.
    Leaving { stage: Stage },
    /// In host memory: the tables of the sequences of these indices.
    Swapped { stage: Stage, indices: Vec<usize>, swapped: Swapped },
}

/// Which sequences of a request have tables.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The first alone: the prompt is computed.
    Prompt,
    /// Every one that is live.
    Sequences,
}

pub(crate) struct Group {
    pub request: Request,
    pub arrival: u64,
    pub phase: Phase,
    /// The names of its prompt's prefixes, from the first time that it could not be admitted until it is.
    pub hashes: Option<PromptHashes>,
    pub seqs: Vec<Sequence>,
    /// Tokens that came from the prefix cache at the last admission.
    pub cached: usize,
    /// It has run before, so that what it finds in the prefix cache now is not counted with first lookups.
    pub has_run: bool,
    /// How often it had to give its blocks back.
    pub preemptions: u32,
}

impl Group {
    pub fn new(request: Request, arrival: u64) -> Group {
        let seqs = (0..request.n).map(|_| Sequence::new()).collect();
        let (phase, hashes) = (Phase::Waiting, None);
        Group { request, arrival, phase, hashes, seqs, cached: 0, has_run: false, preemptions: 0 }
    }

    pub fn seq_id(&self, index: usize) -> SeqId {
        SeqId { request: self.request.id, index: index as u32 }
    }

    pub fn stage(&self) -> Stage {
        match self.phase {
            Phase::Waiting => Stage::Prompt,
            Phase::Running { stage, .. } | Phase::Leaving { stage } | Phase::Swapped { stage, .. } => stage,
        }
    }

    pub fn set_stage(&mut self, to: Stage) {
        match &mut self.phase {
            Phase::Waiting => {}
            Phase::Running { stage, .. } | Phase::Leaving { stage } | Phase::Swapped { stage, .. } => *stage = to,
        }
    }

    /// Whether every live sequence has a table of its own.
    pub fn is_forked(&self) -> bool {
        self.stage() == Stage::Sequences
    }

    pub fn num_live(&self) -> usize {
        self.seqs.iter().filter(|s| s.live).count()
    }

    /// Sequences that run at once, or will: in a beam search one that has ended may come back.
    pub fn num_running_seqs(&self) -> usize {
        if self.request.beam_search { self.seqs.len() } else { self.num_live() }
    }

    /// The tables of its sequences.
    pub fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        self.seqs.iter().filter_map(|s| s.table.as_ref())
    }

    /// Whether a step in flight, the oldest of which is given, computes some of it.
    pub fn is_in_flight(&self, oldest: Option<StepId>) -> bool {
        self.seqs.iter().any(|s| s.is_in_flight(oldest))
    }

    /// Tokens that a preemption would throw away: each computed one once, those from the cache not at all.
    pub fn work(&self) -> usize {
        let prompt = self.request.prompt.len();
        let all = if self.is_forked() {
            prompt + self.seqs.iter().map(|s| s.planned.saturating_sub(prompt)).sum::<usize>()
        } else {
            self.seqs[0].planned
        };
        all.saturating_sub(self.cached)
    }

    /// Tokens of sequence `index` that are to be computed in the present phase: those known and those
    /// promised, but for the last one that it may have, which nothing follows. What follows a promised token of
    /// a beam is not known: the next may continue another.
    pub fn target(&self, index: usize) -> usize {
        let Sequence { output, promised, .. } = &self.seqs[index];
        let promised = if self.request.beam_search { 0 } else { *promised };
        let outputs = if self.is_forked() || self.sole_live_is_first() { output.len() + promised } else { 0 };
        self.request.prompt.len() + outputs.min(self.request.max_tokens - 1)
    }

    /// Sequences with something to compute that is in no step yet, and how many tokens. Beams draw in one step,
    /// as the best of all their candidates live on: while one has more to compute than its last token, none gets
    /// that.
    pub fn pending(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let pending = |(index, s): (usize, &Sequence)| {
            let all = s.table.is_some().then(|| self.target(index).saturating_sub(s.planned));
            (index, all.unwrap_or(0))
        };
        let all = move || self.seqs.iter().enumerate().map(pending);
        let held_back =
            usize::from(self.request.beam_search && self.is_forked() && all().any(|(_, pending)| pending > 1));
        all()
            .map(move |(index, pending)| (index, pending.saturating_sub(held_back)))
            .filter(|(_, pending)| *pending > 0)
    }

    /// Drafts that sequence `index` can have verified together with its last known token.
    pub fn num_drafts(&self, index: usize) -> usize {
        let Sequence { output, planned, drafts, .. } = &self.seqs[index];
        let computes_last_known = planned + 1 == self.request.prompt.len() + output.len();
        // One more token than there are drafts may be drawn.
        let room = self.request.max_tokens.saturating_sub(output.len() + 1);
        if computes_last_known && !output.is_empty() { drafts.len().min(room) } else { 0 }
    }

    /// Whether the prompt of a running request is computed in part.
    pub fn is_partial(&self) -> bool {
        !self.is_forked() && self.seqs[0].planned < self.request.prompt.len()
    }

    /// All that sequence 0 has to compute in the prompt phase.
    pub fn prefill_tokens(&self) -> Cow<'_, [u32]> {
        let (prompt, target) = (&self.request.prompt, self.target(0));
        if target == prompt.len() {
            return Cow::Borrowed(prompt);
        }
        let mut tokens = Vec::with_capacity(target);
        self.copy_tokens(0, 0..target, &mut tokens);
        Cow::Owned(tokens)
    }

    /// Appends the tokens of sequence `index` at these positions to `tokens`; 0 where they are not known yet.
    pub fn copy_tokens(&self, index: usize, positions: Range<usize>, tokens: &mut Vec<u32>) {
        let (prompt, output) = (&self.request.prompt, &self.seqs[index].output);
        let known = prompt.len() + output.len();
        tokens.extend_from_slice(&prompt[positions.start.min(prompt.len())..positions.end.min(prompt.len())]);
        let outputs = positions.start.clamp(prompt.len(), known)..positions.end.clamp(prompt.len(), known);
        tokens.extend_from_slice(&output[outputs.start - prompt.len()..outputs.end - prompt.len()]);
        tokens.extend(std::iter::repeat_n(0, positions.end.saturating_sub(positions.start.max(known))));
    }

    /// Which sequences want a token from the row of sequence `index` that ends at `end`.
    pub fn sample(&self, index: usize, end: usize) -> Range<u32> {
        let sampled_before = self.seqs.iter().any(|s| !s.output.is_empty() || s.promised > 0);
        if end < self.target(index) {
            0..0
        } else if !sampled_before {
            0..self.request.n as u32
        } else if self.is_forked() || self.sole_live_is_first() {
            index as u32..index as u32 + 1
        } else {
            0..0
        }
    }

    fn sole_live_is_first(&self) -> bool {
        self.seqs[0].live && self.seqs[1..].iter().all(|s| !s.live)
    }
}
