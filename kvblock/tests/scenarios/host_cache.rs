//! The host tier of the prefix cache: what is copied, in which order, and what stays.

use std::collections::BTreeSet;

use kvblock::{BlockEvent, BlockId, BlockPool, CacheGroup, HostBlockId, HostGauges, MemOp, PoolConfig, Prompt, Tier};

use super::{cached, concat, full, prompt, run, table_ids};

fn pool(num_blocks: usize, host_blocks: usize) -> BlockPool {
    let sizes = PoolConfig::new(num_blocks, 16);
    BlockPool::new(PoolConfig { host_blocks, host_caching: true, poison: false, events: true, ..sizes }).unwrap()
}

fn out(src: u32, dst: u32) -> MemOp {
    MemOp::SwapOut { src: BlockId(src), dst: HostBlockId(dst) }
}

fn back(src: u32, dst: u32) -> MemOp {
    MemOp::SwapIn { src: HostBlockId(src), dst: BlockId(dst) }
}

fn ops(pool: &mut BlockPool) -> Vec<MemOp> {
    pool.drain_memory_ops().collect()
}

/// Computes a prompt and releases it.
fn compute(pool: &mut BlockPool, tokens: &[u32]) {
    let table = run(pool, prompt(tokens));
    pool.release(table);
}

#[test]
fn an_evicted_prefix_comes_back_from_the_host_and_stays_there() {
    let mut pool = pool(4, 8);
    let first = concat(&[&full(1, 3), &[1]]);
    compute(&mut pool, &first);
    assert_eq!(ops(&mut pool), [], "what is on the device is not copied");
    compute(&mut pool, &full(2, 4));
    // The end of the sequence is evicted before its beginning.
    assert_eq!(ops(&mut pool), [out(2, 0), out(1, 1), out(0, 2)]);
    assert_eq!(pool.host_gauges(), HostGauges { in_use: 0, cached: 3, free: 5 });

    let lookup = pool.lookup(prompt(&first));
    assert_eq!((lookup.cached_tokens, lookup.host_tokens, lookup.blocks_needed, lookup.miss), (48, 48, 3, None));
    let table = pool.admit(prompt(&first)).open(1).unwrap();
    assert_eq!((table.committed(), pool.stats().hit_tokens, pool.stats().host_hit_tokens), (48, 48, 48));
    // Each new block evicts one of the second prompt, which goes to the host before it is overwritten.
    let order = ops(&mut pool);
    assert_eq!(order, [out(0, 3), back(2, 0), out(1, 4), back(1, 1), out(2, 5), back(0, 2)]);
    assert!(table_ids(&table).into_iter().all(|block| pool.is_cached(BlockId(block))), "others can share them now");
    assert_eq!(pool.host_gauges().cached, 6, "a hit leaves the host block cached");
    pool.audit([&table]).unwrap();
    pool.release(table);
    compute(&mut pool, &full(3, 4));
    let evicted: Vec<MemOp> = ops(&mut pool);
    assert!(evicted.iter().all(|op| !matches!(op, MemOp::SwapOut { src: BlockId(0..3), .. })), "{evicted:?}");
    assert_eq!((pool.counters().offloaded, pool.counters().loaded), (7, 3));
    pool.audit_host([]).unwrap();
}

#[test]
fn the_blocks_of_a_hit_are_not_evicted_from_the_host_while_they_are_loaded() {
    // Three host blocks hold the first prompt. Loading it evicts another prefix, which finds no host block.
    let mut pool = pool(4, 3);
    let first = concat(&[&full(1, 3), &[1]]);
    compute(&mut pool, &first);
    compute(&mut pool, &full(2, 4));
    pool.drain_memory_ops().for_each(drop);
    let table = pool.admit(prompt(&first)).open(0).unwrap();
    assert_eq!(table.committed(), 48);
    let order = ops(&mut pool);
    assert!(order.iter().all(|op| matches!(op, MemOp::SwapIn { .. })) && order.len() == 3, "{order:?}");
    pool.release(table);
}

#[test]
fn a_hit_may_be_partly_on_the_device_and_partly_on_the_host() {
    let mut pool = pool(4, 8);
    let first = concat(&[&full(1, 3), &[1]]);
    compute(&mut pool, &first);
    compute(&mut pool, &full(2, 2)[..20]);
    assert_eq!(ops(&mut pool), [out(2, 0)], "block 3 was free");
    let lookup = pool.lookup(prompt(&first));
    assert_eq!((lookup.cached_tokens, lookup.host_tokens, lookup.blocks_needed), (48, 16, 3));
    let table = pool.admit(prompt(&first)).open(0).unwrap();
    assert_eq!(table_ids(&table)[..2], [0, 1]);
    pool.release(table);
}

#[test]
fn swapped_requests_take_host_blocks_from_the_cache_but_not_the_other_way_round() {
    let mut pool = pool(4, 3);
    compute(&mut pool, &full(1, 4));
    let mut tables = vec![run(&mut pool, prompt(&full(2, 3)))];
    assert_eq!(pool.host_gauges(), HostGauges { in_use: 0, cached: 3, free: 0 });
    let mut swapped = pool.swap_out(&mut tables).unwrap();
    assert_eq!(pool.host_gauges(), HostGauges { in_use: 3, cached: 0, free: 0 });
    pool.drain_memory_ops().for_each(drop);
    compute(&mut pool, &full(3, 4));
    assert!(ops(&mut pool).is_empty(), "no host block is left for what is evicted");
    let tables = pool.swap_in(&mut swapped, 0).unwrap();
    tables.into_iter().for_each(|table| pool.release(table));
    pool.audit_host([]).unwrap();
}

#[test]
fn a_failed_copy_to_the_host_is_never_found() {
    let mut pool = pool(4, 8);
    let first = concat(&[&full(1, 3), &[1]]);
    compute(&mut pool, &first);
    compute(&mut pool, &full(2, 4));
    // Host block 1 has the second block of the prompt.
    pool.forget_host_contents(HostBlockId(1)).unwrap();
    assert_eq!(pool.lookup(prompt(&first)).cached_tokens, 16);
    assert_eq!(pool.host_gauges(), HostGauges { in_use: 0, cached: 2, free: 6 });
    pool.audit_host([]).unwrap();
}

#[test]
fn a_failed_copy_from_the_host_is_tried_again() {
    let mut pool = pool(4, 8);
    let first = concat(&[&full(1, 3), &[1]]);
    compute(&mut pool, &first);
    compute(&mut pool, &full(2, 4));
    let table = pool.admit(prompt(&first)).open(0).unwrap();
    let failed = table.blocks()[1];
    pool.drain_memory_ops().for_each(drop);
    pool.forget_contents(failed).unwrap();
    pool.release(table);
    assert_eq!((cached(&pool, failed.0..failed.0 + 1), pool.lookup(prompt(&first)).host_tokens), (vec![false], 16));
    pool.drain_memory_ops().for_each(drop);
    let table = pool.admit(prompt(&first)).open(0).unwrap();
    let copies: Vec<MemOp> = ops(&mut pool).into_iter().filter(|op| matches!(op, MemOp::SwapIn { .. })).collect();
    assert_eq!((table.committed(), copies), (48, vec![back(1, failed.0)]));
    pool.release(table);
}

#[test]
fn salts_and_adapters_are_kept_apart_on_the_host() {
    let mut pool = pool(4, 8);
    let tokens = concat(&[&full(1, 3), &[1]]);
    let of = |salt, adapter| Prompt { salt, adapter, ..Prompt::new(&tokens) };
    let table = run(&mut pool, of(Some("tenant"), None));
    pool.release(table);
    compute(&mut pool, &full(2, 4));
    let found = |salt, adapter| pool.lookup(of(salt, adapter)).cached_tokens;
    assert_eq!([found(Some("tenant"), None), found(None, None), found(Some("other"), None)], [48, 0, 0]);
    assert_eq!([found(None, Some("tenant")), found(Some("tenant"), Some("tenant"))], [0, 0]);
}

#[test]
fn a_window_comes_back_from_the_host_without_what_lies_behind_it() {
    let groups = vec![CacheGroup::Full, CacheGroup::Sliding { window: 16 }];
    let sizes = PoolConfig { groups, host_blocks: 20, host_caching: true, ..PoolConfig::new(8, 16) };
    let mut pool = BlockPool::new(sizes).unwrap();
    let first = concat(&[&full(1, 3), &[1]]);
    compute(&mut pool, &first);
    compute(&mut pool, &full(2, 4)[..60]);
    let lookup = pool.lookup(prompt(&first));
    assert_eq!((lookup.cached_tokens, lookup.host_tokens), (48, 48));
    let table = pool.admit(prompt(&first)).open(0).unwrap();
    assert_eq!(
        (table.groups()[0].blocks().len(), table.groups()[1].holes(), table.groups()[1].blocks().len()),
        (3, 2, 1)
    );
    pool.audit([&table]).unwrap();
    pool.release(table);
}

#[test]
fn a_reset_empties_both_tiers() {
    let mut pool = pool(4, 8);
    compute(&mut pool, &full(1, 4));
    compute(&mut pool, &full(2, 4));
    assert!(pool.reset_prefix_cache());
    assert_eq!(pool.host_gauges(), HostGauges { in_use: 0, cached: 0, free: 8 });
    assert_eq!(pool.lookup(prompt(&concat(&[&full(1, 3), &[1]]))).cached_tokens, 0);
    pool.audit_host([]).unwrap();
}

#[test]
fn events_name_the_tier_and_a_copy_comes_before_the_removal() {
    let mut pool = pool(4, 2);
    compute(&mut pool, &full(1, 4));
    let hashes = match pool.drain_events().next() {
        Some(BlockEvent::Stored { tier: Tier::Device, hashes, .. }) => hashes,
        other => panic!("found {other:?}"),
    };
    compute(&mut pool, &full(2, 2)[..20]);
    let copied = |hash| {
        let (group, tier, hashes) = (0, Tier::Host, vec![hash]);
        BlockEvent::Stored { tier, group, parent: None, hashes, tokens: vec![], key: None }
    };
    let removed = |tier, hash| BlockEvent::Removed { tier, group: 0, hash };
    let events: Vec<BlockEvent> = pool.drain_events().collect();
    let last_two = [3, 2].map(|k| [copied(hashes[k]), removed(Tier::Device, hashes[k])]).concat();
    assert_eq!(events[..4], last_two);

    // The host has two blocks: each further prefix pushes one out.
    compute(&mut pool, &full(3, 2)[..20]);
    let events: Vec<BlockEvent> = pool.drain_events().collect();
    assert_eq!(events[..3], [removed(Tier::Host, hashes[3]), copied(hashes[1]), removed(Tier::Device, hashes[1])]);
    let tiers = pool.cached_prefixes(0).into_iter().map(|event| match event {
        BlockEvent::Stored { tier, hashes, .. } => (tier, hashes[0]),
        other => panic!("found {other:?}"),
    });
    let tiers: Vec<_> = tiers.collect();
    assert!(tiers.contains(&(Tier::Host, hashes[2])) && tiers.contains(&(Tier::Device, hashes[0])), "{tiers:?}");
}

/// All blocks of a prompt of one group.
fn all(blocks: usize) -> BTreeSet<(usize, usize)> {
    (0..blocks).map(|block| (block, 0)).collect()
}

#[test]
fn a_block_from_elsewhere_takes_no_host_block_that_an_ordered_copy_reads_or_writes() {
    let mut pool = pool(8, 6);
    let mut tables = vec![run(&mut pool, prompt(&full(1, 2)))];
    let mut swapped = pool.swap_out(&mut tables).unwrap();
    let filler = run(&mut pool, prompt(&full(2, 8))); // evicts the first prompt from the pool
    pool.release(filler);
    pool.drain_memory_ops().for_each(drop);
    // Two operations read host blocks 0 and 1, which are free again, and others write two of the four that are left.
    let tables = pool.swap_in(&mut swapped, 0).unwrap();
    let ordered: Vec<MemOp> = pool.memory_ops().collect();
    let reads = |host: u32| ordered.iter().any(|op| matches!(op, MemOp::SwapIn { src, .. } if src.0 == host));
    let writes = |host: u32| ordered.iter().any(|op| matches!(op, MemOp::SwapOut { dst, .. } if dst.0 == host));
    assert_eq!(((0..6).filter(|host| reads(*host)).count(), (0..6).filter(|host| writes(*host)).count()), (2, 2));
    let free = (0..6).filter(|host| !reads(*host) && !writes(*host)).count();
    let inserted = pool.insert_on_host(prompt(&full(3, 4)), &all(4));
    assert_eq!(inserted.len(), free, "each other host block is used");
    assert!(inserted.iter().all(|copy| !reads(copy.host.0) && !writes(copy.host.0)), "{inserted:?}, {ordered:?}");
    // Nothing is ordered any more, so the least recently used ones give way.
    pool.drain_memory_ops().for_each(drop);
    assert_eq!(pool.insert_on_host(prompt(&full(4, 4)), &all(4)).len(), 4);
    pool.audit_host([]).unwrap();
    tables.into_iter().for_each(|table| pool.release(table));
}

#[test]
fn what_is_copied_from_a_block_with_invalid_contents_is_never_found() {
    let mut pool = pool(4, 8);
    let first = concat(&[&full(1, 3), &[1]]);
    compute(&mut pool, &first);
    compute(&mut pool, &full(2, 4));
    pool.drain_memory_ops().for_each(drop);
    let table = pool.admit(prompt(&first)).open(0).unwrap();
    pool.drain_memory_ops().for_each(drop);
    for host in 0..8 {
        pool.forget_host_contents(HostBlockId(host)).unwrap();
    }
    // The second block did not arrive. A copy of it is ordered before that is known.
    assert_eq!(pool.copy_to_host(prompt(&first)).len(), 3);
    pool.forget_contents(table.blocks()[1]).unwrap();
    pool.release(table);
    assert_eq!(pool.lookup(prompt(&first)).cached_tokens, 16);
    pool.audit_host([]).unwrap();
}
