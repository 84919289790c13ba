//! Bad input gets an error value that says what and why, and changes nothing; what is dropped is not lost.

use kvblock::{AuditError, BlockPool, BlockTable, CacheGroup, PoolConfig, TableError};

use crate::{free_ids, full, pool, prompt, run, table_ids};

#[test]
fn a_pool_that_can_not_be_is_refused() {
    let message = |config| BlockPool::new(config).err().map(|e| e.to_string()).unwrap_or_default();
    let good = PoolConfig::new(4, 4);
    assert_eq!(message(PoolConfig::new(0, 16)), "num_blocks: found 0, expected 1 to 4294967293");
    assert_eq!(message(PoolConfig::new(1 << 32, 16)), "num_blocks: found 4294967296, expected 1 to 4294967293");
    for block_size in [0, 3, 12, 48] {
        let expected = format!("block_size: found {block_size} tokens, expected a power of two");
        assert_eq!(message(PoolConfig::new(4, block_size)), expected);
    }
    for block_size in [1, 2, 8, 16, 32, 64, 128, 1024] {
        assert_eq!(message(PoolConfig::new(4, block_size)), "");
    }
    assert_eq!(message(PoolConfig { hash_bits: 129, ..good.clone() }), "hash_bits: found 129, expected 1 to 128");
    assert_eq!(
        message(PoolConfig { host_blocks: 1 << 32, ..good.clone() }),
        "host_blocks: found 4294967296, expected 0 to 4294967293"
    );
    assert_eq!(message(PoolConfig { groups: vec![], ..good.clone() }), "groups: found 0, expected 1 to 256");
    let groups = vec![CacheGroup::Full, CacheGroup::Sliding { window: 0 }];
    assert_eq!(
        message(PoolConfig { groups, ..good }),
        "groups: found a window of 0 in group 1, expected at least 1 position"
    );
}

#[test]
fn a_table_of_another_pool_is_refused_and_both_pools_stay_as_they_are() {
    let (mut ours, mut theirs) = (pool(4), pool(4));
    let mut table = run(&mut theirs, prompt(&full(1, 2)[..20]));
    let before = free_ids(&ours);
    let foreign = TableError::ForeignTable;
    assert_eq!(ours.append(&mut table, &[1]), Err(foreign));
    assert_eq!(ours.try_commit(&mut table, 20), Err(foreign));
    assert_eq!(ours.try_truncate(&mut table, 1), Err(foreign));
    assert_eq!(ours.try_release(&mut table), Err(foreign));
    assert_eq!(ours.fork(&table).map(drop), Err(foreign));
    assert_eq!(ours.pin(&table, 16).map(drop), Err(foreign));
    let mut tables = vec![table];
    assert_eq!(ours.swap_out(&mut tables).map(drop), Err(foreign));
    assert_eq!(ours.blocks_needed([(&tables[0], 1)]), 0);
    assert_eq!(ours.audit(&tables), Err(AuditError::ForeignTable));
    assert_eq!(
        foreign.to_string(),
        "the table belongs to another pool than the one called; use the pool that opened it"
    );

    assert_eq!((free_ids(&ours), ours.drain_memory_ops().count()), (before, 0));
    ours.audit([]).unwrap();
    theirs.audit(&tables).unwrap();
    assert_eq!((table_ids(&tables[0]), tables[0].len()), (vec![0, 1], 20));
    theirs.release(tables.remove(0));
}

#[test]
fn more_tokens_than_there_are_can_not_be_committed_or_pinned() {
    let mut pool = pool(4);
    let mut table = pool.admit(prompt(&full(1, 2)[..20])).open(0).unwrap();
    assert_eq!(pool.try_commit(&mut table, 21), Err(TableError::BeyondEnd { wanted: 21, len: 20 }));
    assert_eq!((table.committed(), pool.gauges().cached), (0, 0));
    assert_eq!(pool.pin(&table, 16).map(drop), Err(TableError::BeyondEnd { wanted: 16, len: 0 }));
    pool.commit(&mut table, 20);
    assert_eq!(pool.try_truncate(&mut table, 30), Ok(()), "there is nothing to cut");
    pool.audit([&table]).unwrap();
    pool.release(table);
}

#[test]
fn a_dropped_table_is_named_by_its_line_and_its_blocks_come_back() {
    let mut pool = pool(4);
    let (line, table) = (line!(), pool.admit(prompt(&full(1, 2)[..20])).open(0).unwrap());
    drop::<BlockTable>(table);
    assert!(matches!(pool.audit([]), Err(AuditError::References { counted: 1, found: 0, .. })));
    let leaks = pool.take_leaks();
    assert_eq!((leaks.len(), leaks[0].blocks, leaks[0].opened.line()), (1, 2, line));
    let expected = format!(
        "a table with 2 blocks that was opened at {} was dropped; give it to BlockPool::release",
        leaks[0].opened
    );
    assert_eq!(leaks[0].to_string(), expected);
    assert!(expected.contains("misuse.rs"));
    assert_eq!((pool.gauges().in_use, pool.counters().leaked_tables), (0, 1));
    pool.audit([]).unwrap();
    assert_eq!(pool.take_leaks(), []);
}

#[test]
fn forks_pins_and_swapped_sequences_are_named_too() {
    let mut pool = BlockPool::new(PoolConfig { host_blocks: 4, ..PoolConfig::new(8, 16) }).unwrap();
    let table = run(&mut pool, prompt(&full(1, 2)));
    drop(pool.fork(&table).unwrap());
    drop(pool.pin(&table, 32).unwrap());
    drop(pool.swap_out(&mut vec![table]).unwrap());
    assert_eq!(pool.take_leaks().iter().map(|leak| leak.blocks).collect::<Vec<_>>(), [2, 2, 2]);
    assert_eq!((pool.gauges().in_use, pool.host_gauges().in_use), (0, 0));
    pool.audit([]).unwrap();
    pool.audit_host([]).unwrap();
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "was dropped; give it to BlockPool::release")]
fn in_debug_builds_the_next_opening_says_who_leaked() {
    let mut pool = pool(4);
    drop(pool.admit(prompt(&[1; 20])).open(0).unwrap());
    let _ = pool.admit(prompt(&[2; 20])).open(0);
}

#[test]
#[cfg(not(debug_assertions))]
fn in_release_builds_the_next_opening_takes_leaked_blocks_back() {
    let mut pool = pool(2);
    drop(pool.admit(prompt(&[1; 20])).open(0).unwrap());
    let table = pool.admit(prompt(&[2; 20])).open(0).unwrap();
    assert_eq!(pool.counters().leaked_tables, 1);
    pool.release(table);
}

#[test]
fn tables_that_outlive_their_pool_are_no_leak() {
    let mut first = pool(4);
    let table = run(&mut first, prompt(&[1; 20]));
    drop(first);
    drop(table);
}

#[test]
fn a_pool_and_its_tables_may_move_to_another_thread() {
    fn moves<T: Send>(_: &T) {}
    let mut pool = pool(4);
    let table = run(&mut pool, prompt(&[1; 20]));
    moves(&pool);
    moves(&table);
    pool.release(table);
}
