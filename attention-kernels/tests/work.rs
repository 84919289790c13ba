//! The work list of decode kernels.

use std::collections::BTreeSet;

use attention_kernels::for_tests::{ALL_PARTITIONS, MOST_SPLIT_ROWS, NO_PARTIALS, WorkList};
use attention_kernels::{AttentionBatch, PARTITION};
use proptest::prelude::*;

fn batch(lens: &[(usize, usize)]) -> AttentionBatch {
    let mut starts = vec![0];
    starts.extend(lens.iter().scan(0, |end, (rows, _)| {
        *end += *rows as u32;
        Some(*end)
    }));
    AttentionBatch {
        query_starts: starts,
        context_lens: lens.iter().map(|(_, context)| *context as u32).collect(),
        ..AttentionBatch::default()
    }
}

/// Partitions of `size` tokens of which some row of a sequence sees a token, row by row and token by token.
fn seen(rows: usize, context: usize, window: Option<usize>, size: usize) -> BTreeSet<u32> {
    let positions = (0..rows).filter_map(|row| (context + row).checked_sub(rows));
    let tokens = positions.flat_map(|at| (at + 1).saturating_sub(window.unwrap_or(usize::MAX))..at + 1);
    tokens.map(|token| (token / size) as u32).collect()
}

fn sequences() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let rows = prop_oneof![4 => Just(1usize), 1 => 0usize..20];
    let sequence = (rows, prop_oneof![Just(0usize), 1usize..3000, Just(1024), Just(1025)]);
    proptest::collection::vec(sequence.prop_map(|(rows, len)| (rows, if len == 0 { 0 } else { len.max(rows) })), 0..12)
}

proptest! {
    #[test]
    fn every_row_and_partition_is_computed_once_in_space_of_its_own(
        lens in sequences(),
        window in prop_oneof![Just(None), (1usize..1500).prop_map(Some)],
        space in prop_oneof![Just(usize::MAX), 0usize..80],
        at_once in prop_oneof![Just(0usize), 1usize..100],
    ) {
        let batch = batch(&lens);
        let mut list = WorkList::default();
        // What an earlier step left must not matter.
        list.plan(&self::batch(&[(1, 5000), (3, 2000)]), None, usize::MAX, 20);
        list.plan(&batch, window, space, at_once);
        let size = list.partition as usize;
        let read = list.items.iter().filter(|item| batch.context_lens[item[0] as usize] > 0).count();
        prop_assert!([64, 128, 256, 512].contains(&size) && (size == PARTITION || read <= at_once));
        let unique: BTreeSet<_> = list.items.iter().collect();
        prop_assert_eq!(unique.len(), list.items.len());
        let mut partials = BTreeSet::new();
        let mut unsplit = Vec::new();
        for (seq, (rows, context)) in lens.iter().enumerate() {
            let items: BTreeSet<u32> =
                list.items.iter().filter(|item| item[0] == seq as u32).map(|item| item[1]).collect();
            let seen = seen(*rows, *context, window, size);
            match list.first_partials[seq] {
                _ if *rows == 0 => prop_assert!(items.is_empty()),
                NO_PARTIALS => {
                    prop_assert_eq!(items, BTreeSet::from([ALL_PARTITIONS]));
                    if *rows <= MOST_SPLIT_ROWS && seen.len() > 1 {
                        unsplit.push(seen.len() * rows);
                    }
                }
                first => {
                    prop_assert!(*rows <= MOST_SPLIT_ROWS && seen.len() > 1);
                    prop_assert_eq!(&items, &seen);
                    for (partition, row) in seen.iter().flat_map(|partition| (0..*rows).map(move |row| (*partition, row))) {
                        let partial = first + partition as i32 * *rows as i32 + row as i32;
                        prop_assert!(partial >= 0 && partials.insert(partial), "{} twice", partial);
                    }
                }
            }
        }
        prop_assert!(partials.len() <= space);
        prop_assert!(partials.last().is_none_or(|last| *last as usize == partials.len() - 1));
        prop_assert!(unsplit.iter().all(|wanted| partials.len() + wanted > space), "space is left");
    }
}

#[test]
fn a_chunk_of_several_rows_leaves_space_for_long_contexts_of_one_row() {
    let mut list = WorkList::default();
    // 256 partitions of a row twice, and 5 partitions of 16 rows.
    list.plan(&batch(&[(1, 256 * 512), (16, 2500), (1, 256 * 512)]), None, 2 * 256 + 5 * 16, 0);
    assert!(list.first_partials.iter().all(|first| *first != NO_PARTIALS), "{:?}", list.first_partials);
    assert_eq!(list.items.len(), 2 * 256 + 5);
}

#[test]
fn the_longest_items_come_first() {
    let mut list = WorkList::default();
    list.plan(&batch(&[(1, 100), (1, 0), (1, 1100), (1, 2048), (1, 1025)]), None, 3 + 4, 0);
    let all = ALL_PARTITIONS;
    let want = [[4, all], [3, 0], [3, 1], [3, 2], [3, 3], [2, 0], [2, 1], [0, all], [2, 2], [1, all]];
    assert_eq!(list.items, want);
    assert_eq!(list.first_partials, [NO_PARTIALS, NO_PARTIALS, 4, 0, NO_PARTIALS]);
    let words: Vec<[u8; 8]> = list.words().collect();
    assert_eq!(words[..2], [(PARTITION as u64) << 32 | 10, u64::from(all) << 32 | 4].map(u64::to_le_bytes));
}

#[test]
fn few_contexts_are_split_further_while_the_device_has_blocks_for_them() {
    let partition = |lens: &[(usize, usize)], at_once, space| {
        let mut list = WorkList::default();
        list.plan(&batch(lens), None, space, at_once);
        (list.partition, list.items.len())
    };
    // 132 multiprocessors with 4 blocks each, and 8 KV heads.
    for (lens, want) in [
        (vec![(1, 512)], (64, 8)),
        (vec![(1, 4096)], (64, 64)),
        (vec![(4, 512); 8], (64, 64)),
        (vec![(1, 512); 16], (128, 64)),
        (vec![(1, 512); 34], (512, 34)),
        (vec![(1, 4096); 5], (512, 40)),
        // Too many rows are not split, and padding is no work.
        (vec![(17, 512)], (64, 1)),
        ([vec![(1, 4096)], vec![(1, 0); 7]].concat(), (64, 71)),
    ] {
        assert_eq!(partition(&lens, 4 * 132 / 8, usize::MAX), want, "{lens:?}");
    }
    // Partial results need space, and a device that is deterministic splits no further.
    assert_eq!(partition(&[(1, 4096)], 33, 31), (256, 16));
    assert_eq!(partition(&[(1, 4096)], 0, usize::MAX), (512, 8));
}
