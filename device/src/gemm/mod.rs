//! y = x·Wᵀ: the matrix product of every linear layer.
//!
//! `x` is `[rows, k]`, `W` is `[n, k]` as checkpoints store it, `y` is `[rows, n]`, all row-major.
//!
//! **Row-invariance.** Every output element is one running sum over k = 0, 1, 2, …, whatever the number of rows, the
//! tile it falls into, or the threads: vectors run across n, never across k. So a token's result does not depend on
//! what else is in the batch.
//!
//! ```text
//! W packed in panels of 16 outputs            one tile: M rows × P panels
//!   panel 0            panel 1                     k →
//!   k0: w[0..16][0]    k0: w[16..32][0]       x row m ─ broadcast ─┐
//!   k1: w[0..16][1]    k1: …                  panel p ─ 16 lanes ──┴─▶ acc[m][p]
//! ```
//!
//! Bytes: one pass over the packed weights for up to 12 rows with AVX-512 (6 with AVX2); quantised weights
//! ([`Quantization`]) come from memory once for any number of rows.

mod activations;
mod blocks;
mod dense;
mod form;
mod format;
mod integer;
mod kernel;
mod operands;
mod output;
mod pack;
mod quantization;
mod quantize;
mod rows;

pub use dense::Product;
pub(crate) use dense::{Dense, Shape, on_host};
pub use operands::Gemm;
pub use pack::PackedMatrix;
pub use quantization::Quantization;
pub use rows::{RowBlock, Rows};

use crate::{Isa, Pool};
use pack::Panels;

/// Bytes of scratch that a product of `rows` rows of `k` numbers takes beside its operands where the weights are
/// quantised; kept by the calling thread for the next one.
pub fn scratch_bytes(rows: usize, k: usize) -> usize {
    activations::scratch_bytes(rows, k)
}

/// Computes the product with vectors of `isa`, split over the pool's threads by columns.
///
/// # Panics
/// If the shapes do not match, rows in blocks meet weights that are not quantised, or this CPU does not have `isa`.
pub fn gemm(isa: Isa, pool: &Pool, args: Gemm<'_>) {
    assert!(isa.is_available(), "this CPU has no {isa}");
    let rows = args.rows();
    if rows > 0 {
        kernel::run(isa, pool, rows, args);
    }
}

/// The same product by plain loops: what the fast one is compared with.
///
/// # Panics
/// If the shapes do not match, or rows in blocks meet weights that are not quantised.
pub fn gemm_reference(args: Gemm<'_>) {
    let (rows, n, k) = (args.rows(), args.weights.n(), args.weights.k());
    match &args.weights.panels {
        Panels::Q8(blocks) => return integer::reference(args, blocks),
        Panels::Q4(blocks) => return integer::reference(args, blocks),
        Panels::F32(_) | Panels::Bf16(_) => {}
    }
    let (x, mut weights) = (args.x.numbers(), vec![0.0; k]);
    for column in 0..n {
        args.weights.copy_row(column, &mut weights);
        for row in 0..rows {
            let mut sum = 0.0f32;
            for (x, weight) in x[row * k..][..k].iter().zip(&weights) {
                sum += x * weight;
            }
            args.y[row * n + column] = sum + args.bias.map_or(0.0, |b| b[column]);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::Dtype;
    use crate::simd::tested::isas;
    use proptest::prelude::*;

    pub(super) fn values(len: usize, seed: u64) -> Vec<f32> {
        let mut state = seed | 1;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 24) as f32 * 2.0 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    fn run(isa: Option<Isa>, pool: &Pool, x: &[f32], w: &PackedMatrix, bias: Option<&[f32]>) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len() / w.k() * w.n()];
        let args = Gemm { x: Rows::Numbers(x), weights: w, bias, y: &mut y };
        match isa {
            Some(isa) => gemm(isa, pool, args),
            None => gemm_reference(args),
        }
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn every_isa_equals_plain_loops_and_rows_do_not_depend_on_the_batch(
            rows in 1usize..30, n in 1usize..130, k in 1usize..90, bf16: bool, with_bias: bool, seed: u64, threads in 1usize..4,
        ) {
            let pool = Pool::new(Some(threads)).unwrap();
            let x = values(rows * k, seed);
            let dense = values(n * k, seed ^ 0x9E37);
            let bytes: Vec<u8> = if bf16 {
                dense.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect()
            } else {
                dense.iter().flat_map(|v| v.to_le_bytes()).collect()
            };
            let format = if bf16 { Dtype::Bf16 } else { Dtype::F32 };
            let w = PackedMatrix::pack(&pool, k, &[(format, &bytes)]).unwrap();
            let bias = values(n, seed ^ 7);
            let bias = with_bias.then_some(&bias[..]);
            let want = run(None, &pool, &x, &w, bias);
            for isa in isas() {
                let got = run(Some(isa), &pool, &x, &w, bias);
                for (a, b) in got.iter().zip(&want) {
                    prop_assert!((a - b).abs() < 1e-4, "{isa}: {a} {b}");
                }
                for row in 0..rows {
                    let alone = run(Some(isa), &pool, &x[row * k..(row + 1) * k], &w, bias);
                    prop_assert_eq!(&alone[..], &got[row * n..(row + 1) * n], "{} row {}", isa, row);
                }
            }
        }
    }

    #[test]
    fn a_matrix_without_rows_is_refused_and_a_product_of_no_rows_is_empty() {
        let pool = Pool::new(Some(2)).unwrap();
        let bytes: Vec<u8> = values(3 * 8, 1).iter().flat_map(|x| x.to_le_bytes()).collect();
        let make = |form: Option<Quantization>, k, parts: &[(Dtype, &[u8])]| match form {
            Some(form) => PackedMatrix::quantize(&pool, form, k, parts),
            None => PackedMatrix::pack(&pool, k, parts),
        };
        for form in [None, Some(Quantization::Q8), Some(Quantization::Q4)] {
            for (k, parts) in [(8, &[][..]), (8, &[(Dtype::F32, &[][..])]), (0, &[(Dtype::F32, &bytes)])] {
                let error = make(form, k, parts).err().unwrap().to_string();
                let said = format!("a weight matrix with {k} columns was given no rows, or rows of another length");
                assert_eq!(error, said, "{form:?}");
            }
            let matrix = make(form, 8, &[(Dtype::F32, &bytes)]).unwrap();
            for isa in [None, Some(Isa::best()), Some(Isa::Portable)] {
                assert!(run(isa, &pool, &[], &matrix, None).is_empty());
            }
        }
    }

    #[test]
    fn joined_parts_equal_their_rows_side_by_side() {
        let pool = Pool::new(Some(1)).unwrap();
        let (a, b) = (values(5 * 8, 1), values(20 * 8, 2));
        let raw = |v: &[f32]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let (ra, rb) = (raw(&a), raw(&b));
        let both = PackedMatrix::pack(&pool, 8, &[(Dtype::F32, &ra), (Dtype::F32, &rb)]).unwrap();
        assert_eq!(both.n(), 25);
        let x = values(8, 3);
        let y = run(Some(Isa::best()), &pool, &x, &both, None);
        for (part, dense, at) in [(0, &a, 0), (1, &b, 5)] {
            for row in 0..dense.len() / 8 {
                let want: f32 = (0..8).map(|i| x[i] * dense[row * 8 + i]).sum();
                assert!((y[at + row] - want).abs() < 1e-5, "part {part} row {row}");
            }
        }
    }
}
