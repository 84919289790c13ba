//! Benchmarks of pools with 1k, 64k and 1M blocks of 16 tokens: `cargo bench -p kvblock`.
//!
//! Pools are shuffled first, so that neighbours on the free list are not neighbours in memory.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvblock::{BlockPool, BlockTable, PoolConfig, Prompt};

const SIZES: [usize; 3] = [1 << 10, 1 << 16, 1 << 20];
const BLOCK_SIZE: usize = 16;
const PROMPT: usize = 32 * 1024;

fn pool(num_blocks: usize) -> BlockPool {
    BlockPool::new(PoolConfig { poison: false, hash_seed: Some(1), ..PoolConfig::new(num_blocks, BLOCK_SIZE) }).unwrap()
}

fn prompt(tokens: &[u32]) -> Prompt<'_> {
    Prompt::new(tokens)
}

/// Tokens of `blocks` full blocks; no two kinds have a token in common.
fn tokens(kind: usize, blocks: usize) -> Vec<u32> {
    (0..blocks * BLOCK_SIZE).map(|i| (kind * 1_000_003 + i) as u32).collect()
}

fn open(pool: &mut BlockPool, tokens: &[u32]) -> BlockTable {
    let mut table = pool.admit(prompt(tokens)).open(0).unwrap();
    let cached = table.len();
    pool.append(&mut table, &tokens[cached..]).unwrap();
    table
}

/// Applies a fixed permutation.
fn shuffle<T>(items: &mut [T]) {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for i in (1..items.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        items.swap(i, (state % (i as u64 + 1)) as usize);
    }
}

/// Opens sequences of 8 blocks in all but `unused` blocks of the pool, and releases them in another order.
fn churn(pool: &mut BlockPool, unused: usize, cached: bool) {
    let mut tables = Vec::new();
    for kind in 0..(pool.num_blocks() - unused) / 8 {
        let tokens = tokens(kind, 8);
        let mut table = open(pool, &tokens);
        if cached {
            pool.commit(&mut table, tokens.len()).unwrap();
        }
        tables.push(table);
    }
    shuffle(&mut tables);
    tables.into_iter().for_each(|table| pool.release(table));
}

fn group<'a>(c: &'a mut Criterion, name: &str, elements: usize) -> BenchmarkGroup<'a, WallTime> {
    let mut group = c.benchmark_group(name);
    group.throughput(Throughput::Elements(elements as u64)).sample_size(20);
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    group
}

/// Allocates blocks and frees them without caching them; one element is one block allocated and freed.
fn allocate_and_free(c: &mut Criterion) {
    const BLOCKS: usize = 256;
    let mut group = group(c, "allocate and free a block", BLOCKS);
    for size in SIZES {
        let mut pool = pool(size);
        churn(&mut pool, 0, false);
        let new = vec![1; BLOCKS * BLOCK_SIZE];
        let mut table = open(&mut pool, &[1]);
        pool.append(&mut table, &new[1..]).unwrap();
        pool.truncate(&mut table, 0).unwrap();
        group.bench_with_input(BenchmarkId::from_parameter(size), &size, |b, _| {
            b.iter(|| {
                pool.append(&mut table, black_box(&new)).unwrap();
                pool.truncate(&mut table, 0).unwrap();
            });
        });
        pool.release(table);
    }
}

/// Allocates blocks of a pool in which every free block is cached; one element is one block evicted.
fn evict(c: &mut Criterion) {
    const BLOCKS: usize = 256;
    let mut group = group(c, "evict a cached block", BLOCKS);
    for size in SIZES {
        let mut pool = pool(size);
        churn(&mut pool, 0, true);
        let mut kind = size;
        group.bench_with_input(BenchmarkId::from_parameter(size), &size, |b, _| {
            b.iter_custom(|rounds| {
                let mut spent = Duration::ZERO;
                for _ in 0..rounds {
                    kind += 1;
                    let tokens = tokens(kind, BLOCKS);
                    let mut table = open(&mut pool, &[]);
                    let start = Instant::now();
                    pool.append(&mut table, &tokens).unwrap();
                    spent += start.elapsed();
                    pool.commit(&mut table, tokens.len()).unwrap();
                    pool.release(table);
                }
                spent
            });
        });
        assert_eq!(pool.gauges().free, 0);
    }
}

/// A decode step of 256 sequences: one token each.
fn append(c: &mut Criterion) {
    const START: usize = 41;
    for (name, commits) in
        [("append a token to 256 sequences", false), ("append and commit a token to 256 sequences", true)]
    {
        let mut group = group(c, name, 256);
        for size in SIZES {
            let mut pool = pool(size);
            churn(&mut pool, 0, false);
            let mut tables: Vec<BlockTable> = (0..256).map(|kind| open(&mut pool, &tokens(kind, 3)[..START])).collect();
            tables.iter_mut().for_each(|table| pool.commit(table, START).unwrap());
            let mut token = 0;
            group.bench_with_input(BenchmarkId::from_parameter(size), &size, |b, _| {
                b.iter_custom(|rounds| {
                    let mut spent = Duration::ZERO;
                    for _ in 0..rounds {
                        token += 1;
                        if tables[0].len() == 4 * BLOCK_SIZE {
                            tables.iter_mut().for_each(|table| pool.truncate(table, START).unwrap());
                        }
                        let start = Instant::now();
                        for table in &mut tables {
                            pool.append(table, black_box(&[token])).unwrap();
                            if commits {
                                let len = table.len();
                                pool.commit(table, len).unwrap();
                            }
                        }
                        spent += start.elapsed();
                    }
                    spent
                });
            });
            tables.into_iter().for_each(|table| pool.release(table));
        }
    }
}

/// Looks up a fully cached prompt of 32k tokens, or 16k if 32k do not fit the pool.
fn lookup(c: &mut Criterion) {
    for hashed in [true, false] {
        let name = if hashed { "look up a 32k-token prompt with known hashes" } else { "look up a 32k-token prompt" };
        let mut group = group(c, name, PROMPT);
        for size in SIZES {
            let mut pool = pool(size);
            let tokens = tokens(0, (PROMPT / BLOCK_SIZE).min(size));
            churn(&mut pool, tokens.len() / BLOCK_SIZE, true);
            let mut table = open(&mut pool, &tokens);
            pool.commit(&mut table, tokens.len()).unwrap();
            pool.release(table);
            let hashes = hashed.then(|| pool.hash_prompt(prompt(&tokens)));
            let prompt = Prompt { hashes: hashes.as_ref(), ..prompt(&tokens) };
            group.bench_with_input(BenchmarkId::from_parameter(size), &size, |b, _| {
                b.iter(|| black_box(pool.admit(prompt).cached_tokens()));
            });
        }
    }
}

/// Forks a table of 64 blocks and releases the fork.
fn fork(c: &mut Criterion) {
    let mut group = group(c, "fork and release 1k tokens", 1);
    for size in SIZES {
        let mut pool = pool(size);
        churn(&mut pool, 0, false);
        let mut table = open(&mut pool, &tokens(0, 64));
        pool.commit(&mut table, 64 * BLOCK_SIZE).unwrap();
        group.bench_with_input(BenchmarkId::from_parameter(size), &size, |b, _| {
            b.iter(|| {
                let fork = pool.fork(black_box(&table)).unwrap();
                pool.release(fork);
            });
        });
        pool.release(table);
    }
}

/// New prompts in a pool full of cached blocks: lookup, eviction, hashing, release.
fn pressure(c: &mut Criterion) {
    let mut group = group(c, "open, compute and release 1k new tokens in a full pool", 1);
    for size in SIZES {
        let mut pool = pool(size);
        churn(&mut pool, 0, true);
        let mut kind = size;
        group.bench_with_input(BenchmarkId::from_parameter(size), &size, |b, _| {
            b.iter(|| {
                kind += 1;
                let tokens = tokens(kind, 64);
                let mut table = open(&mut pool, &tokens);
                pool.commit(&mut table, tokens.len()).unwrap();
                pool.release(table);
            });
        });
    }
}

criterion_group!(benches, allocate_and_free, evict, append, lookup, fork, pressure);
criterion_main!(benches);
