//! Groups of ranks.

use std::sync::Arc;

use device::collective::{single, threads};
use device::{Collective, CollectiveError};
use proptest::prelude::*;

/// Runs `work` on every rank of a group of threads, and returns what each returned.
fn on_ranks<T: Send>(size: usize, work: impl Fn(&dyn Collective) -> T + Sync) -> Vec<T> {
    let ranks = threads(size);
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || work(&**rank))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_gather_puts_the_columns_of_all_ranks_side_by_side(widths in prop::collection::vec(0usize..9, 1..5), rows in 0usize..7) {
        let width: usize = widths.iter().sum();
        let whole: Vec<u8> = (0..rows * width).map(|at| (at * 7 % 251) as u8).collect();
        let gathered = on_ranks(widths.len(), |rank| {
            let before: usize = widths[..rank.rank()].iter().sum();
            let own = (0..rows).flat_map(|row| &whole[row * width + before..][..widths[rank.rank()]]).copied();
            let mut all = vec![0; rows * width];
            // Twice, so that both slots are used.
            for _ in 0..2 {
                rank.all_gather(&own.clone().collect::<Vec<u8>>(), rows, &widths, &mut all).unwrap();
            }
            all
        });
        gathered.iter().for_each(|all| assert_eq!(*all, whole));
    }
}

#[test]
fn a_broadcast_reaches_every_rank_and_the_smallest_value_is_that_of_all() {
    let received = on_ranks(3, |rank| {
        let mut bytes = vec![rank.rank() as u8; 5 + rank.rank()];
        rank.broadcast(1, &mut bytes).unwrap();
        (bytes, rank.min(10 - rank.rank() as u64).unwrap(), rank.values(rank.rank() as u64).unwrap())
    });
    received.iter().for_each(|it| assert_eq!(*it, (vec![1; 6], 8, vec![0, 1, 2])));
}

#[test]
fn a_sum_is_the_same_on_every_rank() {
    let sums = on_ranks(3, |rank| {
        let mut values = [0.1f32, 1e8, -0.0].map(|value| value * (rank.rank() + 1) as f32);
        rank.sum(&mut values).unwrap();
        values.map(f32::to_bits)
    });
    let expected = [0.0 + 0.1f32 + 0.2 + 0.1 * 3.0, 1e8 + 2e8 + 3e8, 0.0].map(f32::to_bits);
    sums.iter().for_each(|sum| assert_eq!(*sum, expected));
}

#[test]
fn messages_between_two_ranks_arrive_in_order_and_a_sender_does_not_wait() {
    let received = on_ranks(2, |rank| {
        let other = 1 - rank.rank();
        // Both send first: neither may wait for the other to receive.
        (0..50u8).for_each(|number| rank.send(other, &vec![number; 1000]).unwrap());
        let mut last = vec![0; 1000];
        (0..50u8).all(|number| {
            rank.receive(other, &mut last).unwrap();
            last[999] == number
        })
    });
    assert_eq!(received, [true, true]);
}

#[test]
fn a_split_makes_groups_that_exchange_only_among_themselves() {
    // Two stages of two ranks: 0 1 | 2 3.
    let seen = on_ranks(4, |rank| {
        let tensor = rank.split(rank.rank() / 2).unwrap();
        let stage = rank.split(rank.rank() % 2).unwrap();
        let values = |group: &Arc<dyn Collective>| (group.rank(), group.values(rank.rank() as u64).unwrap());
        (values(&tensor), values(&stage))
    });
    let expected = [
        ((0, vec![0, 1]), (0, vec![0, 2])),
        ((1, vec![0, 1]), (0, vec![1, 3])),
        ((0, vec![2, 3]), (1, vec![0, 2])),
        ((1, vec![2, 3]), (1, vec![1, 3])),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn after_an_abort_every_rank_that_waits_or_calls_gets_its_reason() {
    let reasons = on_ranks(4, |rank| {
        let half = rank.split(rank.rank() % 2).unwrap();
        let error = match rank.rank() {
            // Waits in a group that the rank that fails is not part of.
            0 => half.min(1).unwrap_err(),
            1 => rank.receive(3, &mut [0]).unwrap_err(),
            2 => rank.min(1).unwrap_err(),
            _ => {
                std::thread::sleep(std::time::Duration::from_millis(20));
                rank.abort("a test");
                rank.min(1).unwrap_err()
            }
        };
        error.to_string()
    });
    reasons.iter().for_each(|reason| assert_eq!(reason, "the group of ranks was ended: a test"));
}

#[test]
fn ranks_that_do_not_call_the_same_end_the_group_with_one_line() {
    let errors = on_ranks(2, |rank| match rank.rank() {
        0 => rank.all_gather(&[1, 2], 1, &[2, 2], &mut [0; 4]).map_err(|error| error.to_string()),
        _ => rank.all_gather(&[1, 2, 3], 1, &[3, 3], &mut [0; 6]).map_err(|error| error.to_string()),
    });
    assert!(errors.iter().all(Result::is_err), "{errors:?}");
    let errors =
        on_ranks(2, |rank| if rank.rank() == 0 { rank.sum(&mut []) } else { rank.broadcast(0, &mut Vec::new()) });
    assert!(errors.iter().all(|error| matches!(error, Err(CollectiveError::Aborted(_)))), "{errors:?}");
}

#[test]
fn ranks_that_differ_are_named() {
    let errors =
        on_ranks(3, |rank| rank.agree("hash of the model", u64::from(rank.rank() == 2)).unwrap_err().to_string());
    let expected =
        "rank 2: hash of the model 0000000000000001, expected 0000000000000000, that of rank 0; start all ranks alike";
    errors.iter().for_each(|error| assert_eq!(error, expected));
}

#[test]
fn a_group_of_one_gathers_what_it_has() {
    let one = single();
    let mut all = [0; 6];
    one.all_gather(&[1, 2, 3, 4, 5, 6], 3, &[2], &mut all).unwrap();
    assert_eq!((all, one.min(7).unwrap()), ([1, 2, 3, 4, 5, 6], 7));
    assert!(matches!(one.send(1, &[]), Err(CollectiveError::NoSuchRank { found: 1, expected: 1 })));
    one.abort("done");
    assert!(one.min(7).is_err());
}

#[test]
fn memory_of_a_device_is_gathered_and_added_like_that_of_the_host() {
    for name in ["cpu", "cuda-sim"] {
        let gathered = on_ranks(2, |rank| {
            let device = device::open(name, Some(1)).unwrap();
            let [mut own, mut all, mut values] = [64; 3].map(|bytes| device.alloc(bytes).unwrap());
            device.upload(&mut own, 0, &[[1, 1, 1, 0, 0, 0], [2, 3, 2, 3, 2, 3]][rank.rank()]).unwrap();
            rank.all_gather_on(&*device, &own, 3, &[1, 2], &mut all).unwrap();
            device.upload(&mut values, 0, device::bytes_of(&[1.5f32, rank.rank() as f32])).unwrap();
            rank.sum_on(&*device, &mut values, 2).unwrap();
            let (mut rows, mut sums) = ([0; 9], [0; 8]);
            device.download(&all, 0, &mut rows).unwrap();
            device.download(&values, 0, &mut sums).unwrap();
            (rows, sums)
        });
        let sums: [u8; 8] = device::bytes_of(&[3.0f32, 1.0]).try_into().unwrap();
        gathered.iter().for_each(|it| assert_eq!(*it, ([1, 2, 3, 1, 2, 3, 1, 2, 3], sums), "{name}"));
    }
}
