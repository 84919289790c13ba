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

use std::borrow::Cow;
use std::cmp::Reverse;
use std::ops::Range;

use kvblock::BlockTable;

use crate::{Policy, Request, SeqId};

/// Place in the waiting queue: priority (0 under FCFS), then order of arrival.
pub(crate) type QueueKey = (i32, u64);

/// How well a running request stands, best first: priority, most work done, earliest arrival. The best gets
/// the first tokens for prefill; the worst is preempted.
pub(crate) type Standing = (i32, Reverse<usize>, u64);

pub(crate) struct Sequence {
    /// Tokens drawn so far.
    pub output: Vec<u32>,
    /// Set while the sequence owns blocks.
    pub table: Option<BlockTable>,
    /// Leading blocks of the table that the executor knows.
    pub sent: usize,
    /// Not finished.
    pub live: bool,
}

pub(crate) struct Group {
    pub request: Request,
    pub arrival: u64,
    pub seqs: Vec<Sequence>,
    /// The prompt is complete and every live sequence has its own table.
    pub forked: bool,
    /// Tokens that came from the prefix cache at the last admission.
    pub cached: usize,
    /// Was running before.
    pub resumed: bool,
}

impl Group {
    pub fn new(request: Request, arrival: u64) -> Group {
        let seqs = (0..request.n).map(|_| Sequence { output: Vec::new(), table: None, sent: 0, live: true }).collect();
        Group { request, arrival, seqs, forked: false, cached: 0, resumed: false }
    }

    pub fn seq_id(&self, index: usize) -> SeqId {
        SeqId { request: self.request.id, index: index as u32 }
    }

    pub fn num_live(&self) -> usize {
        self.seqs.iter().filter(|s| s.live).count()
    }

    pub fn queue_key(&self, policy: Policy) -> QueueKey {
        (self.priority(policy), self.arrival)
    }

    pub fn standing(&self, policy: Policy) -> Standing {
        (self.priority(policy), Reverse(self.work()), self.arrival)
    }

    fn priority(&self, policy: Policy) -> i32 {
        match policy {
            Policy::Fcfs => 0,
            Policy::Priority => self.request.priority,
        }
    }

    /// Tokens that a preemption would throw away: each computed one once, those from the cache not at all.
    pub fn work(&self) -> usize {
        let prompt = self.request.prompt.len();
        let computed = |s: &Sequence| s.table.as_ref().map_or(0, BlockTable::committed);
        let all = if self.forked {
            prompt + self.seqs.iter().map(|s| computed(s).saturating_sub(prompt)).sum::<usize>()
        } else {
            computed(&self.seqs[0])
        };
        all.saturating_sub(self.cached)
    }

    /// Tokens that sequence `index` knows and that are to be computed in the present phase.
    pub fn target(&self, index: usize) -> usize {
        let prompt = self.request.prompt.len();
        if self.forked || self.sole_live_is_first() { prompt + self.seqs[index].output.len() } else { prompt }
    }

    /// Sequences with something to compute, and how many tokens.
    pub fn pending(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.seqs.iter().enumerate().filter_map(|(index, s)| {
            let table = s.table.as_ref()?;
            let pending = self.target(index).saturating_sub(table.committed());
            (pending > 0).then_some((index, pending))
        })
    }

    /// All that sequence 0 has to compute in the prompt phase.
    pub fn prefill_tokens(&self) -> Cow<'_, [u32]> {
        let (prompt, target) = (&self.request.prompt, self.target(0));
        if target == prompt.len() { Cow::Borrowed(prompt) } else { Cow::Owned(self.tokens(0, 0..target)) }
    }

    /// Tokens of sequence `index` at these positions.
    pub fn tokens(&self, index: usize, positions: Range<usize>) -> Vec<u32> {
        let prompt = &self.request.prompt;
        let output = &self.seqs[index].output;
        let split = prompt.len();
        let mut tokens = prompt[positions.start.min(split)..positions.end.min(split)].to_vec();
        tokens.extend_from_slice(&output[positions.start.max(split) - split..positions.end.max(split) - split]);
        tokens
    }

    /// Which sequences want a token from the row of sequence `index` that ends at `end`.
    pub fn sample(&self, index: usize, end: usize) -> Range<u32> {
        let sampled_before = self.seqs.iter().any(|s| !s.output.is_empty());
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
