//! Log-probabilities of the raw logits: before a grammar's mask, penalties, filters and temperature.

use crate::argmax::max;
use crate::numbers::{ln_mass, mass, weight};

/// The log-probability of a token, its rank, and the likeliest alternatives.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TokenLogprobs {
    /// Natural logarithm of the token's probability; −∞ if it was impossible.
    pub logprob: f32,
    /// 1 for the likeliest token: 1 + the number of tokens with a greater logit.
    pub rank: usize,
    /// The likeliest tokens with their log-probabilities, descending, ties by id.
    pub top: Vec<(u32, f32)>,
}

/// The log-softmax of a row. Construction takes two passes over the row. NaN counts as −∞.
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

    /// Returns the `k` likeliest possible tokens with their log-probabilities, descending, ties by id.
    pub(crate) fn top(&self, k: usize) -> Vec<(u32, f32)> {
        likeliest(self.logits, k).into_iter().map(|(token, logit)| (token, self.logprob(logit))).collect()
    }

    /// Returns log-probability and rank of a token. The rank takes one pass.
    pub(crate) fn of(&self, token: u32) -> (f32, usize) {
        let own = self.logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let own = if own.is_nan() { f32::NEG_INFINITY } else { own };
        let logprob = if own == f32::NEG_INFINITY { own } else { self.logprob(own) };
        (logprob, 1 + self.logits.iter().filter(|&&logit| logit > own).count())
    }

    /// At most 0, because the mass includes the largest logit with weight 1.
    fn logprob(&self, logit: f32) -> f32 {
        (f64::from(relative(logit, self.largest)) - self.normaliser) as f32
    }
}

/// Returns the log-softmax of `logits` at `token`, its rank, and the `k` likeliest tokens. NaN counts as −∞.
///
/// Takes three passes over the row, and one more for the `k` likeliest, whose list is the only allocation. A `token`
/// outside the row is impossible: its log-probability is −∞ and its rank the last.
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

/// Returns logit − largest, at most 0; −∞ for NaN.
#[inline]
fn relative(logit: f32, largest: f32) -> f32 {
    if logit > f32::NEG_INFINITY { logit.min(f32::MAX) - largest } else { f32::NEG_INFINITY }
}

/// Returns the `k` likeliest possible tokens, descending, ties by id.
fn likeliest(logits: &[f32], k: usize) -> Vec<(u32, f32)> {
    // The list never contains NaN, so `partial_cmp` always succeeds.
    let descending =
        |a: &(u32, f32), b: &(u32, f32)| b.1.partial_cmp(&a.1).unwrap_or(std::cmp::Ordering::Equal).then(a.0.cmp(&b.0));
    let k = k.min(logits.len());
    if k == 0 {
        return Vec::new();
    }
    // Collects tokens above the k-th best so far, and cuts the list back to k when it is full. Ids ascend, so a later
    // token never precedes an earlier one with an equal logit.
    let capacity = (2 * k).max(64);
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(capacity.min(logits.len()));
    let mut threshold = f32::NEG_INFINITY;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > threshold {
            best.push((token as u32, logit));
            if best.len() == capacity {
                threshold = best.select_nth_unstable_by(k - 1, descending).1.1;
                best.truncate(k);
            }
        }
    }
    best.sort_unstable_by(descending);
    best.truncate(k);
    best
}
