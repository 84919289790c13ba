//! Device memory of every backend.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use simd::lock;

use crate::DeviceError;
use crate::driver::DeviceMemory;
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

/// Device memory, 64-byte aligned and initially zero; made by [`Device::alloc`](crate::Device::alloc), freed on drop.
pub struct Buffer(pub(crate) Memory);

/// Memory of a buffer. Memory of devices that launch kernels is shared with the [`Graph`](crate::Graph)s that use it.
pub(crate) enum Memory {
    /// Memory of `cpu`.
    Cpu(HostMemory),
    /// Memory of `cuda-sim`: host memory that CPU code may not access.
    Sim(Arc<SimMemory>),
    /// Memory of a GPU.
    Cuda(Arc<DeviceMemory>),
}

/// Total size of the buffers of all devices `cuda-sim` of this process.
pub(crate) static SIM_ALLOCATED: AtomicU64 = AtomicU64::new(0);

/// Guarded memory of a `cuda-sim` device.
pub(crate) struct SimMemory {
    pub memory: HostMemory,
    /// The device's lock, held while a kernel runs or memory is copied; identifies the device.
    pub order: Arc<Mutex<()>>,
    /// The device's counter of bytes in buffers.
    pub allocated: Arc<AtomicU64>,
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        for counter in [&*self.allocated, &SIM_ALLOCATED] {
            counter.fetch_sub(self.memory.len() as u64, Ordering::Relaxed);
        }
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

    /// Returns the memory as elements of `T`, for CPU code.
    ///
    /// # Errors
    /// [`DeviceError::NotOnHost`] on `cuda` and `cuda-sim`; [`DeviceError::BadView`] if the size is not a multiple of the size
    /// of `T`.
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

    /// Keeps the first `at` bytes and returns the others as a buffer of its own, for threads that write parts of a buffer at the same
    /// time. [`Buffer::join`] makes one buffer of them again.
    ///
    /// ```
    /// let device = device::open("cpu", Some(1))?;
    /// let mut buffer = device.alloc(192)?;
    /// let mut rest = buffer.split_off(64)?;
    /// rest.host_mut::<u8>()?.fill(1);
    /// buffer.join(rest)?;
    /// assert_eq!(buffer.host::<u8>()?[63..65], [0, 1]);
    /// # Ok::<(), device::DeviceError>(())
    /// ```
    ///
    /// # Errors
    /// [`DeviceError::NotOnHost`] on `cuda` and `cuda-sim`; [`DeviceError::BadPart`] if `at` is no multiple of 64 or larger than the
    /// buffer.
    pub fn split_off(&mut self, at: usize) -> Result<Buffer, DeviceError> {
        let bytes = self.len_bytes();
        match &mut self.0 {
            Memory::Cpu(memory) => {
                memory.split_off(at).map(|rest| Buffer(Memory::Cpu(rest))).ok_or(DeviceError::BadPart { at, bytes })
            }
            other => Err(DeviceError::NotOnHost(other.device())),
        }
    }

    /// Appends a buffer that [`Buffer::split_off`] has cut off behind this one.
    ///
    /// # Errors
    /// [`DeviceError::BadPart`] if it is another buffer, which is dropped.
    pub fn join(&mut self, behind: Buffer) -> Result<(), DeviceError> {
        let problem = DeviceError::BadPart { at: self.len_bytes(), bytes: self.len_bytes() };
        match (&mut self.0, behind.0) {
            (Memory::Cpu(memory), Memory::Cpu(behind)) => memory.join(behind).map_err(|_| problem),
            _ => Err(problem),
        }
    }

    /// Backend name of the owner.
    pub fn device(&self) -> &'static str {
        self.0.device()
    }

    /// Address of byte 0, as kernels see it.
    pub(crate) fn address(&self) -> u64 {
        match &self.0 {
            Memory::Cpu(memory) => memory.start().expose_provenance() as u64,
            Memory::Sim(sim) => sim.memory.start().expose_provenance() as u64,
            Memory::Cuda(memory) => memory.address,
        }
    }

    /// Returns a copy of the contents; only for memory of this process.
    pub(crate) fn contents(&self) -> Result<Vec<u8>, DeviceError> {
        match &self.0 {
            Memory::Cpu(memory) => memory.view().map(<[u8]>::to_vec),
            Memory::Sim(sim) => {
                let _order = lock(&sim.order);
                sim.memory.view().map(<[u8]>::to_vec)
            }
            Memory::Cuda(_) => Err(DeviceError::NotOnHost(self.device())),
        }
    }

    /// Checks that the range lies inside of the buffer and that `device` owns it: `own` returns `None` for memory of another
    /// device. Every copy and launch goes through this check.
    pub(crate) fn checked<'a, T>(
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
