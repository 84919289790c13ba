//! The input of a task: its rows, the tokens that they see in a partition, and tiles of these.

use std::iter::{Flatten, StepBy};
use std::ops::Range;
use std::option::IntoIter;

use linear::Arithmetic;
use simd::pairs::Pairs;
use simd::{Ahead, LANES, tiles};

use super::merge::Merged;
use super::stored::{Halves, Pages, Slot, panel_offset};
use crate::shape::{KvShape, PARTITION};
use crate::sparse::{BlockSparse, Runs};

/// Number of tokens of a tile.
pub(super) const TILE: usize = PANELS * LANES;

/// Panels of sixteen tokens of a tile.
pub(super) const PANELS: usize = 4;

/// Distance in tokens of prefetching: the keys and values of a tile are prefetched while the previous tile is computed.
/// Blocks are scattered, so the prefetcher of the hardware stops at the end of each; without this an 8-bit decode spent two
/// thirds of its time waiting for the first cache line of a block.
pub(super) const AHEAD: usize = TILE;

/// Distance between the scores of two queries: a partition, and space to fill the last vector.
pub(super) const SCORES: usize = PARTITION + LANES;

/// Properties that all tasks of a call share.
pub(super) struct Shared<'a> {
    /// Shape of the keys.
    pub shape: KvShape,
    /// Elements of a value.
    pub value_dim: usize,
    pub pages: Pages<'a>,
    /// Keys and values in bfloat16, if they are multiplied in that type.
    pub halves: Option<Halves<'a>>,
    /// How these are multiplied.
    pub arithmetic: Arithmetic,
    pub window: Option<usize>,
    pub sparse: Option<BlockSparse>,
    pub soft_cap: Option<f32>,
}

impl Shared<'_> {
    /// Elements from one weighted value of a partition to the next: whole vectors.
    #[inline(always)]
    pub fn width(&self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }
}

/// Adjacent query rows of one sequence, the heads of one group, and some partitions of their context.
pub(super) struct Task<'a> {
    /// The queries, from the heads of the first row on, `[group, head_dim]`.
    pub query: &'a [f32],
    /// Elements from one row to the next.
    pub query_stride: usize,
    pub rows: usize,
    pub group: usize,
    /// Position of the first row.
    pub position: usize,
    pub kv_head: usize,
    pub table: &'a [i32],
    pub partitions: Range<usize>,
    /// Factor of the product of query and stored key.
    pub scale: f32,
    /// ALiBi slopes of the group, if any.
    pub slopes: Option<&'a [f32]>,
    /// The task that this thread will probably run next.
    pub next: Option<Next<'a>>,
}

/// Where another task starts to read.
pub(super) struct Next<'a> {
    pub kv_head: usize,
    pub table: &'a [i32],
    /// Tokens of its first partition.
    pub tokens: Range<usize>,
}

impl<'a> Task<'a> {
    /// Returns the number of queries: rows times heads of the group.
    #[inline(always)]
    pub fn queries(&self) -> usize {
        self.rows * self.group
    }

    /// Returns a query of `dim` elements.
    #[inline(always)]
    pub fn query(&self, query: usize, dim: usize) -> &'a [f32] {
        &self.query[query / self.group * self.query_stride + query % self.group * dim..][..dim]
    }
}

/// Scratch memory of a thread, kept from call to call.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[queries, SCORES]`.
    pub scores: Vec<f32>,
    /// Weighted values of one partition, `[queries, width]`; what is behind `value_dim` has no meaning.
    pub part: Vec<f32>,
    /// Keys `[PANELS, head_dim, LANES]` or values `[TILE, value_dim]` in float32.
    pub tile: Vec<f32>,
    /// States of one partition, `[queries]`.
    pub states: Vec<Merged>,
    /// Queries in bfloat16, `[queries, head_dim / 2]`.
    pub queries: Vec<u32>,
    /// Weights in bfloat16, `[queries, WEIGHTS]`.
    pub weights: Vec<u32>,
    /// Keys `[PANELS, head_dim / 2]` or values `[TILE / 2, value_dim / LANES]` in bfloat16.
    pub pairs: Vec<Pairs>,
    pub on_tiles: OnTiles,
}

/// Memory of [`super::tiled`], for groups of 32 elements and columns of 16.
#[derive(Default)]
pub(super) struct OnTiles {
    /// Queries `[bands of 16, groups]`.
    pub queries: Vec<tiles::Tile>,
    /// Keys of a partition, `[panels, groups]`, if they are padded.
    pub keys: Vec<tiles::Tile>,
    /// Values of a partition, `[groups of 32 tokens, columns]`.
    pub values: Vec<tiles::Tile>,
    /// Scores or weights of sixteen queries, a tile for each panel.
    pub scores: Vec<tiles::Tile>,
    /// Weighted values of sixteen queries, a tile for each column.
    pub sums: Vec<tiles::Tile>,
}

/// Makes a buffer at least as long as it has to be. Its old contents do not matter.
pub(super) fn grow<T: Clone>(buffer: &mut Vec<T>, len: usize, value: T) {
    if buffer.len() < len {
        buffer.resize(len, value);
    }
}

/// The tokens of one partition that the rows of a task see.
pub(super) struct Seen<'a> {
    pub task: &'a Task<'a>,
    pub window: Option<usize>,
    pub sparse: Option<BlockSparse>,
    pub partition: usize,
}

impl Seen<'_> {
    /// Returns the first token of the partition.
    #[inline(always)]
    pub fn first(&self) -> usize {
        self.partition * PARTITION
    }

    /// Returns the tokens that a row sees; empty if it sees none in the partition.
    #[inline(always)]
    pub fn by(&self, row: usize) -> Range<usize> {
        let (first, end) = (self.first(), self.task.position + row + 1);
        let start = self.window.map_or(0, |window| end.saturating_sub(window));
        // The window may start behind the partition: then the range is empty.
        let start = start.clamp(first, first + PARTITION);
        start..end.min(first + PARTITION).max(start)
    }

    /// Iterates over the runs of tokens that a query sees in a block-sparse call; over none in others.
    #[inline(always)]
    pub fn runs(&self, query: usize) -> Flatten<IntoIter<Runs>> {
        self.runs_in(query, self.first(), PARTITION)
    }

    /// [`Seen::runs`] among `len` tokens from `first` on.
    #[inline(always)]
    fn runs_in(&self, query: usize, first: usize, len: usize) -> Flatten<IntoIter<Runs>> {
        let Task { group, position, kv_head, .. } = *self.task;
        let (row, head, seen) = (query / group, kv_head * group + query % group, self.by(query / group));
        let tokens = seen.start.max(first)..seen.end.min(first + len);
        let runs = self.sparse.map(|sparse| sparse.heads(head..head + 1, kv_head).runs(position + row, tokens));
        runs.into_iter().flatten()
    }

    /// Whether a query sees a token.
    #[inline(always)]
    pub fn sees_some(&self, query: usize) -> bool {
        if self.sparse.is_some() {
            self.runs(query).next().is_some()
        } else {
            !self.by(query / self.task.group).is_empty()
        }
    }

    /// Returns which of the first [`TILE`] tokens from `first` on a query sees, as bits.
    #[inline(always)]
    pub fn bits(&self, query: usize, first: usize) -> u64 {
        if self.sparse.is_none() {
            return run_bits(first, self.by(query / self.task.group));
        }
        let mut bits = 0;
        for run in self.runs_in(query, first, TILE) {
            bits |= run_bits(first, run);
        }
        bits
    }

    /// Returns which tokens of a tile, and in a block-sparse call of the blocks that some query of the task sees, are read.
    ///
    /// The first row decides: every block that it does not see, and that is not behind it, is hidden from later rows too.
    #[inline(always)]
    fn read(&self, first: usize, tokens: Range<usize>) -> u64 {
        let Some(sparse) = self.sparse else { return run_bits(first, tokens) };
        let Task { group, position, kv_head, .. } = *self.task;
        let mut bits = 0;
        for run in sparse.heads(kv_head * group..(kv_head + 1) * group, kv_head).runs(position, tokens) {
            bits |= run_bits(first, run);
        }
        bits
    }

    /// Returns the tokens that some row sees: the first row sees furthest back, the last row furthest ahead.
    #[inline(always)]
    pub fn all(&self) -> Range<usize> {
        let (start, end) = (self.by(0).start, self.by(self.task.rows - 1).end);
        start..end.max(start)
    }

    /// Iterates over the offsets of the tiles in the partition that some row sees.
    #[inline(always)]
    pub fn tiles(&self) -> StepBy<Range<usize>> {
        let all = self.all();
        ((all.start - self.first()) / TILE * TILE..all.end - self.first()).step_by(TILE)
    }

    /// Returns the tile at an offset; `None` if none of its tokens is read.
    #[inline(always)]
    pub fn tile(&self, offset: usize, block_size: usize) -> Option<Tile> {
        let (all, first) = (self.all(), self.first() + offset);
        let read = self.read(first, all.start.max(first)..all.end.min(first + TILE));
        if read == 0 {
            return None;
        }
        let tokens = read.trailing_zeros() as usize..TILE - read.leading_zeros() as usize;
        let mut slots = [Slot::default(); TILE];
        Slot::of_tokens(self.task.table, block_size, first + tokens.start, &mut slots[tokens.clone()]);
        if self.sparse.is_some() {
            let mut last = slots[tokens.start];
            for token in tokens.clone() {
                if read >> token & 1 == 0 {
                    slots[token] = last;
                }
                last = slots[token];
            }
        }
        let (first, last) = (slots[tokens.start], slots[tokens.end - 1]);
        slots[tokens.start / LANES * LANES..tokens.start].fill(first);
        slots[tokens.end..tokens.end.next_multiple_of(LANES)].fill(last);
        Some(Tile { offset, tokens, read, slots })
    }
}

/// Returns which of the tokens of a tile that starts at `first` are in a range, as bits.
#[inline(always)]
fn run_bits(first: usize, range: Range<usize>) -> u64 {
    const { assert!(TILE == 64) };
    let (start, end) = (range.start.clamp(first, first + TILE) - first, range.end.clamp(first, first + TILE) - first);
    if start < end { u64::MAX >> (64 - (end - start)) << start } else { 0 }
}

/// Up to [`TILE`] tokens of a partition.
pub(super) struct Tile {
    /// Offset of the tile in the partition.
    pub offset: usize,
    /// Tokens from the first to the last that is read, relative to the tile.
    pub tokens: Range<usize>,
    /// Which tokens are read, as bits: those that some row sees, and in a block-sparse call only blocks that some query sees.
    pub read: u64,
    /// Slot of each token. Entries up to whole panels whose token is not read have the slot of a neighbour.
    pub slots: [Slot; TILE],
}

impl Tile {
    /// Returns the panels of [`LANES`] tokens.
    #[inline(always)]
    pub fn panels(&self) -> Range<usize> {
        self.tokens.start / LANES..self.tokens.end.div_ceil(LANES)
    }

    /// Whether a token of a panel is read.
    #[inline(always)]
    pub fn reads_panel(&self, panel: usize) -> bool {
        self.read >> (panel * LANES) & ((1 << LANES) - 1) != 0
    }

    /// Returns the part of a range of the context that lies in the tile, relative to the tile.
    #[inline(always)]
    pub fn part(&self, seen: &Seen<'_>, range: Range<usize>) -> Range<usize> {
        let first = seen.first() + self.offset;
        let index = |token: usize| token.clamp(first, first + TILE) - first;
        index(range.start)..index(range.end.max(range.start))
    }
}

/// Evaluates `$each` for the queries of a task, up to `$most` at a time (`$few` lists the smaller numbers), with their
/// number as the constant `$n`; without vectors one at a time, so that no other number is compiled.
macro_rules! by_queries {
    ($lanes:ident, $queries:expr, $($few:literal)* .. $most:ident, |$first:ident, $n:ident| $each:expr) => {{
        let mut $first = 0;
        while $first < $queries {
            if $lanes::VECTORS {
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
            } else {
                const $n: usize = 1;
                $each
                $first += 1;
            }
        }
    }};
}
pub(super) use by_queries;

/// Returns what is read [`AHEAD`] tokens after a token of the partition, in the order of reading: the keys of a partition,
/// its values, the keys of the next partition, and the keys of the next task.
#[inline(always)]
pub(super) fn ahead(shared: &Shared<'_>, seen: &Seen<'_>, which: usize, token: usize) -> Ahead {
    let (task, shape, all) = (seen.task, &shared.shape, seen.all());
    if seen.sparse.is_some() {
        let first = (seen.first() + token).max(all.start) + AHEAD;
        if first >= all.end || seen.read(first, first..first + 1) == 0 {
            return Ahead::NONE;
        }
    }
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
    let (first, tokens) = match shared.halves {
        // Each token is in all cache lines of the keys of its panel.
        Some(Halves::Pairs(_)) => (first / LANES * LANES, LANES),
        _ => (first, LANES.min(end - first).min(shape.block_size - first % shape.block_size)),
    };
    shared.pages.ahead(which, shape, Slot::of_token(table, shape.block_size, first), kv_head, tokens)
}

/// Keys or values of a tile in pairs.
#[derive(Clone, Copy)]
pub(super) struct PairPanels<'a> {
    /// Lines of each panel. Those of panels that nobody reads have anything.
    pub lines: [&'a [Pairs]; PANELS],
    /// Where as many lines are that are read next, for each panel. They are prefetched one by one between computations, so that
    /// neither waits for the other.
    pub ahead: [*const Pairs; PANELS],
}

impl PairPanels<'_> {
    /// The same without a need to prefetch: names lines that are in a cache.
    #[inline(always)]
    pub fn again(self) -> Self {
        PairPanels { ahead: self.lines.map(<[Pairs]>::as_ptr), ..self }
    }
}

/// Writes the keys or values of sixteen slots in pairs. A trait instead of a closure: see [`simd`].
pub(super) trait Put {
    fn put(shared: &Shared<'_>, seen: &Seen<'_>, halves: Halves<'_>, slots: &[Slot; LANES], to: &mut [Pairs]);
}

/// Returns keys (0) or values (1) of a tile in pairs, `[len]` of each panel: in place, or in `space`, `[PANELS, len]`, where `P`
/// writes those of sixteen slots.
#[inline(always)]
pub(super) fn panels<'a, P: Put>(
    (shared, seen, tile): (&Shared<'a>, &Seen<'_>, &Tile),
    which: usize,
    len: usize,
    space: &'a mut [Pairs],
) -> PairPanels<'a> {
    let mut panels = PairPanels { lines: [&[]; PANELS], ahead: [std::ptr::null(); PANELS] };
    for (i, space) in space.chunks_exact_mut(len).enumerate().take(PANELS) {
        let is_read = tile.panels().contains(&i) && tile.reads_panel(i);
        let Some(halves) = shared.halves.filter(|_| is_read) else {
            panels.lines[i] = space;
            panels.ahead[i] = space.as_ptr();
            continue;
        };
        let slots: &[Slot; LANES] = &tile.slots.as_chunks().0[i];
        let lines = match halves {
            Halves::Pairs(pages) => &pages[which][panel_offset(&shared.shape, slots[0], seen.task.kv_head).0..][..len],
            _ => {
                P::put(shared, seen, halves, slots, space);
                space
            }
        };
        panels.lines[i] = lines;
        panels.ahead[i] =
            ahead(shared, seen, which, tile.offset + i * LANES).start().map_or(lines.as_ptr(), <*const u8>::cast);
    }
    panels
}

/// Multiplies the scores (or weights) of each token by its scale, if keys (0) or values (1) have scales in the page.
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

/// Applies soft cap and ALiBi. `scores[0]` is the score of the token `start`.
#[inline(always)]
pub(super) fn bias(shared: &Shared<'_>, task: &Task<'_>, query: usize, start: usize, scores: &mut [f32]) {
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
