//! Vectors and threads of CPU kernels: sixteen float lanes, one source for every instruction set, and a [`Pool`] of workers.
//!
//! | module | contents |
//! |---|---|
//! | the root | [`Lanes`], sixteen floats; [`Isa`], the instruction sets |
//! | [`int8`], [`pairs`], [`tiles`] | products of bytes, of bfloat16 pairs and of bfloat16 tiles |
//! | [`small_float`] | floats of 16 and 8 bits |
//! | [`allocator`] | settings of the system allocator |
//! | [`roofline`] | how fast this machine reads and multiplies |
//!
//! A kernel is generic over [`Lanes`] and `#[inline(always)]`; [`dispatch!`](crate::dispatch) puts it into a function
//! that is compiled for the instruction set, so that the lanes become registers. Sixteen lanes are one AVX-512
//! register, two AVX2 registers or four NEON registers. The order of every sum is defined by lanes, so it does not depend
//! on the register width; only the multiply-add of [`Isa::Portable`], which rounds twice, may differ in the last bit.
//!
//! No vector passes through a closure, `array::from_fn` or `array::map` in a kernel: these may stay functions of their own, compiled
//! without the instruction set, and then each instruction in them is a call. Loops and `#[inline(always)]` functions stay inside.
//!
//! ```
//! use simd::{Isa, LANES, Lanes, Pool, dispatch};
//!
//! #[inline(always)]
//! fn double<L: Lanes>(numbers: &mut [f32]) {
//!     for numbers in numbers.as_chunks_mut::<LANES>().0 {
//!         let lanes = L::load(numbers);
//!         lanes.add(lanes).store(numbers);
//!     }
//! }
//!
//! let (pool, isa, mut numbers) = (Pool::new(Some(2))?, Isa::best(), vec![1.5; 4096]);
//! pool.chunks_mut(&mut numbers, 1024, 1024, |_, part| dispatch!(isa, double(part: &mut [f32])));
//! assert_eq!(numbers, vec![3.0; 4096]);
//! # Ok::<(), simd::ThreadsError>(())
//! ```

pub mod allocator;
pub mod compiled;
pub mod int8;
mod lock;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod pairs;
mod pool;
mod portable;
#[cfg(target_arch = "x86_64")]
mod present;
pub mod roofline;
pub mod small_float;
pub mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;

pub use lock::lock;
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use pool::{Pool, ThreadsError};
pub use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

/// Number of lanes in a vector.
pub const LANES: usize = 16;

/// Sixteen pairs of bfloat16: a cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Pairs(pub [u32; LANES]);

impl Pairs {
    /// Pairs of zeros.
    pub const ZERO: Pairs = Pairs([0; LANES]);

    /// Returns the words as the bits of float32 numbers.
    #[inline(always)]
    pub fn as_floats(&self) -> &[f32; LANES] {
        // SAFETY: both are sixteen words, and every bit pattern is a number.
        unsafe { &*(&raw const self.0).cast() }
    }

    /// As [`Pairs::as_floats`], to be changed.
    #[inline(always)]
    pub fn as_floats_mut(&mut self) -> &mut [f32; LANES] {
        // SAFETY: as above.
        unsafe { &mut *(&raw mut self.0).cast() }
    }
}

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// No vector instructions; runs everywhere.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same with AVX512-BF16, for [`pairs`]; otherwise as [`Isa::Avx512`].
    Avx512Bf16,
    /// The same with AMX tiles, for [`tiles`]; otherwise as [`Isa::Avx512Bf16`].
    Amx,
    /// 64-bit ARM.
    Neon,
}

impl Isa {
    /// Returns whether this CPU has the instructions, this process may use them, and this program is compiled for them.
    pub fn is_available(self) -> bool {
        let is_compiled = match self {
            Isa::Portable | Isa::Neon => true,
            Isa::Avx2 => compiled::AVX2,
            Isa::Avx512 => compiled::AVX512,
            Isa::Avx512Bf16 | Isa::Amx => compiled::AVX512 && compiled::AVX512_BF16,
        };
        is_compiled && self.is_present()
    }

    /// Returns whether this CPU has the instructions, and this process may use them.
    fn is_present(self) -> bool {
        match self {
            Isa::Portable => true,
            Isa::Amx => Isa::Avx512Bf16.is_present() && no_tiles().is_none(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => present::avx2(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => present::avx512(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => present::avx512_bf16(),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// Returns why this process cannot use the instructions; `None` if it can.
    pub fn missing(self) -> Option<String> {
        match self {
            _ if self.is_available() => None,
            _ if self.is_present() => Some(format!(
                "this program is compiled without {self}; cargo build --profile dist compiles every instruction set"
            )),
            Isa::Amx => no_tiles().map(str::to_string),
            _ => Some(format!("this CPU has no {self}")),
        }
    }

    /// Returns the instruction set of this CPU with the best vectors.
    pub fn best() -> Isa {
        let vectors = [Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Neon];
        vectors.into_iter().find(|isa| isa.is_available()).unwrap_or(Isa::Portable)
    }

    /// Returns better vectors or tiles of this CPU that this program is not compiled for.
    pub fn left_out() -> Option<Isa> {
        let best_first = [Isa::Amx, Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2];
        best_first.into_iter().take_while(|isa| !isa.is_available()).find(|isa| isa.is_present())
    }
}

/// Returns why this process cannot use tiles.
fn no_tiles() -> Option<&'static str> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    return tiles::amx::Amx::get().err();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    Some("AMX tiles are used on x86-64 and Linux only")
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
        })
    }
}

/// Sixteen `f32` in registers. All methods are inlined into a function compiled for the instruction set.
pub trait Lanes: Copy {
    /// Returns a vector whose lanes all are `x`.
    fn splat(x: f32) -> Self;
    /// Loads the lanes; no alignment is needed.
    fn load(from: &[f32; LANES]) -> Self;
    /// Loads and widens bfloat16 values.
    fn load_bf16(from: &[u16; LANES]) -> Self;
    /// Loads and widens the lower bfloat16 of each pair (`HIGH`: the higher).
    #[inline(always)]
    fn load_half<const HIGH: bool>(from: &Pairs) -> Self {
        Self::load(&from.0.map(|pair| f32::from_bits(if HIGH { pair & 0xffff_0000 } else { pair << 16 })))
    }
    /// Loads and widens IEEE halves.
    fn load_f16(from: &[u16; LANES]) -> Self;
    /// As [`Lanes::load_f16`], for halves that are all finite; faster on some instruction sets.
    #[inline(always)]
    fn load_finite_f16(from: &[u16; LANES]) -> Self {
        Self::load_f16(from)
    }
    /// Loads and widens e4m3 bytes; see [`small_float`].
    fn load_e4m3(from: &[u8; LANES]) -> Self;
    /// Loads and widens e5m2 bytes.
    fn load_e5m2(from: &[u8; LANES]) -> Self;
    /// Looks up the lowest 4 bits of each of sixteen words, shifted to the right by `shift`, in a table.
    #[inline(always)]
    fn lookup_floats(words: &[u8; 4 * LANES], shift: u32, table: &[f32; LANES]) -> Self {
        let mut found = [0.0; LANES];
        for (found, word) in found.iter_mut().zip(words.as_chunks::<4>().0) {
            *found = table[(u32::from_le_bytes(*word) >> shift) as usize & 15];
        }
        Self::load(&found)
    }
    /// Loads integers and converts them to floats; exact below 2²⁴.
    #[inline(always)]
    fn load_i32(from: &Pairs) -> Self {
        let mut floats = [0.0; LANES];
        for (float, word) in floats.iter_mut().zip(from.0) {
            *float = word as i32 as f32;
        }
        Self::load(&floats)
    }
    /// Loads and widens signed bytes.
    fn load_i8(from: &[u8; LANES]) -> Self;
    /// Loads and widens unsigned bytes.
    fn load_u8(from: &[u8; LANES]) -> Self;
    /// Stores the lanes.
    fn store(self, to: &mut [f32; LANES]);
    /// Returns `self * a + b`.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// Adds lane by lane.
    fn add(self, other: Self) -> Self;
    /// Multiplies lane by lane.
    fn mul(self, other: Self) -> Self;
    /// Divides lane by lane.
    fn div(self, other: Self) -> Self;
    /// Returns the greater of each pair of lanes.
    fn max(self, other: Self) -> Self;
    /// Rounds to the nearest integer, ties to even.
    fn round(self) -> Self;
    /// Rounds to the nearest integers, ties to even, and stores them as bytes. The lanes must lie in −128..=127.
    fn round_to_bytes(self, to: &mut [i8; LANES]);
    /// Returns 2 to the power of each lane. The lanes must be integers in −126..=127.
    fn exp2_int(self) -> Self;
    /// Sums the lanes: halves added to halves, 16 → 8 → 4 → 2 → 1.
    fn sum(self) -> f32;
    /// Returns the greatest lane.
    fn greatest(self) -> f32;

    /// Whether the instruction set has registers for more than sixteen vectors.
    const MANY: bool;
    /// Whether there are vector registers at all.
    const VECTORS: bool = true;

    /// Returns [`Lanes::sum`] of four vectors, bit for bit; cheaper than four calls where one register holds parts of
    /// several vectors.
    #[inline(always)]
    fn sums(four: [Self; 4]) -> [f32; 4] {
        let mut sums = [0.0; 4];
        for (to, sum) in sums.iter_mut().zip(four) {
            *to = sum.sum();
        }
        sums
    }

    /// Transposes a 16 × 16 matrix: lane `i` of vector `j` becomes lane `j` of vector `i`.
    #[inline(always)]
    fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
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

    /// Returns e to the power of each lane, with a relative error below 2e-7. The lanes must be at most 87.3; below −87.3 the
    /// error is at most the smallest normal number. Range reduction by ln 2 in two parts, then a polynomial of degree 6
    /// with the coefficients of the Taylor series, which are exact enough on ±ln 2 / 2.
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

    /// Returns 2 to the power of each lane, with a relative error below 3e-7: exactly 1 for 0, 0 below [`LEAST_EXP2`], NaN for NaN. The
    /// lanes must be at most 1. Every instruction set with fused multiply-adds computes the same bits.
    #[inline(always)]
    fn exp2(self) -> Self {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes);
        let integers = lanes.map(f32::round_ties_even);
        // Lanes below the least exponent are set to 0 at the end, whatever these bits are.
        let powers = integers.map(|n| f32::from_bits(((n as i32).wrapping_add(127) << 23) as u32));
        let r = Self::load(&std::array::from_fn(|i| lanes[i] - integers[i]));
        let mut p = Self::splat(EXP2[0]);
        for c in &EXP2[1..] {
            p = p.mul_add(r, Self::splat(*c));
        }
        let mut found = [0.0; LANES];
        p.mul(Self::load(&powers)).store(&mut found);
        Self::load(&std::array::from_fn(|i| if lanes[i] < LEAST_EXP2 { 0.0 } else { found[i] }))
    }
}

/// Least exponent for which [`Lanes::exp2`] is not zero.
pub const LEAST_EXP2: f32 = -40.0;

/// Coefficients of a polynomial for 2^x in −0.5..0.5, the highest power first, with a relative error below 1e-7.
#[expect(clippy::approx_constant, reason = "a coefficient of the best approximation, which is near ln 2")]
pub(crate) const EXP2: [f32; 6] = [0.001_326_473, 0.009_671_513, 0.055_507_337, 0.240_222_42, 0.693_147, 1.0];

/// Rows to prefetch: memory that will be read soon. Prefetching changes nothing but the time.
#[derive(Clone, Copy)]
pub struct Ahead {
    first: *const u8,
    rows: usize,
    row_bytes: usize,
}

impl Ahead {
    /// Nothing to prefetch.
    pub const NONE: Ahead = Ahead { first: std::ptr::null(), rows: 0, row_bytes: 0 };

    /// Makes a range of rows of `row` numbers each.
    #[inline(always)]
    pub fn of<T>(numbers: &[T], row: usize) -> Ahead {
        let rows = numbers.len().checked_div(row).unwrap_or(0);
        Ahead { first: numbers.as_ptr().cast(), rows, row_bytes: row * size_of::<T>() }
    }

    /// Returns the address of the first number, if there are any.
    #[inline(always)]
    pub fn start(self) -> Option<*const u8> {
        (self.rows > 0).then_some(self.first)
    }

    /// Prefetches rows `from..to`, as far as they exist. Call it with a few rows at a time, between computations, so that
    /// neither waits for the other.
    #[inline(always)]
    pub fn ask(self, from: usize, to: usize) {
        const LINE: usize = 64;
        let (start, end) = (from * self.row_bytes, to.min(self.rows) * self.row_bytes);
        for at in (start.next_multiple_of(LINE)..end).step_by(LINE) {
            prefetch(self.first.wrapping_add(at));
        }
    }
}

/// Prefetches a cache line. Any address is allowed; it changes nothing but the time.
#[inline(always)]
pub fn prefetch(line: *const u8) {
    // SAFETY: part of every x86-64; a prefetch has no effect that the program can observe.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast());
    }
    // SAFETY: as above, for every 64-bit ARM.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

/// As [`prefetch`], to the second level of the cache on x86-64, elsewhere not at all.
#[inline(always)]
pub fn prefetch_for_later(line: *const u8) {
    // SAFETY: as in `prefetch`.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// As [`prefetch`], for a line that is written next.
#[inline(always)]
pub fn prefetch_to_write(line: *const u8) {
    // SAFETY: as in `prefetch`; a CPU without the instruction ignores it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    // SAFETY: as in `prefetch`.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

/// Calls `$kernel::<L>(args…)` compiled for an [`Isa`]; the caller must have checked [`Isa::is_available`].
///
/// The kernel must be `#[inline(always)]` and generic over [`Lanes`] as its first type parameter. Further arguments are
/// constants or concrete types, `kernel::<8>(…)`, or one type parameter of the caller with its bound, `kernel::<W: Bound>(…)`.
#[macro_export]
macro_rules! dispatch {
    ($isa:expr, $kernel:ident $(::<$($g:tt),+>)? ($($arg:ident : $ty:ty),* $(,)?)) => {
        $crate::dispatch!(@ $isa, $kernel [] [$($($g)+)?] ($($arg: $ty),*))
    };
    ($isa:expr, $kernel:ident ::<$g:ident: $bound:path> ($($arg:ident : $ty:ty),* $(,)?)) => {
        $crate::dispatch!(@ $isa, $kernel [$g: $bound] [$g] ($($arg: $ty),*))
    };
    (@ $isa:expr, $kernel:ident [$($t:ident: $bound:path)?] [$($g:tt)*] ($($arg:ident : $ty:ty),*)) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn avx512$(<$t: $bound>)?($($arg: $ty),*) { $kernel::<$crate::Avx512 $(, $g)*>($($arg),*) }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2$(<$t: $bound>)?($($arg: $ty),*) { $kernel::<$crate::Avx2 $(, $g)*>($($arg),*) }
        match $isa {
            // SAFETY: the caller has checked that this CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx512 | $crate::Isa::Avx512Bf16 | $crate::Isa::Amx if $crate::compiled::AVX512 => unsafe {
                avx512$(::<$t>)?($($arg),*)
            },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx2 if $crate::compiled::AVX2 => unsafe { avx2$(::<$t>)?($($arg),*) },
            #[cfg(target_arch = "aarch64")]
            $crate::Isa::Neon => $kernel::<$crate::Neon $(, $g)*>($($arg),*),
            _ => $kernel::<$crate::Portable $(, $g)*>($($arg),*),
        }
    }};
}
