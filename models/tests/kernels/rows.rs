//! Gathers, norms, gates and the rotary table: kernels whose blocks have a row each.

use attention_kernels::Dtype;
use device::Device;
use models::decoder::Activation;
use models::kernels;

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
        kernels::gather_rows(device, dtype, &from, &which, &mut target, (5, width)).unwrap();
        let row = width * dtype.bytes();
        let mut want: Vec<u8> = indices.iter().flat_map(|&i| source[i as usize * row..][..row].to_vec()).collect();
        want.resize(6 * row, 0x55);
        assert!(bytes(device, &target) == want, "{dtype}, width {width}");
    });
}

#[test]
fn norms_match_float64_alone_and_after_a_sum() {
    each(|device, dtype, width, random| {
        let rows = 3;
        let (x, x_exact) = numbers_of(random, dtype, rows * width);
        let (added, added_exact) = numbers_of(random, dtype, rows * width);
        let weight: Vec<f32> = (0..width).map(|_| random.unit() + 1.5).collect();
        let weights = floats(device, &weight);
        let truth = |x: &[f64]| -> Vec<(f64, f64)> {
            let row = |row: &[f64]| {
                let mean = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
                let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
                let normed = row.iter().zip(&weight).map(|(x, w)| x * factor * f64::from(*w));
                normed.map(|y| (y, y.abs())).collect::<Vec<_>>()
            };
            x.chunks(width).flat_map(row).collect()
        };
        let what = format!("{dtype}, width {width}");
        let plain = |x: &[u8], rows: usize| {
            let mut target = buffer(device, &vec![0x55; rows * width * dtype.bytes()]);
            kernels::rms_norm(device, dtype, &buffer(device, x), &mut target, &weights, EPS, (rows, width)).unwrap();
            bytes(device, &target)
        };
        let whole = plain(&x, rows);
        check(&what, dtype, &whole, truth(&x_exact));
        let row = width * dtype.bytes();
        assert!(plain(&x[row..2 * row], 1) == whole[row..2 * row], "{what}: a row alone has other bits");

        let (mut sum, mut target) = (buffer(device, &x), buffer(device, &added));
        kernels::fused_add_rms_norm(device, dtype, &mut sum, &mut target, &weights, EPS, (rows, width)).unwrap();
        let exact = x_exact.iter().zip(&added_exact).map(|(a, b)| (*a as f32) + (*b as f32));
        let want = to_bytes(dtype, &exact.collect::<Vec<_>>());
        assert!(bytes(device, &sum) == want, "{what}: the sum is rounded once");
        let rounded: Vec<f64> = from_bytes(dtype, &want).into_iter().map(f64::from).collect();
        check(&format!("{what} behind a sum"), dtype, &bytes(device, &target), truth(&rounded));
    });
}

#[test]
fn gated_activations_match_float64() {
    each(|device, dtype, width, random| {
        let rows = 2;
        let (gate_up, exact) = numbers_of(random, dtype, rows * 2 * width);
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let mut target = buffer(device, &vec![0x55; (rows * width + 8) * dtype.bytes()]);
            let gates = buffer(device, &gate_up);
            kernels::act_and_mul(device, dtype, activation, &gates, &mut target, (rows, width)).unwrap();
            let got = bytes(device, &target);
            let (got, behind) = got.split_at(rows * width * dtype.bytes());
            assert!(behind.iter().all(|byte| *byte == 0x55), "{dtype}, width {width}: wrote past its rows");
            let truth = exact.chunks(2 * width).flat_map(|row| {
                let (gate, up) = row.split_at(width);
                let pair = |(x, up): (&f64, &f64)| match activation {
                    Activation::Silu => (x / (1.0 + (-x).exp()) * up, (x / (1.0 + (-x).exp()) * up).abs()),
                    Activation::GeluTanh => {
                        let inner = 0.797_884_560_802_865_4 * (x + 0.044715 * x * x * x);
                        // The terms are 1 and tanh: where that is near −1 their sum keeps the error of each.
                        (0.5 * x * (1.0 + inner.tanh()) * up, (0.5 * x * up).abs() * (1.0 + inner.tanh().abs()))
                    }
                };
                gate.iter().zip(up).map(pair).collect::<Vec<_>>()
            });
            check(&format!("{dtype}, width {width}, {activation:?}"), dtype, got, truth);
        }
    });
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
        kernels::rope_table(device, &p, &f, &mut table, (positions.len(), half)).unwrap();
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
    let Some(device) = KERNELS.sim(0) else { return };
    let small = device.alloc(4 * 7).unwrap();
    let mut target = device.alloc(4 * 8).unwrap();
    let weight = floats(&*device, &[1.0; 8]);
    let error = kernels::rms_norm(&*device, Dtype::F32, &small, &mut target, &weight, EPS, (1, 8)).unwrap_err();
    assert_eq!(error.to_string(), "elements in the input of a norm: found 7, expected 8");
}
