//! Sixteen float lanes: the vector that CPU kernels are written in, once, for every instruction set.
//!
//! A kernel is generic over [`Lanes`] and `#[inline(always)]`; [`dispatch!`](crate::dispatch) puts it into a function
//! that is compiled for the instruction set, so that the lanes become registers. Sixteen lanes are one AVX-512
//! register, two of AVX2, four of NEON. The order of every sum is in terms of lanes, so it is the same whatever the
//! registers are; only the fused multiply-add of [`Isa::Portable`] (which rounds twice) may differ in the last bit.

pub mod int8;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
pub mod small_float;
pub(crate) mod tested;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;

#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

/// Lanes of one vector.
pub const LANES: usize = 16;

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// No vector instructions asked for; runs everywhere.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// 64-bit ARM.
    Neon,
}

impl Isa {
    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// The widest that this CPU has.
    pub fn best() -> Isa {
        [Isa::Avx512, Isa::Avx2, Isa::Neon].into_iter().find(|isa| isa.is_available()).unwrap_or(Isa::Portable)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
        })
    }
}

/// Sixteen `f32` in registers. All methods are inlined into a function compiled for the instruction set.
pub trait Lanes: Copy {
    /// All lanes `x`.
    fn splat(x: f32) -> Self;
    /// The lanes from memory; no alignment needed.
    fn load(from: &[f32; LANES]) -> Self;
    /// Bfloat16 values widened.
    fn load_bf16(from: &[u16; LANES]) -> Self;
    /// IEEE halves widened.
    fn load_f16(from: &[u16; LANES]) -> Self;
    /// Bytes of e4m3 widened; see [`small_float`].
    fn load_e4m3(from: &[u8; LANES]) -> Self;
    /// Bytes of e5m2 widened.
    fn load_e5m2(from: &[u8; LANES]) -> Self;
    /// Signed bytes widened.
    fn load_i8(from: &[u8; LANES]) -> Self;
    /// The lanes to memory.
    fn store(self, to: &mut [f32; LANES]);
    /// `self * a + b`.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// Lane by lane.
    fn add(self, other: Self) -> Self;
    /// Lane by lane.
    fn mul(self, other: Self) -> Self;
    /// Lane by lane.
    fn div(self, other: Self) -> Self;
    /// Lane by lane.
    fn max(self, other: Self) -> Self;
    /// To the nearest integer, ties to even.
    fn round(self) -> Self;
    /// To the nearest integers, ties to even, as bytes; for lanes in −128..=127.
    fn round_to_bytes(self, to: &mut [i8; LANES]);
    /// 2 to the power of lanes that hold integers in -126..=127.
    fn exp2_int(self) -> Self;
    /// Sum of the lanes: halves added to halves, 16 → 8 → 4 → 2 → 1.
    fn sum(self) -> f32;
    /// Greatest lane.
    fn greatest(self) -> f32;

    /// Whether the instruction set has registers for more than sixteen of these at once.
    const MANY: bool;

    /// [`Lanes::sum`] of four, bit for bit; cheaper than four times one where halves of several fit a register.
    #[inline(always)]
    fn sums(four: [Self; 4]) -> [f32; 4] {
        four.map(Self::sum)
    }

    /// Sixteen vectors as the rows of a square, turned round: lane `i` of vector `j` becomes lane `j` of vector `i`.
    #[inline(always)]
    fn turned(rows: [Self; LANES]) -> [Self; LANES] {
        let mut square = [[0.0; LANES]; LANES];
        for (to, row) in square.iter_mut().zip(rows) {
            row.store(to);
        }
        let mut rows = rows;
        for (i, row) in rows.iter_mut().enumerate() {
            let mut column = [0.0; LANES];
            for (to, from) in column.iter_mut().zip(&square) {
                *to = from[i];
            }
            *row = Self::load(&column);
        }
        rows
    }

    /// e to the power of each lane, for lanes that are at most 87.3; relative error below 2e-7. Below -87.3 it is 0
    /// within the smallest normal number. Range reduction by ln 2 in two parts and a polynomial of degree 6
    /// (coefficients of the Taylor series, exact enough on ±ln 2 / 2).
    #[inline(always)]
    fn exp(self) -> Self {
        let x = self.max(Self::splat(-87.3));
        let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
        let r = n.mul_add(Self::splat(-0.693_359_4), x);
        let r = n.mul_add(Self::splat(2.121_944_4e-4), r);
        let mut p = Self::splat(1.0 / 720.0);
        for c in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = p.mul_add(r, Self::splat(c));
        }
        p.mul(n.exp2_int())
    }
}

/// Rows that will be read soon. Asking for their cache lines changes nothing but the time that this takes.
#[derive(Clone, Copy)]
pub struct Ahead {
    first: *const u8,
    rows: usize,
    row_bytes: usize,
}

impl Ahead {
    /// Nothing to ask for.
    pub const NONE: Ahead = Ahead { first: std::ptr::null(), rows: 0, row_bytes: 0 };

    /// Rows of `row` numbers each.
    #[inline(always)]
    pub fn of<T>(numbers: &[T], row: usize) -> Ahead {
        let rows = numbers.len().checked_div(row).unwrap_or(0);
        Ahead { first: numbers.as_ptr().cast(), rows, row_bytes: row * size_of::<T>() }
    }

    /// Asks for some of the rows, those that there are: a few at a time, between computations, so that neither waits for the
    /// other.
    #[inline(always)]
    pub fn ask(self, from: usize, to: usize) {
        const LINE: usize = 64;
        let (start, end) = (from * self.row_bytes, to.min(self.rows) * self.row_bytes);
        for at in (start.next_multiple_of(LINE)..end).step_by(LINE) {
            ask_for(self.first.wrapping_add(at));
        }
    }
}

/// Asks for a cache line that will be read soon. It changes nothing but the time that this takes, whatever the address.
#[inline(always)]
pub fn ask_for(line: *const u8) {
    // SAFETY: part of every x86-64; a prefetch reads no memory that the program can see.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast());
    }
    // SAFETY: as above, of every 64-bit ARM.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

/// Calls `$kernel::<L>(args…)` compiled for an [`Isa`]; the caller must have checked [`Isa::is_available`].
///
/// The kernel must be `#[inline(always)]` and generic over [`Lanes`] as its first type parameter.
#[macro_export]
macro_rules! dispatch {
    ($isa:expr, $kernel:ident $(::<$($g:tt),+>)? ($($arg:ident : $ty:ty),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn avx512($($arg: $ty),*) { $kernel::<$crate::simd::Avx512 $($(, $g)+)?>($($arg),*) }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2($($arg: $ty),*) { $kernel::<$crate::simd::Avx2 $($(, $g)+)?>($($arg),*) }
        match $isa {
            // SAFETY: the caller has checked that this CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx512 => unsafe { avx512($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx2 => unsafe { avx2($($arg),*) },
            #[cfg(target_arch = "aarch64")]
            $crate::Isa::Neon => $kernel::<$crate::simd::Neon $($(, $g)+)?>($($arg),*),
            _ => $kernel::<$crate::simd::Portable $($(, $g)+)?>($($arg),*),
        }
    }};
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::tested::isas;

    #[inline(always)]
    fn exp_and_sum<L: Lanes>(x: &[f32; LANES], out: &mut [f32; LANES], sum: &mut f32) {
        L::load(x).exp().store(out);
        *sum = L::load(x).sum();
    }

    #[inline(always)]
    fn turn<L: Lanes>(square: &mut [[f32; LANES]; LANES]) {
        let mut rows = [L::splat(0.0); LANES];
        for (row, from) in rows.iter_mut().zip(&*square) {
            *row = L::load(from);
        }
        for (row, to) in L::turned(rows).into_iter().zip(square) {
            row.store(to);
        }
    }

    #[test]
    fn a_square_is_turned_round() {
        for isa in isas() {
            let mut square = std::array::from_fn(|i| std::array::from_fn(|j| (LANES * i + j) as f32));
            let turned = &mut square;
            dispatch!(isa, turn(turned: &mut [[f32; LANES]; LANES]));
            for (i, row) in square.iter().enumerate() {
                assert!(row.iter().enumerate().all(|(j, &x)| x == (LANES * j + i) as f32), "{isa}: {row:?}");
            }
        }
    }

    #[test]
    fn every_available_isa_agrees_with_the_standard_library() {
        for isa in isas() {
            for start in -6..7 {
                let x: [f32; LANES] = std::array::from_fn(|i| start as f32 * 14.0 - i as f32 * 0.37);
                let (mut out, mut sum) = ([0.0; LANES], 0.0);
                let (xr, or, sr) = (&x, &mut out, &mut sum);
                dispatch!(isa, exp_and_sum(xr: &[f32; LANES], or: &mut [f32; LANES], sr: &mut f32));
                for (&x, &y) in x.iter().zip(&out) {
                    let want = f64::from(x).exp();
                    assert!((f64::from(y) - want).abs() <= want * 3e-7 + 1.3e-38, "{isa}: exp({x}) = {y}, want {want}");
                }
                assert!((sum - x.iter().sum::<f32>()).abs() < 1e-3, "{isa}");
            }
        }
    }
}
