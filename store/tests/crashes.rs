//! The writes of a store are cut at every place, and what a disk had not been told to keep is lost in any order: what was
//! acknowledged is there, and a list of changes is there whole or not at all.

use proptest::prelude::*;
use store::{Change, Kind, Limits, Store};

use crate::common::{Disk, Done, delete, insert, open, part, play, update};

/// The lists of a run. Number `k` leaves the counter at `k`, in a record and in a part.
fn lists() -> Vec<Vec<Change>> {
    let mut lists = vec![vec![insert("counter", Kind::Response, true, b"0"), part("counter", 0, b"0")]];
    for k in 1..24_u64 {
        let text = k.to_string();
        // Some are longer than a page.
        let filler = text.repeat(if k % 5 == 0 { 3000 } else { 10 });
        let mut list = vec![update("counter", text.as_bytes(), true), part("counter", 0, text.as_bytes())];
        list.push(insert(&format!("r{k}"), Kind::File, false, filler.as_bytes()));
        if k > 6 {
            list.push(delete(&format!("r{}", k - 5)));
        }
        lists.push(list);
    }
    lists
}

/// The number of the last list, after checking that the store is what it was then.
fn last(store: &Store) -> Option<u64> {
    let counter = store.get("counter").unwrap();
    let parts = store.parts("counter", 0, 0, usize::MAX).unwrap();
    let Some(counter) = counter else {
        assert!(parts.is_empty() && store.stats().bytes == 0);
        return None;
    };
    assert_eq!(parts, [(0, counter.body.clone())]);
    let k: u64 = String::from_utf8(counter.body).unwrap().parse().unwrap();
    let alive = |j: u64| (1..=k).contains(&j) && (k < 7 || j > k - 5 || j < 2);
    for j in 1..24 {
        let found = store.get(&format!("r{j}")).unwrap().map(|record| record.body);
        let text = j.to_string().repeat(if j % 5 == 0 { 3000 } else { 10 });
        assert_eq!(found, alive(j).then(|| text.into_bytes()), "r{j} after list {k}");
    }
    assert_eq!(store.stats().records[2], (1..24).filter(|&j| alive(j)).count() as u64);
    Some(k)
}

/// What was done to the disk, and for each list how much of it was done when it was acknowledged.
fn run() -> (Vec<Done>, Vec<usize>) {
    let disk = Disk::default();
    let store = open(&disk, Limits::default()).unwrap();
    let (mut log, mut acknowledged) = (disk.take_log(), Vec::new());
    for list in lists() {
        store.apply_blocking(list).unwrap();
        log.extend(disk.take_log());
        acknowledged.push(log.len());
    }
    store.close();
    log.extend(disk.take_log());
    (log, acknowledged)
}

/// Checks a disk on which the first `done` operations were done, and perhaps some more.
fn check(bytes: Vec<u8>, done: usize, acknowledged: &[usize]) {
    let least = acknowledged.iter().filter(|&&at| at <= done).count() as u64;
    let disk = Disk::of(bytes);
    let store = match open(&disk, Limits::default()) {
        Ok(store) => store,
        Err(error) => panic!("after {done} operations, {least} lists: {error}"),
    };
    let found = last(&store).map_or(0, |k| k + 1);
    assert!(found >= least && found <= least + 1, "found {found} lists, acknowledged were {least}");
    // It goes on.
    store.apply_blocking(vec![insert("next", Kind::Batch, false, b"x")]).unwrap();
    store.close();
    let again = open(&disk, Limits::default()).unwrap();
    assert!(again.get("next").unwrap().is_some() && !again.was_repaired());
}

#[test]
fn a_store_whose_writes_are_cut_at_any_place_has_what_was_acknowledged() {
    let (log, acknowledged) = run();
    let mut bytes = Vec::new();
    for (done, operation) in log.iter().enumerate() {
        check(bytes.clone(), done, &acknowledged);
        if let Done::Write(at, data) = operation {
            // A torn write: its first bytes.
            for cut in [1, data.len() / 3, data.len() - 1] {
                let mut torn = bytes.clone();
                play(&mut torn, &Done::Write(*at, data[..cut].to_vec()));
                check(torn, done, &acknowledged);
            }
        }
        play(&mut bytes, operation);
    }
    check(bytes, log.len(), &acknowledged);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Writes since the last synchronisation reach the disk in any order, whole, in part or not at all.
    #[test]
    fn a_disk_that_loses_what_it_need_not_keep_loses_nothing_acknowledged(cut in 0.0_f64..1.0, kept in any::<u64>(), torn in any::<u16>()) {
        let (log, acknowledged) = run();
        let cut = (log.len() as f64 * cut) as usize;
        let synced = log[..cut].iter().rposition(|done| matches!(done, Done::Sync)).map_or(0, |at| at + 1);
        let mut bytes = Vec::new();
        log[..synced].iter().for_each(|done| play(&mut bytes, done));
        for (i, done) in log[synced..cut].iter().enumerate() {
            match done {
                // The length of a file is part of its metadata, which is kept in order.
                Done::SetLen(_) => play(&mut bytes, done),
                Done::Write(at, data) if kept >> (i % 64) & 1 == 1 => {
                    let part = if i as u16 % 3 == torn % 3 { usize::from(torn) % data.len() } else { data.len() };
                    play(&mut bytes, &Done::Write(*at, data[..part].to_vec()));
                }
                _ => {}
            }
        }
        check(bytes, synced, &acknowledged);
    }
}
