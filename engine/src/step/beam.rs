//! Beam search: which hypotheses live on, which have ended, and which are the best.
//!
//! Pure: it hears the likeliest next tokens of every live beam and says of each beam which one it continues. It runs no
//! model, owns no block and knows no request.
//!
//! ```text
//! prompt ─┬─ the ─┬─ cat ── <eos>     Hypotheses are paths of one tree, a beam is a leaf of it: a fork adds a node
//!         │       └─ dog ── runs      and copies no token. The first child of a beam keeps the beam's index, so its
//!         └─ a ───── cat ── sat       blocks are written in place; the others fork copy-on-write.
//! ```
//!
//! A step of `w` beams extends each with its `2w` likeliest tokens (or [more](Beams::wanted)) and orders all of these by the
//! sum of log-probabilities, equal ones by the rank of their parent and then by token id. Those that end are set aside,
//! wherever they stand, as vLLM does (transformers drop those that stand below the best `w` candidates), and the best `w` of
//! the others live on. It costs O(w² log w), a walk of each beam's path, and a node per hypothesis that is kept.
//!
//! # Score
//! `sum of log-probabilities / tokens^length_penalty`, over generated tokens alone, with the token that ended the hypothesis
//! in both, as in Hugging Face transformers (`BeamHypotheses.add`; `cur_len + 1 - decoder_prompt_len` in `generate`).
//!
//! # When it ends
//! When nothing lives, at the token limit at the latest; with `early_stopping` as soon as `w` hypotheses have ended; else
//! when no live beam can come to beat the worst of the `w` best that have.
//!
//! **Bound.** A beam has `l` tokens of the sum `s`; `m` is the token limit, `p` the length penalty. No hypothesis that
//! continues the beam scores above `s / m^p` if `p >= 0`, nor above `s / (l + 1)^p` if `p < 0`.
//!
//! *Proof.* Let it end with `k` tokens, `l + 1 <= k <= m`, of the sum `t`. No log-probability is above 0, so `t <= s <= 0`,
//! and its score is `t / k^p <= s / k^p = -|s| k^-p`. If `p >= 0`, `k^-p` falls or stays as `k` grows, so that this is
//! greatest at `k = m`; if `p < 0` it rises, and this is greatest at `k = l + 1`. ∎
//!
//! All live beams have the same length, so the one of the greatest sum has the greatest bound, and one comparison decides.
//! A hypothesis that only equals the worst comes too late. (Transformers compare so for `early_stopping="never"`; their
//! `False` is a heuristic that may miss the best.)

use std::cmp::Ordering;

use sampling::{Likely, Sampled};

use crate::api::{BeamSearch, FinishReason};

/// What becomes of a beam.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fork {
    /// Index, before the step, of the beam that it continues.
    pub parent: u32,
    /// The token it adds.
    pub token: u32,
}

/// The search behind one prompt.
pub(crate) struct Beams {
    search: BeamSearch,
    /// Greatest number of tokens of a hypothesis, at least 1.
    limit: usize,
    /// Parents before children.
    nodes: Vec<Node>,
    /// Best first, at most `width`. One without a token at the start.
    live: Vec<Beam>,
    /// Best first, at most `width`; of equal ones the first to end.
    ended: Vec<Ended>,
    /// Tokens of every live beam.
    length: usize,
    /// Of the step under way.
    candidates: Vec<Candidate>,
}

struct Node {
    /// `None` behind the prompt.
    parent: Option<usize>,
    sampled: Sampled,
}

struct Beam {
    index: u32,
    node: Option<usize>,
    /// Sum over its tokens.
    logprob: f64,
    /// Its candidates of the step under way are known.
    heard: bool,
}

struct Ended {
    node: usize,
    score: f64,
    reason: FinishReason,
}

/// A live beam and one token more.
struct Candidate {
    /// Place of the beam in `live`.
    rank: usize,
    sampled: Sampled,
    logprob: f64,
}

impl Candidate {
    fn order(&self, other: &Candidate) -> Ordering {
        let by_place = || (self.rank, self.sampled.token).cmp(&(other.rank, other.sampled.token));
        other.logprob.total_cmp(&self.logprob).then_with(by_place)
    }
}

impl Beams {
    /// A search for hypotheses of at most `limit` tokens, at least 1.
    pub fn new(search: BeamSearch, limit: usize) -> Beams {
        let live = vec![Beam { index: 0, node: None, logprob: 0.0, heard: false }];
        let (nodes, ended, candidates) = (Vec::new(), Vec::new(), Vec::new());
        Beams { search, limit, nodes, live, ended, length: 0, candidates }
    }

    /// How many of the likeliest tokens to [offer](Beams::offer), where `endings` different tokens end a hypothesis: so
    /// many that `width` which end none are always among them, and at least twice the width.
    pub fn wanted(&self, endings: usize) -> usize {
        self.search.width.saturating_add(self.search.width.max(endings))
    }

    /// Writes the tokens of live beam `index`.
    pub fn tokens(&self, index: u32, tokens: &mut Vec<u32>) {
        tokens.clear();
        let node = self.live.iter().find(|beam| beam.index == index).and_then(|beam| beam.node);
        tokens.extend(self.path(node).map(|sampled| sampled.token));
        tokens.reverse();
    }

    /// Hears the likeliest next tokens of live beam `index`. `true` when with this one all have been heard: the step can be
    /// [taken](Beams::advance). What is told again, as after a preemption, is not heard again.
    pub fn offer(&mut self, index: u32, likeliest: Vec<Likely>) -> bool {
        let Some(rank) = self.live.iter().position(|beam| beam.index == index) else { return false };
        if std::mem::replace(&mut self.live[rank].heard, true) {
            return false;
        }
        let sum = self.live[rank].logprob;
        let extended = |Likely { sampled, logprob }| Candidate { rank, sampled, logprob: sum + f64::from(logprob) };
        self.candidates.extend(likeliest.into_iter().map(extended));
        self.live.iter().all(|beam| beam.heard)
    }

    /// Takes the step; `ending` says whether a token ends its hypothesis, and why. Gives what becomes of each beam by its
    /// index: `None` of one that is not alive (another may live under the index later), and of all at the end.
    pub fn advance(&mut self, ending: impl Fn(u32) -> Option<FinishReason>) -> Vec<Option<Fork>> {
        self.length += 1;
        let parents = std::mem::take(&mut self.live);
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.sort_unstable_by(Candidate::order);
        let at_limit = (self.length >= self.limit).then_some(FinishReason::Length);
        for Candidate { rank, sampled, logprob } in candidates.drain(..) {
            let parent = &parents[rank];
            match ending(sampled.token).or_else(|| at_limit.clone()) {
                Some(reason) => self.end(parent.node, sampled, logprob, reason),
                None if self.live.len() < self.search.width => {
                    let node = Some(self.grow(parent.node, sampled));
                    self.live.push(Beam { index: parent.index, node, logprob, heard: false });
                }
                None => {}
            }
        }
        self.candidates = candidates;
        if self.is_decided() {
            self.live.clear();
        }
        self.assign()
    }

    /// Whether the search has ended.
    pub fn is_done(&self) -> bool {
        self.live.is_empty()
    }

    /// Tokens of all hypotheses, shared ones once.
    pub fn num_tokens(&self) -> usize {
        self.nodes.len()
    }

    /// The hypotheses that have ended, best first; at most `width`, fewer if there are no more.
    pub fn results(&self) -> impl Iterator<Item = (Vec<Sampled>, FinishReason)> {
        self.ended.iter().map(|ended| {
            let mut tokens: Vec<Sampled> = self.path(Some(ended.node)).cloned().collect();
            tokens.reverse();
            (tokens, ended.reason.clone())
        })
    }

    /// From a node back to the prompt.
    fn path(&self, node: Option<usize>) -> impl Iterator<Item = &Sampled> {
        let nodes = std::iter::successors(node, |&node| self.nodes[node].parent);
        nodes.map(|node| &self.nodes[node].sampled)
    }

    fn grow(&mut self, parent: Option<usize>, sampled: Sampled) -> usize {
        self.nodes.push(Node { parent, sampled });
        self.nodes.len() - 1
    }

    /// Sets a hypothesis of the present length aside, if it is among the best.
    fn end(&mut self, parent: Option<usize>, sampled: Sampled, logprob: f64, reason: FinishReason) {
        let score = self.score(logprob, self.length);
        let place = self.ended.partition_point(|ended| ended.score >= score);
        if place < self.search.width {
            let node = self.grow(parent, sampled);
            self.ended.insert(place, Ended { node, score, reason });
            self.ended.truncate(self.search.width);
        }
    }

    fn score(&self, logprob: f64, length: usize) -> f64 {
        // These are so at every length, and where the power is 0 or infinite the quotient would be NaN.
        if logprob == 0.0 || logprob == f64::NEG_INFINITY {
            return logprob;
        }
        logprob / (length as f64).powf(self.search.length_penalty.into())
    }

    /// Whether what lives can not change the results any more.
    fn is_decided(&self) -> bool {
        let Some(worst) = self.ended.get(self.search.width - 1) else { return false };
        let longest_is_best = self.search.length_penalty >= 0.0;
        let length = if longest_is_best { self.limit } else { self.length + 1 };
        self.search.early_stopping
            || self.live.first().is_none_or(|best| self.score(best.logprob, length) <= worst.score)
    }

    /// Gives the live beams, which still have the indices of their parents, their own: the first child keeps the parent's,
    /// the others take what is free.
    fn assign(&mut self) -> Vec<Option<Fork>> {
        let mut forks = vec![None; self.search.width];
        let mut others = Vec::new();
        for beam in &mut self.live {
            let Some(node) = beam.node else { continue };
            let fork = Some(Fork { parent: beam.index, token: self.nodes[node].sampled.token });
            match &mut forks[beam.index as usize] {
                place @ None => *place = fork,
                Some(_) => others.push((beam, fork)),
            }
        }
        let free = forks.iter_mut().zip(0..).filter(|(place, _)| place.is_none());
        for ((place, index), (beam, fork)) in free.zip(others) {
            *place = fork;
            beam.index = index;
        }
        forks
    }
}
