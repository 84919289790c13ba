//! An array that the host writes and kernels read: a device buffer and its page-locked twins.
//!
//! Only the stretch from the first word that has changed to the last goes to the device, in order with the launches, and
//! nobody waits for it. A step that differs little from the one before copies little. There are two twins in turn, so that
//! one is written while the copy of the other, for a step that still runs, may be under way.

use std::ops::Range;

use crate::memory::inside;
use crate::{Buffer, Device, DeviceError, Pinned, Queue};

/// See the module.
pub struct Mirror {
    twins: [Pinned; 2],
    /// The twin to be used next.
    next: usize,
    device: Buffer,
    /// What was sent last to each byte.
    known: Vec<u8>,
    /// Bytes of it that are true, from the start.
    sent: usize,
}

impl Mirror {
    /// Room for so many bytes on both sides.
    ///
    /// # Errors
    /// There is no such room.
    pub fn new(device: &dyn Device, bytes: usize) -> Result<Mirror, DeviceError> {
        let twins = [device.pinned(bytes)?, device.pinned(bytes)?];
        Ok(Mirror { twins, next: 0, device: device.alloc(bytes)?, known: vec![0; bytes], sent: 0 })
    }

    /// What kernels read.
    pub fn buffer(&self) -> &Buffer {
        &self.device
    }

    /// Makes these words, of one size always, the first of the array. What stands behind them is as it was.
    ///
    /// # Errors
    /// More words than there is room for; those of a copy.
    pub fn set<const N: usize>(
        &mut self,
        device: &dyn Device,
        words: impl ExactSizeIterator<Item = [u8; N]>,
    ) -> Result<(), DeviceError> {
        inside(0, words.len() * N, self.known.len())?;
        let (count, sent) = (words.len(), self.sent / N);
        let mut changed: Option<(usize, usize)> = None;
        for (i, (own, word)) in self.known.as_chunks_mut::<N>().0.iter_mut().zip(words).enumerate() {
            if *own != word || i >= sent {
                *own = word;
                changed = Some((changed.map_or(i, |range| range.0), i));
            }
        }
        let Some((first, last)) = changed else { return Ok(()) };
        let outcome = self.send(device, first * N..(last + 1) * N);
        // What a copy that failed has changed is not known.
        self.sent = if outcome.is_ok() { self.sent.max(count * N) } else { 0 };
        outcome
    }

    fn send(&mut self, device: &dyn Device, range: Range<usize>) -> Result<(), DeviceError> {
        let twin = &mut self.twins[self.next];
        if matches!(twin.host::<u8>(), Err(DeviceError::InFlight)) {
            // Only where an array is set more than twice while nobody waits for a step.
            device.synchronize()?;
        }
        twin.host_mut::<u8>()?[range.clone()].copy_from_slice(&self.known[range.clone()]);
        self.next = 1 - self.next;
        device.upload_async(Queue::Compute, twin, range.start, &mut self.device, range.start, range.len())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_device_has_what_was_set_last_whatever_was_sent_before() {
        let device = crate::open("cpu", Some(1)).unwrap();
        let mut mirror = Mirror::new(&*device, 16).unwrap();
        let mut want = [0u32; 4];
        for words in [&[7, 8, 9][..], &[7, 1, 9], &[7, 1, 9], &[], &[5], &[5, 1, 9, 0]] {
            mirror.set(&*device, words.iter().map(|word| u32::to_ne_bytes(*word))).unwrap();
            want[..words.len()].copy_from_slice(words);
            let mut found = [0; 16];
            device.download(mirror.buffer(), 0, &mut found).unwrap();
            let found: Vec<u32> = found.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect();
            assert_eq!(found, want);
        }
        assert!(mirror.set(&*device, [0u32; 5].iter().map(|word| word.to_ne_bytes())).is_err());
    }
}
