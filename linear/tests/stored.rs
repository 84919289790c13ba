//! Products with weights in the form in which checkpoints store them.

use device::Dtype;
use linear::{
    Arithmetic, Codes, Gemm, PackedMatrix, PartForm, Rounding, Rows, StoredFormat, StoredRow, WeightRows, gemm,
    gemm_with,
};
use proptest::prelude::*;
use simd::int8::DotIsa;
use simd::small_float::{e4m3_to_f32, f32_to_e4m3};
use simd::{Isa, Pool};

use super::cpu::{dot_isas, isas, tile_isas};
use super::f32_bytes;
use super::gemm::run;
use super::quantize::row_blocks;
use super::tiles::check;
use super::weights::{Random, formats, values};

fn multiplied(isa: Isa, pool: &Pool, x: &[f32], weights: &PackedMatrix, bias: Option<&[f32]>) -> Vec<u32> {
    let mut y = vec![f32::NAN; x.len() / weights.k() * weights.n()];
    gemm(isa, pool, Gemm { x: Rows::Numbers(x), weights, bias, y: &mut y });
    y.into_iter().map(f32::to_bits).collect()
}

fn shuffled(k: usize, seed: u64) -> Vec<u32> {
    let keys = values(k, seed);
    let mut order: Vec<u32> = (0..k as u32).collect();
    order.sort_by(|a, b| keys[*a as usize].total_cmp(&keys[*b as usize]));
    order
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn products_have_the_bits_of_products_with_unpacked_weights(
        format in prop::sample::select(formats()), rows in 1usize..110, n in 1usize..90, k in 1usize..10, seed: u64, threads in 1usize..3,
    ) {
        let (k, pool) = (k * 40, Pool::new(Some(threads)).unwrap());
        let random = Random::new(format, n, k, seed);
        let weights = PackedMatrix::stored(&pool, Arithmetic::Exact, k, &[WeightRows::Stored(random.part(None, Rounding::None))]).unwrap();
        prop_assert_eq!(weights.bytes(), PackedMatrix::packed_bytes(Arithmetic::Exact, k, None, &[(n, PartForm::Stored(random.part(None, Rounding::None)))]));
        let dense = random.values(None, k);
        let mut row = vec![f32::NAN; k];
        for (i, dense) in dense.chunks(k).enumerate() {
            weights.copy_row(i, &mut row);
            prop_assert!(row.iter().zip(dense).all(|(a, b)| a.to_bits() == b.to_bits()), "{format:?}: row {i}");
        }
        let plain = PackedMatrix::pack(&pool, k, &[(Dtype::F32, &f32_bytes(&dense))]).unwrap();
        let (x, bias) = (values(rows * k, seed ^ 5), values(n, seed ^ 7));
        for isa in isas() {
            let y = multiplied(isa, &pool, &x, &weights, Some(&bias));
            prop_assert!(y == multiplied(isa, &pool, &x, &plain, Some(&bias)), "{format:?} {isa}");
            let row = seed as usize % rows;
            let alone = multiplied(isa, &pool, &x[row * k..][..k], &weights, Some(&bias));
            prop_assert!(alone == y[row * n..][..n], "{format:?} {isa}: row {row} alone");
        }
    }

    #[test]
    fn products_of_tiles_have_the_same_bits_everywhere_and_are_those_of_rounded_activations(
        format in prop::sample::select(formats()), rows in 1usize..70, n in 1usize..90, k in 1usize..17, shorter in 0usize..4,
        ordered: bool, seed: u64, threads in 1usize..3,
    ) {
        let (k, pool) = (k * 40 - shorter, Pool::new(Some(threads)).unwrap());
        let (random, order) = (Random::new(format, n, k, seed), shuffled(k, seed));
        let order = ordered.then_some(&order[..]);
        let part = WeightRows::Stored(random.part(order, Rounding::None));
        let weights = PackedMatrix::stored(&pool, Arithmetic::Tiles, k, &[part]).unwrap();
        let (x, bias) = (values(rows * k, seed ^ 5), values(n, seed ^ 7));
        let want = run(None, &pool, &x, &weights, Some(&bias));
        for isa in tile_isas() {
            prop_assert!(run(Some(isa), &pool, &x, &weights, Some(&bias)) == want, "{format:?} {isa}");
            let row = seed as usize % rows;
            let alone = run(Some(isa), &pool, &x[row * k..][..k], &weights, Some(&bias));
            prop_assert!(alone == want[row * n..][..n], "{format:?} {isa}: row {row} alone");
        }
        // Only numbers of tables of floats are rounded too.
        let dense = random.values(order, k);
        let rounds_weights = matches!(format.codes, Codes::Floats(_));
        let round = |x: f32| f64::from(half::bf16::from_f32(x).to_f32());
        for (x, y) in x.chunks(k).zip(want.chunks(n)) {
            for ((y, dense), bias) in y.iter().zip(dense.chunks(k)).zip(&bias) {
                let terms = x.iter().zip(dense).map(|(x, w)| round(*x) * f64::from(*w));
                let (sum, size) = terms.fold((f64::from(*bias), 1e-3), |(sum, size), term| (sum + term, size + term.abs()));
                let bound = size * if rounds_weights { 4e-3 } else { 1e-5 };
                prop_assert!((f64::from(*y) - sum).abs() <= bound, "{format:?}: {y}, want {sum} within {bound}");
            }
        }
    }

    #[test]
    fn products_of_bytes_are_exact_and_do_not_depend_on_the_batch_or_the_instructions(
        format in prop::sample::select(formats().into_iter().filter(StoredFormat::takes_bytes).collect::<Vec<_>>()),
        rows in 1usize..40, n in 1usize..70, k in 1usize..10, seed: u64, whole_rows: bool, threads in 1usize..4,
    ) {
        let (k, pool) = (k * 40, Pool::new(Some(threads)).unwrap());
        let random = Random::new(format, n, k, seed);
        let rounding = if whole_rows { Rounding::Row } else { Rounding::Blocks };
        let weights = PackedMatrix::stored(&pool, Arithmetic::Exact, k, &[WeightRows::Stored(random.part(None, rounding))]).unwrap();
        let (x, dense) = (values(rows * k, seed ^ 5), random.values(None, k));
        let multiplied = |x: &[f32], isa| {
            let mut y = vec![f32::NAN; x.len() / k * n];
            gemm_with(Isa::best(), isa, &pool, Gemm { x: Rows::Numbers(x), weights: &weights, bias: None, y: &mut y });
            y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let want = multiplied(&x, DotIsa::Portable);
        for isa in dot_isas() {
            prop_assert!(multiplied(&x, isa) == want, "{format:?} {isa}");
            let row = seed as usize % rows;
            prop_assert!(multiplied(&x[row * k..][..k], isa) == want[row * n..][..n], "{format:?} {isa}: row alone");
        }
        for (i, x) in x.chunks(k).enumerate() {
            let rounded: Vec<f64> = match whole_rows {
                true => {
                    let step = x.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0;
                    x.iter().map(|x| f64::from((x / step).round_ties_even() * step)).collect()
                }
                false => row_blocks(Isa::Portable, x)
                    .iter()
                    .flat_map(|block| {
                        block.values.as_flattened().iter().map(|q| f64::from(*q) * f64::from(block.scale)).collect::<Vec<_>>()
                    })
                    .take(k)
                    .collect(),
            };
            for (column, dense) in dense.chunks(k).enumerate() {
                let terms = rounded.iter().zip(dense).map(|(x, w)| x * f64::from(*w));
                let magnitude = dense.iter().fold(0.0f32, |m, w| m.max(w.abs()));
                let (exact, y) = (terms.sum::<f64>(), f64::from(f32::from_bits(want[i * n + column])));
                let bound = 1e-6 * k as f64 * f64::from(magnitude + 1e-3);
                prop_assert!((y - exact).abs() <= bound, "{format:?}: {y}, exactly {exact} within {bound}");
            }
        }
    }
}

#[test]
fn tiny_infinite_and_undefined_activations_have_the_bits_of_the_definition() {
    let (rows, n, k, pool) = (21, 50, 200, Pool::new(Some(2)).unwrap());
    for format in formats() {
        let random = Random::new(format, n, k, 2);
        let part = WeightRows::Stored(random.part(None, Rounding::None));
        let weights = PackedMatrix::stored(&pool, Arithmetic::Tiles, k, &[part]).unwrap();
        for (kind, tiny) in [1e-28f32, 1e-30, 1e-36, 1e-40].into_iter().enumerate() {
            let mut x = values(rows * k, 5);
            x.chunks_mut(k).step_by(3).flatten().for_each(|x| *x *= tiny);
            let specials = [f32::INFINITY, f32::NAN, f32::NEG_INFINITY, -0.0, f32::MAX, 1e35];
            for (i, special) in specials.into_iter().enumerate() {
                x[(3 * i + 1) * k + 7 * i + kind] = special;
            }
            for rows in [0..1, 0..2, 1..2, 4..5, 13..14, 16..17, 0..rows] {
                let what = format!("{format:?}, {tiny:e}, rows {rows:?}");
                check(&pool, &x[rows.start * k..rows.end * k], &weights, None, &what);
            }
        }
    }
}

#[test]
fn long_rows_on_tiles_are_multiplied_in_parts_with_the_same_bits() {
    let (rows, n, k, pool) = (45, 50, 1048, Pool::new(Some(2)).unwrap());
    let x = values(rows * k, 1);
    for (format, rows) in formats().into_iter().flat_map(|format| [1, 4, 12, rows].map(|rows| (format, rows))) {
        let random = Random::new(format, n, k, 2);
        let part = WeightRows::Stored(random.part(None, Rounding::None));
        let weights = PackedMatrix::stored(&pool, Arithmetic::Tiles, k, &[part]).unwrap();
        let [x, want] = [&x[..rows * k], &run(None, &pool, &x[..rows * k], &weights, None)[..]];
        for isa in tile_isas() {
            assert!(run(Some(isa), &pool, x, &weights, None) == want, "{format:?} {isa}, {rows} rows");
        }
    }
    // So many outputs that the sums of some wait while those of others are computed.
    let (format, wide, few) = (formats()[0], 6200, 420);
    let random = Random::new(format, wide, few, 2);
    let part = WeightRows::Stored(random.part(None, Rounding::None));
    let weights = PackedMatrix::stored(&pool, Arithmetic::Tiles, few, &[part]).unwrap();
    check(&Pool::new(Some(1)).unwrap(), &x[..17 * few], &weights, None, "wide");
    for format in formats().into_iter().filter(StoredFormat::takes_bytes) {
        let random = Random::new(format, n, k, 2);
        let part = WeightRows::Stored(random.part(None, Rounding::Blocks));
        let weights = PackedMatrix::stored(&pool, Arithmetic::Exact, k, &[part]).unwrap();
        let bias = values(n, 3);
        let all = [(Isa::best(), DotIsa::Amx), (Isa::Portable, DotIsa::Amx), (Isa::best(), DotIsa::Portable)];
        let [tiles, emulated, want] = all.map(|(isa, dot)| {
            let mut y = vec![f32::NAN; rows * n];
            gemm_with(isa, dot, &pool, Gemm { x: Rows::Numbers(&x), weights: &weights, bias: Some(&bias), y: &mut y });
            y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
        assert!(tiles == want && emulated == want, "{format:?}");
    }
}

#[test]
fn parts_of_different_forms_and_orders_are_one_matrix() {
    let (k, pool) = (160, Pool::new(Some(2)).unwrap());
    let forms = formats();
    let [a, b] = [Random::new(forms[0], 40, k, 1), Random::new(forms[8], 9, k, 2)];
    let (first, second) = (shuffled(k, 3), shuffled(k, 4));
    let numbers = values(17 * k, 5);
    let bytes = f32_bytes(&numbers);
    let parts = [
        WeightRows::Stored(a.part(Some(&first), Rounding::None)),
        WeightRows::Stored(a.part(Some(&second), Rounding::None)),
        WeightRows::Numbers(Dtype::F32, &bytes),
        WeightRows::Stored(b.part(None, Rounding::None)),
        WeightRows::Stored(b.part(None, Rounding::None)),
    ];
    let weights = PackedMatrix::stored(&pool, Arithmetic::Exact, k, &parts).unwrap();
    let b_values = b.values(None, k);
    let dense = [a.values(Some(&first), k), a.values(Some(&second), k), numbers, b_values.clone(), b_values].concat();
    assert_eq!((weights.n(), weights.k()), (dense.len() / k, k));
    let mut row = vec![0.0; k];
    for (i, dense) in dense.chunks(k).enumerate() {
        weights.copy_row(i, &mut row);
        assert_eq!(row, dense, "row {i}");
    }
    let (x, bias) = (values(7 * k, 6), values(weights.n(), 7));
    let plain = PackedMatrix::pack(&pool, k, &[(Dtype::F32, &f32_bytes(&dense))]).unwrap();
    let [y, want] = [&weights, &plain].map(|weights| multiplied(Isa::best(), &pool, &x, weights, Some(&bias)));
    // The sums of reordered parts have another order.
    for (i, (y, want)) in y.into_iter().zip(want).enumerate() {
        let (y, want) = (f32::from_bits(y), f32::from_bits(want));
        assert!((y - want).abs() < 1e-4, "{i}: {y}, {want}");
    }
}

#[test]
fn activations_are_rounded_to_floats_of_8_bits_as_the_checkpoint_says() {
    let (k, n, pool) = (320, 5, Pool::new(Some(1)).unwrap());
    let random = Random::new(formats()[13], n, k, 1);
    let dense = random.values(None, k);
    let mut x = values(3 * k, 2);
    x[2 * k..].fill(0.0);
    for rounding in [Rounding::Floats(k), Rounding::Floats(128), Rounding::Static(0.0015)] {
        let weights =
            PackedMatrix::stored(&pool, Arithmetic::Exact, k, &[WeightRows::Stored(random.part(None, rounding))])
                .unwrap();
        for isa in isas() {
            let y = multiplied(isa, &pool, &x, &weights, None);
            for (i, x) in x.chunks(k).enumerate() {
                let width = if let Rounding::Floats(width) = rounding { width } else { k };
                let rounded = x.chunks(width).flat_map(|x| {
                    let greatest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                    let step = if let Rounding::Static(step) = rounding { step } else { greatest / 448.0 };
                    let round = move |x: &f32| if *x == 0.0 { 0.0 } else { e4m3_to_f32(f32_to_e4m3(x / step)) * step };
                    x.iter().map(round).collect::<Vec<_>>()
                });
                let rounded: Vec<f32> = rounded.collect();
                for (column, dense) in dense.chunks(k).enumerate() {
                    let exact: f64 = rounded.iter().zip(dense).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    let y = f64::from(f32::from_bits(y[i * n + column]));
                    assert!((y - exact).abs() < 1e-4, "{rounding:?} {isa} row {i}: {y}, exactly {exact}");
                }
            }
        }
    }
}

#[test]
fn weights_that_are_not_finite_are_refused() {
    let (k, pool) = (64, Pool::new(Some(1)).unwrap());
    for (form, spoil) in [
        (formats()[0], (|row| row.scales[0] = 0x7f80) as fn(&mut StoredRow)),
        (formats()[13], |row| row.codes[7] = 0xff),
        (formats()[6], |row| row.outer[0][1] = 0x7c00),
    ] {
        let mut random = Random::new(form, 3, k, 1);
        spoil(&mut random.rows[1]);
        let parts = [WeightRows::Stored(random.part(None, Rounding::None))];
        let refused = PackedMatrix::stored(&pool, Arithmetic::Exact, k, &parts).err().map(|error| error.to_string());
        assert!(refused.is_some_and(|line| line.contains("not finite")), "{form:?}");
    }
}
