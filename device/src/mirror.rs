//! An array that the host writes and kernels read: a device buffer and its page-locked twins.
//!
//! Only what has changed goes to the device, in a few stretches, in order with the launches, and nobody waits for it. A step
//! that differs little from the one before copies little. There are two twins in turn, so that one is written while the
//! copies of the other, for a step that still runs, may be under way.

use std::ops::Range;

use crate::memory::inside;
use crate::{Buffer, Device, DeviceError, Pinned, Queue};

/// Changes that are nearer to each other go to the device together: to copy so many bytes that it has takes less than to
/// order another copy (some microseconds).
const GAP: usize = 16 * 1024;

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
    /// Of [`Mirror::set_rows`]: words of each row that the device has before the blanks.
    lens: Vec<usize>,
    /// Bytes of `known` that the device does not have yet; reused.
    changed: Vec<Range<usize>>,
}

impl Mirror {
    /// Room for so many bytes on both sides.
    ///
    /// # Errors
    /// There is no such room.
    pub fn new(device: &dyn Device, bytes: usize) -> Result<Mirror, DeviceError> {
        Ok(Mirror {
            twins: [device.pinned(bytes)?, device.pinned(bytes)?],
            next: 0,
            device: device.alloc(bytes)?,
            known: vec![0; bytes],
            sent: 0,
            lens: Vec::new(),
            changed: Vec::new(),
        })
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

    /// Makes these rows, each filled up with `blank` to `width` words, the first of the array; later rows are as they were.
    /// For an array that is set in no other way, and always with that width and that blank. What was blank and stays so is
    /// not compared: the cost follows the words of the rows, now and before. Returns the number of words compared.
    ///
    /// # Errors
    /// More rows than there is room for, or a wider one; those of a copy.
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
            // A row that was never sent goes as a whole.
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
            // What copies that failed have changed is not known.
            self.sent = 0;
            self.lens.clear();
        }
        outcome
    }

    fn copy_changes(&mut self, device: &dyn Device) -> Result<(), DeviceError> {
        if self.changed.is_empty() {
            return Ok(());
        }
        let twin = &mut self.twins[self.next];
        self.next = 1 - self.next;
        if matches!(twin.host::<u8>(), Err(DeviceError::InFlight)) {
            // Only where an array is set more than twice while nobody waits for a step.
            device.synchronize()?;
        }
        let host = twin.host_mut::<u8>()?;
        for range in &self.changed {
            host[range.clone()].copy_from_slice(&self.known[range.clone()]);
        }
        for range in &self.changed {
            device.upload_async(Queue::Compute, twin, range.start, &mut self.device, range.start, range.len())?;
        }
        Ok(())
    }
}

/// Adds bytes behind those noted before.
fn note(changed: &mut Vec<Range<usize>>, bytes: Range<usize>) {
    match changed.last_mut() {
        Some(last) if bytes.start < last.end + GAP => last.end = bytes.end,
        _ => changed.push(bytes),
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
    fn changes_far_from_each_other_go_without_what_lies_between() {
        let device = crate::open("cpu", Some(1)).unwrap();
        let words = |changed: &[usize]| {
            let mut words = vec![0u32; 4 * GAP];
            changed.iter().for_each(|&i| words[i] = 7);
            words
        };
        let mut mirror = Mirror::new(&*device, 16 * GAP).unwrap();
        mirror.set(&*device, words(&[]).iter().map(|word| word.to_ne_bytes())).unwrap();
        // What the device alone knows between two changes shows whether they went together.
        device.upload(&mut mirror.device, 2 * GAP, &[9]).unwrap();
        mirror.set(&*device, words(&[1, 2, 4 * GAP - 1]).iter().map(|word| word.to_ne_bytes())).unwrap();
        let mut found = vec![0; 16 * GAP];
        device.download(mirror.buffer(), 0, &mut found).unwrap();
        let mut want: Vec<u8> = words(&[1, 2, 4 * GAP - 1]).iter().flat_map(|word| word.to_ne_bytes()).collect();
        want[2 * GAP] = 9;
        assert!(found == want);
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
