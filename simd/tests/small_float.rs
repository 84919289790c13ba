//! Conversions of small floats, one at a time and in lanes.

use half::{bf16, f16};
use simd::small_float::*;
use simd::{LANES, Lanes, Portable, dispatch};

use super::support::isas;

/// Returns the code of the nearest number, the even one of two: the definition, for codes of positive numbers in order.
fn nearest(magnitude: f32, greatest: u8, widen: impl Fn(u8) -> f32) -> u8 {
    let distance = |code: u8| (f64::from(widen(code)) - f64::from(magnitude)).abs();
    (0..=greatest).min_by(|a, b| distance(*a).total_cmp(&distance(*b)).then((a % 2).cmp(&(b % 2)))).unwrap_or(0)
}

/// Returns the numbers that are hard to round: midpoints between two neighbours, and the floats next to them.
fn hard(widen: impl Fn(u8) -> f32, greatest: u8) -> Vec<f32> {
    let mut numbers = vec![0.0, f32::MIN_POSITIVE, 1e-30, f32::MAX, f32::INFINITY, 1e-45];
    for code in 0..=greatest {
        let (low, high) = (widen(code), widen(code.saturating_add(1).min(greatest)));
        let middle = (low + high) / 2.0;
        for number in [low, middle] {
            numbers.extend([number, number.next_up(), number.next_down().max(0.0)]);
        }
    }
    numbers
}

#[test]
fn eight_bit_codes_are_the_nearest_ones() {
    for (greatest, limit, widen, narrow) in [
        (0x7eu8, 448.0, e4m3_to_f32 as fn(u8) -> f32, f32_to_e4m3 as fn(f32) -> u8),
        (0x7b, 57344.0, e5m2_to_f32, f32_to_e5m2),
    ] {
        assert_eq!(widen(greatest), limit);
        for number in hard(widen, greatest) {
            let want = nearest(number.min(limit), greatest, widen);
            assert_eq!(narrow(number), want, "{number:e}");
            assert_eq!(narrow(-number), want | 0x80, "-{number:e}");
        }
        assert!(narrow(f32::NAN) == 0x7f && widen(0x7f).is_nan() && widen(0xff).is_nan());
    }
    assert!((e4m3_to_f32(1), e5m2_to_f32(1), e5m2_to_f32(0x7c)) == (2f32.powi(-9), 2f32.powi(-16), f32::INFINITY));
    let bytes: Vec<i8> = [0.5, 1.5, -2.5, 1e9, -1e9, f32::NAN].map(|v| f32_to_int8(v) as i8).to_vec();
    assert_eq!(bytes, [0, 2, -2, 127, -127, -127]);
}

#[test]
fn sixteen_bit_codes_are_those_of_the_half_crate() {
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    for bits in 0..=u16::MAX {
        assert!(same(f16_to_f32(bits), f16::from_bits(bits).to_f32()), "{bits:#x}");
        assert!(same(bf16_to_f32(bits), bf16::from_bits(bits).to_f32()), "{bits:#x}");
    }
    // All signs, exponents and upper mantissas, with the low bits that decide a rounding.
    for upper in 0..=u16::MAX {
        for low in [0, 1, 0x7ff, 0x800, 0x801, 0xfff, 0x1000, 0x1001, 0x1fff, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let value = f32::from_bits(u32::from(upper) << 16 | low);
            assert_eq!(f32_to_f16(value), f16::from_f32(value).to_bits(), "{value:e}");
            assert_eq!(f32_to_bf16(value), bf16::from_f32(value).to_bits(), "{value:e}");
        }
    }
}

#[inline(always)]
fn widen<L: Lanes>(bytes: &[u8; LANES], halves: &[u16; LANES], out: &mut [[f32; LANES]; 5]) {
    L::load_e4m3(bytes).store(&mut out[0]);
    L::load_e5m2(bytes).store(&mut out[1]);
    L::load_i8(bytes).store(&mut out[2]);
    L::load_f16(halves).store(&mut out[3]);
    L::load_bf16(halves).store(&mut out[4]);
}

#[inline(always)]
fn narrow<L: Lanes>(values: &[f32], out: &mut [[u16; 5]]) {
    // The lanes only select the instruction set to compile for.
    let _ = std::marker::PhantomData::<L>;
    for (out, &value) in out.iter_mut().zip(values) {
        let bytes = [f32_to_e4m3(value), f32_to_e5m2(value), f32_to_int8(value)].map(u16::from);
        *out = [bytes[0], bytes[1], bytes[2], f32_to_f16(value), f32_to_bf16(value)];
    }
}

#[test]
fn every_instruction_set_gives_the_bits_of_one_at_a_time() {
    let values: Vec<f32> = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16 | 0x8000)).collect();
    let mut want = vec![[0; 5]; values.len()];
    narrow::<Portable>(&values, &mut want);
    for isa in isas() {
        for first in (0..=u16::MAX).step_by(LANES) {
            let halves: [u16; LANES] = std::array::from_fn(|i| first + i as u16);
            let bytes = halves.map(|half| half as u8);
            let mut out = [[0.0; LANES]; 5];
            let (b, h, o) = (&bytes, &halves, &mut out);
            dispatch!(isa, widen(b: &[u8; LANES], h: &[u16; LANES], o: &mut [[f32; LANES]; 5]));
            for i in 0..LANES {
                let want = [
                    e4m3_to_f32(bytes[i]),
                    e5m2_to_f32(bytes[i]),
                    f32::from(bytes[i] as i8),
                    f16_to_f32(halves[i]),
                    bf16_to_f32(halves[i]),
                ];
                for (kind, want) in want.into_iter().enumerate() {
                    let got = out[kind][i];
                    let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                    assert!(same, "{isa}, kind {kind}, {:#x}: {got}, want {want}", halves[i]);
                }
            }
        }
        let mut got = vec![[0; 5]; values.len()];
        let (v, g) = (&values[..], &mut got[..]);
        dispatch!(isa, narrow(v: &[f32], g: &mut [[u16; 5]]));
        assert!(got == want, "{isa}");
    }
}

#[inline(always)]
fn sums<L: Lanes>(rows: &[[f32; LANES]; 4], one: &mut [f32; 4], four: &mut [f32; 4]) {
    *one = std::array::from_fn(|i| L::load(&rows[i]).sum());
    *four = L::sums(std::array::from_fn(|i| L::load(&rows[i])));
}

#[test]
fn four_sums_at_once_are_the_four_sums() {
    let rows: [[f32; LANES]; 4] = std::array::from_fn(|r| std::array::from_fn(|i| (r * 31 + i * 7) as f32 / 3.7));
    for isa in isas() {
        let (mut one, mut four) = ([0.0; 4], [1.0; 4]);
        let (r, o, f) = (&rows, &mut one, &mut four);
        dispatch!(isa, sums(r: &[[f32; LANES]; 4], o: &mut [f32; 4], f: &mut [f32; 4]));
        assert_eq!(one.map(f32::to_bits), four.map(f32::to_bits), "{isa}");
    }
}
