//! Products with quantised weights.

use std::ops::Range;

use device::Dtype;
use linear::{Arithmetic, Gemm, PackedMatrix, PartForm, Quantization, RowBlock, Rows, gemm_reference, gemm_with};
use proptest::prelude::*;
use simd::int8::DotIsa;
use simd::{Isa, Pool};

use super::cpu::dot_isas;
use super::f32_bytes;
use super::quantize::row_blocks;
use super::weights::values;

const BLOCK: usize = RowBlock::LEN;
const BOTH: [Quantization; 2] = [Quantization::Q8, Quantization::Q4];

fn packed(form: Quantization, k: usize, dense: &[f32], pool: &Pool) -> PackedMatrix {
    PackedMatrix::quantize(pool, form, k, &[(Dtype::F32, &f32_bytes(dense))]).unwrap()
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
        Some(isa) => gemm_with(Isa::best(), isa, pool, args),
        None => gemm_reference(args),
    }
    y.into_iter().map(f32::to_bits).collect()
}

/// Returns the product in double precision, of the weights as stored and the activations as quantised, and a bound of the error
/// of single precision: half a unit in the last place of every partial sum and of every product of scales.
fn exact(x: &[f32], w: &PackedMatrix, column: usize) -> (f64, f64) {
    let blocks = row_blocks(Isa::Portable, x);
    let mut weights = vec![0.0; w.k()];
    w.copy_row(column, &mut weights);
    let (mut sum, mut bound) = (0.0, 0.0f64);
    let mut magnitude = 0.0f64;
    for (b, block) in blocks.iter().enumerate() {
        let term: f64 = (b * BLOCK..w.k().min((b + 1) * BLOCK))
            .map(|i| {
                let q = f64::from(block.values.as_flattened()[i % BLOCK]);
                f64::from(weights[i]) * q * f64::from(block.scale)
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
        prop_assert_eq!(w.bytes(), PackedMatrix::packed_bytes(Arithmetic::Exact, k, Some(form), &[(n, PartForm::Numbers(Dtype::F32))]));
        let bias = values(n, seed ^ 7);
        let bias = with_bias.then_some(&bias[..]);
        let want = product(None, &pool, &x, &w, bias);
        for isa in dot_isas() {
            prop_assert!(product(Some(isa), &pool, &x, &w, bias) == want, "{form} {isa}: {rows} rows");
            let row = seed as usize % rows;
            let alone = product(Some(isa), &pool, &x[row * k..][..k], &w, bias);
            prop_assert!(alone == want[row * n..][..n], "{form} {isa}: row {row} alone");
            let blocks: Vec<RowBlock> = x.chunks(k).flat_map(|x| row_blocks(Isa::best(), x)).collect();
            let before = product_of(Some(isa), &pool, (Rows::Blocks(&blocks), rows), &w, bias);
            prop_assert!(before == want, "{form} {isa}: of quantised rows");
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
fn long_rows_and_many_rows_are_multiplied_in_parts_with_the_bits_of_plain_loops() {
    for (rows, n, k, threads) in [(13, 70, 1000, 3), (16, 33, 2500, 1), (30, 40, 800, 2), (530, 20, 1700, 1)] {
        let pool = Pool::new(Some(threads)).unwrap();
        let (x, dense) = (values(rows * k, 3), values(n * k, 4));
        let w = packed(BOTH[rows % 2], k, &dense, &pool);
        let want = product(None, &pool, &x, &w, None);
        for isa in [DotIsa::Amx, DotIsa::best_for(Isa::best())] {
            assert!(product(Some(isa), &pool, &x, &w, None) == want, "{isa}: {rows} rows, {n} outputs, {k} inputs");
        }
    }
}

#[test]
fn parts_of_any_format_are_stacked_and_any_width_is_padded() {
    let pool = Pool::new(Some(2)).unwrap();
    // Bounds relative to the greatest magnitude of a block: half of the coarsest step (1/127, and 1/7 from −7.3 to 7), the
    // clamping at the end of the range (from 8.7 to 8), and the rounding of bfloat16 and of the stored scale.
    for (form, bound) in [(Quantization::Q8, 0.5 / 127.0 + 1.0 / 256.0), (Quantization::Q4, 0.14)] {
        for k in [1, 31, 32, 33, 88, 104, 130, 150] {
            let dense = values(45 * k, k as u64);
            let narrow = |range: Range<usize>, to: fn(f32) -> [u8; 2]| -> Vec<u8> {
                dense[range.start * k..range.end * k].iter().flat_map(|&w| to(w)).collect()
            };
            let first = f32_bytes(&dense[..20 * k]);
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
fn nan_weights_are_refused_and_nan_activations_give_nan() {
    let pool = Pool::new(Some(1)).unwrap();
    for form in BOTH {
        let mut dense = values(20 * 40, 3);
        let w = packed(form, 40, &dense, &pool);
        let mut x = values(17 * 40, 4);
        x[45] = f32::NAN;
        for isa in dot_isas() {
            let y: Vec<f32> = product(Some(isa), &pool, &x, &w, None).into_iter().map(f32::from_bits).collect();
            let is_right = |(at, y): (usize, &f32)| if at / 20 == 1 { y.is_nan() } else { y.is_finite() };
            assert!(y.iter().enumerate().all(is_right), "{form} {isa}");
        }
        dense[777] = f32::INFINITY;
        let bytes = f32_bytes(&dense);
        let refused = |k| PackedMatrix::quantize(&pool, form, k, &[(Dtype::F32, &bytes)]).err().unwrap().to_string();
        assert!(refused(40).contains("without --quantization"), "{}", refused(40));
        assert!(refused(41).contains("41 columns"), "{}", refused(41));
    }
}
