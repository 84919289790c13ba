//! Products with float weights, and what all packed weights share.

use device::Dtype;
use linear::{Gemm, PackedMatrix, Quantization, Rows, gemm, gemm_reference};
use proptest::prelude::*;
use simd::{Isa, Pool};

use super::cpu::isas;
use super::f32_bytes;
use super::weights::values;

pub fn run(isa: Option<Isa>, pool: &Pool, x: &[f32], w: &PackedMatrix, bias: Option<&[f32]>) -> Vec<f32> {
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
            f32_bytes(&dense)
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
    let bytes = f32_bytes(&values(3 * 8, 1));
    let make = |form: Option<Quantization>, k, parts: &[(Dtype, &[u8])]| match form {
        Some(form) => PackedMatrix::quantize(&pool, form, k, parts),
        None => PackedMatrix::pack(&pool, k, parts),
    };
    for form in [None, Some(Quantization::Q8), Some(Quantization::Q4)] {
        for (k, parts) in [(8, &[][..]), (8, &[(Dtype::F32, &[][..])]), (0, &[(Dtype::F32, &bytes)])] {
            let error = make(form, k, parts).err().unwrap().to_string();
            let said = format!(
                "a weight matrix with {k} columns: found no rows or an incomplete row, expected one or more whole rows"
            );
            assert_eq!(error, said, "{form:?}");
        }
        let matrix = make(form, 8, &[(Dtype::F32, &bytes)]).unwrap();
        for isa in [None, Some(Isa::best()), Some(Isa::Portable)] {
            assert!(run(isa, &pool, &[], &matrix, None).is_empty());
        }
    }
}

#[test]
fn stacked_parts_give_the_products_of_their_rows() {
    let pool = Pool::new(Some(1)).unwrap();
    let (a, b) = (values(5 * 8, 1), values(20 * 8, 2));
    let (ra, rb) = (f32_bytes(&a), f32_bytes(&b));
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
