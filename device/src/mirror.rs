//! An array that the host writes and kernels read: a device buffer and its page-locked twin.
//!
//! Only the stretch from the first word that has changed to the last goes to the device, in order with the launches, and
//! nobody waits for it. A step that differs little from the one before copies little.

use crate::memory::inside;
use crate::{Buffer, Device, DeviceError, Pinned, Queue};

/// See the module.
pub struct Mirror {
    host: Pinned,
    device: Buffer,
    /// Bytes that the device has, from the start.
    sent: usize,
}

impl Mirror {
    /// Room for so many bytes on both sides.
    ///
    /// # Errors
    /// There is no such room.
    pub fn new(device: &dyn Device, bytes: usize) -> Result<Mirror, DeviceError> {
        Ok(Mirror { host: device.pinned(bytes)?, device: device.alloc(bytes)?, sent: 0 })
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
        inside(0, words.len() * N, self.host.len_bytes())?;
        if matches!(self.host.host::<u8>(), Err(DeviceError::InFlight)) {
            // Only after a step that nobody waited for, because it failed.
            device.synchronize()?;
        }
        let host = self.host.host_mut::<[u8; N]>()?;
        let (count, known) = (words.len(), self.sent / N);
        let mut changed: Option<(usize, usize)> = None;
        for (i, (own, word)) in host.iter_mut().zip(words).enumerate() {
            if *own != word || i >= known {
                *own = word;
                changed = Some((changed.map_or(i, |range| range.0), i));
            }
        }
        if let Some((first, last)) = changed {
            let (at, bytes) = (first * N, (last + 1 - first) * N);
            device.upload_async(Queue::Compute, &self.host, at, &mut self.device, at, bytes)?;
            self.sent = self.sent.max(count * N);
        }
        Ok(())
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
