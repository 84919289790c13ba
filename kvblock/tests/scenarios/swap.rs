//! Swapping: which blocks are copied, in which order, and which are not.

use kvblock::{BlockId, BlockPool, HostBlockId, MemOp, NoSpace, PoolConfig, TableError};

use super::{cached, concat, free_ids, full, open, prompt, refs, run, table_ids};

fn pool(num_blocks: usize, host_blocks: usize) -> BlockPool {
    BlockPool::new(PoolConfig { host_blocks, poison: true, ..PoolConfig::new(num_blocks, 16) }).unwrap()
}

fn swap_out(src: u32, dst: u32) -> MemOp {
    MemOp::SwapOut { src: BlockId(src), dst: HostBlockId(dst) }
}

fn swap_in(src: u32, dst: u32) -> MemOp {
    MemOp::SwapIn { src: HostBlockId(src), dst: BlockId(dst) }
}

fn poison(block: u32, from_slot: usize) -> MemOp {
    MemOp::Poison { block: BlockId(block), from_slot }
}

fn ops(pool: &mut BlockPool) -> Vec<MemOp> {
    pool.drain_memory_ops().collect()
}

#[test]
fn a_table_that_is_swapped_in_is_findable_and_is_not_hashed_again() {
    let mut pool = pool(8, 8);
    let tokens = full(1, 5);
    let mut tables = vec![run(&mut pool, prompt(&tokens))];
    let mut swapped = pool.swap_out(&mut tables).unwrap();
    // Its blocks are reused in between, so that all five are copied back and indexed again.
    let other = run(&mut pool, prompt(&full(2, 8)));
    pool.release(other);
    let hashed = pool.counters().hashed;
    let tables = pool.swap_in(&mut swapped, 0).unwrap();
    assert_eq!((pool.counters().hashed, pool.counters().swapped_in), (hashed, 5));
    assert!(table_ids(&tables[0]).into_iter().all(|block| pool.is_cached(BlockId(block))));
}

#[test]
fn a_block_that_two_forks_share_is_copied_once_and_shared_again() {
    let mut pool = pool(6, 4);
    let a = run(&mut pool, prompt(&full(1, 2)[..20]));
    let mut b = pool.fork(&a).unwrap();
    pool.append(&mut b, &[9]).unwrap();
    pool.commit(&mut b, 21).unwrap();
    pool.drain_memory_ops().for_each(drop);
    assert_eq!((table_ids(&a), table_ids(&b)), (vec![0, 1], vec![0, 2]));

    let mut tables = vec![a, b];
    assert_eq!(pool.host_blocks_needed(tables.iter().map(|t| (t, t.committed()))), 3);
    let mut swapped = pool.swap_out(&mut tables).unwrap();
    // The blocks that are not cached are free, and poisoned after their copies. Block 0 stays findable.
    assert_eq!(ops(&mut pool), [swap_out(0, 0), swap_out(1, 1), swap_out(2, 2), poison(1, 0), poison(2, 0)]);
    assert_eq!(
        (tables.len(), free_ids(&pool), cached(&pool, 0..3)),
        (0, vec![2, 1, 3, 4, 5, 0], vec![true, false, false])
    );
    assert_eq!((pool.host_gauges().in_use, pool.host_gauges().free), (3, 1));
    pool.audit_host([&swapped]).unwrap();

    // Block 0 is still cached, so it is shared and not copied.
    assert_eq!(pool.blocks_to_swap_in(&swapped), 3);
    let tables = pool.swap_in(&mut swapped, 0).unwrap();
    assert_eq!(ops(&mut pool), [swap_in(1, 2), swap_in(2, 1)]);
    assert_eq!(
        (table_ids(&tables[0]), table_ids(&tables[1]), refs(&pool, 0..3)),
        (vec![0, 2], vec![0, 1], vec![2, 1, 1])
    );
    assert_eq!((tables[0].committed(), tables[1].tokens()[20]), (20, 9));
    assert_eq!((pool.counters().swapped_out, pool.counters().swapped_in, pool.counters().swap_in_hits), (3, 2, 1));
    assert_eq!(pool.host_gauges().in_use, 0);
    pool.audit(&tables).unwrap();
    tables.into_iter().for_each(|t| pool.release(t));
}

#[test]
fn a_block_that_was_evicted_in_between_is_copied_back_and_findable_again() {
    let mut pool = pool(4, 4);
    let tokens = concat(&[&full(1, 3), &[1]]);
    let mut tables = vec![run(&mut pool, prompt(&tokens))];
    let mut swapped = pool.swap_out(&mut tables).unwrap();
    let other = run(&mut pool, prompt(&full(2, 3)));
    assert_eq!(cached(&pool, 0..4), [true; 4], "the first block of the swapped table and three others");
    assert_eq!(pool.blocks_to_swap_in(&swapped), 4);
    assert_eq!(pool.swap_in(&mut swapped, 0).map(drop), Err(TableError::NoSpace(NoSpace { wanted: 4, free: 1 })));
    assert_eq!((swapped.blocks().len(), pool.host_gauges().in_use), (4, 4), "a failure changes nothing");
    pool.audit([&other]).unwrap();
    pool.release(other);
    pool.drain_memory_ops().for_each(drop);

    let tables = pool.swap_in(&mut swapped, 0).unwrap();
    let copies: Vec<_> = ops(&mut pool).into_iter().filter(|op| matches!(op, MemOp::SwapIn { .. })).collect();
    assert_eq!(copies.len(), 3);
    pool.audit(&tables).unwrap();
    assert_eq!(pool.admit(prompt(&tokens)).cached_tokens(), 48);
    tables.into_iter().for_each(|t| pool.release(t));
}

#[test]
fn shared_blocks_stay_on_the_device_and_the_cache_is_not_reset_while_a_swapped_table_could_enter_it() {
    let mut pool = pool(6, 6);
    let tokens = concat(&[&full(1, 2), &[1]]);
    let (a, b) = (run(&mut pool, prompt(&tokens)), open(&mut pool, prompt(&tokens)));
    let mut tables = vec![a];
    let mut swapped = pool.swap_out(&mut tables).unwrap();
    assert_eq!((refs(&pool, 0..3), swapped.blocks().len()), (vec![1, 1, 0], 3));
    pool.audit([&b]).unwrap();
    pool.release(b);
    assert_eq!((pool.gauges().in_use, pool.gauges().cached), (0, 2));
    assert!(!pool.reset_prefix_cache(), "a swapped table owns host blocks");
    assert_eq!(pool.gauges().cached, 2, "nothing has changed");
    for table in pool.swap_in(&mut swapped, 0).unwrap() {
        pool.release(table);
    }
    assert!(pool.reset_prefix_cache());
    assert_eq!(pool.admit(prompt(&tokens)).cached_tokens(), 0);
}

#[test]
fn tokens_that_are_not_committed_are_cut_off() {
    let mut pool = pool(6, 6);
    let mut tables = vec![open(&mut pool, prompt(&full(1, 4)[..50]))];
    pool.commit(&mut tables[0], 18).unwrap();
    let mut swapped = pool.swap_out(&mut tables).unwrap();
    assert_eq!((swapped.blocks().len(), swapped.tokens().next().unwrap().len()), (2, 18));
    let table = pool.swap_in(&mut swapped, 0).unwrap().remove(0);
    assert_eq!((table.len(), table.committed(), table.blocks().len()), (18, 18, 2));
    pool.release(table);
}

#[test]
fn with_too_few_host_blocks_a_swap_fails_and_the_tables_stay() {
    let mut pool = pool(6, 1);
    let mut tables = vec![run(&mut pool, prompt(&full(1, 2)))];
    let error = pool.swap_out(&mut tables).map(drop).unwrap_err();
    assert_eq!(error, TableError::NoHostSpace(NoSpace { wanted: 2, free: 1 }));
    assert_eq!(
        error.to_string(),
        "too few free host blocks: found 1, expected at least 2; swap a sequence in or discard one"
    );
    assert_eq!((tables.len(), ops(&mut pool)), (1, vec![]));
    pool.audit(&tables).unwrap();
    pool.release(tables.remove(0));
}
