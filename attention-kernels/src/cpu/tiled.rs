//! Attention of query rows over partitions of one KV head, in products of bfloat16 tiles ([`device::simd::tiles`]).
//!
//! ```text
//!             A tile                               B tile                                  sums
//! scores      16 queries × 32 elements             32 elements × 16 tokens (a panel)       16 queries × 16 tokens
//! values      16 queries × 32 tokens (weights)     32 tokens × 16 elements                 16 queries × 16 elements
//! ```
//!
//! The keys of sixteen tokens in a cache in pairs are B tiles as they are. The values of 32 tokens lie in two panels, so a task copies
//! those of a partition into tiles, once for all of its queries. A band of sixteen queries is computed at a time: its scores fit the L1
//! cache, while keys and values pass through from the L2 cache.
//!
//! **Order of sums.** A score is a sum over groups of 32 elements, padded with zeros. The softmax of a partition takes 2 to the power of
//! (score − greatest) × log2 e ([`Lanes::exp2`]). It adds the weights of the even and of the odd panels of sixteen tokens, a
//! token in each lane, then the two, then the lanes. A weighted sum adds groups of 32 tokens, which begin at multiples of 32. A token that
//! a query does not see has the weight 0, and its value counts as 0 if it is not finite. A zero is added to the sum, because the sign
//! of a zero depends on groups that no token is seen of. So the bits of a query depend on nothing but the tokens that it sees.

// Loops over registers are most readable with an index that several arrays share.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use device::Isa;
use device::simd::pairs::{PairLanes, Pairs, round_row};
use device::simd::tiles::{EMPTY, GROUP, Registers, Tile, add_group};
use device::simd::{LANES, Lanes, prefetch};

use super::merge::Merged;
use super::pair_scores::key_panels;
use super::pair_values::{PAIRS, value_panels};
use super::tile::{PANELS, Scratch, Seen, Shared, TILE, Task, bias, grow};
use crate::shape::PARTITION;

/// Panels of a partition.
const NUM_PANELS: usize = PARTITION / LANES;

/// Groups of 32 tokens of a partition.
const NUM_GROUPS: usize = PARTITION / GROUP;

/// Runs a task as [`super::kernel::run`] does. The cache must be of bfloat16.
pub(super) fn run(isa: Isa, shared: &Shared<'_>, task: &Task<'_>, scratch: &mut Scratch, result: &mut [f32]) {
    device::on_tiles!(isa, task.queries().min(LANES), |t| attend_on(isa, t, shared, task, scratch, result));
}

fn attend_on<T: Registers>(
    isa: Isa,
    t: &mut T,
    shared: &Shared<'_>,
    task: &Task<'_>,
    scratch: &mut Scratch,
    result: &mut [f32],
) {
    device::dispatch_pairs!(
        isa,
        attend::<T: Registers>(
            t: &mut T,
            shared: &Shared<'_>,
            task: &Task<'_>,
            scratch: &mut Scratch,
            result: &mut [f32],
        )
    );
}

#[inline(always)]
fn attend<D: PairLanes, T: Registers>(
    t: &mut T,
    shared: &Shared<'_>,
    task: &Task<'_>,
    scratch: &mut Scratch,
    result: &mut [f32],
) {
    let (dim, queries, key_dim) = (shared.value_dim, task.queries(), shared.shape.head_dim);
    let groups = key_dim.div_ceil(GROUP);
    let columns = dim.div_ceil(2 * LANES) * 2;
    let (key_lines, value_lines) = (NUM_PANELS * key_dim.div_ceil(2), TILE / 2 * dim.div_ceil(LANES));
    let Scratch { pairs, part, on_tiles, .. } = scratch;
    grow(pairs, key_lines + value_lines, Pairs::ZERO);
    grow(part, columns * LANES, 0.0);
    grow(&mut on_tiles.queries, queries.div_ceil(LANES) * groups, EMPTY);
    grow(&mut on_tiles.keys, NUM_PANELS * groups, EMPTY);
    grow(&mut on_tiles.values, columns * NUM_GROUPS, EMPTY);
    grow(&mut on_tiles.scores, NUM_PANELS, EMPTY);
    grow(&mut on_tiles.sums, columns, EMPTY);
    let (key_lines, value_lines) = pairs.split_at_mut(key_lines);
    let (result_sums, states) = result.split_at_mut(queries * dim);
    let states = states.as_chunks_mut::<2>().0;
    states.fill([0.0; 2]);
    round_queries::<D>(task, key_dim, &mut on_tiles.queries);
    for partition in task.partitions.clone() {
        let seen = &Seen { task, window: shared.window, sparse: shared.sparse, partition };
        let keys = &keys::<D>(shared, seen, key_lines, &mut on_tiles.keys);
        let mut values = None;
        for first in (0..queries).step_by(LANES) {
            let band = &Band::new(seen, first..queries.min(first + LANES));
            if band.panels.is_empty() {
                continue;
            }
            let (scores, sums) = (&mut on_tiles.scores, &mut on_tiles.sums[..columns]);
            let rows = &on_tiles.queries[first / LANES * groups..][..groups];
            match values {
                None => score::<T, true>(t, band, rows, keys, scores),
                Some(_) => score::<T, false>(t, band, rows, keys, scores),
            }
            let found = &weigh::<D>(shared, band, scores);
            let unusual = match values {
                Some(unusual) => unusual,
                None => *values.insert(pack::<D>(shared, seen, value_lines, (&mut on_tiles.values, columns))),
            };
            if band.hides_some_of(unusual) {
                sum_one_by_one(band, scores, &on_tiles.values, sums);
            } else {
                sum(t, band, scores, &on_tiles.values, sums);
            }
            merge::<D::Floats>(band, found, sums, part, (&mut *result_sums, dim), states);
        }
    }
}

/// Rounds the queries of a task to A tiles, `[bands of 16, groups]`. Rows that only fill a tile are zeros.
#[inline(always)]
fn round_queries<D: PairLanes>(task: &Task<'_>, dim: usize, to: &mut [Tile]) {
    let (queries, groups) = (task.queries(), dim.div_ceil(GROUP));
    for (band, tiles) in to.chunks_exact_mut(groups).enumerate().take(queries.div_ceil(LANES)) {
        for row in 0..LANES {
            let query = band * LANES + row;
            if query < queries {
                for (from, tile) in task.query(query, dim).chunks(GROUP).zip(&mut *tiles) {
                    tile[row] = Pairs::ZERO;
                    round_row::<D>(from, &mut tile[row].0[..from.len().div_ceil(2)]);
                }
            } else {
                tiles.iter_mut().for_each(|tile| tile[row] = Pairs::ZERO);
            }
        }
    }
}

/// Up to sixteen queries of a task.
struct Band<'a> {
    seen: &'a Seen<'a>,
    queries: Range<usize>,
    /// Panels of the partition, in whole groups of 32 tokens, outside of which no query sees a token.
    panels: Range<usize>,
}

impl<'a> Band<'a> {
    #[inline(always)]
    fn new(seen: &'a Seen<'a>, queries: Range<usize>) -> Band<'a> {
        // The first row sees furthest back, the last row furthest ahead.
        let rows = [queries.start, queries.end - 1].map(|query| query / seen.task.group);
        let (start, end) = (seen.by(rows[0]).start - seen.first(), seen.by(rows[1]).end - seen.first());
        let panels = if start < end { start / GROUP * 2..end.div_ceil(GROUP) * 2 } else { 0..0 };
        Band { seen, queries, panels }
    }

    /// Returns the groups of 32 tokens.
    #[inline(always)]
    fn groups(&self) -> Range<usize> {
        self.panels.start / 2..self.panels.end / 2
    }

    /// Whether some query does not see all tokens of a group, given the groups with values that are not finite as bits.
    fn hides_some_of(&self, groups: u32) -> bool {
        let sees_all = |group, query| self.seen.bits(query, self.first_of(group)) as u32 == u32::MAX;
        let unusual = |group: &usize| groups >> group & 1 == 1;
        groups != 0
            && self.groups().filter(unusual).any(|group| !self.queries.clone().all(|query| sees_all(group, query)))
    }

    /// Returns the first token of a group.
    #[inline(always)]
    fn first_of(&self, group: usize) -> usize {
        self.seen.first() + group * GROUP
    }
}

/// Keys of a partition as B tiles.
struct Keys<'a> {
    /// Tiles of each panel; none where nobody reads a token.
    panels: [&'a [Tile]; NUM_PANELS],
    /// Where as many lines are that are read next.
    ahead: [*const Pairs; NUM_PANELS],
}

/// Returns the keys of a partition: in place, or in `lines`, or, padded with zeros to whole groups, in `padded`.
#[inline(always)]
fn keys<'a, D: PairLanes>(
    shared: &Shared<'a>,
    seen: &Seen<'_>,
    lines: &'a mut [Pairs],
    padded: &'a mut [Tile],
) -> Keys<'a> {
    let (dim, mut keys) =
        (shared.shape.head_dim, Keys { panels: [&[]; NUM_PANELS], ahead: [std::ptr::null(); NUM_PANELS] });
    let spaces = lines.chunks_exact_mut(PANELS * dim.div_ceil(2));
    let padded = padded.chunks_exact_mut(PANELS * dim.div_ceil(GROUP));
    let skipped = seen.tiles().next().map_or(0, |offset| offset / TILE);
    for (offset, (space, padded)) in seen.tiles().zip(spaces.zip(padded).skip(skipped)) {
        let Some(tile) = seen.tile(offset, shared.shape.block_size) else { continue };
        let read = key_panels::<D>((shared, seen, &tile), space);
        for (p, padded) in padded.chunks_exact_mut(dim.div_ceil(GROUP)).enumerate() {
            let (whole, rest) = read.lines[p].as_chunks();
            keys.panels[offset / LANES + p] = whole;
            keys.ahead[offset / LANES + p] = read.ahead[p];
            if !rest.is_empty() {
                padded[..whole.len()].copy_from_slice(whole);
                padded[whole.len()] = EMPTY;
                padded[whole.len()][..rest.len()].copy_from_slice(rest);
                keys.panels[offset / LANES + p] = padded;
            }
        }
    }
    keys
}

/// Multiplies queries, `[groups]`, and keys. `ASKS`: prefetches what is read next.
#[inline(always)]
fn score<T: Registers, const ASKS: bool>(
    t: &mut T,
    band: &Band<'_>,
    queries: &[Tile],
    keys: &Keys<'_>,
    scores: &mut [Tile],
) {
    let whole = |tiles| Steps { tiles, step: 1 };
    let (queries, mut pending, mut panel) = (queries.as_chunks::<1>().0, Pending::default(), band.panels.start);
    while panel < band.panels.end {
        let is_read = |panel: usize| !keys.panels[panel].is_empty();
        panel += match (&keys.panels[panel..], &keys.ahead[panel..]) {
            ([a, b, c, d, ..], [e, f, g, h, ..])
                if panel + 4 <= band.panels.end && is_read(panel) && is_read(panel + 2) =>
            {
                multiply::<T, 4, 1, ASKS>(
                    t,
                    queries,
                    [*a, *b, *c, *d].map(whole),
                    [e, f, g, h],
                    panel,
                    &mut pending,
                    scores,
                )
            }
            ([a, b, ..], [e, f, ..]) if is_read(panel) => {
                multiply::<T, 2, 1, ASKS>(t, queries, [*a, *b].map(whole), [e, f], panel, &mut pending, scores)
            }
            _ => 2,
        };
    }
    pending.store(t, scores);
}

/// Adds the values, `[NUM_GROUPS, columns]`, with the weights of a band.
#[inline(always)]
fn sum<T: Registers>(t: &mut T, band: &Band<'_>, weights: &[Tile], values: &[Tile], sums: &mut [Tile]) {
    let weights = weights[band.panels.clone()].as_chunks::<2>().0;
    let (columns, mut pending, mut column) = (sums.len(), Pending::default(), 0);
    let values = &values[band.groups().start * columns..band.groups().end * columns];
    let none = &std::ptr::null();
    while column < columns {
        let [a, b] = [column, column + 1].map(|column| Steps { tiles: &values[column..], step: columns });
        column += if column + 4 <= columns {
            let [c, d] = [column + 2, column + 3].map(|column| Steps { tiles: &values[column..], step: columns });
            multiply::<T, 4, 2, false>(t, weights, [a, b, c, d], [none; 4], column, &mut pending, sums)
        } else {
            multiply::<T, 2, 2, false>(t, weights, [a, b], [none; 2], column, &mut pending, sums)
        };
    }
    pending.store(t, sums);
}

/// The B tiles of a column: every `step`th.
#[derive(Clone, Copy)]
struct Steps<'a> {
    tiles: &'a [Tile],
    step: usize,
}

/// Sums that are in the tile registers: for each of them the tile that they belong to.
#[derive(Default)]
struct Pending([Option<usize>; 4]);

impl Pending {
    /// Stores all.
    #[inline(always)]
    fn store<T: Registers>(mut self, t: &mut T, out: &mut [Tile]) {
        self.store_one::<T, 0>(t, out);
        self.store_one::<T, 1>(t, out);
        self.store_one::<T, 2>(t, out);
        self.store_one::<T, 3>(t, out);
    }

    #[inline(always)]
    fn store_one<T: Registers, const C: usize>(&mut self, t: &mut T, out: &mut [Tile]) {
        if let Some(at) = self.0[C].take() {
            t.store::<C>(&mut out[at]);
        }
    }

    /// Stores old sums and starts those of another tile.
    #[inline(always)]
    fn start<T: Registers, const C: usize>(&mut self, t: &mut T, first: usize, out: &mut [Tile]) {
        self.store_one::<T, C>(t, out);
        t.zero::<C>();
        self.0[C] = Some(first + C);
    }
}

/// Computes `Σ a[i][0] · b[column][i]` for `W` columns, which belong to the tiles of `out` from `first` on. Returns W. `ahead`: where
/// as many lines of each column are prefetched.
///
/// Stores overlap with products only if they are near each other: old sums are stored between the first products of the next ones.
#[inline(always)]
fn multiply<T: Registers, const W: usize, const S: usize, const ASKS: bool>(
    t: &mut T,
    a: &[[Tile; S]],
    b: [Steps<'_>; W],
    ahead: [&*const Pairs; W],
    first: usize,
    pending: &mut Pending,
    out: &mut [Tile],
) -> usize {
    const { assert!(W == 2 || W == 4) };
    for step in 0..a.len() {
        if ASKS {
            for line in step * LANES..(step + 1) * LANES {
                ahead.iter().for_each(|ahead| prefetch(ahead.wrapping_add(line).cast()));
            }
        }
        t.load::<4>(&a[step][0]);
        t.stream::<6>(&b[0].tiles[step * b[0].step]);
        if step == 0 {
            pending.start::<T, 0>(t, first, out);
        }
        t.add_products::<0, 4, 6>();
        t.stream::<7>(&b[1].tiles[step * b[1].step]);
        if step == 0 {
            pending.start::<T, 1>(t, first, out);
        }
        t.add_products::<1, 4, 7>();
        if W == 4 {
            t.stream::<6>(&b[2].tiles[step * b[2].step]);
            if step == 0 {
                pending.start::<T, 2>(t, first, out);
            }
            t.add_products::<2, 4, 6>();
            t.stream::<7>(&b[3].tiles[step * b[3].step]);
            if step == 0 {
                pending.start::<T, 3>(t, first, out);
            }
            t.add_products::<3, 4, 7>();
        }
    }
    W
}

/// Converts the scores of a band to weights: those of two panels are one A tile in place of the first. Returns the state of each query.
#[inline(always)]
fn weigh<D: PairLanes>(shared: &Shared<'_>, band: &Band<'_>, scores: &mut [Tile]) -> [Merged; LANES] {
    let (task, mut found) = (band.seen.task, [Merged::default(); LANES]);
    let scores = &mut scores[band.panels.clone()];
    // Scores with a bias are scaled before it is added; others while the greatest is subtracted.
    let is_plain = shared.soft_cap.is_none() && task.slopes.is_none() && task.scale > 0.0;
    if !is_plain {
        scale_and_bias(shared, band, scores);
    }
    hide(band, scores);
    let (scale, mut row) = (if is_plain { task.scale } else { 1.0 }, 0);
    while row < band.queries.len() {
        row += match band.queries.len() - row {
            4.. => softmax::<D, 4>(scores, row, scale, &mut found),
            _ => softmax::<D, 1>(scores, row, scale, &mut found),
        };
    }
    found
}

/// Scales scores, and applies soft cap and ALiBi.
#[inline(always)]
fn scale_and_bias(shared: &Shared<'_>, band: &Band<'_>, scores: &mut [Tile]) {
    let (task, first) = (band.seen.task, band.seen.first() + band.panels.start * LANES);
    for (panel, tile) in scores.iter_mut().enumerate() {
        for (query, line) in band.queries.clone().zip(tile) {
            let scores = line.as_floats_mut();
            scores.iter_mut().for_each(|score| *score *= task.scale);
            bias(shared, task, query, first + panel * LANES, scores);
        }
    }
}

/// Replaces the scores of tokens that a query does not see by −∞.
#[inline(always)]
fn hide(band: &Band<'_>, scores: &mut [Tile]) {
    let Band { seen, queries, .. } = band;
    // All see the tokens from the first that the last row sees to the last that the first row sees, unless a rule hides some.
    let rows = [queries.end - 1, queries.start].map(|query| seen.by(query / seen.task.group));
    let common = rows[0].start..rows[1].end;
    for (group, tiles) in band.groups().zip(scores.as_chunks_mut::<2>().0) {
        let first = band.first_of(group);
        if seen.sparse.is_none() && common.start <= first && first + GROUP <= common.end {
            continue;
        }
        for (row, query) in queries.clone().enumerate() {
            let bits = seen.bits(query, first);
            for (tile, bits) in tiles.iter_mut().zip([bits, bits >> LANES]) {
                for (lane, score) in tile[row].as_floats_mut().iter_mut().enumerate() {
                    *score = if bits >> lane & 1 == 1 { *score } else { f32::NEG_INFINITY };
                }
            }
        }
    }
}

/// Converts the scores of `R` queries from a row on into weights in bfloat16. Returns R.
#[inline(always)]
fn softmax<D: PairLanes, const R: usize>(scores: &mut [Tile], row: usize, scale: f32, found: &mut [Merged]) -> usize {
    let zero = D::Floats::splat(0.0);
    let mut greatest = [D::Floats::splat(f32::MIN); R];
    for tile in scores.iter() {
        for r in 0..R {
            greatest[r] = greatest[r].max(D::Floats::load(tile[row + r].as_floats()));
        }
    }
    let factor = scale * std::f32::consts::LOG2_E;
    let (mut less, mut totals) = ([zero; R], [[zero; 2]; R]);
    for r in 0..R {
        let greatest = greatest[r].greatest();
        found[row + r].greatest = greatest * scale;
        // A query that sees nothing has no greatest score.
        less[r] = D::Floats::splat(if greatest > f32::MIN { -greatest * factor } else { 0.0 });
    }
    let factor = D::Floats::splat(factor);
    for [low, high] in scores.as_chunks_mut::<2>().0 {
        for r in 0..R {
            let even = D::Floats::load(low[row + r].as_floats()).mul_add(factor, less[r]).exp2();
            let odd = D::Floats::load(high[row + r].as_floats()).mul_add(factor, less[r]).exp2();
            totals[r] = [totals[r][0].add(even), totals[r][1].add(odd)];
            let mut weights = [0.0; GROUP];
            let (to_even, to_odd) = weights.as_chunks_mut::<LANES>().0.split_at_mut(1);
            even.store(&mut to_even[0]);
            odd.store(&mut to_odd[0]);
            D::round(&weights, &mut low[row + r].0);
        }
    }
    for r in 0..R {
        found[row + r].total = totals[r][0].add(totals[r][1]).sum();
    }
    R
}

/// Copies the values of a partition into B tiles, `[NUM_GROUPS, columns]`, with zeros for tokens that nobody reads. Returns the groups
/// with values that are not finite, as bits.
#[inline(always)]
fn pack<D: PairLanes>(
    shared: &Shared<'_>,
    seen: &Seen<'_>,
    space: &mut [Pairs],
    (to, columns): (&mut [Tile], usize),
) -> u32 {
    let (vectors, mut unusual) = (shared.width() / LANES, 0);
    for offset in seen.tiles() {
        let first = offset / GROUP;
        let to = &mut to[first * columns..][..TILE / GROUP * columns];
        let Some(tile) = seen.tile(offset, shared.shape.block_size) else {
            to.fill(EMPTY);
            continue;
        };
        let panels = value_panels::<D>((shared, seen, &tile), space);
        for (p, lines) in panels.lines.iter().enumerate() {
            let (to, half, mut exponents) = (&mut to[p / 2 * columns..][..columns], p % 2 * PAIRS, [0; LANES]);
            for (pair, lines) in lines.chunks_exact(vectors).enumerate() {
                let mask = mask(tile.read >> (p * LANES + 2 * pair));
                let ahead = panels.ahead[p].wrapping_add(pair * vectors);
                for (column, (line, to)) in lines.iter().zip(&mut *to).enumerate() {
                    prefetch(ahead.wrapping_add(column).cast());
                    let line: [u32; LANES] = std::array::from_fn(|lane| line.0[lane] & mask);
                    for lane in 0..LANES {
                        // Only an exponent of ones carries into the bit above it.
                        exponents[lane] |= (line[lane] & 0x7f80_7f80).wrapping_add(0x0080_0080);
                    }
                    to[half + pair].0 = line;
                }
            }
            let is_unusual = exponents.into_iter().fold(0, |all, one| all | one) & 0x8000_8000 != 0;
            unusual |= u32::from(is_unusual) << (first + p / 2);
        }
    }
    unusual
}

/// Returns which halves of a pair count, given the two tokens that are seen as the lowest bits.
#[inline(always)]
fn mask(seen: u64) -> u32 {
    [0, 0x0000_ffff, 0xffff_0000, u32::MAX][seen as usize & 3]
}

/// As [`sum`], with zeros for values that a query does not see: a weight of 0 does not hide one that is not finite.
#[cold]
#[inline(never)]
fn sum_one_by_one(band: &Band<'_>, weights: &[Tile], values: &[Tile], sums: &mut [Tile]) {
    for (row, query) in band.queries.clone().enumerate() {
        for column in 0..sums.len() {
            for lane in 0..LANES {
                let sum = band.groups().fold(0.0, |sum, group| {
                    let bits = band.seen.bits(query, band.first_of(group));
                    let lines = values[group * sums.len() + column].iter().enumerate();
                    let values = lines.map(|(pair, line)| line.0[lane] & mask(bits >> (2 * pair)));
                    add_group(sum, weights[2 * group][row].0.into_iter().zip(values))
                });
                sums[column][row].0[lane] = sum.to_bits();
            }
        }
    }
}

/// Merges the weighted values of a partition into those of the partitions before it.
#[inline(always)]
fn merge<L: Lanes>(
    band: &Band<'_>,
    found: &[Merged; LANES],
    tiles: &[Tile],
    part: &mut [f32],
    (sums, dim): (&mut [f32], usize),
    states: &mut [[f32; 2]],
) {
    for (row, query) in band.queries.clone().enumerate() {
        if found[row].total == 0.0 {
            continue;
        }
        for (part, tile) in part.as_chunks_mut::<LANES>().0.iter_mut().zip(tiles) {
            L::load(tile[row].as_floats()).add(L::splat(0.0)).store(part);
        }
        let [greatest, total] = states[query];
        let mut merged = Merged { greatest, total };
        merged.merge(found[row], &mut sums[query * dim..][..dim], &part[..dim]);
        states[query] = [merged.greatest, merged.total];
    }
}
