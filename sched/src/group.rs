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
use std::cmp::Reverse;
use std::ops::Range;

use kvblock::{BlockTable, PromptHashes, Swapped};

use crate::{Policy, Request, SeqId, StepId};

/// Preemptions after which a request is no longer judged by its work. Least work lost is the cheaper rule, but
/// it prefers newcomers with long prompts, and under endless arrivals one request could lose every time.
const AGED_AFTER: u32 = 3;

/// Place in the waiting queue: priority (0 under FCFS), then order of arrival.
pub(crate) type QueueKey = (i32, u64);

/// How well a running request stands, best first: priority; arrival, if it is aged (the others come after all
/// that are); most work done; arrival. The best gets the first tokens for prefill; the worst is preempted.
pub(crate) type Standing = (i32, u64, Reverse<usize>, u64);

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

/// Where a request's keys and values are while it is swapped out.
pub(crate) enum Away {
    /// In its tables still, as steps in flight write to them; on their way when the last of these is committed.
    Leaving,
    /// In host memory: the tables of the sequences of these indices.
    Host { indices: Vec<usize>, swapped: Swapped },
}

pub(crate) struct Group {
    pub request: Request,
    pub arrival: u64,
    /// Its place among the running requests, while it runs.
    pub place: Option<u64>,
    /// The names of its prompt's prefixes, from the first time that it could not be admitted until it is.
    pub hashes: Option<PromptHashes>,
    pub seqs: Vec<Sequence>,
    /// The prompt is complete and every live sequence has its own table.
    pub forked: bool,
    /// Tokens that came from the prefix cache at the last admission.
    pub cached: usize,
    /// It has run before, so that what it finds in the prefix cache now is not counted with first lookups.
    pub has_run: bool,
    /// How often it had to give its blocks back.
    pub preemptions: u32,
    /// Set while the request is swapped out.
    pub away: Option<Away>,
}

impl Group {
    pub fn new(request: Request, arrival: u64) -> Group {
        let seqs = (0..request.n).map(|_| Sequence::new()).collect();
        Group {
            request,
            arrival,
            place: None,
            hashes: None,
            seqs,
            forked: false,
            cached: 0,
            has_run: false,
            preemptions: 0,
            away: None,
        }
    }

    pub fn seq_id(&self, index: usize) -> SeqId {
        SeqId { request: self.request.id, index: index as u32 }
    }

    pub fn num_live(&self) -> usize {
        self.seqs.iter().filter(|s| s.live).count()
    }

    /// Sequences that run at once, or will: in a beam search one that has ended may come back.
    pub fn seats(&self) -> usize {
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

    pub fn queue_key(&self, policy: Policy) -> QueueKey {
        (self.priority(policy), self.arrival)
    }

    pub fn standing(&self, policy: Policy) -> Standing {
        let aged = if self.preemptions >= AGED_AFTER { self.arrival } else { u64::MAX };
        (self.priority(policy), aged, Reverse(self.work()), self.arrival)
    }

    pub fn priority(&self, policy: Policy) -> i32 {
        match policy {
            Policy::Fcfs => 0,
            Policy::Priority => self.request.priority,
        }
    }

    /// Tokens that a preemption would throw away: each computed one once, those from the cache not at all.
    pub fn work(&self) -> usize {
        let prompt = self.request.prompt.len();
        let all = if self.forked {
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
        let outputs = if self.forked || self.sole_live_is_first() { output.len() + promised } else { 0 };
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
        let held_back = usize::from(self.request.beam_search && self.forked && all().any(|(_, pending)| pending > 1));
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
        !self.forked && self.seqs[0].planned < self.request.prompt.len()
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
        } else if self.forked || self.sole_live_is_first() {
            index as u32..index as u32 + 1
        } else {
            0..0
        }
    }

    fn sole_live_is_first(&self) -> bool {
        self.seqs[0].live && self.seqs[1..].iter().all(|s| !s.live)
    }
}
