//! Beam search: which hypotheses survive a step, which have ended, and which are the best.
//!
//! The state is pure logic. It receives the likeliest next tokens of every live beam and returns which beam each one continues.
//! It runs no model, owns no block and knows no request.
//!
//! ```text
//! prompt ─┬─ the ─┬─ cat ── <eos>     Hypotheses are paths of one tree, and a beam is one of its leaves: a fork adds a
//!         │       └─ dog ── runs      node and copies no token. The first child of a beam keeps the beam's index, so its
//!         └─ a ───── cat ── sat       blocks are written in place; the other children fork copy-on-write.
//! ```
//!
//! A step of `w` beams extends each beam by its `2w` likeliest tokens (or [more](BeamSearchState::num_candidates)) and orders
//! all candidates by their sum of log-probabilities; equal sums are ordered by the rank of the parent, then by token id.
//! Candidates that end are set aside wherever they rank, as in vLLM (transformers drops those that rank below the best `w`
//! candidates), and the best `w` of the others survive. A step costs O(w² log w), a walk along each beam's path, and one node
//! per hypothesis that is kept.
//!
//! # Score
//! `sum of log-probabilities / tokens^length_penalty`, over generated tokens alone. The token that ends the hypothesis counts
//! in both, as in Hugging Face transformers (`BeamHypotheses.add`; `cur_len + 1 - decoder_prompt_len` in `generate`).
//!
//! # End of the search
//! The search ends when no beam is live, at the token limit at the latest; with `early_stopping` as soon as `w` hypotheses have
//! ended; otherwise as soon as no live beam can still beat the worst of the `w` best hypotheses that have ended.
//!
//! **Bound.** Let a beam have `l` tokens with the sum `s`, let `m` be the token limit and `p` the length penalty. No hypothesis
//! that continues the beam scores above `s / m^p` if `p >= 0`, nor above `s / (l + 1)^p` if `p < 0`.
//!
//! *Proof.* Let the hypothesis end with `k` tokens, `l + 1 <= k <= m`, and the sum `t`. No log-probability is above 0, so
//! `t <= s <= 0`, and its score is `t / k^p <= s / k^p = -|s| k^-p`. If `p >= 0`, `k^-p` does not grow with `k`, so the bound is
//! greatest at `k = m`; if `p < 0`, it grows with `k`, so the bound is greatest at `k = l + 1`. ∎
//!
//! All live beams have the same length, so the beam with the greatest sum has the greatest bound, and one comparison decides.
//! A hypothesis that only equals the worst does not replace it. (Transformers compares like this for `early_stopping="never"`;
//! its `False` is a heuristic that may miss the best.)

use std::cmp::Ordering;

use sampling::{Likely, Sampled};

use crate::api::{BeamSearch, FinishReason};

/// The beam that a beam continues after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fork {
    /// Index of the continued beam before the step.
    pub parent: u32,
    /// The token that is appended.
    pub token: u32,
}

/// The beam search of one prompt.
pub(crate) struct BeamSearchState {
    search: BeamSearch,
    /// Greatest number of tokens of a hypothesis, at least 1.
    max_tokens: usize,
    /// Parents before children.
    nodes: Vec<Node>,
    /// Best first, at most `width`; initially one beam without a token.
    live: Vec<Beam>,
    /// Best first, at most `width`; of equal ones, the first to end comes first.
    ended: Vec<Ended>,
    /// Number of tokens of every live beam.
    length: usize,
    /// Candidates of the current step.
    candidates: Vec<Candidate>,
}

struct Node {
    /// `None` for the first token after the prompt.
    parent: Option<usize>,
    sampled: Sampled,
}

struct Beam {
    index: u32,
    node: Option<usize>,
    /// Sum over the beam's tokens.
    logprob: f64,
    /// The beam's candidates of the current step have been added.
    has_candidates: bool,
}

struct Ended {
    node: usize,
    score: f64,
    reason: FinishReason,
}

/// A live beam extended by one token.
struct Candidate {
    /// Position of the beam in `live`.
    rank: usize,
    sampled: Sampled,
    logprob: f64,
}

impl Candidate {
    fn order(&self, other: &Candidate) -> Ordering {
        let by_rank = || (self.rank, self.sampled.token).cmp(&(other.rank, other.sampled.token));
        other.logprob.total_cmp(&self.logprob).then_with(by_rank)
    }
}

impl BeamSearchState {
    /// Starts a search for hypotheses of at most `max_tokens` tokens, which is at least 1.
    pub fn new(search: BeamSearch, max_tokens: usize) -> BeamSearchState {
        let live = vec![Beam { index: 0, node: None, logprob: 0.0, has_candidates: false }];
        let (nodes, ended, candidates) = (Vec::new(), Vec::new(), Vec::new());
        BeamSearchState { search, max_tokens, nodes, live, ended, length: 0, candidates }
    }

    /// Number of the likeliest tokens to [add](BeamSearchState::add_candidates) per beam if `num_stop_ids` different tokens end
    /// a hypothesis: at least twice the width, and enough that `width` of them end none.
    pub fn num_candidates(&self, num_stop_ids: usize) -> usize {
        self.search.width + self.search.width.max(num_stop_ids)
    }

    /// Returns the tokens of live beam `index`.
    pub fn tokens(&self, index: u32) -> Vec<u32> {
        let node = self.live.iter().find(|beam| beam.index == index).and_then(|beam| beam.node);
        let mut tokens: Vec<u32> = self.path(node).map(|sampled| sampled.token).collect();
        tokens.reverse();
        tokens
    }

    /// Adds the likeliest next tokens of live beam `index`. Returns `true` when this completes the step, so that the search can
    /// [advance](BeamSearchState::advance). Candidates that arrive again, after a preemption, are ignored.
    pub fn add_candidates(&mut self, index: u32, likeliest: Vec<Likely>) -> bool {
        let Some(rank) = self.live.iter().position(|beam| beam.index == index) else { return false };
        if std::mem::replace(&mut self.live[rank].has_candidates, true) {
            return false;
        }
        let sum = self.live[rank].logprob;
        let extended = |Likely { sampled, logprob }| Candidate { rank, sampled, logprob: sum + f64::from(logprob) };
        self.candidates.extend(likeliest.into_iter().map(extended));
        self.live.iter().all(|beam| beam.has_candidates)
    }

    /// Selects the surviving candidates; `end_reason` returns why a token ends its hypothesis, if it does. Returns the fork of
    /// each beam by index: `None` for a beam that is not live (a later step may reuse its index), and for all once the search
    /// has ended.
    pub fn advance(&mut self, end_reason: impl Fn(u32) -> Option<FinishReason>) -> Vec<Option<Fork>> {
        self.length += 1;
        let parents = std::mem::take(&mut self.live);
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.sort_unstable_by(Candidate::order);
        let at_limit = (self.length >= self.max_tokens).then_some(FinishReason::Length);
        for Candidate { rank, sampled, logprob } in candidates.drain(..) {
            let parent = &parents[rank];
            match end_reason(sampled.token).or_else(|| at_limit.clone()) {
                Some(reason) => self.end(parent.node, sampled, logprob, reason),
                None if self.live.len() < self.search.width => {
                    let node = Some(self.add_node(parent.node, sampled));
                    self.live.push(Beam { index: parent.index, node, logprob, has_candidates: false });
                }
                None => {}
            }
        }
        self.candidates = candidates;
        if self.is_decided() {
            self.live.clear();
        }
        self.assign_indices()
    }

    /// Whether the search has ended.
    pub fn is_done(&self) -> bool {
        self.live.is_empty()
    }

    /// Number of tokens of all hypotheses; shared tokens count once.
    pub fn num_tokens(&self) -> usize {
        self.nodes.len()
    }

    /// The hypotheses that have ended, best first, at most `width`.
    pub fn results(&self) -> impl Iterator<Item = (Vec<Sampled>, FinishReason)> {
        self.ended.iter().map(|ended| {
            let mut tokens: Vec<Sampled> = self.path(Some(ended.node)).cloned().collect();
            tokens.reverse();
            (tokens, ended.reason.clone())
        })
    }

    /// The tokens from a node back to the prompt.
    fn path(&self, node: Option<usize>) -> impl Iterator<Item = &Sampled> {
        let nodes = std::iter::successors(node, |&node| self.nodes[node].parent);
        nodes.map(|node| &self.nodes[node].sampled)
    }

    fn add_node(&mut self, parent: Option<usize>, sampled: Sampled) -> usize {
        self.nodes.push(Node { parent, sampled });
        self.nodes.len() - 1
    }

    /// Sets aside a hypothesis that ends in this step, if it is among the best.
    fn end(&mut self, parent: Option<usize>, sampled: Sampled, logprob: f64, reason: FinishReason) {
        let score = self.score(logprob, self.length);
        let place = self.ended.partition_point(|ended| ended.score >= score);
        if place < self.search.width {
            let node = self.add_node(parent, sampled);
            self.ended.insert(place, Ended { node, score, reason });
            self.ended.truncate(self.search.width);
        }
    }

    fn score(&self, logprob: f64, length: usize) -> f64 {
        // The score at every length; where the power is 0 or infinite, the quotient would be NaN.
        if logprob == 0.0 || logprob == f64::NEG_INFINITY {
            return logprob;
        }
        logprob / (length as f64).powf(self.search.length_penalty.into())
    }

    /// Whether no live beam can change the results any more.
    fn is_decided(&self) -> bool {
        let Some(worst) = self.ended.get(self.search.width - 1) else { return false };
        let longest_is_best = self.search.length_penalty >= 0.0;
        let length = if longest_is_best { self.max_tokens } else { self.length + 1 };
        self.search.early_stopping
            || self.live.first().is_none_or(|best| self.score(best.logprob, length) <= worst.score)
    }

    /// Assigns indices to the live beams, which still have those of their parents: the first child keeps the parent's index,
    /// the other children get free ones.
    fn assign_indices(&mut self) -> Vec<Option<Fork>> {
        let mut forks = vec![None; self.search.width];
        let mut others = Vec::new();
        for beam in &mut self.live {
            let Some(node) = beam.node else { continue };
            let fork = Some(Fork { parent: beam.index, token: self.nodes[node].sampled.token });
            match &mut forks[beam.index as usize] {
                slot @ None => *slot = fork,
                Some(_) => others.push((beam, fork)),
            }
        }
        let free = forks.iter_mut().zip(0..).filter(|(slot, _)| slot.is_none());
        for ((slot, index), (beam, fork)) in free.zip(others) {
            *slot = fork;
            beam.index = index;
        }
        forks
    }
}
