//! Bounded size, time to live, and commits that many share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use store::{Change, Kind, Limits, NewRecord, Page, Store, StoreError};

use crate::common::{Disk, clock, delete, insert, open, owner, part, update};

fn limits(max_bytes: u64) -> Limits {
    Limits { max_bytes, ttl: Duration::from_secs(100) }
}

fn reserving(id: &str, reserved: u64) -> Change {
    let record =
        NewRecord { kind: Kind::Response, owner: owner(1), is_open: true, reserved, ttl: None, body: Vec::new() };
    Change::Insert { id: id.to_string(), record }
}

#[test]
fn a_full_store_drops_the_oldest_ended_responses_and_then_refuses() {
    let store = Store::in_memory(limits(200_000)).unwrap();
    let body = vec![1; 20_000];
    store.apply_blocking(vec![insert("file", Kind::File, false, &body)]).unwrap();
    store.apply_blocking(vec![insert("open", Kind::Response, true, &body)]).unwrap();
    for i in 0..12 {
        store.apply_blocking(vec![insert(&format!("r{i}"), Kind::Response, false, &body)]).unwrap();
    }
    let kept: Vec<bool> = (0..12).map(|i| store.get(&format!("r{i}")).unwrap().is_some()).collect();
    let first = kept.iter().position(|kept| *kept).unwrap();
    assert!(first > 3 && kept[first..].iter().all(|kept| *kept), "{kept:?}");
    assert_eq!(store.stats().evicted, first as u64);
    assert!(store.stats().bytes <= 200_000);
    assert!(store.get("file").unwrap().is_some() && store.get("open").unwrap().is_some());
    assert!(store.was_evicted(store.now()) && !store.was_evicted(store.now() + 1));
    // Files are not dropped for others.
    let mut refused = None;
    for i in 0..12 {
        refused = refused.or(store.apply_blocking(vec![insert(&format!("f{i}"), Kind::File, false, &body)]).err());
    }
    assert!(matches!(refused, Some(StoreError::Full { most: 200_000, .. })), "{refused:?}");
    // What can never fit drops nothing.
    let before = store.stats();
    assert!(store.apply_blocking(vec![insert("huge", Kind::File, false, &vec![0; 300_000])]).is_err());
    assert_eq!(store.stats().evicted, before.evicted);
}

#[test]
fn unfinished_work_has_the_room_that_it_reserved() {
    let store = Store::in_memory(limits(300_000)).unwrap();
    store.apply_blocking(vec![reserving("work", 150_000)]).unwrap();
    let full = (0..100)
        .find_map(|i| store.apply_blocking(vec![insert(&format!("f{i}"), Kind::File, false, &[0; 9000])]).err());
    assert!(matches!(full, Some(StoreError::Full { .. })));
    for number in 0..8 {
        store.apply_blocking(vec![part("work", number, &[1; 9000])]).unwrap();
    }
    store.apply_blocking(vec![part("work", 8, &[1; 100]), update("work", &[2; 9000], false)]).unwrap();
    assert_eq!(store.stats().reserved, 0);
    assert!(store.stats().bytes <= 300_000);
}

#[test]
fn records_end_with_their_time_unless_their_work_is_unfinished() {
    let now = Arc::new(AtomicU64::new(1000));
    let disk = Disk::default();
    let store = Store::with(disk.opener(), limits(1 << 20), clock(&now)).unwrap();
    let short = NewRecord {
        kind: Kind::File,
        owner: owner(1),
        is_open: false,
        reserved: 0,
        ttl: Some(Duration::from_secs(10)),
        body: Vec::new(),
    };
    store
        .apply_blocking(vec![
            Change::Insert { id: "short".into(), record: short },
            insert("long", Kind::File, false, b""),
            insert("open", Kind::Batch, true, b""),
        ])
        .unwrap();
    let sweep = || tokio_less(store.sweep()).unwrap();
    let other = Change::Expire { id: "short".into(), after: Duration::from_secs(10) };
    store.apply_blocking(vec![Change::Expire { id: "short".into(), after: Duration::from_secs(5) }, other]).unwrap();
    now.store(1009, Ordering::Relaxed);
    assert!(!sweep() && store.get("short").unwrap().is_some());
    now.store(1010, Ordering::Relaxed);
    assert!(store.get("short").unwrap().is_none(), "over its time before it is removed");
    assert!(!sweep());
    assert_eq!(store.stats().records, [0, 0, 1, 1]);
    now.store(5000, Ordering::Relaxed);
    assert!(!sweep());
    assert_eq!(store.stats().records, [0, 0, 0, 1]);
    store.apply_blocking(vec![update("open", b"", false)]).unwrap();
    sweep();
    assert_eq!(store.stats().records, [0; 4]);
}

#[test]
fn a_clock_that_is_moved_loses_no_unfinished_work_and_brings_nothing_back() {
    let (now, disk) = (Arc::new(AtomicU64::new(1000)), Disk::default());
    let open_at = |time: u64| {
        now.store(time, Ordering::Relaxed);
        Store::with(disk.opener(), limits(1 << 20), clock(&now)).unwrap()
    };
    let has = |store: &Store, id: &str| store.get(id).unwrap().is_some();
    let listed = |store: &Store| -> Vec<String> {
        let page = Page { after: None, limit: 10, newest_first: false, keep: &|_| true };
        let (found, _) = store.list(Kind::File, &owner(1), &page).unwrap();
        found.into_iter().map(|(id, _)| id).collect()
    };
    let store = open_at(1000);
    store.apply_blocking(["a", "b", "c"].map(|id| insert(id, Kind::File, false, b"")).to_vec()).unwrap();
    store.apply_blocking(vec![insert("work", Kind::Batch, true, b"")]).unwrap();
    store.close();
    // Behind the time at which they were made.
    let store = open_at(10);
    assert!(["a", "b", "c", "work"].iter().all(|id| has(&store, id)));
    store.apply_blocking(vec![insert("early", Kind::File, false, b"")]).unwrap();
    assert_eq!(listed(&store), ["a", "b", "c", "early"], "in the order in which they came");
    now.store(120, Ordering::Relaxed);
    assert_eq!(listed(&store), ["a", "b", "c"]);
    now.store(1100, Ordering::Relaxed);
    assert!(!has(&store, "a") && listed(&store).is_empty() && has(&store, "work"));
    // What was said to be over is removed before the next change, so it is not back with another clock.
    store.apply_blocking(Vec::new()).unwrap();
    assert_eq!(store.stats().records, [0, 0, 0, 1]);
    for time in [1000, 0, u64::MAX / 2] {
        now.store(time, Ordering::Relaxed);
        assert!(!has(&store, "a") && listed(&store).is_empty() && has(&store, "work"));
    }
    store.close();
    let store = open_at(1050);
    assert!(listed(&store).is_empty() && has(&store, "work"));
    store.apply_blocking(vec![update("work", b"", false)]).unwrap();
    assert!(has(&store, "work"));
}

/// Waits for a future that another thread makes ready.
fn tokio_less<T>(future: impl Future<Output = T>) -> T {
    struct Wake(std::thread::Thread);
    impl std::task::Wake for Wake {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Wake(std::thread::current())).into();
    let (mut future, mut context) = (std::pin::pin!(future), std::task::Context::from_waker(&waker));
    loop {
        if let std::task::Poll::Ready(done) = future.as_mut().poll(&mut context) {
            return done;
        }
        std::thread::park();
    }
}

#[test]
fn the_file_stays_within_twice_the_limit() {
    let disk = Disk::default();
    let most = 2 << 20;
    let store = open(&disk, limits(most)).unwrap();
    for i in 0..400_usize {
        let id = format!("r{i}");
        let list =
            vec![insert(&id, Kind::Response, false, &vec![1; i * 97 % 30_000]), part(&id, 0, &vec![2; i * 31 % 9000])];
        store.apply_blocking(list).unwrap();
        if i % 7 == 0 {
            store.apply_blocking(vec![delete(&id)]).unwrap();
        }
        disk.take_log();
    }
    assert!(store.stats().evicted > 100 && store.stats().bytes > most / 2);
    assert!(disk.bytes().len() as u64 <= 2 * most + (1 << 20), "{} bytes", disk.bytes().len());
}

#[test]
fn changes_that_wait_together_share_a_commit() {
    let disk = Disk::default();
    let store = open(&disk, limits(16 << 20)).unwrap();
    let before = store.stats().commits;
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let store = &store;
            scope.spawn(move || {
                let waiting: Vec<_> = (0..16)
                    .map(|i| store.apply(vec![insert(&format!("{thread}-{i}"), Kind::File, false, b"x")]))
                    .collect();
                waiting.into_iter().for_each(|change| tokio_less(change).unwrap());
            });
        }
    });
    let stats = store.stats();
    assert_eq!((stats.changes, stats.records[2]), (128, 128));
    assert!(stats.commits - before < 128, "{} commits", stats.commits);
}
