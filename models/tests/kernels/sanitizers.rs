//! Launches of the layer kernels under the sanitizers.

use attention_kernels::Dtype;
use device::Device;
use models::decoder::Activation;
use models::kernels::{self, NormArgs};
use testkit::kernels::host::Instrument;

use super::numbers::Random;
use super::rows::WIDTHS;
use super::{KERNELS, buffer, everything, floats, heads, numbers_of};

fn record(device: &dyn Device, step: usize) {
    for dtype in Dtype::ALL {
        for width in WIDTHS.into_iter().step_by(step) {
            let mut random = Random::new(width as u64);
            let mut rows = || buffer(device, &numbers_of(&mut random, dtype, 2 * 2 * width).0);
            let (mut a, mut b, wide) = (rows(), rows(), rows());
            let (weight, indices) = (floats(device, &vec![1.0; width]), buffer(device, &[1, 0, 0, 0, 0, 0, 0, 0]));
            kernels::gather_rows(device, dtype, &wide, &indices, 1.0, &mut a, (2, width)).unwrap();
            for centre in [false, true] {
                let args = NormArgs { weight: &weight, bias: Some(&weight), eps: 1e-5, centre, rows: 2, width };
                kernels::norm(device, dtype, &wide, &mut b, args).unwrap();
                kernels::fused_add_norm(device, dtype, &mut a, &mut b, 0.5, args).unwrap();
            }
            let up = Some((&wide, 2 * width, width));
            kernels::activate(device, dtype, Activation::Silu, (&wide, 2 * width), up, &mut a, (2, width)).unwrap();
            kernels::scale(device, dtype, &mut a, 0.5, (2, width)).unwrap();
        }
    }
    super::experts::orders(device, 600, 4);
    let (positions, frequencies) = (buffer(device, &[7, 0, 0, 0]), floats(device, &[1.0, 0.5]));
    let mut table = device.alloc(16).unwrap();
    kernels::rope_table(device, &positions, &frequencies, 1.0, &mut table, (1, 2)).unwrap();
    for (i, look) in heads::looks(2).iter().enumerate().step_by(step) {
        heads::conforms(device, i as u64, look);
    }
}

fn is_content(sanitizer: Instrument, step: usize) {
    let (step, seeds) = if everything() { (1, &[0, 1, 77][..]) } else { (step, &[1][..]) };
    // `under` has reported why there are none.
    let Some(launches) = KERNELS.under(sanitizer, seeds, |device| record(&*device, step)) else { return };
    assert!(!launches.is_empty());
}

#[test]
fn the_memory_sanitizers_find_nothing_in_the_layer_kernels() {
    is_content(Instrument::Memory, 3);
}

#[test]
#[ignore = "only in a step of its own: cargo xtask ci runs it"]
fn the_thread_sanitizer_finds_nothing_in_the_layer_kernels() {
    is_content(Instrument::Thread, 3);
}
