//! Arrays that the host sets and kernels read, against plain arrays.

use std::sync::{Arc, Mutex};

use attention_kernels::{Mirror, Upload};
use device::{Device, DeviceError, Launch};
use proptest::prelude::*;

use super::devices;
use crate::support::hooked::{Hooked, Hooks, Transfer};

/// Records the sizes of uploads and makes launches fail.
#[derive(Default)]
struct Log {
    uploads: Mutex<Vec<usize>>,
    failing: Mutex<bool>,
}

impl Hooks for Arc<Log> {
    fn before_transfer(&self, _: &dyn Device, transfer: &Transfer) -> Result<(), DeviceError> {
        assert!(transfer.upload);
        self.uploads.lock().unwrap().push(transfer.bytes);
        Ok(())
    }
    fn launch(&self, device: &dyn Device, launch: &Launch<'_>) -> Result<(), DeviceError> {
        if *self.failing.lock().unwrap() {
            return Err(DeviceError::NoGraphs("a fault that a test asked for"));
        }
        device.launch(launch)
    }
}

impl Log {
    fn take(&self) -> Vec<usize> {
        std::mem::take(&mut *self.uploads.lock().unwrap())
    }
}

fn logged(device: Arc<dyn Device>) -> (Hooked<Arc<Log>>, Arc<Log>) {
    let log = Arc::new(Log::default());
    (Hooked { device, hooks: log.clone() }, log)
}

fn devices_and_cpu() -> impl Iterator<Item = Arc<dyn Device>> {
    devices::gpus(3).into_iter().chain([device::open("cpu", Some(1)).unwrap()])
}

fn set(mirror: &mut Mirror, words: &[u32]) {
    mirror.set(words.iter().map(|word| word.to_ne_bytes())).unwrap();
}

/// Sends arrays of several pieces and of a part of one, and then single words of them.
pub fn send_all(device: &dyn Device) {
    let mut upload = Upload::new(device).unwrap();
    let mut arrays: Vec<Mirror> = [700, 5, 40].map(|words| Mirror::new(device, 4 * words).unwrap()).into();
    for last in [1, 2] {
        for array in &mut arrays {
            let mut words = vec![7; array.buffer().len_bytes() / 4];
            *words.last_mut().unwrap() = last;
            set(array, &words);
        }
        upload.send(device, &mut arrays).unwrap();
    }
}

fn contents(device: &dyn Device, mirror: &Mirror) -> Vec<u32> {
    let mut found = vec![0; mirror.buffer().len_bytes()];
    device.download(mirror.buffer(), 0, &mut found).unwrap();
    found.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect()
}

/// For some of the arrays, the words of their prefix that a step changes, with their places.
type Step = Vec<(usize, Vec<(usize, u32)>)>;

fn histories() -> impl Strategy<Value = Vec<Step>> {
    let change = (0usize..300, 1u32..5);
    // Up to 50 of 40: also more than one launch writes to.
    let array = (0usize..ARRAYS, proptest::collection::vec(change, 0..12));
    proptest::collection::vec(proptest::collection::vec(array, 0..50), 1..8)
}

const ARRAYS: usize = 40;

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn the_device_has_what_was_set_last_after_one_upload_of_all_arrays(history in histories()) {
        for device in devices_and_cpu() {
            let (device, log) = logged(device);
            let mut upload = Upload::new(&device).unwrap();
            let mut arrays: Vec<Mirror> = (0..ARRAYS).map(|_| Mirror::new(&device, 4 * 300).unwrap()).collect();
            let mut want = vec![vec![0u32; 300]; ARRAYS];
            let mut set_before = [0; ARRAYS];
            log.take();
            for step in &history {
                let before = want.clone();
                let (mut grows, mut touched) = (false, [false; ARRAYS]);
                for (array, changes) in step {
                    let mut len = 0;
                    for (at, word) in changes {
                        want[*array][*at] = *word;
                        len = len.max(at + 1);
                    }
                    grows |= len > set_before[*array];
                    set_before[*array] = set_before[*array].max(len);
                    touched[*array] = true;
                    set(&mut arrays[*array], &want[*array][..len]);
                }
                upload.send(&device, &mut arrays).unwrap();
                let uploads = log.take().len();
                if device.name() != "cpu" && touched.iter().filter(|touched| **touched).count() <= 28 {
                    prop_assert!(uploads <= 1 && (uploads == 1 || !grows && before == want));
                    prop_assert!(uploads == 0 || touched.contains(&true));
                }
                for (array, want) in arrays.iter().zip(&want) {
                    prop_assert_eq!(&contents(&device, array), want);
                }
            }
        }
    }
}

#[test]
fn near_changes_are_sent_together_and_far_changes_without_the_words_between() {
    for device in devices::gpus(0) {
        let (device, log) = logged(device);
        let mut words = vec![0u32; 1 << 15];
        let (mut mirror, mut upload) = (Mirror::new(&device, 4 << 15).unwrap(), Upload::new(&device).unwrap());
        let mut send = |words: &[u32]| {
            set(&mut mirror, words);
            upload.send(&device, [&mut mirror]).unwrap();
            assert_eq!(contents(&device, &mirror), words);
            log.take()
        };
        // The words, and 16 bytes for each piece of 1 KiB.
        assert_eq!(send(&words), [(4 << 15) + (128 << 4)]);
        for i in [1, 2, 15, 20_000, (1 << 15) - 1] {
            words[i] = 7;
        }
        assert_eq!(send(&words), [4 * (15 + 1 + 1) + 3 * 16]);
        assert!(send(&words).is_empty());
    }
}

#[test]
fn changes_beyond_the_stages_arrive_in_parts_and_the_next_steps_as_well() {
    for device in devices_and_cpu() {
        let (device, log) = logged(device);
        let (most, mut upload) = (1 << 19, Upload::new(&device).unwrap());
        let mut arrays = [0, 1].map(|_| Mirror::new(&device, 4 * most).unwrap());
        for round in 1..4u32 {
            let words: Vec<u32> = (0..most as u32).map(|i| i * round).collect();
            arrays.iter_mut().for_each(|array| set(array, &words[round as usize..]));
            upload.send(&device, &mut arrays).unwrap();
            let uploads = log.take();
            assert!(uploads.iter().all(|bytes| *bytes <= Upload::bytes()));
            assert!(device.name() == "cpu" || uploads.len() > 16, "more than all stages hold");
            let (found, want) = (contents(&device, &arrays[1]), &words[round as usize..]);
            assert!(found.starts_with(want), "round {round}");
        }
    }
}

#[test]
fn what_a_failed_launch_may_not_have_written_is_sent_again() {
    for device in devices::gpus(0) {
        let (device, log) = logged(device);
        let mut upload = Upload::new(&device).unwrap();
        let mut arrays: Vec<Mirror> = (0..ARRAYS).map(|_| Mirror::new(&device, 16).unwrap()).collect();
        let mut step = |words: [u32; 4], fails: bool| {
            *log.failing.lock().unwrap() = fails;
            arrays.iter_mut().for_each(|array| set(array, &words));
            let outcome = upload.send(&device, &mut arrays);
            assert_eq!(outcome.is_err(), fails);
            arrays.iter().map(|array| contents(&device, array)).collect::<Vec<_>>()
        };
        assert_eq!(step([1, 2, 3, 4], false), vec![[1, 2, 3, 4]; ARRAYS]);
        assert_eq!(step([1, 2, 9, 4], true), vec![[1, 2, 3, 4]; ARRAYS]);
        assert_eq!(step([1, 2, 9, 4], false), vec![[1, 2, 9, 4]; ARRAYS]);
    }
}

#[test]
fn rows_are_padded_and_later_rows_keep_their_contents() {
    for device in devices_and_cpu() {
        let (mut mirror, mut upload) = (Mirror::new(&*device, 48).unwrap(), Upload::new(&*device).unwrap());
        let mut want = [0i32; 12];
        for rows in [&[&[1, 2, 3][..], &[4]][..], &[&[1]], &[&[5, 6], &[], &[7, 8, 9, 10]], &[&[], &[4, 4]], &[]] {
            mirror.set_rows(4, -1, rows.iter().copied()).unwrap();
            upload.send(&*device, [&mut mirror]).unwrap();
            for (row, want) in rows.iter().zip(want.chunks_mut(4)) {
                want.fill(-1);
                want[..row.len()].copy_from_slice(row);
            }
            assert_eq!(contents(&*device, &mirror), want.map(|word| word as u32));
        }
        let wide: [&[i32]; 1] = [&[0; 5]];
        assert!(mirror.set_rows(4, -1, wide.into_iter()).is_err());
        let many: [&[i32]; 4] = [&[]; 4];
        assert!(mirror.set_rows(4, -1, many.into_iter()).is_err());
        assert!(mirror.set([0u32; 13].iter().map(|word| word.to_ne_bytes())).is_err());
    }
}
