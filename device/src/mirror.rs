//! An array that the host writes and kernels read: a device buffer and its page-locked twin.
//!
//! Only the stretch from the first word that has changed to the last goes to the device, in order with the launches, and
//! nobody waits for it. A step that differs little from the one before copies little.

use crate::memory::{Element, inside};
use crate::{Buffer, Device, DeviceError, Pinned, Queue};

/// See the module.
pub struct Mirror {
    host: Pinned,
    device: Buffer,
    /// Bytes that the device has, from the start.
    sent: usize,
    /// Of [`Mirror::set_rows`]: words of each row that the device has before the blanks.
    lens: Vec<usize>,
}

impl Mirror {
    /// Room for so many bytes on both sides.
    ///
    /// # Errors
    /// There is no such room.
    pub fn new(device: &dyn Device, bytes: usize) -> Result<Mirror, DeviceError> {
        Ok(Mirror { host: device.pinned(bytes)?, device: device.alloc(bytes)?, sent: 0, lens: Vec::new() })
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
        self.land(device)?;
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

    /// Makes these rows, each filled up with `blank` to `width` words, the first of the array; later rows are as they were.
    /// For an array that is set in no other way, and always with that width and that blank. What was blank and stays so is
    /// not looked at, so that the cost is that of the words before.
    ///
    /// # Errors
    /// More rows than there is room for, or a wider one; those of a copy.
    pub fn set_rows<'a, T: Element + PartialEq>(
        &mut self,
        device: &dyn Device,
        width: usize,
        blank: T,
        rows: impl ExactSizeIterator<Item = &'a [T]>,
    ) -> Result<(), DeviceError> {
        inside(0, rows.len() * width * size_of::<T>(), self.host.len_bytes())?;
        self.land(device)?;
        let host = self.host.host_mut::<T>()?;
        let mut changed: Option<(usize, usize)> = None;
        for (i, row) in rows.enumerate() {
            inside(0, row.len(), width)?;
            let known = self.lens.get(i).copied();
            // A row that was never sent goes as a whole.
            let stretch = known.map_or(width, |known| known.max(row.len()));
            let words = row.iter().copied().chain(std::iter::repeat(blank));
            for (j, (own, word)) in host[i * width..][..stretch].iter_mut().zip(words).enumerate() {
                if *own != word || known.is_none() {
                    *own = word;
                    let at = i * width + j;
                    changed = Some((changed.map_or(at, |range| range.0), at));
                }
            }
            match self.lens.get_mut(i) {
                Some(len) => *len = row.len(),
                None => self.lens.push(row.len()),
            }
        }
        if let Some((first, last)) = changed {
            let (at, bytes) = (first * size_of::<T>(), (last + 1 - first) * size_of::<T>());
            device.upload_async(Queue::Compute, &self.host, at, &mut self.device, at, bytes)?;
        }
        Ok(())
    }

    /// Waits if the last copy may still run: only after a step that nobody waited for, because it failed.
    fn land(&self, device: &dyn Device) -> Result<(), DeviceError> {
        match self.host.host::<u8>() {
            Err(DeviceError::InFlight) => device.synchronize(),
            _ => Ok(()),
        }
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

    #[test]
    fn rows_are_filled_up_and_later_ones_stay() {
        let device = crate::open("cpu", Some(1)).unwrap();
        let mut mirror = Mirror::new(&*device, 48).unwrap();
        let mut want = [0i32; 12];
        for rows in [&[&[1, 2, 3][..], &[4]][..], &[&[1]], &[&[5, 6], &[], &[7, 8, 9, 10]], &[&[], &[4, 4]], &[]] {
            mirror.set_rows(&*device, 4, -1, rows.iter().copied()).unwrap();
            for (row, want) in rows.iter().zip(want.chunks_mut(4)) {
                want.fill(-1);
                want[..row.len()].copy_from_slice(row);
            }
            let mut found = [0; 48];
            device.download(mirror.buffer(), 0, &mut found).unwrap();
            let found: Vec<i32> = found.as_chunks().0.iter().map(|word| i32::from_ne_bytes(*word)).collect();
            assert_eq!(found, want);
        }
        let wide: [&[i32]; 1] = [&[0; 5]];
        assert!(mirror.set_rows(&*device, 4, -1, wide.into_iter()).is_err());
        let many: [&[i32]; 4] = [&[]; 4];
        assert!(mirror.set_rows(&*device, 4, -1, many.into_iter()).is_err());
    }
}
