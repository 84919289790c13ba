//! Weighted sums of the values of a partition in products of bfloat16 pairs ([`device::simd::pairs`]), with a column in each
//! lane.
//!
//! ```text
//!                 64 columns of v[2j], v[2j+1]      Σ[q][64]   in registers, q up to 6
//!   tokens 0, 1   v0v1 v0v1 v0v1 …              × p[q][0..2]
//!   tokens 2, 3   v2v3 v2v3 v2v3 …              × p[q][2..4]   …
//! ```
//!
//! A cache in pairs has its values in this order. Values in rows, and those of a tree whose tokens are not adjacent, are first put
//! into it.
//!
//! **Order of sums.** Each sum adds pairs of tokens in the order of the tokens; pairs begin at even tokens. If a query sees only
//! one token of a pair, at an end of its range, the weight and the value of the other are zero, whatever is stored there.

// Loops over registers are most readable with an index that several arrays share.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use device::Isa;
use device::simd::pairs::{PairLanes, Pairs, round_row};
use device::simd::{LANES, Lanes, prefetch};

use super::stored::{Bf16, Halves, Slot, place, place_in_pairs};
use super::tile::{PANELS, PairPanels, SCORES, Scratch, Seen, Shared, Tile, panels};
use crate::shape::PARTITION;

/// Pairs of tokens of a partition: the distance between the weights of two queries.
pub(super) const WEIGHTS: usize = PARTITION / 2;

/// Pairs of tokens of a panel.
const PAIRS: usize = LANES / 2;

/// Values of a tile.
#[derive(Clone, Copy)]
struct Values<'a> {
    /// Of each panel that is read, `[PAIRS, vectors]`.
    panels: PairPanels<'a>,
    /// Vectors of sixteen columns.
    vectors: usize,
    dim: usize,
}

/// Rounds the weights that each query has for the tokens that it sees.
#[inline(always)]
pub(super) fn round_weights<D: PairLanes>(seen: &Seen<'_>, scratch: &mut Scratch) {
    let first = seen.first();
    let Scratch { scores, weights, .. } = scratch;
    for query in 0..seen.task.queries() {
        let (scores, weights) = (&mut scores[query * SCORES..][..SCORES], &mut weights[query * WEIGHTS..][..WEIGHTS]);
        if seen.sparse.is_some() {
            for run in seen.runs(query) {
                round_run::<D>(run.start - first..run.end - first, scores, weights);
            }
        } else {
            let seen = seen.by(query / seen.task.group);
            round_run::<D>(seen.start - first..seen.end - first, scores, weights);
        }
    }
}

/// Rounds the weights of some tokens; what is beside them in their pairs has none.
#[inline(always)]
fn round_run<D: PairLanes>(run: Range<usize>, weights: &mut [f32], to: &mut [u32]) {
    if run.start % 2 == 1 {
        weights[run.start - 1] = 0.0;
    }
    if run.end % 2 == 1 {
        weights[run.end] = 0.0;
    }
    let pairs = run.start / 2..run.end.div_ceil(2);
    round_row::<D>(&weights[2 * pairs.start..2 * pairs.end], &mut to[pairs]);
}

/// Computes `part[query] = Σ_j p[query][j] * v[j]` over the tokens that each query sees in a partition, in the order of j.
/// Pairs that a group of queries sees in common are added for the group; those before and after query by query.
pub(super) fn sum_all(isa: Isa, shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    device::dispatch_pairs!(isa, sum_tiles(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch));
}

#[inline(always)]
fn sum_tiles<D: PairLanes>(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    let (task, dim) = (seen.task, shared.value_dim);
    let Scratch { part, pairs, weights, .. } = scratch;
    part[..task.queries() * dim].fill(0.0);
    for offset in seen.tiles() {
        let Some(tile) = seen.tile(offset, shared.shape.block_size) else { continue };
        let vectors = dim.div_ceil(LANES);
        let space = &mut pairs[..PANELS * PAIRS * vectors];
        let panels = panels((shared, seen, &tile), 1, PAIRS * vectors, space, |halves, slots, to| {
            for (lines, slots) in to.chunks_exact_mut(vectors).zip(slots.as_chunks().0) {
                match halves {
                    Halves::Rows([_, values]) => interleave::<D>(shared, seen, values, slots, lines),
                    Halves::Pairs([_, values]) => gather(shared, seen, values, slots, lines),
                }
            }
        });
        let weights = &weights[offset / 2..];
        let mut first = 0;
        while first < task.queries() {
            let values = Values { panels: if first == 0 { panels } else { panels.again() }, vectors, dim };
            if seen.sparse.is_some() {
                for run in seen.runs(first) {
                    add_weighted::<D, 1>(values, tile.part(seen, run), first, weights, part);
                }
                first += 1;
                continue;
            }
            let count = match (D::Floats::MANY, task.queries() - first) {
                (true, 6..) => 6,
                (true, 3..) => 3,
                (true, 2) => 2,
                _ => 1,
            };
            for (queries, tokens) in parts(seen, &tile, first..first + count) {
                let first = queries.start;
                match queries.len() {
                    6 => add_weighted::<D, 6>(values, tokens, first, weights, part),
                    3 => add_weighted::<D, 3>(values, tokens, first, weights, part),
                    2 => add_weighted::<D, 2>(values, tokens, first, weights, part),
                    _ => add_weighted::<D, 1>(values, tokens, first, weights, part),
                }
            }
            first += count;
        }
    }
}

/// Returns the tokens of a tile that each of some queries adds: those before the pairs that all of them see, query by query; then
/// these pairs, for all queries at once; then those after them.
fn parts(seen: &Seen<'_>, tile: &Tile, queries: Range<usize>) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let group = seen.task.group;
    // If all rows see all tokens, the ends of the tile are the same for all.
    let everyone = tile.part(seen, seen.by(seen.task.rows - 1).start..seen.by(0).end) == tile.tokens;
    let common = if everyone {
        seen.by(0)
    } else {
        let start = seen.by((queries.end - 1) / group).start.next_multiple_of(2);
        start..(seen.by(queries.start / group).end / 2 * 2).max(start)
    };
    let alone = if everyone { 0..0 } else { queries.clone() };
    let shared = if everyone { tile.tokens.clone() } else { tile.part(seen, common.clone()) };
    let before = alone.clone().map(move |query| (query, 0..common.start));
    let after = alone.map(move |query| (query, common.end..usize::MAX));
    let own = move |(query, within): (usize, Range<usize>)| {
        let mine = seen.by(query / group);
        (query..query + 1, tile.part(seen, mine.start.max(within.start)..mine.end.min(within.end)))
    };
    before.map(own).chain([(queries, shared)]).chain(after.map(own))
}

/// Collects the values of two tokens of a cache in pairs.
#[inline(always)]
fn gather(shared: &Shared<'_>, seen: &Seen<'_>, values: &[Pairs], slots: &[Slot; 2], to: &mut [Pairs]) {
    let vectors = to.len();
    let half = |slot: Slot, vector: usize, lane: usize| {
        let (first, at) = place_in_pairs(&shared.shape, slot, seen.task.kv_head);
        values[first + at / 2 * vectors + vector].0[lane] >> (at % 2 * 16) & 0xffff
    };
    for (vector, line) in to.iter_mut().enumerate() {
        for (lane, pair) in line.0.iter_mut().enumerate() {
            *pair = half(slots[0], vector, lane) | half(slots[1], vector, lane) << 16;
        }
    }
}

/// Pairs up the values of two tokens of a cache in rows.
#[inline(always)]
fn interleave<D: PairLanes>(shared: &Shared<'_>, seen: &Seen<'_>, values: &[u16], slots: &[Slot; 2], to: &mut [Pairs]) {
    let [(even, even_rest), (odd, odd_rest)] = slots
        .map(|slot| values[place::<Bf16>(&shared.shape, slot, seen.task.kv_head).0..][..shared.value_dim].as_chunks());
    let (whole, last) = to.split_at_mut(even.len());
    for (to, (even, odd)) in whole.iter_mut().zip(even.iter().zip(odd)) {
        D::interleave(even, odd, to);
    }
    if let [last] = last {
        last.0 = [0; LANES];
        for (to, (even, odd)) in last.0.iter_mut().zip(even_rest.iter().zip(odd_rest)) {
            *to = u32::from(*even) | u32::from(*odd) << 16;
        }
    }
}

/// Adds the weighted values of some tokens of a tile to the sums of `R` queries, which see no token beside them in their pairs.
#[inline(always)]
fn add_weighted<D: PairLanes, const R: usize>(
    values: Values<'_>,
    tokens: Range<usize>,
    first: usize,
    weights: &[u32],
    part: &mut [f32],
) {
    if tokens.is_empty() {
        return;
    }
    let part = &mut part[first * values.dim..][..R * values.dim];
    let weights = &weights[first * WEIGHTS..];
    let mut at = 0;
    while at < values.vectors {
        at += match values.vectors - at {
            4.. if D::Floats::MANY => columns::<D, R, 4>(values, tokens.clone(), weights, part, at),
            2.. if D::Floats::MANY => columns::<D, R, 2>(values, tokens.clone(), weights, part, at),
            _ => columns::<D, R, 1>(values, tokens.clone(), weights, part, at),
        };
    }
}

/// The part of [`add_weighted`] for `C` vectors of the head, whose sums stay in registers. Returns C.
#[inline(always)]
fn columns<D: PairLanes, const R: usize, const C: usize>(
    values: Values<'_>,
    tokens: Range<usize>,
    weights: &[u32],
    part: &mut [f32],
    at: usize,
) -> usize {
    let (dim, vectors) = (values.dim, values.vectors);
    let mut stored = [[[0.0; LANES]; C]; R];
    for r in 0..R {
        for c in 0..C {
            let from = vector(&mut part[r * dim..][..dim], at + c);
            stored[r][c][..from.len()].copy_from_slice(from);
        }
    }
    // Loops that do nothing else are unrolled, so that the sums stay in registers.
    let mut sums = [[D::Floats::splat(0.0); C]; R];
    for r in 0..R {
        for c in 0..C {
            sums[r][c] = D::Floats::load(&stored[r][c]);
        }
    }
    let pairs = tokens.start.div_ceil(2)..tokens.end / 2;
    // Lines of a pair of tokens of the tile.
    let lines_of = |pair: usize| &values.panels.lines[pair / PAIRS][pair % PAIRS * vectors + at..];
    if tokens.start % 2 == 1 {
        let pair = tokens.start / 2;
        let lines = masked::<C>(lines_of(pair), 0xffff_0000);
        sums = add::<D, R, C>(sums, &lines, weights_of(weights, pair..pair + 1), 0);
    }
    for (i, (panel, ahead)) in values.panels.lines.iter().zip(values.panels.ahead).enumerate() {
        let own = pairs.start.max(i * PAIRS)..pairs.end.min((i + 1) * PAIRS);
        if own.start < own.end {
            let first = own.start % PAIRS * vectors + at;
            let (panel, ahead, rows) = (&panel[first..], ahead.wrapping_add(first), weights_of(weights, own));
            for (i, lines) in panel.chunks(vectors).take(rows[0].len()).enumerate() {
                if let Some(lines) = lines.first_chunk() {
                    for c in 0..C {
                        prefetch(ahead.wrapping_add(i * vectors + c).cast());
                    }
                    sums = add::<D, R, C>(sums, lines, rows, i);
                }
            }
        }
    }
    if tokens.end % 2 == 1 {
        let pair = tokens.end / 2;
        let lines = masked::<C>(lines_of(pair), 0x0000_ffff);
        sums = add::<D, R, C>(sums, &lines, weights_of(weights, pair..pair + 1), 0);
    }
    for r in 0..R {
        for c in 0..C {
            sums[r][c].store(&mut stored[r][c]);
        }
    }
    for r in 0..R {
        for c in 0..C {
            let to = vector(&mut part[r * dim..][..dim], at + c);
            to.copy_from_slice(&stored[r][c][..to.len()]);
        }
    }
    C
}

/// Returns the weights of some pairs for each query.
#[inline(always)]
fn weights_of<const R: usize>(weights: &[u32], pairs: Range<usize>) -> [&[u32]; R] {
    let mut rows = [&weights[..0]; R];
    for r in 0..R {
        // All have this length, so no index into them is checked.
        rows[r] = &weights[r * WEIGHTS + pairs.start..][..pairs.end - pairs.start];
    }
    rows
}

/// Adds pair `i` of the weights.
#[inline(always)]
fn add<D: PairLanes, const R: usize, const C: usize>(
    mut sums: [[D::Floats; C]; R],
    lines: &[Pairs; C],
    weights: [&[u32]; R],
    i: usize,
) -> [[D::Floats; C]; R] {
    let mut v = [D::splat(0); C];
    for c in 0..C {
        v[c] = D::load(&lines[c]);
    }
    for r in 0..R {
        let p = D::splat(weights[r][i]);
        for c in 0..C {
            sums[r][c] = D::dot(sums[r][c], p, v[c]);
        }
    }
    sums
}

/// Returns values of which one token of the pair is zero.
#[inline(always)]
fn masked<const C: usize>(lines: &[Pairs], mask: u32) -> [Pairs; C] {
    let mut masked = [Pairs::ZERO; C];
    for (masked, line) in masked.iter_mut().zip(lines) {
        masked.0 = line.0.map(|pair| pair & mask);
    }
    masked
}

/// Returns vector `at` of a row; the last one may be shorter.
#[inline(always)]
fn vector(row: &mut [f32], at: usize) -> &mut [f32] {
    let rest = &mut row[at * LANES..];
    let len = rest.len().min(LANES);
    &mut rest[..len]
}
