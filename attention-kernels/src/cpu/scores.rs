//! Scores of a partition: products of queries with keys, a token in each lane.
//!
//! ```text
//!              64 keys, turned round        Σ[q][64]   in registers, q up to 6
//!   d = 0      k0 k1 k2 …            × q[0]
//!   d = 1      k0 k1 k2 …            × q[1]   …
//! ```
//!
//! So no sum runs over lanes, and a number of the keys is loaded once for six queries. A score is the sum of one fused sum for
//! each [`PIECE`] of d, in order: with heads of 256 a single one would lose twice as much.

// Constant loops over registers read best with the index that several arrays share.
#![allow(clippy::needless_range_loop)]

use device::simd::{LANES, Lanes};

use super::kernel::{SCORES, Scratch, Seen, Shared, Tile, ahead, by_queries, scale_tokens};

/// Products that are summed one after the other.
const PIECE: usize = 64;

/// `scores[query][token - first] = scale * q·k` for all that is seen of a partition by some row, and some more: up to whole
/// panels, and what other rows see.
#[inline(always)]
pub(super) fn score_all<L: Lanes>(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    let (task, shape) = (seen.task, &shared.shape);
    let (dim, Scratch { scores, tile: keys, .. }) = (shape.head_dim, scratch);
    let keys = keys.as_chunks_mut::<LANES>().0;
    for offset in seen.tiles() {
        let tile = seen.tile(offset, shape.block_size);
        for panel in tile.panels() {
            let next = ahead(shared, seen, 0, tile.offset / LANES + panel);
            let slots = &tile.slots.as_chunks().0[panel];
            shared.pages.turned::<L>(0, shape, slots, task.kv_head, &mut keys[panel * dim..][..dim], next);
        }
        by_queries!(task.queries(), |first, R| {
            let mut queries = [&task.query[..0]; R];
            for r in 0..R {
                queries[r] = task.query(first + r, dim);
            }
            score_tile::<L, R>(keys, &tile, queries, task.scale, &mut scores[first * SCORES + tile.offset..])
        });
        scale_tokens(shared, task, 0, &tile, scores);
    }
}

/// The scores of `R` queries with the keys of a tile.
#[inline(always)]
fn score_tile<L: Lanes, const R: usize>(
    keys: &[[f32; LANES]],
    tile: &Tile,
    queries: [&[f32]; R],
    scale: f32,
    scores: &mut [f32],
) {
    let (mut panel, end) = (tile.panels().start, tile.panels().end);
    if L::MANY {
        while panel + 4 <= end {
            score_panels::<L, R, 4>(keys, queries, scale, scores, panel);
            panel += 4;
        }
        while panel + 2 <= end {
            score_panels::<L, R, 2>(keys, queries, scale, scores, panel);
            panel += 2;
        }
    }
    while panel < end {
        score_panels::<L, R, 1>(keys, queries, scale, scores, panel);
        panel += 1;
    }
}

/// The part of [`score_tile`] for `P` panels, whose sums stay in registers.
#[inline(always)]
fn score_panels<L: Lanes, const R: usize, const P: usize>(
    keys: &[[f32; LANES]],
    queries: [&[f32]; R],
    scale: f32,
    scores: &mut [f32],
    panel: usize,
) {
    let dim = queries[0].len();
    let mut panels = [&keys[..0]; P];
    for p in 0..P {
        panels[p] = &keys[(panel + p) * dim..][..dim];
    }
    let queries = queries.map(|query| &query[..dim]);
    for first in (0..dim).step_by(PIECE) {
        let mut sums = [[L::splat(0.0); P]; R];
        for d in first..dim.min(first + PIECE) {
            let mut k = [L::splat(0.0); P];
            for p in 0..P {
                k[p] = L::load(&panels[p][d]);
            }
            for r in 0..R {
                let q = L::splat(queries[r][d]);
                for p in 0..P {
                    sums[r][p] = q.mul_add(k[p], sums[r][p]);
                }
            }
        }
        for r in 0..R {
            let to = &mut scores[r * SCORES + panel * LANES..].as_chunks_mut::<LANES>().0[..P];
            for p in 0..P {
                let sum = if first == 0 { sums[r][p] } else { sums[r][p].add(L::load(&to[p])) };
                let last = first + PIECE >= dim;
                (if last { sum.mul(L::splat(scale)) } else { sum }).store(&mut to[p]);
            }
        }
    }
}
// 
