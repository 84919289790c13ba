//! The pool as a row of cells in runs of equal ones: free, cached, or owned and by whom.
//!
//! ```text
//! block   0 1 2 3 4 5 6 7        owners  [0] request 7, one reference      runs  [2,2, 3,1, 1,2, 0,3]
//!         A A * · · _ _ _                [1] requests 7 and 9, two                A×2  *×1  ·×2  _×3
//! ```
//!
//! A pool of more than [`MAX_CELLS`] blocks is drawn with several to a cell, and the cell shows the liveliest of them: one
//! that is shared before one with a single owner, before a cached one, before a free one. A snapshot is so bounded by
//! [`MAX_CELLS`] runs and [`MAX_OWNERS`] owners, whatever the pool.

use std::collections::HashMap;

use kvblock::{BlockId, BlockPool};
use sched::RequestView;
use serde::Serialize;

/// Cells of a map.
pub const MAX_CELLS: usize = 16_384;

/// Different owners that are told apart; the blocks of any more are shown as the last one's.
const MAX_OWNERS: usize = 1024;

/// Requests that an owner names.
const MAX_NAMES: usize = 8;

/// Codes of runs.
const FREE: u32 = 0;
const CACHED: u32 = 1;
const OWNED: u32 = 2;

/// Who owns which block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BlockMap {
    /// Blocks in a cell; the last cell may have less.
    pub blocks_per_cell: usize,
    /// Code and length of each run of equal cells: 0 is free, 1 is cached, 2 and up is owned, by `owners[code - 2]`.
    pub runs: Vec<(u32, u32)>,
    /// Distinct owners of blocks.
    pub owners: Vec<Owner>,
}

/// The owner of some blocks: one request, or several that share them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Owner {
    /// Ids of the first eight of the requests; of none where a request has gone whose last step still runs.
    pub requests: Vec<u64>,
    /// Block tables with an entry for the block; more than one is shared.
    pub references: u32,
}

/// Draws the map, and counts the distinct blocks of each request.
pub(super) fn draw(pool: &BlockPool, requests: &[RequestView<'_>]) -> (BlockMap, Vec<usize>) {
    let total = pool.num_blocks();
    let mut owners = Owners::default();
    let mut codes = vec![FREE; total];
    // Request that saw a block last, counted from 1, so that blocks are distinct without sorting.
    let mut seen = vec![0u32; total];
    let mut shared: HashMap<u32, Vec<u64>> = HashMap::new();
    let mut counts = Vec::with_capacity(requests.len());
    for (view, mark) in requests.iter().zip(1u32..) {
        let id = view.id().0;
        let mut single = None;
        let mut count = 0;
        for block in view.blocks() {
            if std::mem::replace(&mut seen[block.index()], mark) == mark {
                continue;
            }
            count += 1;
            if pool.references(block) == 1 {
                let code = *single.get_or_insert_with(|| owners.code(Owner { requests: vec![id], references: 1 }));
                codes[block.index()] = code;
            } else {
                let names = shared.entry(block.0).or_default();
                if names.len() < MAX_NAMES {
                    names.push(id);
                }
            }
        }
        counts.push(count);
    }
    for (code, index) in codes.iter_mut().zip(0u32..).filter(|(code, _)| **code == FREE) {
        let block = BlockId(index);
        let references = pool.references(block);
        if references > 0 {
            *code = owners.code(Owner { requests: shared.remove(&index).unwrap_or_default(), references });
        } else if pool.is_cached(block) {
            *code = CACHED;
        }
    }
    let blocks_per_cell = total.div_ceil(MAX_CELLS).max(1);
    let cells = codes.chunks(blocks_per_cell).map(|blocks| owners.liveliest(blocks));
    (BlockMap { blocks_per_cell, runs: runs(cells), owners: owners.all }, counts)
}

fn runs(cells: impl Iterator<Item = u32>) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for code in cells {
        match runs.last_mut() {
            Some((last, length)) if *last == code => *length += 1,
            _ => runs.push((code, 1)),
        }
    }
    runs
}

#[derive(Default)]
struct Owners {
    all: Vec<Owner>,
    codes: HashMap<Owner, u32>,
}

impl Owners {
    fn code(&mut self, owner: Owner) -> u32 {
        if let Some(code) = self.codes.get(&owner) {
            return *code;
        }
        if self.all.len() < MAX_OWNERS {
            self.all.push(owner.clone());
            self.codes.insert(owner, OWNED + self.all.len() as u32 - 1);
        }
        OWNED + self.all.len() as u32 - 1
    }

    fn liveliest(&self, blocks: &[u32]) -> u32 {
        let rank = |code: &u32| match *code {
            FREE => 0,
            CACHED => 1,
            owned => 1 + self.all[(owned - OWNED) as usize].references,
        };
        blocks.iter().copied().max_by_key(rank).unwrap_or(FREE)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Instant;

    use sched::{Outcome, Request, RequestId, SchedConfig, Scheduler, SeqId};

    use super::*;

    fn scheduler(blocks: usize) -> Scheduler {
        let sizes = SchedConfig { max_num_seqs: 256, max_num_batched_tokens: 1 << 20, ..SchedConfig::new(blocks, 16) };
        Scheduler::new(SchedConfig { max_model_len: 1 << 20, ..sizes }).unwrap()
    }

    fn request(id: u64, prompt: Vec<u32>, max_tokens: usize) -> Request {
        Request::new(RequestId(id), prompt, max_tokens)
    }

    fn step(scheduler: &mut Scheduler, finished: bool) {
        let plan = scheduler.plan();
        let sampled = plan.spans.iter().filter(|span| !span.sample.is_empty());
        let outcomes: Vec<Outcome> =
            sampled.map(|span| Outcome::token(SeqId { request: span.seq.request, index: 0 }, 9, finished)).collect();
        scheduler.commit(plan.step, &outcomes).unwrap();
    }

    fn drawn(scheduler: &Scheduler) -> (BlockMap, Vec<usize>) {
        draw(scheduler.pool(), &scheduler.requests().collect::<Vec<_>>())
    }

    #[test]
    fn the_map_says_of_each_block_who_owns_it_who_shares_it_and_what_is_cached() {
        let mut scheduler = scheduler(12);
        let prefix: Vec<u32> = (0..32).collect();
        scheduler.submit(request(7, [&prefix[..], &[50; 4]].concat(), 4)).unwrap();
        step(&mut scheduler, false);
        let own = Owner { requests: vec![7], references: 1 };
        assert_eq!(drawn(&scheduler).0.runs, [(2, 3), (0, 9)]);
        assert_eq!(drawn(&scheduler).0.owners, [own]);

        scheduler.submit(request(9, [&prefix[..], &[60; 4]].concat(), 4)).unwrap();
        step(&mut scheduler, false);
        let (map, counts) = drawn(&scheduler);
        let both = Owner { requests: vec![7, 9], references: 2 };
        let shared = map.owners.iter().position(|owner| *owner == both).unwrap() as u32 + 2;
        assert_eq!(map.runs[0], (shared, 2), "the prefix is theirs together");
        assert_eq!(map.runs[1..], [(2, 1), (3, 1), (0, 8)], "the rest is their own");
        assert_eq!(counts, [3, 3]);

        step(&mut scheduler, true);
        let (map, counts) = drawn(&scheduler);
        assert_eq!(
            (map.runs, map.owners, counts),
            (vec![(1, 2), (0, 10)], vec![], vec![]),
            "what is full stays cached"
        );
    }

    #[test]
    fn a_cell_of_several_blocks_shows_the_liveliest() {
        let mut owners = Owners::default();
        let one = owners.code(Owner { requests: vec![1], references: 1 });
        let two = owners.code(Owner { requests: vec![1, 2], references: 2 });
        assert_eq!(owners.code(Owner { requests: vec![1], references: 1 }), one, "equal owners have one code");
        for (blocks, shown) in [
            (&[FREE, FREE][..], FREE),
            (&[FREE, CACHED, FREE], CACHED),
            (&[CACHED, one, FREE], one),
            (&[one, two, CACHED], two),
        ] {
            assert_eq!(owners.liveliest(blocks), shown);
        }
    }

    #[test]
    fn a_snapshot_of_a_large_pool_is_cheap_and_bounded() {
        let mut scheduler = scheduler(100_000);
        let prefix: Vec<u32> = (0..1600).collect();
        for id in 0..256u32 {
            let own = (0..1600).map(|i| 5000 + id * 7 + i);
            scheduler.submit(request(u64::from(id), prefix.iter().copied().chain(own).collect(), 1000)).unwrap();
            step(&mut scheduler, false);
        }
        let start = Instant::now();
        let (map, counts) = drawn(&scheduler);
        println!("a map of 100,000 blocks and {} requests: {:?}", counts.len(), start.elapsed());
        assert_eq!(map.blocks_per_cell, 7);
        assert_eq!(map.runs.iter().map(|run| run.1 as usize).sum::<usize>(), 100_000usize.div_ceil(7));
        assert!(map.owners.len() <= MAX_OWNERS && map.owners.iter().all(|owner| owner.requests.len() <= MAX_NAMES));
    }
}
