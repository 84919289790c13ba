//! Mbarriers, boxes of the copy engine, named barriers and `wgmma`: their results, against code that uses only the layouts, and
//! the errors that are detected.

use device::sim::{FaultKind, SimError};
use device::{Arg, Buffer, Launch, Tensor};
use half::{bf16, f16};

use super::{SEEDS, buffer, launch, library, line_in, run_seeded, zeros};

/// Shared memory of the largest of these launches.
const SHARED: u32 = 64 << 10;

fn threads<'a>(kernel: &'a str, threads: u32, args: &'a [Arg<'a>]) -> Launch<'a> {
    Launch { shared_bytes: SHARED, ..launch(kernel, 1, threads, args) }
}

/// Small whole numbers: sums of their products are exact in f32 in any order.
fn number(i: usize) -> f32 {
    (i * 37 % 23) as f32 - 11.0
}

/// A dense tensor with rows of 64 or more elements.
pub fn matrix(buffer: &Buffer, rows: usize, columns: usize) -> Tensor<'_> {
    let row = 2 * columns;
    let all = rows * row;
    Tensor { buffer, sizes: [columns, rows, 1, 1], strides: [row, all, all], tile: [64, rows as u32, 1, 1] }
}

#[test]
fn a_box_arrives_swizzled_with_zeros_for_what_is_outside_of_the_tensor() {
    let Some(library) = library() else { return };
    let sizes = [128, 20, 3, 2];
    let numbers: Vec<u16> = (0..128 * 20 * 3 * 2).map(|i| i as u16).collect();
    let input = buffer(&numbers);
    // Rows of different indices of the third dimension are interleaved, as in a cache with layout NHD.
    let strides = [3 * 256, 256, 20 * 3 * 256];
    for (tile, at) in
        [([64, 8, 1, 1], [64, 8, 2, 1]), ([64, 16, 2, 2], [0, 10, 1, 0]), ([64, 5, 1, 1], [96, -2, 0, -1])]
    {
        let tensor = Tensor { buffer: &input, sizes, strides, tile };
        let bytes = 2 * tile.iter().product::<u32>();
        let mut expected = vec![0u16; bytes as usize / 2];
        let mut row = 0; // index of rows of 128 bytes
        for w in 0..tile[3] as i32 {
            for z in 0..tile[2] as i32 {
                for y in 0..tile[1] as i32 {
                    for x in 0..64 {
                        let place = [at[0] + x, at[1] + y, at[2] + z, at[3] + w];
                        let inside = place.iter().zip(sizes).all(|(i, size)| (0..size as i32).contains(i));
                        let [i, j, k, l] = place.map(|i| i as usize);
                        let (chunk, rest) = (x as usize / 8, x as usize % 8);
                        let to = row * 64 + (chunk ^ (row % 8)) * 8 + rest;
                        if inside {
                            expected[to] = numbers[i + (j * strides[0] + k * strides[1] + l * strides[2]) / 2];
                        }
                    }
                    row += 1;
                }
            }
        }
        for seed in SEEDS {
            let out = zeros::<u16>(expected.len());
            let [x, y, z, w] = at.map(Arg::from);
            let args = [Arg::pointer(&out, 0), Arg::tensor(&tensor), x, y, z, w, bytes.into()];
            run_seeded(library, seed, &threads("box", 64, &args)).unwrap();
            assert!(out.host::<u16>().unwrap() == expected, "{tile:?} at {at:?}, seed {seed}");
        }
    }
}

#[test]
fn what_the_copy_engine_does_not_take_is_refused_before_the_launch() {
    let Some(library) = library() else { return };
    let (input, out) = (zeros::<u16>(64 * 64), zeros::<u16>(64 * 64));
    let good = matrix(&input, 64, 64);
    let said = |tensor: &Tensor<'_>| {
        let args = [Arg::pointer(&out, 0), Arg::tensor(tensor), 0.into(), 0.into(), 0.into(), 0.into(), 8192u32.into()];
        run_seeded(library, 0, &threads("box", 64, &args)).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(said(&good), "");
    for (tensor, what) in [
        (Tensor { sizes: [64, 0, 1, 1], ..good }, "sizes from 1 to 2^32 - 1"),
        (Tensor { strides: [120, 8192, 8192], ..good }, "strides that are multiples of 16 bytes, below 2^40"),
        (Tensor { tile: [32, 64, 1, 1], ..good }, "boxes of 64 elements, then 1 to 256"),
        (Tensor { sizes: [64, 65, 1, 1], ..good }, "a tensor inside of its buffer"),
    ] {
        assert_eq!(
            said(&tensor),
            format!("kernel box: argument 1 is a tensor for the copy engine, which takes {what}")
        );
    }
}

#[test]
fn boxes_pass_through_stages_in_every_order_of_threads() {
    let Some(library) = library() else { return };
    for boxes in [1, 2, 9] {
        let numbers: Vec<u32> = (0..boxes * 256).map(|i| i as u32 * 7 + 1).collect();
        let input = buffer(&numbers);
        let tensor = Tensor { tile: [64, 8, 1, 1], ..matrix(&input, boxes * 8, 64) };
        for seed in SEEDS {
            let sums = zeros::<u32>(1);
            let args = [Arg::pointer(&sums, 0), Arg::tensor(&tensor), (boxes as i32).into()];
            run_seeded(library, seed, &threads("pipeline", 96, &args)).unwrap();
            assert_eq!(sums.host::<u32>().unwrap()[0], numbers.iter().sum::<u32>(), "{boxes} boxes, seed {seed}");
        }
    }
}

#[test]
fn warps_meet_at_barriers_of_their_own() {
    let Some(library) = library() else { return };
    for seed in SEEDS {
        let out = buffer(&[-1i32; 128]);
        run_seeded(library, seed, &threads("named_barriers", 128, &[Arg::pointer(&out, 0)])).unwrap();
        for (thread, found) in out.host::<i32>().unwrap().iter().enumerate() {
            assert_eq!(*found, if thread / 32 == 2 { -1 } else { (thread ^ 32) as i32 }, "seed {seed}");
        }
    }
}

/// The canonical layouts of the PTX ISA for matrices of 16-bit elements: the byte offset of (mn, k), with rows of `swizzle`
/// bytes (0: no swizzle), and the permutation of the 16-byte chunks of a row.
fn canonical(swizzle: usize, mn_major: bool, leading: usize, stride: usize, mn: usize, k: usize) -> usize {
    let (fast, slow) = if mn_major { (mn, k) } else { (k, mn) };
    if swizzle == 0 {
        // Core matrices of 8 rows of 16 bytes, each contiguous.
        let (next_fast, next_slow) = if mn_major { (stride, leading) } else { (leading, stride) };
        return slow % 8 * 16 + slow / 8 * next_slow + fast / 8 * next_fast + fast % 8 * 2;
    }
    let row = slow / 8 * stride + slow % 8 * swizzle + fast / (swizzle / 2) * leading;
    let chunk = fast % (swizzle / 2) / 8;
    // Rows of 128 bytes: chunk ^ row % 8; of 64: two rows to 128 bytes, chunk ^ row / 2 % 4; of 32: chunk ^ row / 4 % 2.
    let exchanged = chunk ^ (slow % 8 / (128 / swizzle) % (swizzle / 16));
    row + exchanged * 16 + fast % 8 * 2
}

#[test]
fn a_product_finds_its_factors_in_every_canonical_layout() {
    let Some(library) = library() else { return };
    let (a, b) = (|m: usize, k: usize| number(m * 16 + k), |k: usize, n: usize| number(7 * (k * 64 + n) + 3));
    let encode = |leading: usize, stride: usize, mode: u64| {
        (leading as u64 >> 4) << 16 | (stride as u64 >> 4) << 32 | mode << 62
    };
    for (swizzle, mode) in [(0, 0), (128, 1), (64, 2), (32, 3)] {
        for columns in [false, true] {
            // Strides larger than those of dense matrices, so that each has an effect. The second factor is aligned to every
            // pattern.
            let (a_leading, a_stride) = if swizzle == 0 { (1152, 128) } else { (0, 8 * swizzle + 1024) };
            let (b_leading, b_stride) = match (swizzle, columns) {
                (0, false) => (1280, 128),
                (0, true) => (2048, 256),
                (_, false) => (0, 8 * swizzle + 1024),
                (_, true) => (8 * swizzle * 3 + 1024, 8 * swizzle),
            };
            let b_at = 16 << 10;
            let mut image = vec![u16::MAX; 16 << 10];
            for k in 0..16 {
                for mn in 0..64 {
                    image[canonical(swizzle, false, a_leading, a_stride, mn, k) / 2] =
                        f16::from_f32(a(mn, k)).to_bits();
                    let at = b_at + canonical(swizzle, columns, b_leading, b_stride, mn, k);
                    image[at / 2] = f16::from_f32(b(k, mn)).to_bits();
                }
            }
            let (image, c) = (buffer(&image), zeros::<f32>(64 * 64));
            let (a_matrix, b_matrix) = (encode(a_leading, a_stride, mode), encode(b_leading, b_stride, mode));
            let kernel = if columns { "product_of_image_columns" } else { "product_of_image_k" };
            let bytes = image.len_bytes() as u32;
            let args = [
                Arg::pointer(&c, 0),
                Arg::pointer(&image, 0),
                bytes.into(),
                a_matrix.into(),
                b_matrix.into(),
                (b_at as u32).into(),
            ];
            run_seeded(library, 77, &threads(kernel, 128, &args)).unwrap();
            for (i, found) in c.host::<f32>().unwrap().iter().enumerate() {
                let (m, n) = (i / 64, i % 64);
                let expected: f32 = (0..16).map(|k| a(m, k) * b(k, n)).sum();
                assert_eq!(*found, expected, "swizzle {swizzle}, {kernel}, row {m}, column {n}");
            }
            if swizzle > 0 {
                // With another swizzle the product differs.
                let wrong = encode(b_leading, b_stride, mode % 3 + 1);
                let args = [args[0], args[1], args[2], args[3], wrong.into(), args[5]];
                let before = c.host::<f32>().unwrap().to_vec();
                run_seeded(library, 0, &threads(kernel, 128, &args)).unwrap();
                assert!(c.host::<f32>().unwrap() != before, "a wrong swizzle of {kernel} does not show");
            }
        }
    }
}

#[test]
fn a_product_of_boxes_is_the_product_of_the_matrices() {
    let Some(library) = library() else { return };
    for kernel in [
        "boxes_f16_64_k",
        "boxes_bf16_64_columns_registers",
        "boxes_bf16_128_k",
        "boxes_f16_128_columns_registers",
        "boxes_f16_128_k_registers",
        "boxes_bf16_64_columns",
    ] {
        let n = if kernel.contains("128") { 128 } else { 64 };
        let bits = |value: f32| match kernel.contains("bf16") {
            true => bf16::from_f32(value).to_bits(),
            false => f16::from_f32(value).to_bits(),
        };
        let columns = kernel.contains("columns");
        let b = |k: usize, column: usize| number(7 * (k * n + column) + 3);
        let a_bits: Vec<u16> = (0..64 * 64).map(|i| bits(number(i))).collect();
        let b_bits: Vec<u16> =
            (0..64 * n).map(|i| bits(if columns { b(i / n, i % n) } else { b(i % 64, i / 64) })).collect();
        let (a_buffer, b_buffer) = (buffer(&a_bits), buffer(&b_bits));
        let of_a = matrix(&a_buffer, 64, 64);
        let of_b = if columns { matrix(&b_buffer, 64, n) } else { matrix(&b_buffer, n, 64) };
        for seed in SEEDS {
            let begun: Vec<f32> = (0..2 * 64 * n).map(|i| number(i + 5)).collect();
            let c = buffer(&begun);
            let args = [Arg::pointer(&c, 0), Arg::tensor(&of_a), Arg::tensor(&of_b), Arg::pointer(&a_buffer, 0)];
            run_seeded(library, seed, &threads(kernel, 128, &args)).unwrap();
            for (i, found) in c.host::<f32>().unwrap().iter().enumerate() {
                let (m, column) = (i % (64 * n) / n, i % n);
                let sum: f32 = (0..64).map(|k| number(m * 64 + k) * b(k, column)).sum();
                let expected = sum + number(i % (64 * n) + 5);
                assert_eq!(*found, expected, "{kernel}, row {m}, column {column}, seed {seed}");
            }
        }
    }
}

/// Runs a kernel of `hopper_mistakes.cu` over a box of ones; returns the outcome and the output.
fn mistake(kernel: &str, count: u32, seed: u64) -> Option<(Result<(), SimError>, Vec<f32>)> {
    let library = library()?;
    let input = buffer(&[1.0f32; 256]);
    let tensor = matrix(&input, 8, 64);
    let out = zeros::<f32>(128);
    let args = [Arg::pointer(&out, 0), Arg::tensor(&tensor)];
    let outcome = run_seeded(library, seed, &Launch { shared_bytes: 8192, ..launch(kernel, 1, count, &args) });
    Some((outcome, out.host::<f32>().unwrap().to_vec()))
}

#[test]
fn what_is_read_before_it_has_come_is_no_number() {
    for kernel in ["read_before_arrival", "wrong_parity", "refilled_too_early", "no_proxy_fence", "sums_too_early"] {
        // With another seed a copy may be complete at once.
        let Some((outcome, found)) = mistake(kernel, 128, 0) else { return };
        outcome.unwrap_or_else(|error| panic!("{kernel}: {error}"));
        assert!(found.iter().any(|value| value.is_nan()), "{kernel}");
    }
}

#[test]
fn a_mistake_of_asynchronous_operations_is_reported_with_its_line() {
    for (kernel, kind) in [
        ("too_few_bytes", FaultKind::Deadlock),
        ("nobody_arrives", FaultKind::Deadlock),
        ("too_few_meet", FaultKind::Deadlock),
        ("arrives_twice", FaultKind::BadAsync),
        ("no_mbarrier", FaultKind::BadAsync),
        ("no_init_fence", FaultKind::BadAsync),
        ("misaligned_box", FaultKind::Misaligned),
        ("counts_differ", FaultKind::BadAsync),
        ("no_wgmma_fence", FaultKind::BadAsync),
        ("no_wgmma_wait", FaultKind::BadAsync),
        ("written_sums", FaultKind::BadAsync),
        ("changed_factor", FaultKind::BadAsync),
        ("product_of_flying", FaultKind::BadAsync),
        ("different_products", FaultKind::DivergentCollective),
        ("part_of_a_warpgroup", FaultKind::DivergentCollective),
    ] {
        let Some((outcome, _)) = mistake(kernel, 128, 0) else { return };
        let Err(SimError::Fault(fault)) = outcome else { panic!("{kernel}: {outcome:?}") };
        assert_eq!(fault.kind, kind, "{fault}");
        assert!(fault.file.ends_with("hopper_mistakes.cu"), "{fault}");
        assert!(line_in("hopper_mistakes.cu", kernel).contains(&fault.line), "{fault}");
    }
    let Some((outcome, _)) = mistake("left_in_flight", 128, 0) else { return };
    let Err(SimError::Fault(fault)) = outcome else { panic!("{outcome:?}") };
    assert_eq!(fault.kind, FaultKind::BadAsync, "{fault}");
    assert!(fault.to_string().ends_with("the block ends while a bulk copy to its shared memory is pending"), "{fault}");
    let Some((outcome, _)) = mistake("no_wgmma_fence", 32, 0) else { return };
    assert!(outcome.unwrap_err().to_string().ends_with("wgmma takes a warpgroup: four whole warps"));
}
