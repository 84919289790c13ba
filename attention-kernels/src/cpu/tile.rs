//! What a task reads: its rows, what they see of a partition, and the tiles of that.

use std::iter::StepBy;
use std::ops::Range;

use device::simd::{Ahead, LANES};

use super::merge::Merged;
use super::stored::{Pages, Slot};
use crate::shape::{KvShape, PARTITION};

/// Tokens of a tile.
pub(super) const TILE: usize = 4 * LANES;

/// How many tokens before they are needed keys and values are asked for: those of a tile while the one before it is worked on.
/// Blocks lie anywhere, so the memory's own guesses end with each: without asking, two thirds of the time of an 8-bit decode
/// went into waiting for the first line of a block.
pub(super) const AHEAD: usize = TILE;

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
    pub states: Vec<Merged>,
}

/// What the rows of a task see of one partition.
pub(super) struct Seen<'a> {
    pub task: &'a Task<'a>,
    pub window: Option<usize>,
    pub partition: usize,
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
