//! The launch that measures the memory bandwidth of a GPU.

use device::{Arg, Buffer, Device, DeviceError, Launch};

use super::names::MODULE;

/// Threads per block.
const THREADS: u32 = 256;

/// Reads all whole 16-byte vectors of `source`. One thread block writes each word of `sums` (u32): the xor of the words that it
/// has read.
///
/// # Errors
/// The launch fails.
pub fn read_memory(device: &dyn Device, source: &Buffer, sums: &mut Buffer) -> Result<(), DeviceError> {
    let blocks = sums.len_bytes() / size_of::<u32>();
    let args = [Arg::pointer(source, 0), Arg::pointer(sums, 0), ((source.len_bytes() / 16) as i64).into()];
    let (grid, block) = ([blocks as u32, 1, 1], [THREADS, 1, 1]);
    device.launch(&Launch { module: MODULE, kernel: "read_memory", grid, block, shared_bytes: 0, args: &args })
}
