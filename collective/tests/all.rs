//! Groups of ranks. What every carrier must do is in [`suite`]; here threads do it, and in [`mpi`] processes.
#![allow(clippy::unwrap_used)]

#[path = "../../device/tests/backends/fixture.rs"]
mod backends;
mod mpi;
mod nccl;
mod suite;
#[path = "../../device/tests/support/mod.rs"]
mod support;

use std::sync::Arc;

use collective::{Collective, CollectiveError, single, threads};
use device::Dtype;
use proptest::prelude::*;

use crate::backends::devices;

/// Runs `work` on every rank of a group of threads, and returns what each returned.
fn on_ranks<T: Send>(size: usize, work: impl Fn(&dyn Collective) -> T + Sync) -> Vec<T> {
    on_ranks_of(size, |rank| work(&**rank))
}

fn on_ranks_of<T: Send>(size: usize, work: impl Fn(&Arc<dyn Collective>) -> T + Sync) -> Vec<T> {
    let ranks = threads(size);
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || work(rank))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_gather_puts_the_columns_of_all_ranks_side_by_side((widths, rows) in suite::shapes(1..5usize)) {
        on_ranks(widths.len(), |group| suite::gather(group, &widths, rows));
    }
}

#[test]
fn a_broadcast_reaches_every_rank_and_the_smallest_value_is_that_of_all() {
    on_ranks(3, suite::a_broadcast_of_any_length_reaches_every_rank);
    on_ranks(3, suite::the_values_of_all_ranks_and_the_smallest);
}

#[test]
fn a_sum_is_added_in_the_order_of_the_ranks() {
    (2..5).for_each(|size| drop(on_ranks(size, suite::a_sum_is_added_in_the_order_of_the_ranks)));
}

#[test]
fn messages_between_two_ranks_arrive_in_order_and_a_sender_does_not_wait() {
    on_ranks(2, suite::messages_arrive_in_order_and_a_sender_does_not_wait);
}

#[test]
fn a_split_makes_groups_that_exchange_only_among_themselves() {
    on_ranks(4, suite::a_split_makes_groups_that_exchange_only_among_themselves);
}

#[test]
fn wrong_arguments_are_errors_of_this_rank_alone() {
    on_ranks(2, suite::wrong_arguments_are_errors_of_this_rank_alone);
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
        on_ranks(2, |rank| if rank.rank() == 0 { rank.sum(&mut [1.0]) } else { rank.broadcast(0, &mut Vec::new()) });
    assert!(errors.iter().all(|error| matches!(error, Err(CollectiveError::Aborted(_)))), "{errors:?}");
}

#[test]
fn ranks_that_differ_are_named() {
    on_ranks(3, suite::ranks_that_differ_are_named);
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
    for device in devices() {
        let name = device.name();
        let gathered = on_ranks(2, |rank| {
            let device = device::open(name, Some(1)).unwrap();
            let [mut own, mut all, mut values] = [64; 3].map(|bytes| device.alloc(bytes).unwrap());
            device.upload(&mut own, 0, &[[1, 1, 1, 0, 0, 0], [2, 3, 2, 3, 2, 3]][rank.rank()]).unwrap();
            rank.all_gather_on(&*device, &own, 3, &[1, 2], &mut all).unwrap();
            device.upload(&mut values, 0, device::bytes_of(&[1.5f32, rank.rank() as f32])).unwrap();
            rank.sum_on(&*device, Dtype::F32, &mut values, 2).unwrap();
            // 257 is no bfloat16: the sum is rounded, its parts are not.
            let mut halves = device.alloc(4).unwrap();
            device.upload(&mut halves, 0, &[[0x80, 0x43, 0x80, 0x3f], [0x80, 0x3f, 0x40, 0x40]][rank.rank()]).unwrap();
            rank.sum_on(&*device, Dtype::Bf16, &mut halves, 2).unwrap();
            let mut found = [0; 4];
            device.download(&halves, 0, &mut found).unwrap();
            assert_eq!(found, [0x80, 0x43, 0x80, 0x40], "{name}: 256 + 1 and 1 + 3");
            let (mut rows, mut sums) = ([0; 9], [0; 8]);
            device.download(&all, 0, &mut rows).unwrap();
            device.download(&values, 0, &mut sums).unwrap();
            (rows, sums)
        });
        let sums: [u8; 8] = device::bytes_of(&[3.0f32, 1.0]).try_into().unwrap();
        gathered.iter().for_each(|it| assert_eq!(*it, ([1, 2, 3, 1, 2, 3, 1, 2, 3], sums), "{name}"));
    }
}
