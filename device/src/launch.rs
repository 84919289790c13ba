//! Kernel launches: name, grid, and arguments in the form that the CUDA driver expects.

use std::ffi::c_void;

use crate::launch_error::LaunchError;
use crate::tensor::{Map, Tensor};
use crate::{Buffer, Element};

/// One launch of a kernel.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    /// Crate of the `.cu` file, as in file names: `attention_kernels`.
    pub module: &'a str,
    /// Name of the kernel.
    pub kernel: &'a str,
    /// Number of thread blocks in x, y and z.
    pub grid: [u32; 3],
    /// Number of threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block in bytes. A kernel that states its own need (`QUIRE_EXPORT_SHARED` in its source)
    /// gets at least that.
    pub shared_bytes: u32,
    /// One argument for each parameter of the kernel.
    pub args: &'a [Arg<'a>],
}

/// One argument of a kernel. Creating one does not allocate.
#[derive(Clone, Copy)]
pub struct Arg<'a>(pub(crate) Kind<'a>);

#[derive(Clone, Copy)]
pub(crate) enum Kind<'a> {
    Pointer {
        buffer: &'a Buffer,
        offset: usize,
    },
    /// A value of at most 8 bytes, and its size.
    Number([u8; 8], usize),
    Bytes(&'a [u8]),
    Tensor(&'a Tensor<'a>),
}

impl<'a> Arg<'a> {
    /// A pointer to a byte of a buffer, through which the kernel may read and write.
    pub fn pointer(buffer: &'a Buffer, offset: usize) -> Arg<'a> {
        Arg(Kind::Pointer { buffer, offset })
    }

    /// A null pointer.
    pub fn null() -> Arg<'a> {
        Arg(Kind::Number([0; 8], size_of::<*const u8>()))
    }

    /// A struct passed by value. nvcc, the host compiler and Rust must lay it out in the same way.
    pub fn bytes<T: Element>(value: &'a T) -> Arg<'a> {
        // SAFETY: an `Element` has no padding, so all its bytes are initialised; the slice borrows `value`.
        Arg(Kind::Bytes(unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }))
    }

    /// A tensor map, for a Hopper kernel that copies boxes of the tensor: a `const __grid_constant__ quire::TensorMap`.
    pub fn tensor(tensor: &'a Tensor<'a>) -> Arg<'a> {
        Arg(Kind::Tensor(tensor))
    }

    fn size(&self) -> u32 {
        match &self.0 {
            Kind::Pointer { .. } => size_of::<*const u8>() as u32,
            Kind::Number(_, bytes) => *bytes as u32,
            // A kernel has at most 32764 bytes of parameters.
            Kind::Bytes(bytes) => u32::try_from(bytes.len()).unwrap_or(u32::MAX),
            Kind::Tensor(_) => size_of::<Map>() as u32,
        }
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {
        $(impl From<$number> for Arg<'_> {
            fn from(value: $number) -> Self {
                let mut bytes = [0; 8];
                bytes[..size_of::<$number>()].copy_from_slice(&value.to_ne_bytes());
                Arg(Kind::Number(bytes, size_of::<$number>()))
            }
        })*
    };
}
numbers!(i32, u32, i64, u64, f32);

/// Arguments laid out in memory as the driver reads them.
pub(crate) struct Packed {
    /// One for each argument, into `_values`.
    pub pointers: Vec<*mut c_void>,
    /// Each value starts at a multiple of 16 bytes, the largest alignment of a parameter.
    _values: Vec<u128>,
}

// SAFETY: the pointers lead into `_values`, which moves with them and is never written.
unsafe impl Send for Packed {}
// SAFETY: as above.
unsafe impl Sync for Packed {}

impl Launch<'_> {
    /// Compares the arguments with the sizes of the kernel's parameters and lays them out. `map` returns the tensor map for a
    /// tensor at an address.
    pub(crate) fn pack<E: From<LaunchError>>(
        &self,
        parameter_bytes: &[u32],
        map: impl Fn(&Tensor<'_>, u64) -> Result<Map, E>,
    ) -> Result<Packed, E> {
        let kernel = || self.kernel.to_owned();
        if !self.args.iter().map(Arg::size).eq(parameter_bytes.iter().copied()) {
            let (found, expected) = (self.args.iter().map(Arg::size).collect(), parameter_bytes.to_vec());
            return Err(LaunchError::Arguments { kernel: kernel(), found, expected }.into());
        }
        let mut values: Vec<u128> = Vec::with_capacity(2 * self.args.len());
        let mut starts = Vec::with_capacity(self.args.len());
        for (index, arg) in self.args.iter().enumerate() {
            let (address, tensor_map);
            let bytes = match &arg.0 {
                Kind::Bytes(bytes) => bytes,
                Kind::Number(bytes, len) => &bytes[..*len],
                Kind::Pointer { buffer, offset } => {
                    let bytes = buffer.len_bytes();
                    if *offset > bytes {
                        return Err(LaunchError::Outside { kernel: kernel(), index, offset: *offset, bytes }.into());
                    }
                    address = (buffer.address() + *offset as u64).to_ne_bytes();
                    &address[..]
                }
                Kind::Tensor(tensor) => {
                    tensor.check(self.kernel, index)?;
                    tensor_map = bytes_of(&map(tensor, tensor.buffer.address())?);
                    &tensor_map[..]
                }
            };
            starts.push(values.len());
            for chunk in bytes.chunks(size_of::<u128>()) {
                let mut word = [0; size_of::<u128>()];
                word[..chunk.len()].copy_from_slice(chunk);
                values.push(u128::from_ne_bytes(word));
            }
        }
        let base = values.as_mut_ptr();
        let pointers = starts.into_iter().map(|start| base.wrapping_add(start).cast()).collect();
        Ok(Packed { pointers, _values: values })
    }

    /// Iterates over the buffers of the arguments, each with the index of its argument.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = (usize, &Buffer)> {
        self.args.iter().enumerate().filter_map(|(index, arg)| match arg.0 {
            Kind::Pointer { buffer, .. } => Some((index, buffer)),
            Kind::Tensor(tensor) => Some((index, tensor.buffer)),
            _ => None,
        })
    }
}

/// Returns the bytes of a tensor map in native byte order.
pub(crate) fn bytes_of(map: &Map) -> [u8; size_of::<Map>()] {
    let mut bytes = [0; size_of::<Map>()];
    for (to, word) in bytes.chunks_exact_mut(8).zip(map) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}
