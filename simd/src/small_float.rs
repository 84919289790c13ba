//! Conversions between f32 and floats of 16 and 8 bits, one number at a time.
//!
//! Every function is branch-free integer and float arithmetic, so that the compiler vectorises a loop over it inside of
//! [`dispatch!`](crate::dispatch), and gives the same bits on every instruction set. The `half` crate branches, or detects CPU
//! features, for each number. Widening is exact. Narrowing rounds to nearest, ties to even; 16-bit types overflow to infinity,
//! 8-bit types to their greatest finite number.
//!
//! ```text
//! e4m3  s eeee mmm     bias  7, no infinity, NaN is s 1111 111, greatest 448       FP8 Formats for Deep Learning,
//! e5m2  s eeeee mm     bias 15, the upper half of an f16, greatest 57344           Micikevicius et al., 2022
//! ```

/// Widens an IEEE half.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff);
    // The product moves the exponent from bias 15 to 127 and normalises subnormal numbers too.
    let value = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    let special = if magnitude >= 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(value.to_bits() | special | u32::from(bits & 0x8000) << 16)
}

/// Returns the IEEE half nearest to a number.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13).wrapping_sub(112 << 10).min(0x7c00);
    // Adding 0.5 leaves the number of smallest steps of a half, 2^-24, in the low bits.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let finite = if magnitude < 113 << 23 { subnormal } else { normal };
    let code = if magnitude > 0x7f80_0000 { 0x7e00 | magnitude >> 13 & 0x3ff } else { finite };
    (bits >> 16 & 0x8000 | code) as u16
}

/// Widens a bfloat16.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Returns the bfloat16 nearest to a number.
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { bits >> 16 | 0x40 } else { rounded }) as u16
}

/// Widens an e4m3 byte.
#[inline(always)]
pub fn e4m3_to_f32(bits: u8) -> f32 {
    let magnitude = u32::from(bits & 0x7f);
    let value = f32::from_bits(magnitude << 20) * f32::from_bits((127 + 120) << 23);
    let special = if magnitude == 0x7f { 0x7fc0_0000 } else { 0 };
    f32::from_bits(value.to_bits() | special | u32::from(bits & 0x80) << 24)
}

/// Returns the e4m3 byte nearest to a number. Magnitudes above 448 become 448; NaN becomes 0x7f.
#[inline(always)]
pub fn f32_to_e4m3(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24 & 0x80) as u8;
    let magnitude = value.abs().min(448.0); // the min of NaN is 448
    let bits = magnitude.to_bits();
    let normal = ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    // Adding 2^14 leaves the number of smallest steps, 2^-9, in the low bits.
    let subnormal = (magnitude + 16384.0).to_bits().wrapping_sub(16384f32.to_bits());
    let code = if bits < 121 << 23 { subnormal } else { normal } as u8;
    if value.is_nan() { 0x7f } else { sign | code }
}

/// Widens an e5m2 byte.
#[inline(always)]
pub fn e5m2_to_f32(bits: u8) -> f32 {
    f16_to_f32(u16::from(bits) << 8)
}

/// Returns the e5m2 byte nearest to a number. Magnitudes above 57344 become 57344; NaN becomes 0x7f.
#[inline(always)]
pub fn f32_to_e5m2(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24 & 0x80) as u8;
    let magnitude = value.abs().min(57344.0);
    let bits = magnitude.to_bits();
    let normal = ((bits + 0xf_ffff + (bits >> 21 & 1)) >> 21).wrapping_sub(112 << 2);
    // Adding 2^7 leaves the number of smallest steps, 2^-16, in the low bits.
    let subnormal = (magnitude + 128.0).to_bits().wrapping_sub(128f32.to_bits());
    let code = if bits < 113 << 23 { subnormal } else { normal } as u8;
    if value.is_nan() { 0x7f } else { sign | code }
}

/// Returns the signed byte nearest to a number, clamped to ±127; NaN becomes −127.
#[allow(clippy::manual_clamp)] // `clamp` would leave NaN, which becomes 0
#[inline(always)]
pub fn f32_to_int8(value: f32) -> u8 {
    value.max(-127.0).min(127.0).round_ties_even() as i8 as u8
}
