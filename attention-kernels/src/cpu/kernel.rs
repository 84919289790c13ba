//! The attention of some query rows over the partitions of one key/value head, in vectors. One source for every
//! instruction set and every type of cache.
//!
//! ```text
//! partition of 512 tokens        scores[q][j] = q·k[j]      softmax over j      sums[q] += p[q][j] * v[j]
//!   block 7 ▒▒▒▒▒▒▒▒              rows × heads of the        in vectors of 16    each run of a block is read once
//!   block 2 ▒▒▒▒▒                 group share each key                           for all rows and heads
//! ```
//!
//! The queries of a task are the heads of a group in one or some neighbouring rows. Keys and values that are not float32 are
//! brought to it once for all of them, [`TILE`] tokens at a time, in a tile in the first cache.
//!
//! The order of every sum depends on the row's own first and last visible token alone, so rows do not influence each
//! other, however they are put into tasks.

// Constant loops over registers read best with the index that several arrays share.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use device::simd::{Ahead, LANES, Lanes};

use super::merge::Merged;
use super::stored::Pages;
use crate::args::{KvShape, PARTITION};

/// Query heads that share the vectors of a key in registers.
const GROUP: usize = 4;

/// Tokens of a tile.
const TILE: usize = 16;

/// How many tokens before they are needed keys and values are asked for. Blocks lie anywhere, so the memory's own guesses end
/// with each: without asking, two thirds of the time of an 8-bit decode went into waiting for the first line of a block.
const AHEAD: usize = 3 * TILE;

/// From the scores of one query to those of the next: a partition, and room to fill the last vector.
const SCORES: usize = PARTITION + LANES;

/// What every task of a call shares.
pub(super) struct Shared<'a> {
    pub shape: KvShape,
    pub pages: Pages<'a>,
    pub window: Option<usize>,
    pub soft_cap: Option<f32>,
}

/// Neighbouring query rows of one sequence, the heads of one group, and some partitions of their context.
pub(super) struct Task<'a> {
    /// The heads of the first row, `[group, head_dim]`, and on.
    pub query: &'a [f32],
    /// Elements from one row to the next.
    pub query_stride: usize,
    pub rows: usize,
    pub group: usize,
    /// Of the first row.
    pub position: usize,
    pub kv_head: usize,
    pub table: &'a [i32],
    pub partitions: Range<usize>,
    /// Scores are this times the product of query and stored key.
    pub scale: f32,
    /// ALiBi slopes of the group, if any.
    pub slopes: Option<&'a [f32]>,
}

/// What a thread writes in between, kept from call to call.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[queries, SCORES]`.
    scores: Vec<f32>,
    /// `[queries, head_dim]`: weighted values of one partition.
    part: Vec<f32>,
    /// `[TILE, head_dim]`: keys or values in float32.
    tile: Vec<f32>,
    /// `[queries]`: of one partition.
    states: Vec<Merged>,
}

/// Length of a task's result: weighted values `[rows, group, head_dim]`, then `[rows, group]` of [`Merged`], two numbers each;
/// a row that saw nothing has the total 0.
pub(super) fn result_len(rows: usize, group: usize, dim: usize) -> usize {
    rows * group * (dim + 2)
}

/// Runs a task; `result` is [`result_len`] long. The caller has checked that the CPU has the instructions.
pub(super) fn run(isa: device::Isa, shared: &Shared<'_>, task: &Task<'_>, scratch: &mut Scratch, result: &mut [f32]) {
    device::dispatch!(
        isa,
        partitions(shared: &Shared<'_>, task: &Task<'_>, scratch: &mut Scratch, result: &mut [f32])
    );
}

#[inline(always)]
fn partitions<L: Lanes>(shared: &Shared<'_>, task: &Task<'_>, scratch: &mut Scratch, result: &mut [f32]) {
    let (dim, queries) = (shared.shape.head_dim, task.rows * task.group);
    // Growing alone: what is in there does not matter.
    for (room, len) in
        [(&mut scratch.scores, queries * SCORES), (&mut scratch.part, queries * dim), (&mut scratch.tile, TILE * dim)]
    {
        if room.len() < len {
            room.resize(len, 0.0);
        }
    }
    scratch.states.resize(queries.max(scratch.states.len()), Merged::default());
    let (sums, states) = result.split_at_mut(queries * dim);
    let states = states.as_chunks_mut::<2>().0;
    states.fill([0.0; 2]);
    for partition in task.partitions.clone() {
        let seen = Seen { task, window: shared.window, partition };
        score_all::<L>(shared, &seen, scratch);
        for query in 0..queries {
            let tokens = seen.by(query / task.group);
            if !tokens.is_empty() {
                let scores = &mut scratch.scores[query * SCORES + tokens.start - seen.first()..];
                bias(shared, task, query, tokens.start, &mut scores[..tokens.len()]);
                scratch.states[query] = softmax::<L>(scores, tokens.len());
            }
        }
        weigh_all::<L>(shared, &seen, scratch);
        for query in 0..queries {
            if !seen.by(query / task.group).is_empty() {
                let [greatest, total] = states[query];
                let mut merged = Merged { greatest, total };
                let part = &scratch.part[query * dim..][..dim];
                merged.merge(scratch.states[query], &mut sums[query * dim..][..dim], part);
                states[query] = [merged.greatest, merged.total];
            }
        }
    }
}

/// What the rows of a task see of one partition.
struct Seen<'a> {
    task: &'a Task<'a>,
    window: Option<usize>,
    partition: usize,
}

impl Seen<'_> {
    /// The first token of the partition.
    #[inline(always)]
    fn first(&self) -> usize {
        self.partition * PARTITION
    }

    /// The tokens that a row sees; empty where it sees none here.
    #[inline(always)]
    fn by(&self, row: usize) -> Range<usize> {
        let end = self.task.position + row + 1;
        let start = self.window.map_or(0, |window| end.saturating_sub(window));
        let start = start.max(self.first());
        start..end.min(self.first() + PARTITION).max(start)
    }

    /// The tokens that some row sees: the first row sees furthest back, the last one furthest on.
    #[inline(always)]
    fn all(&self) -> Range<usize> {
        let (start, end) = (self.by(0).start, self.by(self.task.rows - 1).end);
        start..end.max(start)
    }

    /// The tokens of a tile that a row sees, counted from the tile's first.
    #[inline(always)]
    fn of_tile(&self, row: usize, tile: &Range<usize>) -> Range<usize> {
        let seen = self.by(row);
        let start = seen.start.clamp(tile.start, tile.end);
        start - tile.start..seen.end.clamp(start, tile.end) - tile.start
    }
}

/// Calls `$each` for the heads of a group, up to [`GROUP`] at a time, their number as the constant `$n`.
macro_rules! by_heads {
    ($group:expr, |$first:ident, $n:ident| $each:expr) => {{
        let mut $first = 0;
        while $first < $group {
            match $group - $first {
                1 => {
                    const $n: usize = 1;
                    $each
                }
                2 => {
                    const $n: usize = 2;
                    $each
                }
                3 => {
                    const $n: usize = 3;
                    $each
                }
                _ => {
                    const $n: usize = GROUP;
                    $each
                }
            }
            $first += GROUP;
        }
    }};
}

/// The tokens `seen`, up to [`TILE`] of one block at a time.
#[inline(always)]
fn tiles(seen: Range<usize>, block_size: usize) -> impl Iterator<Item = Range<usize>> {
    let next = move |first: usize| first..seen.end.min(first + TILE).min((first / block_size + 1) * block_size);
    std::iter::successors(Some(next(seen.start)), move |tile| Some(next(tile.end))).take_while(|tile| !tile.is_empty())
}

/// The slot of a token.
#[inline(always)]
fn slot(table: &[i32], block_size: usize, token: usize) -> usize {
    table[token / block_size] as usize * block_size + token % block_size
}

/// The tile that is read [`AHEAD`] tokens after one: in the order of reading, the keys of a partition, its values, and the
/// keys of the next one.
#[inline(always)]
fn ahead(shared: &Shared<'_>, seen: &Seen<'_>, which: usize, tokens: &Range<usize>) -> Ahead {
    let (task, shape, all) = (seen.task, &shared.shape, seen.all());
    let (which, first, end) = match tokens.start + AHEAD {
        first if first < all.end => (which, first, all.end),
        first if which == 0 => (1, all.start + (first - all.end), all.end),
        first if seen.partition + 1 < task.partitions.end => (0, first, task.position + task.rows),
        _ => return Ahead::NONE,
    };
    if first >= end {
        return Ahead::NONE;
    }
    let tokens = TILE.min(end - first).min(shape.block_size - first % shape.block_size);
    shared.pages.ahead(which, shape, slot(task.table, shape.block_size, first), task.kv_head, tokens)
}

/// `scores[query][token - first] = scale * q·k` for all that is seen of a partition.
#[inline(always)]
fn score_all<L: Lanes>(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    let (task, shape) = (seen.task, &shared.shape);
    let (dim, Scratch { scores, tile, .. }) = (shape.head_dim, scratch);
    for tokens in tiles(seen.all(), shape.block_size) {
        let mut next = ahead(shared, seen, 0, &tokens);
        let first = slot(task.table, shape.block_size, tokens.start);
        let keys = shared.pages.rows::<L>(0, shape, first, task.kv_head, tokens.len(), tile);
        for row in 0..task.rows {
            let mine = seen.of_tile(row, &tokens);
            let keys = &keys.floats[mine.start * dim..mine.end * dim];
            let query = &task.query[row * task.query_stride..];
            let scores = &mut scores[row * task.group * SCORES + tokens.start - seen.first() + mine.start..];
            by_heads!(task.group, |head, R| {
                let next = std::mem::replace(&mut next, Ahead::NONE);
                dots::<L, R>(keys, &query[head * dim..], dim, task.scale, &mut scores[head * SCORES..], next)
            });
        }
        scale_tokens(task, keys.scales, &mut scores[tokens.start - seen.first()..]);
    }
}

/// Multiplies the scores (or weights) of each token with its scale, if it has one.
#[inline(always)]
fn scale_tokens(task: &Task<'_>, scales: &[[u8; 4]], scores: &mut [f32]) {
    if !scales.is_empty() {
        for query in 0..task.rows * task.group {
            for (score, scale) in scores[query * SCORES..].iter_mut().zip(scales) {
                *score *= f32::from_le_bytes(*scale);
            }
        }
    }
}

/// The scores of `R` heads with some keys; asks for what comes next.
#[inline(always)]
fn dots<L: Lanes, const R: usize>(
    keys: &[f32],
    query: &[f32],
    dim: usize,
    scale: f32,
    scores: &mut [f32],
    next: Ahead,
) {
    let (tokens, mut j) = (keys.len() / dim, 0);
    if L::MANY {
        while j + 4 <= tokens {
            next.ask(j, j + 4);
            some_dots::<L, R, 4>(&keys[j * dim..], query, dim, scale, &mut scores[j..]);
            j += 4;
        }
    }
    while j < tokens {
        next.ask(j, j + 1);
        some_dots::<L, R, 1>(&keys[j * dim..], query, dim, scale, &mut scores[j..]);
        j += 1;
    }
}

/// The part of [`dots`] for `K` keys, whose sums stay in registers.
#[inline(always)]
fn some_dots<L: Lanes, const R: usize, const K: usize>(
    keys: &[f32],
    query: &[f32],
    dim: usize,
    scale: f32,
    scores: &mut [f32],
) {
    let vectors = dim / LANES;
    let keys: [&[f32]; K] = std::array::from_fn(|k| &keys[k * dim..][..dim]);
    let key_vectors = keys.map(|key| &key.as_chunks::<LANES>().0[..vectors]);
    let queries: [&[f32]; R] = std::array::from_fn(|r| &query[r * dim..][..dim]);
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
            _ => dots = sums[r].map(L::sum),
        }
        for n in 0..K {
            for d in vectors * LANES..dim {
                dots[n] += queries[r][d] * keys[n][d];
            }
            scores[r * SCORES + n] = scale * dots[n];
        }
    }
}

/// Soft cap and ALiBi, for the few models that have them; the scores begin with that of the token `start`.
#[inline(always)]
fn bias(shared: &Shared<'_>, task: &Task<'_>, query: usize, start: usize, scores: &mut [f32]) {
    if let Some(cap) = shared.soft_cap {
        for s in scores.iter_mut() {
            *s = cap * (*s / cap).tanh();
        }
    }
    if let Some(slopes) = task.slopes {
        let (slope, position) = (slopes[query % task.group], task.position + query / task.group);
        for (j, s) in scores.iter_mut().enumerate() {
            *s += slope * ((start + j) as f32 - position as f32);
        }
    }
}

/// Turns the first `len` scores into exp(score - greatest).
#[inline(always)]
fn softmax<L: Lanes>(scores: &mut [f32], len: usize) -> Merged {
    // Whole vectors: the padding is far below every score, its weight vanishes beside the greatest one's 1.
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

/// `part[query] = Σ_j p[query][j] * v[j]` over all that is seen of a partition, in the order of j.
#[inline(always)]
fn weigh_all<L: Lanes>(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    let (task, shape) = (seen.task, &shared.shape);
    let (dim, Scratch { scores, part, tile, .. }) = (shape.head_dim, scratch);
    part[..task.rows * task.group * dim].fill(0.0);
    for tokens in tiles(seen.all(), shape.block_size) {
        let mut next = ahead(shared, seen, 1, &tokens);
        let first = slot(task.table, shape.block_size, tokens.start);
        let values = shared.pages.rows::<L>(1, shape, first, task.kv_head, tokens.len(), tile);
        scale_tokens(task, values.scales, &mut scores[tokens.start - seen.first()..]);
        for row in 0..task.rows {
            let mine = seen.of_tile(row, &tokens);
            let values = &values.floats[mine.start * dim..mine.end * dim];
            let weights = &scores[row * task.group * SCORES + tokens.start - seen.first() + mine.start..];
            let part = &mut part[row * task.group * dim..];
            by_heads!(task.group, |head, R| {
                let next = std::mem::replace(&mut next, Ahead::NONE);
                weigh::<L, R>(values, dim, &weights[head * SCORES..], &mut part[head * dim..], next)
            });
        }
    }
}

/// Adds the weighted values of some tokens to the sums of `R` heads; asks for what comes next.
#[inline(always)]
fn weigh<L: Lanes, const R: usize>(values: &[f32], dim: usize, weights: &[f32], part: &mut [f32], mut next: Ahead) {
    let vectors = dim / LANES;
    let mut at = 0;
    if L::MANY || R == 1 {
        while at + 4 <= vectors {
            columns::<L, R, 4>(values, dim, weights, part, at, std::mem::replace(&mut next, Ahead::NONE));
            at += 4;
        }
    }
    while at < vectors {
        columns::<L, R, 1>(values, dim, weights, part, at, std::mem::replace(&mut next, Ahead::NONE));
        at += 1;
    }
    for d in vectors * LANES..dim {
        for r in 0..R {
            for (j, value) in values.chunks_exact(dim).enumerate() {
                part[r * dim + d] += weights[r * SCORES + j] * value[d];
            }
        }
    }
}

/// The part of [`weigh`] for `C` vectors of the head, whose sums stay in registers.
#[inline(always)]
fn columns<L: Lanes, const R: usize, const C: usize>(
    values: &[f32],
    dim: usize,
    weights: &[f32],
    part: &mut [f32],
    at: usize,
    next: Ahead,
) {
    let tokens = values.len() / dim;
    let weights: [&[f32]; R] = std::array::from_fn(|r| &weights[r * SCORES..][..tokens]);
    // Loops, not closures: those would be compiled for no instruction set.
    let mut sums = [[L::splat(0.0); C]; R];
    for r in 0..R {
        let from = &part[r * dim + at * LANES..].as_chunks::<LANES>().0[..C];
        for c in 0..C {
            sums[r][c] = L::load(&from[c]);
        }
    }
    for (j, value) in values.chunks_exact(dim).enumerate() {
        next.ask(j, j + 1);
        let vectors = &value[at * LANES..].as_chunks::<LANES>().0[..C];
        let mut v = [L::splat(0.0); C];
        for c in 0..C {
            v[c] = L::load(&vectors[c]);
        }
        for r in 0..R {
            let p = L::splat(weights[r][j]);
            for c in 0..C {
                sums[r][c] = p.mul_add(v[c], sums[r][c]);
            }
        }
    }
    for r in 0..R {
        let to = &mut part[r * dim + at * LANES..].as_chunks_mut::<LANES>().0[..C];
        for c in 0..C {
            sums[r][c].store(&mut to[c]);
        }
    }
}
