//! Launches of the layer kernels under the sanitizers.

use attention_kernels::Dtype;
use device::{Arg, Device, Launch};
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
                kernels::norm(device, dtype, &wide, &mut b, 1, args).unwrap();
                kernels::fused_add_norm(device, dtype, &mut a, &mut b, 0.5, args).unwrap();
            }
            let up = Some((&wide, 2 * width, width));
            kernels::activate(device, dtype, Activation::Silu, (&wide, 2 * width), up, &mut a, (2, width)).unwrap();
            kernels::scale(device, dtype, &mut a, 0.5, (2, width)).unwrap();
            kernels::add_gathered_rows(device, dtype, &wide, (&indices, 1), &mut a, (2, width)).unwrap();
            kernels::add(device, dtype, &mut a, &b, 0.5, (2, width)).unwrap();
            kernels::gate(device, dtype, &mut a, (&wide, 2 * width), (2, width)).unwrap();
            kernels::clamp(device, dtype, &mut b, 0.5, (2, width, 2 * width)).unwrap();
        }
    }
    super::experts::orders(device, 600, 4);
    kernels::finish_logits(device, &mut floats(device, &[1.0; 300]), 300, 0.5, Some(2.0)).unwrap();
    let (positions, frequencies) = (buffer(device, &[7, 0, 0, 0]), floats(device, &[1.0, 0.5]));
    let mut table = device.alloc(16).unwrap();
    kernels::rope_table(device, &positions, &frequencies, 1.0, &mut table, (1, 2)).unwrap();
    for (i, look) in heads::looks(2).iter().enumerate().step_by(step) {
        heads::conforms(device, i as u64, look);
    }
}

/// What the names of kernels begin with.
const ALL: [&str; 15] = [
    "gather_rows",
    "add_gathered_rows",
    "add_",
    "rms_norm",
    "layer_norm",
    "fused_add_rms_norm",
    "fused_add_layer_norm",
    "activate",
    "gate_",
    "clamp",
    "scale",
    "finish_logits",
    "group_by_expert",
    "rope_table",
    "qk_norm_rope_cache",
];

fn assert_clean(sanitizer: Instrument, step: usize) {
    let (step, seeds) = if everything() { (1, &[0, 1, 77][..]) } else { (step, &[1][..]) };
    KERNELS.are_clean(sanitizer, seeds, &ALL, |device| record(&*device, step));
}

#[test]
fn the_memory_sanitizers_find_a_layer_kernel_that_writes_beyond_its_buffer() {
    let Some(device) = KERNELS.sim(1) else { return };
    let x = floats(&*device, &[1.0; 64]);
    let args = [Arg::pointer(&x, 0), Arg::from(72_u32), Arg::from(0.5_f32)];
    let launch = Launch {
        module: "models",
        kernel: "scale_f32",
        grid: [1; 3],
        block: [256, 1, 1],
        shared_bytes: 0,
        args: &args,
    };
    let Some(said) = KERNELS.finds(Instrument::Memory, &launch) else { return };
    assert!(said.contains("heap-buffer-overflow") && said.contains("activation.cu"), "{said}");
}

#[test]
fn the_memory_sanitizers_find_nothing_in_the_layer_kernels() {
    assert_clean(Instrument::Memory, 3);
}

#[test]
#[ignore = "only in a step of its own: cargo xtask ci runs it"]
fn the_thread_sanitizer_finds_nothing_in_the_layer_kernels() {
    assert_clean(Instrument::Thread, 3);
}
