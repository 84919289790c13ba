//! Operands of a partition: bands of queries, keys and values as B tiles.

use std::ops::Range;

use simd::pairs::{PairLanes, Pairs};
use simd::tiles::{EMPTY, GROUP, Tile};
use simd::{LANES, prefetch};

use crate::cpu::pair_scores::key_panels;
use crate::cpu::pair_values::{PAIRS, value_panels};
use crate::cpu::tile::{PANELS, Seen, Shared, TILE};
use crate::shape::PARTITION;

/// Panels of a partition.
pub(super) const NUM_PANELS: usize = PARTITION / LANES;

/// Groups of 32 tokens of a partition.
pub(super) const NUM_GROUPS: usize = PARTITION / GROUP;

/// Up to sixteen queries of a task.
pub(super) struct Band<'a> {
    pub seen: &'a Seen<'a>,
    pub queries: Range<usize>,
    /// Panels of the partition, in whole groups of 32 tokens, outside of which no query sees a token.
    pub panels: Range<usize>,
}

impl<'a> Band<'a> {
    #[inline(always)]
    pub fn new(seen: &'a Seen<'a>, queries: Range<usize>) -> Band<'a> {
        // The first row sees furthest back, the last row furthest ahead.
        let rows = [queries.start, queries.end - 1].map(|query| query / seen.task.group);
        let (start, end) = (seen.by(rows[0]).start - seen.first(), seen.by(rows[1]).end - seen.first());
        let panels = if start < end { start / GROUP * 2..end.div_ceil(GROUP) * 2 } else { 0..0 };
        Band { seen, queries, panels }
    }

    /// Returns the groups of 32 tokens.
    #[inline(always)]
    pub fn groups(&self) -> Range<usize> {
        self.panels.start / 2..self.panels.end / 2
    }

    /// Whether some query does not see all tokens of a group, given the groups with values that are not finite as bits.
    pub fn hides_some_of(&self, groups: u32) -> bool {
        let sees_all = |group, query| self.seen.bits(query, self.first_of(group)) as u32 == u32::MAX;
        let unusual = |group: &usize| groups >> group & 1 == 1;
        groups != 0
            && self.groups().filter(unusual).any(|group| !self.queries.clone().all(|query| sees_all(group, query)))
    }

    /// Returns the first token of a group.
    #[inline(always)]
    pub fn first_of(&self, group: usize) -> usize {
        self.seen.first() + group * GROUP
    }
}

/// Keys of a partition as B tiles.
pub(super) struct Keys<'a> {
    /// Tiles of each panel; none where nobody reads a token.
    pub panels: [&'a [Tile]; NUM_PANELS],
    /// Where as many lines are that are read next.
    pub ahead: [*const Pairs; NUM_PANELS],
}

/// Returns the keys of a partition: in place, or in `lines`, or, padded with zeros to whole groups, in `padded`.
#[inline(always)]
pub(super) fn keys<'a, D: PairLanes>(
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

/// Copies the values of a partition into B tiles, `[NUM_GROUPS, columns]`, with zeros for tokens that nobody reads. Returns the groups
/// with values that are not finite, as bits.
#[inline(always)]
pub(super) fn pack<D: PairLanes>(
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
pub(super) fn mask(seen: u64) -> u32 {
    [0, 0x0000_ffff, 0xffff_0000, u32::MAX][seen as usize & 3]
}
