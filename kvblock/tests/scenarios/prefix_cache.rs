//! Hits, misses and the order of eviction.

use kvblock::{BlockId, BlockPool, Media, MemOp, MissReason, NoSpace, PoolConfig, Prompt};

use super::{cached, concat, free_ids, full, open, pool, prompt, refs, run, table_ids};

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
    assert_eq!((admission.cached_tokens(), admission.blocks_needed(), admission.miss()), (48, 0, None));
    let mut b = admission.open(0).unwrap();
    assert_eq!((table_ids(&b), b.tokens()), (vec![0, 1, 2], &tokens[..48]));
    pool.append(&mut b, &tokens[48..]).unwrap();
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
fn c2_a_hit_takes_blocks_from_the_middle_of_the_free_list() {
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
    assert_eq!((admission.cached_tokens(), admission.miss()), (0, Some(MissReason::Evicted)));
}

#[test]
fn c4_a_block_just_matched_is_not_the_victim() {
    let mut pool = pool(2);
    let (p, q) = (full(1, 1), full(2, 1));
    for tokens in [&p, &q] {
        let table = run(&mut pool, prompt(tokens));
        pool.release(table);
    }
    // P is in block 0, Q in block 1. P would be evicted next, if it were not hit.
    assert_eq!(free_ids(&pool), [0, 1]);
    let table = run(&mut pool, prompt(&concat(&[&p, &full(3, 1)])));
    assert_eq!(table_ids(&table), [0, 1]);
    assert_eq!(pool.stats().hit_tokens, 16);
    pool.audit([&table]).unwrap();
}

#[test]
fn c6_the_last_block_of_a_fully_cached_prompt_is_computed_again() {
    let mut pool = pool(10);
    let tokens = full(1, 3);
    let first = run(&mut pool, prompt(&tokens));
    let second = open(&mut pool, prompt(&tokens));
    assert_eq!((second.committed(), table_ids(&second)), (32, vec![0, 1, 3]));
    pool.audit([&first, &second]).unwrap();

    let short = pool.admit(prompt(&tokens[..16]));
    assert_eq!((short.cached_tokens(), short.miss()), (0, Some(MissReason::ShorterThanBlock)));
}

#[test]
fn c7_a_prompt_that_does_not_read_the_cache_still_enters_it() {
    let mut pool = pool(10);
    let tokens = concat(&[&full(1, 2), &[1]]);
    let unread = Prompt { read_cache: false, ..prompt(&tokens) };
    let first = run(&mut pool, unread);
    let second = run(&mut pool, unread);
    assert_eq!((table_ids(&first), table_ids(&second)), (vec![0, 1, 2], vec![3, 4, 5]));
    assert_eq!(pool.admit(unread).miss(), Some(MissReason::NotRead));
    assert_eq!(cached(&pool, 0..6), [true, true, false, true, true, false]);
    assert_eq!((pool.stats().not_read, pool.stats().hit_tokens), (2, 0));

    let third = open(&mut pool, prompt(&tokens));
    assert_eq!(table_ids(&third), [0, 1, 6], "the oldest duplicate is found");
    pool.audit([&first, &second, &third]).unwrap();
}

#[test]
fn c8_without_prefix_caching_blocks_are_only_counted() {
    let config = PoolConfig { prefix_caching: false, poison: true, ..PoolConfig::new(4, 16) };
    let mut pool = BlockPool::new(config).unwrap();
    let tokens = full(1, 3);
    let first = run(&mut pool, prompt(&tokens));
    let mut none = pool.admit(prompt(&tokens)).open(0).unwrap();
    assert_eq!(pool.append(&mut none, &tokens), Err(NoSpace { wanted: 3, free: 1 }.into()));
    pool.release(none);
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
        assert_eq!((admission.cached_tokens(), admission.blocks_needed()), (48, 0));
        let again = admission.open(0).unwrap();
        assert_eq!(again.blocks(), &table.blocks()[..3]);
        pool.release(again);
    }
    pool.audit(&tables).unwrap();
}

fn image(digest: &str, start: usize, len: usize) -> Media {
    Media { digest: digest.into(), start, len }
}

#[test]
fn c9_adapters_and_media_never_share_and_kinds_do_not_alias() {
    let mut pool = pool(60);
    let tokens = concat(&[&full(1, 3), &[1]]);
    let (one, other) = ([image("a", 0, 4)], [image("", 0, 1), image("a", 1, 3)]);
    let (moved, short) = ([image("a", 1, 3)], [image("a", 0, 3)]);
    let none = prompt(&tokens);
    let kinds = [
        none,
        Prompt { salt: Some("a"), ..none },
        Prompt { adapter: Some("a"), ..none },
        Prompt { adapter: Some("b"), ..none },
        Prompt { salt: Some("a"), adapter: Some("a"), ..none },
        Prompt { media: &one, ..none },
        Prompt { media: &other, ..none },
        Prompt { media: &moved, ..none },
        Prompt { media: &short, ..none },
    ];
    let mut tables = Vec::new();
    for prompt in kinds {
        let found = pool.lookup(prompt);
        assert_eq!((found.cached_tokens, found.miss), (0, Some(MissReason::NoSharedPrefix)), "{prompt:?}");
        tables.push(run(&mut pool, prompt));
    }
    for (prompt, table) in kinds.into_iter().zip(&tables) {
        let hashes = pool.hash_prompt(prompt);
        let again = open(&mut pool, Prompt { hashes: Some(&hashes), ..prompt });
        assert_eq!(again.blocks()[..3], table.blocks()[..3]);
        pool.release(again);
    }
    pool.audit(&tables).unwrap();
    tables.into_iter().for_each(|table| pool.release(table));
}

#[test]
fn a_conversation_that_adds_an_image_still_finds_the_blocks_before_it() {
    let mut pool = pool(40);
    let first_turn = concat(&[&full(1, 3), &[1; 5]]);
    let cat = image("cat", 20, 6);
    let table = run(&mut pool, Prompt { media: std::slice::from_ref(&cat), ..prompt(&first_turn) });
    // The next turn adds an image that begins in the middle of a block.
    let second_turn = concat(&[&first_turn, &full(2, 2)]);
    let media = [image("dog", 60, 8), cat.clone()];
    let next = Prompt { media: &media, ..prompt(&second_turn) };
    assert_eq!(pool.lookup(next).cached_tokens, 48, "all full blocks of the first turn");
    let next_table = run(&mut pool, next);
    let other_dog = [cat.clone(), image("other dog", 60, 8)];
    let hits = |pool: &kvblock::BlockPool, media: &[Media]| {
        pool.lookup(Prompt { media, ..prompt(&second_turn) }).cached_tokens
    };
    assert_eq!(hits(&pool, &media), 80);
    assert_eq!(hits(&pool, &other_dog), 48);
    let with_empty = [media[0].clone(), cat.clone(), image("nothing", 64, 0)];
    assert_eq!(hits(&pool, &with_empty), 80, "an input without placeholders has no effect");
    assert_eq!(hits(&pool, &[image("other cat", 20, 6), media[0].clone()]), 16);
    assert_eq!(hits(&pool, &[image("cat", 20, 7), media[0].clone()]), 16);
    assert_eq!(hits(&pool, &[]), 16, "without images");
    pool.audit([&table, &next_table]).unwrap();
    pool.release(table);
    pool.release(next_table);
}

#[test]
fn a_lookup_needs_no_mutable_borrow_and_equals_an_admission() {
    let mut pool = pool(10);
    let tokens = concat(&[&full(1, 2), &[1]]);
    let table = run(&mut pool, prompt(&tokens));
    let (first, second) = (pool.lookup(prompt(&tokens)), pool.lookup(prompt(&tokens[..20])));
    assert_eq!((first.cached_tokens, first.blocks_needed, first.miss), (32, 0, None));
    assert_eq!((second.cached_tokens, second.blocks_needed, second.miss), (16, 0, None));
    assert_eq!(pool.stats().lookups, 1, "a lookup is not counted");
    let admission = pool.admit(prompt(&tokens));
    let admitted = (admission.cached_tokens(), admission.blocks_needed(), admission.miss());
    assert_eq!(admitted, (first.cached_tokens, first.blocks_needed, first.miss));
    pool.release(table);
}

#[test]
fn orphans_with_one_hash_do_not_accumulate() {
    let mut pool = BlockPool::new(PoolConfig { poison: true, events: true, ..PoolConfig::new(64, 16) }).unwrap();
    let tokens = full(1, 2);
    let mut table = run(&mut pool, prompt(&tokens));
    let mut indexed = std::collections::BTreeSet::new();
    for round in 0..100 {
        pool.truncate(&mut table, 8).unwrap();
        pool.append(&mut table, &tokens[8..]).unwrap();
        pool.commit(&mut table, 32).unwrap();
        pool.audit([&table]).unwrap();
        let gauges = pool.gauges();
        assert_eq!((gauges.in_use, gauges.cached), (2, 0), "round {round}");
        assert_eq!(pool.admit(prompt(&concat(&[&tokens, &[0]]))).cached_tokens(), 32);
        for event in pool.drain_events() {
            match event {
                kvblock::BlockEvent::Stored { hashes, .. } => indexed.extend(hashes),
                kvblock::BlockEvent::Removed { hash, .. } => assert!(indexed.remove(&hash), "removed twice"),
                kvblock::BlockEvent::Cleared => indexed.clear(),
            }
        }
        assert_eq!(indexed.len(), 2, "both prefixes are still indexed");
    }
    pool.release(table);
}

#[test]
fn memory_operations_that_were_not_drained_remain_for_the_next_call() {
    let mut pool = pool(10);
    let table = run(&mut pool, prompt(&full(1, 1)[..8]));
    let mut forks = [pool.fork(&table).unwrap(), pool.fork(&table).unwrap()];
    for fork in &mut forks {
        pool.append(fork, &[1]).unwrap();
    }
    let is_copy = |op: &MemOp| matches!(op, MemOp::Copy { .. });
    assert!(pool.drain_memory_ops().any(|op| is_copy(&op)));
    assert_eq!(pool.drain_memory_ops().filter(is_copy).count(), 1, "the second copy is not lost");
    forks.into_iter().for_each(|fork| pool.release(fork));
    pool.release(table);
}

#[test]
fn hashes_of_another_prompt_lead_to_a_miss_and_never_to_its_blocks() {
    for hash_bits in [128, 1] {
        let mut pool = BlockPool::new(PoolConfig { hash_bits, ..PoolConfig::new(10, 16) }).unwrap();
        let (ours, theirs) = (concat(&[&full(1, 3), &[1]]), concat(&[&full(2, 3), &[1]]));
        let table = run(&mut pool, prompt(&theirs));
        let hashes = pool.hash_prompt(prompt(&theirs));
        let with = |tokens| Prompt { hashes: Some(&hashes), ..prompt(tokens) };
        assert_eq!(pool.admit(with(&theirs)).cached_tokens(), 48);
        let wrong = pool.lookup(with(&ours));
        assert_eq!((wrong.cached_tokens, wrong.miss), (0, Some(MissReason::Collision)));
        pool.release(table);
    }
}

#[test]
fn a_miss_has_a_reason() {
    let mut pool = pool(4);
    let tokens = full(1, 3);
    let table = run(&mut pool, prompt(&tokens));
    let miss = |pool: &mut BlockPool, tokens: &[u32]| pool.admit(prompt(tokens)).miss();
    assert_eq!(miss(&mut pool, &tokens[..16]), Some(MissReason::ShorterThanBlock));
    assert_eq!(miss(&mut pool, &full(2, 2)), Some(MissReason::NoSharedPrefix));
    assert_eq!(miss(&mut pool, &concat(&[&tokens[..32], &full(2, 2)])), Some(MissReason::NoSharedPrefix));
    assert_eq!(miss(&mut pool, &tokens[..47]), None);
    pool.release(table);
    let other = run(&mut pool, prompt(&full(2, 2)));
    assert_eq!(miss(&mut pool, &concat(&[&tokens, &[1]])), Some(MissReason::Evicted), "block 2 was evicted first");
    assert_eq!(miss(&mut pool, &full(3, 2)), Some(MissReason::NoSharedPrefix));
    pool.release(other);
    assert!(pool.reset_prefix_cache());
    assert_eq!(miss(&mut pool, &tokens), Some(MissReason::NoSharedPrefix), "a reset forgets evictions too");

    let table = run(&mut pool, prompt(&full(4, 2)));
    let stats = pool.stats();
    assert_eq!((stats.lookups, stats.no_shared_prefix, stats.evicted, stats.query_tokens), (3, 3, 0, 112));
    pool.release(table);
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
        assert_eq!(pool.admit(prompt(&probe)).cached_tokens(), 16, "block 1 still caches it");
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
fn a_child_of_a_colliding_prefix_is_not_a_hit() {
    // With a hash of one bit, [X][T] and [Y][T] can have equal hashes and equal last tokens. Only their parents differ.
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
