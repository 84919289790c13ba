//! The layer kernels against float64, on every device of this machine that runs them: odd widths, every type, every kind of cache; what is not theirs keeps its bytes; a row's
//! bits do not depend on the other rows. Then their launches under three sanitizers.
//!
//! `QUIRE_TEST_ALL=1` combines the settings by threes instead of pairwise and replays under more seeds. Numbers and covering
//! arrays are those of `attention-kernels`' conformance table.

mod experts;
mod heads;
mod rows;
mod sanitizers;

use crate::support::Kernels;
use attention_kernels::Dtype;
use device::{Buffer, Device};
use testkit::everything;
use trial::numbers::{self, Random, from_bytes, to_bytes, ulp};

static KERNELS: Kernels = Kernels::of("models");

/// The one place for tolerances: how far a result may be from the float64 one, where its terms are as large as `magnitude`.
/// Rounding the result costs half an ulp of its type; functions and sums in float32 a few ulps of its own.
fn tolerance(dtype: Dtype, magnitude: f64) -> f64 {
    let sums = 16.0 * ulp(Dtype::F32, magnitude);
    if dtype == Dtype::F32 { sums } else { 0.5 * ulp(dtype, magnitude) + sums }
}

/// A buffer of those bytes.
fn buffer(device: &dyn Device, bytes: &[u8]) -> Buffer {
    let mut buffer = device.alloc(bytes.len()).unwrap();
    device.upload(&mut buffer, 0, bytes).unwrap();
    buffer
}

fn bytes(device: &dyn Device, buffer: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len_bytes()];
    device.download(buffer, 0, &mut bytes).unwrap();
    bytes
}

fn floats(device: &dyn Device, values: &[f32]) -> Buffer {
    buffer(device, &to_bytes(Dtype::F32, values))
}

/// Numbers of a type, each with its nearest double.
fn numbers_of(random: &mut Random, dtype: Dtype, count: usize) -> (Vec<u8>, Vec<f64>) {
    let values: Vec<f32> = (0..count).map(|_| random.unit() * 4.0).collect();
    let bytes = to_bytes(dtype, &values);
    let exact = from_bytes(dtype, &bytes).into_iter().map(f64::from).collect();
    (bytes, exact)
}

/// Fails, with `what`, where something is further from the truth than it may be.
fn check(what: &str, dtype: Dtype, got: &[u8], truth: impl IntoIterator<Item = (f64, f64)>) {
    let got = from_bytes(dtype, got);
    let mut seen = 0;
    for (i, (got, (want, magnitude))) in got.iter().zip(truth).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(error <= tolerance(dtype, magnitude), "{what}, element {i}: {got}, expected {want}, error {error:e}");
        seen += 1;
    }
    assert_eq!(seen, got.len(), "{what}");
}
