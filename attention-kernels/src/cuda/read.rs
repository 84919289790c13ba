//! The launch that reads memory and does nothing else: what a GPU can do at best.

use device::{Arg, Buffer, Device, DeviceError, Launch};

use super::MODULE;

/// Thread blocks of a launch: several to every processor of the largest GPU.
pub(crate) const READERS: usize = 2048;

/// Reads all whole 16-byte vectors of `source`; each word of `sums` (`[READERS]` u32) becomes the xor of a share's words.
///
/// # Errors
/// A buffer of sums that is too small, and those of a launch.
pub(crate) fn read_memory(device: &dyn Device, source: &Buffer, sums: &mut Buffer) -> Result<(), DeviceError> {
    let needed = READERS * size_of::<u32>();
    if sums.len_bytes() < needed {
        return Err(DeviceError::Outside { at: 0, bytes: needed, len: sums.len_bytes() });
    }
    let args = [Arg::pointer(source, 0), Arg::pointer(sums, 0), ((source.len_bytes() / 16) as i64).into()];
    let (grid, block) = ([READERS as u32, 1, 1], [256, 1, 1]);
    device.launch(&Launch { module: MODULE, kernel: "read_memory", grid, block, shared_bytes: 0, args: &args })
}
