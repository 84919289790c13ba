//! Tensors for Hopper's copy engine (TMA), which takes a tensor map and the coordinates of a box instead of addresses.

use crate::{Buffer, LaunchError};

/// A tensor of 16-bit elements in a buffer, and the size of the boxes in which a kernel copies it to shared memory
/// (`quire::TensorMap` and `load_box` of `simt/include/quire/async.cuh`). The fastest dimension comes first.
///
/// A row of a box is 128 bytes. Its 16-byte chunks are swizzled as tensor cores read them: chunk c of row r is stored at c ^ (r
/// % 8).
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    /// Buffer that holds the tensor from its first byte on.
    pub buffer: &'a Buffer,
    /// Number of elements in each dimension.
    pub sizes: [usize; 4],
    /// Stride in bytes of the second to fourth dimension: multiples of 16. The first dimension is dense.
    pub strides: [usize; 3],
    /// Number of elements of a box in each dimension: 64 in the first, 1 to 256 in the others.
    pub tile: [u32; 4],
}

/// A tensor map: 128 opaque bytes.
pub(crate) type Map = [u64; 16];

impl Tensor<'_> {
    /// Size of an element in bytes.
    const ELEMENT: usize = 2;

    /// Checks the limits of the copy engine, and that the tensor lies inside of its buffer.
    pub(crate) fn check(&self, kernel: &str, index: usize) -> Result<(), LaunchError> {
        let wrong = |what| Err(LaunchError::Tensor { kernel: kernel.to_owned(), index, what });
        if self.sizes.iter().any(|size| *size == 0 || u32::try_from(*size).is_err()) {
            return wrong("sizes from 1 to 2^32 - 1");
        }
        if self.strides.iter().any(|stride| *stride % 16 != 0 || *stride >= 1 << 40) {
            return wrong("strides that are multiples of 16 bytes, below 2^40");
        }
        if self.tile[0] != 64 || self.tile[1..].iter().any(|size| !(1..=256).contains(size)) {
            return wrong("boxes of 64 elements, then 1 to 256");
        }
        let last = |(size, stride): (&usize, &usize)| (size - 1).checked_mul(*stride);
        let mut lasts = self.sizes[1..].iter().zip(&self.strides).map(last);
        let end = lasts.try_fold(self.sizes[0] * Self::ELEMENT, |end, last| end.checked_add(last?));
        if end.is_none_or(|end| end > self.buffer.len_bytes()) {
            wrong("a tensor inside of its buffer")
        } else {
            Ok(())
        }
    }

    /// Returns the map for the simulator: `TensorMap` of `simt/include/simt/host/shared_matrix.h`.
    pub(crate) fn host_map(&self, address: u64) -> Map {
        const MAGIC: u64 = 0x7061_6d72_6f73_6e74;
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let [a, b, c, d] = self.sizes.map(|size| size as u64);
        let [x, y, z] = self.strides.map(|stride| stride as u64);
        let [p, q, r, s] = self.tile;
        [MAGIC, address, pair(Self::ELEMENT as u32, 128), a, b, c, d, x, y, z, pair(p, q), pair(r, s), 0, 0, 0, 0]
    }
}
