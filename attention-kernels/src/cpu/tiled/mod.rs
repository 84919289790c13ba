//! Attention of query rows over partitions of one KV head, in products of bfloat16 tiles ([`simd::tiles`]).
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

mod operands;
mod products;
mod softmax;

use simd::pairs::{PairLanes, Pairs, round_row};
use simd::tiles::{EMPTY, GROUP, Registers, Tile};
use simd::{Isa, LANES, Lanes, prefetch};

use super::merge::Merged;
use super::tile::{Scratch, Seen, Shared, TILE, Task, grow};
use operands::{Band, NUM_GROUPS, NUM_PANELS, keys, pack};
use products::{score, sum, sum_one_by_one};
use softmax::weigh;

/// Runs a task as [`super::kernel::run`] does. The cache must be of bfloat16.
pub(super) fn run(isa: Isa, shared: &Shared<'_>, task: &Task<'_>, scratch: &mut Scratch, result: &mut [f32]) {
    simd::on_tiles!(isa, task.queries().min(LANES), |t| attend_on(isa, t, shared, task, scratch, result));
}

fn attend_on<T: Registers>(
    isa: Isa,
    t: &mut T,
    shared: &Shared<'_>,
    task: &Task<'_>,
    scratch: &mut Scratch,
    result: &mut [f32],
) {
    simd::dispatch_pairs!(
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
            if query + LANES < queries {
                let ahead = task.query(query + LANES, dim).chunks(LANES);
                ahead.for_each(|vector| prefetch(vector.as_ptr().cast()));
            }
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
