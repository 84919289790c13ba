//! The size of the metadata.

use kvblock::{BlockPool, CacheGroup, PoolConfig};

#[test]
fn the_metadata_of_a_block_is_at_most_96_bytes_and_four_per_token() {
    for block_size in [1, 8, 16, 32, 64, 128, 512] {
        for num_blocks in [64, 1000, 1024, 1025, 5000, 8191] {
            for groups in [vec![CacheGroup::Full], vec![CacheGroup::Full, CacheGroup::Sliding { window: 32 }]] {
                let pool = BlockPool::new(PoolConfig { groups, ..PoolConfig::new(num_blocks, block_size) }).unwrap();
                let most = num_blocks * (96 + 4 * block_size);
                assert!(
                    pool.metadata_bytes() <= most,
                    "{num_blocks} blocks of {block_size}: {} bytes",
                    pool.metadata_bytes()
                );
            }
        }
    }
}

#[test]
fn a_host_block_that_can_cache_takes_as_much_metadata_as_a_block() {
    let bytes = |host_caching| {
        let sizes = PoolConfig { host_blocks: 900, host_caching, ..PoolConfig::new(100, 16) };
        BlockPool::new(sizes).unwrap().metadata_bytes()
    };
    assert!(bytes(true) <= 1000 * (96 + 4 * 16) && bytes(false) <= 100 * (96 + 4 * 16), "{}", bytes(true));
}

#[test]
fn links_and_reference_count_of_a_block_are_at_most_32_bytes() {
    let pool = BlockPool::new(PoolConfig { prefix_caching: false, ..PoolConfig::new(1000, 16) }).unwrap();
    assert!(pool.metadata_bytes() <= 32 * 1000, "{}", pool.metadata_bytes());
}
