//! Products of codes by the kernels for Hopper, which need memory for rows in the order of the codes.

use std::sync::Arc;

use attention_kernels::{Dtype, LinearScratch, Rewritten};
use device::{Device, Options};
use linear::{Codes, Offset, Purpose, Rounding, Scale, StoredFormat};
use serde_json::json;
use testkit::everything;
use trial::Wrong;
use trial::numbers::Random;

use super::devices;
use super::failures::Looks;
use super::linear::{HALVES, check, multiply, numbers, of_product, random_codes, rounded, variant};
use super::rewritten;
use crate::support::opened;
use crate::weights::{self, formats};

fn is_hopper(device: &Arc<dyn Device>) -> bool {
    device.compute_capability().is_none_or(|found| found == (9, 0))
}

/// The GPUs that have the kernels.
fn hoppers(seed: u64) -> impl Iterator<Item = Arc<dyn Device>> {
    devices::gpus(seed).into_iter().filter(is_hopper)
}

/// The same where the kernels serve any number of rows.
fn deterministic() -> impl Iterator<Item = Arc<dyn Device>> {
    devices::deterministic().into_iter().filter(is_hopper)
}

/// Forms that the kernels multiply by: one for each kind of codes, and zero points.
fn plain() -> Vec<StoredFormat> {
    let zeros = |group| StoredFormat {
        codes: Codes::Integers { bits: 4, zero: 0 },
        group,
        scale: Scale::F16,
        offset: Offset::ZeroPoint,
    };
    let blocks = StoredFormat { codes: Codes::Integers { bits: 4, zero: 8 }, offset: Offset::None, ..zeros(32) };
    let mut plain = vec![blocks, zeros(128), zeros(usize::MAX)];
    plain.extend(PLAIN.map(|i| formats()[i]));
    plain
}

/// Which of [`formats`] they are.
const PLAIN: [usize; 6] = [0, 1, 5, 10, 11, 13];

/// Memory for the order of rows alone.
fn ordering(device: &dyn Device, shape: [usize; 2], rows: usize) -> LinearScratch {
    rewritten::scratch(device, Rewritten::Order, shape, rows)
}

#[test]
fn a_code_counts_on_hopper_as_the_number_that_unpacking_gives() {
    let mut failures = Looks::default();
    for device in hoppers(1) {
        for (i, (format, dtype)) in
            plain().into_iter().flat_map(|format| HALVES.map(|dtype| (format, dtype))).enumerate()
        {
            let settings = json!({ "format": format!("{format:?}"), "dtype": dtype.to_string() });
            // Outputs of no whole panel, of a part of a block.
            let (n, k) = ([40, 20][i % 2], [64, 192, 128][i / 2 % 3]);
            let parts = [weights::Random::new(format, n, k, i as u64)];
            let weights = rewritten::matrix(&*device, dtype, &[(&parts[0], Rounding::None)], k);
            let unit: Vec<f32> = (0..k * k).map(|at| if at / k == at % k { 1.0 } else { 0.0 }).collect();
            let mut space = ordering(&*device, [n, k], k);
            failures.look(&*device, variant("cuda.linear"), &settings, || {
                let y = multiply(&*device, &weights, &unit, None, Dtype::F32, Some(&mut space));
                let (products, w) = (y.iter().enumerate(), rounded(&parts, k, dtype));
                Ok(Wrong::first(
                    products.map(|(at, y)| of_product([at / n, at % n], *y, f64::from(w[at % n * k + at / n]), 0.0)),
                )?)
            });
        }
    }
}

#[test]
fn rows_on_hopper_are_what_float64_says_and_do_not_depend_on_the_others() {
    let mut failures = Looks::default();
    for device in deterministic() {
        for (i, (format, dtype)) in
            plain().into_iter().flat_map(|format| HALVES.map(|dtype| (format, dtype))).enumerate()
        {
            // Two blocks of outputs and one; slices of k of different lengths; tiles that are no multiple of those loaded at once.
            let (n, k, output) = ([136, 36][i % 2], [1088, 64, 320][i / 2 % 3], [dtype, Dtype::F32][i / 3 % 2]);
            let all = if everything() { 300 } else { [20, 40, 70, 130][i % 4] };
            let parts = [weights::Random::new(format, n, k, i as u64)];
            let weights = rewritten::matrix(&*device, dtype, &[(&parts[0], Rounding::None)], k);
            let mut random = Random::new(i as u64);
            let (x, bias) = (numbers(&mut random, dtype, all * k), numbers(&mut random, output, n));
            let settings = json!({ "format": format!("{format:?}"), "dtype": dtype.to_string(),
                "output": output.to_string(), "inputs": k, "outputs": n, "rows": all });
            let mut space = ordering(&*device, [n, k], all);
            failures.look(&*device, variant("cuda.linear"), &settings, || {
                let w = rounded(&parts, k, dtype);
                let y = multiply(&*device, &weights, &x, Some(&bias), output, Some(&mut space));
                check(&y, &x, &w, &bias, k, output)?;
                for rows in [0..17, 3..all, all - 18..all] {
                    let x = &x[rows.start * k..rows.end * k];
                    let alone = multiply(&*device, &weights, x, Some(&bias), output, Some(&mut space));
                    assert!(alone == y[rows.start * n..rows.end * n], "rows {rows:?} alone");
                }
                Ok(())
            });
        }
    }
}

#[test]
fn hopper_multiplies_these_forms_shapes_and_numbers_of_rows_and_the_kernels_of_all_gpus_the_others() {
    for device in hoppers(1) {
        let forms = formats().into_iter().enumerate().map(|(i, form)| (form, [40, 1088], 40, PLAIN.contains(&i)));
        let fewer = StoredFormat { group: 32, ..formats()[1] };
        let others = [([40, 1080], 40), ([38, 1088], 40), ([40, 1088], 32), ([40, 1088], 33), ([40, 1088], 256)];
        let others = others.map(|(shape, rows)| (plain()[0], shape, rows, shape == [40, 1088] && rows > 32));
        for (format, [n, k], rows, is_hopper) in forms.chain(others).chain([(fewer, [40, 1088], 40, false)]) {
            let weights = random_codes(&*device, Dtype::F16, format, [n, k], Purpose::Product);
            let x = numbers(&mut Random::new(3), Dtype::F16, rows * k);
            let mut space = ordering(&*device, [n, k], rows);
            let found = multiply(&*device, &weights, &x, None, Dtype::F32, Some(&mut space));
            // The two sum in different orders.
            let is_other = found != multiply(&*device, &weights, &x, None, Dtype::F32, None);
            assert_eq!(is_other, is_hopper, "{format:?}, {rows} rows, {n} outputs, {k} inputs");
        }
    }
}

#[test]
fn a_deterministic_device_multiplies_one_row_as_it_multiplies_many() {
    let Some(device) = opened::open(Options { deterministic: true, ..Options::default() }) else { return };
    let (n, k) = (72, 1024);
    let weights = random_codes(&*device, Dtype::Bf16, plain()[0], [n, k], Purpose::Product);
    let x = numbers(&mut Random::new(1), Dtype::Bf16, 260 * k);
    let mut space = ordering(&*device, [n, k], 260);
    let y = multiply(&*device, &weights, &x, None, Dtype::F32, Some(&mut space));
    for rows in [0..1, 7..12, 100..117, 259..260] {
        let alone = multiply(&*device, &weights, &x[rows.start * k..rows.end * k], None, Dtype::F32, Some(&mut space));
        assert!(alone == y[rows.start * n..rows.end * n], "rows {rows:?} alone");
    }
}

#[test]
fn experts_on_hopper_multiply_their_own_rows_as_if_each_was_alone() {
    for device in deterministic() {
        super::linear::multiply_experts(&*device, [192, 128, 320], true);
    }
}

/// Launches the kernels, with slices of k and without.
pub fn multiply_all(device: &Arc<dyn Device>, dtype: Dtype) {
    for (i, format) in plain().into_iter().enumerate() {
        let (n, k) = (40, [64, 1088][i % 2]);
        let weights = random_codes(&**device, dtype, format, [n, k], Purpose::Product);
        let mut space = ordering(&**device, [n, k], 40);
        multiply(&**device, &weights, &vec![0.5; 40 * k], None, dtype, Some(&mut space));
    }
}
