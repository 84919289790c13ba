//! The sequence of messages, and replay.

use kvevents::{Change, KvEventsConfig, Publisher};
use testkit::kv_events::{Dealer, Router};

use super::{config, dealer, removed, settle, start, stored, subscriber};

#[test]
fn b26_numbers_start_at_0_and_have_no_gaps_and_a_step_without_news_takes_none() {
    for _restart in 0..2 {
        let mut publisher = start(&config());
        let mut subscriber = subscriber(&publisher, "");
        for block in 1..=20 {
            publisher.publish(Vec::new(), Vec::new);
            publisher.publish(vec![stored(None, &[block])], Vec::new);
            publisher.publish(vec![stored(None, &[block])], Vec::new);
        }
        let numbers: Vec<u64> = (0..20).map(|_| subscriber.message().unwrap().1).collect();
        assert!(numbers.into_iter().eq(0..20));
        settle(&publisher);
        assert_eq!((publisher.stats().handed, publisher.stats().messages), (40, 20));
    }
}

#[test]
fn b27_replay_returns_the_messages_from_a_number_on_and_an_end_mark() {
    let mut publisher = start(&config());
    let mut subscriber = subscriber(&publisher, "");
    let mut dealer = dealer(&publisher);
    assert_eq!(dealer.replay(0).unwrap(), [], "nothing was published");
    (1..=10).for_each(|block| publisher.publish(vec![stored(None, &[block])], Vec::new));
    let live: Vec<(u64, Vec<u8>)> =
        (0..10).map(|_| subscriber.message().unwrap()).map(|(_, seq, payload)| (seq, payload)).collect();
    assert_eq!(dealer.replay(0).unwrap(), live);
    assert_eq!(dealer.replay(7).unwrap(), live[7..]);
    assert_eq!(dealer.replay(10).unwrap(), []);
    assert_eq!(dealer.replay(u64::MAX).unwrap(), []);
}

#[test]
fn b27_replay_of_messages_that_are_no_longer_buffered_begins_with_a_snapshot() {
    let mut publisher = start(&KvEventsConfig { buffer_steps: 4, ..config() });
    let mut subscriber = subscriber(&publisher, "");
    let mut live = Router::default();
    let mut steps = vec![vec![stored(None, &[1, 2, 3])], vec![stored(Some(2), &[4, 5]), stored(None, &[9])]];
    steps.extend([vec![removed(9)], vec![stored(Some(5), &[6])], vec![removed(6)], vec![stored(Some(1), &[7, 8])]]);
    let count = steps.len() as u64;
    for step in steps {
        publisher.publish(step, Vec::new);
        live.apply(&subscriber.message().unwrap().2).unwrap();
    }
    let mut dealer = dealer(&publisher);
    let buffered = dealer.replay(2).unwrap();
    assert_eq!(buffered.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(), [2, 3, 4, 5], "all of these are buffered");
    for first in [0, 1] {
        let answer = dealer.replay(first).unwrap();
        assert_eq!(answer.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(), [first, count - 1]);
        // Whatever the subscriber knew before.
        let mut late = Router::default();
        late.apply(&buffered[1].1).unwrap_err();
        for (_, payload) in answer {
            late.apply(&payload).unwrap();
        }
        assert_eq!((late.known, late.media, late.cleared), (live.known.clone(), live.media.clone(), 1));
    }
}

#[test]
fn b27_a_snapshot_shares_events_between_consecutive_blocks_and_follows_every_branch() {
    let mut publisher = start(&KvEventsConfig { buffer_steps: 1, ..config() });
    let chain: Vec<u64> = (1..=100).collect();
    publisher.publish(vec![stored(None, &chain)], Vec::new);
    publisher.publish(vec![stored(Some(50), &[200, 201]), stored(Some(100), &[300]), stored(None, &[400])], Vec::new);
    settle(&publisher);
    let mut router = Router::default();
    router.apply(&dealer(&publisher).replay(0).unwrap()[0].1).unwrap();
    assert_eq!((router.known.len(), router.stored), (104, 3));
}

#[test]
fn b29_a_prefix_leaves_after_those_behind_it_whatever_the_order_of_removals() {
    let mut publisher = start(&config());
    let mut subscriber = subscriber(&publisher, "");
    let mut router = Router::default();
    let mut step = |changes: Vec<Change>| {
        publisher.publish(changes, Vec::new);
        router.apply(&subscriber.message().unwrap().2).unwrap();
        router.known.keys().copied().collect::<Vec<u64>>()
    };
    step(vec![stored(None, &[1, 2, 3, 4]), stored(Some(2), &[5])]);
    assert_eq!(step(vec![removed(2)]), [1], "the router checks the order");
    // Removals of what subscribers do not know are no events.
    assert_eq!(step(vec![removed(3), removed(4), removed(5), stored(Some(2), &[3]), stored(None, &[7])]), [1, 7]);
    assert_eq!(step(vec![stored(Some(1), &[2, 3])]), [1, 2, 3, 7]);
    assert_eq!(step(vec![Change::Cleared]), [] as [u64; 0]);
    assert_eq!(step(vec![stored(None, &[2])]), [2]);
}

#[test]
fn a_snapshot_is_encoded_once_and_later_messages_follow_it() {
    let mut publisher = start(&KvEventsConfig { buffer_steps: 3, ..config() });
    let mut dealer = dealer(&publisher);
    let mut answer = |publisher: &mut Publisher, step: Change| {
        publisher.publish(vec![step], Vec::new);
        settle(publisher);
        let answer = dealer.replay(0).unwrap();
        let mut router = Router::default();
        answer.iter().for_each(|(_, payload)| router.apply(payload).unwrap());
        (answer, router.known.into_keys().collect::<Vec<u64>>())
    };
    (1..=4).for_each(|block| publisher.publish(vec![stored(None, &[block])], Vec::new));
    let (first, _) = answer(&mut publisher, stored(None, &[5]));
    assert_eq!(first.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(), [0, 4]);
    // The time in it shows that it is the same one.
    for (step, numbers, known) in [
        (stored(None, &[6]), vec![0, 4, 5], vec![1, 2, 3, 4, 5, 6]),
        (removed(1), vec![0, 4, 5, 6], vec![2, 3, 4, 5, 6]),
        (removed(2), vec![0, 4, 5, 6, 7], vec![3, 4, 5, 6]),
    ] {
        let (answer, found) = answer(&mut publisher, step);
        assert_eq!(answer.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(), numbers);
        assert_eq!((&answer[0], found), (&first[0], known));
    }
    // The message behind the snapshot is gone: only now is there another.
    let (last, known) = answer(&mut publisher, removed(3));
    assert_eq!(last.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(), [0, 8]);
    assert_eq!(known, [4, 5, 6]);
    assert_ne!(last[0], first[0]);
}

#[test]
fn a_malformed_replay_request_is_ignored_and_the_next_one_answered() {
    let mut publisher = start(&config());
    publisher.publish(vec![stored(None, &[1])], Vec::new);
    settle(&publisher);
    let mut dealer: Dealer = dealer(&publisher);
    dealer.send(&[1, 2, 3]).unwrap();
    dealer.send(&[]).unwrap();
    assert_eq!(dealer.replay(0).unwrap().len(), 1);
}
