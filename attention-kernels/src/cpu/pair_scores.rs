//! Scores of a partition in products of bfloat16 pairs ([`simd::pairs`]), with a token in each lane.
//!
//! ```text
//! 16 keys, transposed     k[0..2] of 16 tokens   × q[0][0..2], q[1][0..2] …
//!                         k[2..4] of 16 tokens   × q[0][2..4], …
//! ```
//!
//! A cache in pairs has its panels in this order. Keys in rows are first put
//! into it.
//!
//! **Order of sums.** A score is one running sum over the pairs of the head in their order, in decode and in prefill.

// Loops over registers are most readable with an index that several arrays share.
#![allow(clippy::needless_range_loop)]

use std::marker::PhantomData;
use std::ops::Range;

use simd::pairs::{PairLanes, Pairs, round_row};
use simd::{Isa, LANES, Lanes, prefetch};

use super::stored::{Bf16, Halves, Slot, offsets, panel_offset};
use super::tile::{PANELS, PairPanels, Put, SCORES, Scratch, Seen, Shared, Tile, panels};

/// Rounds the queries of a task.
pub(super) fn round_all(isa: Isa, shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    simd::dispatch_pairs!(isa, round_queries(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch));
}

#[inline(always)]
fn round_queries<D: PairLanes>(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    let (task, dim) = (seen.task, shared.shape.head_dim);
    for (query, to) in scratch.queries.chunks_exact_mut(dim.div_ceil(2)).take(task.queries()).enumerate() {
        round_row::<D>(task.query(query, dim), to);
    }
}

/// Computes `scores[query][token - first] = scale * q·k` for all tokens that some row sees in a partition. Also fills some
/// further entries of whole tiles.
pub(super) fn score_all(isa: Isa, shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    simd::dispatch_pairs!(isa, score_tiles(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch));
}

#[inline(always)]
fn score_tiles<D: PairLanes>(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    let (pairs, queries) = (shared.shape.head_dim.div_ceil(2), seen.task.queries());
    let Scratch { scores, pairs: space, queries: rounded, .. } = scratch;
    for offset in seen.tiles() {
        let Some(tile) = &seen.tile(offset, shared.shape.block_size) else { continue };
        let keys = key_panels::<D>((shared, seen, tile), &mut space[..PANELS * pairs]);
        let asking = &Panels { keys, queries: rounded, pairs, scale: seen.task.scale };
        let task = &Panels { keys: keys.again(), ..*asking };
        let mut first = 0;
        while first < queries {
            let scores = &mut scores[first * SCORES + offset..];
            let task = if first == 0 { asking } else { task };
            first += match queries - first {
                6.. if D::Floats::MANY => score::<D, 6>(task, first, tile.panels(), scores),
                3.. if D::Floats::MANY => score::<D, 3>(task, first, tile.panels(), scores),
                2 if D::Floats::MANY => score::<D, 2>(task, first, tile.panels(), scores),
                _ => score::<D, 1>(task, first, tile.panels(), scores),
            };
        }
    }
}

/// Returns the keys of a tile: in place, or in `space`, `[PANELS, head_dim / 2]`.
#[inline(always)]
pub(super) fn key_panels<'a, D: PairLanes>(
    (shared, seen, tile): (&Shared<'a>, &Seen<'_>, &Tile),
    space: &'a mut [Pairs],
) -> PairPanels<'a> {
    let pairs = shared.shape.head_dim.div_ceil(2);
    panels::<Keys<D>>((shared, seen, tile), 0, pairs, space)
}

struct Keys<D>(PhantomData<D>);

impl<D: PairLanes> Put for Keys<D> {
    #[inline(always)]
    fn put(shared: &Shared<'_>, seen: &Seen<'_>, halves: Halves<'_>, slots: &[Slot; LANES], to: &mut [Pairs]) {
        match halves {
            Halves::Rows([keys, _]) => transpose::<D>(shared, seen, keys, slots, to),
            Halves::Pairs([keys, _]) => gather(shared, seen, keys, slots, to),
        }
    }
}

/// The operands of a tile.
struct Panels<'a> {
    /// `[pairs]` each.
    keys: PairPanels<'a>,
    /// `[queries, pairs]`.
    queries: &'a [u32],
    /// Pairs of a head.
    pairs: usize,
    scale: f32,
}

/// Computes the scores of `R` queries, from `first` on, with the panels of a tile. Returns R. Six queries have 24 vectors of sums
/// with a whole tile, which leaves 8 of the 32 registers for operands.
#[inline(always)]
fn score<D: PairLanes, const R: usize>(
    task: &Panels<'_>,
    first: usize,
    panels: Range<usize>,
    scores: &mut [f32],
) -> usize {
    let mut rows = [&task.queries[..0]; R];
    for r in 0..R {
        rows[r] = &task.queries[(first + r) * task.pairs..][..task.pairs];
    }
    if D::Floats::MANY && panels.len() > 1 {
        score_panels::<D, R, PANELS>((task.keys.lines, task.keys.ahead), rows, task.scale, scores);
    } else {
        for panel in panels {
            let keys = ([task.keys.lines[panel]], [task.keys.ahead[panel]]);
            score_panels::<D, R, 1>(keys, rows, task.scale, &mut scores[panel * LANES..]);
        }
    }
    R
}

/// Collects the keys of sixteen slots of a cache in pairs.
#[inline(always)]
fn gather(shared: &Shared<'_>, seen: &Seen<'_>, keys: &[Pairs], slots: &[Slot; LANES], to: &mut [Pairs]) {
    for (i, slot) in slots.iter().enumerate() {
        let (first, at) = panel_offset(&shared.shape, *slot, seen.task.kv_head);
        for (to, line) in to.iter_mut().zip(&keys[first..]) {
            to.0[i] = line.0[at];
        }
    }
}

/// Transposes the keys of sixteen slots.
#[inline(always)]
fn transpose<D: PairLanes>(
    shared: &Shared<'_>,
    seen: &Seen<'_>,
    keys: &[u16],
    slots: &[Slot; LANES],
    to: &mut [Pairs],
) {
    let shape = &shared.shape;
    let mut rows = [&keys[..0]; LANES];
    for (row, slot) in rows.iter_mut().zip(slots) {
        *row = &keys[offsets::<Bf16>(shape, *slot, seen.task.kv_head).0..][..shape.head_dim];
    }
    let (squares, rest) = to.as_chunks_mut::<LANES>();
    let done = squares.len();
    for (i, square) in squares.iter_mut().enumerate() {
        // An odd head ends in the middle of a pair.
        if (i + 1) * 2 * LANES > shape.head_dim {
            scalar(&rows, i * LANES, square);
            continue;
        }
        let mut columns = [&[0; 2 * LANES]; LANES];
        for (columns, row) in columns.iter_mut().zip(rows) {
            *columns = &row.as_chunks().0[i];
        }
        D::transpose(columns, square);
    }
    scalar(&rows, done * LANES, rest);
}

/// Transposes pairs from `first` on, one at a time.
#[inline(always)]
fn scalar(rows: &[&[u16]; LANES], first: usize, to: &mut [Pairs]) {
    for (i, line) in to.iter_mut().enumerate() {
        for (pair, row) in line.0.iter_mut().zip(rows) {
            let column = |d: usize| row.get(d).copied().map_or(0, u32::from);
            *pair = column(2 * (first + i)) | column(2 * (first + i) + 1) << 16;
        }
    }
}

/// Computes the scores of `R` queries with `P` panels, `[P, pairs]`.
#[inline(always)]
fn score_panels<D: PairLanes, const R: usize, const P: usize>(
    (keys, ahead): ([&[Pairs]; P], [*const Pairs; P]),
    queries: [&[u32]; R],
    scale: f32,
    scores: &mut [f32],
) {
    let pairs = queries[0].len();
    let (panels, queries) = (keys.map(|keys| &keys[..pairs]), queries.map(|query| &query[..pairs]));
    let mut sums = [[D::Floats::splat(0.0); P]; R];
    for i in 0..pairs {
        for p in 0..P {
            prefetch(ahead[p].wrapping_add(i).cast());
        }
        let mut k = [D::splat(0); P];
        for p in 0..P {
            k[p] = D::load(&panels[p][i]);
        }
        for r in 0..R {
            let q = D::splat(queries[r][i]);
            for p in 0..P {
                sums[r][p] = D::dot(sums[r][p], q, k[p]);
            }
        }
    }
    for r in 0..R {
        let to = &mut scores[r * SCORES..].as_chunks_mut::<LANES>().0[..P];
        for p in 0..P {
            sums[r][p].mul(D::Floats::splat(scale)).store(&mut to[p]);
        }
    }
}
