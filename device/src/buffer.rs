//! Device memory, whoever owns it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::DeviceError;
use crate::cuda::DeviceMemory;
use crate::memory::{Element, HostMemory, inside};

/// Returns the bytes of plain values, as a kernel or a copy sees them.
///
/// ```
/// assert_eq!(device::bytes_of(&[1u16, 2]), [1u16.to_ne_bytes(), 2u16.to_ne_bytes()].as_flattened());
/// ```
pub fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: an `Element` has no padding, so all bytes are initialised; they are borrowed as `values` is.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Defines `#[repr(C)]` structs that implement [`Element`](crate::Element), so that they can be kernel arguments
/// ([`Arg::bytes`](crate::Arg::bytes)) or elements of a buffer.
///
/// The size in bytes follows the name. Compilation fails if a struct has another size, if a field is not an `Element`, or if
/// there is padding between or behind the fields.
///
/// ```
/// device::kernel_structs! {
///     /// Shape of `copy_rows`.
///     struct CopyShape: 16 bytes {
///         stride: u64,
///         rows: u32,
///         padding: u32,
///     }
/// }
/// let shape = CopyShape { stride: 128, rows: 3, ..CopyShape::default() };
/// let argument = device::Arg::bytes(&shape);
/// ```
#[macro_export]
macro_rules! kernel_structs {
    ($($(#[$meta:meta])* $vis:vis struct $name:ident: $bytes:literal bytes {
        $($(#[$field_meta:meta])* $field_vis:vis $field:ident: $type:ty,)*
    })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        #[repr(C)]
        $vis struct $name {
            $($(#[$field_meta])* $field_vis $field: $type,)*
        }
        const _: () = {
            const fn is_element<T: $crate::Element>() {}
            $(is_element::<$type>();)*
            assert!(size_of::<$name>() == $bytes, "the struct has another size than its CUDA counterpart");
            assert!(0 $(+ size_of::<$type>())* == $bytes, "the struct has padding");
        };
        // SAFETY: the fields are elements, and the assertions above exclude padding.
        unsafe impl $crate::Element for $name {}
    )*};
}

/// A piece of device memory, 64-byte aligned, zeroed at birth, freed on drop; made by
/// [`Device::alloc`](crate::Device::alloc).
pub struct Buffer(pub(crate) Memory);

/// Where a buffer lies. What a GPU could work on is shared with the [`Graph`](crate::Graph)s that do.
pub(crate) enum Memory {
    /// Of the `cpu` backend.
    Cpu(HostMemory),
    /// Of `cuda-sim`: host memory in truth, but no CPU code may look at it.
    Sim(Arc<SimMemory>),
    /// Of a GPU.
    Cuda(Arc<DeviceMemory>),
}

/// Guarded memory of a `cuda-sim` device.
pub(crate) struct SimMemory {
    pub memory: HostMemory,
    /// Of the device: held while a kernel runs or memory is copied.
    pub order: Arc<Mutex<()>>,
    /// Of the device: bytes of all buffers.
    pub allocated: Arc<AtomicU64>,
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        self.allocated.fetch_sub(self.memory.len() as u64, Ordering::Relaxed);
    }
}

impl Buffer {
    /// Size in bytes.
    pub fn len_bytes(&self) -> usize {
        match &self.0 {
            Memory::Cpu(memory) => memory.len(),
            Memory::Sim(sim) => sim.memory.len(),
            Memory::Cuda(memory) => memory.bytes,
        }
    }

    /// The memory as elements of `T`, for code that runs on the CPU.
    ///
    /// # Errors
    /// [`DeviceError::NotOnHost`] for `cuda` and `cuda-sim`; [`DeviceError::BadView`] if the size is no multiple of
    /// `T`'s.
    pub fn host<T: Element>(&self) -> Result<&[T], DeviceError> {
        match &self.0 {
            Memory::Cpu(memory) => memory.view(),
            other => Err(DeviceError::NotOnHost(other.device())),
        }
    }

    /// As [`Buffer::host`], for writing.
    ///
    /// # Errors
    /// As [`Buffer::host`].
    pub fn host_mut<T: Element>(&mut self) -> Result<&mut [T], DeviceError> {
        match &mut self.0 {
            Memory::Cpu(memory) => memory.view_mut(),
            other => Err(DeviceError::NotOnHost(other.device())),
        }
    }

    /// Backend name of the owner.
    pub(crate) fn device(&self) -> &'static str {
        self.0.device()
    }

    /// What a kernel gets for byte 0.
    pub(crate) fn address(&self) -> u64 {
        match &self.0 {
            Memory::Cpu(memory) => memory.start().expose_provenance() as u64,
            Memory::Sim(sim) => sim.memory.start().expose_provenance() as u64,
            Memory::Cuda(memory) => memory.address,
        }
    }

    /// A copy of all of it, of memory of this process.
    pub(crate) fn contents(&self) -> Result<Vec<u8>, DeviceError> {
        match &self.0 {
            Memory::Cpu(memory) => memory.view().map(<[u8]>::to_vec),
            Memory::Sim(sim) => {
                let _order = sim.order.lock().unwrap_or_else(PoisonError::into_inner);
                sim.memory.view().map(<[u8]>::to_vec)
            }
            Memory::Cuda(_) => Err(DeviceError::NotOnHost(self.device())),
        }
    }

    /// What `own` finds in it, if `bytes` bytes from `at` on are its own: `None` for memory of another device than `device`,
    /// which asks. The one check before every copy and launch.
    pub(crate) fn of<'a, T>(
        &'a self,
        device: &'static str,
        at: usize,
        bytes: usize,
        own: impl FnOnce(&'a Memory) -> Option<T>,
    ) -> Result<T, DeviceError> {
        inside(at, bytes, self.len_bytes())?;
        own(&self.0).ok_or(DeviceError::WrongDevice { expected: device, found: self.device() })
    }
}

impl Memory {
    fn device(&self) -> &'static str {
        match self {
            Memory::Cpu(_) => "cpu",
            Memory::Sim(_) => "cuda-sim",
            Memory::Cuda(_) => "cuda",
        }
    }
}
