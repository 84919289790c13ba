//! What changes only the time, and so no other test.

use simd::Isa;

#[test]
fn the_best_instruction_set_has_the_widest_vectors_of_this_cpu() {
    let bits = |isa| match isa {
        Isa::Portable => 0,
        Isa::Neon => 128,
        Isa::Avx2 => 256,
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => 512,
    };
    let widest = super::support::isas().map(bits).max().unwrap();
    assert_eq!(bits(Isa::best()), widest, "{}", Isa::best());
}

/// An emulator of another CPU has no cache.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_prefetched_line_is_read_without_waiting_for_memory() {
    use std::hint::{black_box, spin_loop};
    use std::time::{Duration, Instant};

    const LINE: usize = 64;
    // Larger than the caches of a core. Pages that were never written would all be the same page of zeros.
    let memory = vec![1u8; 64 << 20];
    let lines = memory.len() / LINE;
    let mut next = 0;
    let mut time = |prefetched: bool| {
        let chosen: [usize; 32] = std::array::from_fn(|_| {
            // In an order that no CPU guesses.
            next = (next + 0x9e37_79b1) % lines;
            next * LINE
        });
        if prefetched {
            chosen.iter().for_each(|at| simd::prefetch(&memory[*at]));
        }
        let pause = Instant::now();
        while pause.elapsed() < Duration::from_micros(10) {
            spin_loop();
        }
        let start = Instant::now();
        // Each address depends on the byte before.
        let sum = chosen.iter().fold(1, |byte, at| black_box(usize::from(memory[at + byte - 1])));
        let time = start.elapsed();
        assert_eq!(sum, 1);
        time
    };
    let mut least = |prefetched| (0..500).map(|_| time(prefetched)).min().unwrap();
    let (with, without) = (least(true), least(false));
    assert!(with * 2 < without, "{with:?} with, {without:?} without");
}
