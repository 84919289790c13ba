//! Products of bfloat16 with vectors: activations are rounded once, then pairs are multiplied as [`simd::pairs`] or
//! [`simd::tiles`] defines.
//!
//! Every output element is one running sum over the pairs of k, or over groups of them, in their order, whatever the number of rows,
//! the tile, the threads or the instruction set.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

use simd::pairs::{PairLanes, Pairs, round_row};
use simd::{LANES, Lanes, dispatch_pairs, prefetch};

use super::arithmetic::Arithmetic;
use super::output::Output;
use super::pack::Halves;
use super::processor::Processor;
use super::rows::RowBlock;
use super::tile::{Task, Tile, walk};
use super::tiled::{self, Grouped};

thread_local! {
    /// Rounded activations of this thread's last product, reused by the next. They are taken out while in use, because a task of
    /// the product may itself run a product on this thread.
    static ROUNDED: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
}

pub(super) fn run(
    Processor { isa, pool, .. }: Processor<'_>,
    k: usize,
    (x, rows): (&[f32], usize),
    halves: &Halves,
    bias: Option<&[f32]>,
    (out, n): (Output, usize),
) {
    let pairs = k.div_ceil(2);
    let mut rounded = ROUNDED.take();
    // Only grows: old contents do not matter.
    rounded.resize(rounded.len().max(rows * pairs), 0);
    pool.chunks_mut(&mut rounded[..rows * pairs], pairs, k * RowBlock::COST, |row, to| {
        let from = &x[row * k..][..k];
        dispatch_pairs!(isa, round_row(from: &[f32], to: &mut [u32]));
    });
    let x = &rounded[..rows * pairs];
    let task = Task { x, rows, row: pairs, lines: &halves.lines, panels: 0..n.div_ceil(LANES), bias, out };
    if halves.arithmetic == Arithmetic::Tiles {
        let least = halves.least_exponents(pool, pairs);
        task.run(pool, |pairs| {
            let (task, range) = (&task, pairs.clone());
            dispatch_pairs!(isa, walk_groups(task: &Task<'_, u32, Pairs>, range: Range<usize>));
            tiled::repair(task, pairs, least);
        });
    } else {
        let task = &task;
        task.run(pool, |pairs| dispatch_pairs!(isa, walk_pairs(task: &Task<'_, u32, Pairs>, pairs: Range<usize>)));
    }
    ROUNDED.set(rounded);
}

#[inline(always)]
fn walk_pairs<D: PairLanes>(task: &Task<'_, u32, Pairs>, pairs: Range<usize>) {
    walk::<Rounded<D>>(task, pairs);
}

#[inline(always)]
fn walk_groups<D: PairLanes>(task: &Task<'_, u32, Pairs>, pairs: Range<usize>) {
    walk::<Grouped<D>>(task, pairs);
}

/// Sums of pairs.
struct Rounded<D>(PhantomData<D>);

impl<D: PairLanes> Tile for Rounded<D> {
    type Number = u32;
    type Line = Pairs;
    type Sums = D::Floats;
    const NUMBERS_PER_LINE: usize = 1;

    #[inline(always)]
    fn accumulate<const M: usize, const P: usize>(
        x: [&[u32]; M],
        w: [&[Pairs]; P],
        ahead: [*const Pairs; P],
    ) -> [[D::Floats; P]; M] {
        let mut sums = [[D::Floats::splat(0.0); P]; M];
        let pairs = x.first().map_or(0, |x| x.len());
        // The compiler sees that no index is out of bounds.
        let (x, w) = (x.map(|x| &x[..pairs]), w.map(|w| &w[..pairs]));
        for i in 0..pairs {
            for ahead in ahead {
                prefetch(ahead.wrapping_add(i).cast());
            }
            // A loop instead of a closure: see `simd`.
            let mut weights = [D::load(&w[0][i]); P];
            for p in 1..P {
                weights[p] = D::load(&w[p][i]);
            }
            for m in 0..M {
                let value = D::splat(x[m][i]);
                for p in 0..P {
                    sums[m][p] = D::dot(sums[m][p], value, weights[p]);
                }
            }
        }
        sums
    }
}
