//! The attention of some query rows over the partitions of one key/value head, in vectors. One source for every
//! instruction set and every type of cache.
//!
//! ```text
//! partition of 512 tokens        scores[q][j] = q·k[j]      softmax over j      sums[q] += p[q][j] * v[j]
//!   tile of 64 ▒▒▒▒▒▒▒▒            [`super::scores`]          in vectors of 16    [`super::values`]
//!   tile of 64 ▒▒▒▒▒
//! ```
//!
//! The queries of a task are the heads of a group in one or some neighbouring rows. Both products are made as matrix products
//! are: the sums of some queries with some tokens, or some columns, stay in registers while all that they share passes by.
//!
//! The order of every sum depends on the row's own first and last visible token alone, so rows do not influence each
//! other, however they are put into tasks.

use std::iter::StepBy;
use std::ops::Range;

use device::Isa;
use device::simd::{Ahead, LANES, Lanes};

use super::merge::Merged;
use super::scores::score_all;
use super::stored::{Pages, Slot};
use super::values::weigh_all;
use crate::args::{KvShape, PARTITION};

/// Tokens of a tile.
pub(super) const TILE: usize = 4 * LANES;

/// How many tokens before they are needed keys and values are asked for: those of a tile while the one before it is worked on.
/// Blocks lie anywhere, so the memory's own guesses end with each: without asking, two thirds of the time of an 8-bit decode
/// went into waiting for the first line of a block.
const AHEAD: usize = TILE;

/// From the scores of one query to those of the next: a partition, and room to fill the last vector.
pub(super) const SCORES: usize = PARTITION + LANES;

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
    /// What this thread will most likely do next.
    pub next: Option<Next<'a>>,
}

/// Where another task begins to read.
pub(super) struct Next<'a> {
    pub kv_head: usize,
    pub table: &'a [i32],
    /// The tokens of its first partition.
    pub tokens: Range<usize>,
}

impl<'a> Task<'a> {
    /// Rows times heads of the group.
    #[inline(always)]
    pub fn queries(&self) -> usize {
        self.rows * self.group
    }

    /// A query, of `dim` numbers.
    #[inline(always)]
    pub fn query(&self, query: usize, dim: usize) -> &'a [f32] {
        &self.query[query / self.group * self.query_stride + query % self.group * dim..][..dim]
    }
}

/// What a thread writes in between, kept from call to call.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[queries, SCORES]`.
    pub scores: Vec<f32>,
    /// `[queries, head_dim]`: weighted values of one partition.
    pub part: Vec<f32>,
    /// `[TILE / LANES, head_dim, LANES]` keys or `[TILE, head_dim]` values in float32.
    pub tile: Vec<f32>,
    /// `[queries]`: of one partition.
    states: Vec<Merged>,
}

/// Length of a task's result: weighted values `[rows, group, head_dim]`, then `[rows, group]` of [`Merged`], two numbers each;
/// a row that saw nothing has the total 0.
pub(super) fn result_len(rows: usize, group: usize, dim: usize) -> usize {
    rows * group * (dim + 2)
}

/// Runs a task; `result` is [`result_len`] long. The caller has checked that the CPU has the instructions.
pub(super) fn run(isa: Isa, shared: &Shared<'_>, task: &Task<'_>, scratch: &mut Scratch, result: &mut [f32]) {
    let (dim, queries) = (shared.shape.head_dim, task.queries());
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
        let seen = &Seen { task, window: shared.window, partition };
        // In one function for each instruction set the crate took twice as long to build.
        score_all(isa, shared, seen, scratch);
        device::dispatch!(isa, soften(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch));
        weigh_all(isa, shared, seen, scratch);
        merge(seen, scratch, dim, sums, states);
    }
}

/// Turns the scores of every query into weights.
#[inline(always)]
fn soften<L: Lanes>(shared: &Shared<'_>, seen: &Seen<'_>, scratch: &mut Scratch) {
    let task = seen.task;
    for query in 0..task.queries() {
        let tokens = seen.by(query / task.group);
        if !tokens.is_empty() {
            let scores = &mut scratch.scores[query * SCORES + tokens.start - seen.first()..];
            bias(shared, task, query, tokens.start, &mut scores[..tokens.len()]);
            scratch.states[query] = softmax::<L>(scores, tokens.len());
        }
    }
}

/// Adds the weighted values of a partition to those of the partitions before it.
fn merge(seen: &Seen<'_>, scratch: &Scratch, dim: usize, sums: &mut [f32], states: &mut [[f32; 2]]) {
    for query in 0..seen.task.queries() {
        if !seen.by(query / seen.task.group).is_empty() {
            let [greatest, total] = states[query];
            let mut merged = Merged { greatest, total };
            let part = &scratch.part[query * dim..][..dim];
            merged.merge(scratch.states[query], &mut sums[query * dim..][..dim], part);
            states[query] = [merged.greatest, merged.total];
        }
    }
}

/// What the rows of a task see of one partition.
pub(super) struct Seen<'a> {
    pub task: &'a Task<'a>,
    window: Option<usize>,
    partition: usize,
}

impl Seen<'_> {
    /// The first token of the partition.
    #[inline(always)]
    pub fn first(&self) -> usize {
        self.partition * PARTITION
    }

    /// The tokens that a row sees; empty where it sees none here.
    #[inline(always)]
    pub fn by(&self, row: usize) -> Range<usize> {
        let (first, end) = (self.first(), self.task.position + row + 1);
        let start = self.window.map_or(0, |window| end.saturating_sub(window));
        // A window may begin behind the partition: then it is empty here.
        let start = start.clamp(first, first + PARTITION);
        start..end.min(first + PARTITION).max(start)
    }

    /// The tokens that some row sees: the first row sees furthest back, the last one furthest on.
    #[inline(always)]
    pub fn all(&self) -> Range<usize> {
        let (start, end) = (self.by(0).start, self.by(self.task.rows - 1).end);
        start..end.max(start)
    }

    /// Where the tiles of all that some row sees begin, counted from the first token.
    #[inline(always)]
    pub fn tiles(&self) -> StepBy<Range<usize>> {
        let all = self.all();
        ((all.start - self.first()) / TILE * TILE..all.end - self.first()).step_by(TILE)
    }

    /// The tile that begins there.
    #[inline(always)]
    pub fn tile(&self, offset: usize, block_size: usize) -> Tile {
        let (all, first) = (self.all(), self.first() + offset);
        let tokens = all.start.max(first) - first..all.end.min(first + TILE) - first;
        let mut slots = [Slot::default(); TILE];
        Slot::of_tokens(self.task.table, block_size, first + tokens.start, &mut slots[tokens.clone()]);
        let (first, last) = (slots[tokens.start], slots[tokens.end - 1]);
        slots[tokens.start / LANES * LANES..tokens.start].fill(first);
        slots[tokens.end..tokens.end.next_multiple_of(LANES)].fill(last);
        Tile { offset, tokens, slots }
    }
}

/// Up to [`TILE`] tokens of a partition.
pub(super) struct Tile {
    /// Of the tile, counted from the partition's first.
    pub offset: usize,
    /// Those that some row sees, counted from the tile's first.
    pub tokens: Range<usize>,
    /// Of each token, up to whole panels; where none is seen, of a neighbour that is.
    pub slots: [Slot; TILE],
}

impl Tile {
    /// Panels of [`LANES`] tokens.
    #[inline(always)]
    pub fn panels(&self) -> Range<usize> {
        self.tokens.start / LANES..self.tokens.end.div_ceil(LANES)
    }

    /// The part of a range of the context that lies in the tile, counted from the tile's first token.
    #[inline(always)]
    pub fn part(&self, seen: &Seen<'_>, range: Range<usize>) -> Range<usize> {
        let first = seen.first() + self.offset;
        let place = |token: usize| token.clamp(first, first + TILE) - first;
        place(range.start)..place(range.end.max(range.start))
    }
}

/// Calls `$each` for the queries of a task, up to `$most` at a time (`$few` are the numbers below it), their number as the
/// constant `$n`.
macro_rules! by_queries {
    ($queries:expr, $($few:literal)* .. $most:ident, |$first:ident, $n:ident| $each:expr) => {{
        let mut $first = 0;
        while $first < $queries {
            match $queries - $first {
                $($few => {
                    const $n: usize = $few;
                    $each
                })*
                _ => {
                    const $n: usize = $most;
                    $each
                }
            }
            $first += $most;
        }
    }};
}
pub(super) use by_queries;

/// What is read [`AHEAD`] tokens after one, counted from the partition's first: in the order of reading, the keys of a
/// partition, its values, the keys of the next partition, and those of the next task.
#[inline(always)]
pub(super) fn ahead(shared: &Shared<'_>, seen: &Seen<'_>, which: usize, token: usize) -> Ahead {
    let (task, shape, all) = (seen.task, &shared.shape, seen.all());
    let (mut table, mut kv_head) = (task.table, task.kv_head);
    let (which, first, end) = match (seen.first() + token).max(all.start) + AHEAD {
        first if first < all.end => (which, first, all.end),
        first if which == 0 => (1, all.start + (first - all.end), all.end),
        first if seen.partition + 1 < task.partitions.end => (0, first, task.position + task.rows),
        first => {
            let Some(next) = &task.next else { return Ahead::NONE };
            (table, kv_head) = (next.table, next.kv_head);
            (0, next.tokens.start + (first - all.end), next.tokens.end)
        }
    };
    if first >= end {
        return Ahead::NONE;
    }
    let tokens = LANES.min(end - first).min(shape.block_size - first % shape.block_size);
    shared.pages.ahead(which, shape, Slot::of_token(table, shape.block_size, first), kv_head, tokens)
}

/// Multiplies the scores (or weights) of each token with its scale, where keys (0) or values (1) have some.
#[inline(always)]
pub(super) fn scale_tokens(shared: &Shared<'_>, task: &Task<'_>, which: usize, tile: &Tile, scores: &mut [f32]) {
    let tokens = tile.tokens.clone();
    let mut scales = [0.0; TILE];
    let slots = &tile.slots[tokens.clone()];
    if shared.pages.scales(which, &shared.shape, slots, task.kv_head, &mut scales[tokens.clone()]) {
        for scores in scores.chunks_exact_mut(SCORES).take(task.queries()) {
            for (score, scale) in scores[tile.offset..][tokens.clone()].iter_mut().zip(&scales[tokens.clone()]) {
                *score *= scale;
            }
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
