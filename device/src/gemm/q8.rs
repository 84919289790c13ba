//! Weights in 8 bits: how they lie in memory, and the product with activations in 8 bits.
//!
//! ```text
//! a panel: 16 outputs                         a tile: M rows × P panels, block after block
//!   block 0  8 lines of 16 outputs × 4 k        Σ = −128·Σa        i32, exact
//!   block 1  8 lines                            Σ += w·a           8 lines
//!   …                                           y += Σ · (weight scale · row scale)    f32, fused
//!   scales   a line for every two blocks
//! ```
//!
//! 17 bytes for every 16 weights. **Row-invariance**: an output is one running sum over the blocks of k in order,
//! whatever the tile, the rows beside it or the threads; the terms are exact integers times one rounded product of
//! scales. So every instruction set gives the same bits too, which the float product does not.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use half::f16;

use super::kernel::Output;
use super::pack::read_row;
use super::quantize::{self, BLOCK, RowBlock, WeightBlock};
use super::{Gemm, WeightFormat};
use crate::simd::int8::{DotIsa, DotLanes, GROUP, OFFSET, dispatch_dot};
use crate::simd::{LANES, Lanes};
use crate::{Isa, Pool};

/// Lines of a block of a panel.
const LINES: usize = BLOCK / 4;

/// A cache line: a group of weights, or the scales of two blocks in half precision.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; GROUP]);

/// The scales of one block, little endian.
type Scales = [u8; 2 * LANES];

/// A matrix `[n, k]` in panels of 16 outputs; zero beyond n and k.
pub(super) struct Q8 {
    lines: Vec<Line>,
    blocks: usize,
}

impl Q8 {
    fn lines_per_panel(blocks: usize) -> usize {
        blocks * LINES + blocks.div_ceil(2)
    }

    /// Bytes of a packed `[n, k]`.
    pub fn packed_bytes(n: usize, k: usize) -> usize {
        n.div_ceil(LANES) * Q8::lines_per_panel(k.div_ceil(BLOCK)) * size_of::<Line>()
    }

    /// Packs the rows of the parts, which hold `n` whole rows together; a thread needs the memory of one row. `None` if
    /// a weight can not be stored.
    pub fn pack(pool: &Pool, n: usize, k: usize, parts: &[(WeightFormat, &[u8])]) -> Option<Q8> {
        let blocks = k.div_ceil(BLOCK);
        let per_panel = Q8::lines_per_panel(blocks);
        let mut lines = vec![Line([0; GROUP]); n.div_ceil(LANES) * per_panel];
        let sound = AtomicBool::new(true);
        let isa = Isa::best();
        pool.chunks_mut(&mut lines, per_panel, LANES * k, |panel, lines| {
            let mut row = vec![0.0; k];
            let mut packed = vec![WeightBlock { values: [0; BLOCK], scale: f16::ZERO }; blocks];
            for lane in 0..LANES {
                read_row(parts, panel * LANES + lane, &mut row);
                if !quantize::weights(isa, &row, &mut packed) {
                    sound.store(false, Ordering::Relaxed);
                }
                for (b, block) in packed.iter().enumerate() {
                    for (line, four) in lines[b * LINES..][..LINES].iter_mut().zip(block.values.as_chunks::<4>().0) {
                        line.0[lane * 4..][..4].copy_from_slice(&four.map(|q| (q as u8).wrapping_add(OFFSET)));
                    }
                    let scales = &mut lines[blocks * LINES + b / 2].0[b % 2 * size_of::<Scales>()..];
                    scales[2 * lane..][..2].copy_from_slice(&block.scale.to_le_bytes());
                }
            }
        });
        sound.into_inner().then_some(Q8 { lines, blocks })
    }

    /// Bytes that one pass over the matrix reads.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.lines[..])
    }

    fn panel(&self, panel: usize) -> Panel<'_> {
        let per_panel = Q8::lines_per_panel(self.blocks);
        let (weights, scales) = self.lines[panel * per_panel..][..per_panel].split_at(self.blocks * LINES);
        Panel { weights: weights.as_chunks().0, scales }
    }

    /// The integer and the scale of output `row` for input `column`.
    pub fn parts(&self, row: usize, column: usize) -> (i8, f16) {
        let (panel, lane, block) = (self.panel(row / LANES), row % LANES, column / BLOCK);
        let byte = panel.weights[block][column % BLOCK / 4].0[lane * 4 + column % 4];
        let scales = panel.scales(block);
        (byte.wrapping_sub(OFFSET) as i8, f16::from_le_bytes([scales[2 * lane], scales[2 * lane + 1]]))
    }

    /// The weight of output `row` for input `column`.
    pub fn get(&self, row: usize, column: usize) -> f32 {
        let (value, scale) = self.parts(row, column);
        f32::from(value) * scale.to_f32()
    }
}

/// Sixteen outputs.
#[derive(Clone, Copy)]
struct Panel<'a> {
    /// Per block.
    weights: &'a [[Line; LINES]],
    scales: &'a [Line],
}

impl<'a> Panel<'a> {
    #[inline(always)]
    fn scales(self, block: usize) -> &'a Scales {
        &self.scales[block / 2].0.as_chunks().0[block % 2]
    }
}

/// A share of the product: all rows, some panels.
struct Task<'a> {
    x: &'a [RowBlock],
    weights: &'a Q8,
    rows: usize,
    panels: Range<usize>,
    bias: Option<&'a [f32]>,
    out: Output,
}

/// Shares per thread: several, so that a thread that is held up leaves little behind.
const TASKS_PER_THREAD: usize = 4;

pub(super) fn run(isa: Isa, dot: DotIsa, pool: &Pool, rows: usize, args: Gemm<'_>, weights: &Q8) {
    let (n, k) = (args.weights.n(), args.weights.k());
    let panels = n.div_ceil(LANES);
    // Even, as tiles are; and the same for all, so that the work is shared equally.
    let share = panels.div_ceil(pool.threads() * TASKS_PER_THREAD).next_multiple_of(2);
    let out = Output::new(args.y, n);
    let bias = args.bias;
    quantize::with_activations(isa, pool, args.x, k, |x| {
        pool.run(panels.div_ceil(share), rows * k * LANES * share, |task| {
            let panels = task * share..panels.min((task + 1) * share);
            let task = &Task { x, weights, rows, panels, bias, out };
            dispatch_dot!(dot, walk(task: &Task<'_>));
        });
    });
}

/// The same by plain loops, in the same order.
pub(super) fn reference(args: Gemm<'_>, weights: &Q8) {
    let (n, k) = (args.weights.n(), args.weights.k());
    for (x, y) in args.x.chunks(k).zip(args.y.chunks_mut(n)) {
        let x = quantize::row_blocks(Isa::Portable, x);
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

/// Panels outside, rows inside: the weights of a tile come from memory once and then from the nearest cache.
#[inline(always)]
fn walk<D: DotLanes>(task: &Task<'_>) {
    match task.rows {
        ..=3 if D::WIDE => panels::<D, 4>(task),
        _ if D::WIDE => panels::<D, 2>(task),
        _ => panels::<D, 1>(task),
    }
}

#[inline(always)]
fn panels<D: DotLanes, const P: usize>(task: &Task<'_>) {
    let mut panel = task.panels.start;
    while panel + P <= task.panels.end {
        bands::<D, P>(task, panel);
        panel += P;
    }
    while panel < task.panels.end {
        bands::<D, 1>(task, panel);
        panel += 1;
    }
}

/// All rows in bands of nearly equal height.
#[inline(always)]
fn bands<D: DotLanes, const P: usize>(task: &Task<'_>, panel: usize) {
    let mut row = 0;
    while row < task.rows {
        let left = task.rows - row;
        let height = left.div_ceil(left.div_ceil(D::ROWS));
        match height {
            1 => tile::<D, 1, P>(task, row, panel),
            2 => tile::<D, 2, P>(task, row, panel),
            3 => tile::<D, 3, P>(task, row, panel),
            4 => tile::<D, 4, P>(task, row, panel),
            5 => tile::<D, 5, P>(task, row, panel),
            _ => tile::<D, 6, P>(task, row, panel),
        }
        row += height;
    }
}

// Constant loops over registers read best with the index that several arrays share.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn tile<D: DotLanes, const M: usize, const P: usize>(task: &Task<'_>, row: usize, panel: usize) {
    let blocks = task.weights.blocks;
    let x: [&[RowBlock]; M] = std::array::from_fn(|m| &task.x[(row + m) * blocks..][..blocks]);
    let w: [Panel<'_>; P] = std::array::from_fn(|p| task.weights.panel(panel + p));
    let mut acc = [[D::Floats::splat(0.0); P]; M];
    for b in 0..blocks {
        let mut sums: [[D; P]; M] = std::array::from_fn(|m| [D::start(x[m][b].correction); P]);
        for g in 0..LINES {
            let weights: [D::Weights; P] = std::array::from_fn(|p| D::load(&w[p].weights[b][g].0));
            for m in 0..M {
                for p in 0..P {
                    sums[m][p] = sums[m][p].dot(weights[p], x[m][b].values[g]);
                }
            }
        }
        let scales: [D::Floats; P] = std::array::from_fn(|p| D::load_halves(w[p].scales(b)));
        for m in 0..M {
            let scale = D::Floats::splat(x[m][b].scale);
            for p in 0..P {
                acc[m][p] = sums[m][p].scale_add(scales[p].mul(scale), acc[m][p]);
            }
        }
    }
    let mut values = [0.0; LANES];
    for (m, sums) in acc.iter().enumerate() {
        for (p, sum) in sums.iter().enumerate() {
            sum.store(&mut values);
            // SAFETY: rows row..row+M exist, and these panels belong to this task alone.
            unsafe { task.out.write(row + m, panel + p, &values, task.bias) };
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::tests::values;
    use super::super::{PackedMatrix, Quantization, gemm_reference, pack::Panels};
    use super::*;
    use proptest::prelude::*;

    fn packed(k: usize, dense: &[f32], pool: &Pool) -> PackedMatrix {
        let bytes: Vec<u8> = dense.iter().flat_map(|w| w.to_le_bytes()).collect();
        PackedMatrix::quantize(pool, Quantization::Q8, k, &[(WeightFormat::F32, &bytes)]).unwrap()
    }

    fn product(isa: Option<DotIsa>, pool: &Pool, x: &[f32], w: &PackedMatrix, bias: Option<&[f32]>) -> Vec<u32> {
        let Panels::Q8(q8) = &w.panels else { unreachable!() };
        let rows = x.len() / w.k();
        let mut y = vec![f32::NAN; rows * w.n()];
        let args = Gemm { x, weights: w, bias, y: &mut y };
        match isa {
            Some(isa) => run(Isa::best(), isa, pool, rows, args, q8),
            None => gemm_reference(args),
        }
        y.into_iter().map(f32::to_bits).collect()
    }

    /// The product in double precision, of the weights as stored and the activations as quantised, and a bound of what
    /// single precision may differ by: half a unit in the last place of every partial sum and of every product of scales.
    fn exact(x: &[f32], w: &PackedMatrix, column: usize) -> (f64, f64) {
        let blocks = quantize::row_blocks(Isa::Portable, x);
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
            rows in 1usize..40, n in 1usize..150, k in 1usize..170, with_bias: bool, seed: u64, threads in 1usize..4,
        ) {
            let pool = Pool::new(Some(threads)).unwrap();
            let (x, dense) = (values(rows * k, seed), values(n * k, seed ^ 0x9E37));
            let w = packed(k, &dense, &pool);
            prop_assert_eq!(w.bytes(), PackedMatrix::packed_bytes(n, k, [WeightFormat::F32], Some(Quantization::Q8)));
            let bias = values(n, seed ^ 7);
            let bias = with_bias.then_some(&bias[..]);
            let want = product(None, &pool, &x, &w, bias);
            for isa in DotIsa::ALL.into_iter().filter(|isa| isa.is_available()) {
                prop_assert!(product(Some(isa), &pool, &x, &w, bias) == want, "{isa}: {rows} rows");
                let row = seed as usize % rows;
                let alone = product(Some(isa), &pool, &x[row * k..][..k], &w, bias);
                prop_assert!(alone == want[row * n..][..n], "{isa}: row {row} alone");
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
        for k in [1, 31, 32, 33, 88, 104, 130, 150] {
            let dense = values(45 * k, k as u64);
            let narrow = |range: std::ops::Range<usize>, to: fn(f32) -> [u8; 2]| -> Vec<u8> {
                dense[range.start * k..range.end * k].iter().flat_map(|&w| to(w)).collect()
            };
            let first: Vec<u8> = dense[..20 * k].iter().flat_map(|w| w.to_le_bytes()).collect();
            let second = narrow(20..23, |w| half::bf16::from_f32(w).to_le_bytes());
            let third = narrow(23..45, |w| f16::from_f32(w).to_le_bytes());
            let parts = [(WeightFormat::F32, &first[..]), (WeightFormat::Bf16, &second), (WeightFormat::F16, &third)];
            let w = PackedMatrix::quantize(&pool, Quantization::Q8, k, &parts).unwrap();
            assert_eq!((w.n(), w.k()), (45, k));
            let mut row = vec![f32::NAN; k];
            for (r, dense) in dense.chunks(k).enumerate() {
                w.copy_row(r, &mut row);
                for (b, (dense, row)) in dense.chunks(BLOCK).zip(row.chunks(BLOCK)).enumerate() {
                    let greatest = dense.iter().fold(0.0f32, |m, w| m.max(w.abs()));
                    for (a, b) in dense.iter().zip(row) {
                        // Half a step of 1/127, and what bfloat16 and the stored scale lose.
                        assert!((a - b).abs() <= greatest * (0.5 / 127.0 + 1.0 / 256.0), "k {k} row {r}: {a} {b}");
                    }
                    let (_, scale) = match &w.panels {
                        Panels::Q8(q8) => q8.parts(r, b * BLOCK),
                        _ => unreachable!(),
                    };
                    assert!(scale >= f16::ZERO);
                }
            }
        }
    }

    #[test]
    fn weights_that_are_no_numbers_are_refused_and_activations_that_are_none_show() {
        let pool = Pool::new(Some(1)).unwrap();
        let mut dense = values(20 * 40, 3);
        let w = packed(40, &dense, &pool);
        let mut x = values(2 * 40, 4);
        x[45] = f32::NAN;
        for isa in DotIsa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let y: Vec<f32> = product(Some(isa), &pool, &x, &w, None).into_iter().map(f32::from_bits).collect();
            assert!(y[..20].iter().all(|y| y.is_finite()) && y[20..].iter().all(|y| y.is_nan()), "{isa}");
        }
        dense[777] = f32::INFINITY;
        let bytes: Vec<u8> = dense.iter().flat_map(|w| w.to_le_bytes()).collect();
        let error = PackedMatrix::quantize(&pool, Quantization::Q8, 40, &[(WeightFormat::F32, &bytes)]).err().unwrap();
        assert!(error.to_string().contains("without --quantization"), "{error}");
        let error = PackedMatrix::quantize(&pool, Quantization::Q8, 41, &[(WeightFormat::F32, &bytes)]).err().unwrap();
        assert!(error.to_string().contains("41 columns"), "{error}");
    }
}
