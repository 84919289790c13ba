//! Attention of query rows over partitions of one KV head, in vectors. One source for every instruction set and type of
//! cache.
//!
//! ```text
//! partition of 512 tokens        scores[q][j] = q·k[j]      softmax over j      sums[q] += p[q][j] * v[j]
//!   tile of 64 ▒▒▒▒▒▒▒▒            [`super::scores`]          in vectors of 16    [`super::values`]
//!   tile of 64 ▒▒▒▒▒
//! ```
//!
//! The queries of a task are the heads of a group in one or several adjacent rows. Both products are computed like matrix
//! products: the sums of several queries and several tokens, or columns, stay in registers while the operands that they
//! share are loaded.
//!
//! A cache of bfloat16 can be multiplied in pairs instead ([`pair_scores`], [`pair_values`]), or in tiles ([`tiled`]); queries and
//! weights are then rounded to that type.
//!
//! The order of every sum depends only on the tokens that the row and head see, so rows do not influence each other, whichever
//! task they are in. In a block-sparse call a task reads the blocks that one of its queries sees, each query uses its own, and
//! the softmax packs them side by side: a query that sees every block has the bits of a dense call.

use linear::Arithmetic;
use simd::pairs::{PairLanes, Pairs};
use simd::{Isa, LANES, Lanes};

use super::merge::Merged;
use super::pair_values::{WEIGHTS, round_weights};
use super::scores::score_all;
use super::tile::{PANELS, SCORES, Scratch, Seen, Shared, TILE, Task, bias, grow};
use super::values::sum_all;
use super::{pair_scores, pair_values, tiled};

/// Returns the length of a task's result: weighted values `[rows, group, value_dim]`, then `[rows, group]` of [`Merged`],
/// two numbers each. A row that sees nothing has a total of 0.
pub(super) fn result_len(rows: usize, group: usize, value_dim: usize) -> usize {
    rows * group * (value_dim + 2)
}

/// Runs a task; `result` is [`result_len`] long. The CPU must have the instruction set.
pub(super) fn run(isa: Isa, shared: &Shared<'_>, task: &Task<'_>, scratch: &mut Scratch, result: &mut [f32]) {
    if shared.halves.is_some() && shared.arithmetic == Arithmetic::Tiles {
        return tiled::run(isa, shared, task, scratch, result);
    }
    let (dim, queries, in_pairs) = (shared.value_dim, task.queries(), shared.halves.is_some());
    let key_dim = shared.shape.head_dim;
    let (floats, pairs) = if in_pairs { (0, key_dim.div_ceil(2)) } else { (TILE * key_dim, 0) };
    grow(&mut scratch.scores, queries * SCORES, 0.0);
    grow(&mut scratch.part, queries * shared.width(), 0.0);
    grow(&mut scratch.tile, floats, 0.0);
    grow(&mut scratch.states, queries, Merged::default());
    if in_pairs {
        grow(&mut scratch.queries, queries * pairs, 0);
        grow(&mut scratch.weights, queries * WEIGHTS, 0);
        grow(&mut scratch.pairs, (PANELS * pairs).max(TILE / 2 * dim.div_ceil(LANES)), Pairs::ZERO);
    }
    let (sums, states) = result.split_at_mut(queries * dim);
    let states = states.as_chunks_mut::<2>().0;
    states.fill([0.0; 2]);
    for partition in task.partitions.clone() {
        let seen = &Seen { task, window: shared.window, sparse: shared.sparse, partition };
        // Several functions, because inlining them into one doubled the build time of the crate.
        if in_pairs {
            if partition == task.partitions.start {
                pair_scores::round_all(isa, shared, seen, scratch);
            }
            pair_scores::score_all(isa, shared, seen, scratch);
            simd::dispatch_pairs!(isa, weigh_pairs(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch));
            pair_values::sum_all(isa, shared, seen, scratch);
        } else {
            score_all(isa, shared, seen, scratch);
            simd::dispatch!(isa, softmax_all(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch));
            sum_all(isa, shared, seen, scratch);
        }
        merge(seen, scratch, shared, sums, states);
    }
}

/// As [`softmax_all`], and rounds the weights to bfloat16.
#[inline(always)]
fn weigh_pairs<D: PairLanes>(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    softmax_all::<D::Floats>(shared, seen, scratch);
    round_weights::<D>(seen, scratch);
}

/// Converts the scores of every query into weights.
#[inline(always)]
fn softmax_all<L: Lanes>(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    let task = seen.task;
    for query in 0..task.queries() {
        if seen.sparse.is_some() {
            softmax_some::<L>(shared, seen, query, scratch);
            continue;
        }
        let tokens = seen.by(query / task.group);
        if !tokens.is_empty() {
            let scores = &mut scratch.scores[query * SCORES + tokens.start - seen.first()..];
            bias(shared, task, query, tokens.start, &mut scores[..tokens.len()]);
            scratch.states[query] = softmax::<L>(scores, tokens.len());
        }
    }
}

/// The part of [`softmax_all`] for a query that does not see all blocks: the softmax is that of its tokens, side by side.
#[inline(always)]
fn softmax_some<L: Lanes>(shared: &Shared<'_>, seen: &Seen<'_>, query: usize, scratch: &mut Scratch) {
    let (first, scores) = (seen.first(), &mut scratch.scores[query * SCORES..][..SCORES]);
    let (mut packed, mut len) = ([0.0; SCORES], 0);
    for run in seen.runs(query) {
        let scores = &mut scores[run.start - first..run.end - first];
        bias(shared, seen.task, query, run.start, scores);
        packed[len..][..scores.len()].copy_from_slice(scores);
        len += scores.len();
    }
    if len == 0 {
        return;
    }
    scratch.states[query] = softmax::<L>(&mut packed, len);
    let mut from = 0;
    for run in seen.runs(query) {
        let scores = &mut scores[run.start - first..run.end - first];
        scores.copy_from_slice(&packed[from..][..scores.len()]);
        from += scores.len();
    }
}

/// Merges the weighted values of a partition into those of the partitions before it.
fn merge(seen: &Seen<'_>, scratch: &Scratch, shared: &Shared<'_>, sums: &mut [f32], states: &mut [[f32; 2]]) {
    let dim = shared.value_dim;
    for query in 0..seen.task.queries() {
        if seen.sees_some(query) {
            let [greatest, total] = states[query];
            let mut merged = Merged { greatest, total };
            let part = &scratch.part[query * shared.width()..][..dim];
            merged.merge(scratch.states[query], &mut sums[query * dim..][..dim], part);
            states[query] = [merged.greatest, merged.total];
        }
    }
}

/// Converts the first `len` scores into exp(score - greatest).
#[inline(always)]
fn softmax<L: Lanes>(scores: &mut [f32], len: usize) -> Merged {
    // The last vector is padded with values far below every score, whose weights vanish beside the 1 of the greatest score.
    let padded = len.next_multiple_of(LANES);
    scores[len..padded].fill(f32::MIN);
    let (vectors, _) = scores[..padded].as_chunks_mut::<LANES>();
    let mut greatest = L::splat(f32::MIN);
    for vector in vectors.iter() {
        greatest = greatest.max(L::load(vector));
    }
    let greatest = greatest.greatest();
    let mut total = L::splat(0.0);
    for vector in vectors.iter_mut() {
        let p = L::load(vector).add(L::splat(-greatest)).exp();
        total = total.add(p);
        p.store(vector);
    }
    Merged { greatest, total: total.sum() }
}
