//! Slow readers and full queues.

use std::time::{Duration, Instant};

use kvevents::{Change, KvEventsConfig};
use testkit::kv_events::Router;

use super::{config, dealer, settle, start, stored, subscriber, wait};

/// A step that takes the publisher a while.
fn long_step(at: u64) -> Vec<Change> {
    let hashes: Vec<u64> = (1 + at * 30_000..=(at + 1) * 30_000).collect();
    vec![stored(None, &hashes)]
}

#[test]
fn b36_a_full_queue_drops_steps_and_subscribers_get_a_snapshot_before_anything_else() {
    let mut publisher = start(&KvEventsConfig { max_queue_size: 2, ..config() });
    let mut subscriber = subscriber(&publisher, "");
    let mut known: Vec<u64> = Vec::new();
    for at in 0..8 {
        let step = long_step(at);
        let Change::Stored { hashes, .. } = &step[0] else { panic!("expected blocks") };
        known.extend(hashes.iter().map(|hash| hash.get()));
        publisher.publish(step, || vec![stored(None, &known)]);
    }
    assert!(publisher.stats().dropped_steps > 0, "the queue never overflowed: the test shows nothing");
    // Subscribers learn that their index is void although no step follows.
    wait(&publisher, |stats| stats.processed == stats.handed);
    let mut router = Router::default();
    let mut expected = 0;
    while router.cleared == 0 {
        let (_, seq, payload) = subscriber.message().unwrap();
        assert_eq!(seq, expected, "a gap");
        expected += 1;
        router.apply(&payload).unwrap();
    }
    settle(&publisher);
    // A step without changes of its own is enough for the snapshot.
    publisher.publish(Vec::new(), || vec![stored(None, &known)]);
    settle(&publisher);
    while router.known.len() < known.len() {
        let (_, seq, payload) = subscriber.message().unwrap();
        assert_eq!(seq, expected, "a gap");
        expected += 1;
        router.apply(&payload).unwrap();
    }
    known.sort_unstable();
    assert!(router.known.keys().copied().eq(known));
    publisher.publish(vec![stored(None, &[u64::MAX])], || panic!("one snapshot is enough"));
    assert_eq!(subscriber.message().unwrap().1, expected);
}

#[test]
fn b36_a_subscriber_that_never_reads_delays_no_step_and_takes_bounded_memory() {
    let mut publisher = start(&KvEventsConfig { hwm: 10, buffer_steps: 10, max_queue_size: 1000, ..config() });
    let _deaf = subscriber(&publisher, "");
    let before = resident();
    let mut slowest = Duration::ZERO;
    // Each step is about 300 KB: far more than the socket and the queues hold.
    for at in 0..100 {
        let hashes: Vec<u64> = (1..=20_000).map(|block| block + (at << 32)).collect();
        let step = vec![Change::Cleared, stored(None, &hashes)];
        let start = Instant::now();
        publisher.publish(step, || panic!("nothing was lost"));
        slowest = slowest.max(start.elapsed());
        settle(&publisher);
    }
    let stats = publisher.stats();
    assert!(stats.dropped_messages > 30 && stats.dropped_steps == 0, "{stats:?}");
    assert!(slowest < Duration::from_millis(200), "a step was delayed by {slowest:?}");
    if let (Some(before), Some(after)) = (before, resident()) {
        assert!(after < before + (60 << 20), "memory grew from {before} to {after} bytes");
    }
    // The dropped messages can be had by replay, or a snapshot in their place.
    let mut router = Router::default();
    dealer(&publisher).replay(0).unwrap().iter().for_each(|(_, payload)| router.apply(payload).unwrap());
    assert_eq!(router.known.len(), 20_000);
}

/// Resident memory of this process in bytes, where the system tells.
fn resident() -> Option<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(pages.split(' ').nth(1)?.parse::<u64>().ok()? * 4096)
}

#[test]
fn b36_a_gap_after_dropped_messages_shows_in_the_numbers_and_replay_closes_it() {
    let mut publisher = start(&KvEventsConfig { hwm: 2, ..config() });
    let mut subscriber = subscriber(&publisher, "");
    for at in 0..60 {
        let hashes: Vec<u64> = (1..=60_000).map(|block| block + (at << 32)).collect();
        publisher.publish(vec![Change::Cleared, stored(None, &hashes)], Vec::new);
    }
    settle(&publisher);
    assert!(publisher.stats().dropped_messages > 0, "nothing was dropped: the test shows nothing");
    let mut dealer = dealer(&publisher);
    let (mut router, mut expected, mut gaps) = (Router::default(), 0, 0);
    let delivered = 60 - publisher.stats().dropped_messages;
    for at in 0..=delivered {
        if at == delivered {
            // The queue has room for this one, which shows that messages before it are missing.
            publisher.publish(vec![stored(None, &[5 << 40])], Vec::new);
        }
        let (_, seq, payload) = subscriber.message().unwrap();
        if seq > expected {
            gaps += 1;
            for (seq, payload) in dealer.replay(expected).unwrap().iter().filter(|(seq, _)| *seq < 61) {
                assert_eq!(*seq, expected);
                router.apply(payload).unwrap();
                expected += 1;
            }
        } else if seq == expected {
            router.apply(&payload).unwrap();
            expected += 1;
        }
    }
    assert!(gaps > 0);
    assert_eq!((expected, router.known.len()), (61, 60_001));
}
