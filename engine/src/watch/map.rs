//! A map of the block pool as runs of equal cells: free, cached, or owned, and by which requests.
//!
//! ```text
//! block   0 1 2 3 4 5 6 7        owners  [0] request 7, one reference      runs  [2,2, 3,1, 1,2, 0,3]
//!         A A * · · _ _ _                [1] requests 7 and 9, two                A×2  *×1  ·×2  _×3
//! ```
//!
//! In a pool of more than [`MAX_CELLS`] blocks, a cell covers several blocks and shows the most important one: shared before
//! owned by one request, owned before cached, cached before free. So a map has at most [`MAX_CELLS`] runs and [`MAX_OWNERS`]
//! owners, whatever the size of the pool.

use std::collections::HashMap;

use kvblock::{BlockId, BlockPool};
use sched::RequestView;
use serde::Serialize;

/// Greatest number of cells in a map.
pub const MAX_CELLS: usize = 16_384;

/// Greatest number of distinct owners. Blocks of further owners are shown as the last one's.
const MAX_OWNERS: usize = 1024;

/// Greatest number of request ids in an [`Owner`].
const MAX_NAMES: usize = 8;

// Codes of runs.
const FREE: u32 = 0;
const CACHED: u32 = 1;
const OWNED: u32 = 2;

/// The owners of all blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BlockMap {
    /// Number of blocks in a cell; the last cell may have fewer.
    pub blocks_per_cell: usize,
    /// Code and length of each run of equal cells. Code 0 is free, 1 is cached, and 2 and above is owned by `owners[code - 2]`.
    pub runs: Vec<(u32, u32)>,
    /// Distinct owners of blocks.
    pub owners: Vec<Owner>,
}

/// The owner of some blocks: one request, or several requests that share them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Owner {
    /// Ids of the requests, at most eight. Empty if the request has ended and its last step is still in flight.
    pub requests: Vec<u64>,
    /// Number of block tables that contain the block; it is shared if there are several.
    pub references: u32,
}

/// Returns the map, and the number of distinct blocks of each request.
pub(super) fn draw(pool: &BlockPool, requests: &[RequestView<'_>]) -> (BlockMap, Vec<usize>) {
    let total = pool.num_blocks();
    let mut owners = Owners::default();
    let mut codes = vec![FREE; total];
    // The last request with the block, counted from 1, so that a block counts once per request.
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
    let cells = codes.chunks(blocks_per_cell).map(|blocks| owners.most_important(blocks));
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

    fn most_important(&self, blocks: &[u32]) -> u32 {
        let rank = |code: &u32| match *code {
            FREE => 0,
            CACHED => 1,
            owned => 1 + self.all[(owned - OWNED) as usize].references,
        };
        blocks.iter().copied().max_by_key(rank).unwrap_or(FREE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_of_several_blocks_shows_the_most_important() {
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
            assert_eq!(owners.most_important(blocks), shown);
        }
    }
}
