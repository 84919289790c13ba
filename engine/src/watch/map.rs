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
mod tests {
    use super::*;

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
}
