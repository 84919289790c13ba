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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Ends a hypothesis.
    const END: u32 = 0;

    /// A language model as a table: a distribution for every prefix.
    #[derive(Clone, Debug)]
    struct Table {
        vocab: u32,
        logits: Vec<f32>,
    }

    impl Table {
        /// The next tokens after `prefix` with their log-probabilities, likeliest first.
        fn next(&self, prefix: &[u32]) -> Vec<(u32, f32)> {
            let number = prefix.iter().fold(0, |number, token| number * self.vocab + token + 1);
            let row = &self.logits[(number * self.vocab) as usize..][..self.vocab as usize];
            let mass: f32 = row.iter().map(|logit| logit.exp()).sum();
            let mut next: Vec<(u32, f32)> = (0..).zip(row.iter().map(|logit| (logit - mass.ln()).min(0.0))).collect();
            next.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            next
        }
    }

    /// Tokens, sum and why it ended.
    type Hypothesis = (Vec<u32>, f64, FinishReason);

    fn reason(token: u32) -> Option<FinishReason> {
        (token == END).then_some(FinishReason::Stop(None))
    }

    fn score(hypothesis: &Hypothesis, search: BeamSearch) -> f64 {
        hypothesis.1 / (hypothesis.0.len() as f64).powf(search.length_penalty.into())
    }

    /// Every hypothesis there is.
    fn all(table: &Table, limit: usize, prefix: &[u32], sum: f64) -> Vec<Hypothesis> {
        let next = table.next(prefix).into_iter().map(|(token, logprob)| {
            let (tokens, sum) = ([prefix, &[token]].concat(), sum + f64::from(logprob));
            match reason(token).or((tokens.len() == limit).then_some(FinishReason::Length)) {
                Some(reason) => vec![(tokens, sum, reason)],
                None => all(table, limit, &tokens, sum),
            }
        });
        next.flatten().collect()
    }

    /// A beam search with lists of tokens, which ends at the limit, or with `early_stopping`.
    fn naive(table: &Table, limit: usize, search: BeamSearch) -> Vec<Hypothesis> {
        let (mut live, mut ended) = (vec![(Vec::new(), 0.0)], Vec::new());
        while !(live.is_empty() || search.early_stopping && ended.len() >= search.width) {
            let mut next: Vec<(Vec<u32>, f64)> = Vec::new();
            for (prefix, sum) in &live {
                let mut extended = table.next(prefix);
                extended.truncate(2 * search.width);
                extended.sort_by_key(|&(token, _)| token);
                next.extend(extended.iter().map(|&(t, p)| ([prefix, &[t][..]].concat(), sum + f64::from(p))));
            }
            next.sort_by(|a, b| b.1.total_cmp(&a.1)); // stable: parents in order, then tokens
            live.clear();
            for (tokens, sum) in next {
                let length = (tokens.len() == limit).then_some(FinishReason::Length);
                match reason(tokens[tokens.len() - 1]).or(length) {
                    Some(reason) => ended.push((tokens, sum, reason)),
                    None => live.push((tokens, sum)),
                }
            }
            live.truncate(search.width);
        }
        ended.sort_by(|a, b| score(b, search).total_cmp(&score(a, search)));
        ended.truncate(search.width);
        ended
    }

    /// Runs the search as an engine does; gives the results and the steps taken. What a scheduler would hold of each beam is
    /// kept beside it and compared.
    fn run(table: &Table, limit: usize, search: BeamSearch) -> (Vec<Hypothesis>, usize) {
        let mut beams = Beams::new(search, limit);
        let mut held: Vec<Option<Vec<u32>>> = vec![None; search.width];
        held[0] = Some(Vec::new());
        let (mut steps, mut output) = (0, Vec::new());
        while !beams.is_done() {
            let live: Vec<u32> = (0..).zip(&held).filter(|(_, tokens)| tokens.is_some()).map(|(i, _)| i).collect();
            for (i, &index) in live.iter().enumerate() {
                beams.tokens(index, &mut output);
                assert_eq!(held[index as usize].as_ref(), Some(&output));
                let likeliest = table.next(&output).into_iter().take(beams.wanted(1));
                let likely =
                    likeliest.map(|(token, logprob)| Likely { sampled: Sampled { token, logprob: None }, logprob });
                let likely: Vec<Likely> = likely.collect();
                assert_eq!(beams.offer(index, likely.clone()), i + 1 == live.len());
                assert!(!beams.offer(index, likely), "told twice, heard once");
            }
            let forks = beams.advance(reason);
            for fork in forks.iter().flatten() {
                assert_eq!(forks[fork.parent as usize].unwrap().parent, fork.parent, "a child keeps the index");
            }
            let before = held;
            let continued = |fork: &Fork| [before[fork.parent as usize].as_ref().unwrap(), &[fork.token][..]].concat();
            held = forks.iter().map(|fork| fork.as_ref().map(continued)).collect();
            steps += 1;
        }
        assert!(held.iter().all(Option::is_none), "no beam outlives the search");
        let sum = |tokens: &[u32]| {
            let of = |at: usize| table.next(&tokens[..at]).iter().find(|next| next.0 == tokens[at]).unwrap().1;
            (0..tokens.len()).map(|at| f64::from(of(at))).sum()
        };
        let results = beams.results().map(|(tokens, reason)| {
            let tokens: Vec<u32> = tokens.iter().map(|sampled| sampled.token).collect();
            (tokens.clone(), sum(&tokens), reason)
        });
        (results.collect(), steps)
    }

    /// A table for hypotheses of up to `limit` tokens; coarse logits give ties.
    fn tables() -> impl Strategy<Value = (Table, usize)> {
        (2..=4u32, 1..=4usize).prop_flat_map(|(vocab, limit)| {
            let prefixes: u32 = (0..limit as u32).map(|length| vocab.pow(length)).sum();
            let len = (prefixes * vocab) as usize;
            let coarse = prop::collection::vec((0..=1i32).prop_map(|x| x as f32), len);
            let logits = prop_oneof![coarse, prop::collection::vec(-4.0f32..4.0, len)];
            logits.prop_map(move |logits| (Table { vocab, logits }, limit))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn a_beam_as_wide_as_all_prefixes_finds_the_best_of_all(
            (table, limit) in tables(), penalty in -2.0f32..2.0, best in 1..20usize,
        ) {
            let width = (table.vocab as usize).pow(limit as u32 - 1).max(best);
            let search = BeamSearch { length_penalty: penalty, ..BeamSearch::new(width) };
            let mut all = all(&table, limit, &[], 0.0);
            all.sort_by(|a, b| score(b, search).total_cmp(&score(a, search)));
            let (found, _) = run(&table, limit, search);
            prop_assert_eq!(found.len(), all.len().min(width));
            for (found, best) in found.iter().zip(&all) {
                // Equal scores may come in either order.
                prop_assert!((score(found, search) - score(best, search)).abs() < 1e-12, "{:?} {:?}", found, best);
                prop_assert!(all.contains(found));
            }
            prop_assert!(found.iter().enumerate().all(|(i, f)| !found[..i].contains(f)), "{:?}", found);
        }

        #[test]
        fn a_narrow_beam_gives_what_a_search_gives_that_never_ends_early(
            (table, limit) in tables(), penalty in -2.0f32..2.0, width in 1..6usize, early_stopping: bool,
        ) {
            let search = BeamSearch { width, length_penalty: penalty, early_stopping };
            prop_assert_eq!(run(&table, limit, search).0, naive(&table, limit, search));
        }

        #[test]
        fn no_length_penalty_breaks_the_order((table, limit) in tables(), high: bool, width in 1..6usize) {
            let length_penalty = if high { f32::MAX } else { f32::MIN };
            let (found, _) = run(&table, limit, BeamSearch { length_penalty, ..BeamSearch::new(width) });
            prop_assert!(!found.is_empty());
            let lengths = found.iter().map(|hypothesis| hypothesis.0.len());
            // Below 0 every token is a loss beyond measure.
            prop_assert!(high || lengths.is_sorted_by_key(|length| length > 1), "{:?}", found);
        }
    }

    /// The end is likely after each prefix.
    fn hasty(limit: usize) -> Table {
        let prefixes: u32 = (0..limit as u32).map(|length| 3u32.pow(length)).sum();
        Table { vocab: 3, logits: [3.0, 1.0, 0.0].repeat(prefixes as usize) }
    }

    #[test]
    fn a_search_ends_when_nothing_can_beat_the_best_any_more() {
        let steps = |length_penalty, early_stopping| {
            run(&hasty(6), 6, BeamSearch { width: 2, length_penalty, early_stopping }).1
        };
        // Short ones win: after two steps no other can be among the best two.
        assert_eq!(steps(-1.0, false), 2);
        assert_eq!(steps(0.0, false), 2);
        // Long ones are rewarded, so it has to go on, unless it is told not to.
        assert!(steps(1.0, false) > 2);
        assert_eq!(steps(1.0, true), 2);
    }

    #[test]
    fn the_bound_of_a_negative_length_penalty_is_one_token_away() {
        // After the prompt these probabilities; after anything else the end is all but certain.
        let found = |first: [f32; 3]| {
            let mut table = hasty(4);
            table.logits = [first.map(f32::ln).to_vec(), [20.0, 0.0, 0.0].repeat(table.logits.len() / 3 - 1)].concat();
            let (found, steps) = run(&table, 4, BeamSearch { length_penalty: -1.0, ..BeamSearch::new(1) });
            (found[0].0.clone(), steps)
        };
        // ln 0.6 twice is above ln 0.25 once, four times is not: to end at once would be too soon.
        assert_eq!(found([0.25, 0.6, 0.15]), (vec![1, END], 2));
        // ln 0.5 twice is below ln 0.45: nothing can come of it.
        assert_eq!(found([0.45, 0.5, 0.05]), (vec![END], 1));
    }

    #[test]
    fn more_endings_than_beams_leave_room_for_those_that_go_on() {
        assert_eq!(Beams::new(BeamSearch::new(4), 9).wanted(1), 8);
        assert_eq!(Beams::new(BeamSearch::new(4), 9).wanted(7), 11);
        assert_eq!(Beams::new(BeamSearch::new(usize::MAX), 9).wanted(1), usize::MAX);
    }
}
