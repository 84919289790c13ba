//! The work list of decode kernels: what the thread blocks of a launch share.
//!
//! An *item* is a sequence and a partition of its context, or all partitions. The host makes the list once per step, for all
//! layers that read the same block tables; a kernel multiplies it by its KV heads. Its blocks, as many as a device runs at
//! once, take items in turn, so one grid serves any lengths, no block is launched for a partition that does not exist, and
//! partial results have space by items instead of by the longest context. FlashInfer (Ye et al., 2025) plans its launches in
//! the same way.
//!
//! Splitting a context changes no bit: partitions start at multiples of [`PARTITION`] and are merged in order.

use crate::batch::AttentionBatch;
use crate::shape::PARTITION;

/// In place of a partition: all, one after the other, by one thread block for each row and head. `ALL_PARTITIONS` in
/// `csrc/args.cuh`.
pub(crate) const ALL_PARTITIONS: u32 = u32::MAX;
/// In place of the index of a sequence's partial results: it has none. `NO_PARTIALS` in `csrc/args.cuh`.
pub(crate) const NO_PARTIALS: i32 = i32::MIN;

/// Sequences with more query rows are not split: they have more tiles to compute at once, in a prefill kernel.
pub(crate) const MOST_ROWS: usize = 16;

/// The items of a batch, the longest first.
#[derive(Debug, Default)]
pub(crate) struct WorkList {
    /// Sequence, and partition or [`ALL_PARTITIONS`].
    pub items: Vec<[u32; 2]>,
    /// For each sequence, the index of the partial result of its first row and partition 0, which is negative if a window hides
    /// partitions; or [`NO_PARTIALS`]. The results of a partition are those of its rows, one behind the other.
    pub first_partials: Vec<i32>,
    /// Kept for its memory, as is `short`.
    contexts: Vec<Context>,
    /// Items of less than a partition, with their tokens.
    short: Vec<(u32, [u32; 2])>,
}

/// What the rows of a sequence see.
#[derive(Debug)]
struct Context {
    seq: u32,
    rows: usize,
    first: u32,
    end: u32,
    split: bool,
}

impl Context {
    fn partitions(&self) -> std::ops::Range<u32> {
        let size = PARTITION as u32;
        self.first / size..self.end.div_ceil(size)
    }

    /// Partial results if the context is split.
    fn partials(&self) -> usize {
        self.partitions().len() * self.rows
    }

    /// Tokens of a partition that some row sees.
    fn tokens(&self, partition: u32) -> u32 {
        let size = PARTITION as u32;
        self.end.min((partition + 1) * size) - self.first.max(partition * size)
    }
}

impl WorkList {
    /// Makes the list for a batch whose sizes and lengths are checked. Contexts of several partitions are split while there is
    /// space for `space` partial results, each of one partition and query row; the longest first.
    pub fn plan(&mut self, batch: &AttentionBatch, window: Option<usize>, space: usize) {
        let WorkList { items, first_partials, contexts, short } = self;
        items.clear();
        contexts.clear();
        short.clear();
        first_partials.clear();
        first_partials.resize(batch.num_seqs(), NO_PARTIALS);
        let rows_of = |seq: usize| (batch.query_starts[seq + 1] - batch.query_starts[seq]) as usize;
        let mut wanted = 0;
        for seq in 0..batch.num_seqs() {
            let (rows, end) = (rows_of(seq), batch.context_lens[seq]);
            if rows == 0 {
                continue;
            }
            // What the first row sees; padding has a context of 0.
            let first_end = (end as usize + 1).saturating_sub(rows);
            let first = window.map_or(0, |window| first_end.saturating_sub(window)) as u32;
            let mut context = Context { seq: seq as u32, rows, first, end, split: false };
            context.split = rows <= MOST_ROWS && context.partitions().len() > 1;
            wanted += if context.split { context.partials() } else { 0 };
            contexts.push(context);
        }
        if wanted > space {
            contexts.sort_by_key(|context| std::cmp::Reverse((context.split, context.partitions().len())));
            let mut left = space;
            for context in contexts.iter_mut().filter(|context| context.split) {
                let needed = context.partials();
                context.split = needed <= left;
                left -= if context.split { needed } else { 0 };
            }
        }

        let mut partials = 0;
        for context in contexts.iter().filter(|context| context.split) {
            let partitions = context.partitions();
            first_partials[context.seq as usize] = partials - partitions.start as i32 * context.rows as i32;
            partials += context.partials() as i32;
        }
        // Contexts that one block computes take longest, and are few.
        let whole = |context: &&Context| !context.split && context.partitions().len() > 1;
        items.extend(contexts.iter().filter(whole).map(|context| [context.seq, ALL_PARTITIONS]));
        let tokens = |seq: u32| batch.context_lens[seq as usize];
        items.sort_by_key(|item| (std::cmp::Reverse(tokens(item[0])), item[0]));
        for context in contexts.iter().filter(|context| !whole(context)) {
            for partition in context.partitions() {
                let item = [context.seq, if context.split { partition } else { ALL_PARTITIONS }];
                match context.tokens(partition) {
                    tokens if tokens as usize == PARTITION => items.push(item),
                    tokens => short.push((tokens, item)),
                }
            }
            if context.end == 0 {
                short.push((0, [context.seq, ALL_PARTITIONS]));
            }
        }
        short.sort_by_key(|(tokens, item)| (std::cmp::Reverse(*tokens), *item));
        items.extend(short.iter().map(|(_, item)| *item));
    }

    /// Bytes of the list on a device: the number of items, padded, then the items.
    pub fn bytes(max_seqs: usize, space: usize) -> usize {
        (1 + max_seqs + space) * size_of::<[u32; 2]>()
    }

    /// The words of the list on a device.
    pub fn words(&self) -> impl ExactSizeIterator<Item = [u8; 8]> {
        let word = |i: usize| if i == 0 { [self.items.len() as u32, 0] } else { self.items[i - 1] };
        (0..self.items.len() + 1).map(move |i| {
            let [low, high] = word(i);
            (u64::from(high) << 32 | u64::from(low)).to_le_bytes()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::tables::BlockTables;

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

    /// Partitions of which some row of a sequence sees a token, row by row and token by token.
    fn seen(rows: usize, context: usize, window: Option<usize>) -> BTreeSet<u32> {
        let positions = (0..rows).filter_map(|row| (context + row).checked_sub(rows));
        let tokens = positions.flat_map(|at| (at + 1).saturating_sub(window.unwrap_or(usize::MAX))..at + 1);
        tokens.map(|token| (token / PARTITION) as u32).collect()
    }

    fn sequences() -> impl Strategy<Value = Vec<(usize, usize)>> {
        let rows = prop_oneof![4 => Just(1usize), 1 => 0usize..20];
        let sequence = (rows, prop_oneof![Just(0usize), 1usize..3000, Just(1024), Just(1025)]);
        proptest::collection::vec(
            sequence.prop_map(|(rows, len)| (rows, if len == 0 { 0 } else { len.max(rows) })),
            0..12,
        )
    }

    proptest! {
        #[test]
        fn every_row_and_partition_is_computed_once_in_space_of_its_own(
            lens in sequences(),
            window in prop_oneof![Just(None), (1usize..1500).prop_map(Some)],
            space in prop_oneof![Just(usize::MAX), 0usize..80],
        ) {
            let batch = batch(&lens);
            let mut list = WorkList::default();
            // What an earlier step left must not matter.
            list.plan(&self::batch(&[(1, 5000), (3, 2000)]), None, usize::MAX);
            list.plan(&batch, window, space);
            let unique: BTreeSet<_> = list.items.iter().collect();
            prop_assert_eq!(unique.len(), list.items.len());
            let mut partials = BTreeSet::new();
            let mut unsplit = Vec::new();
            for (seq, (rows, context)) in lens.iter().enumerate() {
                let items: BTreeSet<u32> =
                    list.items.iter().filter(|item| item[0] == seq as u32).map(|item| item[1]).collect();
                let seen = seen(*rows, *context, window);
                match list.first_partials[seq] {
                    _ if *rows == 0 => prop_assert!(items.is_empty()),
                    NO_PARTIALS => {
                        prop_assert_eq!(items, BTreeSet::from([ALL_PARTITIONS]));
                        if *rows <= MOST_ROWS && seen.len() > 1 {
                            unsplit.push(seen.len() * rows);
                        }
                    }
                    first => {
                        prop_assert!(*rows <= MOST_ROWS && seen.len() > 1);
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
        list.plan(&batch(&[(1, 256 * 512), (16, 2500), (1, 256 * 512)]), None, 2 * 256 + 5 * 16);
        assert!(list.first_partials.iter().all(|first| *first != NO_PARTIALS), "{:?}", list.first_partials);
        assert_eq!(list.items.len(), 2 * 256 + 5);
    }

    #[test]
    fn the_longest_items_come_first() {
        let mut list = WorkList::default();
        list.plan(&batch(&[(1, 100), (1, 0), (1, 1100), (1, 2048), (1, 1025)]), None, 3 + 4);
        let all = ALL_PARTITIONS;
        let want = [[4, all], [3, 0], [3, 1], [3, 2], [3, 3], [2, 0], [2, 1], [0, all], [2, 2], [1, all]];
        assert_eq!(list.items, want);
        assert_eq!(list.first_partials, [NO_PARTIALS, NO_PARTIALS, 4, 0, NO_PARTIALS]);
        let words: Vec<[u8; 8]> = list.words().collect();
        assert_eq!(words[..2], [10u64.to_le_bytes(), (u64::from(all) << 32 | 4).to_le_bytes()]);
    }
}
