//! Gathers, norms, gates and the rotary table: kernels whose blocks have a row each.

use attention_kernels::Dtype;
use device::Device;
use models::decoder::Activation;
use models::kernels::{self, NormArgs};

use super::numbers::{Random, from_bytes, to_bytes};
use super::{KERNELS, buffer, bytes, check, floats, numbers_of};

/// Whole vectors and not, less than a thread's share and more than a block's; the odd ones are of reference checkpoints.
pub const WIDTHS: [usize; 10] = [1, 8, 64, 88, 104, 130, 150, 2047, 2048, 2056];
const EPS: f32 = 1e-5;

fn each(run: impl Fn(&dyn Device, Dtype, usize, &mut Random)) {
    for seed in [0, 5] {
        for device in KERNELS.devices(seed) {
            for (dtype, width) in Dtype::ALL.into_iter().flat_map(|dtype| WIDTHS.map(|width| (dtype, width))) {
                run(&*device, dtype, width, &mut Random::new(width as u64 + seed));
            }
        }
    }
}

#[test]
fn gathered_rows_are_exact_copies() {
    each(|device, dtype, width, random| {
        let (source, _) = numbers_of(random, dtype, 9 * width);
        let indices = [3u32, 8, 0, 3, 7];
        let index_bytes: Vec<u8> = indices.iter().flat_map(|i| i.to_le_bytes()).collect();
        let mut target = buffer(device, &vec![0x55; 6 * width * dtype.bytes()]);
        let (from, which) = (buffer(device, &source), buffer(device, &index_bytes));
        kernels::gather_rows(device, dtype, &from, &which, 1.0, &mut target, (5, width)).unwrap();
        let row = width * dtype.bytes();
        let mut want: Vec<u8> = indices.iter().flat_map(|&i| source[i as usize * row..][..row].to_vec()).collect();
        want.resize(6 * row, 0x55);
        assert!(bytes(device, &target) == want, "{dtype}, width {width}");
    });
}

#[test]
fn norms_match_float64_alone_and_after_a_sum_and_in_groups() {
    each(|device, dtype, width, random| {
        for (centre, biased, scale) in [(false, false, 1.0), (true, true, 1.0), (true, false, 0.45), (false, true, 2.0)]
        {
            let rows = 3;
            let (x, x_exact) = numbers_of(random, dtype, rows * width);
            let (added, added_exact) = numbers_of(random, dtype, rows * width);
            let weight: Vec<f32> = (0..width).map(|_| random.unit() + 1.5).collect();
            let bias: Vec<f32> = (0..width).map(|_| if biased { random.unit() } else { 0.0 }).collect();
            let (weights, biases) = (floats(device, &weight), floats(device, &bias));
            let args = |rows: usize| NormArgs {
                weight: &weights,
                bias: biased.then_some(&biases),
                eps: EPS,
                centre,
                rows,
                width,
            };
            let truth = |x: &[f64]| -> Vec<(f64, f64)> {
                let row = |row: &[f64]| {
                    let mean = if centre { row.iter().sum::<f64>() / width as f64 } else { 0.0 };
                    let squares = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / width as f64;
                    let factor = 1.0 / (squares + f64::from(EPS)).sqrt();
                    let terms = row.iter().zip(&weight).zip(&bias);
                    // The mean keeps the error of a sum of the row's magnitudes.
                    let size = row.iter().map(|x| x.abs()).sum::<f64>() / width as f64;
                    let normed = terms.map(|((x, w), b)| {
                        let (w, b) = (f64::from(*w), f64::from(*b));
                        let slack = if centre { (x.abs() + size) * factor * w.abs() } else { 0.0 };
                        ((x - mean) * factor * w + b, ((x - mean) * factor * w).abs() + b.abs() + slack)
                    });
                    normed.collect::<Vec<_>>()
                };
                x.chunks(width).flat_map(row).collect()
            };
            let what = format!("{dtype}, width {width}, centre {centre}, bias {biased}");
            let plain = |x: &[u8], rows: usize| {
                let mut target = buffer(device, &vec![0x55; rows * width * dtype.bytes()]);
                kernels::norm(device, dtype, &buffer(device, x), &mut target, 1, args(rows)).unwrap();
                bytes(device, &target)
            };
            let whole = plain(&x, rows);
            check(&what, dtype, &whole, truth(&x_exact));
            let row = width * dtype.bytes();
            assert!(plain(&x[row..2 * row], 1) == whole[row..2 * row], "{what}: a row alone has other bits");
            // The same three groups as one row of a buffer with a margin.
            let margin = 8 * dtype.bytes();
            let mut grouped = buffer(device, &[&vec![0x55; margin][..], &x, &vec![0x55; margin]].concat());
            kernels::norm_groups(device, dtype, &mut grouped, (8, rows, rows * width), args(1)).unwrap();
            let grouped = bytes(device, &grouped);
            assert!(grouped[margin..margin + whole.len()] == whole, "{what}: groups have other bits");
            assert!(grouped[..margin].iter().chain(&grouped[margin + whole.len()..]).all(|byte| *byte == 0x55));

            let (mut sum, mut target) = (buffer(device, &x), buffer(device, &added));
            kernels::fused_add_norm(device, dtype, &mut sum, &mut target, scale, args(rows)).unwrap();
            let scaled: Vec<f32> = added_exact.iter().map(|b| *b as f32 * scale).collect();
            let scaled = from_bytes(dtype, &to_bytes(dtype, &scaled));
            let exact = x_exact.iter().zip(&scaled).map(|(a, b)| *a as f32 + b);
            let want = to_bytes(dtype, &exact.collect::<Vec<_>>());
            assert!(bytes(device, &sum) == want, "{what}: each step of the sum is rounded once");
            let mut alone = buffer(device, &x);
            kernels::add(device, dtype, &mut alone, &buffer(device, &added), scale, (rows, width)).unwrap();
            assert!(bytes(device, &alone) == want, "{what}: the sum alone");
            let rounded: Vec<f64> = from_bytes(dtype, &want).into_iter().map(f64::from).collect();
            check(&format!("{what} behind a sum"), dtype, &bytes(device, &target), truth(&rounded));
        }
    });
}

#[test]
fn activations_match_float64() {
    const ALL: [Activation; 7] = [
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::Relu,
        Activation::Relu2,
        Activation::ClampedSwiglu { limit: 0.5 },
        Activation::Xielu { positive: 0.8, negative: 1.2, beta: 0.5, eps: -1e-6 },
    ];
    each(|device, dtype, width, random| {
        let rows = 2;
        let (gate_up, exact) = numbers_of(random, dtype, rows * 2 * width);
        for (activation, gated) in ALL.into_iter().flat_map(|activation| [(activation, true), (activation, false)]) {
            if matches!(activation, Activation::ClampedSwiglu { .. }) && !gated {
                continue;
            }
            // Without a gate, the same numbers are twice as many rows.
            let (rows, stride) = if gated { (rows, 2 * width) } else { (2 * rows, width) };
            let mut target = buffer(device, &vec![0x55; (rows * width + 8) * dtype.bytes()]);
            let gates = buffer(device, &gate_up);
            // The same rows, each behind an element that nobody reads.
            let shifted = gate_up.chunks(stride * dtype.bytes()).flat_map(|row| [&row[..dtype.bytes()], row].concat());
            let shifted = buffer(device, &shifted.collect::<Vec<_>>());
            let ups = [(&gates, stride, width), (&shifted, stride + 1, width + 1)];
            let [first, second] = ups.map(|up| {
                let (gate, up, size) = ((&gates, stride), gated.then_some(up), (rows, width));
                kernels::activate(device, dtype, activation, gate, up, &mut target, size).unwrap();
                bytes(device, &target)
            });
            assert!(first == second, "{dtype}, width {width}, {activation:?}: where the rows lie changes bits");
            let got = first;
            let (got, behind) = got.split_at(rows * width * dtype.bytes());
            assert!(behind.iter().all(|byte| *byte == 0x55), "{dtype}, width {width}: wrote past its rows");
            let truth = exact.chunks(stride).flat_map(|row| {
                let (gate, up) = row.split_at(width);
                let up = |i: usize| if gated { up[i] } else { 1.0 };
                gate.iter().enumerate().map(|(i, x)| activated(activation, *x, up(i))).collect::<Vec<_>>()
            });
            check(&format!("{dtype}, width {width}, {activation:?}"), dtype, got, truth);
        }
    });
}

#[test]
fn scaled_rows_match_float64() {
    each(|device, dtype, width, random| {
        let (numbers, exact) = numbers_of(random, dtype, 3 * width);
        let mut x = buffer(device, &numbers);
        kernels::scale(device, dtype, &mut x, -0.3, (2, width)).unwrap();
        let factor = |i: usize| if i < 2 * width { f64::from(-0.3f32) } else { 1.0 };
        let want = exact.iter().enumerate().map(|(i, x)| (x * factor(i), x.abs()));
        check(&format!("{dtype}, width {width}"), dtype, &bytes(device, &x), want);
    });
}

/// The activation of a number, and the size of the terms that it is computed from.
fn activated(activation: Activation, x: f64, up: f64) -> (f64, f64) {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let of = |y: f64| (y, y.abs());
    match activation {
        Activation::Silu => of(x * sigmoid(x) * up),
        // The terms are 1 and erf or tanh: where that is near −1 their sum keeps the error of each.
        Activation::Gelu => {
            let erf = erf(x / 2f64.sqrt());
            (0.5 * x * (1.0 + erf) * up, (0.5 * x * up).abs() * (1.0 + erf.abs()))
        }
        Activation::GeluTanh => {
            let inner = 0.797_884_560_802_865_4 * (x + 0.044715 * x * x * x);
            (0.5 * x * (1.0 + inner.tanh()) * up, (0.5 * x * up).abs() * (1.0 + inner.tanh().abs()))
        }
        Activation::Relu => of(x.max(0.0) * up),
        Activation::Relu2 => of(x.max(0.0) * x.max(0.0) * up),
        Activation::ClampedSwiglu { limit } => {
            let limit = f64::from(limit);
            let (gate, up) = (x.min(limit), up.clamp(-limit, limit));
            ((up + 1.0) * gate * sigmoid(1.702 * gate), ((up.abs() + 1.0) * gate * sigmoid(1.702 * gate)).abs())
        }
        Activation::Xielu { positive, negative, beta, eps } => {
            let [positive, negative, beta, eps] = [positive, negative, beta, eps].map(f64::from);
            let curve = if x > 0.0 { positive * x * x } else { negative * (x.min(eps).exp_m1() - x) };
            ((curve + beta * x) * up, (curve.abs() + (beta * x).abs() + (negative * x).abs()) * up.abs())
        }
    }
}

/// The error function by its Taylor series, exact for the small numbers here.
fn erf(x: f64) -> f64 {
    let mut term = x;
    let mut sum = x;
    for n in 1..60 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

#[test]
fn the_rotary_table_is_accurate_for_large_positions_too() {
    for device in KERNELS.devices(3) {
        has_cosines_and_sines(&*device);
    }
}

fn has_cosines_and_sines(device: &dyn Device) {
    let positions = [0u32, 1, 511, 4097, 131_071, 1_000_000];
    let position_bytes: Vec<u8> = positions.iter().flat_map(|p| p.to_le_bytes()).collect();
    for half in [1, 10, 16, 64, 128, 200] {
        let frequencies: Vec<f32> = (0..half).map(|i| 10_000f32.powf(-(i as f32) / half as f32)).collect();
        let mut table = device.alloc(positions.len() * 2 * half * 4).unwrap();
        let (p, f) = (buffer(device, &position_bytes), floats(device, &frequencies));
        kernels::rope_table(device, &p, &f, 1.0, &mut table, (positions.len(), half)).unwrap();
        // The angle is a float32, as checkpoints were trained with.
        let angles = |p: &u32| frequencies.iter().map(|f| f64::from(*p as f32 * f)).collect::<Vec<_>>();
        let row = |p: &u32| {
            let angles = angles(p);
            let both = angles.iter().map(|a| a.cos()).chain(angles.iter().map(|a| a.sin()));
            both.map(|value| (value, 1.0)).collect::<Vec<_>>()
        };
        let truth = positions.iter().flat_map(row);
        check(&format!("half {half}"), Dtype::F32, &bytes(device, &table), truth);
    }
}

#[test]
fn a_buffer_that_is_too_small_is_refused_before_anything_runs() {
    let Some(device) = KERNELS.one(0) else { return };
    let small = device.alloc(4 * 7).unwrap();
    let mut target = device.alloc(4 * 8).unwrap();
    let weight = floats(&*device, &[1.0; 8]);
    let args = NormArgs { weight: &weight, bias: None, eps: EPS, centre: false, rows: 1, width: 8 };
    let error = kernels::norm(&*device, Dtype::F32, &small, &mut target, 1, args).unwrap_err();
    assert_eq!(error.to_string(), "elements in the rows of a norm: found 7, expected 8");
}
