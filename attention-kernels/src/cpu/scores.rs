//! Scores of a partition: products of queries and keys, computed in one of two ways with the same bits.
//!
//! ```text
//! few queries     a key as stored       × q[0], q[1] …   Σ over lanes at the end      bound by reading keys
//! many queries    16 keys, transposed    × q[0][d] …      a token in each lane         bound by arithmetic
//! ```
//!
//! In decode there are few queries: each key is read once, and its products with all queries of the group stay in registers
//! until their lanes are summed. In prefill there are many: then transposing keys costs little compared with what it saves.
//!
//! **Order of sums.** With the head in vectors of sixteen columns a score is sixteen fused sums over the vectors, one for
//! each lane, added in the order of [`Lanes::sum`] (16 → 8 → 4 → 2 → 1), followed by the columns that fill no vector. With
//! a token in each lane the sixteen sums are computed one after the other and added in the same tree.

// Loops over registers are most readable with an index that several arrays share.
#![allow(clippy::needless_range_loop)]

use simd::{Ahead, Isa, LANES, Lanes};

use super::tile::{SCORES, Scratch, Seen, Shared, Tile, ahead, by_queries, scale_tokens};

/// Number of queries for which the vectors of a key are loaded once.
const OF_A_KEY: usize = 4;

/// Number of queries for which transposed keys are loaded once. Six sums for two panels of tokens, and the pending sums of
/// the tree, just fit the registers of AVX-512.
const OF_A_PANEL: usize = 3;

/// Keys are transposed if there are at least this many queries.
const TRANSPOSE_FROM: usize = 12;

/// Computes `scores[query][token - first] = scale * q·k` for all tokens that some row sees in a partition. Also fills some
/// further entries: those up to whole panels, and those that only other rows see.
pub(super) fn score_all(isa: Isa, shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    simd::dispatch!(isa, score_tiles(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch));
}

#[inline(always)]
fn score_tiles<L: Lanes>(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    let Scratch { scores, tile: scratch, .. } = scratch;
    for offset in seen.tiles() {
        let Some(tile) = &seen.tile(offset, shared.shape.block_size) else { continue };
        if seen.task.queries() < TRANSPOSE_FROM {
            by_key::<L>(shared, seen, tile, scratch, &mut scores[offset..]);
        } else {
            by_panel::<L>(shared, seen, tile, scratch, &mut scores[offset..]);
        }
        scale_tokens(shared, seen.task, 0, tile, scores);
    }
}

/// Takes runs of tokens of one block, without transposing.
#[inline(always)]
fn by_key<L: Lanes>(shared: &Shared<'_>, seen: &Seen<'_>, tile: &Tile, scratch: &mut [f32], scores: &mut [f32]) {
    let (task, shape) = (seen.task, &shared.shape);
    let mut token = tile.tokens.start;
    while token < tile.tokens.end {
        if tile.read >> token & 1 == 0 {
            token += 1;
            continue;
        }
        let slot = tile.slots[token];
        let run = LANES.min(tile.tokens.end - token).min(slot.rows_left(shape.block_size));
        let mut next = ahead(shared, seen, 0, tile.offset + token);
        let keys = shared.pages.run::<L>(0, shape, slot, task.kv_head, run, scratch);
        by_queries!(L, task.queries(), 1 2 3 .. OF_A_KEY, |first, R| {
            let mut queries = [&task.query[..0]; R];
            for r in 0..R {
                queries[r] = task.query(first + r, shape.head_dim);
            }
            dots::<L, R>(keys, queries, task.scale, &mut scores[first * SCORES + token..], next);
            next = Ahead::NONE;
        });
        token += run;
    }
}

/// Computes the scores of `R` queries with some keys, and prefetches what is read next.
#[inline(always)]
fn dots<L: Lanes, const R: usize>(keys: &[f32], queries: [&[f32]; R], scale: f32, scores: &mut [f32], next: Ahead) {
    let dim = queries[0].len();
    let (tokens, mut j) = (keys.len() / dim, 0);
    if L::MANY {
        while j + 4 <= tokens {
            next.ask(j, j + 4);
            some_dots::<L, R, 4>(&keys[j * dim..], queries, scale, &mut scores[j..]);
            j += 4;
        }
    }
    while j < tokens {
        next.ask(j, j + 1);
        some_dots::<L, R, 1>(&keys[j * dim..], queries, scale, &mut scores[j..]);
        j += 1;
    }
}

/// The part of [`dots`] for `K` keys, whose sums stay in registers.
#[inline(always)]
fn some_dots<L: Lanes, const R: usize, const K: usize>(
    keys: &[f32],
    queries: [&[f32]; R],
    scale: f32,
    scores: &mut [f32],
) {
    let dim = queries[0].len();
    let vectors = dim / LANES;
    let keys: [&[f32]; K] = std::array::from_fn(|k| &keys[k * dim..][..dim]);
    let key_vectors = keys.map(|key| &key.as_chunks::<LANES>().0[..vectors]);
    let queries = queries.map(|query| &query[..dim]);
    let query_vectors = queries.map(|query| &query.as_chunks::<LANES>().0[..vectors]);
    let mut sums = [[L::splat(0.0); K]; R];
    for i in 0..vectors {
        let mut k = [L::splat(0.0); K];
        for n in 0..K {
            k[n] = L::load(&key_vectors[n][i]);
        }
        for r in 0..R {
            let q = L::load(&query_vectors[r][i]);
            for n in 0..K {
                sums[r][n] = q.mul_add(k[n], sums[r][n]);
            }
        }
    }
    for r in 0..R {
        let mut dots = [0.0; K];
        match (sums[r].first_chunk::<4>(), dots.first_chunk_mut::<4>()) {
            (Some(sums), Some(dots)) => *dots = L::sums(*sums),
            _ => {
                for n in 0..K {
                    dots[n] = sums[r][n].sum();
                }
            }
        }
        for n in 0..K {
            for d in vectors * LANES..dim {
                dots[n] += queries[r][d] * keys[n][d];
            }
            scores[r * SCORES + n] = scale * dots[n];
        }
    }
}

/// Transposes all keys of a tile, then takes all queries.
#[inline(always)]
fn by_panel<L: Lanes>(shared: &Shared<'_>, seen: &Seen<'_>, tile: &Tile, scratch: &mut [f32], scores: &mut [f32]) {
    let (task, shape) = (seen.task, &shared.shape);
    let (dim, keys) = (shape.head_dim, scratch.as_chunks_mut::<LANES>().0);
    for panel in tile.panels() {
        if !tile.reads_panel(panel) {
            continue;
        }
        let slots = &tile.slots.as_chunks().0[panel];
        ahead(shared, seen, 0, tile.offset + panel * LANES).ask(0, LANES);
        shared.pages.transposed::<L>(0, shape, slots, task.kv_head, &mut keys[panel * dim..][..dim]);
    }
    by_queries!(L, task.queries(), 1 2 .. OF_A_PANEL, |first, R| {
        let mut queries = [&task.query[..0]; R];
        for r in 0..R {
            queries[r] = task.query(first + r, dim);
        }
        let (mut panel, end) = (tile.panels().start, tile.panels().end);
        if L::MANY {
            while panel + 2 <= end {
                let scores = &mut scores[first * SCORES + panel * LANES..];
                score_panels::<L, R, 2>(&keys[panel * dim..], queries, task.scale, scores);
                panel += 2;
            }
        }
        while panel < end {
            let scores = &mut scores[first * SCORES + panel * LANES..];
            score_panels::<L, R, 1>(&keys[panel * dim..], queries, task.scale, scores);
            panel += 1;
        }
    });
}

/// Sums for `R` queries and `P` panels.
type Sums<L, const R: usize, const P: usize> = [[L; P]; R];

/// Computes the scores of `R` queries with `P` panels, `[P, dim, LANES]`.
#[inline(always)]
fn score_panels<L: Lanes, const R: usize, const P: usize>(
    keys: &[[f32; LANES]],
    queries: [&[f32]; R],
    scale: f32,
    scores: &mut [f32],
) {
    let dim = queries[0].len();
    let mut panels = [&keys[..0]; P];
    for p in 0..P {
        panels[p] = &keys[p * dim..][..dim];
    }
    let queries = queries.map(|query| &query[..dim]);
    let mut sums: Sums<L, R, P> = add(
        add(four_lanes(&panels, &queries, 0), four_lanes(&panels, &queries, 2)),
        add(four_lanes(&panels, &queries, 1), four_lanes(&panels, &queries, 3)),
    );
    for d in dim / LANES * LANES..dim {
        for r in 0..R {
            for p in 0..P {
                sums[r][p] = sums[r][p].add(L::splat(queries[r][d]).mul(L::load(&panels[p][d])));
            }
        }
    }
    for r in 0..R {
        let to = &mut scores[r * SCORES..].as_chunks_mut::<LANES>().0[..P];
        for p in 0..P {
            sums[r][p].mul(L::splat(scale)).store(&mut to[p]);
        }
    }
}

/// Returns the sums of the lanes `lane`, `lane + 4`, `lane + 8` and `lane + 12` of [`Lanes::sum`].
#[inline(always)]
fn four_lanes<L: Lanes, const R: usize, const P: usize>(
    panels: &[&[[f32; LANES]]; P],
    queries: &[&[f32]; R],
    lane: usize,
) -> Sums<L, R, P> {
    add(
        add(one_lane(panels, queries, lane), one_lane(panels, queries, lane + 8)),
        add(one_lane(panels, queries, lane + 4), one_lane(panels, queries, lane + 12)),
    )
}

/// Returns the sums of one lane: of one column in every vector.
#[inline(always)]
fn one_lane<L: Lanes, const R: usize, const P: usize>(
    panels: &[&[[f32; LANES]]; P],
    queries: &[&[f32]; R],
    lane: usize,
) -> Sums<L, R, P> {
    let mut sums = [[L::splat(0.0); P]; R];
    for i in 0..queries[0].len() / LANES {
        let d = i * LANES + lane;
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
    sums
}

#[inline(always)]
fn add<L: Lanes, const R: usize, const P: usize>(a: Sums<L, R, P>, b: Sums<L, R, P>) -> Sums<L, R, P> {
    let mut sums = a;
    for r in 0..R {
        for p in 0..P {
            sums[r][p] = a[r][p].add(b[r][p]);
        }
    }
    sums
}
