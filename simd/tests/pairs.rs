//! Products of bfloat16 pairs: one definition of every bit, on every instruction set.

use proptest::prelude::*;
use simd::int8::{IntLanes, WithInts};
use simd::pairs::{PairLanes, Pairs};
use simd::{Isa, LANES, Lanes, dispatch_pairs, pairs};

use super::support::pair_isas;

#[inline(always)]
fn step<D: PairLanes>(sums: &mut [f32; LANES], a: &Pairs, b: &Pairs) {
    D::dot(D::Floats::load(sums), D::load(a), D::load(b)).store(sums);
}

fn step_on(isa: Isa, sum: f32, a: u32, b: u32) -> f32 {
    let (mut sums, a, b) = ([sum; LANES], &Pairs([a; LANES]), &Pairs([b; LANES]));
    let sums_ref = &mut sums;
    dispatch_pairs!(isa, step(sums_ref: &mut [f32; LANES], a: &Pairs, b: &Pairs));
    sums[LANES - 1]
}

/// Results of `vdpbf16ps` on a Zen 4 core.
#[test]
fn a_step_rounds_twice_and_flushes_as_the_instruction_does() {
    let power = |e: i32| 2.0f32.powi(e);
    let least = f32::MIN_POSITIVE;
    for (sum, even, odd, want) in [
        // One step after the other, the odd product first: added to 2^24, each 1 is a tie that goes to even.
        (power(24), [1.0, 1.0], [1.0, 1.0], power(24)),
        (power(24), [2.0, 1.0], [1.0, 1.0], power(24) + 2.0),
        (power(24), [-power(24), 1.0], [1.0, 1.0], 0.0),
        (0.0, [1.0, -power(24)], [power(24), 1.0], 0.0),
        // A product of subnormal numbers, and a sum that is subnormal, are zero.
        (power(-130), [0.0, 0.0], [0.0, 0.0], 0.0),
        (1.0, [power(-130), 0.0], [power(126), 0.0], 1.0),
        // Below the smallest normal number before rounding to a subnormal one, but not after rounding to 24 bits.
        (least, [power(-75), 0.0], [-power(-75), 0.0], 0.0),
        (least, [1.5 * power(-76), 0.0], [-power(-75), 0.0], 0.0),
        (least, [power(-75), 0.0], [-power(-76), 0.0], least),
        (least, [power(-76), 0.0], [-power(-76), 0.0], least),
    ] {
        for isa in pair_isas() {
            // `pair` flushes too, so numbers are cut to their upper halves.
            let pair = |[even, odd]: [f32; 2]| even.to_bits() >> 16 | odd.to_bits() & 0xffff_0000;
            let got = step_on(isa, sum, pair(even), pair(odd));
            assert_eq!(got.to_bits(), want.to_bits(), "{isa}: {sum:e} + {even:?} · {odd:?} = {got:e}");
        }
    }
}

proptest! {
    #[test]
    fn every_isa_has_the_bits_of_the_definition(
        seed: u64, exponents in prop::sample::select(vec![0xffff_ffffu32, 0x9fff_9fff, 0x83ff_83ff, 0xbfff_bfff]),
    ) {
        let mut state = seed | 1;
        let mut words = || std::array::from_fn(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 32) as u32 & exponents
        });
        let (a, b, sums) = (&Pairs(words()), &Pairs(words()), words().map(f32::from_bits));
        let want: [f32; LANES] = std::array::from_fn(|lane| pairs::dot(sums[lane], a.0[lane], b.0[lane]));
        for isa in pair_isas() {
            let mut got = sums;
            let got_ref = &mut got;
            dispatch_pairs!(isa, step(got_ref: &mut [f32; LANES], a: &Pairs, b: &Pairs));
            for (got, want) in got.iter().zip(&want) {
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                prop_assert!(same, "{}: {:08x}, want {:08x}", isa, got.to_bits(), want.to_bits());
            }
        }
    }
}

#[inline(always)]
fn rearrange<D: PairLanes>(
    numbers: &[f32; 2 * LANES],
    square: &[[u16; 2 * LANES]; LANES],
    rows: &[[u16; LANES]; 2],
    out: &mut ([u32; LANES], [Pairs; LANES], [Pairs; 4]),
) {
    D::round(numbers, &mut out.0);
    D::transpose(square.each_ref(), &mut out.1);
    let [interleaved, joined, looked_up @ ..] = &mut out.2;
    D::interleave(&rows[0], &rows[1], interleaved);
    let floats = rows.map(|row| D::Floats::load_bf16(&row));
    D::join(floats[0], floats[1], joined);
    let codes: [u8; 4 * LANES] = std::array::from_fn(|i| (7 * i % 64) as u8);
    let table = D::table(&std::array::from_fn(|code| 100 + code as u16));
    D::look_up(<D::Floats as WithInts>::Ints::load(&codes), table, true, looked_up);
}

#[test]
fn numbers_are_rounded_and_words_are_moved() {
    let special =
        [f32::MIN_POSITIVE / 2.0, -f32::MIN_POSITIVE * 0.999, 1.0 + 1.0 / 256.0, f32::INFINITY, f32::MAX, -0.0];
    let numbers: &[f32; 2 * LANES] = &std::array::from_fn(|i| special.get(i).copied().unwrap_or(i as f32 / 3.0));
    let square: &[[u16; 2 * LANES]; LANES] = &std::array::from_fn(|i| std::array::from_fn(|j| (i << 8 | j) as u16));
    let rows: &[[u16; LANES]; 2] = &std::array::from_fn(|i| std::array::from_fn(|j| (i << 8 | j) as u16));
    for isa in pair_isas() {
        let mut out = ([0; LANES], [Pairs::ZERO; LANES], [Pairs::ZERO; 4]);
        let out_ref = &mut out;
        dispatch_pairs!(
            isa,
            rearrange(
                numbers: &[f32; 2 * LANES], square: &[[u16; 2 * LANES]; LANES], rows: &[[u16; LANES]; 2],
                out_ref: &mut ([u32; LANES], [Pairs; LANES], [Pairs; 4])
            )
        );
        let halves: Vec<_> = out.0.iter().flat_map(|word| [*word as u16, (word >> 16) as u16]).collect();
        // Subnormal numbers become zeros, ties go to even, the greatest numbers to infinity.
        assert_eq!(halves[..6], [0, 0x8000, 0x3f80, 0x7f80, 0x7f80, 0x8000], "{isa}");
        for (got, number) in halves.iter().zip(numbers).skip(6) {
            assert_eq!(*got, half::bf16::from_f32(*number).to_bits(), "{isa}: {number}");
        }
        for (i, line) in out.1.iter().enumerate() {
            let want = |j: usize| ((j << 24) | ((2 * i + 1) << 16) | (j << 8) | (2 * i)) as u32;
            assert_eq!(line.0, std::array::from_fn(want), "{isa}");
        }
        for pairs in &out.2[..2] {
            assert_eq!(pairs.0, std::array::from_fn(|j| (0x100_0000 | j << 16 | j) as u32), "{isa}");
        }
        for (half, pairs) in out.2[2..].iter().enumerate() {
            let number = |lane: usize, i: usize| (100 + 7 * (4 * lane + 2 * half + i) % 64) as u32;
            assert_eq!(pairs.0, std::array::from_fn(|lane| number(lane, 0) | number(lane, 1) << 16), "{isa}");
        }
    }
}
