//! Blocks of caches in page-locked host memory, for sequences that are swapped out.
//!
//! No kernel is involved: the device copies blocks on [`Queue::Copy`], as vLLM's `swap_blocks` does. Blocks that are
//! contiguous on both sides are copied together. The host waits for nothing, and the copies overlap with launches: the
//! caller makes them wait for earlier work, and later work wait for the returned event.
//!
//! ```text
//! Compute  -- launch that writes the blocks -- e -- other launches -- wait for the event -- launches that need the blocks
//!                                               \                   /
//! Copy     ---------------------------- wait for e -- copy, copy, event
//! ```

use device::profile::{self, Cost};
use device::{Device, DeviceError, Event, Pinned, Queue};

use crate::args::KvCache;
use crate::error::{KernelError, check_ids, expect};

/// Space for swapped blocks of all layers: keys and values of each block as they are stored in the caches. Scales stay with
/// the cache.
///
/// ```
/// use attention_kernels::{KvCache, KvShape, SwapSpace};
/// use device::Queue;
/// let device = device::open("cpu", Some(1))?;
/// let shape = KvShape { num_blocks: 4, num_kv_heads: 2, block_size: 16, head_dim: 64 };
/// let mut caches = vec![KvCache::new(&*device, shape)?, KvCache::new(&*device, shape)?]; // two layers
/// let mut space = SwapSpace::new(&*device, &caches, 2)?;
/// space.swap_out(&*device, &caches, &[(3, 0), (1, 1)])?; // blocks 3 and 1 may be overwritten after this event
/// let back = space.swap_in(&*device, &mut caches, &[(0, 2)])?; // what was block 3 becomes block 2
/// device.wait(Queue::Compute, &back)?; // later launches see the block
/// # Ok::<(), attention_kernels::KernelError>(())
/// ```
pub struct SwapSpace {
    num_blocks: usize,
    layers: Vec<Layer>,
}

/// Blocks of one layer.
struct Layer {
    /// Like [`KvCache::buffers`], `[num_blocks, block_bytes]` each.
    pages: Vec<Pinned>,
    block_bytes: usize,
}

impl SwapSpace {
    /// Allocates space for `num_blocks` blocks of each of these layers.
    ///
    /// # Errors
    /// The host has not enough memory that can be page-locked.
    pub fn new(device: &dyn Device, caches: &[KvCache], num_blocks: usize) -> Result<SwapSpace, DeviceError> {
        let layer = |cache: &KvCache| -> Result<Layer, DeviceError> {
            let block_bytes = cache.block_bytes();
            let pinned = |_| device.pinned(num_blocks.saturating_mul(block_bytes));
            Ok(Layer { pages: cache.buffers().map(pinned).collect::<Result<_, _>>()?, block_bytes })
        };
        Ok(SwapSpace { num_blocks, layers: caches.iter().map(layer).collect::<Result<_, _>>()? })
    }

    /// Returns the number of blocks of each layer.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Copies blocks of all caches into this space, `(block of the caches, block of the space)`, in order. Work that writes
    /// these blocks must have finished, or [`Queue::Copy`] must wait for it. Work that overwrites them must wait for the
    /// returned event.
    ///
    /// # Errors
    /// The caches are not those the space was allocated for, or a block does not exist: nothing was copied. Or a copy
    /// fails.
    pub fn swap_out(
        &mut self,
        device: &dyn Device,
        caches: &[KvCache],
        blocks: &[(u32, u32)],
    ) -> Result<Event, KernelError> {
        self.check(caches, blocks.iter().map(|pair| pair.0), blocks.iter().map(|pair| pair.1))?;
        let cost = self.cost_of(blocks);
        let time = profile::start(device, Queue::Copy, "swap_out", "", move || cost);
        for (cache, layer) in caches.iter().zip(&mut self.layers) {
            each_run(blocks, layer.block_bytes, |from, to, bytes| {
                let mut pages = cache.buffers().zip(&mut layer.pages);
                pages.try_for_each(|(device_side, host_side)| {
                    device.download_async(Queue::Copy, device_side, from, host_side, to, bytes)
                })
            })?;
        }
        drop(time);
        Ok(device.record(Queue::Copy)?)
    }

    /// Copies blocks back into all caches, `(block of the space, block of the caches)`, in order. Work that reads or writes
    /// these blocks of the caches must have finished, or [`Queue::Copy`] must wait for it. Later work on them must wait for
    /// the returned event.
    ///
    /// # Errors
    /// As for [`SwapSpace::swap_out`].
    pub fn swap_in(
        &self,
        device: &dyn Device,
        caches: &mut [KvCache],
        blocks: &[(u32, u32)],
    ) -> Result<Event, KernelError> {
        self.check(caches, blocks.iter().map(|pair| pair.1), blocks.iter().map(|pair| pair.0))?;
        let cost = self.cost_of(blocks);
        let time = profile::start(device, Queue::Copy, "swap_in", "", move || cost);
        for (cache, layer) in caches.iter_mut().zip(&self.layers) {
            each_run(blocks, layer.block_bytes, |from, to, bytes| {
                let mut pages = cache.buffers_mut().zip(&layer.pages);
                pages.try_for_each(|(device_side, host_side)| {
                    device.upload_async(Queue::Copy, host_side, from, device_side, to, bytes)
                })
            })?;
        }
        drop(time);
        Ok(device.record(Queue::Copy)?)
    }

    /// Returns the bytes of keys and values of all layers.
    fn cost_of(&self, blocks: &[(u32, u32)]) -> Cost {
        let bytes = self.layers.iter().map(|layer| layer.pages.len() * layer.block_bytes * blocks.len()).sum::<usize>();
        Cost { bytes: bytes as u64, operations: 0 }
    }

    /// Checks that the caches match the space and that all blocks exist.
    fn check(
        &self,
        caches: &[KvCache],
        ids: impl Iterator<Item = u32> + Clone,
        own_ids: impl Iterator<Item = u32>,
    ) -> Result<(), KernelError> {
        expect("layers of the swap space", self.layers.len(), caches.len())?;
        check_ids(own_ids, self.num_blocks)?;
        for (cache, layer) in caches.iter().zip(&self.layers) {
            cache.check()?;
            expect("buffers of a swapped layer", cache.buffers().count(), layer.pages.len())?;
            expect("bytes of a swapped block", cache.block_bytes(), layer.block_bytes)?;
            check_ids(ids.clone(), cache.shape.num_blocks)?;
        }
        Ok(())
    }
}

/// Calls `copy` for each run of blocks that are contiguous on both sides, with the first byte on either side and the length.
fn each_run(
    blocks: &[(u32, u32)],
    block_bytes: usize,
    mut copy: impl FnMut(usize, usize, usize) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    for run in blocks.chunk_by(|a, b| b.0 == a.0 + 1 && b.1 == a.1 + 1) {
        copy(run[0].0 as usize * block_bytes, run[0].1 as usize * block_bytes, run.len() * block_bytes)?;
    }
    Ok(())
}
