//! Prefix hashes, as [`BlockPool::prefix_of`] reports them.

use kvblock::{BlockId, BlockPool, PoolConfig, PrefixHash};

use super::{prompt, run};

fn pool(block_size: usize, hash_seed: Option<u64>) -> BlockPool {
    BlockPool::new(PoolConfig { hash_seed, ..PoolConfig::new(4, block_size) }).unwrap()
}

/// The hash of a prefix of one full block.
fn hash(pool: &mut BlockPool, tokens: &[u32]) -> PrefixHash {
    let table = run(pool, prompt(tokens));
    let hash = pool.prefix_of(table.blocks()[0]).unwrap().1;
    pool.release(table);
    hash
}

#[test]
fn equal_seeds_give_equal_hashes_and_the_reported_seed_is_the_one_in_use() {
    let mut random = pool(2, None);
    let seed = random.hash_seed().unwrap();
    let expected = hash(&mut random, &[1, 2]);
    assert_eq!(hash(&mut pool(2, Some(seed)), &[1, 2]), expected);
    assert_ne!(hash(&mut pool(2, Some(seed ^ 1)), &[1, 2]), expected);
    assert_ne!(pool(2, None).hash_seed().unwrap(), seed);
}

#[test]
fn the_hash_of_a_long_block_depends_on_every_token_and_their_order() {
    let mut pool = pool(64, Some(7));
    let tokens: Vec<u32> = (0..64).collect();
    let expected = hash(&mut pool, &tokens);
    for i in 0..63 {
        let mut other = tokens.clone();
        other.swap(i, i + 1);
        assert_ne!(hash(&mut pool, &other), expected);
        other[i] = 99;
        assert_ne!(hash(&mut pool, &other), expected);
    }
}

#[test]
fn a_narrow_hash_stays_within_its_bits() {
    let mut pool = BlockPool::new(PoolConfig { hash_bits: 4, ..PoolConfig::new(100, 1) }).unwrap();
    let table = run(&mut pool, prompt(&(0..100).collect::<Vec<u32>>()));
    assert!((0..100).all(|block| pool.prefix_of(BlockId(block)).unwrap().1.0 < 16));
    pool.release(table);
}
