//! Operations on several residual streams as launches of the kernels in `csrc/streams.cu`.

use attention_kernels::{Dtype, KernelError};
use device::{Arg, Buffer, Device};

use super::kernels::{count, holds, instance, launch};
use super::loaded::MixingLayer;
use super::op::StreamStep;
use super::ops::StreamRows;

device::kernel_structs! {
    /// The struct of the same name in `streams.cu`.
    struct StreamShape: 8 bytes {
        width: u32,
        count: u32,
    }
}

fn pointer(buffer: &Buffer) -> Arg<'_> {
    Arg::pointer(buffer, 0)
}

/// [`LayerOps::streams`](super::ops::LayerOps::streams).
pub(super) fn run(device: &dyn Device, dtype: Dtype, args: StreamRows<'_>) -> Result<(), KernelError> {
    let StreamRows { step, layer, rows, width, count: others_count, stream, others, mixture, branch, scores } = args;
    let streams = others_count + 1;
    holds("elements of a stream", stream, rows * width, dtype.bytes())?;
    holds("elements of the other streams", others, rows * others_count * width, dtype.bytes())?;
    let shape = StreamShape { width: count(width)?, count: count(others_count)? };
    let by_element = [count(rows)?, count(width.div_ceil(256))?, 1];
    match (step, layer) {
        (StreamStep::Rescale, _) => {
            let grid = [count(rows)?, count(others_count)?, 1];
            let args = [pointer(stream), pointer(others), Arg::bytes(&shape)];
            launch(device, instance!("rescale_streams", dtype), grid, 256, &args)
        }
        (StreamStep::Mix(_), Some(MixingLayer { predictions, .. })) => {
            holds("elements of a mixed stream", mixture, rows * width, dtype.bytes())?;
            holds("scores of streams", scores, rows * streams, dtype.bytes())?;
            let buffers: [&Buffer; 5] = [stream, others, mixture, scores, predictions];
            let args: Vec<Arg<'_>> = buffers.into_iter().map(pointer).chain([Arg::bytes(&shape)]).collect();
            launch(device, instance!("mix_streams", dtype), by_element, 256, &args)
        }
        (StreamStep::Correct(_), Some(MixingLayer { corrections, output_scale, .. })) => {
            holds("elements of a mixed stream", mixture, rows * width, dtype.bytes())?;
            holds("elements of a corrected stream", branch, rows * width, dtype.bytes())?;
            holds("scores of streams", scores, rows * streams, dtype.bytes())?;
            let buffers: [&Buffer; 7] = [stream, others, mixture, branch, scores, corrections, output_scale];
            let args: Vec<Arg<'_>> = buffers.into_iter().map(pointer).chain([Arg::bytes(&shape)]).collect();
            launch(device, instance!("correct_streams", dtype), by_element, 256, &args)
        }
        (StreamStep::Add, _) => {
            holds("elements to add to streams", branch, rows * width, dtype.bytes())?;
            let args = [pointer(branch), pointer(others), Arg::bytes(&shape)];
            launch(device, instance!("add_to_streams", dtype), by_element, 256, &args)
        }
        (StreamStep::Mean, _) => {
            let args = [pointer(stream), pointer(others), Arg::bytes(&shape)];
            launch(device, instance!("mean_of_streams", dtype), by_element, 256, &args)
        }
        (StreamStep::Mix(_) | StreamStep::Correct(_), None) => {
            Err(KernelError::NotLoaded { variant: "models", what: "weights of a layer that mixes streams" })
        }
    }
}

/// [`LayerOps::sparsify`](super::ops::LayerOps::sparsify).
pub(super) fn sparsify(
    device: &dyn Device,
    dtype: Dtype,
    x: &mut Buffer,
    (rows, width): (usize, usize),
    deviations: f32,
) -> Result<(), KernelError> {
    holds("gates of a network", x, rows * 2 * width, dtype.bytes())?;
    let args = [Arg::pointer(x, 0), Arg::from(count(width)?), Arg::from(deviations)];
    launch(device, instance!("sparsify", dtype), [count(rows)?, 1, 1], 256, &args)
}
