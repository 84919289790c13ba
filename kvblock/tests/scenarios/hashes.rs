//! Prefix hashes, as [`BlockPool::prefix_of`] reports them.

use kvblock::{BlockId, BlockPool, Media, PoolConfig, PrefixHash, Prompt};

use super::{prompt, run};

fn pool(block_size: usize, hash_seed: Option<u64>) -> BlockPool {
    BlockPool::new(PoolConfig { hash_seed, ..PoolConfig::new(4, block_size) }).unwrap()
}

/// The hash of a prompt of one full block.
fn hash_of(pool: &mut BlockPool, prompt: Prompt<'_>) -> PrefixHash {
    let table = run(pool, prompt);
    let hash = pool.prefix_of(table.blocks()[0]).unwrap().1;
    pool.release(table);
    hash
}

fn hash(pool: &mut BlockPool, tokens: &[u32]) -> PrefixHash {
    hash_of(pool, prompt(tokens))
}

#[test]
fn kinds_of_field_never_alias() {
    let text = "sixteen bytes ab";
    let tokens: Vec<u32> = text.as_bytes().as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    let image = |digest: &str, start, len| Media { digest: digest.into(), start, len };
    let media = [
        vec![image("", 0, 1)],
        vec![image(text, 0, 1)],
        vec![image(text, 0, 2)],
        vec![image(text, 1, 1)],
        vec![image("sixteen ", 0, 1), image("bytes ab", 1, 1)],
    ];
    let (half, plain) = ([image("bytes ab", 0, 1)], prompt(&tokens));
    let texts = [
        (None, None),
        (Some(""), None),
        (None, Some("")),
        (Some(text), None),
        (None, Some(text)),
        (Some("sixteen "), Some("bytes ab")),
        (Some("sixteen"), Some(" bytes ab")),
    ];
    let with_texts = texts.map(|(salt, adapter)| Prompt { salt, adapter, ..plain });
    let with_media = media.iter().map(|media| Prompt { media, ..plain });
    let with_both = Prompt { salt: Some("sixteen "), media: &half, ..plain };
    let mut pool = pool(4, Some(7));
    let prompts = with_texts.into_iter().chain(with_media).chain([with_both]);
    let mut hashes: Vec<PrefixHash> = prompts.map(|prompt| hash_of(&mut pool, prompt)).collect();
    let count = hashes.len();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), count);
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
