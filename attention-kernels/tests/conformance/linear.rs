//! Products with weights that are codes, and products of experts, against float64 and against each other.

use std::sync::Arc;

use attention_kernels::{
    Dtype, ExpertLinearArgs, LinearArgs, LinearScratch, Operation, Rows, Variant, expert_linear, ordered_bytes,
    variants,
};
use device::Device;
use linear::{Codes, Matrix, Offset, Purpose, Quantization, Rounding, Scale, StoredFormat, Uploader, WeightRows};
use serde_json::json;
use testkit::everything;
use trial::Wrong;
use trial::numbers::{Random, from_bytes, round, to_bytes, ulp};

use super::devices::{self, buffer, bytes};
use super::failures::Looks;
use crate::weights::{self, formats};

pub const HALVES: [Dtype; 2] = [Dtype::F16, Dtype::Bf16];

pub fn variant(name: &str) -> &'static Variant {
    variants(Operation::Linear).into_iter().find(|variant| variant.name == name).unwrap()
}

/// Small numbers of the type.
pub fn numbers(random: &mut Random, dtype: Dtype, count: usize) -> Vec<f32> {
    (0..count).map(|_| round(dtype, random.unit())).collect()
}

/// A matrix of stored parts, one below the other.
fn coded(device: &dyn Device, dtype: Dtype, parts: &[weights::Random], k: usize, purpose: Purpose) -> Matrix {
    let rows: Vec<_> = parts.iter().map(|part| WeightRows::Stored(part.part(None, Rounding::None))).collect();
    let n = parts.iter().map(|part| part.rows.len()).sum();
    Uploader::new(device).unwrap().matrix(None, dtype, [n, k], &rows, purpose).unwrap()
}

/// A random matrix of a form.
pub fn random_codes(
    device: &dyn Device,
    dtype: Dtype,
    format: StoredFormat,
    [n, k]: [usize; 2],
    purpose: Purpose,
) -> Matrix {
    coded(device, dtype, &[weights::Random::new(format, n, k, 1)], k, purpose)
}

/// The product of rows of `x` with `cuda.linear`, as float32 or as numbers of the weights' type.
pub fn multiply(
    device: &dyn Device,
    weights: &Matrix,
    x: &[f32],
    bias: Option<&[f32]>,
    output: Dtype,
    scratch: Option<&mut LinearScratch>,
) -> Vec<f32> {
    let (rows, dtype) = (x.len() / weights.k(), weights.dtype());
    let x = buffer(device, &to_bytes(dtype, x));
    let bias = bias.map(|bias| buffer(device, &to_bytes(output, bias)));
    let mut y = buffer(device, &vec![0xff; rows * weights.n() * output.bytes()]);
    let args = LinearArgs {
        x: Rows::Numbers(&x),
        rows,
        weights,
        bias: bias.as_ref(),
        y: &mut y,
        output,
        activation: None,
        scratch,
    };
    variant("cuda.linear").linear(device, args).unwrap();
    from_bytes(output, &bytes(device, &y))
}

/// The weights of stored parts, rounded to the type.
pub fn rounded(parts: &[weights::Random], k: usize, dtype: Dtype) -> Vec<f32> {
    parts.iter().flat_map(|part| part.values(None, k)).map(|weight| round(dtype, weight)).collect()
}

/// Checks outputs against sums in float64, within half a unit of the type and the roundings of a sum in float32.
pub fn check(y: &[f32], x: &[f32], w: &[f32], bias: &[f32], k: usize, output: Dtype) -> Result<(), Wrong> {
    let n = w.len() / k;
    Wrong::first(y.iter().enumerate().map(|(at, y)| {
        let (row, column) = (at / n, at % n);
        let products = x[row * k..][..k].iter().zip(&w[column * k..][..k]).map(|(x, w)| f64::from(*x) * f64::from(*w));
        let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
        let (expected, size) = (sum + f64::from(bias[column]), size + f64::from(bias[column].abs()));
        // Half an ulp for the result, and the roundings of a sum in float32.
        let allowed = ulp(output, expected.abs()) * 0.51 + ulp(Dtype::F32, size) * 16.0;
        of_product([row, column], *y, expected, allowed)
    }))
}

/// An output of a product beside its bound, for [`Wrong::first`].
pub fn of_product([row, output]: [usize; 2], got: f32, want: f64, allowed: f64) -> (bool, Wrong) {
    let error = (f64::from(got) - want).abs();
    (error <= allowed, Wrong { part: "row, output", place: [row, output, 0], got, want, error, wrong: 0, of: 0 })
}

#[test]
fn a_code_counts_as_the_number_that_unpacking_gives() {
    let mut failures = Looks::default();
    for device in devices::gpus(1) {
        for (i, (format, dtype)) in
            formats().into_iter().flat_map(|format| HALVES.map(|dtype| (format, dtype))).enumerate()
        {
            let settings = json!({ "format": format!("{format:?}"), "dtype": dtype.to_string() });
            // Inputs of no whole tile, outputs of no whole panel and of several blocks.
            let (n, k) = ([40, 16, 90][i % 3], [160, 64, 200][i / 2 % 3]);
            let parts = [weights::Random::new(format, n, k, i as u64)];
            let weights = coded(&*device, dtype, &parts, k, Purpose::Product);
            assert!(weights.tiles().is_some(), "{format:?} is unpacked");
            // A row for each input: ones of a unit matrix pick weights one by one.
            let unit: Vec<f32> = (0..k * k).map(|at| if at / k == at % k { 1.0 } else { 0.0 }).collect();
            failures.look(&*device, variant("cuda.linear"), &settings, || {
                let (y, w) = (multiply(&*device, &weights, &unit, None, Dtype::F32, None), rounded(&parts, k, dtype));
                let products = y.iter().enumerate();
                Ok(Wrong::first(
                    products.map(|(at, y)| of_product([at / n, at % n], *y, f64::from(w[at % n * k + at / n]), 0.0)),
                )?)
            });
        }
    }
}

#[test]
fn products_of_codes_are_what_float64_says_and_a_row_does_not_depend_on_the_others() {
    let mut failures = Looks::default();
    for device in devices::gpus(77) {
        for (i, (format, dtype)) in
            formats().into_iter().flat_map(|format| HALVES.map(|dtype| (format, dtype))).enumerate()
        {
            let (n, k, output) = ([72, 33][i % 2], [2200, 64, 1152][i / 2 % 3], [dtype, Dtype::F32][i / 3 % 2]);
            let parts = [weights::Random::new(format, n, k, i as u64)];
            let weights = coded(&*device, dtype, &parts, k, Purpose::Product);
            let mut random = Random::new(i as u64);
            let (x, bias) = (numbers(&mut random, dtype, 37 * k), numbers(&mut random, output, n));
            let settings = json!({ "format": format!("{format:?}"), "dtype": dtype.to_string(),
                "output": output.to_string(), "inputs": k, "outputs": n });
            failures.look(&*device, variant("cuda.linear"), &settings, || {
                let y = multiply(&*device, &weights, &x, Some(&bias), output, None);
                check(&y, &x, &rounded(&parts, k, dtype), &bias, k, output)?;
                for rows in [0..1, 36..37, 3..10, 5..14, 0..33] {
                    let x = &x[rows.start * k..rows.end * k];
                    let alone = multiply(&*device, &weights, x, Some(&bias), output, None);
                    assert!(alone == y[rows.start * n..rows.end * n], "rows {rows:?} alone");
                }
                Ok(())
            });
        }
    }
}

#[test]
fn parts_of_different_forms_and_quantised_numbers_are_multiplied_side_by_side() {
    for device in devices::gpus(1) {
        let (k, all) = (192, formats());
        let parts: Vec<_> = [(all[1], 40), (all[8], 7), (all[13], 64)]
            .into_iter()
            .map(|(format, n)| weights::Random::new(format, n, k, n as u64))
            .collect();
        let mut random = Random::new(9);
        let x = numbers(&mut random, Dtype::Bf16, 11 * k);
        let weights = coded(&*device, Dtype::Bf16, &parts, k, Purpose::Product);
        let bias = numbers(&mut random, Dtype::Bf16, 111);
        let y = multiply(&*device, &weights, &x, Some(&bias), Dtype::Bf16, None);
        check(&y, &x, &rounded(&parts, k, Dtype::Bf16), &bias, k, Dtype::Bf16).unwrap();
        for (quantization, bits) in [(Quantization::Q8, 7), (Quantization::Q4, 3)] {
            let plain = numbers(&mut random, Dtype::F32, 24 * k);
            let raw = to_bytes(Dtype::F32, &plain);
            let rows = [WeightRows::Numbers(Dtype::F32, &raw)];
            let mut uploader = Uploader::new(&*device).unwrap();
            let weights = uploader.matrix(Some(quantization), Dtype::F16, [24, k], &rows, Purpose::Product).unwrap();
            let one: Vec<f32> = (0..k).map(|i| if i == 100 { 1.0 } else { 0.0 }).collect();
            for (output, y) in multiply(&*device, &weights, &one, None, Dtype::F32, None).iter().enumerate() {
                // Weights are at most 1, so a step is at most 1 over the greatest code.
                let error = (y - plain[output * k + 100]).abs();
                assert!(error <= 0.6 / (1 << bits) as f32, "{quantization}, output {output}: {error}");
            }
        }
    }
}

#[test]
fn weights_without_a_form_for_kernels_become_numbers() {
    for device in devices::gpus(1) {
        let format = |codes, group, scale, offset| StoredFormat { codes, group, scale, offset };
        let nibbles = Codes::Integers { bits: 4, zero: 0 };
        let unfit = [
            (format(nibbles, 96, Scale::F16, Offset::None), Dtype::F16, Purpose::Product),
            (format(nibbles, 32, Scale::F32, Offset::Minimum), Dtype::F16, Purpose::Product),
            (format(nibbles, 32, Scale::F16, Offset::None), Dtype::F32, Purpose::Product),
            (format(nibbles, 32, Scale::F16, Offset::None), Dtype::F16, Purpose::Numbers),
            // Two matrices that do not begin with a panel.
            (format(nibbles, 32, Scale::F16, Offset::None), Dtype::F16, Purpose::Stack(12)),
        ];
        for (format, dtype, purpose) in unfit {
            let parts = [weights::Random::new(format, 24, 192, 3)];
            let weights = coded(&*device, dtype, &parts, 192, purpose);
            let numbers = weights.numbers().unwrap_or_else(|| panic!("{format:?} in {dtype} for {purpose:?}"));
            assert!(from_bytes(dtype, &bytes(&*device, numbers)) == rounded(&parts, 192, dtype), "{format:?}");
        }
        let mut bad = weights::Random::new(formats()[0], 24, 128, 3);
        bad.rows[17].scales[0] = 0x7f80;
        let rows = [WeightRows::Stored(bad.part(None, Rounding::None))];
        let refused = Uploader::new(&*device).unwrap().matrix(None, Dtype::Bf16, [24, 128], &rows, Purpose::Product);
        assert!(matches!(refused, Err(linear::LinearError::NotFinite)));
    }
}

/// Assignments of rows to experts: order and starts.
fn grouped(chosen: &[u32], experts: usize) -> (Vec<u8>, Vec<u8>, Vec<Vec<usize>>) {
    let of: Vec<Vec<usize>> =
        (0..experts).map(|e| (0..chosen.len()).filter(|a| chosen[*a] as usize == e).collect()).collect();
    let order = of.iter().flatten().flat_map(|a| (*a as u32).to_ne_bytes()).collect();
    let mut start = 0;
    let mut starts: Vec<u8> = 0u32.to_ne_bytes().into();
    for expert in &of {
        start += expert.len() as u32;
        starts.extend(start.to_ne_bytes());
    }
    (order, starts, of)
}

/// The products of assignments with the matrices of experts; `orders`: with memory for ordered rows.
pub fn of_experts(
    device: &dyn Device,
    weights: &Matrix,
    (x, bias): (&[f32], &[f32]),
    (chosen, experts, top_k): (&[u32], usize, usize),
    orders: bool,
) -> Vec<f32> {
    let dtype = weights.dtype();
    let (order, starts, _) = grouped(chosen, experts);
    let [x, bias] = [x, bias].map(|numbers| buffer(device, &to_bytes(dtype, numbers)));
    let mut y = buffer(device, &vec![0xff; chosen.len() * weights.n() / experts * dtype.bytes()]);
    // Behind the rows of a step lie those of other steps, and at first anything.
    let mut ordered = buffer(device, &vec![0xff; ordered_bytes(chosen.len(), weights.k(), dtype)]);
    let args = ExpertLinearArgs {
        x: &x,
        assignments: chosen.len(),
        top_k,
        weights,
        bias: Some(&bias),
        y: &mut y,
        order: &buffer(device, &order),
        starts: &buffer(device, &starts),
        experts,
        ordered: orders.then_some(&mut ordered),
    };
    expert_linear(device, args).unwrap();
    from_bytes(dtype, &bytes(device, &y))
}

/// Launches the products of a few experts and rows, with codes and with numbers.
pub fn multiply_all(device: &Arc<dyn Device>) {
    for (i, format) in formats().into_iter().enumerate() {
        // The sanitizers of an ordinary run have no kernels for bf16.
        let dtype = if everything() { HALVES[i / 2 % 2] } else { Dtype::F16 };
        let parts = [weights::Random::new(format, 80, 192, 1)];
        let weights = coded(&**device, dtype, &parts, 192, [Purpose::Product, Purpose::Stack(16)][i % 2]);
        multiply(&**device, &weights, &vec![0.5; [3, 35][i / 2 % 2] * 192], None, dtype, None);
        let chosen: Vec<u32> = (0..[4, 90][i / 2 % 2]).map(|a| a * 7 % 5).collect();
        if i % 2 == 1 {
            of_experts(&**device, &weights, (&vec![0.5; chosen.len() * 192], &[0.5; 80]), (&chosen, 5, 1), i % 4 == 3);
        }
    }
    for (dtype, k) in [(Dtype::F16, 72), (Dtype::F32, 40), (Dtype::F16, 37)] {
        let raw = to_bytes(dtype, &vec![0.5; 5 * 20 * k]);
        let rows = [WeightRows::Numbers(dtype, &raw)];
        let weights = Uploader::new(&**device).unwrap().matrix(None, dtype, [100, k], &rows, Purpose::Stack(20));
        of_experts(&**device, &weights.unwrap(), (&vec![0.5; 3 * k], &[0.5; 100]), (&[0, 3, 3, 1, 4, 3], 5, 2), false);
    }
}

#[test]
fn experts_multiply_their_own_rows_as_if_each_was_alone() {
    for device in devices::gpus(5) {
        multiply_experts(&*device, [192, 136, 320], false);
    }
}

/// Compares experts of so many inputs with float64, and some assignments with the same ones alone.
pub fn multiply_experts(device: &dyn Device, inputs: [usize; 3], orders: bool) {
    let all = formats();
    // More experts than a warp has lanes, most without rows; many rows of one expert; one row.
    let many = if orders { 240 } else { 75 };
    let mixes: [(usize, usize, Vec<u32>); 3] = [
        (70, 2, vec![69, 0, 33, 0, 31, 32, 0, 69]),
        (3, 1, (0..many).map(|a| if a % 9 == 0 { 0 } else { 2 }).collect()),
        (5, 4, vec![4, 2, 1, 0]),
    ];
    for (i, (experts, top_k, chosen)) in mixes.iter().enumerate() {
        for (form, dtype) in
            [(Some(all[1]), Dtype::F16), (Some(all[13]), Dtype::Bf16), (None, Dtype::Bf16), (None, Dtype::F16)]
        {
            let (n, k) = (48, inputs[i]);
            let mut random = Random::new(i as u64 + 3);
            let parts: Vec<_> = match form {
                Some(format) => (0..*experts).map(|e| weights::Random::new(format, n, k, e as u64)).collect(),
                None => Vec::new(),
            };
            let plain = numbers(&mut random, dtype, experts * n * k);
            let w = if form.is_some() { rounded(&parts, k, dtype) } else { plain };
            let raw = to_bytes(dtype, &w);
            let rows = [WeightRows::Numbers(dtype, &raw)];
            let mut uploader = Uploader::new(device).unwrap();
            let weights = match form {
                Some(_) => coded(device, dtype, &parts, k, Purpose::Stack(n)),
                None => uploader.matrix(None, dtype, [experts * n, k], &rows, Purpose::Stack(n)).unwrap(),
            };
            assert_eq!(weights.tiles().is_some(), form.is_some());
            let x = numbers(&mut random, dtype, chosen.len() / top_k * k);
            let bias = numbers(&mut random, dtype, experts * n);
            let y = of_experts(device, &weights, (&x, &bias), (chosen, *experts, *top_k), orders);
            let what = format!("{form:?} in {dtype}, {experts} experts");
            for (assignment, y) in y.chunks(n).enumerate() {
                let (expert, row) = (chosen[assignment] as usize, assignment / top_k);
                let (x, w, bias) = (&x[row * k..][..k], &w[expert * n * k..][..n * k], &bias[expert * n..][..n]);
                check(y, x, w, bias, k, dtype)
                    .unwrap_or_else(|wrong| panic!("{what}, assignment {assignment}: {wrong}"));
                if orders && assignment % 8 != 3 {
                    continue;
                }
                let (one, bias) = ([chosen[assignment]], numbers_of(experts * n, expert * n, bias));
                let alone = of_experts(device, &weights, (x, &bias), (&one, *experts, 1), orders);
                assert!(alone == y, "{what}: assignment {assignment} alone");
            }
        }
    }
}

/// Zeros, with some numbers from index `at` on.
fn numbers_of(count: usize, at: usize, numbers: &[f32]) -> Vec<f32> {
    let mut all = vec![0.0; count];
    all[at..at + numbers.len()].copy_from_slice(numbers);
    all
}
