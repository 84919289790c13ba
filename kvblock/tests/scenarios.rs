//! What peers' suites test of a block manager, restated (ids C1 to C15), with exact block ids and orders.
//!
//! Block size 16 throughout; the pool has no null block, so the ids start at 0.
#![allow(clippy::unwrap_used)]

use kvblock::{BlockId, BlockPool, BlockTable, MemOp, MissReason, NoSpace, PoolConfig, Prompt};

fn pool(num_blocks: usize) -> BlockPool {
    BlockPool::new(PoolConfig { poison: true, ..PoolConfig::new(num_blocks, 16) }).unwrap()
}

fn prompt(tokens: &[u32]) -> Prompt<'_> {
    Prompt { tokens, salt: None, read_cache: true }
}

/// Opens and computes a prompt.
fn run(pool: &mut BlockPool, prompt: Prompt<'_>) -> BlockTable {
    let mut table = pool.admit(prompt).open(0).unwrap();
    pool.commit(&mut table, prompt.tokens.len());
    table
}

/// `blocks` whole blocks of tokens that only this `kind` has.
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

#[test]
fn c1_cold_warm_evict() {
    let mut pool = pool(10);
    let shared = full(1, 3);
    let a = run(&mut pool, prompt(&concat(&[&shared, &[1; 7]])));
    assert_eq!(table_ids(&a), [0, 1, 2, 3]);
    assert_eq!(cached(&pool, 0..4), [true, true, true, false]);
    assert_eq!(refs(&pool, 0..4), [1, 1, 1, 1]);

    let tokens = concat(&[&shared, &[2; 5]]);
    let admission = pool.admit(prompt(&tokens));
    assert_eq!((admission.cached_tokens(), admission.blocks_needed(), admission.miss()), (48, 1, None));
    let b = admission.open(0).unwrap();
    assert_eq!(table_ids(&b), [0, 1, 2, 4]);
    assert_eq!(refs(&pool, 0..5), [2, 2, 2, 1, 1]);
    assert_eq!(pool.available(), 5);

    pool.release(a);
    pool.release(b);
    assert_eq!(free_ids(&pool), [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]);
    let gauges = pool.gauges();
    assert_eq!((gauges.in_use, gauges.cached, gauges.free), (0, 3, 7));

    let c = run(&mut pool, prompt(&concat(&[&shared, &[3; 5]])));
    assert_eq!((table_ids(&c), pool.available()), (vec![0, 1, 2, 4], 6));
    pool.release(c);
    assert_eq!(free_ids(&pool), [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]);

    let d = run(&mut pool, prompt(&full(9, 10)));
    assert_eq!((d.committed(), pool.available()), (160, 0));
    assert_eq!(table_ids(&d), [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]);
    assert_eq!(pool.stats().hit_tokens, 96);
    pool.audit([&d]).unwrap();
}

#[test]
fn c2_a_hit_takes_blocks_from_the_midst_of_the_eviction_order() {
    let mut pool = pool(10);
    let a_tokens = concat(&[&full(1, 5), &[7; 4]]);
    let a = run(&mut pool, prompt(&a_tokens));
    let b = run(&mut pool, prompt(&full(2, 3)));
    assert_eq!((table_ids(&a), table_ids(&b), pool.available()), (vec![0, 1, 2, 3, 4, 5], vec![6, 7, 8], 1));
    pool.release(a);
    assert_eq!(free_ids(&pool), [5, 9, 4, 3, 2, 1, 0]);
    pool.release(b);
    assert_eq!(free_ids(&pool), [5, 9, 4, 3, 2, 1, 0, 8, 7, 6]);

    let c = run(&mut pool, prompt(&concat(&[&a_tokens[..32], &[8; 3]])));
    assert_eq!((table_ids(&c), pool.available()), (vec![0, 1, 5], 7));
    assert_eq!(free_ids(&pool), [9, 4, 3, 2, 8, 7, 6]);
}

#[test]
fn c3_reuse_clears_the_hash() {
    let mut pool = pool(1);
    let first = full(1, 1);
    let table = run(&mut pool, prompt(&first));
    pool.release(table);
    assert!(pool.is_cached(BlockId(0)));
    pool.drain_memory_ops().for_each(drop);

    let table = run(&mut pool, prompt(&full(2, 1)[..15]));
    assert_eq!((table_ids(&table), pool.is_cached(BlockId(0))), (vec![0], false));
    assert_eq!(pool.drain_memory_ops().collect::<Vec<_>>(), [MemOp::Poison { block: BlockId(0), from_slot: 0 }]);
    let again = concat(&[&first, &[1]]);
    let admission = pool.admit(prompt(&again));
    assert_eq!((admission.cached_tokens(), admission.miss()), (0, Some(MissReason::NotCached)));
}

#[test]
fn c4_a_block_just_matched_is_not_the_victim() {
    let mut pool = pool(2);
    let (p, q) = (full(1, 1), full(2, 1));
    for tokens in [&p, &q] {
        let table = run(&mut pool, prompt(tokens));
        pool.release(table);
    }
    // P lies in block 0. The second took the unhashed block 1, so P is next to be evicted, but for the hit.
    assert_eq!(free_ids(&pool), [0, 1]);
    let table = run(&mut pool, prompt(&concat(&[&p, &full(3, 1)])));
    assert_eq!(table_ids(&table), [0, 1]);
    assert_eq!(pool.stats().hit_tokens, 16);
    pool.audit([&table]).unwrap();
}

#[test]
fn c5_decode_appends_and_hashes_blocks_as_they_fill() {
    let mut pool = pool(10);
    let mut table = run(&mut pool, prompt(&full(1, 4)[..55]));
    assert_eq!(table_ids(&table), [0, 1, 2, 3]);
    assert_eq!(pool.append(&mut table, &[5; 4]), Ok(4));
    pool.commit(&mut table, 59);
    assert_eq!((table_ids(&table), cached(&pool, 0..4)), (vec![0, 1, 2, 3], vec![true, true, true, false]));

    assert_eq!(pool.append(&mut table, &[6; 19]), Ok(4));
    assert!(!pool.is_cached(BlockId(3)), "slots alone are not computed tokens");
    pool.commit(&mut table, 78);
    assert_eq!((table_ids(&table), cached(&pool, 3..5)), (vec![0, 1, 2, 3, 4], vec![true, false]));
    pool.audit([&table]).unwrap();
}

#[test]
fn c6_of_a_prompt_that_is_cached_whole_the_last_block_is_recomputed() {
    let mut pool = pool(10);
    let tokens = full(1, 3);
    let first = run(&mut pool, prompt(&tokens));
    let second = pool.admit(prompt(&tokens)).open(0).unwrap();
    assert_eq!((second.committed(), table_ids(&second)), (32, vec![0, 1, 3]));
    pool.audit([&first, &second]).unwrap();

    let short = pool.admit(prompt(&tokens[..16]));
    assert_eq!((short.cached_tokens(), short.miss()), (0, Some(MissReason::ShorterThanBlock)));
}

#[test]
fn c7_a_request_that_reads_no_cache_still_stores_its_blocks() {
    let mut pool = pool(10);
    let tokens = concat(&[&full(1, 2), &[1]]);
    let unread = Prompt { read_cache: false, ..prompt(&tokens) };
    let first = run(&mut pool, unread);
    let second = run(&mut pool, unread);
    assert_eq!((table_ids(&first), table_ids(&second)), (vec![0, 1, 2], vec![3, 4, 5]));
    assert_eq!(pool.admit(unread).miss(), Some(MissReason::NotRead));
    assert_eq!(cached(&pool, 0..6), [true, true, false, true, true, false]);
    assert_eq!((pool.stats().not_read, pool.stats().hit_tokens), (2, 0));

    let third = pool.admit(prompt(&tokens)).open(0).unwrap();
    assert_eq!(table_ids(&third), [0, 1, 6], "the oldest duplicate serves");
    pool.audit([&first, &second, &third]).unwrap();
}

#[test]
fn c8_without_prefix_caching_there_is_plain_accounting() {
    let config = PoolConfig { prefix_caching: false, poison: true, ..PoolConfig::new(4, 16) };
    let mut pool = BlockPool::new(config).unwrap();
    let tokens = full(1, 3);
    let first = run(&mut pool, prompt(&tokens));
    assert_eq!(pool.admit(prompt(&tokens)).open(0).unwrap_err(), NoSpace { wanted: 3, free: 1 });
    assert_eq!((free_ids(&pool), pool.hash_seed()), (vec![3], None));
    pool.audit([&first]).unwrap();

    pool.release(first);
    let second = run(&mut pool, prompt(&tokens));
    assert_eq!((second.committed(), pool.gauges().cached), (48, 0));
    assert_eq!(*pool.stats(), Default::default());
    pool.release(second);
    assert!(pool.reset_prefix_cache());
}

#[test]
fn c9_different_salts_never_share() {
    let mut pool = pool(20);
    let tokens = concat(&[&full(1, 3), &[1]]);
    let salts = [None, Some(""), Some("a"), Some("b")];
    let tables = salts.map(|salt| run(&mut pool, Prompt { salt, ..prompt(&tokens) }));
    assert_eq!(tables.each_ref().map(|t| table_ids(t)[0]), [0, 4, 8, 12]);
    for (salt, table) in salts.iter().zip(&tables) {
        let admission = pool.admit(Prompt { salt: *salt, ..prompt(&tokens) });
        assert_eq!((admission.cached_tokens(), admission.blocks_needed()), (48, 1));
        let again = admission.open(0).unwrap();
        assert_eq!(again.blocks()[..3], table.blocks()[..3]);
        pool.release(again);
    }
    pool.audit(&tables).unwrap();
}

#[test]
fn c10_a_refusal_changes_nothing() {
    let mut pool = pool(10);
    let shared = full(1, 3);
    let long = concat(&[&shared, &full(2, 3)]);
    let a = run(&mut pool, prompt(&shared));
    let b = run(&mut pool, prompt(&long));
    assert_eq!(table_ids(&b), [0, 1, 2, 3, 4, 5]);
    pool.release(b);
    assert_eq!(refs(&pool, 0..6), [1, 1, 1, 0, 0, 0]);
    let c = run(&mut pool, prompt(&full(3, 2)));
    assert_eq!((table_ids(&c), pool.available()), (vec![6, 7], 5));
    let before = free_ids(&pool);

    let d_tokens = concat(&[&long, &full(4, 3)]);
    let admission = pool.admit(prompt(&d_tokens));
    assert_eq!((admission.cached_tokens(), admission.blocks_needed()), (96, 6));
    assert_eq!(admission.open(0).unwrap_err(), NoSpace { wanted: 6, free: 5 });
    assert_eq!(refs(&pool, 0..6), [1, 1, 1, 0, 0, 0]);
    assert_eq!(free_ids(&pool), before);

    // One block less fits, but not if a block must stay free.
    let admission = pool.admit(prompt(&d_tokens[..128]));
    assert_eq!(admission.open(1).unwrap_err(), NoSpace { wanted: 6, free: 5 });
    let d = pool.admit(prompt(&d_tokens[..128])).open(0).unwrap();
    assert_eq!((table_ids(&d)[..6].to_vec(), pool.available()), (vec![0, 1, 2, 3, 4, 5], 0));

    let mut a = a;
    assert_eq!(pool.append(&mut a, &[1]), Err(NoSpace { wanted: 1, free: 0 }));
    assert_eq!((a.len(), table_ids(&a)), (48, vec![0, 1, 2]));
    pool.audit([&a, &c, &d]).unwrap();
}

#[test]
fn c10b_evicting_one_duplicate_keeps_the_other_findable() {
    for hash_bits in [128, 1] {
        let mut pool = BlockPool::new(PoolConfig { hash_bits, ..PoolConfig::new(4, 16) }).unwrap();
        let tokens = full(1, 1);
        let probe = concat(&[&tokens, &[0]]);
        let unread = Prompt { read_cache: false, ..prompt(&tokens) };
        let (first, second) = (run(&mut pool, unread), run(&mut pool, unread));
        pool.release(first);
        pool.release(second);
        assert_eq!(free_ids(&pool), [2, 3, 0, 1]);

        let filler = run(&mut pool, prompt(&full(2, 3)));
        assert_eq!((table_ids(&filler), cached(&pool, 0..2)), (vec![2, 3, 0], vec![true, true]));
        assert_eq!(pool.admit(prompt(&probe)).cached_tokens(), 16, "block 1 still holds it");
        let last = run(&mut pool, prompt(&full(3, 1)));
        assert_eq!((table_ids(&last), pool.admit(prompt(&probe)).cached_tokens()), (vec![1], 0));
        pool.audit([&filler, &last]).unwrap();
    }
}

#[test]
fn c11_the_prefix_cache_is_reset_only_when_idle() {
    let mut pool = pool(6);
    let tokens = concat(&[&full(1, 3), &[1]]);
    let table = run(&mut pool, prompt(&tokens));
    assert!(!pool.reset_prefix_cache());
    assert_eq!(pool.admit(prompt(&tokens)).cached_tokens(), 48);
    pool.release(table);
    pool.drain_memory_ops().for_each(drop);

    assert!(pool.reset_prefix_cache());
    let poisoned = [0, 1, 2].map(|b| MemOp::Poison { block: BlockId(b), from_slot: 0 });
    assert_eq!(pool.drain_memory_ops().collect::<Vec<_>>(), poisoned);
    assert_eq!((pool.admit(prompt(&tokens)).cached_tokens(), pool.gauges().free), (0, 6));
    pool.audit([]).unwrap();
}

#[test]
fn c15_a_fork_copies_one_block_at_its_first_append() {
    let mut pool = pool(6);
    let mut parent = run(&mut pool, prompt(&full(1, 2)[..20]));
    let mut child = pool.fork(&parent).unwrap();
    assert_eq!((table_ids(&child), refs(&pool, 0..2)), (vec![0, 1], vec![2, 2]));
    assert_eq!(pool.blocks_needed([(&parent, 1)]), 1);
    assert_eq!(pool.blocks_needed([(&parent, 1), (&child, 1)]), 1, "the second of two writes in place");

    assert_eq!(pool.append(&mut child, &[5]), Ok(1));
    assert_eq!((table_ids(&child), refs(&pool, 0..3)), (vec![0, 2], vec![2, 1, 1]));
    let copy = MemOp::Copy { src: BlockId(1), dst: BlockId(2) };
    let poison = MemOp::Poison { block: BlockId(2), from_slot: 4 };
    assert_eq!(pool.drain_memory_ops().collect::<Vec<_>>(), [copy, poison]);

    assert_eq!(pool.append(&mut parent, &[6]), Ok(2), "the parent is the sole owner of its tail now");
    assert_eq!((table_ids(&parent), pool.drain_memory_ops().count()), (vec![0, 1], 0));

    pool.release(parent);
    assert_eq!((table_ids(&child), child.tokens()[20], refs(&pool, 0..3)), (vec![0, 2], 5, vec![1, 0, 1]));
    pool.audit([&child]).unwrap();
}

#[test]
fn a_fork_of_tokens_that_are_not_computed_is_refused() {
    let mut pool = pool(6);
    let table = pool.admit(prompt(&[1; 20])).open(0).unwrap();
    assert_eq!(pool.fork(&table).unwrap_err().to_string(), "0 of 20 tokens are committed; commit or truncate before forking");
    assert_eq!(refs(&pool, 0..2), [1, 1]);
}

#[test]
fn truncation_drops_the_hash_of_a_block_cut_within_and_poisons_what_is_cut_off() {
    let mut pool = pool(6);
    let tokens = full(1, 3);
    let mut table = run(&mut pool, prompt(&tokens));
    pool.truncate(&mut table, 20);
    assert_eq!((table_ids(&table), table.committed()), (vec![0, 1], 20));
    assert_eq!(cached(&pool, 0..3), [true, false, true], "block 2 is given back whole and stays cached");
    assert_eq!(pool.drain_memory_ops().collect::<Vec<_>>(), [MemOp::Poison { block: BlockId(1), from_slot: 4 }]);
    assert_eq!(pool.admit(prompt(&tokens)).cached_tokens(), 16);
    pool.audit([&table]).unwrap();
}

#[test]
fn truncation_within_a_shared_block_leaves_the_other_owner_alone() {
    let mut pool = pool(6);
    let tokens = full(1, 2);
    let mut table = run(&mut pool, prompt(&tokens));
    let other = pool.fork(&table).unwrap();
    pool.truncate(&mut table, 20);
    assert_eq!((cached(&pool, 0..2), pool.drain_memory_ops().count()), (vec![true, true], 0));
    pool.release(other);
    // Now a sole owner, of a block that is still cached with its old contents: writing to it ends that.
    assert_eq!(pool.append(&mut table, &[9]), Ok(2));
    assert_eq!(cached(&pool, 0..2), [true, false]);
    assert_eq!(pool.drain_memory_ops().collect::<Vec<_>>(), [MemOp::Poison { block: BlockId(1), from_slot: 4 }]);
    pool.audit([&table]).unwrap();
}

#[test]
fn a_child_of_a_colliding_prefix_is_not_taken_for_ones_own() {
    // With a hash of one bit, [X][T] and [Y][T] end under the same hash with equal last tokens; only the parents differ.
    for seed in 0..20 {
        let config = PoolConfig { hash_bits: 1, hash_seed: Some(seed), ..PoolConfig::new(12, 16) };
        let mut pool = BlockPool::new(config).unwrap();
        let (x, y, t) = (full(1, 1), full(2, 1), full(3, 1));
        let held = run(&mut pool, prompt(&concat(&[&x, &t, &[0]])));
        let y_alone = run(&mut pool, prompt(&concat(&[&y, &[0]])));
        assert_eq!(pool.admit(prompt(&concat(&[&y, &t, &[0]]))).cached_tokens(), 16);
        assert_eq!(pool.admit(prompt(&concat(&[&x, &t, &[0]]))).cached_tokens(), 32);
        pool.audit([&held, &y_alone]).unwrap();
    }
}

#[test]
fn a_pool_that_can_not_be_is_refused() {
    let message = |config| BlockPool::new(config).err().map(|e| e.to_string()).unwrap_or_default();
    assert_eq!(message(PoolConfig::new(0, 16)), "num_blocks: found 0, expected 1 to 4294967294");
    assert_eq!(message(PoolConfig::new(4, 0)), "block_size: found 0, expected at least 1 token");
    assert_eq!(message(PoolConfig { hash_bits: 129, ..PoolConfig::new(4, 4) }), "hash_bits: found 129, expected 1 to 128");
}
