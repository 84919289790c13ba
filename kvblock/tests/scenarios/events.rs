//! Block events.

use kvblock::{BlockEvent, BlockId, BlockPool, CacheGroup, PoolConfig, Prompt, Tier};

use super::{concat, full, open, prompt, run};

fn pool(config: PoolConfig) -> BlockPool {
    BlockPool::new(PoolConfig { events: true, ..config }).unwrap()
}

fn events(pool: &mut BlockPool) -> Vec<BlockEvent> {
    pool.drain_events().collect()
}

#[test]
fn c12_filling_a_pool_is_one_event_and_refilling_it_a_removal_per_block_and_one_event() {
    for k in [2, 3, 10] {
        let mut pool = pool(PoolConfig::new(k, 16));
        let table = run(&mut pool, prompt(&full(1, k)));
        let stored = events(&mut pool);
        let all_hashes: Vec<_> = (0..k as u32).map(|b| pool.prefix_of(BlockId(b)).unwrap().1).collect();
        let expected = BlockEvent::Stored {
            tier: Tier::Device,
            group: 0,
            parent: None,
            hashes: all_hashes.clone(),
            tokens: full(1, k),
            key: None,
        };
        assert_eq!(stored, [expected]);
        assert_eq!(events(&mut pool), [], "a drained queue is empty");
        pool.release(table);
        assert_eq!(events(&mut pool), [], "a free block remains in the index");

        let table = run(&mut pool, prompt(&full(2, k)));
        let again = events(&mut pool);
        let removed: Vec<_> = all_hashes
            .iter()
            .rev()
            .map(|hash| BlockEvent::Removed { tier: Tier::Device, group: 0, hash: *hash })
            .collect();
        assert_eq!(again[..k], removed);
        assert!(
            matches!(&again[k..], [BlockEvent::Stored { hashes, tokens, .. }] if hashes.len() == k && tokens.len() == 16 * k)
        );
        pool.release(table);
        assert!(pool.reset_prefix_cache());
        assert_eq!(events(&mut pool), [BlockEvent::Cleared]);
    }
}

#[test]
fn c12_a_later_event_names_its_parent_and_a_duplicate_block_is_no_event() {
    let mut pool = pool(PoolConfig::new(10, 16));
    let mut table = run(&mut pool, prompt(&full(1, 2)));
    let BlockEvent::Stored { hashes, .. } = events(&mut pool).remove(0) else { panic!("expected a stored event") };
    pool.append(&mut table, &full(2, 1)).unwrap();
    pool.commit(&mut table, 48).unwrap();
    let later = events(&mut pool);
    assert!(
        matches!(&later[..], [BlockEvent::Stored { parent, tokens, .. }] if *parent == Some(hashes[1]) && *tokens == full(2, 1))
    );

    let duplicate = run(&mut pool, Prompt { read_cache: false, ..prompt(&full(1, 2)) });
    assert_eq!(events(&mut pool), []);
    pool.release(duplicate);
    let filler = run(&mut pool, prompt(&full(3, 7)));
    let removed = events(&mut pool).iter().filter(|e| matches!(e, BlockEvent::Removed { .. })).count();
    assert_eq!(removed, 0, "the duplicates were evicted, and the first blocks still cache the prefix");
    pool.release(table);
    pool.release(filler);
}

#[test]
fn c12_events_carry_salt_and_adapter() {
    let mut pool = pool(PoolConfig::new(10, 16));
    let tokens = full(1, 2);
    let prompt = Prompt { salt: Some("tenant"), adapter: Some("french"), ..prompt(&tokens) };
    let mut table = open(&mut pool, prompt);
    pool.commit(&mut table, 32).unwrap();
    let BlockEvent::Stored { key: Some(key), .. } = events(&mut pool).remove(0) else {
        panic!("expected an event with a key")
    };
    assert_eq!((key.adapter.as_deref(), key.salt.as_deref()), (Some("french"), Some("tenant")));
    pool.release(table);
}

#[test]
fn c12_the_parent_is_known_even_if_its_block_is_a_hole() {
    for groups in [vec![CacheGroup::Sliding { window: 16 }], vec![CacheGroup::Full, CacheGroup::Sliding { window: 16 }]]
    {
        let last = groups.len() - 1;
        let mut pool = pool(PoolConfig { groups, ..PoolConfig::new(10, 16) });
        let mut table = run(&mut pool, prompt(&full(1, 1)));
        pool.append(&mut table, &[1; 15]).unwrap();
        pool.commit(&mut table, 31).unwrap();
        assert_eq!(table.groups()[last].holes(), 1, "the parent's block is behind the window");
        let first = events(&mut pool).into_iter().find_map(|e| match e {
            BlockEvent::Stored { group, hashes, .. } if group == last => Some(hashes[0]),
            _ => None,
        });
        pool.append(&mut table, &[1]).unwrap();
        pool.commit(&mut table, 32).unwrap();
        let has_parent = |e: &BlockEvent| matches!(e, BlockEvent::Stored { group, parent, .. } if *group == last && *parent == first);
        assert!(first.is_some() && events(&mut pool).iter().any(has_parent));
        pool.audit([&table]).unwrap();
        pool.release(table);
    }
}

#[test]
fn no_event_is_recorded_unless_events_are_enabled() {
    let mut pool = BlockPool::new(PoolConfig::new(4, 16)).unwrap();
    let table = run(&mut pool, prompt(&concat(&[&full(1, 2), &[1]])));
    pool.release(table);
    assert!(pool.reset_prefix_cache());
    assert_eq!(events(&mut pool), []);
}

#[test]
fn the_list_of_cached_prefixes_is_what_a_replay_of_the_events_yields() {
    let mut pool = pool(PoolConfig::new(12, 16));
    let tenant = full(1, 3);
    let table = run(&mut pool, Prompt { salt: Some("tenant"), ..prompt(&tenant) });
    let other = run(&mut pool, prompt(&concat(&[&full(1, 2), &full(2, 1)])));
    pool.release(table);
    let list = pool.cached_prefixes(0);
    let hashes = |events: &[BlockEvent]| {
        let hashes = events.iter().map(|e| match e {
            BlockEvent::Stored { hashes, .. } => hashes.clone(),
            other => panic!("found {other:?}"),
        });
        let mut all: Vec<_> = hashes.flatten().collect();
        all.sort_unstable();
        all
    };
    assert_eq!(hashes(&list), hashes(&events(&mut pool)));
    let salted = list.iter().filter(|e| matches!(e, BlockEvent::Stored { key: Some(_), .. })).count();
    assert_eq!((list.len(), salted), (6, 3), "the key of a first block belongs to the blocks behind it");
    pool.release(other);
}

#[test]
fn a_prefix_behind_a_parent_that_was_computed_again_is_stored_again() {
    let mut pool = pool(PoolConfig::new(12, 16));
    let table = run(&mut pool, prompt(&full(1, 2)));
    let first = events(&mut pool);
    let parent = table.groups()[0].blocks()[0];
    pool.release(table);
    pool.forget_contents(parent).unwrap();
    assert!(matches!(&events(&mut pool)[..], [BlockEvent::Removed { .. }]));
    assert_eq!(pool.cached_prefixes(0), [], "no lookup reaches the second block");
    let table = run(&mut pool, prompt(&full(1, 2)));
    assert_eq!(events(&mut pool), first);
    assert_eq!(pool.cached_prefixes(0).len(), 2);
    pool.release(table);
}
