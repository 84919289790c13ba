//! Cache writes and block copies, a row of `head_dim` elements at a time. Memory-bound: vectors would gain nothing.

use device::Device;

use super::expect_default;
use crate::args::{BlockCopyArgs, CacheWriteArgs, KernelError};

pub(super) fn cache_write(_: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    expect_default(args.cache)?;
    let shape = args.cache.shape;
    let dim = shape.head_dim;
    let source = args.source.host::<f32>()?;
    for (offset, buffer) in [(args.key_offset, &mut args.cache.keys), (args.value_offset, &mut args.cache.values)] {
        let cache = buffer.host_mut::<f32>()?;
        for (row, &slot) in args.slot_mapping.iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else { continue };
            for head in 0..shape.num_kv_heads {
                let from = offset + row * args.stride + head * dim;
                cache[shape.offset(slot, head)..][..dim].copy_from_slice(&source[from..from + dim]);
            }
        }
    }
    Ok(())
}

pub(super) fn block_copy(_: &dyn Device, args: BlockCopyArgs<'_>) -> Result<(), KernelError> {
    args.check()?;
    expect_default(args.cache)?;
    let elements = args.cache.shape.block_elements();
    for buffer in [&mut args.cache.keys, &mut args.cache.values] {
        let cache = buffer.host_mut::<f32>()?;
        for &(source, destination) in args.copies {
            let from = source as usize * elements;
            cache.copy_within(from..from + elements, destination as usize * elements);
        }
    }
    Ok(())
}
