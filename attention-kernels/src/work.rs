//! The work list of decode kernels: what the thread blocks of a launch share.
//!
//! An *item* is a sequence and a partition of its context, or all partitions. The host makes the list once per step, for all
//! layers that read the same block tables; a kernel multiplies it by its KV heads. Its blocks, as many as a device runs at
//! once, take items in turn, so one grid serves any lengths, no block is launched for a partition that does not exist, and
//! partial results have space by items instead of by the longest context. FlashInfer (Ye et al., 2025) plans its launches in
//! the same way.
//!
//! Splitting a context changes no bit: partitions start at multiples of [`PARTITION`] and are merged in order. A batch of few
//! contexts has fewer such partitions than a GPU computes at once. Where bits may depend on the batch, its partitions are halves,
//! quarters or eighths, so that several blocks share what one would read tile by tile.

use crate::batch::AttentionBatch;
use crate::shape::PARTITION;

/// In place of a partition: all, one after the other, by one thread block for each row and head. `ALL_PARTITIONS` in
/// `csrc/args.cuh`.
pub const ALL_PARTITIONS: u32 = u32::MAX;
/// In place of the index of a sequence's partial results: it has none. `NO_PARTIALS` in `csrc/args.cuh`.
pub const NO_PARTIALS: i32 = i32::MIN;

/// Tokens of the smallest partition: a tile of the kernels.
pub(crate) const LEAST_PARTITION: u32 = 64;

/// Sequences with more query rows are not split: they have more tiles to compute at once, in a prefill kernel.
pub const MOST_ROWS: usize = 16;

/// The items of a batch, the longest first.
#[derive(Debug, Default)]
pub struct WorkList {
    /// Sequence, and partition or [`ALL_PARTITIONS`].
    pub items: Vec<[u32; 2]>,
    /// Tokens of a partition.
    pub partition: u32,
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
    /// Partitions of `size` tokens.
    fn partitions(&self, size: u32) -> std::ops::Range<u32> {
        self.first / size..self.end.div_ceil(size)
    }

    /// Whether the context may be split into partitions of `size` tokens.
    fn may_split(&self, size: u32) -> bool {
        self.rows <= MOST_ROWS && self.partitions(size).len() > 1
    }

    /// Partial results if the context is split.
    fn partials(&self, size: u32) -> usize {
        self.partitions(size).len() * self.rows
    }

    /// Tokens of a partition that some row sees.
    fn tokens(&self, partition: u32, size: u32) -> u32 {
        self.end.min((partition + 1) * size) - self.first.max(partition * size)
    }
}

/// Returns the items that read a context, and the partial results, of contexts in partitions of `size` tokens, if all that may be split
/// are. Padding, which has a context of 0, does not count: with it a step has the bits that it has without.
fn needs(contexts: &[Context], size: u32) -> (usize, usize) {
    let of = |context: &Context| match context.may_split(size) {
        true => (context.partitions(size).len(), context.partials(size)),
        false => (usize::from(context.end > 0), 0),
    };
    contexts.iter().map(of).fold((0, 0), |sum, next| (sum.0 + next.0, sum.1 + next.1))
}

impl WorkList {
    /// Makes the list for a batch whose sizes and lengths are checked. Contexts of several partitions are split while there is
    /// space for `space` partial results, each of one partition and query row; the longest first.
    ///
    /// Partitions are smaller than [`PARTITION`] while the list then has at most `at_once` items, without padding, and space for all
    /// partial results. The bits of a row then depend on the batch.
    pub fn plan(&mut self, batch: &AttentionBatch, window: Option<usize>, space: usize, at_once: usize) {
        let WorkList { items, partition, first_partials, contexts, short } = self;
        items.clear();
        contexts.clear();
        short.clear();
        first_partials.clear();
        first_partials.resize(batch.num_seqs(), NO_PARTIALS);
        let rows_of = |seq: usize| (batch.query_starts[seq + 1] - batch.query_starts[seq]) as usize;
        for seq in 0..batch.num_seqs() {
            let (rows, end) = (rows_of(seq), batch.context_lens[seq]);
            if rows == 0 {
                continue;
            }
            // What the first row sees; padding has a context of 0.
            let first_end = (end as usize + 1).saturating_sub(rows);
            let first = window.map_or(0, |window| first_end.saturating_sub(window)) as u32;
            contexts.push(Context { seq: seq as u32, rows, first, end, split: false });
        }
        let mut size = PARTITION as u32;
        while size > LEAST_PARTITION {
            let (items, partials) = needs(contexts, size / 2);
            if items.max(1) > at_once || partials > space {
                break;
            }
            size /= 2;
        }
        *partition = size;
        contexts.iter_mut().for_each(|context| context.split = context.may_split(size));
        if needs(contexts, size).1 > space {
            contexts.sort_by_key(|context| std::cmp::Reverse((context.split, context.partitions(size).len())));
            let mut left = space;
            for context in contexts.iter_mut().filter(|context| context.split) {
                let needed = context.partials(size);
                context.split = needed <= left;
                left -= if context.split { needed } else { 0 };
            }
        }

        let mut partials = 0;
        for context in contexts.iter().filter(|context| context.split) {
            let partitions = context.partitions(size);
            first_partials[context.seq as usize] = partials - partitions.start as i32 * context.rows as i32;
            partials += context.partials(size) as i32;
        }
        // Contexts that one block computes take longest, and are few.
        let whole = |context: &&Context| !context.split && context.partitions(size).len() > 1;
        items.extend(contexts.iter().filter(whole).map(|context| [context.seq, ALL_PARTITIONS]));
        let tokens = |seq: u32| batch.context_lens[seq as usize];
        items.sort_by_key(|item| (std::cmp::Reverse(tokens(item[0])), item[0]));
        for context in contexts.iter().filter(|context| !whole(context)) {
            for partition in context.partitions(size) {
                let item = [context.seq, if context.split { partition } else { ALL_PARTITIONS }];
                match context.tokens(partition, size) {
                    tokens if tokens == size => items.push(item),
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

    /// Bytes of the list on a device: the number of items and the tokens of a partition, then the items.
    pub fn bytes(max_seqs: usize, space: usize) -> usize {
        (1 + max_seqs + space) * size_of::<[u32; 2]>()
    }

    /// The words of the list on a device.
    pub fn words(&self) -> impl ExactSizeIterator<Item = [u8; 8]> {
        let word = |i: usize| if i == 0 { [self.items.len() as u32, self.partition] } else { self.items[i - 1] };
        (0..self.items.len() + 1).map(move |i| {
            let [low, high] = word(i);
            (u64::from(high) << 32 | u64::from(low)).to_le_bytes()
        })
    }
}
