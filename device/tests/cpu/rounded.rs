//! What tests of products of pairs and of tiles share: both round their operands to bfloat16.

use device::gemm::{Arithmetic, PackedMatrix, PartForm, WeightRows};
use device::{Dtype, Pool};

use super::f32_bytes;

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
