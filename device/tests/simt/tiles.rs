//! `mma.sync`, `ldmatrix` and `cp.async`.

use device::Arg;
use half::{bf16, f16};

use super::{SEEDS, buffer, launch, library, run, run_seeded, zeros};

#[test]
fn a_product_by_tiles_is_the_product_of_the_matrices() {
    let Some(library) = library() else { return };
    // Small whole numbers: every sum is exact in f32 in any order, so the comparison is exact too.
    let number = |i: usize| (i * 37 % 23) as f32 - 11.0;
    let round = |kernel: &str, value: f32| match kernel {
        "product_f16" => f16::from_f32(value).to_bits(),
        _ => bf16::from_f32(value).to_bits(),
    };
    for kernel in ["product_f16", "product_bf16"] {
        for (k, rows) in [(16, 8), (80, 8), (64, 5)] {
            let a: Vec<u16> = (0..16 * k).map(|i| round(kernel, number(i))).collect();
            // Exactly as many rows as exist: rows that are not valid are not read.
            let b: Vec<u16> = (0..rows * k).map(|i| round(kernel, number(7 * i + 3))).collect();
            let (a, b, c) = (buffer(&a), buffer(&b), zeros::<f32>(16 * 8));
            for seed in SEEDS {
                let mut args: Vec<Arg<'_>> = [&c, &a, &b].map(|buffer| Arg::pointer(buffer, 0)).to_vec();
                args.extend([Arg::from(k as i32), Arg::from(rows as i32)]);
                run_seeded(library, seed, &launch(kernel, 1, 32, &args)).unwrap();
                for (i, found) in c.host::<f32>().unwrap().iter().enumerate() {
                    let (m, n) = (i / 8, i % 8);
                    let products = (0..k).map(|j| number(m * k + j) * number(7 * (n * k + j) + 3));
                    let expected: f32 = if n < rows { products.sum() } else { 0.0 };
                    assert_eq!(*found, expected, "{kernel}, k {k}, row {m}, column {n}, seed {seed}");
                }
            }
        }
    }
}

#[test]
fn tiles_are_loaded_in_fragments_straight_and_transposed() {
    let Some(library) = library() else { return };
    let numbers: Vec<u16> = (0..256).collect();
    let (input, out) = (buffer(&numbers), zeros::<u32>(14 * 32));
    run(library, &launch("loads", 1, 32, &[Arg::pointer(&out, 0), Arg::pointer(&input, 0)])).unwrap();
    for lane in 0..32u32 {
        let (x, y) = (lane / 4, lane % 4 * 2);
        let straight = |tile: u32| (tile * 64 + x * 8 + y) | (tile * 64 + x * 8 + y + 1) << 16;
        let transposed = |tile: u32| (tile * 64 + y * 8 + x) | (tile * 64 + (y + 1) * 8 + x) << 16;
        let tiles = [0, 0, 1, 0, 1, 2, 3];
        let expected: Vec<u32> = tiles.map(straight).into_iter().chain(tiles.map(transposed)).collect();
        assert_eq!(out.host::<u32>().unwrap()[14 * lane as usize..][..14], expected, "lane {lane}");
    }
}
