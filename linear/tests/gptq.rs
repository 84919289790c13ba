//! GPTQ: rounding that makes up for the errors of earlier inputs.

use device::Dtype;
use linear::gptq::{IntegerForm, Inverse};
use simd::Pool;

#[test]
fn outputs_of_correlated_inputs_change_less_than_by_rounding() {
    let (n, k, count) = (16, 64, 200);
    let mut state = 7u64;
    let mut draw = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let common: Vec<f32> = (0..count).map(|_| draw()).collect();
    let x: Vec<f32> = (0..count * k).map(|at| 0.3 * draw() + common[at / k] * (1.0 + (at % 3) as f32)).collect();
    let w: Vec<f32> = (0..n * k).map(|_| draw()).collect();
    let h: Vec<f32> = (0..k * k).map(|at| (0..count).map(|r| x[r * k + at / k] * x[r * k + at % k]).sum()).collect();
    let form = IntegerForm { bits: 4, group: 32, scale: Dtype::F16 };
    let pool = Pool::new(Some(2)).unwrap();
    let error = |rounded: &[f32]| -> f64 {
        let output = |row: usize, r: usize| -> f64 {
            (0..k).map(|i| f64::from(rounded[row * k + i] - w[row * k + i]) * f64::from(x[r * k + i])).sum()
        };
        (0..n * count).map(|at| output(at / count, at % count).powi(2)).sum()
    };
    let (mut nearest, mut scales) = (w.clone(), vec![0.0; n * k / 32]);
    nearest.chunks_mut(k).zip(scales.chunks_mut(k / 32)).for_each(|(row, scales)| form.nearest(row, scales));
    let mut rounded = w.clone();
    Inverse::new(&h, k).unwrap().round(&pool, form, &mut rounded, &mut scales);
    assert!(error(&rounded) < 0.5 * error(&nearest), "{} {}", error(&rounded), error(&nearest));
    for (row, scales) in rounded.chunks(k).zip(scales.chunks(k / 32)) {
        let is_code = |(i, w): (usize, &f32)| *w == scales[i / 32] * form.integer(*w, scales[i / 32]);
        assert!(row.iter().enumerate().all(is_code));
    }
    assert!(Inverse::new(&vec![f32::NAN; k * k], k).is_none());
    assert!(Inverse::new(&vec![0.0; k * k], k).is_some(), "inputs that are always zero");
}
