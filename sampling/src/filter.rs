//! The filters: top_k, top_p, typical_p. (min_p is a threshold while the list of candidates is built.)
//!
//! No filter sorts the vocabulary. top_k is one selection; top_p and typical_p are selections over a range that halves
//! each time. All are linear in the number of candidates.

use std::cmp::Ordering;

use crate::numbers::{mass, share_of, weight};

/// A token that can still be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) token: u32,
    /// Logit / temperature: finite, and never −0.
    pub(crate) logit: f32,
}

/// Likeliest first. Ties by token id, so that a cut through equal logits is deterministic.
fn by_logit(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// Keeps the `k` likeliest candidates and all with the same logit as the last of them; 0 keeps all.
pub(crate) fn top_k(kept: &mut Vec<Candidate>, k: usize) {
    if k == 0 || k >= kept.len() {
        return;
    }
    let (_, last, rest) = kept.select_nth_unstable_by(k - 1, by_logit);
    let least = last.logit;
    let ties = move_to_front(rest, |candidate| candidate.logit >= least);
    kept.truncate(k + ties);
}

/// Keeps the fewest likeliest tokens whose probabilities sum to `p`, at least one.
pub(crate) fn top_p(kept: &mut Vec<Candidate>, p: f32) {
    if p >= 1.0 || kept.len() < 2 {
        return;
    }
    let largest = largest(kept);
    let cut = prefix_of_mass(kept, p, largest, by_logit);
    kept.truncate(cut);
}

/// Keeps the fewest tokens nearest to the mean surprise whose probabilities sum to `p`, and all as near as the last of
/// them (transformers' `TypicalLogitsWarper`).
pub(crate) fn typical_p(kept: &mut Vec<Candidate>, p: f32) {
    if p >= 1.0 || kept.len() < 2 {
        return;
    }
    let largest = largest(kept);
    // With z = logit − largest: surprise −ln p = ln mass − z, and its mean, the entropy, is ln mass − Σ p z.
    // Their distance is |z − Σ p z|: the normaliser cancels.
    let all = mass(kept.iter().map(|candidate| weight(candidate.logit - largest)));
    let weighted = kept.iter().fold(0i64, |sum, candidate| sum.saturating_add(weighted(candidate.logit - largest)));
    let mean = (weighted as f64 / all as f64) as f32;
    let distance = |candidate: &Candidate| (candidate.logit - largest - mean).abs();
    let nearest = |a: &Candidate, b: &Candidate| distance(a).total_cmp(&distance(b)).then(by_logit(a, b));
    let cut = prefix_of_mass(kept, p, largest, nearest);
    let reach = kept[..cut].iter().map(distance).fold(0.0, f32::max);
    let ties = move_to_front(&mut kept[cut..], |candidate| distance(candidate) <= reach);
    kept.truncate(cut + ties);
}

/// Returns the largest logit; −∞ for an empty list.
pub(crate) fn largest(kept: &[Candidate]) -> f32 {
    kept.iter().fold(f32::NEG_INFINITY, |largest, candidate| largest.max(candidate.logit))
}

/// Returns z e^z in whole units of [`weight`].
fn weighted(z: f32) -> i64 {
    match weight(z) {
        0 => 0,
        weight => (weight as f64 * f64::from(z)) as i64,
    }
}

/// Reorders the candidates so that the first `n` are the fewest in `order` with at least `share` of the whole mass.
/// Returns `n`.
///
/// ```text
///   kept             │ undecided ........ │ dropped     Split `undecided` at its median. If the better half has the
///   0 ............ start .............. end ...          missing mass, drop the other half; else keep the better half.
/// ```
fn prefix_of_mass(
    kept: &mut [Candidate],
    share: f32,
    largest: f32,
    order: impl Fn(&Candidate, &Candidate) -> Ordering + Copy,
) -> usize {
    let mass = |part: &[Candidate]| mass(part.iter().map(|candidate| weight(candidate.logit - largest)));
    let mut missing = share_of(mass(kept), share);
    let (mut start, mut end) = (0, kept.len());
    while end - start > 1 {
        let undecided = &mut kept[start..end];
        let half = undecided.len() / 2;
        undecided.select_nth_unstable_by(half, order);
        let better = mass(&undecided[..half]);
        if better >= missing {
            end = start + half;
        } else {
            missing -= better;
            start += half;
        }
    }
    end
}

/// Swaps the elements that satisfy `wanted` to the front and returns their number.
fn move_to_front(part: &mut [Candidate], wanted: impl Fn(&Candidate) -> bool) -> usize {
    let mut count = 0;
    for i in 0..part.len() {
        if wanted(&part[i]) {
            part.swap(i, count);
            count += 1;
        }
    }
    count
}
