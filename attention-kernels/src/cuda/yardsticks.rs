//! Launches that do one thing and nothing else: what a GPU can do at best.

use device::{Arg, Buffer, Device, DeviceError, Launch};

use super::names::MODULE;

/// Threads of a block of both.
const THREADS: u32 = 256;

/// Reads all whole 16-byte vectors of `source`; each word of `sums` (u32), which a thread block leaves, becomes the xor of a
/// share's words.
///
/// # Errors
/// Those of a launch.
pub(crate) fn read_memory(device: &dyn Device, source: &Buffer, sums: &mut Buffer) -> Result<(), DeviceError> {
    let blocks = sums.len_bytes() / size_of::<u32>();
    let args = [Arg::pointer(source, 0), Arg::pointer(sums, 0), ((source.len_bytes() / 16) as i64).into()];
    launch(device, "read_memory", blocks, &args)
}

/// Threads that leave a number each in [`multiply_tiles`]; its numbers are a multiple of so many.
pub(crate) const TILE_THREADS: usize = THREADS as usize;
/// Multiplications and additions of one thread in one step: a 32nd of 8 products of 16x16 and 16x8.
pub(crate) const TILE_OPERATIONS: usize = 8 * 2 * 16 * 16 * 8 / 32;

/// Multiplies tiles of bf16 into f32 on the tensor cores, `steps` times the same ones. All elements of the first factor are x,
/// of the second y; a word of `factors` is two of them. Each float of `sums` becomes what one thread has summed:
/// `32 * 16 * steps * x * y`.
///
/// # Errors
/// Those of a launch.
pub(crate) fn multiply_tiles(
    device: &dyn Device,
    factors: [u32; 2],
    steps: u32,
    sums: &mut Buffer,
) -> Result<(), DeviceError> {
    let blocks = sums.len_bytes() / (TILE_THREADS * size_of::<f32>());
    let args = [Arg::pointer(sums, 0), factors[0].into(), factors[1].into(), steps.into()];
    launch(device, "multiply_tiles", blocks, &args)
}

fn launch(device: &dyn Device, kernel: &str, blocks: usize, args: &[Arg<'_>]) -> Result<(), DeviceError> {
    let (grid, block) = ([blocks as u32, 1, 1], [THREADS, 1, 1]);
    device.launch(&Launch { module: MODULE, kernel, grid, block, shared_bytes: 0, args })
}
