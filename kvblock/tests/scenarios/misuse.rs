//! Misuse: an error with the reason and no effect. A dropped table is reported and its blocks are freed.

use kvblock::{AuditError, BlockId, BlockPool, BlockTable, CacheGroup, HostBlockId, NoSpace, PoolConfig, TableError};

use super::{free_ids, full, open, pool, prompt, run, table_ids};

#[test]
fn an_invalid_configuration_is_refused() {
    let message = |config| BlockPool::new(config).err().map(|e| e.to_string()).unwrap_or_default();
    let good = PoolConfig::new(4, 4);
    assert_eq!(message(PoolConfig::new(0, 16)), "num_blocks: found 0, expected 1 to 4294967293");
    assert_eq!(message(PoolConfig::new(1 << 32, 16)), "num_blocks: found 4294967296, expected 1 to 4294967293");
    for block_size in [0, 3, 12, 48, 1 << 21, 1 << 63] {
        let expected = format!("block_size: found {block_size} tokens, expected a power of two up to 1048576");
        assert_eq!(message(PoolConfig::new(4, block_size)), expected);
    }
    for block_size in [1, 2, 8, 16, 32, 64, 128, 1024, 1 << 20] {
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
    assert_eq!(ours.commit(&mut table, 20), Err(foreign));
    assert_eq!(ours.truncate(&mut table, 1), Err(foreign));
    assert_eq!(ours.try_release(&mut table), Err(foreign));
    assert_eq!(ours.fork(&table).map(drop), Err(foreign));
    let mut tables = vec![table];
    assert_eq!(ours.swap_out(&mut tables).map(drop), Err(foreign));
    assert_eq!(ours.blocks_needed([(&tables[0], 1)]), 0);
    assert_eq!(ours.audit(&tables), Err(AuditError::ForeignTable));
    assert_eq!(foreign.to_string(), "the table belongs to another pool; use the pool that opened it");

    assert_eq!((free_ids(&ours), ours.drain_memory_ops().count()), (before, 0));
    ours.audit([]).unwrap();
    theirs.audit(&tables).unwrap();
    assert_eq!((table_ids(&tables[0]), tables[0].len()), (vec![0, 1], 20));
    // Released to the wrong pool, its blocks go back to the right one, which reports a leak.
    ours.release(tables.remove(0));
    assert_eq!(theirs.take_leaks().iter().map(|leak| leak.blocks).collect::<Vec<_>>(), [2]);
    theirs.audit([]).unwrap();
}

#[test]
fn more_tokens_than_a_table_has_cannot_be_committed() {
    let mut pool = pool(4);
    let mut table = open(&mut pool, prompt(&full(1, 2)[..20]));
    assert_eq!(pool.commit(&mut table, 21), Err(TableError::BeyondEnd { wanted: 21, len: 20 }));
    assert_eq!((table.committed(), pool.gauges().cached), (0, 0));
    pool.commit(&mut table, 20).unwrap();
    let error = pool.truncate(&mut table, 21).unwrap_err();
    assert_eq!(error, TableError::BeyondEnd { wanted: 21, len: 20 });
    assert_eq!(error.to_string(), "found 21 tokens, expected at most 20; append or commit them first");
    assert_eq!(pool.truncate(&mut table, 20), Ok(()), "nothing to cut");
    assert_eq!(pool.commit(&mut table, 3), Ok(()), "no effect");
    pool.audit([&table]).unwrap();
    pool.release(table);
}

#[test]
fn a_dropped_table_is_reported_with_its_line_and_its_blocks_are_freed() {
    let mut pool = pool(4);
    let (line, table) = (line!(), open(&mut pool, prompt(&full(1, 2)[..20])));
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
fn dropped_forks_and_swapped_sequences_are_reported_too() {
    let mut pool = BlockPool::new(PoolConfig { host_blocks: 4, ..PoolConfig::new(8, 16) }).unwrap();
    let table = run(&mut pool, prompt(&full(1, 2)));
    drop(pool.fork(&table).unwrap());
    drop(pool.swap_out(&mut vec![table]).unwrap());
    assert_eq!(pool.take_leaks().iter().map(|leak| leak.blocks).collect::<Vec<_>>(), [2, 2]);
    assert_eq!((pool.gauges().in_use, pool.host_gauges().in_use), (0, 0));
    pool.audit([]).unwrap();
    pool.audit_host([]).unwrap();
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "was dropped; give it to BlockPool::release")]
fn in_debug_builds_the_next_opening_reports_the_leak() {
    let mut pool = pool(4);
    drop(open(&mut pool, prompt(&[1; 20])));
    let _ = pool.admit(prompt(&[2; 20])).open(0);
}

#[test]
#[cfg(not(debug_assertions))]
fn in_release_builds_the_next_opening_frees_leaked_blocks() {
    let mut pool = pool(2);
    drop(open(&mut pool, prompt(&[1; 20])));
    let table = open(&mut pool, prompt(&[2; 20]));
    assert_eq!(pool.counters().leaked_tables, 1);
    pool.release(table);
}

#[test]
fn tables_that_outlive_their_pool_are_not_leaks() {
    let mut first = pool(4);
    let table = run(&mut first, prompt(&[1; 20]));
    drop(first);
    let mut second = pool(4);
    drop(table);
    assert_eq!((second.take_leaks().len(), second.counters().leaked_tables), (0, 0));
    assert_eq!(second.available(), 4);
}

#[test]
fn a_pool_and_its_tables_may_move_to_another_thread() {
    let mut pool = pool(4);
    let table = run(&mut pool, prompt(&[1; 20]));
    let moved = std::thread::spawn(move || {
        pool.release(table);
        pool
    });
    let mut pool = moved.join().unwrap();
    assert_eq!((pool.available(), pool.take_leaks().len()), (4, 0));
}

#[test]
fn a_block_after_one_with_forgotten_contents_is_never_found_as_a_first_block() {
    let mut pool = BlockPool::new(PoolConfig::new(8, 4)).unwrap();
    let mut table = open(&mut pool, prompt(&[1, 2, 3, 4, 5, 6, 7, 8]));
    pool.commit(&mut table, 4).unwrap();
    let first = table.blocks()[0];
    pool.forget_contents(first).unwrap();
    pool.commit(&mut table, 8).unwrap();
    assert_eq!(pool.admit(prompt(&[5, 6, 7, 8, 9])).cached_tokens(), 0);
    assert_eq!(pool.admit(prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9])).cached_tokens(), 0);
    pool.audit([&table]).unwrap();

    // A fork keeps the invalid block. The table is cut before it, computed again, and then found.
    let fork = pool.fork(&table).unwrap();
    pool.truncate(&mut table, 0).unwrap();
    pool.append(&mut table, &[1, 2, 3, 4, 5, 6, 7, 8, 9]).unwrap();
    pool.commit(&mut table, 9).unwrap();
    assert_eq!(pool.admit(prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9])).cached_tokens(), 8);
    pool.audit([&table, &fork]).unwrap();
    pool.release(table);
    pool.release(fork);
}

#[test]
fn a_partial_block_that_a_failed_copy_should_have_filled_is_never_indexed() {
    let mut pool = BlockPool::new(PoolConfig::new(8, 4)).unwrap();
    let first = run(&mut pool, prompt(&[1, 2, 3, 4, 5, 6]));
    let mut fork = pool.fork(&first).unwrap();
    pool.append(&mut fork, &[7, 8]).unwrap();
    let copy = fork.blocks()[1];
    pool.forget_contents(copy).unwrap();
    // Copies of the block are invalid too.
    let mut copy_of_copy = pool.fork(&first).unwrap();
    pool.commit(&mut fork, 7).unwrap();
    pool.truncate(&mut fork, 7).unwrap();
    let mut second = pool.fork(&fork).unwrap();
    pool.append(&mut second, &[8]).unwrap();
    assert_ne!(second.blocks()[1], copy);
    pool.commit(&mut second, 8).unwrap();
    pool.append(&mut fork, &[8]).unwrap();
    pool.commit(&mut fork, 8).unwrap();
    assert_eq!(pool.admit(prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9])).cached_tokens(), 4);
    pool.append(&mut copy_of_copy, &[7, 8]).unwrap();
    pool.commit(&mut copy_of_copy, 8).unwrap();
    assert_eq!(
        pool.admit(prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9])).cached_tokens(),
        8,
        "the copy of the valid first table"
    );
    let tables = [first, fork, second, copy_of_copy];
    pool.audit(&tables).unwrap();
    tables.into_iter().for_each(|table| pool.release(table));
}

#[test]
fn a_table_swapped_in_from_a_host_block_that_a_failed_copy_should_have_filled_is_never_indexed() {
    let mut pool = BlockPool::new(PoolConfig { host_blocks: 4, ..PoolConfig::new(8, 4) }).unwrap();
    let tokens: Vec<u32> = (1..=13).collect();
    let mut tables = vec![run(&mut pool, prompt(&tokens))];
    let mut swapped = pool.swap_out(&mut tables).unwrap();
    let second = swapped.blocks()[1];
    pool.forget_host_contents(second).unwrap();
    assert!(!pool.reset_prefix_cache(), "what is on the host could enter the index again");
    let filler = run(&mut pool, prompt(&[99; 32])); // so that all blocks are copied back
    pool.release(filler);
    let tables = pool.swap_in(&mut swapped, 0).unwrap();
    assert_eq!(pool.admit(prompt(&tokens)).cached_tokens(), 4);
    pool.audit(&tables).unwrap();
    pool.audit_host([&swapped]).unwrap();
    tables.into_iter().for_each(|table| pool.release(table));
    let table = run(&mut pool, prompt(&tokens));
    assert_eq!(pool.admit(prompt(&tokens)).cached_tokens(), 12);
    pool.release(table);
}

#[test]
fn a_table_that_held_invalid_contents_is_cached_again_once_it_was_emptied() {
    let mut pool = BlockPool::new(PoolConfig::new(8, 4)).unwrap();
    let mut table = open(&mut pool, prompt(&[1, 2, 3, 4]));
    pool.forget_contents(table.blocks()[0]).unwrap();
    pool.commit(&mut table, 4).unwrap();
    pool.try_release(&mut table).unwrap();
    pool.append(&mut table, &[1, 2, 3, 4, 5]).unwrap();
    pool.commit(&mut table, 5).unwrap();
    assert_eq!(pool.admit(prompt(&[1, 2, 3, 4, 5])).cached_tokens(), 4);
    pool.release(table);
}

#[test]
fn more_blocks_than_there_can_be_are_never_free() {
    let mut pool = BlockPool::new(PoolConfig { host_blocks: 4, ..PoolConfig::new(4, 4) }).unwrap();
    let table = run(&mut pool, prompt(&[1, 2, 3, 4, 5]));
    let mut swapped = pool.swap_out(&mut vec![table]).unwrap();
    let wanted = usize::MAX;
    assert_eq!(pool.admit(prompt(&[1, 2, 3, 4, 5])).open(wanted).map(drop), Err(NoSpace { wanted, free: 4 }));
    let error = TableError::NoSpace(NoSpace { wanted, free: 4 });
    assert_eq!(pool.swap_in(&mut swapped, wanted).map(drop), Err(error));
    pool.discard(swapped);
}

#[test]
fn a_block_that_does_not_exist_is_an_error() {
    let mut pool = BlockPool::new(PoolConfig { host_blocks: 2, ..PoolConfig::new(4, 16) }).unwrap();
    let error = pool.forget_contents(BlockId(4)).unwrap_err();
    assert_eq!(error, TableError::NoSuchBlock { id: 4, blocks: 4 });
    assert_eq!(
        error.to_string(),
        "block 4 does not exist; expected an id below 4, the number of blocks; use an id of this pool"
    );
    assert_eq!(pool.forget_host_contents(HostBlockId(2)), Err(TableError::NoSuchBlock { id: 2, blocks: 2 }));
    assert_eq!(pool.forget_contents(BlockId(u32::MAX)), Err(TableError::NoSuchBlock { id: u32::MAX, blocks: 4 }));
    assert_eq!((pool.references(BlockId(9)), pool.is_cached(BlockId(9)), pool.prefix_of(BlockId(9))), (0, false, None));
    pool.forget_contents(BlockId(3)).unwrap();
    pool.audit([]).unwrap();
}
