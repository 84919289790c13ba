//! Slow readers and full queues.

use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use kvevents::{Change, KvEventsConfig, Limits};
use testkit::kv_events::Router;

use super::peers::Raw;
use super::{address, config, dealer, settle, start, start_with, stored, subscriber, wait};

#[test]
fn b36_a_full_queue_drops_steps_and_subscribers_get_a_snapshot_before_anything_else() {
    let mut publisher = start(&KvEventsConfig { max_queue_size: 2, ..config() });
    let mut subscriber = subscriber(&publisher, "");
    // As an engine lists them: one change per block, parents first.
    let list = |blocks: u64| (1..=blocks).map(|hash| stored((hash > 1).then(|| hash - 1), &[hash])).collect();
    let step = |at: u64| stored((at > 0).then(|| at * 4000), &(1 + at * 4000..=(at + 1) * 4000).collect::<Vec<_>>());
    let steps: Vec<Change> = (0..8).map(step).collect();
    for (blocks, step) in (1..).zip(steps) {
        publisher.publish(vec![step], || list(blocks * 4000));
    }
    assert!(publisher.stats().dropped_steps > 0, "the queue never overflowed: the test shows nothing");
    // Subscribers learn that their index is void although no step follows.
    settle(&publisher);
    let mut router = Router::default();
    let mut expected = 0;
    while router.cleared == 0 {
        let (_, seq, payload) = subscriber.message().unwrap();
        assert_eq!(seq, expected, "a gap");
        expected += 1;
        router.stored = 0;
        router.apply(&payload).unwrap();
    }
    settle(&publisher);
    // A step without changes of its own is enough for the snapshot.
    publisher.publish(Vec::new(), || list(32_000));
    settle(&publisher);
    while router.known.len() < 32_000 {
        let (_, seq, payload) = subscriber.message().unwrap();
        assert_eq!(seq, expected, "a gap");
        expected += 1;
        router.stored = 0;
        router.apply(&payload).unwrap();
    }
    assert!(router.known.keys().copied().eq(1..=32_000));
    assert_eq!(router.stored, 1, "consecutive blocks of a snapshot share an event");
    publisher.publish(vec![stored(None, &[u64::MAX])], || panic!("one snapshot is enough"));
    assert_eq!(subscriber.message().unwrap().1, expected);
}

/// Other tests of this program take memory too.
#[test]
fn b36_a_subscriber_that_never_reads_delays_no_step_and_takes_bounded_memory() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["overflow::never_read", "--exact", "--ignored"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "only as a program of its own, for the test above"]
fn never_read() {
    let limits = Limits { send_buffer: Some(4096), ..Limits::default() };
    let config = KvEventsConfig { hwm: 10, buffer_steps: 10, max_queue_size: 1000, ..config() };
    let mut publisher = start_with(&config, limits);
    let _deaf = Raw::subscriber(address(&publisher), "", Some(2304));
    wait(&publisher, |stats| stats.subscribers == 1);
    let before = resident();
    let (done, ended) = mpsc::channel();
    let stepping = std::thread::spawn(move || {
        // Each step is about 150 KB: far more than the socket and the messages that are kept.
        for at in 0..60 {
            let hashes: Vec<u64> = (1..=10_000).map(|block| block + (at << 32)).collect();
            publisher.publish(vec![Change::Cleared, stored(None, &hashes)], || panic!("nothing was lost"));
            settle(&publisher);
        }
        done.send(()).unwrap();
        publisher
    });
    // A step that waits for the subscriber waits until that is disconnected.
    assert!(ended.recv_timeout(limits.stall / 2).is_ok(), "a step was delayed");
    let publisher = stepping.join().unwrap();
    let stats = publisher.stats();
    assert!(stats.dropped_messages > 40 && stats.dropped_steps == 0, "{stats:?}");
    if let (Some(before), Some(after)) = (before, resident()) {
        assert!(after < before + (60 << 20), "memory grew from {before} to {after} bytes");
    }
    // The dropped messages can be had by replay, or a snapshot in their place.
    let mut router = Router::default();
    dealer(&publisher).replay(0).unwrap().iter().for_each(|(_, payload)| router.apply(payload).unwrap());
    assert_eq!(router.known.len(), 10_000);
}

/// Resident memory of this process in bytes, where the system tells.
fn resident() -> Option<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(pages.split(' ').nth(1)?.parse::<u64>().ok()? * 4096)
}

/// Blocks that take about 10 KB.
fn blocks(at: u64) -> Change {
    stored(None, &(1..=600).map(|block| block + (at << 32)).collect::<Vec<u64>>())
}

#[test]
fn b36_a_gap_after_dropped_messages_shows_in_the_numbers_and_replay_closes_it() {
    let limits = Limits { send_buffer: Some(4096), ..Limits::default() };
    let mut publisher = start_with(&KvEventsConfig { hwm: 2, ..config() }, limits);
    let mut subscriber = subscriber(&publisher, "");
    // More than the buffers of both ends hold.
    let count = 300;
    (0..count).for_each(|at| publisher.publish(vec![Change::Cleared, blocks(at)], Vec::new));
    settle(&publisher);
    assert!(publisher.stats().dropped_messages > 0, "nothing was dropped: the test shows nothing");
    let mut dealer = dealer(&publisher);
    let (mut router, mut expected, mut gaps) = (Router::default(), 0, 0);
    let delivered = count - publisher.stats().dropped_messages;
    for at in 0..=delivered {
        if at == delivered {
            // This one is delivered too, which shows that messages before it are missing.
            publisher.publish(vec![stored(None, &[5 << 50])], Vec::new);
        }
        let (_, seq, payload) = subscriber.message().unwrap();
        if seq > expected {
            gaps += 1;
            for (seq, payload) in dealer.replay(expected).unwrap() {
                assert_eq!(seq, expected);
                router.apply(&payload).unwrap();
                expected += 1;
            }
        } else if seq == expected {
            router.apply(&payload).unwrap();
            expected += 1;
        }
    }
    assert!(gaps > 0);
    assert_eq!((expected, router.known.len()), (count + 1, 601));
}

#[test]
fn what_waits_for_all_subscribers_together_is_bounded() {
    let limits = Limits { bytes: 100_000, send_buffer: Some(4096), ..Limits::default() };
    let mut publisher = start_with(&KvEventsConfig { topic: "kv".into(), ..config() }, limits);
    let mut slow = Vec::new();
    // Each stalls at another time.
    for at in 0..200 {
        if at % 50 == 0 {
            settle(&publisher);
            slow.push(Raw::subscriber(address(&publisher), "k", Some(16 << 10)));
            wait(&publisher, |stats| stats.subscribers == slow.len());
        }
        publisher.publish(vec![blocks(at)], Vec::new);
    }
    settle(&publisher);
    for (at, slow) in slow.iter_mut().enumerate() {
        let mut numbers: Vec<u64> = Vec::new();
        while numbers.last() != Some(&199) {
            numbers.push(slow.message().1);
        }
        assert!(numbers[0] >= at as u64 * 50, "{numbers:?}");
        // After the last gap come the 12 messages that all subscribers share, and a few that were already in flight.
        let gap = numbers.windows(2).rposition(|pair| pair[1] > pair[0] + 1);
        let kept = numbers.len() - gap.map_or(0, |gap| gap + 1);
        assert!(kept <= 25, "{numbers:?}");
    }
    assert!(publisher.stats().dropped_messages > 50, "{:?}", publisher.stats());
}

#[test]
fn a_long_message_that_is_dropped_while_it_is_read_ends_the_connection() {
    let limits =
        Limits { bytes: 100_000, send_buffer: Some(4096), stall: Duration::from_secs(20), ..Limits::default() };
    let mut publisher = start_with(&config(), limits);
    let mut slow = Raw::subscriber(address(&publisher), "", Some(16 << 10));
    wait(&publisher, |stats| stats.subscribers == 1);
    publisher.publish(vec![stored(None, &(1..=40_000).collect::<Vec<_>>())], Vec::new);
    settle(&publisher);
    // The last message is kept whatever its size, and so is the beginning of this one in the sockets.
    slow.read_some();
    publisher.publish(vec![stored(None, &(50_001..=60_000).collect::<Vec<_>>())], Vec::new);
    settle(&publisher);
    assert!(slow.read_to_end().len() < 200_000, "the rest of the message came from somewhere");
    wait(&publisher, |stats| stats.subscribers == 0);
    let mut honest = subscriber(&publisher, "");
    publisher.publish(vec![stored(None, &[70_000])], Vec::new);
    assert_eq!(honest.message().unwrap().1, 2);
}
