//! A disk that fails, and one that returns other bytes than were written.

use proptest::prelude::*;
use store::{Kind, Limits, StoreError};

use crate::common::{Disk, delete, insert, open, part};

#[test]
fn a_disk_that_is_full_refuses_changes_and_a_disk_with_space_again_takes_them() {
    for operations in 0..24 {
        let disk = Disk::default();
        let store = open(&disk, Limits::default()).unwrap();
        store.apply_blocking(vec![insert("before", Kind::File, false, &[7; 10_000])]).unwrap();
        disk.fail_after(Some(operations));
        let mut failed = None;
        for i in 0..8 {
            let id = format!("during{i}");
            if let Err(error) =
                store.apply_blocking(vec![insert(&id, Kind::File, false, &[8; 9_000]), part(&id, 3, b"p")])
            {
                assert!(matches!(error, StoreError::Io(_)), "{error}");
                assert!(!error.to_string().contains('\n'));
                failed = failed.or(Some(i));
            } else {
                assert!(failed.is_none(), "nothing is taken while the disk fails");
            }
        }
        assert!(failed.is_some() && store.stats().failures > 0);
        disk.fail_after(None);
        if operations % 2 == 0 {
            // A read is enough to open it again.
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
            while store.get("before").is_err() {
                assert!(std::time::Instant::now() < deadline);
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        store.apply_blocking(vec![insert("after", Kind::File, false, b"9")]).unwrap();
        assert_eq!(store.get("before").unwrap().unwrap().body, [7; 10_000]);
        for i in 0..8 {
            let id = format!("during{i}");
            let found = store.get(&id).unwrap();
            assert_eq!(found.is_some(), !store.parts(&id, 0, 0, 1).unwrap().is_empty(), "all of a list or nothing");
            // Acknowledged ones are there. The first that failed may have reached the disk.
            assert!(found.is_some() || failed.is_some_and(|first| i >= first));
            assert!(found.is_none() || failed.is_some_and(|first| i <= first));
        }
        store.close();
        let again = open(&disk, Limits::default()).unwrap();
        assert!(again.get("after").unwrap().is_some());
    }
}

#[test]
fn a_store_does_not_open_on_a_disk_that_fails() {
    let disk = Disk::default();
    disk.fail_after(Some(0));
    let error = open(&disk, Limits::default()).map(drop).unwrap_err();
    assert!(matches!(error, StoreError::Io(_)) && error.to_string().contains("no space left"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Whatever byte of the file changes, no wrong contents are read: an error says so, or the change does not matter.
    #[test]
    fn a_damaged_file_is_refused_or_healed(place in 0.0_f64..1.0, flip in 1..=255_u8, length in 1..64_usize) {
        let disk = Disk::default();
        let store = open(&disk, Limits::default()).unwrap();
        for i in 0..20_u8 {
            let id = format!("r{i}");
            store.apply_blocking(vec![insert(&id, Kind::File, i % 3 == 0, &vec![i; 40 * usize::from(i)]), part(&id, 1, &[i; 5000])]).unwrap();
        }
        store.close();
        let mut bytes = disk.bytes();
        let at = (bytes.len() as f64 * place) as usize;
        bytes.iter_mut().skip(at).take(length).for_each(|byte| *byte ^= flip);
        match open(&Disk::of(bytes), Limits::default()) {
            Err(error) => prop_assert!(!error.to_string().contains('\n')),
            Ok(store) => for i in 0..20_u8 {
                let id = format!("r{i}");
                if let Ok(record) = store.get(&id) {
                    prop_assert_eq!(record.unwrap().body, vec![i; 40 * usize::from(i)]);
                }
                if let Ok(parts) = store.parts(&id, 0, 0, usize::MAX) {
                    prop_assert_eq!(parts, [(1, vec![i; 5000])]);
                }
            }
        }
    }
}

#[test]
fn reads_do_not_wait_for_a_commit() {
    let disk = Disk::default();
    let store = open(&disk, Limits::default()).unwrap();
    store.apply_blocking(vec![insert("a", Kind::File, false, b"1"), part("a", 0, b"2")]).unwrap();
    let held = disk.hold();
    std::thread::scope(|scope| {
        let writes = scope.spawn(|| store.apply_blocking(vec![delete("a")]));
        while !disk.is_waiting() {
            std::thread::yield_now();
        }
        assert_eq!(store.get("a").unwrap().map(|record| record.body), Some(b"1".to_vec()));
        assert_eq!(store.parts("a", 0, 0, 9).unwrap(), [(0, b"2".to_vec())]);
        drop(held);
        writes.join().unwrap().unwrap();
    });
    assert_eq!(store.get("a").unwrap(), None);
}
