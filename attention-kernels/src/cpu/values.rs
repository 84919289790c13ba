//! Weighted sums of the values of a partition, with a column in each lane.
//!
//! ```text
//!              64 columns of v[j]           Σ[q][64]   in registers, q up to 6
//!   j = 0      v0 v1 v2 …            × p[q][0]
//!   j = 1      v0 v1 v2 …            × p[q][1]   …
//! ```
//!
//! Each value is loaded once for six queries. Each sum adds fused terms in the order of the tokens.

// Loops over registers are most readable with an index that several arrays share.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use simd::{Ahead, Isa, LANES, Lanes};

use super::tile::{PANELS, SCORES, Scratch, Seen, Shared, TILE, ahead, by_queries, scale_tokens};

/// Number of queries whose sums are in registers together: six times four vectors leave enough registers for operands in
/// AVX-512, six times one (two registers) in AVX2.
const AT_ONCE: usize = 6;

/// The values of a tile. The row of token `j` starts at `starts[j]`.
#[derive(Clone, Copy)]
struct Values<'a> {
    floats: &'a [f32],
    starts: &'a [usize; TILE],
    dim: usize,
    /// [`Shared::width`].
    width: usize,
    /// What to prefetch with each panel.
    next: &'a [Ahead; PANELS],
}

impl<'a> Values<'a> {
    #[inline(always)]
    fn row(&self, token: usize) -> &'a [f32] {
        &self.floats[self.starts[token]..][..self.dim]
    }
}

/// Computes `part[query] = Σ_j p[query][j] * v[j]` over the tokens that each query sees in a partition, in the order of j.
/// Tokens that a group of queries sees in common are added for the group; those before and after query by query.
pub(super) fn sum_all(isa: Isa, shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    simd::dispatch!(isa, sum_tiles(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch));
}

#[inline(always)]
fn sum_tiles<L: Lanes>(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    let (task, shape) = (seen.task, &shared.shape);
    let (dim, Scratch { scores, part, tile: widened, .. }) = (shared.value_dim, scratch);
    part[..task.queries() * shared.width()].fill(0.0);
    for offset in seen.tiles() {
        let Some(tile) = seen.tile(offset, shape.block_size) else { continue };
        let mut starts = [0; TILE];
        let tokens = tile.tokens.clone();
        let slots = &tile.slots[tokens.clone()];
        let floats = shared.pages.rows::<L>(1, shape, slots, (task.kv_head, dim), widened, &mut starts[tokens]);
        scale_tokens(shared, task, 1, &tile, scores);
        let mut next = [Ahead::NONE; PANELS];
        for panel in tile.panels() {
            next[panel] = ahead(shared, seen, 1, tile.offset + panel * LANES);
        }
        let values = Values { floats, starts: &starts, dim, width: shared.width(), next: &[Ahead::NONE; PANELS] };
        let scores = &scores[tile.offset..];
        if seen.sparse.is_some() {
            sum_some::<L>(Values { next: &next, ..values }, seen, offset, scores, part);
            continue;
        }
        let everyone = tile.part(seen, seen.by(task.rows - 1).start..seen.by(0).end);
        let edges = if everyone == tile.tokens { 0 } else { task.queries() };
        for query in 0..edges {
            let (mine, common) = (seen.by(query / task.group), common(seen, query));
            let tokens = tile.part(seen, mine.start..mine.end.min(common.start));
            add_weighted::<L, 1>(values, tokens, query, scores, part);
        }
        by_queries!(L, task.queries(), 1 2 3 4 5 .. AT_ONCE, |first, R| {
            let values = Values { next: &next, ..values };
            add_weighted::<L, R>(values, tile.part(seen, common(seen, first)), first, scores, part);
            next = [Ahead::NONE; PANELS];
        });
        for query in 0..edges {
            let (mine, common) = (seen.by(query / task.group), common(seen, query));
            let tokens = tile.part(seen, mine.start.max(common.end)..mine.end);
            add_weighted::<L, 1>(values, tokens, query, scores, part);
        }
    }
}

/// The part of [`sum_tiles`] for a tile of which each query sees some blocks. Adjacent queries that see the same are added
/// together.
#[inline(always)]
fn sum_some<L: Lanes>(values: Values<'_>, seen: &Seen<'_>, offset: usize, scores: &[f32], part: &mut [f32]) {
    let (mut values, first, queries) = (values, seen.first() + offset, seen.task.queries());
    let mut query = 0;
    while query < queries {
        let bits = seen.bits(query, first);
        let mut alike = 1;
        while bits != 0 && alike < AT_ONCE && query + alike < queries && seen.bits(query + alike, first) == bits {
            alike += 1;
        }
        let taken = match alike {
            AT_ONCE.. => AT_ONCE,
            4.. => 4,
            _ => 1,
        };
        let mut rest = bits;
        while rest != 0 {
            let start = rest.trailing_zeros() as usize;
            let len = (rest >> start).trailing_ones() as usize;
            rest &= !(u64::MAX >> (64 - len) << start);
            match taken {
                AT_ONCE => add_weighted::<L, AT_ONCE>(values, start..start + len, query, scores, part),
                4 => add_weighted::<L, 4>(values, start..start + len, query, scores, part),
                _ => add_weighted::<L, 1>(values, start..start + len, query, scores, part),
            }
            values.next = &[Ahead::NONE; PANELS];
        }
        query += taken;
    }
}

/// Returns the tokens that all queries see that are added together with this one.
#[inline(always)]
fn common(seen: &Seen<'_>, query: usize) -> Range<usize> {
    let (first, last) = (query / AT_ONCE * AT_ONCE, seen.task.queries().min((query / AT_ONCE + 1) * AT_ONCE) - 1);
    let (start, end) = (seen.by(last / seen.task.group).start, seen.by(first / seen.task.group).end);
    start..end.max(start)
}

/// Adds the weighted values of some tokens of a tile to the sums of `R` queries.
#[inline(always)]
fn add_weighted<L: Lanes, const R: usize>(
    values: Values<'_>,
    tokens: Range<usize>,
    first: usize,
    scores: &[f32],
    part: &mut [f32],
) {
    if tokens.is_empty() {
        return;
    }
    let (Values { dim, width, .. }, vectors) = (values, values.dim / LANES);
    let mut weights = [&scores[..0]; R];
    for r in 0..R {
        weights[r] = &scores[(first + r) * SCORES..][..TILE];
    }
    let part = &mut part[first * width..][..R * width];
    let mut at = 0;
    if L::MANY || R == 1 {
        while at + 4 <= vectors {
            columns::<L, R, 4>(values, tokens.clone(), weights, part, at);
            at += 4;
        }
    }
    while at < vectors {
        columns::<L, R, 1>(values, tokens.clone(), weights, part, at);
        at += 1;
    }
    for d in vectors * LANES..dim {
        for r in 0..R {
            for j in tokens.clone() {
                part[r * width + d] += weights[r][j] * values.row(j)[d];
            }
        }
    }
}

/// The part of [`add_weighted`] for `C` vectors of the head, whose sums stay in registers.
#[inline(always)]
fn columns<L: Lanes, const R: usize, const C: usize>(
    values: Values<'_>,
    tokens: Range<usize>,
    weights: [&[f32]; R],
    part: &mut [f32],
    at: usize,
) {
    let width = values.width;
    let mut sums = [[L::splat(0.0); C]; R];
    for r in 0..R {
        let from = &part[r * width + at * LANES..].as_chunks::<LANES>().0[..C];
        for c in 0..C {
            sums[r][c] = L::load(&from[c]);
        }
    }
    // Slices of equal length, so that bounds are checked once.
    let starts = &values.starts[tokens.clone()];
    let mut mine = [&weights[0][..0]; R];
    for r in 0..R {
        mine[r] = &weights[r][tokens.clone()][..starts.len()];
    }
    for (j, &start) in starts.iter().enumerate() {
        if at == 0 {
            let token = tokens.start + j;
            values.next[token / LANES].ask(token % LANES, token % LANES + 1);
        }
        let vectors = &values.floats[start + at * LANES..][..C * LANES].as_chunks::<LANES>().0;
        let mut v = [L::splat(0.0); C];
        for c in 0..C {
            v[c] = L::load(&vectors[c]);
        }
        for r in 0..R {
            let p = L::splat(mine[r][j]);
            for c in 0..C {
                sums[r][c] = p.mul_add(v[c], sums[r][c]);
            }
        }
    }
    for r in 0..R {
        let to = &mut part[r * width + at * LANES..].as_chunks_mut::<LANES>().0[..C];
        for c in 0..C {
            sums[r][c].store(&mut to[c]);
        }
    }
}
