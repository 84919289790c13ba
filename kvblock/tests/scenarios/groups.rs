//! Full and sliding groups in one pool: holes, common hits, blocks behind a window.

use kvblock::{BlockId, BlockPool, CacheGroup, MissReason, PoolConfig, TableError};

use super::{concat, free_ids, full, ids, open, prompt, refs, run};

const FULL: CacheGroup = CacheGroup::Full;

fn pool(num_blocks: usize, groups: &[CacheGroup]) -> BlockPool {
    BlockPool::new(PoolConfig { groups: groups.to_vec(), poison: true, ..PoolConfig::new(num_blocks, 16) }).unwrap()
}

/// Evicts exactly the given cached, free blocks, by allocating and releasing everything up to them.
fn evict(pool: &mut BlockPool, victims: &[u32]) {
    let mut tables = Vec::new();
    let groups = pool.groups().len();
    while victims.iter().any(|b| pool.is_cached(BlockId(*b))) {
        tables.push(open(pool, prompt(&[90_000 + tables.len() as u32; 16])));
        assert!(tables.len() * groups <= pool.num_blocks());
    }
    tables.into_iter().for_each(|table| pool.release(table));
}

#[test]
fn c13_each_group_has_a_table_and_the_window_advances() {
    // Other engines use a null block here. In this pool a hole is an entry without a block.
    let mut pool = pool(10, &[FULL, CacheGroup::Sliding { window: 20 }]);
    let tokens = full(1, 3);
    let mut table = open(&mut pool, prompt(&tokens));
    assert_eq!(
        table.groups().iter().map(|g| ids(g.blocks().iter().copied())).collect::<Vec<_>>(),
        [[0, 2, 4], [1, 3, 5]]
    );
    pool.commit(&mut table, 34).unwrap();
    assert_eq!(table.groups()[1].holes(), 0, "the query at 34 reads from 15 on");
    pool.commit(&mut table, 35).unwrap();
    assert_eq!((table.groups()[1].holes(), pool.available()), (1, 5), "the query at 35 reads from 16 on");
    assert_eq!((table.groups()[1].entry(0), table.groups()[1].entry(1)), (None, Some(BlockId(3))));
    assert_eq!(free_ids(&pool), [6, 7, 8, 9, 1], "a block behind the window stays cached");
    assert_eq!(table.slots_in(1, 14..18).collect::<Vec<_>>(), [-1, -1, 48, 49]);
    assert_eq!(table.slots(14..18).collect::<Vec<_>>(), [14, 15, 32, 33]);
    assert_eq!(pool.counters().behind_window, 1);
    pool.audit([&table]).unwrap();
    pool.release(table);
    assert_eq!(pool.gauges().in_use, 0);
}

#[test]
fn c13_a_hit_is_the_longest_length_that_every_group_serves() {
    // The full group has blocks 0 2 4, the sliding group 1 3 5. A hit of three blocks reads the last two of those.
    let prepared = |num_blocks| {
        let mut pool = pool(num_blocks, &[FULL, CacheGroup::Sliding { window: 20 }]);
        let tokens = concat(&[&full(1, 3), &[1]]);
        let table = run(&mut pool, prompt(&tokens));
        pool.release(table);
        (pool, tokens)
    };
    let lookup = |pool: &mut BlockPool, tokens: &[u32]| {
        let admission = pool.admit(prompt(tokens));
        (admission.cached_tokens() / 16, admission.miss())
    };
    // Each table of `evict` takes two blocks: of nine in the pool, the last one that is not cached and block 1.
    let (mut pool, tokens) = prepared(9);
    assert_eq!(lookup(&mut pool, &tokens), (3, None));
    // The block behind the window was freed first, so it is evicted first.
    assert_eq!(free_ids(&pool)[3..], [1, 5, 4, 3, 2, 0]);
    evict(&mut pool, &[1]);
    assert_eq!(lookup(&mut pool, &tokens), (3, None), "no query of that length reads it");
    let hit = open(&mut pool, prompt(&tokens));
    assert_eq!((hit.groups()[1].holes(), hit.groups()[1].entry(1)), (1, Some(BlockId(3))));
    pool.audit([&hit]).unwrap();
    pool.release(hit);

    let (mut pool, tokens) = prepared(8);
    evict(&mut pool, &[1, 5]);
    assert_eq!(lookup(&mut pool, &tokens), (0, Some(MissReason::Evicted)), "length 3 reads block 5, length 2 block 1");
}

#[test]
fn c13_evicting_the_last_block_of_a_chain_loses_one_block_and_the_first_loses_all() {
    let tokens = concat(&[&full(1, 3), &[1]]);
    let mut pool = pool(17, &[FULL, CacheGroup::Sliding { window: 35 }]);
    let table = run(&mut pool, prompt(&tokens));
    assert_eq!(ids(table.groups()[0].blocks().iter().copied()), [0, 2, 4, 6]);
    pool.release(table);
    // The end of a chain is evicted before its beginning.
    assert_eq!(free_ids(&pool)[11..], [5, 4, 3, 2, 1, 0]);
    let mut lengths = Vec::new();
    for victims in [&[5][..], &[4, 3], &[2, 1]] {
        evict(&mut pool, victims);
        lengths.push(pool.admit(prompt(&tokens)).cached_tokens() / 16);
    }
    assert_eq!(lengths, [2, 1, 0]);
    assert!(pool.is_cached(BlockId(0)), "a hit needs the sliding group's first block too");
}

#[test]
fn c13_holes_of_one_fork_do_not_affect_the_other() {
    let mut pool = pool(12, &[FULL, CacheGroup::Sliding { window: 16 }]);
    let mut ahead = run(&mut pool, prompt(&full(1, 2)[..20]));
    let behind = pool.fork(&ahead).unwrap();
    assert_eq!(refs(&pool, 0..4), [2, 2, 2, 2]);
    pool.append(&mut ahead, &[7; 20]).unwrap();
    pool.commit(&mut ahead, 40).unwrap();
    assert_eq!((ahead.groups()[1].holes(), behind.groups()[1].holes()), (1, 0));
    assert_eq!(behind.groups()[1].entry(0), Some(BlockId(1)));
    assert_eq!(refs(&pool, 0..4), [2, 1, 1, 1]);
    assert_eq!(pool.counters().copied, 2, "the shared last block of each group");
    pool.audit([&ahead, &behind]).unwrap();
    pool.release(ahead);
    pool.release(behind);
}

#[test]
fn c13_without_a_full_group_holes_do_not_break_the_chain_of_a_live_sequence() {
    let mut pool = pool(12, &[CacheGroup::Sliding { window: 16 }]);
    let tokens = full(1, 4);
    let mut table = run(&mut pool, prompt(&tokens[..16]));
    for end in [33, 50, 64] {
        let from = table.len();
        pool.append(&mut table, &tokens[from..end]).unwrap();
        pool.commit(&mut table, end).unwrap();
        pool.audit([&table]).unwrap();
    }
    assert_eq!((table.groups()[0].holes(), pool.gauges().cached), (3, 3));
    assert_eq!(pool.admit(prompt(&concat(&[&tokens, &[0]]))).cached_tokens(), 64);
    pool.release(table);
}

#[test]
fn c13_a_length_whose_window_was_freed_is_refused() {
    let mut pool = pool(12, &[FULL, CacheGroup::Sliding { window: 16 }]);
    let mut table = run(&mut pool, prompt(&full(1, 3)));
    assert_eq!(table.groups()[1].holes(), 2);
    let before = table.groups().to_vec();
    let refused = Err(TableError::BehindWindow { len: 30, group: 1 });
    assert_eq!(pool.truncate(&mut table, 30), refused);
    assert_eq!((table.groups(), table.len()), (&before[..], 48));
    pool.audit([&table]).unwrap();
    assert_eq!(pool.truncate(&mut table, 47), Ok(()));
    pool.audit([&table]).unwrap();
    pool.release(table);
}
