//! An array that the host writes and kernels read: a device buffer, and what the host knows of it.
//!
//! Setting an array compares it with what is known and notes what changed; nothing reaches the device. [`Upload`](crate::Upload)
//! then sends the changes of all arrays of a step in one copy. [`Mirror::send`] sends those of one array and waits for them.
//!
//! ```text
//! known == contents of the device, except where `changed` says so
//! ```

use std::ops::Range;

use device::{Buffer, Device, DeviceError};

use crate::error::{KernelError, at_least};

/// Changes with a smaller gap are sent together: so many unchanged bytes cost less than another range.
const GAP: usize = 64;

/// Size of the words that an upload moves, and so of what all ranges are multiples of.
pub(crate) const WORD: usize = size_of::<u32>();

/// A device array that the host updates step by step; only changes are sent.
pub struct Mirror {
    pub(crate) buffer: Buffer,
    /// Contents that the device has once the changes are sent.
    pub(crate) known: Vec<u8>,
    /// Length of the prefix of `known` that was ever set.
    set: usize,
    /// For [`Mirror::set_rows`]: length of each row, without the blanks.
    lens: Vec<usize>,
    /// Byte ranges of `known` that the device does not have yet; kept for its memory.
    pub(crate) changed: Vec<Range<usize>>,
}

impl Mirror {
    /// Allocates an array of `bytes` bytes on the device and on the host.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &dyn Device, bytes: usize) -> Result<Mirror, DeviceError> {
        // The words of an array are counted in 32 bits.
        if bytes / WORD > u32::MAX as usize {
            return Err(DeviceError::OutOfMemory { device: device.name(), wanted: bytes });
        }
        let buffer = device.alloc(bytes)?;
        Ok(Mirror { buffer, known: vec![0; bytes], set: 0, lens: Vec::new(), changed: Vec::new() })
    }

    /// Returns the device buffer, for kernels.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Sets the first words of the array; the rest keeps its contents. All calls must use the same word size, a multiple of 4
    /// bytes.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for more words than fit; nothing has changed.
    pub fn set<const N: usize>(&mut self, words: impl ExactSizeIterator<Item = [u8; N]>) -> Result<(), KernelError> {
        const { assert!(N.is_multiple_of(WORD)) };
        at_least("words of a device array", self.known.len() / N, words.len())?;
        let (count, set) = (words.len(), self.set / N);
        for (i, (own, word)) in self.known.as_chunks_mut::<N>().0.iter_mut().zip(words).enumerate() {
            if *own != word || i >= set {
                *own = word;
                note(&mut self.changed, i * N..(i + 1) * N);
            }
        }
        self.set = self.set.max(count * N);
        Ok(())
    }

    /// Sets the first rows of the array, each padded with `blank` to `width` words; later rows keep their contents. Returns the
    /// number of words that were compared: the cost depends on the lengths of the rows now and before, because padding that
    /// stays is not compared. An array that is set by rows must not be set in another way, and always with the same width and
    /// blank.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for more rows than fit, or a longer one; the rows before it are set.
    pub fn set_rows<'a>(
        &mut self,
        width: usize,
        blank: i32,
        rows: impl ExactSizeIterator<Item = &'a [i32]>,
    ) -> Result<usize, KernelError> {
        const N: usize = size_of::<i32>();
        let mut compared = 0;
        at_least("words of a device array", self.known.len() / N, rows.len() * width)?;
        for (i, row) in rows.enumerate() {
            at_least("words of a row of a device array", width, row.len())?;
            let known = self.lens.get(i).copied();
            // A row that was never set is sent whole.
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
        Ok(compared)
    }

    /// Sends the changes, each range in a copy of its own, and waits for them. For arrays that are not part of a step.
    ///
    /// # Errors
    /// The error of a copy; everything is sent again.
    pub fn send(&mut self, device: &dyn Device) -> Result<(), DeviceError> {
        let (buffer, known) = (&mut self.buffer, &self.known);
        let outcome =
            self.changed.iter().try_for_each(|range| device.upload(buffer, range.start, &known[range.clone()]));
        self.changed.clear();
        outcome.inspect_err(|_| self.forget())
    }

    /// Notes that the contents of the device are unknown, after a copy failed.
    pub(crate) fn forget(&mut self) {
        self.set = 0;
        self.lens.clear();
    }
}

/// Adds a range, which is usually behind the earlier ones.
fn note(changed: &mut Vec<Range<usize>>, bytes: Range<usize>) {
    match changed.last_mut() {
        Some(last) if bytes.start >= last.start && bytes.start < last.end + GAP => last.end = bytes.end.max(last.end),
        _ => changed.push(bytes),
    }
}
