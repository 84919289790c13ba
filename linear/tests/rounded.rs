//! What tests of products of pairs and of tiles share: both round their operands to bfloat16.

use device::Dtype;
use linear::{Arithmetic, PackedMatrix, PartForm, WeightRows};
use proptest::prelude::*;
use simd::Pool;

use super::cpu::pair_isas;
use super::f32_bytes;
use super::gemm::run;
use super::weights::values;

/// Packs numbers of a type, and checks the size.
pub fn packed(pool: &Pool, arithmetic: Arithmetic, k: usize, from: Dtype, numbers: &[f32]) -> PackedMatrix {
    let bytes: Vec<u8> = match from {
        Dtype::F32 => f32_bytes(numbers),
        Dtype::F16 => numbers.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect(),
        Dtype::Bf16 => numbers.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect(),
    };
    let weights = PackedMatrix::stored(pool, arithmetic, k, &[WeightRows::Numbers(from, &bytes)]).unwrap();
    let parts = [(numbers.len() / k, PartForm::Numbers(from))];
    assert_eq!(weights.bytes(), PackedMatrix::packed_bytes(arithmetic, k, None, &parts));
    weights
}

/// Checks a product against exact arithmetic: both operands have an error of at most 2^-8 of their magnitude.
pub fn check_against_exact(product: &[f32], x: &[f32], weights: &[f32], k: usize, bias: Option<&[f32]>) {
    for (row, y) in product.chunks(weights.len() / k).enumerate() {
        for (column, y) in y.iter().enumerate() {
            let (x, w) = (&x[row * k..][..k], &weights[column * k..][..k]);
            let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            let sum = sum + f64::from(bias.map_or(0.0, |bias| bias[column]));
            assert!((f64::from(*y) - sum).abs() <= size / 120.0 + 1e-6, "{y}, want {sum}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn rounded_products_have_the_same_bits_everywhere_and_rows_do_not_depend_on_the_batch(
        rows in 1usize..30, n in 1usize..70, k in 1usize..90, from in 0usize..3, with_bias: bool, seed: u64,
        threads in 1usize..4,
    ) {
        let pool = Pool::new(Some(threads)).unwrap();
        let (x, dense) = (values(rows * k, seed), values(n * k, seed ^ 0x9E37));
        let w = packed(&pool, Arithmetic::Pairs, k, Dtype::ALL[from], &dense);
        let bias = values(n, seed ^ 7);
        let bias = with_bias.then_some(&bias[..]);
        let want = run(None, &pool, &x, &w, bias);
        for isa in pair_isas() {
            let got = run(Some(isa), &pool, &x, &w, bias);
            prop_assert_eq!(&got, &want, "{}", isa);
            for row in 0..rows {
                let alone = run(Some(isa), &pool, &x[row * k..(row + 1) * k], &w, bias);
                prop_assert_eq!(&alone[..], &got[row * n..(row + 1) * n], "{} row {}", isa, row);
            }
        }
        check_against_exact(&want, &x, &dense, k, bias);
    }
}
