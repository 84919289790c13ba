//! An array that the host writes and kernels read: a device buffer with two page-locked staging buffers.
//!
//! Only changes are copied to the device, in a few ranges, in order with the launches, and the host does not wait. So a step
//! whose inputs differ little from the previous step copies little. The two staging buffers are used in turn, so that one can
//! be written while copies from the other, for a step that is still running, are pending.

use std::ops::Range;

use crate::memory::inside;
use crate::{Buffer, Device, DeviceError, Pinned, Queue};

/// Changes with a smaller gap are copied together: copying this many unchanged bytes takes less time than enqueuing another
/// copy (some microseconds).
const GAP: usize = 16 * 1024;

/// A device array that the host updates step by step; only changes are copied.
pub struct Mirror {
    stages: [Pinned; 2],
    next: usize,
    device: Buffer,
    /// Contents that were last sent.
    known: Vec<u8>,
    /// Length of the valid prefix of `known`.
    sent: usize,
    /// For [`Mirror::set_rows`]: length of each row on the device, without the blanks.
    lens: Vec<usize>,
    /// Ranges of `known` that the device does not have yet; kept for its memory.
    changed: Vec<Range<usize>>,
}

impl Mirror {
    /// Allocates an array of `bytes` bytes on the device, and twice that on the host.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &dyn Device, bytes: usize) -> Result<Mirror, DeviceError> {
        Ok(Mirror {
            stages: [device.pinned(bytes)?, device.pinned(bytes)?],
            next: 0,
            device: device.alloc(bytes)?,
            known: vec![0; bytes],
            sent: 0,
            lens: Vec::new(),
            changed: Vec::new(),
        })
    }

    /// Returns the device buffer, for kernels.
    pub fn buffer(&self) -> &Buffer {
        &self.device
    }

    /// Sets the first words of the array; the rest keeps its contents. All calls must use the same word size.
    ///
    /// # Errors
    /// [`DeviceError::Outside`] for more words than fit; the error of a copy.
    pub fn set<const N: usize>(
        &mut self,
        device: &dyn Device,
        words: impl ExactSizeIterator<Item = [u8; N]>,
    ) -> Result<(), DeviceError> {
        inside(0, words.len() * N, self.known.len())?;
        let (count, sent) = (words.len(), self.sent / N);
        for (i, (own, word)) in self.known.as_chunks_mut::<N>().0.iter_mut().zip(words).enumerate() {
            if *own != word || i >= sent {
                *own = word;
                note(&mut self.changed, i * N..(i + 1) * N);
            }
        }
        self.send(device)?;
        self.sent = self.sent.max(count * N);
        Ok(())
    }

    /// Sets the first rows of the array, each padded with `blank` to `width` words; later rows keep their contents. Returns the
    /// number of words that were compared: the cost depends on the lengths of the rows now and before, because padding that
    /// stays is not compared. An array that is set by rows must not be set in another way, and always with the same width and
    /// blank.
    ///
    /// # Errors
    /// [`DeviceError::Outside`] for more rows than fit, or a longer one; the error of a copy.
    pub fn set_rows<'a>(
        &mut self,
        device: &dyn Device,
        width: usize,
        blank: i32,
        rows: impl ExactSizeIterator<Item = &'a [i32]>,
    ) -> Result<usize, DeviceError> {
        const N: usize = size_of::<i32>();
        let mut compared = 0;
        inside(0, rows.len() * width * N, self.known.len())?;
        for (i, row) in rows.enumerate() {
            inside(0, row.len(), width)?;
            let known = self.lens.get(i).copied();
            // A row that was never sent is sent whole.
            let stretch = known.map_or(width, |known| known.max(row.len()));
            compared += stretch;
            let words = row.iter().chain(std::iter::repeat(&blank)).map(|word| word.to_ne_bytes());
            let own = &mut self.known.as_chunks_mut::<N>().0[i * width..][..stretch];
            for (j, (own, word)) in own.iter_mut().zip(words).enumerate() {
                if *own != word || known.is_none() {
                    *own = word;
                    let at = (i * width + j) * N;
                    note(&mut self.changed, at..at + N);
                }
            }
            match self.lens.get_mut(i) {
                Some(len) => *len = row.len(),
                None => self.lens.push(row.len()),
            }
        }
        self.send(device)?;
        Ok(compared)
    }

    fn send(&mut self, device: &dyn Device) -> Result<(), DeviceError> {
        let outcome = self.copy_changes(device);
        self.changed.clear();
        if outcome.is_err() {
            // It is unknown what failed copies have changed, so everything is sent again.
            self.sent = 0;
            self.lens.clear();
        }
        outcome
    }

    fn copy_changes(&mut self, device: &dyn Device) -> Result<(), DeviceError> {
        if self.changed.is_empty() {
            return Ok(());
        }
        let stage = &mut self.stages[self.next];
        self.next = 1 - self.next;
        if matches!(stage.host::<u8>(), Err(DeviceError::InFlight)) {
            // Only if an array is set more than twice without a wait for a step.
            device.synchronize()?;
        }
        let host = stage.host_mut::<u8>()?;
        for range in &self.changed {
            host[range.clone()].copy_from_slice(&self.known[range.clone()]);
        }
        for range in &self.changed {
            device.upload_async(Queue::Compute, stage, range.start, &mut self.device, range.start, range.len())?;
        }
        Ok(())
    }
}

/// Adds a range behind the earlier ones.
fn note(changed: &mut Vec<Range<usize>>, bytes: Range<usize>) {
    match changed.last_mut() {
        Some(last) if bytes.start < last.end + GAP => last.end = bytes.end,
        _ => changed.push(bytes),
    }
}
