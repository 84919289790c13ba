//! Upload of checkpoint numbers to a device. They are converted where necessary, through two page-locked buffers in turn, so
//! that one is filled while the other is copied.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use device::{Buffer, Device, DeviceError, Dtype, Event, Pinned, Queue};
use simd::Pool;

use crate::arithmetic::Arithmetic;
use crate::byte_matrix::{ByteMatrix, ByteRows, RowRounding};
use crate::error::LinearError;
use crate::matrix::{Matrix, Stored};
use crate::pack::{PackedMatrix, Purpose, WeightRows};
use crate::quantization::Quantization;
use crate::tiles::{PlannedSegment, StackedRows, TileSegment, Tiles, plan};

/// Size of a staging buffer in bytes.
const STAGE: usize = 16 << 20;
/// Numbers per conversion task.
const SHARE: usize = 1 << 16;

/// Copies checkpoint tensors to a device through two staging buffers.
pub struct Uploader<'a> {
    device: &'a dyn Device,
    arithmetic: Arithmetic,
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
        Ok(Uploader { device, arithmetic: Arithmetic::default(), stages: [stage()?, stage()?], next: 0 })
    }

    /// Chooses how products with matrices round and sum on a device that packs them.
    #[must_use]
    pub fn with_arithmetic(self, arithmetic: Arithmetic) -> Uploader<'a> {
        Uploader { arithmetic, ..self }
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
                self.send(&mut buffer, at, bytes, |pool, staged| {
                    pool.chunks_mut(staged, SHARE * format.bytes(), SHARE, |i, to| {
                        let first = i * SHARE * from.bytes();
                        let numbers = to.len() / format.bytes() * from.bytes();
                        format.convert(*from, &piece[first..first + numbers], to);
                    });
                })?;
                at += bytes;
            }
        }
        Ok(buffer)
    }

    /// Lets `fill` write the next staging buffer, of which `bytes` are copied to offset `at` of a buffer.
    fn send(
        &mut self,
        buffer: &mut Buffer,
        at: usize,
        bytes: usize,
        fill: impl FnOnce(&Pool, &mut [u8]),
    ) -> Result<(), DeviceError> {
        let stage = &mut self.stages[self.next];
        self.next = 1 - self.next;
        if let Some(copied) = stage.copied.take() {
            copied.synchronize()?;
        }
        fill(self.device.pool(), &mut stage.memory.host_mut::<u8>()?[..bytes]);
        self.device.upload_async(Queue::Compute, &stage.memory, 0, buffer, at, bytes)?;
        stage.copied = Some(self.device.record(Queue::Compute)?);
        Ok(())
    }

    /// Uploads a weight matrix `[n, k]`, given as the stacked rows of its parts, in the form that the device multiplies with. A device
    /// that packs matrices stores the rows as they are, or quantised if `quantization` is given, for the arithmetic of this uploader. If
    /// that rounds, numbers become bfloat16. Another stores their codes if all parts have some that it can multiply ([`ByteMatrix`], [`Tiles`]),
    /// otherwise numbers of type `dtype`.
    ///
    /// # Errors
    /// The errors of [`Uploader::numbers`] and [`PackedMatrix::stored`]; [`LinearError::NotFinite`] or [`LinearError::BadWeights`] for
    /// weights that are not finite.
    pub fn matrix(
        &mut self,
        quantization: Option<Quantization>,
        dtype: Dtype,
        [n, k]: [usize; 2],
        parts: &[WeightRows<'_>],
        purpose: Purpose,
    ) -> Result<Matrix, LinearError> {
        if self.device.features().packs_matrices {
            let packed = match quantization {
                None => PackedMatrix::stored(self.device.pool(), self.arithmetic, k, parts),
                Some(quantization) => {
                    let numbers = parts.iter().map(|part| match part {
                        WeightRows::Numbers(dtype, data) => Ok((*dtype, *data)),
                        WeightRows::Stored(_) => {
                            Err(LinearError::NoQuantization { device: self.device.name(), quantization })
                        }
                    });
                    let numbers = numbers.collect::<Result<Vec<_>, _>>()?;
                    PackedMatrix::quantize(self.device.pool(), quantization, k, &numbers)
                }
            };
            return packed.map(|packed| Matrix(Stored::Packed(packed)));
        }
        let forms: Vec<_> =
            parts.iter().map(|part| Ok((part.rows(k)?, part.form()))).collect::<Result<_, LinearError>>()?;
        if let Some(rounding) = ByteMatrix::rounding_of(self.device.features(), purpose, k, &forms) {
            return self.bytes((rounding, dtype), [n, k], &ByteRows::new(parts, k));
        }
        if let Some(planned) = plan(purpose, dtype, k, quantization, &forms) {
            let (mut segments, mut first) = (Vec::new(), 0);
            for segment in planned {
                let rows = StackedRows::new(&parts[segment.parts.clone()], quantization, k)?;
                let panels = self.panels(&segment, &rows)?.ok_or(match quantization {
                    Some(quantization) => LinearError::BadWeights(quantization),
                    None => LinearError::NotFinite,
                })?;
                segments.push(TileSegment { first, n: segment.n, form: segment.form, panels });
                first += segment.n;
            }
            return if first == n {
                Ok(Matrix(Stored::Tiles(Tiles { n, k, dtype, segments })))
            } else {
                Err(LinearError::BadMatrix(k))
            };
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

    /// Uploads codes, as many rows at a time as a staging buffer holds, and their scales.
    fn bytes(
        &mut self,
        (rounding, dtype): (RowRounding, Dtype),
        [n, k]: [usize; 2],
        rows: &ByteRows<'_>,
    ) -> Result<Matrix, LinearError> {
        let (scales, sound) = ((0..n).map(|_| AtomicU32::new(0)).collect::<Vec<_>>(), AtomicBool::new(true));
        let mut codes = self.device.alloc(n * k)?;
        let step = (STAGE / k).max(1);
        for first in (0..n).step_by(step) {
            let count = step.min(n - first);
            self.send(&mut codes, first * k, count * k, |pool, staged| {
                pool.chunks_mut(staged, k, k, |row, to| match rows.read(first + row, to) {
                    Some(scale) => scales[first + row].store(scale.to_bits(), Ordering::Relaxed),
                    None => sound.store(false, Ordering::Relaxed),
                });
            })?;
        }
        if !sound.into_inner() {
            return Err(LinearError::NotFinite);
        }
        let scales: Vec<u8> = scales.iter().flat_map(|bits| bits.load(Ordering::Relaxed).to_le_bytes()).collect();
        let scales = self.numbers(Dtype::F32, &[(Dtype::F32, &scales)])?;
        Ok(Matrix(Stored::Bytes(ByteMatrix { codes, scales, rounding, dtype, n, k })))
    }

    /// Uploads a segment, as many panels at a time as a staging buffer holds; `None` if a weight is not finite.
    fn panels(&mut self, segment: &PlannedSegment, rows: &StackedRows<'_>) -> Result<Option<Buffer>, DeviceError> {
        let (size, sound) = (segment.form.panel_bytes(), AtomicBool::new(true));
        let mut buffer = self.device.alloc(segment.bytes())?;
        for first in (0..segment.panels()).step_by(STAGE / size) {
            let count = (STAGE / size).min(segment.panels() - first);
            self.send(&mut buffer, first * size, count * size, |pool, staged| {
                // Bytes of a panel stand for their cost.
                pool.chunks_mut(staged, size, size, |panel, to| {
                    if !rows.write(&segment.form, first + panel, to) {
                        sound.store(false, Ordering::Relaxed);
                    }
                });
            })?;
        }
        let table = segment.table();
        if !table.is_empty() {
            self.send(&mut buffer, segment.panels() * size, table.len(), |_, staged| staged.copy_from_slice(&table))?;
        }
        Ok(sound.into_inner().then_some(buffer))
    }
}
