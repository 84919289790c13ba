//! Sixteen sums of byte products: the vector type for 8-bit matrix products, one source for every instruction set.
//!
//! A kernel is generic over [`DotLanes`] and `#[inline(always)]`; [`dispatch_dot!`](crate::dispatch_dot) puts it into a
//! function that is compiled for a [`DotIsa`]. All sums are exact integers, so every instruction set gives the same bits.
//!
//! ```text
//! a group: 16 outputs × 4 k        lane 0           lane 1          …  lane 15
//! of u8 weights (value + 128)      w0 w1 w2 w3      w0 w1 w2 w3        w0 w1 w2 w3
//! times 4 s8 activations           a0 a1 a2 a3      a0 a1 a2 a3        a0 a1 a2 a3
//! summed into 16 i32                    Σ                Σ                  Σ
//! ```
//!
//! Weights are stored as unsigned bytes because the x86 instruction multiplies unsigned by signed bytes. The offset of 128
//! adds 128·Σa to a sum, which depends only on the activations: a sum starts from its negative.

#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;

#[cfg(target_arch = "aarch64")]
pub use neon::{NeonDot, NeonI8mm, NeonWiden};
pub use portable::PortableDot;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2Dot, Avx512Vnni, AvxVnni, Halves};

use super::{Isa, LANES, Lanes, no_tiles};
#[cfg(target_arch = "x86_64")]
use super::{compiled, present};

/// Weights in one group: four for each lane.
pub const GROUP: usize = 4 * LANES;

/// Offset that a stored weight byte has over its value.
pub const OFFSET: u8 = 128;

/// An instruction set for sums of byte products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DotIsa {
    /// No vector instructions; runs everywhere.
    Portable,
    /// AVX2: pairs of products of absolute weights in 16 bits, so that none overflows.
    Avx2,
    /// AVX2 with `vpdpbusd` (AVX-VNNI).
    AvxVnni,
    /// AVX-512 with `vpdpbusd` (AVX512-VNNI).
    Avx512Vnni,
    /// AMX tiles in int8 for many rows, which a product uses itself; otherwise as [`DotIsa::Avx512Vnni`].
    Amx,
    /// 64-bit ARM: products in 16 bits.
    Neon,
    /// 64-bit ARM with `sdot`.
    NeonDot,
    /// 64-bit ARM with `usmmla`, which multiplies two rows with two outputs.
    NeonI8mm,
}

impl DotIsa {
    /// Every instruction set, the most capable last.
    pub const ALL: [DotIsa; 8] = [
        DotIsa::Portable,
        DotIsa::Avx2,
        DotIsa::AvxVnni,
        DotIsa::Avx512Vnni,
        DotIsa::Amx,
        DotIsa::Neon,
        DotIsa::NeonDot,
        DotIsa::NeonI8mm,
    ];

    /// Returns whether this CPU has the instructions, and this program is compiled for them.
    pub fn is_available(self) -> bool {
        match self {
            DotIsa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            DotIsa::Avx2 => compiled::AVX2_DOT && present::avx2(),
            #[cfg(target_arch = "x86_64")]
            DotIsa::AvxVnni => compiled::AVX_VNNI && present::avx_vnni(),
            #[cfg(target_arch = "x86_64")]
            DotIsa::Avx512Vnni => compiled::AVX512_VNNI && present::avx512_vnni(),
            DotIsa::Amx => DotIsa::Avx512Vnni.is_available() && no_tiles().is_none(),
            #[cfg(target_arch = "aarch64")]
            DotIsa::Neon => true,
            #[cfg(target_arch = "aarch64")]
            DotIsa::NeonDot => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            DotIsa::NeonI8mm => std::arch::is_aarch64_feature_detected!("i8mm"),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// Returns the instruction set of its vectors: for [`DotIsa::Amx`] the one that goes with it, or plain loops on other CPUs.
    pub fn vectors(self) -> DotIsa {
        match self {
            DotIsa::Amx if DotIsa::Avx512Vnni.is_available() => DotIsa::Avx512Vnni,
            DotIsa::Amx => DotIsa::Portable,
            vectors => vectors,
        }
    }

    /// Returns the best instruction set of this CPU whose vectors are no wider than those of `isa`.
    pub fn best_for(isa: Isa) -> DotIsa {
        let candidates: &[DotIsa] = match isa {
            Isa::Portable => &[],
            Isa::Avx2 => &[DotIsa::AvxVnni, DotIsa::Avx2],
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => {
                &[DotIsa::Amx, DotIsa::Avx512Vnni, DotIsa::AvxVnni, DotIsa::Avx2]
            }
            Isa::Neon => &[DotIsa::NeonI8mm, DotIsa::NeonDot, DotIsa::Neon],
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
            DotIsa::Amx => "amx",
            DotIsa::Neon => "neon",
            DotIsa::NeonDot => "neon-dotprod",
            DotIsa::NeonI8mm => "neon-i8mm",
        })
    }
}

/// Floats whose registers also hold integers.
pub trait WithInts: Lanes {
    /// Integers in the same registers.
    type Ints: IntLanes<Floats = Self>;
}

/// Sixteen `i32` sums in registers, and a group of weights in registers of the same width.
pub trait IntLanes: Copy {
    /// Float lanes of the same registers.
    type Floats: Lanes;
    /// A group of weights, ready to be multiplied with many activations.
    type Weights: Copy;

    /// Returns sums that all are `sum`.
    fn splat(sum: i32) -> Self;
    /// Loads a group of weights.
    fn load(from: &[u8; GROUP]) -> Self::Weights;
    /// Loads a group of codes: `width` bits of each byte, from bit `shift` on. They have no offset and no sign.
    fn load_codes(from: &[u8; GROUP], shift: u32, width: u32) -> Self::Weights;
    /// Stores a group of weights or codes as bytes.
    fn store(weights: Self::Weights, to: &mut [u8; GROUP]);
    /// Appends higher bits to codes of `width` bits.
    fn join(codes: Self::Weights, high: Self::Weights, width: u32) -> Self::Weights;
    /// Replaces codes of 4 bits by bytes of a table.
    fn look_up(codes: Self::Weights, table: &[u8; 16]) -> Self::Weights;
    /// Converts byte `i` of each four codes to a float.
    fn byte(codes: Self::Weights, i: usize) -> Self::Floats;
    /// Subtracts 2^(width − 1) from byte `i` of each four codes of `width` bits, and converts it to a float, times 2^(32 − width).
    fn high_byte(codes: Self::Weights, i: usize, width: u32) -> Self::Floats;
    /// Looks byte `i` of each four codes up in a table of 32 numbers.
    #[inline(always)]
    fn number(codes: Self::Weights, i: usize, table: &[[f32; LANES]; 2]) -> Self::Floats {
        let mut bytes = [0; GROUP];
        Self::store(codes, &mut bytes);
        let number = |lane: usize| table.as_flattened()[usize::from(bytes[4 * lane + i]) % (2 * LANES)];
        Self::Floats::load(&std::array::from_fn(number))
    }
    /// Converts the sums to floats; exact below 2²⁴.
    fn to_floats(self) -> Self::Floats;
    /// Returns `self * scale + sum`, rounded once.
    #[inline(always)]
    fn scale_add(self, scale: Self::Floats, sum: Self::Floats) -> Self::Floats {
        Self::fused(self.to_floats(), scale, sum)
    }
    /// Returns `numbers * scale + sum`, rounded once on every instruction set.
    #[inline(always)]
    fn fused(numbers: Self::Floats, scale: Self::Floats, sum: Self::Floats) -> Self::Floats {
        numbers.mul_add(scale, sum)
    }
}

/// Float lanes that go with a [`DotLanes`].
pub type Floats<D> = <<D as DotLanes>::Sums as IntLanes>::Floats;
/// Weights that go with a [`DotLanes`].
pub type Weights<D> = <<D as DotLanes>::Sums as IntLanes>::Weights;

/// The instructions of one [`DotIsa`]. All methods are inlined into a function compiled for the instruction set.
pub trait DotLanes: Sized {
    /// Registers that the instructions work on.
    type Sums: IntLanes;

    /// Number of rows whose sums fit the registers, per panel.
    const ROWS: usize;
    /// Whether the registers hold sums for several panels at once.
    const WIDE: bool;
    /// Whether [`DotLanes::dot`] multiplies weights with their [`OFFSET`].
    const UNSIGNED: bool;

    /// Returns what a sum starts from. `correction` is −128·Σ of all activations that will be multiplied; it removes the offset
    /// of unsigned weights.
    #[inline(always)]
    fn start(correction: i32) -> i32 {
        if Self::UNSIGNED { correction } else { 0 }
    }
    /// Loads a group of weights for [`DotLanes::dot`].
    #[inline(always)]
    fn load(from: &[u8; GROUP]) -> Weights<Self> {
        Self::Sums::load(from)
    }
    /// Adds, lane by lane, the four weights times the four activations (−127..=127).
    fn dot(sums: Self::Sums, weights: Weights<Self>, activations: [i8; 4]) -> Self::Sums;

    /// Returns the sums of a tile of at most 32 inputs, in the order of [`DotLanes::add`]. `bits` is 8 for weights of
    /// [`DotLanes::load`], and at most 6 for codes of so many bits, of [`IntLanes::load_codes`]; `starts` and `bits` are those of
    /// [`DotLanes::by_rows`] too.
    #[inline(always)]
    fn begin<const M: usize, const P: usize>(starts: [i32; M], _bits: u32) -> [[Self::Sums; P]; M] {
        let mut sums = [[Self::Sums::splat(0); P]; M];
        for m in 0..M {
            sums[m] = [Self::Sums::splat(starts[m]); P];
        }
        sums
    }
    /// Adds two groups of each panel times eight activations of each row.
    #[inline(always)]
    fn add<const M: usize, const P: usize>(
        sums: &mut [[Self::Sums; P]; M],
        weights: [[Weights<Self>; 2]; P],
        rows: [&[[i8; 4]; 2]; M],
        _bits: u32,
    ) {
        for g in 0..2 {
            for m in 0..M {
                for p in 0..P {
                    sums[m][p] = Self::dot(sums[m][p], weights[p][g], rows[m][g]);
                }
            }
        }
    }
    /// Returns the sums by rows and lanes: that of row `m` is `starts[m]` and all products.
    #[inline(always)]
    fn by_rows<const M: usize, const P: usize>(
        sums: [[Self::Sums; P]; M],
        _starts: [i32; M],
        _bits: u32,
    ) -> [[Self::Sums; P]; M] {
        sums
    }
}

/// Calls `$kernel::<D>(args…)` compiled for a [`DotIsa`](crate::int8::DotIsa); the caller must have checked
/// [`DotIsa::is_available`](crate::int8::DotIsa::is_available).
///
/// The kernel must be `#[inline(always)]` and generic over [`DotLanes`](crate::int8::DotLanes) as its first type
/// parameter; a second one is written with its bound, `kernel::<F: Bound>(…)`.
#[macro_export]
macro_rules! dispatch_dot {
    ($isa:expr, $kernel:ident $(::<$form:ident: $bound:path>)? ($($arg:ident : $ty:ty),* $(,)?)) => {{
        use $crate::int8;
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
        #[cfg(target_arch = "aarch64")]
        #[target_feature(enable = "i8mm")]
        fn neon_i8mm$(<$form: $bound>)?($($arg: $ty),*) { $kernel::<int8::NeonI8mm $(, $form)?>($($arg),*) }
        match int8::DotIsa::vectors($isa) {
            // SAFETY: the caller has checked that this CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            int8::DotIsa::Avx512Vnni if $crate::compiled::AVX512_VNNI => unsafe { avx512_vnni$(::<$form>)?($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            int8::DotIsa::AvxVnni if $crate::compiled::AVX_VNNI => unsafe { avx_vnni$(::<$form>)?($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            int8::DotIsa::Avx2 if $crate::compiled::AVX2_DOT => unsafe { avx2$(::<$form>)?($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            int8::DotIsa::NeonDot => unsafe { neon_dot$(::<$form>)?($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            int8::DotIsa::NeonI8mm => unsafe { neon_i8mm$(::<$form>)?($($arg),*) },
            #[cfg(target_arch = "aarch64")]
            int8::DotIsa::Neon => $kernel::<int8::NeonWiden $(, $form)?>($($arg),*),
            _ => $kernel::<int8::PortableDot $(, $form)?>($($arg),*),
        }
    }};
}
