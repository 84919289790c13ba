//! Log-probabilities of the raw logits: what vLLM reports by default, untouched by penalties, filters and temperature.

use crate::argmax::max;
use crate::numbers::{ln_mass, mass, weight};

/// How likely a token was, and what else was likely.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TokenLogprobs {
    /// Natural log of the token's probability; −∞ where it was impossible.
    pub logprob: f32,
    /// 1 for the likeliest: one more than the number of tokens with a greater logit.
    pub rank: usize,
    /// The likeliest tokens with their log-probabilities, descending, equal ones by id.
    pub top: Vec<(u32, f32)>,
}

/// A row as a distribution: its log-softmax. Making it is two passes over the row; NaN counts as −∞.
pub(crate) struct Distribution<'a> {
    logits: &'a [f32],
    largest: f32,
    normaliser: f64,
}

impl<'a> Distribution<'a> {
    pub(crate) fn new(logits: &'a [f32]) -> Self {
        let largest = max(logits).min(f32::MAX);
        let mass = mass(logits.iter().map(|&logit| weight(relative(logit, largest))));
        Distribution { logits, largest, normaliser: ln_mass(mass) }
    }

    /// The `k` likeliest tokens that are possible at all with their log-probabilities, descending, ties by id.
    pub(crate) fn top(&self, k: usize) -> Vec<(u32, f32)> {
        likeliest(self.logits, k).into_iter().map(|(token, logit)| (token, self.logprob(logit))).collect()
    }

    /// Log-probability and rank of a token; one pass for the rank.
    pub(crate) fn of(&self, token: u32) -> (f32, usize) {
        let own = self.logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let own = if own.is_nan() { f32::NEG_INFINITY } else { own };
        let logprob = if own == f32::NEG_INFINITY { own } else { self.logprob(own) };
        (logprob, 1 + self.logits.iter().filter(|&&logit| logit > own).count())
    }

    /// At most 0: the mass holds the largest as 1.
    fn logprob(&self, logit: f32) -> f32 {
        (f64::from(relative(logit, self.largest)) - self.normaliser) as f32
    }
}

/// Log-softmax of `logits` at `token`, its rank, and the `k` best. NaN counts as −∞.
///
/// Two passes over the row and one more for the `k` best, whose list is the only allocation. A `token` outside the row is
/// impossible: −∞ and last.
///
/// ```
/// let logprobs = sampling::token_logprobs(&[0.0, 2.0, 1.0], 2, 2);
/// assert_eq!(logprobs.rank, 2);
/// assert_eq!(logprobs.top[0].0, 1);
/// assert_eq!(logprobs.top[1], (2, logprobs.logprob));
/// ```
pub fn token_logprobs(logits: &[f32], token: u32, k: usize) -> TokenLogprobs {
    let distribution = Distribution::new(logits);
    let (logprob, rank) = distribution.of(token);
    TokenLogprobs { logprob, rank, top: distribution.top(k) }
}

/// `logit − largest`, at most 0, with NaN as −∞.
#[inline]
fn relative(logit: f32, largest: f32) -> f32 {
    if logit > f32::NEG_INFINITY { logit.min(f32::MAX) - largest } else { f32::NEG_INFINITY }
}

/// The `k` likeliest tokens that are possible at all, descending, ties by id.
fn likeliest(logits: &[f32], k: usize) -> Vec<(u32, f32)> {
    // NaN is no candidate, so all compare.
    let descending =
        |a: &(u32, f32), b: &(u32, f32)| b.1.partial_cmp(&a.1).unwrap_or(std::cmp::Ordering::Equal).then(a.0.cmp(&b.0));
    let k = k.min(logits.len());
    if k == 0 {
        return Vec::new();
    }
    // Collect what beats the worst of the best k so far; when the list is full, cut it back to k. Ids ascend, so a later
    // equal never belongs before an earlier one.
    let room = (2 * k).max(64);
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(room.min(logits.len()));
    let mut floor = f32::NEG_INFINITY;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > floor {
            best.push((token as u32, logit));
            if best.len() == room {
                floor = best.select_nth_unstable_by(k - 1, descending).1.1;
                best.truncate(k);
            }
        }
    }
    best.sort_unstable_by(descending);
    best.truncate(k);
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_share_a_rank_and_are_listed_by_id() {
        let logits = [1.0, 3.0, 3.0, 0.0];
        assert_eq!(token_logprobs(&logits, 2, 0).rank, 1);
        assert_eq!(token_logprobs(&logits, 0, 0).rank, 3);
        let order: Vec<u32> = token_logprobs(&logits, 0, 9).top.iter().map(|top| top.0).collect();
        assert_eq!(order, [1, 2, 0, 3]);
    }

    #[test]
    fn broken_rows_give_minus_infinity_and_no_nan() {
        let none = [f32::NAN, f32::NEG_INFINITY];
        for token in [0, 1, 2] {
            let logprobs = token_logprobs(&none, token, 2);
            assert_eq!(logprobs, TokenLogprobs { logprob: f32::NEG_INFINITY, rank: 1, top: vec![] });
        }
        let some = token_logprobs(&[f32::NAN, 2.0, f32::INFINITY], 2, 3);
        assert_eq!((some.logprob, some.rank, some.top.len()), (0.0, 1, 2));
    }

    #[test]
    fn the_best_of_a_long_row_survive_every_cut() {
        let logits: Vec<f32> = (0..10_000).map(|i| ((i * 7919) % 10_007) as f32 / 100.0).collect();
        let mut sorted: Vec<u32> = (0..10_000).collect();
        sorted.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
        for k in [1, 5, 20, 100, 1000, 10_000, 10_001, usize::MAX] {
            let top: Vec<u32> = token_logprobs(&logits, 0, k).top.iter().map(|top| top.0).collect();
            assert_eq!(top, sorted[..k.min(sorted.len())]);
        }
    }
}
