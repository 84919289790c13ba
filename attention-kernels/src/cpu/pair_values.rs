//! Weighted sums of the values of a partition in products of bfloat16 pairs ([`simd::pairs`]), with a column in each
//! lane.
//!
//! ```text
//!                 64 columns of v[2j], v[2j+1]      Σ[q][64]   in registers, q up to 6
//!   tokens 0, 1   v0v1 v0v1 v0v1 …              × p[q][0..2]
//!   tokens 2, 3   v2v3 v2v3 v2v3 …              × p[q][2..4]   …
//! ```
//!
//! A cache in pairs has its values in this order. Values in rows are first put
//! into it.
//!
//! **Order of sums.** Each sum adds pairs of tokens in the order of the tokens; pairs begin at even tokens. If a query sees only
//! one token of a pair, at an end of its range, the weight and the value of the other are zero, whatever is stored there.

// Loops over registers are most readable with an index that several arrays share.
#![allow(clippy::needless_range_loop)]

use std::marker::PhantomData;
use std::ops::Range;

use simd::pairs::{PairLanes, Pairs, round_row};
use simd::{Isa, LANES, Lanes, prefetch};

use super::stored::{Bf16, Halves, Slot, offsets, panel_offset};
use super::tile::{PANELS, PairPanels, Put, SCORES, Scratch, Seen, Shared, Tile, panels};
use crate::shape::PARTITION;

/// Pairs of tokens of a partition: the distance between the weights of two queries.
pub(super) const WEIGHTS: usize = PARTITION / 2;

/// Pairs of tokens of a panel.
pub(super) const PAIRS: usize = LANES / 2;

/// Values of a tile.
#[derive(Clone, Copy)]
struct Values<'a> {
    /// Of each panel that is read, `[PAIRS, vectors]`.
    panels: PairPanels<'a>,
    /// Vectors of sixteen columns.
    vectors: usize,
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
    simd::dispatch_pairs!(isa, sum_tiles(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch));
}

#[inline(always)]
fn sum_tiles<D: PairLanes>(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    let (task, width) = (seen.task, shared.width());
    let Scratch { part, pairs, weights, .. } = scratch;
    part[..task.queries() * width].fill(0.0);
    for offset in seen.tiles() {
        let Some(tile) = seen.tile(offset, shared.shape.block_size) else { continue };
        let vectors = width / LANES;
        let space = &mut pairs[..PANELS * PAIRS * vectors];
        let panels = value_panels::<D>((shared, seen, &tile), space);
        let (asking, values) = (&Values { panels, vectors }, &Values { panels: panels.again(), vectors });
        let weights = &weights[offset / 2..];
        let everyone = tile.part(seen, seen.by(task.rows - 1).start..seen.by(0).end) == tile.tokens;
        let mut first = 0;
        while first < task.queries() {
            let values = if first == 0 { asking } else { values };
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
            for i in 0..if everyone { 1 } else { 2 * count + 1 } {
                let (queries, tokens) = match everyone {
                    true => (first..first + count, tile.tokens.clone()),
                    false => part_of(seen, &tile, first..first + count, i),
                };
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

/// Returns the values of a tile: in place, or in `space`, `[PANELS, PAIRS, width / LANES]`.
#[inline(always)]
pub(super) fn value_panels<'a, D: PairLanes>(
    (shared, seen, tile): (&Shared<'a>, &Seen<'_>, &Tile),
    space: &'a mut [Pairs],
) -> PairPanels<'a> {
    let vectors = shared.width() / LANES;
    panels::<InPairs<D>>((shared, seen, tile), 1, PAIRS * vectors, space)
}

struct InPairs<D>(PhantomData<D>);

impl<D: PairLanes> Put for InPairs<D> {
    #[inline(always)]
    fn put(shared: &Shared<'_>, seen: &Seen<'_>, halves: Halves<'_>, slots: &[Slot; LANES], to: &mut [Pairs]) {
        for (lines, slots) in to.chunks_exact_mut(shared.width() / LANES).zip(slots.as_chunks().0) {
            match halves {
                Halves::Rows([_, values]) => interleave::<D>(shared, seen, values, slots, lines),
                Halves::Pairs([_, values]) => gather(shared, seen, values, slots, lines),
            }
        }
    }
}

/// Returns part `i` of what some queries add of a tile, and the queries that add it: the tokens before the pairs that all of them
/// see, query by query; then these pairs, for all queries at once; then the tokens after them, query by query.
fn part_of(seen: &Seen<'_>, tile: &Tile, queries: Range<usize>, i: usize) -> (Range<usize>, Range<usize>) {
    let (group, count) = (seen.task.group, queries.len());
    let start = seen.by((queries.end - 1) / group).start.next_multiple_of(2);
    let common = start..(seen.by(queries.start / group).end / 2 * 2).max(start);
    if i == count {
        return (queries, tile.part(seen, common));
    }
    let query = if i < count { queries.start + i } else { queries.start + i - count - 1 };
    let mine = seen.by(query / group);
    let own = if i < count { mine.start..mine.end.min(common.start) } else { common.end..mine.end };
    (query..query + 1, tile.part(seen, own))
}

/// Collects the values of two tokens of a cache in pairs.
#[inline(always)]
fn gather(shared: &Shared<'_>, seen: &Seen<'_>, values: &[Pairs], slots: &[Slot; 2], to: &mut [Pairs]) {
    let vectors = to.len();
    let half = |slot: Slot, vector: usize, lane: usize| {
        let (first, at) = panel_offset(&shared.shape, slot, seen.task.kv_head);
        values[first + at / 2 * vectors + vector].0[lane] >> (at % 2 * 16) & 0xffff
    };
    for (vector, line) in to.iter_mut().enumerate() {
        for (lane, pair) in line.0.iter_mut().enumerate() {
            *pair = half(slots[0], vector, lane) | half(slots[1], vector, lane) << 16;
        }
    }
}

/// Pairs up the values of two tokens of a cache in rows. Of the last vector, nobody reads the columns past those of a value.
#[inline(always)]
fn interleave<D: PairLanes>(shared: &Shared<'_>, seen: &Seen<'_>, values: &[u16], slots: &[Slot; 2], to: &mut [Pairs]) {
    let [(even, even_rest), (odd, odd_rest)] = slots.map(|slot| {
        values[offsets::<Bf16>(&shared.shape, slot, seen.task.kv_head).0..][..shared.value_dim].as_chunks()
    });
    let (whole, last) = to.split_at_mut(even.len());
    for (to, (even, odd)) in whole.iter_mut().zip(even.iter().zip(odd)) {
        D::interleave(even, odd, to);
    }
    if let [last] = last {
        for (to, (even, odd)) in last.0.iter_mut().zip(even_rest.iter().zip(odd_rest)) {
            *to = u32::from(*even) | u32::from(*odd) << 16;
        }
    }
}

/// Adds the weighted values of some tokens of a tile to the sums of `R` queries, which see no token beside them in their pairs.
#[inline(always)]
fn add_weighted<D: PairLanes, const R: usize>(
    values: &Values<'_>,
    tokens: Range<usize>,
    first: usize,
    weights: &[u32],
    part: &mut [f32],
) {
    if tokens.is_empty() {
        return;
    }
    let width = values.vectors * LANES;
    let part = &mut part[first * width..][..R * width];
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

/// The part of [`add_weighted`] for `C` vectors of the head. Returns C.
#[inline(always)]
fn columns<D: PairLanes, const R: usize, const C: usize>(
    values: &Values<'_>,
    tokens: Range<usize>,
    weights: &[u32],
    part: &mut [f32],
    at: usize,
) -> usize {
    if tokens.start % 2 == 1 {
        half_pair::<D, R, C>(values, tokens.start / 2, 0xffff_0000, weights, part, at);
    }
    whole_pairs::<D, R, C>(values, tokens.start.div_ceil(2)..tokens.end / 2, weights, part, at);
    if tokens.end % 2 == 1 {
        half_pair::<D, R, C>(values, tokens.end / 2, 0x0000_ffff, weights, part, at);
    }
    C
}

/// Adds some pairs of tokens. The sums stay in registers.
#[inline(always)]
fn whole_pairs<D: PairLanes, const R: usize, const C: usize>(
    &Values { panels, vectors }: &Values<'_>,
    pairs: Range<usize>,
    weights: &[u32],
    part: &mut [f32],
    at: usize,
) {
    let mut sums = load_sums::<D, R, C>(part, vectors, at);
    for (i, (panel, ahead)) in panels.lines.iter().zip(panels.ahead).enumerate() {
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
    store_sums::<D, R, C>(sums, part, vectors, at);
}

/// Adds a pair of tokens of whose values only those in `mask` count.
#[inline(always)]
fn half_pair<D: PairLanes, const R: usize, const C: usize>(
    &Values { panels, vectors }: &Values<'_>,
    pair: usize,
    mask: u32,
    weights: &[u32],
    part: &mut [f32],
    at: usize,
) {
    let lines = &panels.lines[pair / PAIRS][pair % PAIRS * vectors + at..][..C];
    let mut masked = [Pairs::ZERO; C];
    for (masked, line) in masked.iter_mut().zip(lines) {
        masked.0 = line.0.map(|pair| pair & mask);
    }
    let sums = load_sums::<D, R, C>(part, vectors, at);
    let sums = add::<D, R, C>(sums, &masked, weights_of(weights, pair..pair + 1), 0);
    store_sums::<D, R, C>(sums, part, vectors, at);
}

/// Loads `C` vectors of the sums of `R` queries.
#[inline(always)]
fn load_sums<D: PairLanes, const R: usize, const C: usize>(
    part: &[f32],
    vectors: usize,
    at: usize,
) -> [[D::Floats; C]; R] {
    let mut sums = [[D::Floats::splat(0.0); C]; R];
    for r in 0..R {
        let from = &part.as_chunks::<LANES>().0[r * vectors + at..][..C];
        for c in 0..C {
            sums[r][c] = D::Floats::load(&from[c]);
        }
    }
    sums
}

/// The reverse of [`load_sums`]. A loop that does nothing else is unrolled, so that the sums are in registers before it.
#[inline(always)]
fn store_sums<D: PairLanes, const R: usize, const C: usize>(
    sums: [[D::Floats; C]; R],
    part: &mut [f32],
    vectors: usize,
    at: usize,
) {
    for r in 0..R {
        let to = &mut part.as_chunks_mut::<LANES>().0[r * vectors + at..][..C];
        for c in 0..C {
            sums[r][c].store(&mut to[c]);
        }
    }
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
