//! The product of quantised weights with activations in 8 bits.
//!
//! ```text
//! a tile: M rows × a pair of panels (or one of it), block after block of 32 k
//!     Σ = Σ w·a                              i32, exact
//!     y += Σ · (weight scale · row scale)    f32, fused
//! ```
//!
//! **Row-invariance**: an output is one running sum over the blocks of k in order, whatever the tile, the rows beside
//! it or the threads; the terms are exact integers times one rounded product of scales. So every instruction set gives
//! the same bits too, which the float product does not.

use std::ops::Range;

use super::Gemm;
use super::activations;
use super::blocks::{Ahead, Blocks, OUTPUTS, PAIR};
use super::form::Form;
use super::output::Output;
use super::quantize::BLOCK;
use super::rows::RowBlock;
use crate::simd::int8::{DotIsa, DotLanes, dispatch_dot};
use crate::simd::{LANES, Lanes};
use crate::{Isa, Pool};

/// A share of the product: some rows, some pairs of panels.
struct Task<'a, F: Form> {
    x: &'a [RowBlock],
    weights: &'a Blocks<F>,
    rows: usize,
    /// Where they stand in the output.
    first: usize,
    pairs: Range<usize>,
    bias: Option<&'a [f32]>,
    out: Output,
}

/// Shares per thread: several, so that a thread that is held up leaves little behind.
const TASKS_PER_THREAD: usize = 4;

/// Bytes of activations that are multiplied with all panels of a task before the next are: a quarter of the second cache that
/// cores of today have.
const ROWS_BYTES: usize = 256 << 10;

pub(super) fn run<F: Form>(isa: Isa, dot: DotIsa, pool: &Pool, rows: usize, args: Gemm<'_>, weights: &Blocks<F>) {
    let (n, k) = (args.weights.n(), args.weights.k());
    let pairs = n.div_ceil(OUTPUTS);
    let tasks = pairs.min(pool.threads() * TASKS_PER_THREAD);
    let start = |task: usize| task * pairs / tasks;
    let out = Output::new(args.y, n);
    let bias = args.bias;
    activations::with_activations(isa, pool, args.x, k, |x| {
        pool.run(tasks, rows * k * OUTPUTS * pairs / tasks, |task| {
            let pairs = start(task)..start(task + 1);
            let task = &Task { x, weights, rows, first: 0, pairs, bias, out };
            dispatch_dot!(dot, walk::<F: Form>(task: &Task<'_, F>));
        });
    });
}

/// The same by plain loops, in the same order.
pub(super) fn reference<F: Form>(args: Gemm<'_>, weights: &Blocks<F>) {
    let (n, k) = (args.weights.n(), args.weights.k());
    let x = activations::rows_in_blocks(args.x, k);
    for (x, y) in x.chunks(weights.blocks).zip(args.y.chunks_mut(n)) {
        for (column, y) in y.iter_mut().enumerate() {
            let mut sum = 0.0f32;
            for (b, block) in x.iter().enumerate() {
                let product = |i: usize| {
                    let (weight, _) = weights.parts(column, b * BLOCK + i);
                    i32::from(weight) * i32::from(block.values[i / 4][i % 4])
                };
                let (_, scale) = weights.parts(column, b * BLOCK);
                sum = ((0..BLOCK).map(product).sum::<i32>() as f32).mul_add(scale.to_f32() * block.scale, sum);
            }
            *y = sum + args.bias.map_or(0.0, |bias| bias[column]);
        }
    }
}

/// Panels outside, rows inside: the weights of a tile come from memory once and then from the nearest cache. Of rows so many
/// at a time that they stay in the second cache from panel to panel.
#[inline(always)]
fn walk<D: DotLanes, F: Form>(task: &Task<'_, F>) {
    let at_once = (ROWS_BYTES / size_of_val(&task.x[..task.weights.blocks])).max(1).next_multiple_of(D::ROWS);
    for first in (0..task.rows).step_by(at_once) {
        let rows = at_once.min(task.rows - first);
        let x = &task.x[first * task.weights.blocks..][..rows * task.weights.blocks];
        all_pairs::<D, F>(&Task { x, rows, first: task.first + first, pairs: task.pairs.clone(), ..*task });
    }
}

/// While the rows meet one pair of panels, the next one is asked for: a band waits for memory where it is the first to read a
/// line, and leaves it idle where it is not.
#[inline(always)]
fn all_pairs<D: DotLanes, F: Form>(task: &Task<'_, F>) {
    for pair in task.pairs.clone() {
        let mut next = task.weights.ahead(pair, task.rows.div_ceil(D::ROWS));
        if D::WIDE || task.rows <= highest::<D>(PAIR) {
            bands::<D, F, PAIR>(task, pair, 0, &mut next);
        } else {
            bands::<D, F, 1>(task, pair, 0, &mut next);
            bands::<D, F, 1>(task, pair, 1, &mut Ahead::nothing());
        }
    }
}

/// The most rows of a tile with so many panels.
#[inline(always)]
const fn highest<D: DotLanes>(panels: usize) -> usize {
    if D::WIDE || panels == 1 { D::ROWS } else { D::ROWS / 2 }
}

/// All rows, in bands of nearly equal height, with `P` panels of a pair.
#[inline(always)]
fn bands<D: DotLanes, F: Form, const P: usize>(task: &Task<'_, F>, pair: usize, panel: usize, next: &mut Ahead) {
    const { assert!(D::ROWS <= 6, "there are no higher tiles") };
    let (mut row, highest) = (0, const { highest::<D>(P) });
    while row < task.rows {
        let left = task.rows - row;
        let height = left.div_ceil(left.div_ceil(highest));
        match height {
            // The conditions are constants: what cannot be is not compiled.
            6 if highest >= 6 => tile::<D, F, 6, P>(task, row, pair, panel, next),
            5 if highest >= 5 => tile::<D, F, 5, P>(task, row, pair, panel, next),
            4 if highest >= 4 => tile::<D, F, 4, P>(task, row, pair, panel, next),
            3 if highest >= 3 => tile::<D, F, 3, P>(task, row, pair, panel, next),
            2 if highest >= 2 => tile::<D, F, 2, P>(task, row, pair, panel, next),
            _ => tile::<D, F, 1, P>(task, row, pair, panel, next),
        }
        row += height;
    }
}

// Constant loops over registers read best with the index that several arrays share.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn tile<D: DotLanes, F: Form, const M: usize, const P: usize>(
    task: &Task<'_, F>,
    row: usize,
    pair: usize,
    panel: usize,
    next: &mut Ahead,
) {
    let blocks = task.weights.blocks;
    let x: [&[RowBlock]; M] = std::array::from_fn(|m| &task.x[(row + m) * blocks..][..blocks]);
    let mut acc = [[D::Floats::splat(0.0); P]; M];
    for (b, unit) in task.weights.pair(pair).iter().enumerate() {
        next.ask();
        let mut sums: [[D; P]; M] = std::array::from_fn(|m| [F::start(&x[m][b]); P]);
        for line in 0..F::LINES {
            let weights: [F::Loaded<D>; P] = std::array::from_fn(|p| F::load(&unit.weights[panel + p], line));
            for m in 0..M {
                for p in 0..P {
                    sums[m][p] = F::dot(sums[m][p], weights[p], &x[m][b], line);
                }
            }
        }
        let scales: [D::Floats; P] = std::array::from_fn(|p| D::load_halves(&unit.scales[panel + p]));
        for m in 0..M {
            let scale = D::Floats::splat(x[m][b].scale);
            for p in 0..P {
                acc[m][p] = sums[m][p].scale_add(scales[p].mul(scale), acc[m][p]);
            }
        }
    }
    // Out of the registers in loops so short that they vanish: where they stay, so do the sums, in memory with every block.
    let mut values = [[[0.0; LANES]; P]; M];
    for m in 0..M {
        for p in 0..P {
            acc[m][p].store(&mut values[m][p]);
        }
    }
    // SAFETY: rows row..row+M exist, and these panels belong to this task alone.
    unsafe { task.out.write_tile(task.first + row, PAIR * pair + panel, &values, task.bias) };
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::tests::values;
    use super::super::{PackedMatrix, Quantization, Rows, gemm_reference, pack::Panels};
    use super::*;
    use crate::Dtype;
    use crate::simd::tested::dot_isas;
    use proptest::prelude::*;

    const BOTH: [Quantization; 2] = [Quantization::Q8, Quantization::Q4];

    fn packed(form: Quantization, k: usize, dense: &[f32], pool: &Pool) -> PackedMatrix {
        let bytes: Vec<u8> = dense.iter().flat_map(|w| w.to_le_bytes()).collect();
        PackedMatrix::quantize(pool, form, k, &[(Dtype::F32, &bytes)]).unwrap()
    }

    fn product(isa: Option<DotIsa>, pool: &Pool, x: &[f32], w: &PackedMatrix, bias: Option<&[f32]>) -> Vec<u32> {
        product_of(isa, pool, (Rows::Numbers(x), x.len() / w.k()), w, bias)
    }

    fn product_of(
        isa: Option<DotIsa>,
        pool: &Pool,
        (x, rows): (Rows<'_>, usize),
        w: &PackedMatrix,
        bias: Option<&[f32]>,
    ) -> Vec<u32> {
        let mut y = vec![f32::NAN; rows * w.n()];
        let args = Gemm { x, weights: w, bias, y: &mut y };
        match isa {
            Some(isa) => match &w.panels {
                Panels::Q8(blocks) => run(Isa::best(), isa, pool, rows, args, blocks),
                Panels::Q4(blocks) => run(Isa::best(), isa, pool, rows, args, blocks),
                _ => unreachable!("quantised"),
            },
            None => gemm_reference(args),
        }
        y.into_iter().map(f32::to_bits).collect()
    }

    /// The product in double precision, of the weights as stored and the activations as quantised, and a bound of what
    /// single precision may differ by: half a unit in the last place of every partial sum and of every product of scales.
    fn exact(x: &[f32], w: &PackedMatrix, column: usize) -> (f64, f64) {
        let blocks = activations::row_blocks(Isa::Portable, x);
        let (mut sum, mut bound) = (0.0, 0.0f64);
        let mut magnitude = 0.0f64;
        for (b, block) in blocks.iter().enumerate() {
            let term: f64 = (b * BLOCK..w.k().min((b + 1) * BLOCK))
                .map(|i| {
                    let q = f64::from(block.values.as_flattened()[i % BLOCK]);
                    f64::from(w.get(column, i)) * q * f64::from(block.scale)
                })
                .sum();
            sum += term;
            magnitude += term.abs();
            bound += magnitude;
        }
        (sum, bound * 3.0 * f64::from(f32::EPSILON) + 1e-30)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_isa_gives_the_bits_of_plain_loops_whatever_the_batch_and_the_threads(
            form in prop::sample::select(&BOTH), rows in 1usize..40, n in 1usize..150, k in 1usize..170, with_bias: bool,
            seed: u64, threads in 1usize..4,
        ) {
            let pool = Pool::new(Some(threads)).unwrap();
            let (x, dense) = (values(rows * k, seed), values(n * k, seed ^ 0x9E37));
            let w = packed(form, k, &dense, &pool);
            prop_assert_eq!(w.bytes(), PackedMatrix::packed_bytes(n, k, [Dtype::F32], Some(form)));
            let bias = values(n, seed ^ 7);
            let bias = with_bias.then_some(&bias[..]);
            let want = product(None, &pool, &x, &w, bias);
            for isa in dot_isas() {
                prop_assert!(product(Some(isa), &pool, &x, &w, bias) == want, "{form} {isa}: {rows} rows");
                let row = seed as usize % rows;
                let alone = product(Some(isa), &pool, &x[row * k..][..k], &w, bias);
                prop_assert!(alone == want[row * n..][..n], "{form} {isa}: row {row} alone");
                let blocks: Vec<RowBlock> = x.chunks(k).flat_map(|x| activations::row_blocks(Isa::best(), x)).collect();
                let before = product_of(Some(isa), &pool, (Rows::Blocks(&blocks), rows), &w, bias);
                prop_assert!(before == want, "{form} {isa}: of rows in blocks");
            }
            for (at, &bits) in want.iter().enumerate() {
                let (row, column) = (at / n, at % n);
                let (sum, bound) = exact(&x[row * k..][..k], &w, column);
                let added = bias.map_or(0.0, |bias| f64::from(bias[column]));
                let y = f64::from(f32::from_bits(bits));
                let bound = bound + f64::from(f32::EPSILON) * (sum.abs() + added.abs());
                prop_assert!((y - sum - added).abs() <= bound, "{y}, exactly {} ± {bound}", sum + added);
            }
        }
    }

    #[test]
    fn parts_of_any_format_are_stacked_and_any_width_is_filled_up() {
        let pool = Pool::new(Some(2)).unwrap();
        // Of a block's greatest magnitude: half of the coarsest step (1/127, and 1/7 from −7.3 to 7), what the end of the
        // range cuts off (from 8.7 to 8), and what bfloat16 and the stored scale lose.
        for (form, bound) in [(Quantization::Q8, 0.5 / 127.0 + 1.0 / 256.0), (Quantization::Q4, 0.14)] {
            for k in [1, 31, 32, 33, 88, 104, 130, 150] {
                let dense = values(45 * k, k as u64);
                let narrow = |range: Range<usize>, to: fn(f32) -> [u8; 2]| -> Vec<u8> {
                    dense[range.start * k..range.end * k].iter().flat_map(|&w| to(w)).collect()
                };
                let first: Vec<u8> = dense[..20 * k].iter().flat_map(|w| w.to_le_bytes()).collect();
                let second = narrow(20..23, |w| half::bf16::from_f32(w).to_le_bytes());
                let third = narrow(23..45, |w| half::f16::from_f32(w).to_le_bytes());
                let parts = [(Dtype::F32, &first[..]), (Dtype::Bf16, &second), (Dtype::F16, &third)];
                let w = PackedMatrix::quantize(&pool, form, k, &parts).unwrap();
                assert_eq!((w.n(), w.k()), (45, k));
                let mut row = vec![f32::NAN; k];
                for (r, dense) in dense.chunks(k).enumerate() {
                    w.copy_row(r, &mut row);
                    for (dense, row) in dense.chunks(BLOCK).zip(row.chunks(BLOCK)) {
                        let greatest = dense.iter().fold(0.0f32, |m, w| m.max(w.abs()));
                        for (a, b) in dense.iter().zip(row) {
                            assert!((a - b).abs() <= greatest * bound, "{form} k {k} row {r}: {a} {b}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn weights_that_are_no_numbers_are_refused_and_activations_that_are_none_show() {
        let pool = Pool::new(Some(1)).unwrap();
        for form in BOTH {
            let mut dense = values(20 * 40, 3);
            let w = packed(form, 40, &dense, &pool);
            let mut x = values(2 * 40, 4);
            x[45] = f32::NAN;
            for isa in dot_isas() {
                let y: Vec<f32> = product(Some(isa), &pool, &x, &w, None).into_iter().map(f32::from_bits).collect();
                assert!(y[..20].iter().all(|y| y.is_finite()) && y[20..].iter().all(|y| y.is_nan()), "{form} {isa}");
            }
            dense[777] = f32::INFINITY;
            let bytes: Vec<u8> = dense.iter().flat_map(|w| w.to_le_bytes()).collect();
            let refused =
                |k| PackedMatrix::quantize(&pool, form, k, &[(Dtype::F32, &bytes)]).err().unwrap().to_string();
            assert!(refused(40).contains("without --quantization"), "{}", refused(40));
            assert!(refused(41).contains("41 columns"), "{}", refused(41));
        }
    }
}
