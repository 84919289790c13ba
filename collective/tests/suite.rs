//! What a carrier must do: each function runs on every rank of a group of two or more ranks, at the same time.

use std::sync::Arc;

use collective::{Collective, CollectiveError, MOST_BROADCAST_BYTES};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

/// All of them, in the order in which a program of several processes runs them.
pub const ALL: [fn(&dyn Collective); 9] = [
    gathers_of_any_shape,
    a_gather_of_many_rows,
    a_broadcast_of_any_length_reaches_every_rank,
    the_values_of_all_ranks_and_the_smallest,
    a_sum_is_added_in_the_order_of_the_ranks,
    messages_arrive_in_order_and_a_sender_does_not_wait,
    a_split_makes_groups_that_exchange_only_among_themselves,
    wrong_arguments_are_errors_of_this_rank_alone,
    ranks_that_differ_are_named,
];

/// Byte `at` of a matrix that all ranks know.
fn byte(at: usize) -> u8 {
    (at * 7 % 251) as u8
}

/// Gathers the columns of a matrix twice, and compares.
pub fn gather(group: &dyn Collective, widths: &[usize], rows: usize) {
    let (rank, width) = (group.rank(), widths.iter().sum::<usize>());
    let whole: Vec<u8> = (0..rows * width).map(byte).collect();
    let before: usize = widths[..rank].iter().sum();
    let own: Vec<u8> = (0..rows).flat_map(|row| &whole[row * width + before..][..widths[rank]]).copied().collect();
    for _ in 0..2 {
        let mut all = vec![0; rows * width];
        group.all_gather(&own, rows, widths, &mut all).unwrap();
        assert_eq!(all, whole, "widths {widths:?}, {rows} rows");
    }
}

/// Widths of the parts of `size` ranks, and a number of rows.
pub fn shapes(size: impl Strategy<Value = usize>) -> impl Strategy<Value = (Vec<usize>, usize)> {
    (size.prop_flat_map(|size| prop::collection::vec(0usize..9, size)), 0usize..7)
}

fn gathers_of_any_shape(group: &dyn Collective) {
    // The same cases on every rank.
    let mut runner = TestRunner::deterministic();
    for _ in 0..50 {
        let (widths, rows) = shapes(Just(group.size())).new_tree(&mut runner).unwrap().current();
        gather(group, &widths, rows);
    }
}

/// More than one exchange of a carrier that sends rows in pieces, and rows that are longer than a piece.
pub fn a_gather_of_many_rows(group: &dyn Collective) {
    for (part, rows) in [(3 << 20, 7), (17 << 20, 1)] {
        let widths: Vec<usize> = (0..group.size()).map(|rank| part + rank).collect();
        let own: Vec<u8> =
            (0..rows).flat_map(|row| vec![(row * 16 + group.rank()) as u8; widths[group.rank()]]).collect();
        let mut all = vec![0xff; rows * widths.iter().sum::<usize>()];
        group.all_gather(&own, rows, &widths, &mut all).unwrap();
        let mut rest = &all[..];
        for (row, rank) in (0..rows).flat_map(|row| (0..group.size()).map(move |rank| (row, rank))) {
            let part;
            (part, rest) = rest.split_at(widths[rank]);
            assert!(part.iter().all(|byte| *byte == (row * 16 + rank) as u8), "row {row}, rank {rank}");
        }
    }
}

pub fn a_broadcast_of_any_length_reaches_every_rank(group: &dyn Collective) {
    for (turn, length) in [0, 1, 4079, 4080, 4081, 1 << 20, (1 << 20) + 3, 0].into_iter().enumerate() {
        let root = turn % group.size();
        let sent: Vec<u8> = (0..length).map(|at| byte(at + turn)).collect();
        let mut bytes = if group.rank() == root { sent.clone() } else { vec![0xff; 5 + group.rank()] };
        group.broadcast(root, &mut bytes).unwrap();
        assert!(bytes == sent, "{length} bytes of rank {root}");
    }
}

pub fn the_values_of_all_ranks_and_the_smallest(group: &dyn Collective) {
    let (rank, size) = (group.rank() as u64, group.size() as u64);
    assert_eq!(group.values(u64::MAX - rank).unwrap(), (0..size).map(|rank| u64::MAX - rank).collect::<Vec<_>>());
    assert_eq!(group.min(100 - rank).unwrap(), 101 - size);
    group.agree("the hash of the model", 7).unwrap();
}

/// Numbers whose sum depends on the order of the additions, in every form of the exchange and in pieces of it.
pub fn a_sum_is_added_in_the_order_of_the_ranks(group: &dyn Collective) {
    let (rank, size) = (group.rank(), group.size());
    let value = |rank: usize, at: usize| ((at * 37 + rank * 11) % 101) as f32 * 1e-3 * 10f32.powi((at % 7) as i32 - 3);
    let sum = |at: usize| (1..size).fold(value(0, at), |sum, rank| sum + value(rank, at));
    // What is beside a number does not matter: all begin alike.
    for len in [1, 3, 1 << 13, (1 << 13) + 1, (1 << 19) + 5] {
        let mut values: Vec<f32> = (0..len).map(|at| value(rank, at)).collect();
        group.sum(&mut values).unwrap();
        let wrong = values.iter().enumerate().find(|(at, found)| found.to_bits() != sum(*at).to_bits());
        assert_eq!(wrong, None, "{len} numbers on {size} ranks");
    }
    let backwards = |at: usize| (0..size - 1).rev().fold(value(size - 1, at), |sum, rank| sum + value(rank, at));
    assert!(size == 2 || (0..101).any(|at| backwards(at) != sum(at)), "any order would do");
    group.sum(&mut []).unwrap();
}

pub fn messages_arrive_in_order_and_a_sender_does_not_wait(group: &dyn Collective) {
    let (rank, size) = (group.rank(), group.size());
    let others = || (0..size).filter(|other| *other != rank);
    let length = |number: usize| [1000, 0, 100_000, 7, 1 << 20][number % 5];
    let content = |from: usize, to: usize, number: usize| vec![byte(from * 31 + to * 7 + number); length(number)];
    // All send first: none may wait for another to receive.
    for number in 0..50 {
        others().for_each(|to| group.send(to, &content(rank, to, number)).unwrap());
    }
    for from in others() {
        for number in 0..50 {
            let mut bytes = vec![0xff; length(number)];
            group.receive(from, &mut bytes).unwrap();
            assert!(bytes == content(from, rank, number), "message {number} of rank {from} to {rank}");
        }
    }
}

/// Stages of two ranks: 0 1 | 2 3; an odd last one is alone.
pub fn a_split_makes_groups_that_exchange_only_among_themselves(group: &dyn Collective) {
    let (rank, size) = (group.rank(), group.size());
    let tensor = group.split(rank / 2).unwrap();
    // Any number may be a color.
    let stage = group.split(usize::MAX - rank % 2).unwrap();
    let ranks = |keep: &dyn Fn(usize) -> bool| (0..size).filter(|other| keep(*other)).map(|it| it as u64).collect();
    let in_tensor: Vec<u64> = ranks(&|other| other / 2 == rank / 2);
    let in_stage: Vec<u64> = ranks(&|other| other % 2 == rank % 2);
    let seen = |half: &Arc<dyn Collective>| (half.rank(), half.size(), half.values(rank as u64).unwrap());
    // Every second pair uses its groups in the other order.
    let of_tensor = (rank / 2 % 2 == 0).then(|| seen(&tensor));
    let of_stage = seen(&stage);
    let of_tensor = of_tensor.unwrap_or_else(|| seen(&tensor));
    assert_eq!(of_tensor, (rank % 2, in_tensor.len(), in_tensor));
    assert_eq!(of_stage, (rank / 2, in_stage.len(), in_stage));
}

pub fn wrong_arguments_are_errors_of_this_rank_alone(group: &dyn Collective) {
    let (size, mut all) = (group.size(), [0; 64]);
    let no_such = |outcome| matches!(outcome, Err(CollectiveError::NoSuchRank { found, expected }) if found == size && expected == size);
    assert!(no_such(group.send(size, &[])) && no_such(group.receive(size, &mut [])));
    assert!(no_such(group.broadcast(size, &mut Vec::new())));
    let widths = vec![2; size];
    let wrong = |outcome| matches!(outcome, Err(CollectiveError::Size { .. }));
    assert!(wrong(group.all_gather(&[1, 2, 3], 1, &widths, &mut all[..2 * size])));
    assert!(wrong(group.all_gather(&[1, 2], 1, &widths, &mut all[..2 * size + 1])));
    assert!(wrong(group.all_gather(&[1, 2], 1, &widths[1..], &mut all[..2 * size - 2])));
    let found = MOST_BROADCAST_BYTES + 1;
    let large = group.broadcast(group.rank(), &mut vec![0; found]).unwrap_err().to_string();
    let said = format!("a broadcast of {found} bytes, expected at most {MOST_BROADCAST_BYTES}: send it in pieces");
    assert!(large.ends_with(&said), "{large}");
    // The group goes on.
    gather(group, &widths, 1);
}

pub fn ranks_that_differ_are_named(group: &dyn Collective) {
    let last = group.size() - 1;
    let error = group.agree("hash of the model", u64::from(group.rank() == last)).unwrap_err().to_string();
    let expected = format!(
        "rank {last}: hash of the model 0000000000000001, expected 0000000000000000, that of rank 0; start all ranks alike"
    );
    assert_eq!(error, expected);
}
