//! Products of bfloat16 tiles: one definition of every bit, on every instruction set.

use device::Dtype;
use linear::{Activation, Arithmetic, Gemm, PackedMatrix, Rows, gemm_activated};
use proptest::prelude::*;
use simd::{Isa, LANES, Lanes, Pool, dispatch};

use super::cpu::tile_isas;
use super::gemm::run;
use super::rounded::{check_against_exact, packed};
use super::weights::values;

/// Checks products against the definition on every instruction set. A NaN counts as equal to any other.
pub fn check(pool: &Pool, x: &[f32], w: &PackedMatrix, bias: Option<&[f32]>, what: &str) {
    let want = run(None, pool, x, w, bias);
    for isa in tile_isas() {
        for (i, (got, want)) in run(Some(isa), pool, x, w, bias).iter().zip(&want).enumerate() {
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(same, "{what}, {isa}, output {i}: {:08x}, want {:08x}", got.to_bits(), want.to_bits());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn products_of_tiles_have_the_same_bits_everywhere_and_rows_do_not_depend_on_the_batch(
        rows in 1usize..70, n in 1usize..90, k in 1usize..150, from in 0usize..3, with_bias: bool, seed: u64,
        threads in 1usize..4,
    ) {
        let pool = Pool::new(Some(threads)).unwrap();
        let (x, dense) = (values(rows * k, seed), values(n * k, seed ^ 0x9E37));
        let w = packed(&pool, Arithmetic::Tiles, k, Dtype::ALL[from], &dense);
        let bias = values(n, seed ^ 7);
        let bias = with_bias.then_some(&bias[..]);
        check(&pool, &x, &w, bias, "any shape");
        let want = run(None, &pool, &x, &w, bias);
        for isa in tile_isas() {
            for row in [0, rows / 2, rows - 1] {
                let alone = run(Some(isa), &pool, &x[row * k..(row + 1) * k], &w, bias);
                prop_assert_eq!(&alone[..], &want[row * n..(row + 1) * n], "{} row {}", isa, row);
            }
        }
        check_against_exact(&want, &x, &dense, k, bias);
    }
}

fn activate<L: Lanes>(activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    let (gate, up) = (gate.as_chunks::<LANES>().0, up.as_chunks().0);
    for ((gate, up), out) in gate.iter().zip(up).zip(out.as_chunks_mut().0) {
        activation.apply(L::load(gate), L::load(up)).store(out);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn an_activation_in_a_product_has_the_bits_of_the_two_steps(
        rows in 1usize..70, half in 1usize..4, k in 1usize..150, with_bias: bool, which in 0usize..4, seed: u64,
        threads in 1usize..4,
    ) {
        let (pool, width) = (Pool::new(Some(threads)).unwrap(), half * LANES);
        let activation = [Activation::Silu, Activation::GeluTanh, Activation::Relu2,
            Activation::ClampedSwiglu { limit: 1.0 }][which];
        let (x, dense) = (values(rows * k, seed), values(2 * width * k, seed ^ 0x9E37));
        let w = packed(&pool, Arithmetic::Tiles, k, Dtype::Bf16, &dense);
        let bias = values(2 * width, seed ^ 7);
        let bias = with_bias.then_some(&bias[..]);
        let gate_up = run(None, &pool, &x, &w, bias);
        let mut want = vec![0.0; rows * width];
        for (row, want) in gate_up.chunks(2 * width).zip(want.chunks_mut(width)) {
            let (gate, up) = row.split_at(width);
            dispatch!(Isa::best(), activate(activation: Activation, gate: &[f32], up: &[f32], want: &mut [f32]));
        }
        for isa in tile_isas() {
            prop_assert_eq!(w.takes_activation(isa), matches!(isa, Isa::Amx | Isa::Portable));
            if w.takes_activation(isa) {
                let mut y = vec![f32::NAN; rows * width];
                let product = Gemm { x: Rows::Numbers(&x), weights: &w, bias, y: &mut y };
                gemm_activated(isa, &pool, product, activation);
                prop_assert_eq!(&y, &want, "{}", isa);
            }
        }
        let odd = packed(&pool, Arithmetic::Tiles, k, Dtype::Bf16, &dense[..(2 * width - 1) * k]);
        prop_assert!(!odd.takes_activation(Isa::Portable));
    }
}

#[test]
fn passes_and_parts_of_long_rows_have_the_bits_of_the_definition() {
    for (rows, n, k, threads) in [
        (1, 40, 1700, 2),
        (15, 16, 600, 1),
        (33, 33, 1200, 2),
        (530, 40, 64, 2),
        (130, 70, 4100, 1),
        (17, 6200, 580, 1),
    ] {
        let pool = Pool::new(Some(threads)).unwrap();
        let (x, dense) = (values(rows * k, 3), values(n * k, 4));
        let w = packed(&pool, Arithmetic::Tiles, k, Dtype::Bf16, &dense);
        let want = run(None, &pool, &x, &w, None);
        // Emulated tiles take as long as the definition, so the portable variant computes only some.
        for isa in tile_isas().filter(|isa| *isa != Isa::Portable || rows * n * k < 2_000_000 || rows == 17) {
            assert_eq!(run(Some(isa), &pool, &x, &w, None), want, "{isa}: {rows} rows, {n} outputs, {k} inputs");
        }
    }
}

#[test]
fn tiny_infinite_and_undefined_numbers_have_the_bits_of_the_definition() {
    let pool = Pool::new(Some(2)).unwrap();
    for (kind, tiny) in [1e-20f32, 1e-19, 3e-23, 1e-38, 1e-40].into_iter().enumerate() {
        let (rows, n, k) = (21, 50, 75);
        let (mut x, mut dense) = (values(rows * k, 5), values(n * k, 6));
        // Some rows and outputs are tiny, some have one number that is not finite.
        x.chunks_mut(k).step_by(3).flatten().for_each(|x| *x *= tiny);
        dense.chunks_mut(k).step_by(5).flatten().for_each(|w| *w *= tiny);
        for (i, special) in [f32::INFINITY, f32::NAN, f32::NEG_INFINITY, -0.0, f32::MAX].into_iter().enumerate() {
            x[(3 * i + 1) * k + 7 * i + kind] = special;
            dense[(20 + i) * k + 70 - i] = special;
        }
        check(&pool, &x, &packed(&pool, Arithmetic::Tiles, k, Dtype::Bf16, &dense), None, &format!("{tiny:e}"));
    }
}

#[test]
fn a_group_that_is_not_whole_has_nothing_of_earlier_weights() {
    let pool = Pool::alone();
    for rows in [1, 40] {
        let [before, after] = [(62, f32::INFINITY), (34, 1.5)]
            .map(|(k, weight)| packed(&pool, Arithmetic::Tiles, k, Dtype::Bf16, &vec![weight; 40 * k]));
        for isa in tile_isas() {
            run(Some(isa), &pool, &vec![1.0; rows * 62], &before, None);
            let found = run(Some(isa), &pool, &vec![1.0; rows * 34], &after, None);
            assert!(found.iter().all(|sum| *sum == 51.0), "{isa}: {rows} rows");
        }
    }
}
