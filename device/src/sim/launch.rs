//! What to run: a kernel's name, its grid, and its arguments as the CUDA driver takes them.

use std::ffi::c_void;

use super::{Kernel, SimError};
use crate::Buffer;

/// One launch.
#[derive(Clone)]
pub struct Launch<'a> {
    /// The kernel.
    pub kernel: &'a str,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// One for each parameter of the kernel.
    pub args: Vec<Arg<'a>>,
    /// Of the order in which threads and blocks run: a kernel that is right gives the same bits under every seed. 0 keeps
    /// the natural order.
    pub seed: u64,
}

/// One argument of a kernel.
#[derive(Clone)]
pub struct Arg<'a>(pub(super) Kind<'a>);

#[derive(Clone)]
pub(super) enum Kind<'a> {
    Pointer { buffer: &'a Buffer, offset: usize },
    Value(Vec<u8>),
}

impl<'a> Arg<'a> {
    /// A pointer to a byte of a buffer, for reading and writing.
    pub fn pointer(buffer: &'a Buffer, offset: usize) -> Arg<'a> {
        Arg(Kind::Pointer { buffer, offset })
    }

    /// The pointer that is none.
    pub fn null() -> Arg<'a> {
        Arg(Kind::Value(vec![0; size_of::<*const u8>()]))
    }

    /// The bytes of a plain struct, padding included.
    pub fn bytes(bytes: &[u8]) -> Arg<'a> {
        Arg(Kind::Value(bytes.to_vec()))
    }

    fn size(&self) -> u32 {
        match &self.0 {
            Kind::Pointer { .. } => size_of::<*const u8>() as u32,
            // A kernel has at most 32764 bytes of parameters.
            Kind::Value(bytes) => u32::try_from(bytes.len()).unwrap_or(u32::MAX),
        }
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {
        $(impl From<$number> for Arg<'_> {
            fn from(value: $number) -> Self {
                Arg::bytes(&value.to_ne_bytes())
            }
        })*
    };
}
numbers!(i32, u32, i64, u64, f32);

/// Arguments in memory as a kernel reads them.
pub(super) struct Packed {
    /// One for each argument, into `values`.
    pub pointers: Vec<*mut c_void>,
    /// Every value at a multiple of 16 bytes, more than any parameter asks for.
    _values: Vec<u128>,
}

impl Launch<'_> {
    /// Lays out the arguments, after a comparison with the kernel's parameters.
    pub(super) fn pack(&self, kernel: &Kernel) -> Result<Packed, SimError> {
        let found: Vec<u32> = self.args.iter().map(Arg::size).collect();
        if found != kernel.parameter_bytes {
            let (kernel, expected) = (kernel.name.clone(), kernel.parameter_bytes.clone());
            return Err(SimError::Arguments { kernel, found, expected });
        }
        let mut values: Vec<u128> = Vec::new();
        let mut starts = Vec::new();
        for (index, arg) in self.args.iter().enumerate() {
            let address;
            let bytes = match &arg.0 {
                Kind::Value(bytes) => bytes.as_slice(),
                Kind::Pointer { buffer, offset } => {
                    let bytes = buffer.len_bytes();
                    if *offset > bytes {
                        return Err(SimError::Outside { kernel: kernel.name.clone(), index, offset: *offset, bytes });
                    }
                    address = (buffer.address().expose_provenance() + offset).to_ne_bytes();
                    address.as_slice()
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
}
