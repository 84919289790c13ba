//! Sixteen sums of byte products: the vector that 8-bit matrix products are written in, once, for every instruction set.
//!
//! A kernel is generic over [`DotLanes`] and `#[inline(always)]`; `dispatch_dot!` puts it into a function that is
//! compiled for a [`DotIsa`]. All sums are of integers and exact, so every implementation gives the same bits.
//!
//! ```text
//! a group: 16 outputs × 4 k        lane 0           lane 1          …  lane 15
//! of u8 weights (value + 128)      w0 w1 w2 w3      w0 w1 w2 w3        w0 w1 w2 w3
//! times 4 s8 activations           a0 a1 a2 a3      a0 a1 a2 a3        a0 a1 a2 a3
//! summed into 16 i32                    Σ                Σ                  Σ
//! ```
//!
//! Weights are kept as unsigned bytes because the x86 instruction multiplies unsigned by signed. What the 128 adds to a
//! sum, 128·Σa, depends on the activations alone: a sum starts from its negative.

#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;

#[cfg(target_arch = "aarch64")]
pub use neon::{NeonDot, NeonWiden};
pub use portable::PortableDot;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2Dot, Avx512Vnni, AvxVnni};

use super::{Isa, LANES, Lanes};

/// Weights of one group: four for each lane.
pub const GROUP: usize = 4 * LANES;

/// What an unsigned weight byte is more than its value.
pub const OFFSET: u8 = 128;

/// An instruction set for sums of byte products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DotIsa {
    /// Runs everywhere.
    Portable,
    /// AVX2: pairs of products in 16 bits, of absolute weights, so that none overflows.
    Avx2,
    /// AVX2 with `vpdpbusd` (AVX-VNNI).
    AvxVnni,
    /// AVX-512 with `vpdpbusd` (AVX512-VNNI).
    Avx512Vnni,
    /// 64-bit ARM: products in 16 bits.
    Neon,
    /// 64-bit ARM with `sdot`.
    NeonDot,
}

impl DotIsa {
    /// All of them, the most capable last.
    pub const ALL: [DotIsa; 6] =
        [DotIsa::Portable, DotIsa::Avx2, DotIsa::AvxVnni, DotIsa::Avx512Vnni, DotIsa::Neon, DotIsa::NeonDot];

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        match self {
            DotIsa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            DotIsa::Avx2 => Isa::Avx2.is_available() && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            DotIsa::AvxVnni => DotIsa::Avx2.is_available() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            DotIsa::Avx512Vnni => Isa::Avx512.is_available() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(target_arch = "aarch64")]
            DotIsa::Neon => true,
            #[cfg(target_arch = "aarch64")]
            DotIsa::NeonDot => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// The best that this CPU has beside `isa`, and no wider than it.
    pub fn beside(isa: Isa) -> DotIsa {
        let candidates: &[DotIsa] = match isa {
            Isa::Portable => &[],
            Isa::Avx2 => &[DotIsa::AvxVnni, DotIsa::Avx2],
            Isa::Avx512 => &[DotIsa::Avx512Vnni, DotIsa::AvxVnni, DotIsa::Avx2],
            Isa::Neon => &[DotIsa::NeonDot, DotIsa::Neon],
        };
        candidates.iter().copied().find(|dot| dot.is_available()).unwrap_or(DotIsa::Portable)
    }
}

impl fmt::Display for DotIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DotIsa::Portable => "portable",
            DotIsa::Avx2 => "avx2",
            DotIsa::AvxVnni => "avx-vnni",
            DotIsa::Avx512Vnni => "avx512-vnni",
            DotIsa::Neon => "neon",
            DotIsa::NeonDot => "neon-dotprod",
        })
    }
}

/// Sixteen `i32` sums in registers. All methods are inlined into a function compiled for the instruction set.
pub trait DotLanes: Copy {
    /// The float lanes of the same registers.
    type Floats: Lanes;
    /// A group of weights, ready to be multiplied with many activations.
    type Weights: Copy;

    /// Rows that the registers can hold sums for, per panel.
    const ROWS: usize;
    /// Whether they hold sums for several panels at once.
    const WIDE: bool;

    /// Sums of nothing. `correction` is −128·Σ of all activations that will be multiplied, for those that multiply
    /// unsigned weights.
    fn start(correction: i32) -> Self;
    /// All sums `sum`: what [`DotLanes::dot_small`] starts from.
    fn splat(sum: i32) -> Self;
    /// A group of weights from memory.
    fn load(from: &[u8; GROUP]) -> Self::Weights;
    /// Two groups of weights from 0 to 15: of the low halves of the bytes, and of the high ones.
    fn load_nibbles(from: &[u8; GROUP]) -> [Self::Weights; 2];
    /// Adds, lane by lane, the four weights times the four activations (−127..=127).
    fn dot(self, weights: Self::Weights, activations: [i8; 4]) -> Self;
    /// The same for weights of [`DotLanes::load_nibbles`], which are what they are: no offset, no sign.
    #[inline(always)]
    fn dot_small(self, weights: Self::Weights, activations: [i8; 4]) -> Self {
        self.dot(weights, activations)
    }
    /// The sums as floats; exact below 2²⁴.
    fn to_floats(self) -> Self::Floats;
    /// `self * scale + sum`, rounded once.
    #[inline(always)]
    fn scale_add(self, scale: Self::Floats, sum: Self::Floats) -> Self::Floats {
        self.to_floats().mul_add(scale, sum)
    }
    /// Sixteen half-precision numbers, finite, little endian.
    fn load_halves(from: &[u8; 2 * LANES]) -> Self::Floats;
}

/// Calls `$kernel::<D>(args…)` compiled for a [`DotIsa`]; the caller must have checked [`DotIsa::is_available`].
///
/// The kernel must be `#[inline(always)]` and generic over [`DotLanes`] as its first type parameter; a second one is
/// written with its bound, `kernel::<F: Bound>(…)`.
macro_rules! dispatch_dot {
    ($isa:expr, $kernel:ident $(::<$form:ident: $bound:path>)? ($($arg:ident : $ty:ty),* $(,)?)) => {{
        use $crate::simd::int8;
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
        fn avx512_vnni$(<$form: $bound>)?($($arg: $ty),*) { $kernel::<int8::Avx512Vnni $(, $form)?>($($arg),*) }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avxvnni,avx2,fma,f16c")]
        fn avx_vnni$(<$form: $bound>)?($($arg: $ty),*) { $kernel::<int8::AvxVnni $(, $form)?>($($arg),*) }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2$(<$form: $bound>)?($($arg: $ty),*) { $kernel::<int8::Avx2Dot $(, $form)?>($($arg),*) }
        #[cfg(target_arch = "aarch64")]
        #[target_feature(enable = "dotprod")]
        fn neon_dot$(<$form: $bound>)?($($arg: $ty),*) { $kernel::<int8::NeonDot $(, $form)?>($($arg),*) }
        match $isa {
            // SAFETY: the caller has checked that this CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            int8::DotIsa::Avx512Vnni => unsafe { avx512_vnni$(::<$form>)?($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            int8::DotIsa::AvxVnni => unsafe { avx_vnni$(::<$form>)?($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            int8::DotIsa::Avx2 => unsafe { avx2$(::<$form>)?($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            int8::DotIsa::NeonDot => unsafe { neon_dot$(::<$form>)?($($arg),*) },
            #[cfg(target_arch = "aarch64")]
            int8::DotIsa::Neon => $kernel::<int8::NeonWiden $(, $form)?>($($arg),*),
            _ => $kernel::<int8::PortableDot $(, $form)?>($($arg),*),
        }
    }};
}
pub(crate) use dispatch_dot;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::tested::{dot_isas, isas};

    #[inline(always)]
    fn two_groups<D: DotLanes>(w: &[[u8; GROUP]; 2], a: [[i8; 4]; 2], halves: &[u8; 32], out: &mut [[f32; LANES]; 3]) {
        let correction = -i32::from(OFFSET) * a.iter().flatten().map(|&a| i32::from(a)).sum::<i32>();
        let sums = D::start(correction).dot(D::load(&w[0]), a[0]).dot(D::load(&w[1]), a[1]);
        sums.to_floats().store(&mut out[0]);
        D::load_halves(halves).store(&mut out[1]);
        let [low, high] = D::load_nibbles(&w[0]);
        D::splat(-7).dot_small(low, a[0]).dot_small(high, a[1]).to_floats().store(&mut out[2]);
    }

    /// Extremes (weights ±127 with activations ±127, which overflow 16 bits where pairs are summed carelessly) and bytes
    /// of every kind.
    #[test]
    fn every_available_isa_sums_byte_products_exactly() {
        let extreme = |i: usize| [1u8, 255, 128, 129][i % 4];
        for case in 0..64usize {
            let w: [[u8; GROUP]; 2] = std::array::from_fn(|g| {
                std::array::from_fn(|i| match case {
                    0..16 => extreme(i * (case + 1) + g + i / 7),
                    _ => ((i * 37 + g * 101 + case * 53 + i * i) % 255 + 1) as u8,
                })
            });
            let a: [[i8; 4]; 2] = std::array::from_fn(|g| {
                std::array::from_fn(|i| match case {
                    0..16 => [127i8, -127, 127, -127][(i * (case / 4) + g + case) % 4],
                    _ => ((i * 91 + g * 67 + case * 29) % 255) as i8,
                })
                .map(|a: i8| a.max(-127))
            });
            let halves: [u16; LANES] = std::array::from_fn(|i| match i {
                0 => 0,
                1 => 1,      // the least subnormal number
                2 => 0x3ff,  // the greatest one
                3 => 0x7bff, // 65504
                4 => 0x8000, // −0
                5 => 0x83ff, // negative and subnormal
                _ => ((case * 487 + i * 1913) as u16 % 0x7c00) | (((i % 2) as u16) << 15),
            });
            let bytes: [u8; 32] = std::array::from_fn(|i| halves[i / 2].to_le_bytes()[i % 2]);
            let want: [f32; LANES] = std::array::from_fn(|lane| {
                let products = (0..2).flat_map(|g| (0..4).map(move |j| (g, j)));
                products.map(|(g, j)| (i32::from(w[g][lane * 4 + j]) - 128) * i32::from(a[g][j])).sum::<i32>() as f32
            });
            let small: [f32; LANES] = std::array::from_fn(|lane| {
                let products = (0..2).flat_map(|g| (0..4).map(move |j| (g, j)));
                let nibble = |g: usize, j: usize| i32::from((w[0][lane * 4 + j] >> (4 * g)) & 15);
                (products.map(|(g, j)| nibble(g, j) * i32::from(a[g][j])).sum::<i32>() - 7) as f32
            });
            for isa in dot_isas() {
                let mut out = [[f32::NAN; LANES]; 3];
                let (wr, hr, or) = (&w, &bytes, &mut out);
                dispatch_dot!(
                    isa,
                    two_groups(wr: &[[u8; GROUP]; 2], a: [[i8; 4]; 2], hr: &[u8; 32], or: &mut [[f32; LANES]; 3])
                );
                assert_eq!(out[0], want, "{isa}, case {case}");
                let bits = |floats: [f32; LANES]| floats.map(f32::to_bits);
                assert_eq!(
                    bits(out[1]),
                    halves.map(|h| half::f16::from_bits(h).to_f32().to_bits()),
                    "{isa}, case {case}"
                );
                assert_eq!(out[2], small, "{isa}, case {case}");
            }
        }
    }

    #[test]
    fn the_dot_instructions_of_an_isa_are_no_wider_than_it() {
        for isa in isas() {
            let dot = DotIsa::beside(isa);
            assert!(dot.is_available(), "{isa}: {dot}");
            assert!(isa == Isa::Avx512 || dot != DotIsa::Avx512Vnni, "{isa}: {dot}");
            assert!(isa != Isa::Portable || dot == DotIsa::Portable, "{isa}: {dot}");
        }
    }
}
