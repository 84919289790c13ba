//! Decode of one sequence over 4k and 16k tokens in every cache type, compared with the memory bandwidth.
//!
//! `cargo bench -p attention-kernels --bench decode -- [FILTER]`, with `QUIRE_THREADS` threads (default 2). The caches of a
//! round are together several times the last-level cache, like those of a model's layers. Before the times of Criterion a
//! table shows for each type the share of the read bandwidth, measured alternately with it (read, decode, read, decode, …):
//! the median of the rounds and their spread, because other load on the machine affects all figures.
#![allow(clippy::expect_used)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use attention_kernels::{
    AttentionArgs, AttentionBatch, CacheWriteArgs, KernelChoice, KernelSet, KvCache, KvDtype, KvShape, Needs, select,
};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use device::{Buffer, Device};
use simd::roofline;

const BLOCK_SIZE: usize = 16;
/// Bytes of the caches of a round; more than any last-level cache.
const BYTES: usize = 256 << 20;
const ROUNDS: usize = 7;
/// `(name, query heads, KV heads, head size)`: SmolLM2-135M, and a common shape of models of some billion parameters.
const HEADS: [(&str, usize, usize, usize); 2] = [("9/3x64", 9, 3, 64), ("32/8x128", 32, 8, 128)];
const CONTEXTS: [usize; 2] = [4096, 16384];

/// Returns pseudo-random numbers between −1 and 1.
fn numbers(len: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn buffer(device: &dyn Device, values: &[f32]) -> Buffer {
    let mut buffer = device.alloc(size_of_val(values)).expect("memory");
    buffer.host_mut::<f32>().expect("host memory").copy_from_slice(values);
    buffer
}

/// One query token over each of several contexts in one cache.
struct Decode<'a> {
    device: &'a dyn Device,
    kernels: KernelSet,
    cache: KvCache,
    heads: usize,
    query: Buffer,
    output: Buffer,
    /// One batch for each context.
    batches: Vec<AttentionBatch>,
    /// Bytes of keys and values of a context.
    bytes: usize,
}

impl<'a> Decode<'a> {
    /// Returns `None` if no kernel supports the type on this machine.
    fn new(device: &'a dyn Device, kv_dtype: KvDtype, heads: (usize, usize, usize), context: usize) -> Option<Self> {
        let (heads, num_kv_heads, head_dim) = heads;
        let needs = Needs { kv_dtype, head_dim, row_invariant: true, ..Needs::on(device) };
        let kernels = select(&KernelChoice::default(), &needs).ok()?;
        let blocks = context / BLOCK_SIZE;
        let one = KvShape { num_blocks: blocks, num_kv_heads, block_size: BLOCK_SIZE, head_dim };
        let bytes = 2 * blocks * one.block_elements() * kernels.format.element_bytes();
        let layers = BYTES.div_ceil(bytes);
        let shape = KvShape { num_blocks: blocks * layers, ..one };
        let mut cache = KvCache::with_format(device, shape, kernels.format).expect("memory");
        let rows = 2048;
        let width = num_kv_heads * head_dim;
        let source = buffer(device, &numbers(rows * 2 * width));
        let slots: Vec<i64> = (0..(shape.num_blocks * BLOCK_SIZE) as i64).collect();
        for slot_mapping in slots.chunks(rows) {
            let args = CacheWriteArgs {
                source: &source,
                key_offset: 0,
                value_offset: width,
                stride: 2 * width,
                slot_mapping,
                cache: &mut cache,
                workspace: None,
            };
            kernels.cache_write.cache_write(device, args).expect("a write");
        }
        let batch = |layer: usize| AttentionBatch {
            query_starts: vec![0, 1],
            context_lens: vec![context as u32],
            // Blocks in random order, as a pool in use returns them.
            block_tables: [(0..blocks)
                .map(|i| (layer * blocks + (i * 37 + layer) % blocks) as i32)
                .collect::<Vec<_>>()]
            .into_iter()
            .collect(),
        };
        Some(Decode {
            device,
            kernels,
            cache,
            heads,
            query: buffer(device, &numbers(heads * head_dim)),
            output: buffer(device, &numbers(heads * head_dim)),
            batches: (0..layers).map(batch).collect(),
            bytes,
        })
    }

    /// Runs all contexts once, inside the pool like a forward pass.
    fn run(&mut self) {
        let Decode { device, kernels, cache, heads, query, output, batches, .. } = self;
        device.pool().enter(|| {
            for batch in batches {
                let args = AttentionArgs {
                    query: black_box(query),
                    query_stride: *heads * cache.shape.head_dim,
                    num_heads: *heads,
                    output,
                    lse: None,
                    cache,
                    batch,
                    seqs: 0..1,
                    scale: 1.0 / (cache.shape.head_dim as f32).sqrt(),
                    window: None,
                    sparse: None,
                    soft_cap: None,
                    alibi_slopes: None,
                    sinks: None,
                    workspace: None,
                };
                kernels.attention(*device, args).expect("attention");
            }
        });
    }

    /// Returns the bytes per second of the best of some passes, as [`roofline::read_bandwidth`] does.
    fn bandwidth(&mut self) -> f64 {
        let (start, mut best) = (Instant::now(), Duration::MAX);
        while start.elapsed() < Duration::from_millis(200) {
            let pass = Instant::now();
            self.run();
            best = best.min(pass.elapsed());
        }
        (self.bytes * self.batches.len()) as f64 / best.as_secs_f64()
    }
}

fn shares(decode: &mut Decode<'_>) -> String {
    let mut rounds: Vec<(f64, f64, f64)> = (0..ROUNDS)
        .map(|_| {
            let read = roofline::read_bandwidth(decode.device.pool(), BYTES);
            let reached = decode.bandwidth();
            (reached / read, reached, read)
        })
        .collect();
    rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (share, reached, read) = rounds[ROUNDS / 2];
    format!(
        "{:>5.1} % ({:.0} to {:.0})  {:>6.1} of {:.1} GB/s",
        100.0 * share,
        100.0 * rounds[0].0,
        100.0 * rounds[ROUNDS - 1].0,
        reached / 1e9,
        read / 1e9
    )
}

fn decodes(criterion: &mut Criterion) {
    let threads = std::env::var("QUIRE_THREADS").ok().and_then(|threads| threads.parse().ok());
    let device = device::open("cpu", Some(threads.unwrap_or(2))).expect("threads");
    for (name, heads, kv_heads, dim) in HEADS {
        let mut group = criterion.benchmark_group(name);
        for context in CONTEXTS {
            for kv_dtype in KvDtype::ALL {
                let Some(mut decode) = Decode::new(&*device, kv_dtype, (heads, kv_heads, dim), context) else {
                    continue;
                };
                let what = format!("{} {name} {context:>6} {kv_dtype:<20}", decode.kernels.decode.name);
                println!("{what} share of the read bandwidth {}", shares(&mut decode));
                group.throughput(Throughput::Bytes((decode.bytes * decode.batches.len()) as u64));
                group.bench_function(BenchmarkId::new(kv_dtype.name(), context), |bencher| {
                    bencher.iter(|| decode.run());
                });
            }
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(500));
    targets = decodes
}
criterion_main!(benches);
