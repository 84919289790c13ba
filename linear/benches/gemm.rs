//! The matrix product in every weight format, at the shapes of SmolLM2-135M (`rounded`: bfloat16 weights and
//! activations in pairs; `tiles`: in tiles; `Q8_0` to `Q6_K`: as GGUF files store them, with activations in 8 bits), next to the limits of the
//! machine. Where byte products are on tiles, names that end with `-vectors` are without.
//!
//! `cargo bench -p linear --bench gemm -- [FILTER]`, with the threads of `QUIRE_THREADS` (default 2). Criterion's
//! throughput is bytes of packed weights for few rows, multiply-adds for many. The limits of the machine are measured and
//! printed before and after, because other load on the machine changes all figures: repeat if the two differ.
#![allow(clippy::expect_used, clippy::unwrap_used)]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use device::Dtype;
use linear::{
    Arithmetic, Codes, Gemm, Offset, PackedMatrix, Quantization, Rounding, Rows, Scale, StoredFormat, WeightRows,
    gemm_with,
};
use simd::int8::DotIsa;
use simd::{Isa, Pool, roofline};
use weights::Random;

#[allow(dead_code)] // The tests use the rest.
#[path = "../tests/weights.rs"]
mod weights;

/// `(name, k, n)`: the fused matrices of a layer, and the output layer.
const SHAPES: [(&str, usize, usize); 5] =
    [("qkv", 576, 960), ("output", 576, 576), ("gate_up", 576, 3072), ("down", 1536, 576), ("vocabulary", 576, 49152)];
const ROWS: [usize; 5] = [1, 8, 16, 64, 512];

fn pool() -> Pool {
    let threads = std::env::var("QUIRE_THREADS").ok().and_then(|threads| threads.parse().ok());
    Pool::new(Some(threads.unwrap_or(2))).expect("threads")
}

fn print_limits(pool: &Pool) {
    println!(
        "limits, {} threads: read {:.1} GB/s from memory, {:.1} GB/s from 4 MiB; {:.0} GOP/s in int8, {:.0} GFLOP/s in \
         bf16, {:.0} in f32",
        pool.threads(),
        roofline::read_bandwidth(pool, 256 << 20) / 1e9,
        roofline::read_bandwidth(pool, 4 << 20) / 1e9,
        roofline::int8_peak(pool) / 1e9,
        roofline::tile_peak(pool).unwrap_or_else(|| roofline::bf16_peak(pool)) / 1e9,
        roofline::f32_peak(pool) / 1e9
    );
}

/// Returns pseudorandom numbers between −1 and 1.
fn numbers(len: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn products(criterion: &mut Criterion) {
    let pool = pool();
    print_limits(&pool);
    let isa = if Isa::Amx.missing().is_none() { Isa::Amx } else { Isa::best() };
    for (name, k, n) in SHAPES {
        let dense = numbers(n * k);
        let bf16: Vec<u8> = dense.iter().flat_map(|&w| half::bf16::from_f32(w).to_le_bytes()).collect();
        let f32: Vec<u8> = dense.iter().flat_map(|w| w.to_le_bytes()).collect();
        let rounded = |arithmetic, numbers: &[u8]| {
            PackedMatrix::stored(&pool, arithmetic, k, &[WeightRows::Numbers(Dtype::Bf16, numbers)]).ok()
        };
        let stored = |bits, zero, group, scale, offset| {
            let format = StoredFormat { codes: Codes::Integers { bits, zero }, group, scale, offset };
            let random = Random::new(format, n, k, 1);
            let rows = [WeightRows::Stored(random.part(None, Rounding::Blocks))];
            PackedMatrix::stored(&pool, Arithmetic::Exact, k, &rows).ok()
        };
        let matrices = [
            ("q8", PackedMatrix::quantize(&pool, Quantization::Q8, k, &[(Dtype::F32, &f32)]).ok()),
            ("q4", PackedMatrix::quantize(&pool, Quantization::Q4, k, &[(Dtype::F32, &f32)]).ok()),
            ("Q8_0", stored(8, 128, 32, Scale::F16, Offset::None)),
            ("Q4_K", stored(4, 0, 32, Scale::Byte, Offset::ByteMinimum)),
            ("Q6_K", stored(6, 32, 16, Scale::SignedByte, Offset::None)),
            ("rounded", rounded(Arithmetic::Pairs, &bf16)),
            ("tiles", rounded(Arithmetic::Tiles, &bf16)),
            ("bf16", PackedMatrix::pack(&pool, k, &[(Dtype::Bf16, &bf16)]).ok()),
            ("f32", PackedMatrix::pack(&pool, k, &[(Dtype::F32, &f32)]).ok()),
        ];
        let mut group = criterion.benchmark_group(name);
        for rows in ROWS {
            let x = numbers(rows * k);
            let mut y = vec![0.0; rows * n];
            for (format, weights) in &matrices {
                let weights = weights.as_ref().expect("whole rows of finite numbers");
                group.throughput(match rows {
                    ..=16 => Throughput::Bytes(weights.bytes() as u64),
                    _ => Throughput::Elements((rows * n * k) as u64),
                });
                let best = DotIsa::best_for(isa);
                let is_on_tiles = best != best.vectors() && format.starts_with(['q', 'Q']);
                let vectors = is_on_tiles.then(|| (format!("{format}-vectors"), best.vectors()));
                for (name, dot) in [Some((format.to_string(), best)), vectors].into_iter().flatten() {
                    group.bench_function(BenchmarkId::new(name, rows), |bencher| {
                        // Inside of the pool, as in a forward pass.
                        pool.enter(|| {
                            bencher.iter(|| {
                                let x = Rows::Numbers(black_box(&x));
                                gemm_with(isa, dot, &pool, Gemm { x, weights, bias: None, y: &mut y });
                            });
                        });
                    });
                }
            }
        }
        group.finish();
    }
    print_limits(&pool);
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(800));
    targets = products
}
criterion_main!(benches);
