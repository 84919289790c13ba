//! Arrays that the host writes and kernels read.

use std::sync::Mutex;

use device::{Device, DeviceError, Mirror};

use super::support::hooked::{Hooked, Hooks, Transfer};

/// Records the sizes of uploads.
#[derive(Default)]
struct Uploads(Mutex<Vec<usize>>);

impl Hooks for Uploads {
    fn before_transfer(&self, _: &dyn Device, transfer: &Transfer) -> Result<(), DeviceError> {
        self.0.lock().unwrap().push(transfer.bytes);
        Ok(())
    }
}

#[test]
fn the_device_has_what_was_set_last() {
    let device = device::open("cpu", Some(1)).unwrap();
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
fn near_changes_are_copied_together_and_far_changes_without_the_words_between() {
    let device = Hooked { device: device::open("cpu", Some(1)).unwrap(), hooks: Uploads::default() };
    // Far more than the 16 KiB that are copied along between two changes.
    let mut words = vec![0u32; 1 << 16];
    let mut mirror = Mirror::new(&device, 4 * words.len()).unwrap();
    let mut set = |words: &[u32]| mirror.set(&device, words.iter().map(|word| word.to_ne_bytes())).unwrap();
    set(&words);
    for i in [1, 2, 100, 50_000, (1 << 16) - 1] {
        words[i] = 7;
    }
    set(&words);
    set(&words);
    assert_eq!(*device.hooks.0.lock().unwrap(), [4 << 16, 4 * 100, 4, 4]);
    let mut found = vec![0; 4 * words.len()];
    device::Device::download(&device, mirror.buffer(), 0, &mut found).unwrap();
    assert!(found == words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>());
}

#[test]
fn rows_are_padded_and_later_rows_keep_their_contents() {
    let device = device::open("cpu", Some(1)).unwrap();
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
