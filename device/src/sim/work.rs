//! What the compute queue of `cuda-sim` is given, as a value: run at once, or kept in a [`Graph`](crate::Graph) and run at
//! each replay, by the same code.

use std::sync::Arc;

use super::{Call, Library};
use crate::DeviceError;
use crate::Dtype;
use crate::buffer::SimMemory;
use crate::gemm::{Shape, on_host};

/// One piece of work. It keeps the memory that it reads and writes.
pub(crate) enum Work {
    /// A kernel; with each buffer the number of its argument.
    Launch {
        library: Arc<Library>,
        call: Call,
        memory: Vec<(usize, Arc<SimMemory>)>,
    },
    Product {
        shape: Shape,
        y_format: Dtype,
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

/// Bytes of a buffer.
pub(crate) struct Part {
    memory: Arc<SimMemory>,
    at: usize,
    bytes: usize,
}

impl Part {
    /// `at + bytes` is not beyond the end.
    pub fn new(memory: &Arc<SimMemory>, at: usize, bytes: usize) -> Part {
        debug_assert!(at + bytes <= memory.memory.len());
        Part { memory: Arc::clone(memory), at, bytes }
    }

    fn start(&self) -> *mut u8 {
        self.memory.memory.start().wrapping_add(self.at)
    }

    /// # Safety
    /// Nobody writes these bytes while they are seen.
    unsafe fn view(&self) -> &[u8] {
        // SAFETY: inside of the memory, which is initialised; nobody writes it meanwhile.
        unsafe { std::slice::from_raw_parts(self.start(), self.bytes) }
    }
}

impl Work {
    /// Does it. `seed` is of the order of a kernel's threads.
    ///
    /// # Errors
    /// A kernel's fault, or a write beside a buffer.
    ///
    /// # Safety
    /// Nobody else reads or writes memory of this device meanwhile, and kernels stay within what their arguments say.
    pub unsafe fn run(&self, seed: u64) -> Result<(), DeviceError> {
        match self {
            Work::Launch { library, call, memory } => {
                // SAFETY: the memory is alive, and the rest is the caller's promise.
                unsafe { library.run(call, seed) }?;
                match memory.iter().find(|(_, memory)| !memory.memory.guards_hold()) {
                    Some(&(index, _)) => Err(DeviceError::Trespass { kernel: call.kernel().to_owned(), index }),
                    None => Ok(()),
                }
            }
            Work::Product { shape, y_format, x, weights, bias, y } => {
                // SAFETY: all alive; nobody else is at them, and `y`, borrowed for writing when the product was given, is none
                // of the others.
                unsafe {
                    let y = std::slice::from_raw_parts_mut(y.start(), y.bytes);
                    on_host(*shape, weights.view(), x.view(), bias.as_ref().map(|bias| bias.view()), (y, *y_format));
                }
                Ok(())
            }
            Work::Copy { from, to } => {
                // SAFETY: both alive and as long; `to` was borrowed for writing, so that they are two.
                unsafe { from.start().copy_to_nonoverlapping(to.start(), from.bytes) };
                Ok(())
            }
            Work::Fill { to, byte } => {
                // SAFETY: alive, and so long.
                unsafe { to.start().write_bytes(*byte, to.bytes) };
                Ok(())
            }
        }
    }

    /// Whether the memory at an address is among what it works on.
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
