//! Blocks of caches in page-locked host memory, for sequences that are swapped out.
//!
//! No kernel is involved: the device copies blocks on [`Queue::Copy`], as vLLM's `swap_blocks` does. Blocks that are
//! contiguous on both sides are one copy, and all copies of a swap, of all layers, are one call of the driver
//! (`cuMemcpyBatchAsync`). The host waits for nothing, and the copies overlap with launches: the
//! caller makes them wait for earlier work, and later work wait for the returned event.
//!
//! ```text
//! Compute  -- launch that writes the blocks -- e -- other launches -- wait for the event -- launches that need the blocks
//!                                               \                   /
//! Copy     ---------------------------- wait for e -- copy, copy, event
//! ```

use std::collections::HashSet;

use device::profile::{self, Cost};
use device::transfer::{CopyRange, Download, Upload};
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

    /// Returns the bytes of a block in all layers.
    pub fn block_bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.pages.len() * layer.block_bytes).sum()
    }

    /// Returns the contents of a block: those of each buffer of each layer, in order.
    ///
    /// # Errors
    /// There is no such block, or a copy may still use the memory.
    pub fn read_block(&self, block: u32) -> Result<Vec<u8>, KernelError> {
        check_ids([block].into_iter(), self.num_blocks)?;
        let mut contents = Vec::with_capacity(self.block_bytes());
        for layer in &self.layers {
            for page in &layer.pages {
                contents.extend(&page.host::<u8>()?[block as usize * layer.block_bytes..][..layer.block_bytes]);
            }
        }
        Ok(contents)
    }

    /// Overwrites a block with contents that [`SwapSpace::read_block`] of an equal space returned.
    ///
    /// # Errors
    /// There is no such block, the contents have another length, or a copy may still use the memory.
    pub fn write_block(&mut self, block: u32, contents: &[u8]) -> Result<(), KernelError> {
        check_ids([block].into_iter(), self.num_blocks)?;
        expect("bytes of a host block", self.block_bytes(), contents.len())?;
        let mut contents = contents;
        for layer in &mut self.layers {
            for page in &mut layer.pages {
                let (own, rest) = contents.split_at(layer.block_bytes);
                page.host_mut::<u8>()?[block as usize * layer.block_bytes..][..layer.block_bytes].copy_from_slice(own);
                contents = rest;
            }
        }
        Ok(())
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
        for blocks in distinct_targets(blocks) {
            let ranges: Vec<Vec<CopyRange>> = self.layers.iter().map(|layer| layer.ranges(blocks)).collect();
            let layers = caches.iter().zip(&mut self.layers).zip(&ranges);
            let copies = layers.flat_map(|((cache, layer), ranges)| {
                cache.buffers().zip(&mut layer.pages).map(|(from, to)| Download { from, to, ranges })
            });
            device.download_ranges(Queue::Copy, &mut copies.collect::<Vec<_>>())?;
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
        for blocks in distinct_targets(blocks) {
            let ranges: Vec<Vec<CopyRange>> = self.layers.iter().map(|layer| layer.ranges(blocks)).collect();
            let layers = caches.iter_mut().zip(&self.layers).zip(&ranges);
            let copies = layers.flat_map(|((cache, layer), ranges)| {
                cache.buffers_mut().zip(&layer.pages).map(|(to, from)| Upload { from, to, ranges })
            });
            device.upload_ranges(Queue::Copy, &mut copies.collect::<Vec<_>>())?;
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

impl Layer {
    /// The copies of blocks: one for each run that is contiguous on both sides.
    fn ranges(&self, blocks: &[(u32, u32)]) -> Vec<CopyRange> {
        let runs = blocks.chunk_by(|a, b| b.0 == a.0 + 1 && b.1 == a.1 + 1);
        let start = |block: u32| block as usize * self.block_bytes;
        let range = |run: &[(u32, u32)]| {
            let bytes = run.len() * self.block_bytes;
            CopyRange { from: start(run[0].0), to: start(run[0].1), bytes }
        };
        runs.map(range).collect()
    }
}

/// Splits a list of copies so that no part writes a block twice: copies of one call have no order.
fn distinct_targets(blocks: &[(u32, u32)]) -> impl Iterator<Item = &[(u32, u32)]> {
    let mut written = HashSet::new();
    let mut rest = blocks;
    std::iter::from_fn(move || {
        written.clear();
        let end = rest.iter().position(|(_, to)| !written.insert(*to)).unwrap_or(rest.len());
        let (part, others) = rest.split_at(end);
        rest = others;
        (!part.is_empty()).then_some(part)
    })
}
