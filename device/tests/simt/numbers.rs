//! Small floating-point formats, bit for bit: against the crate `half`, and against their definition.

use device::Arg;
use half::{bf16, f16};

use super::{buffer, launch, library, run, run_seeded, zeros};

/// Returns every number of a format with 4 exponent bits and 3 mantissa bits, or 5 and 2, from its definition.
fn fp8(code: u8, mantissa_bits: i32) -> f32 {
    let bias = if mantissa_bits == 3 { 7 } else { 15 };
    let exponent = i32::from(code & 0x7f) >> mantissa_bits;
    let mantissa = i32::from(code) & ((1 << mantissa_bits) - 1);
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let special = if mantissa_bits == 3 { code & 0x7f == 0x7f } else { exponent == 31 };
    match (special, exponent) {
        (true, _) if mantissa_bits == 2 && mantissa == 0 => sign * f32::INFINITY,
        (true, _) => f32::NAN,
        (_, 0) => sign * mantissa as f32 * 2f32.powi(1 - bias - mantissa_bits),
        _ => sign * ((1 << mantissa_bits) + mantissa) as f32 * 2f32.powi(exponent - bias - mantissa_bits),
    }
}

/// Returns the nearest finite code, the even one of two; NaN is 0x7f.
fn to_fp8(value: f32, mantissa_bits: i32) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let last = if mantissa_bits == 3 { 0x7e } else { 0x7b };
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.abs() >= fp8(last, mantissa_bits) {
        return last | sign;
    }
    // Differences of such numbers are exact in f64.
    let distance = |code: u8| (f64::from(fp8(code, mantissa_bits)) - f64::from(value.abs())).abs();
    let nearer = |a: &u8, b: &u8| distance(*a).total_cmp(&distance(*b)).then((a & 1).cmp(&(b & 1)));
    (0..=last).min_by(nearer).unwrap() | sign
}

/// Returns every f16, bf16 and fp8 number, the midpoints between neighbours, and their neighbours in f32.
fn inputs() -> Vec<f32> {
    let mut values: Vec<f32> = vec![0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN];
    let mut around = |value: f32| {
        if value.is_finite() {
            values.extend([value, value.next_up(), value.next_down()]);
        }
    };
    for code in 0..=u16::MAX {
        let (a, b) = (f16::from_bits(code), f16::from_bits(code.wrapping_add(1)));
        around(a.to_f32());
        around((a.to_f32() + b.to_f32()) / 2.0);
        around(f32::from_bits(u32::from(code) << 16));
        around(f32::from_bits(u32::from(code) << 16 | 0x8000));
    }
    for code in 0..=u8::MAX {
        for mantissa_bits in [2, 3] {
            let (a, b) = (fp8(code, mantissa_bits), fp8(code.wrapping_add(1), mantissa_bits));
            around((a + b) / 2.0);
        }
    }
    around(464.0);
    around(61440.0);
    values
}

#[test]
fn rounding_to_each_format_is_to_nearest_even_and_fp8_saturates() {
    let Some(library) = library() else { return };
    let values = inputs();
    let n = values.len();
    let (input, f16s, bf16s) = (buffer(&values), zeros::<u16>(n), zeros::<u16>(n));
    let (e4m3, e5m2) = (zeros::<u8>(n), zeros::<u8>(n));
    let mut args = [&f16s, &bf16s, &e4m3, &e5m2, &input].map(|buffer| Arg::pointer(buffer, 0)).to_vec();
    args.push((n as i32).into());
    run(library, &launch("encode", n.div_ceil(256) as u32, 256, &args)).unwrap();
    for (i, &value) in values.iter().enumerate() {
        let nan = |bits: u16| if value.is_nan() { 0x7fff } else { bits };
        assert_eq!(f16s.host::<u16>().unwrap()[i], nan(f16::from_f32(value).to_bits()), "{value:e} to f16");
        assert_eq!(bf16s.host::<u16>().unwrap()[i], nan(bf16::from_f32(value).to_bits()), "{value:e} to bf16");
        assert_eq!(e4m3.host::<u8>().unwrap()[i], to_fp8(value, 3), "{value:e} to e4m3");
        assert_eq!(e5m2.host::<u8>().unwrap()[i], to_fp8(value, 2), "{value:e} to e5m2");
    }
}

#[test]
fn every_code_of_each_format_is_the_number_that_it_stands_for() {
    let Some(library) = library() else { return };
    let (f16s, bf16s) = (zeros::<f32>(1 << 16), zeros::<f32>(1 << 16));
    let (e4m3, e5m2) = (zeros::<f32>(256), zeros::<f32>(256));
    let args = [&f16s, &bf16s, &e4m3, &e5m2].map(|buffer| Arg::pointer(buffer, 0));
    run(library, &launch("decode", 256, 256, &args)).unwrap();
    let same =
        |found: f32, expected: f32| (found.is_nan() && expected.is_nan()) || found.to_bits() == expected.to_bits();
    for code in 0..=u16::MAX {
        let i = usize::from(code);
        assert!(same(f16s.host::<f32>().unwrap()[i], f16::from_bits(code).to_f32()), "f16 {code:#x}");
        assert!(same(bf16s.host::<f32>().unwrap()[i], bf16::from_bits(code).to_f32()), "bf16 {code:#x}");
    }
    for code in 0..=u8::MAX {
        let i = usize::from(code);
        assert!(same(e4m3.host::<f32>().unwrap()[i], fp8(code, 3)), "e4m3 {code:#x}");
        assert!(same(e5m2.host::<f32>().unwrap()[i], fp8(code, 2)), "e5m2 {code:#x}");
    }
}

/// Returns `count` numbers of both signs and many magnitudes, the same in every run.
fn spread(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..count).map(|_| (next() - 0.5) * 2f32.powi((next() * 12.0) as i32 - 6)).collect()
}

#[test]
fn arithmetic_on_pairs_rounds_once() {
    let Some(library) = library() else { return };
    let n = 1024;
    let halves = |seed| spread(2 * n, seed).into_iter().map(f16::from_f32).collect::<Vec<_>>();
    let (a, b) = (halves(1), halves(2));
    let c: Vec<bf16> = spread(2 * n, 3).into_iter().map(bf16::from_f32).collect();
    let bits = |values: &[f16]| buffer(&values.iter().map(|value| value.to_bits()).collect::<Vec<u16>>());
    let (a_in, b_in) = (bits(&a), bits(&b));
    let c_in = buffer(&c.iter().map(|value| value.to_bits()).collect::<Vec<u16>>());
    let out = zeros::<f32>(6 * n);
    let args = [&out, &a_in, &b_in, &c_in].map(|buffer| Arg::pointer(buffer, 0));
    run(library, &launch("pairs", 4, 256, &args)).unwrap();
    for (i, found) in out.host::<f32>().unwrap().chunks(6).enumerate() {
        for half in 0..2 {
            let (a, b, c) = (a[2 * i + half], b[2 * i + half], c[2 * i + half]);
            let sum = f16::from_f32(a.to_f32() + b.to_f32());
            // Exact in f64 for numbers of these magnitudes.
            let fused = f16::from_f64(a.to_f64() * b.to_f64() + sum.to_f64()).to_f32();
            assert_eq!(found[half], fused, "{a} {b}");
            assert_eq!(found[2 + half], bf16::from_f32(c.to_f32() * c.to_f32()).to_f32(), "{c}");
            assert_eq!(found[4 + half], fp8(to_fp8(fused, 3), 3), "{fused}");
        }
    }
}

#[test]
fn functions_compute_what_their_names_say() {
    let Some(library) = library() else { return };
    let values = spread(32, 4);
    let (input, out) = (buffer(&values), zeros::<f32>(8 * 32));
    let args = [Arg::pointer(&out, 0), Arg::pointer(&input, 0)];
    run_seeded(library, 1, &launch("functions", 1, 32, &args)).unwrap();
    for (&x, found) in values.iter().zip(out.host::<f32>().unwrap().chunks(8)) {
        let expected =
            [x.exp(), x.exp2(), 1.0 / (x.abs() + 1.0).sqrt(), x / 3.0, x.round_ties_even(), -x, 1.0, x.max(0.0)];
        for (found, expected) in found.iter().zip(expected) {
            // Two ulp: the C library and Rust may differ in the last bit of an exponential.
            assert!((found - expected).abs() <= 2.0 * f32::EPSILON * expected.abs(), "{x}: {found} for {expected}");
        }
    }
}
