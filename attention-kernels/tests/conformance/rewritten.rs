//! Products whose operands are rewritten first: weights that are unpacked for many rows, and rows that are rounded to 8 bits.

use std::sync::Arc;

use attention_kernels::{
    Dtype, KernelError, LinearArgs, LinearScratch, Rewritten, Rows, ScratchSizes, linear_products,
};
use device::{Device, Features, Options, ProductShape};
use linear::{
    ByteMatrix, Codes, Matrix, Offset, Purpose, Rounding, RowRounding, Scale, StoredFormat, Uploader, WeightRows,
};
use serde_json::json;
use simd::small_float::{e4m3_to_f32, f32_to_e4m3};
use testkit::everything;
use trial::Wrong;
use trial::numbers::{Random, e4m3_sum_error, round, span, to_bytes, ulp};

use super::devices::{self, buffer};
use super::failures::Looks;
use super::linear::{HALVES, check, multiply, numbers, of_product, rounded, variant};
use crate::support::opened;
use crate::weights::{self, formats};

/// Memory for layers of this shape and number of rows.
pub fn scratch(device: &dyn Device, rewritten: Rewritten, shape: [usize; 2], max_rows: usize) -> LinearScratch {
    let mut sizes = ScratchSizes::default();
    sizes.add(rewritten, shape, max_rows);
    LinearScratch::new(device, sizes).unwrap()
}

/// Shapes and row counts of the products that a layer asks of the device.
pub fn products(
    device: &dyn Device,
    weights: &Matrix,
    bias: bool,
    output: Dtype,
    scratch: &LinearScratch,
    max_rows: usize,
) -> Vec<(ProductShape, usize)> {
    let planned = linear_products(device.features(), weights, bias, output, scratch, max_rows);
    planned.into_iter().map(|planned| (planned.shape, planned.max_rows)).collect()
}

/// A matrix of stored parts, one below the other, each with its rounding.
pub fn matrix(device: &dyn Device, dtype: Dtype, parts: &[(&weights::Random, Rounding)], k: usize) -> Matrix {
    let rows: Vec<_> = parts.iter().map(|(part, rounding)| WeightRows::Stored(part.part(None, *rounding))).collect();
    let n = parts.iter().map(|(part, _)| part.rows.len()).sum();
    Uploader::new(device).unwrap().matrix(None, dtype, [n, k], &rows, Purpose::Product).unwrap()
}

#[test]
fn many_rows_are_multiplied_with_the_numbers_that_codes_stand_for() {
    const ROWS: usize = 65;
    for device in devices::gpus(7) {
        let device = &*device;
        // Two forms at a time.
        for (i, format) in formats().into_iter().enumerate().filter(|(i, _)| everything() || i % 8 < 4) {
            let (dtype, other) = (HALVES[i % 2], formats()[(i + 4) % 14]);
            // Inputs of no whole tile; two segments, of which the first takes three strips and the last one begins inside of a panel.
            let (k, [first, second]) = ([136, 64, 200][i % 3], [[80, 16], [72, 40]][i / 2 % 2]);
            let parts = [weights::Random::new(format, first, k, 3), weights::Random::new(other, second, k, 4)];
            let weights = matrix(device, dtype, &parts.each_ref().map(|part| (part, Rounding::None)), k);
            assert_eq!(weights.tiles().unwrap().segments().len(), 2);
            let mut random = Random::new(i as u64);
            let output = [dtype, Dtype::F32][i / 3 % 2];
            let (x, bias) = (numbers(&mut random, dtype, ROWS * k), numbers(&mut random, output, first + second));
            let mut space = scratch(device, Rewritten::Weights, [32, k], ROWS);
            let found = multiply(device, &weights, &x, Some(&bias), output, Some(&mut space));
            let w = parts.each_ref().map(|part| rounded(std::slice::from_ref(part), k, dtype)).concat();
            let what = format!("{format:?} and {other:?} in {dtype} to {output} on {}", device.name());
            check(&found, &x, &w, &bias, k, output).unwrap_or_else(|wrong| panic!("{what}: {wrong}"));
            // The device sums in another order than the kernel of codes, so the weights were indeed unpacked.
            let n = first + second;
            let by_kernel = multiply(device, &weights, &x, Some(&bias), output, None);
            assert!(found != by_kernel || output != Dtype::F32, "{what}: the weights were not unpacked");
            let fewer = multiply(device, &weights, &x[k..], Some(&bias), output, Some(&mut space));
            assert!(fewer == by_kernel[n..], "{what}: 64 rows");
            let products = products(device, &weights, true, output, &space, ROWS);
            assert!(products.iter().all(|(shape, rows)| shape.stride == n && *rows == ROWS), "{products:?}");
            // A product for each size of strip.
            let strips = |n: usize| (0..n).step_by(32).map(move |at| 32.min(n - at));
            let mut sizes: Vec<usize> = [first, second].into_iter().flat_map(strips).collect();
            sizes.dedup();
            assert!(products.iter().map(|(shape, _)| shape.n).eq(sizes), "{products:?}");
            assert!(self::products(device, &weights, true, output, &space, ROWS - 1).is_empty());
        }
    }
}

#[test]
fn a_deterministic_device_never_unpacks_weights() {
    let Some(device) = opened::open(Options { deterministic: true, ..Options::default() }) else { return };
    let (k, part) = (64, weights::Random::new(formats()[0], 32, 64, 1));
    let weights = matrix(&*device, Dtype::F16, &[(&part, Rounding::None)], k);
    let x = numbers(&mut Random::new(1), Dtype::F16, 300 * k);
    let mut space = scratch(&*device, Rewritten::Weights, [32, k], 300);
    let found = multiply(&*device, &weights, &x, None, Dtype::F32, Some(&mut space));
    assert!(found == multiply(&*device, &weights, &x, None, Dtype::F32, None));
    assert!(products(&*device, &weights, false, Dtype::F32, &space, 300).is_empty());
}

const INT8: StoredFormat = StoredFormat {
    codes: Codes::Integers { bits: 8, zero: 128 },
    group: usize::MAX,
    scale: Scale::F32,
    offset: Offset::None,
};
const E4M3: StoredFormat = StoredFormat { codes: Codes::E4m3, scale: Scale::Bf16, ..INT8 };

/// The number that `x` stands for after rounding, by the definitions of the formats.
fn rounded_row(x: &[f32], rounding: Rounding) -> Vec<f64> {
    let greatest = x.iter().fold(0.0f32, |greatest, x| greatest.max(x.abs()));
    let to_e4m3 = |x: f32, scale: f32| f64::from(e4m3_to_f32(f32_to_e4m3(x / scale))) * f64::from(scale);
    let of = |x: &f32| match rounding {
        _ if greatest == 0.0 => 0.0,
        Rounding::Row => f64::from((x / (greatest / 127.0)).round_ties_even()) * f64::from(greatest / 127.0),
        Rounding::Static(scale) => to_e4m3(*x, scale),
        _ => to_e4m3(*x, greatest / 448.0),
    };
    x.iter().map(of).collect()
}

#[test]
fn rows_are_rounded_as_the_format_says_and_do_not_depend_on_the_others() {
    let mut failures = Looks::default();
    for device in devices::gpus(9).into_iter().filter(|device| device.features().multiplies_e4m3) {
        let device = &*device;
        let kinds = [(INT8, Rounding::Row), (E4M3, Rounding::Floats(usize::MAX)), (E4M3, Rounding::Static(0.25))];
        for (i, (format, rounding)) in kinds.into_iter().cycle().take(6).enumerate() {
            let (dtype, k) = (HALVES[i % 2], [2224, 48][i / 2 % 2]);
            let output = [dtype, Dtype::F32][i / 3];
            // Two parts that need not begin with a panel.
            let parts = [weights::Random::new(format, 24, k, 5), weights::Random::new(format, 40, k, 6)];
            let weights = matrix(device, dtype, &parts.each_ref().map(|part| (part, rounding)), k);
            assert!(weights.bytes_and_scales().is_some() && weights.bytes() == 64 * (k + 4), "{format:?}");
            let w: Vec<f32> = parts.iter().flat_map(|part| part.values(None, k)).collect();
            let mut random = Random::new(i as u64);
            let (rows, n) = (11, 64);
            let mut x = numbers(&mut random, dtype, rows * k);
            x[3 * k..4 * k].fill(0.0);
            x[5 * k..6 * k].iter_mut().for_each(|x| *x = round(dtype, *x * 300.0));
            let bias = numbers(&mut random, output, n);
            // Four rows at a time.
            let mut space = scratch(device, Rewritten::Rows, [n, k], 4);
            let found = multiply(device, &weights, &x, Some(&bias), output, Some(&mut space));
            let settings = json!({ "rounding": format!("{rounding:?}"), "dtype": dtype.to_string(),
                "output": output.to_string(), "inputs": k, "outputs": n });
            failures.look(device, variant("cuda.linear"), &settings, || {
                let is_fp8_on_gpu = rounding != Rounding::Row && device.name() == "cuda";
                Ok(Wrong::first(found.iter().enumerate().map(|(at, found)| {
                    let (row, column) = (at / n, at % n);
                    let x = rounded_row(&x[row * k..][..k], rounding);
                    let products = x.iter().zip(&w[column * k..][..k]).map(|(x, w)| x * f64::from(*w));
                    let sums = if is_fp8_on_gpu { e4m3_sum_error(k, span(products.clone())) } else { 0.0 };
                    let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                    let (want, size) = (sum + f64::from(bias[column]), size + f64::from(bias[column].abs()));
                    let allowed = ulp(output, want.abs()) * 0.51 + ulp(Dtype::F32, size) * 16.0 + sums;
                    of_product([row, column], *found, want, allowed)
                }))?)
            });
            for rows in [0..1, 5..6, 2..9] {
                let x = &x[rows.start * k..rows.end * k];
                let alone = multiply(device, &weights, x, Some(&bias), output, Some(&mut space));
                let is_exact = rounding == Rounding::Row || device.name() == "cuda-sim";
                assert!(!is_exact || alone == found[rows.start * n..rows.end * n], "{rounding:?}: rows {rows:?} alone");
            }
            let poisoned: Vec<f32> =
                [f32::NAN, f32::INFINITY].iter().flat_map(|x| [*x].into_iter().chain((1..k).map(|_| 1.0))).collect();
            let found = multiply(device, &weights, &poisoned, Some(&bias), output, Some(&mut space));
            let is_static = matches!(rounding, Rounding::Static(_));
            assert!(found[..n].iter().all(|y| y.is_nan()), "{rounding:?}: a NaN is lost");
            assert!(is_static || found[n..].iter().all(|y| y.is_nan()), "{rounding:?}: an infinity is lost");
            let products = products(device, &weights, true, output, &space, 11);
            assert!(products.len() == 1 && products[0].1 == 4 && !products[0].0.bias, "{products:?}");
            let without = without_memory(device, &weights, &x[..k]);
            assert!(matches!(without, Err(KernelError::NotLoaded { .. })), "{without:?}");
        }
    }
}

fn without_memory(device: &dyn Device, weights: &Matrix, x: &[f32]) -> Result<(), KernelError> {
    let (x, mut y) = (buffer(device, &to_bytes(weights.dtype(), x)), buffer(device, &vec![0; weights.n() * 4]));
    let (x, output) = (Rows::Numbers(&x), Dtype::F32);
    variant("cuda.linear").linear(
        device,
        LinearArgs { x, rows: 1, weights, bias: None, y: &mut y, output, activation: None, scratch: None },
    )
}

#[test]
fn only_weights_with_a_scale_for_each_output_are_multiplied_with_rounded_rows() {
    let is_fit = |features, purpose, parts: &[(StoredFormat, Rounding, usize)], k: usize| {
        let random: Vec<_> = parts.iter().map(|(format, _, n)| weights::Random::new(*format, *n, k, 1)).collect();
        let parts: Vec<_> = random
            .iter()
            .zip(parts)
            .map(|(rows, (_, rounding, n))| (*n, linear::PartForm::Stored(rows.part(None, *rounding))))
            .collect();
        ByteMatrix::rounding_of(features, purpose, k, &parts)
    };
    let (all, floats) = (Features::LAUNCHING, Rounding::Floats(64));
    let without_e4m3 = Features { multiplies_e4m3: false, ..all };
    assert_eq!(is_fit(all, Purpose::Product, &[(INT8, Rounding::Row, 16)], 64), Some(RowRounding::Int8));
    assert_eq!(is_fit(without_e4m3, Purpose::Product, &[(INT8, Rounding::Row, 16)], 64), Some(RowRounding::Int8));
    assert_eq!(is_fit(all, Purpose::Product, &[(E4M3, floats, 8), (E4M3, floats, 8)], 64), Some(RowRounding::E4m3));
    assert_eq!(is_fit(all, Purpose::Product, &[(E4M3, Rounding::Static(2.0), 16)], 64), Some(RowRounding::Static(2.0)));
    let grouped = StoredFormat { group: 32, ..INT8 };
    for (features, purpose, parts, k) in [
        (without_e4m3, Purpose::Product, vec![(E4M3, floats, 16)], 64),
        (all, Purpose::Stack(16), vec![(INT8, Rounding::Row, 16)], 64),
        (all, Purpose::Numbers, vec![(INT8, Rounding::Row, 16)], 64),
        (all, Purpose::Product, vec![(INT8, Rounding::None, 16)], 64),
        (all, Purpose::Product, vec![(INT8, Rounding::Blocks, 16)], 64),
        (all, Purpose::Product, vec![(grouped, Rounding::Row, 16)], 64),
        (all, Purpose::Product, vec![(INT8, Rounding::Row, 12)], 64),
        (all, Purpose::Product, vec![(INT8, Rounding::Row, 16)], 72),
        (all, Purpose::Product, vec![(E4M3, Rounding::Floats(32), 16)], 64),
        (all, Purpose::Product, vec![(E4M3, Rounding::Static(0.0), 16)], 64),
        (all, Purpose::Product, vec![(E4M3, Rounding::Static(1.0), 16), (E4M3, Rounding::Static(2.0), 16)], 64),
        (all, Purpose::Product, vec![(E4M3, floats, 16), (INT8, Rounding::Row, 16)], 64),
    ] {
        assert_eq!(is_fit(features, purpose, &parts, k), None, "{parts:?} for {purpose:?}");
    }
}

/// Launches what rewrites operands.
pub fn rewrite_all(device: &Arc<dyn Device>, dtype: Dtype) {
    let device = &**device;
    for format in formats().into_iter().step_by(if everything() { 1 } else { 3 }) {
        let part = weights::Random::new(format, 40, 192, 1);
        let weights = matrix(device, dtype, &[(&part, Rounding::None)], 192);
        let mut space = scratch(device, Rewritten::Weights, [32, 192], 257);
        multiply(device, &weights, &vec![0.5; 257 * 192], None, dtype, Some(&mut space));
    }
    for (format, rounding) in [(INT8, Rounding::Row), (E4M3, Rounding::Static(0.5))] {
        let part = weights::Random::new(format, 48, 80, 1);
        let weights = matrix(device, dtype, &[(&part, rounding)], 80);
        let mut space = scratch(device, Rewritten::Rows, [48, 80], 2);
        multiply(device, &weights, &[0.5; 240], Some(&[1.0; 48]), dtype, Some(&mut space));
    }
}
