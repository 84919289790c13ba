//! Upload of checkpoint numbers to a device. They are converted where necessary, through two page-locked buffers in turn, so
//! that one is filled while the other is copied.

use std::borrow::Cow;

use crate::gemm::{Quantization, WeightRows};
use crate::{Buffer, Device, DeviceError, Dtype, Event, Matrix, Pinned, Queue};

/// Size of a staging buffer in bytes.
const STAGE: usize = 16 << 20;
/// Numbers per conversion task.
const SHARE: usize = 1 << 16;

/// Copies checkpoint tensors to a device through two staging buffers.
pub struct Uploader<'a> {
    device: &'a dyn Device,
    stages: [Stage; 2],
    next: usize,
}

struct Stage {
    memory: Pinned,
    /// Event behind its last copy.
    copied: Option<Event>,
}

impl<'a> Uploader<'a> {
    /// Allocates the staging buffers, 16 MiB each.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &'a dyn Device) -> Result<Uploader<'a>, DeviceError> {
        let stage = || Ok::<_, DeviceError>(Stage { memory: device.pinned(STAGE)?, copied: None });
        Ok(Uploader { device, stages: [stage()?, stage()?], next: 0 })
    }

    /// Uploads the concatenated numbers of the parts, converted to `format`, to a new buffer. The copies are enqueued on
    /// [`Queue::Compute`].
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], or the error of a copy.
    pub fn numbers(&mut self, format: Dtype, parts: &[(Dtype, &[u8])]) -> Result<Buffer, DeviceError> {
        let count = |part: &(Dtype, &[u8])| part.1.len() / part.0.bytes();
        let mut buffer = self.device.alloc(parts.iter().map(count).sum::<usize>() * format.bytes())?;
        let mut at = 0;
        for (from, data) in parts {
            for piece in data.chunks(STAGE / 4 * from.bytes()) {
                let bytes = piece.len() / from.bytes() * format.bytes();
                let stage = &mut self.stages[self.next];
                self.next = 1 - self.next;
                if let Some(copied) = stage.copied.take() {
                    copied.synchronize()?;
                }
                let staged = &mut stage.memory.host_mut::<u8>()?[..bytes];
                self.device.pool().chunks_mut(staged, SHARE * format.bytes(), SHARE, |i, to| {
                    let first = i * SHARE * from.bytes();
                    let numbers = to.len() / format.bytes() * from.bytes();
                    format.convert(*from, &piece[first..first + numbers], to);
                });
                self.device.upload_async(Queue::Compute, &stage.memory, 0, &mut buffer, at, bytes)?;
                stage.copied = Some(self.device.record(Queue::Compute)?);
                at += bytes;
            }
        }
        Ok(buffer)
    }

    /// Uploads a weight matrix `[n, k]`, given as the stacked rows of its parts, in the form that the device multiplies with:
    /// packed in the form in which the rows are stored, or quantised if `quantization` is given; or dense numbers of type `dtype`.
    ///
    /// # Errors
    /// The errors of [`Uploader::numbers`] and [`Device::packed_matrix`]; [`DeviceError::NoQuantization`] if the device packs no
    /// matrices.
    pub fn matrix(
        &mut self,
        quantization: Option<Quantization>,
        dtype: Dtype,
        [n, k]: [usize; 2],
        parts: &[WeightRows<'_>],
    ) -> Result<Matrix, DeviceError> {
        if self.device.features().packs_matrices {
            return self.device.packed_matrix(quantization, k, parts);
        }
        if let Some(quantization) = quantization {
            return Err(DeviceError::NoQuantization { device: self.device.name(), quantization });
        }
        let mut numbers = Vec::new();
        for part in parts {
            numbers.push(match *part {
                WeightRows::Numbers(dtype, data) => (dtype, Cow::Borrowed(data)),
                WeightRows::Stored(part) => (Dtype::F32, Cow::Owned(part.numbers(self.device.pool(), k)?)),
            });
        }
        let numbers: Vec<_> = numbers.iter().map(|(dtype, data)| (*dtype, &data[..])).collect();
        Matrix::dense(dtype, n, k, self.numbers(dtype, &numbers)?)
    }
}
