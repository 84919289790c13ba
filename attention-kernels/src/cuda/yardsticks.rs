//! Launches that measure the memory bandwidth and the tensor cores of a GPU.

use device::{Arg, Buffer, Device, DeviceError, Launch};

use super::names::MODULE;

/// Threads per block of both kernels.
const THREADS: u32 = 256;

/// Reads all whole 16-byte vectors of `source`. One thread block writes each word of `sums` (u32): the xor of the words that it
/// has read.
///
/// # Errors
/// The launch fails.
pub fn read_memory(device: &dyn Device, source: &Buffer, sums: &mut Buffer) -> Result<(), DeviceError> {
    let blocks = sums.len_bytes() / size_of::<u32>();
    let args = [Arg::pointer(source, 0), Arg::pointer(sums, 0), ((source.len_bytes() / 16) as i64).into()];
    launch(device, "read_memory", blocks, &args)
}

/// Threads per block of [`multiply_tiles`]. Each writes one number, so the size of `sums` is a multiple of this.
pub const TILE_THREADS: usize = THREADS as usize;
/// Multiplications and additions of one thread in one step: its 32nd of 8 products of 16×16 and 16×8.
pub(crate) const TILE_OPERATIONS: usize = 8 * 2 * 16 * 16 * 8 / 32;

/// Multiplies tiles of bf16 into f32 on the tensor cores, the same tiles `steps` times. All elements of the first factor are x,
/// all of the second y; each word of `factors` contains two of them. Each thread writes one float of `sums`:
/// `32 * 16 * steps * x * y`.
///
/// # Errors
/// The launch fails.
pub fn multiply_tiles(
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
