//! Limits of this machine: how fast the pool's threads read memory, and how fast they multiply.
//!
//! Measurements are compared with these limits (the roofline model: Williams, Waterman and Patterson, 2009). They use the same
//! pool and lanes as the kernels. Measure them in the same process as the figures to compare, because other load on the
//! machine changes both. Each figure is the best of several passes; a pass is long compared with the start of a parallel loop.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::int8::{DotIsa, DotLanes, GROUP, IntLanes};
use crate::pairs::{PairLanes, pair};
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use crate::tiles::{
    Registers,
    amx::{Amx, Hardware},
};
use crate::{Isa, LANES, Lanes, Pool, dispatch, dispatch_dot, dispatch_pairs};

/// Minimum duration of all passes.
const AT_LEAST: Duration = Duration::from_millis(200);

/// Numbers per task: 1 MiB.
const CHUNK: usize = (1 << 20) / size_of::<f32>();

/// Streams of memory that a thread reads side by side.
const STREAMS: usize = 4;

/// Independent sums, so that none waits for the previous operation.
const CHAINS: usize = 12;

/// Steps of every chain in one task.
const STEPS: usize = 1 << 15;

/// Measures the bytes per second that the pool's threads read from `bytes` of memory (rounded up to a MiB). Use several times
/// the size of the last-level cache for the speed of memory, or a size that fits a cache for the speed of that cache.
pub fn read_bandwidth(pool: &Pool, bytes: usize) -> f64 {
    let mut data = vec![0.0f32; bytes.div_ceil(CHUNK * size_of::<f32>()) * CHUNK];
    // The threads that will read write first, so that pages are allocated before the measurement.
    pool.chunks_mut(&mut data, CHUNK, CHUNK, |i, chunk| chunk.fill(i as f32));
    let data = &data[..];
    let isa = Isa::best();
    let seconds = best_pass(|| {
        pool.run(data.len() / CHUNK, CHUNK * LANES, |i| {
            let chunk = &data[i * CHUNK..][..CHUNK];
            dispatch!(isa, read(chunk: &[f32]));
        });
    });
    size_of_val(data) as f64 / seconds
}

/// Measures the operations per second (a multiplication and an addition are two) of byte products in registers.
pub fn int8_peak(pool: &Pool) -> f64 {
    let isa = DotIsa::best_for(Isa::best());
    let of_tiles = if isa == DotIsa::Amx { unit_peak::<true>(pool) } else { None };
    of_tiles.unwrap_or_else(|| peak(pool, GROUP, || dispatch_dot!(isa, dots())))
}

/// Measures the operations per second (a multiplication and an addition are two) of products of bfloat16 pairs in registers.
pub fn bf16_peak(pool: &Pool) -> f64 {
    let isa = Isa::best();
    peak(pool, 2 * LANES, || dispatch_pairs!(isa, pair_products()))
}

/// Measures the operations per second (a multiplication and an addition are two) of products of bfloat16 tiles in registers; `None`
/// if this process cannot use tiles.
pub fn tile_peak(pool: &Pool) -> Option<f64> {
    unit_peak::<false>(pool)
}

/// The same for tiles of bytes or of bfloat16.
fn unit_peak<const BYTES: bool>(pool: &Pool) -> Option<f64> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if let Ok(amx) = Amx::get() {
        let inputs = if BYTES { GROUP } else { GROUP / 2 };
        return Some(peak(pool, LANES * inputs, || tile_products::<BYTES>(&mut Hardware::<64>::configure(amx, LANES))));
    }
    let _ = pool;
    None
}

/// Measures the operations per second (a multiplication and an addition are two) of f32 multiply-adds in registers.
pub fn f32_peak(pool: &Pool) -> f64 {
    let isa = Isa::best();
    peak(pool, LANES, || dispatch!(isa, multiply_adds()))
}

/// Measures `task`, which does [`CHAINS`] × [`STEPS`] vectors of `width` multiply-adds, on all threads.
fn peak(pool: &Pool, width: usize, task: impl Fn() + Sync + Send) -> f64 {
    let (tasks, work) = (pool.threads() * 8, CHAINS * STEPS * width);
    let seconds = best_pass(|| pool.run(tasks, work, |_| task()));
    2.0 * (tasks * work) as f64 / seconds
}

/// Returns the seconds of the fastest pass.
fn best_pass(mut pass: impl FnMut()) -> f64 {
    let (start, mut best) = (Instant::now(), Duration::MAX);
    while start.elapsed() < AT_LEAST {
        let pass_start = Instant::now();
        pass();
        best = best.min(pass_start.elapsed());
    }
    best.as_secs_f64()
}

/// Reads parts of the data side by side: one stream does not use all reads that a core can have outstanding.
#[inline(always)]
fn read<L: Lanes>(data: &[f32]) {
    let vectors = data.as_chunks::<LANES>().0;
    let len = vectors.len() / STREAMS;
    let streams: [&[[f32; LANES]]; STREAMS] = std::array::from_fn(|stream| &vectors[stream * len..][..len]);
    let mut sums = [L::splat(0.0); STREAMS];
    for i in 0..len {
        for (sum, stream) in sums.iter_mut().zip(streams) {
            *sum = sum.max(L::load(&stream[i]));
        }
    }
    black_box(sums.map(L::greatest));
}

#[inline(always)]
fn dots<D: DotLanes>() {
    let weights = D::load(black_box(&[3; GROUP]));
    let mut sums = D::begin::<CHAINS, 1>([0; CHAINS], 8);
    for _ in 0..STEPS / 2 {
        D::add(&mut sums, [[weights; 2]], [black_box(&[[1, -1, 1, -1]; 2]); CHAINS], 8);
    }
    let mut out = [0.0; LANES];
    for [sum] in sums {
        sum.to_floats().store(&mut out);
        black_box(&out);
    }
}

#[inline(always)]
fn pair_products<D: PairLanes>() {
    let ones = D::splat(black_box(pair([1.0, -1.0])));
    let mut sums = [D::Floats::splat(0.0); CHAINS];
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = D::dot(*sum, ones, ones);
        }
    }
    black_box(sums.map(Lanes::greatest));
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn tile_products<const BYTES: bool>(tiles: &mut impl Registers) {
    for _ in 0..CHAINS * STEPS / LANES / 4 {
        if BYTES {
            tiles.add_byte_products::<0, 4, 6>();
            tiles.add_byte_products::<1, 4, 7>();
            tiles.add_byte_products::<2, 5, 6>();
            tiles.add_byte_products::<3, 5, 7>();
        } else {
            tiles.add_products::<0, 4, 6>();
            tiles.add_products::<1, 4, 7>();
            tiles.add_products::<2, 5, 6>();
            tiles.add_products::<3, 5, 7>();
        }
    }
}

#[inline(always)]
fn multiply_adds<L: Lanes>() {
    let (factor, one) = (L::splat(black_box(0.5)), L::splat(black_box(1.0)));
    let mut sums = [one; CHAINS];
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = sum.mul_add(factor, one);
        }
    }
    black_box(sums.map(L::greatest));
}
