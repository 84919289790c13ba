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
    /// Dynamic shared memory of a block in bytes. A kernel that states its own need (`QUIRE_EXPORT_SHARED` and the like in its
    /// source) gets at least that.
    pub shared_bytes: u32,
    /// One argument for each parameter of the kernel.
    pub args: &'a [Arg<'a>],
}

/// What a block of a kernel computes, as its source says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tile {
    /// Number of threads of a block.
    pub threads: u32,
    /// Number of rows that a block computes.
    pub rows: u32,
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

/// Most arguments of a launch.
const MOST_ARGUMENTS: usize = 32;
/// Most memory of the values of all arguments, in units of 16 bytes, the largest alignment of a parameter. Each value starts a
/// new unit.
const MOST_UNITS: usize = 64;

/// Arguments laid out in memory as the driver reads them. They need no heap.
pub(crate) struct Packed {
    len: usize,
    /// First unit of each value.
    starts: [u8; MOST_ARGUMENTS],
    values: [u128; MOST_UNITS],
}

impl Packed {
    /// Returns pointers to the values, valid while the values stay where they are.
    pub fn pointers(&self) -> [*mut c_void; MOST_ARGUMENTS] {
        let base = self.values.as_ptr();
        let mut pointers = [std::ptr::null_mut(); MOST_ARGUMENTS];
        for (pointer, start) in pointers.iter_mut().zip(&self.starts[..self.len]) {
            *pointer = base.wrapping_add(usize::from(*start)).cast_mut().cast();
        }
        pointers
    }
}

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
        let units = |arg: &Arg<'_>| (arg.size() as usize).div_ceil(size_of::<u128>());
        let used: usize = self.args.iter().map(units).sum();
        if self.args.len() > MOST_ARGUMENTS || used > MOST_UNITS {
            let (arguments, bytes) = (self.args.len(), used * size_of::<u128>());
            let (most_arguments, most_bytes) = (MOST_ARGUMENTS, MOST_UNITS * size_of::<u128>());
            return Err(LaunchError::TooLarge { kernel: kernel(), arguments, bytes, most_arguments, most_bytes }.into());
        }
        let mut packed = Packed { len: self.args.len(), starts: [0; MOST_ARGUMENTS], values: [0; MOST_UNITS] };
        let mut next = 0;
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
            packed.starts[index] = next as u8;
            for (unit, chunk) in packed.values[next..].iter_mut().zip(bytes.chunks(size_of::<u128>())) {
                let mut word = [0; size_of::<u128>()];
                word[..chunk.len()].copy_from_slice(chunk);
                *unit = u128::from_ne_bytes(word);
            }
            next += units(arg);
        }
        Ok(packed)
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn pack(args: &[Arg<'_>]) -> Result<Packed, LaunchError> {
        let sizes: Vec<u32> = args.iter().map(Arg::size).collect();
        let launch = Launch { module: "", kernel: "many", grid: [1; 3], block: [1; 3], shared_bytes: 0, args };
        launch.pack(&sizes, |_, _| Ok([0; 16]))
    }

    #[test]
    fn values_start_at_multiples_of_16_bytes_in_order() {
        let structure = [1u64, 2, 3];
        let args = [Arg::from(7u32), Arg::bytes(&structure), Arg::null(), Arg::from(-1i64)];
        let packed = pack(&args).unwrap();
        let pointers = packed.pointers();
        let offsets = pointers[..4].iter().map(|pointer| pointer.addr() - packed.values.as_ptr().addr());
        assert_eq!(offsets.collect::<Vec<_>>(), [0, 16, 48, 64]);
        let minus_one = u128::from(u64::MAX);
        assert_eq!(packed.values[..5], [7, 1 | 2 << 64, 3, 0, minus_one]);
    }

    #[test]
    fn more_arguments_than_a_launch_has_space_for_are_refused() {
        let structure = [[0u64; 16]; 2];
        assert!(pack(&[Arg::from(1u32); MOST_ARGUMENTS]).is_ok() && pack(&[Arg::bytes(&structure); 4]).is_ok());
        for args in [vec![Arg::from(1u32); MOST_ARGUMENTS + 1], vec![Arg::bytes(&structure); 5]] {
            let error = pack(&args).err().unwrap().to_string();
            assert!(error.starts_with("kernel many: found ") && error.ends_with("at most 32 of 1024 bytes"), "{error}");
        }
    }
}
