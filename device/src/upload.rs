//! Numbers of a checkpoint on their way to a device: converted where they must be, through two page-locked buffers in turn,
//! so that one is filled while the other is copied.

use crate::gemm::Quantization;
use crate::{Buffer, Device, DeviceError, Dtype, Event, Matrix, Pinned, Queue};

/// Bytes of one staging buffer.
const STAGE: usize = 16 << 20;
/// Numbers that one thread converts at a time.
const SHARE: usize = 1 << 16;

/// See the module.
pub struct Uploader<'a> {
    device: &'a dyn Device,
    stages: [Stage; 2],
    next: usize,
}

struct Stage {
    memory: Pinned,
    /// After its last copy.
    copied: Option<Event>,
}

impl<'a> Uploader<'a> {
    /// Takes the staging buffers.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn new(device: &'a dyn Device) -> Result<Uploader<'a>, DeviceError> {
        let stage = || Ok::<_, DeviceError>(Stage { memory: device.pinned(STAGE)?, copied: None });
        Ok(Uploader { device, stages: [stage()?, stage()?], next: 0 })
    }

    /// A buffer of all numbers of the parts, one part behind the other, as `format`. The copies are in order with what
    /// [`Queue::Compute`] gets later.
    ///
    /// # Errors
    /// There is no memory for it, or a copy fails.
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

    /// A weight matrix `[n, k]`, given as the rows of its parts one below the other, in the form that the device multiplies
    /// with: packed and, where that is asked for, quantised; or dense numbers of type `dtype`.
    ///
    /// # Errors
    /// See [`Uploader::numbers`] and [`Device::packed_matrix`]; [`DeviceError::NoQuantization`] where the device packs none.
    pub fn matrix(
        &mut self,
        quantization: Option<Quantization>,
        dtype: Dtype,
        [n, k]: [usize; 2],
        parts: &[(Dtype, &[u8])],
    ) -> Result<Matrix, DeviceError> {
        match quantization {
            _ if self.device.features().packs_matrices => self.device.packed_matrix(quantization, k, parts),
            Some(quantization) => Err(DeviceError::NoQuantization { device: self.device.name(), quantization }),
            None => Matrix::dense(dtype, n, k, self.numbers(dtype, parts)?),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn parts_longer_than_a_stage_arrive_in_order_and_converted() {
        let device = crate::open("cpu", Some(2)).unwrap();
        let long: Vec<u8> = (0..STAGE / 4 + 5).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let short = half::f16::from_f32(2.5).to_le_bytes();
        let parts = [(Dtype::F32, &long[..]), (Dtype::F16, &short[..])];
        let buffer = Uploader::new(&*device).unwrap().numbers(Dtype::F32, &parts).unwrap();
        let found = buffer.host::<f32>().unwrap();
        assert!(found.iter().enumerate().take(STAGE / 4 + 5).all(|(i, x)| *x == i as f32));
        assert_eq!(found[STAGE / 4 + 5..], [2.5]);
    }
}
