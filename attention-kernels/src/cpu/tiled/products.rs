//! Products of a band: its scores, and its weighted values.

use simd::pairs::Pairs;
use simd::tiles::{Registers, Tile, add_group};
use simd::{LANES, prefetch};

use super::operands::{Band, Keys, mask};

/// Multiplies queries, `[groups]`, and keys. `ASKS`: prefetches what is read next.
#[inline(always)]
pub(super) fn score<T: Registers, const ASKS: bool>(
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
pub(super) fn sum<T: Registers>(t: &mut T, band: &Band<'_>, weights: &[Tile], values: &[Tile], sums: &mut [Tile]) {
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

/// As [`sum`], with zeros for values that a query does not see: a weight of 0 does not hide one that is not finite.
#[cold]
#[inline(never)]
pub(super) fn sum_one_by_one(band: &Band<'_>, weights: &[Tile], values: &[Tile], sums: &mut [Tile]) {
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
    for (step, a) in a.iter().enumerate() {
        if ASKS {
            for line in step * LANES..(step + 1) * LANES {
                ahead.iter().for_each(|ahead| prefetch(ahead.wrapping_add(line).cast()));
            }
        }
        t.load::<4>(&a[0]);
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
