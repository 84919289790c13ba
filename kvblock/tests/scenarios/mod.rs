//! The scenarios of other engines' test suites for a block manager, rewritten (ids C1 to C15), with exact block ids and
//! orders.
//!
//! The block size is 16 throughout. The pool has no null block, so the ids start at 0.
//!
//! | id | where |
//! |---|---|
//! | C1–C4, C6, C7, C9, C10b, C11 | `prefix_cache` |
//! | C5, C8, C10, C14, C15 | `tables` (C8 in `prefix_cache`) |
//! | C12 | `events` |
//! | C13 | `groups` |
//! | our own: the host tier, swap, leaks and misuse, hashes, size of the metadata | `host_cache`, `swap`, `misuse`, `hashes`, `metadata` |

mod events;
mod groups;
mod hashes;
mod host_cache;
mod metadata;
mod misuse;
mod prefix_cache;
mod swap;
mod tables;

use kvblock::{BlockId, BlockPool, BlockTable, PoolConfig, Prompt};

fn pool(num_blocks: usize) -> BlockPool {
    BlockPool::new(PoolConfig { poison: true, ..PoolConfig::new(num_blocks, 16) }).unwrap()
}

fn prompt(tokens: &[u32]) -> Prompt<'_> {
    Prompt::new(tokens)
}

/// Opens a table with slots for a whole prompt.
#[track_caller]
fn open(pool: &mut BlockPool, prompt: Prompt<'_>) -> BlockTable {
    let mut table = pool.admit(prompt).open(0).unwrap();
    let cached = table.len();
    pool.append(&mut table, &prompt.tokens[cached..]).unwrap();
    table
}

/// Opens and computes a prompt.
fn run(pool: &mut BlockPool, prompt: Prompt<'_>) -> BlockTable {
    let mut table = open(pool, prompt);
    pool.commit(&mut table, prompt.tokens.len()).unwrap();
    table
}

/// Tokens of `blocks` full blocks; no two kinds have a token in common.
fn full(kind: u32, blocks: usize) -> Vec<u32> {
    (0..16 * blocks as u32).map(|i| kind * 10_000 + i).collect()
}

fn concat(parts: &[&[u32]]) -> Vec<u32> {
    parts.concat()
}

fn ids(blocks: impl IntoIterator<Item = BlockId>) -> Vec<u32> {
    blocks.into_iter().map(|b| b.0).collect()
}

fn table_ids(table: &BlockTable) -> Vec<u32> {
    ids(table.blocks().iter().copied())
}

fn free_ids(pool: &BlockPool) -> Vec<u32> {
    ids(pool.free_blocks())
}

fn refs(pool: &BlockPool, blocks: std::ops::Range<u32>) -> Vec<u32> {
    blocks.map(|b| pool.references(BlockId(b))).collect()
}

fn cached(pool: &BlockPool, blocks: std::ops::Range<u32>) -> Vec<bool> {
    blocks.map(|b| pool.is_cached(BlockId(b))).collect()
}
