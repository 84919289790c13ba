//! The arrays of a device sampler in device memory.

use std::ops::{Index, IndexMut};

use device::{Buffer, Device, DeviceError};

use super::limits::Limits;

/// An array in device memory. `csrc/args.cuh` documents the shapes, [`Limits::array_bytes`] the sizes.
#[derive(Clone, Copy)]
pub(super) enum Array {
    Rows,
    Params,
    Lists,
    Constraints,
    Allowed,
    Counts,
    State,
    Scaled,
    Peaks,
    Scratch,
    Chunks,
    Cuts,
    Results,
    Tops,
    History,
    TokenCopies,
}

/// All arrays, in the order of [`Array`].
pub(super) struct Arrays(Vec<Buffer>);

impl Arrays {
    pub fn new(device: &dyn Device, limits: &Limits) -> Result<Arrays, DeviceError> {
        limits.array_bytes().into_iter().map(|bytes| device.alloc(bytes)).collect::<Result<_, _>>().map(Arrays)
    }
}

impl Index<Array> for Arrays {
    type Output = Buffer;
    fn index(&self, array: Array) -> &Buffer {
        &self.0[array as usize]
    }
}

impl IndexMut<Array> for Arrays {
    fn index_mut(&mut self, array: Array) -> &mut Buffer {
        &mut self.0[array as usize]
    }
}
