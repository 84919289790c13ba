//! Work items of the compute queue of `cuda-sim`. The same code runs them immediately or, from a [`Graph`](crate::Graph),
//! at each replay.

use std::sync::Arc;

use super::{Call, Counts, Library, Tally};
use crate::buffer::SimMemory;
use crate::product::on_host;
use crate::{DeviceError, ProductShape};

/// One work item. It keeps the memory that it reads and writes allocated.
pub(crate) enum Work {
    /// A kernel. `memory` holds the buffers, each with the index of its argument.
    Launch {
        library: Arc<Library>,
        call: Box<Call>,
        memory: Vec<(usize, Arc<SimMemory>)>,
    },
    Product {
        shape: ProductShape,
        rows: usize,
        x: Part,
        weights: Part,
        bias: Option<Part>,
        y: Part,
    },
    Copy {
        from: Part,
        to: Part,
    },
    Fill {
        to: Part,
        byte: u8,
    },
}

/// A range of the bytes of a buffer.
pub(crate) struct Part {
    memory: Arc<SimMemory>,
    at: usize,
    bytes: usize,
}

impl Part {
    /// Returns the range of `bytes` bytes from `at`, which must lie in the memory.
    pub fn new(memory: &Arc<SimMemory>, at: usize, bytes: usize) -> Part {
        debug_assert!(at + bytes <= memory.memory.len());
        Part { memory: Arc::clone(memory), at, bytes }
    }

    fn start(&self) -> *mut u8 {
        self.memory.memory.start().wrapping_add(self.at)
    }

    /// # Safety
    /// Nothing writes these bytes during the borrow.
    unsafe fn view(&self) -> &[u8] {
        // SAFETY: the range lies in the memory, which is initialised; nothing writes it, as the caller promises.
        unsafe { std::slice::from_raw_parts(self.start(), self.bytes) }
    }
}

impl Work {
    /// Runs the item. `seed` selects the order of a kernel's threads; `tally` gets the counts of a kernel.
    ///
    /// # Errors
    /// A fault of the kernel, or a write outside a buffer.
    ///
    /// # Safety
    /// Nothing else accesses memory of this device during the call, and kernels access only what their arguments describe.
    pub unsafe fn run(&self, seed: u64, tally: Option<&Tally>) -> Result<(), DeviceError> {
        match self {
            Work::Launch { library, call, memory } => {
                let mut counts = tally.map(|_| Counts::default());
                // SAFETY: the item keeps the memory allocated; the rest is the caller's promise.
                unsafe { library.run(call, seed, counts.as_mut()) }?;
                if let (Some(tally), Some(counts)) = (tally, counts) {
                    tally.add(call.kernel(), counts);
                }
                match memory.iter().find(|(_, memory)| !memory.memory.guards_hold()) {
                    Some(&(index, _)) => Err(DeviceError::Trespass { kernel: call.kernel().to_owned(), index }),
                    None => Ok(()),
                }
            }
            Work::Product { shape, rows, x, weights, bias, y } => {
                // SAFETY: the item keeps the memory allocated, nothing else accesses it, and `y` was borrowed mutably when
                // the product was enqueued, so it overlaps none of the others.
                unsafe {
                    let y = std::slice::from_raw_parts_mut(y.start(), y.bytes);
                    let bias = bias.as_ref().map(|bias| bias.view());
                    on_host(shape, *rows, weights.view(), x.view(), bias, y);
                }
                Ok(())
            }
            Work::Copy { from, to } => {
                // SAFETY: both ranges are allocated and equally long; `to` was borrowed mutably, so they do not overlap.
                unsafe { from.start().copy_to_nonoverlapping(to.start(), from.bytes) };
                Ok(())
            }
            Work::Fill { to, byte } => {
                // SAFETY: the range is allocated.
                unsafe { to.start().write_bytes(*byte, to.bytes) };
                Ok(())
            }
        }
    }

    /// Whether the item uses the memory that starts at an address.
    pub fn uses(&self, address: u64) -> bool {
        let is = |memory: &SimMemory| memory.memory.start().addr() as u64 == address;
        let part = |part: &Part| is(&part.memory);
        match self {
            Work::Launch { memory, .. } => memory.iter().any(|(_, memory)| is(memory)),
            Work::Product { x, weights, bias, y, .. } => [x, weights, y].into_iter().chain(bias).any(part),
            Work::Copy { from, to } => part(from) || part(to),
            Work::Fill { to, .. } => part(to),
        }
    }
}
