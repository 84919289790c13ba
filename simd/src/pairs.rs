//! Sixteen sums of products of bfloat16 pairs: the vector type of 16-bit products, one source for every instruction set.
//!
//! A kernel is generic over [`PairLanes`] and `#[inline(always)]`; [`dispatch_pairs!`](crate::dispatch_pairs) puts it into a
//! function that is compiled for an [`Isa`].
//!
//! ```text
//! a vector of pairs     lane 0        lane 1        …  lane 15         the even number is in the low half of a word
//!                       w0 w1         w0 w1            w0 w1
//! times a pair          x0 x1         x0 x1            x0 x1
//! summed in 16 f32      Σ             Σ                Σ
//! ```
//!
//! **Bits.** One step is `sum = fma(x0, w0, fma(x1, w1, sum))`: the odd product first, each step rounded to nearest, subnormal
//! operands read as zero, and subnormal results replaced by zero. That is `vdpbf16ps` of AVX512-BF16 (Intel, "Architecture
//! Instruction Set Extensions Programming Reference", chapter 2). Other instruction sets do it in software,
//! so a sum has the same bits on every CPU.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;

pub use super::Pairs;
use super::int8::{GROUP, IntLanes, WithInts};
use super::small_float::f32_to_bf16;
#[cfg(target_arch = "x86_64")]
use super::{Avx512, Lanes};
use super::{Isa, LANES, Portable};

/// Returns a pair of two numbers, rounded.
#[inline(always)]
pub fn pair([even, odd]: [f32; 2]) -> u32 {
    let [even, odd] = [even, odd].map(|number| u32::from(f32_to_bf16(flush(number))));
    even | odd << 16
}

/// Adds the products of two pairs, as one lane of [`PairLanes::dot`] does.
#[inline(always)]
pub fn dot(sum: f32, a: u32, b: u32) -> f32 {
    let ([a_even, a_odd], [b_even, b_odd]) = (halves(a), halves(b));
    add_product(add_product(sum, a_odd, b_odd), a_even, b_even)
}

/// Returns whether this CPU multiplies pairs faster than single numbers. On AMD's cores from Zen 4 on, `vdpbf16ps` does twice the
/// multiply-adds per second of `vfmadd231ps`; on Intel's, up to Granite Rapids, half of them.
pub fn are_fast() -> bool {
    Isa::Avx512Bf16.is_available() && is_amd()
}

/// Returns whether AMD made this CPU. Asks it once, because a hypervisor answers slowly.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn is_amd() -> bool {
    static IS_AMD: LazyLock<bool> = LazyLock::new(|| {
        let vendor = __cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
    });
    *IS_AMD
}
/// Elsewhere there are none of AMD.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub fn is_amd() -> bool {
    false
}

/// Codes in registers that go with a [`PairLanes`].
pub type Codes<D> = <<<D as PairLanes>::Floats as WithInts>::Ints as IntLanes>::Weights;

/// Instructions for pairs. All methods are inlined into a function compiled for the instruction set.
pub trait PairLanes: Sized {
    /// Registers of sums. Their multiply-adds round once on every instruction set.
    type Floats: WithInts;
    /// Sixteen pairs.
    type Words: Copy;
    /// A table of bfloat16 for [`PairLanes::look_up`].
    type Table: Copy;

    /// Loads pairs.
    fn load(from: &Pairs) -> Self::Words;
    /// Returns a vector whose lanes all are `pair`.
    fn splat(pair: u32) -> Self::Words;
    /// Adds, lane by lane, the products of two pairs.
    fn dot(sums: Self::Floats, a: Self::Words, b: Self::Words) -> Self::Floats;
    /// Rounds 32 numbers to sixteen pairs of adjacent numbers.
    fn round(from: &[f32; 2 * LANES], to: &mut [u32; LANES]);
    /// Pairs up the lanes of two vectors, whose numbers are bfloat16.
    fn join(even: Self::Floats, odd: Self::Floats, to: &mut Pairs);
    /// Loads a table of bfloat16.
    fn table(numbers: &[u16; 64]) -> Self::Table;
    /// Looks up the codes of each four inputs in a table of bfloat16, and pairs them up: inputs 0 and 1, then 2 and 3. `long`: whether
    /// there are codes from 32 on.
    fn look_up(codes: Codes<Self>, table: Self::Table, long: bool, to: &mut [Pairs; 2]);
    /// Pairs up the columns of two rows.
    fn interleave(even: &[u16; LANES], odd: &[u16; LANES], to: &mut Pairs);
    /// Transposes pairs: pair `i` of row `j` becomes pair `j` of line `i`.
    fn transpose(rows: [&[u16; 2 * LANES]; LANES], to: &mut [Pairs; LANES]);
}

/// Rounds the numbers of a row to `len.div_ceil(2)` pairs of adjacent numbers; the last pair of an odd row is padded with zero.
#[inline(always)]
pub fn round_row<D: PairLanes>(from: &[f32], to: &mut [u32]) {
    for (from, to) in from.chunks(2 * LANES).zip(to.chunks_mut(LANES)) {
        match (from.try_into(), (&mut *to).try_into()) {
            (Ok(from), Ok(to)) => D::round(from, to),
            _ => {
                let (mut padded, mut pairs) = ([0.0; 2 * LANES], [0; LANES]);
                padded[..from.len()].copy_from_slice(from);
                D::round(&padded, &mut pairs);
                to.copy_from_slice(&pairs[..to.len()]);
            }
        }
    }
}

/// A subnormal number becomes zero.
#[inline(always)]
fn flush(number: f32) -> f32 {
    if number.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(number) } else { number }
}

/// Adds a product, rounded once; subnormal numbers are zeros.
#[inline(always)]
fn add_product(sum: f32, a: f32, b: f32) -> f32 {
    let (sum, a, b) = (flush(sum), flush(a), flush(b));
    let rounded = a.mul_add(b, sum);
    if rounded.abs() <= f32::MIN_POSITIVE { near_zero(sum, a, b, rounded) } else { rounded }
}

/// The result of [`add_product`] if it is subnormal, or the smallest normal number.
#[cold]
fn near_zero(sum: f32, a: f32, b: f32, rounded: f32) -> f32 {
    // A sum that 24 bits and any exponent would put below the smallest normal number is zero. From half a step below, 2^-151,
    // it is rounded up. The product is exact in f64.
    let least = f64::from(f32::MIN_POSITIVE) - f64::from_bits((1023 - 151) << 52);
    let exact = f64::from(a) * f64::from(b) + f64::from(sum);
    if exact.abs() < least { 0.0f32.copysign(rounded) } else { rounded }
}

/// The numbers of a pair.
#[inline(always)]
fn halves(pair: u32) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
}

/// One lane after the other.
#[cold]
#[inline(never)]
fn exactly(sums: Portable<true>, a: [u32; LANES], b: [u32; LANES]) -> Portable<true> {
    Portable(std::array::from_fn(|i| dot(sums.0[i], a[i], b[i])))
}

/// Pairs in plain arrays.
pub struct Emulated;

impl PairLanes for Emulated {
    type Floats = Portable<true>;
    type Words = [u32; LANES];
    type Table = [u16; 64];

    #[inline(always)]
    fn load(from: &Pairs) -> [u32; LANES] {
        from.0
    }
    #[inline(always)]
    fn splat(pair: u32) -> [u32; LANES] {
        [pair; LANES]
    }
    /// Multiplies without a look at subnormal numbers, which the compiler vectorises. If it meets one, it starts again.
    #[inline(always)]
    fn dot(sums: Portable<true>, a: [u32; LANES], b: [u32; LANES]) -> Portable<true> {
        let (mut out, mut least) = (sums.0, u32::MAX);
        for i in 0..LANES {
            let ([a_even, a_odd], [b_even, b_odd]) = (halves(a[i]), halves(b[i]));
            let odd = a_odd.mul_add(b_odd, sums.0[i]);
            out[i] = a_even.mul_add(b_even, odd);
            for number in [a_even, a_odd, b_even, b_odd, sums.0[i], odd, out[i]] {
                // The magnitude, and the greatest one for zero.
                least = least.min((number.to_bits() << 1).wrapping_sub(1));
            }
        }
        if least < f32::MIN_POSITIVE.to_bits() << 1 { exactly(sums, a, b) } else { Portable(out) }
    }
    #[inline(always)]
    fn round(from: &[f32; 2 * LANES], to: &mut [u32; LANES]) {
        to.iter_mut().zip(from.as_chunks().0).for_each(|(to, two)| *to = pair(*two));
    }
    #[inline(always)]
    fn join(even: Portable<true>, odd: Portable<true>, to: &mut Pairs) {
        to.0 = std::array::from_fn(|i| even.0[i].to_bits() >> 16 | odd.0[i].to_bits() & 0xffff_0000);
    }
    #[inline(always)]
    fn table(numbers: &[u16; 64]) -> [u16; 64] {
        *numbers
    }
    #[inline(always)]
    fn look_up(codes: [u8; GROUP], table: [u16; 64], _long: bool, to: &mut [Pairs; 2]) {
        for (lane, four) in codes.as_chunks::<4>().0.iter().enumerate() {
            let [a, b, c, d] = four.map(|code| u32::from(table[usize::from(code) % 64]));
            (to[0].0[lane], to[1].0[lane]) = (a | b << 16, c | d << 16);
        }
    }
    #[inline(always)]
    fn interleave(even: &[u16; LANES], odd: &[u16; LANES], to: &mut Pairs) {
        to.0 = std::array::from_fn(|i| u32::from(even[i]) | u32::from(odd[i]) << 16);
    }
    #[inline(always)]
    fn transpose(rows: [&[u16; 2 * LANES]; LANES], to: &mut [Pairs; LANES]) {
        for (i, line) in to.iter_mut().enumerate() {
            line.0 = rows.map(|row| u32::from(row[2 * i]) | u32::from(row[2 * i + 1]) << 16);
        }
    }
}

/// `vdpbf16ps`. Its intrinsics are `unsafe` only because the CPU must have them: `dispatch_pairs!` enters after the check, and
/// loads go through arrays of the exact size.
#[cfg(target_arch = "x86_64")]
pub struct Avx512Bf16;

#[cfg(target_arch = "x86_64")]
impl PairLanes for Avx512Bf16 {
    type Floats = Avx512;
    type Words = __m512i;
    type Table = [__m512i; 2];

    #[inline(always)]
    fn load(from: &Pairs) -> __m512i {
        // SAFETY: see the type; the pairs are 64 bytes long.
        unsafe { _mm512_loadu_si512(from.0.as_ptr().cast()) }
    }
    #[inline(always)]
    fn splat(pair: u32) -> __m512i {
        // SAFETY: see the type.
        unsafe { _mm512_set1_epi32(pair as i32) }
    }
    #[inline(always)]
    fn dot(sums: Avx512, a: __m512i, b: __m512i) -> Avx512 {
        // SAFETY: see the type; both are 512 bits without invalid values.
        Avx512(unsafe {
            _mm512_dpbf16_ps(
                sums.0,
                std::mem::transmute::<__m512i, __m512bh>(a),
                std::mem::transmute::<__m512i, __m512bh>(b),
            )
        })
    }
    #[inline(always)]
    fn round(from: &[f32; 2 * LANES], to: &mut [u32; LANES]) {
        // SAFETY: see the type; the arrays are 128 and 64 bytes long, and 512 bits have no invalid values.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(from.as_ptr()), _mm512_loadu_ps(from.as_ptr().add(LANES)));
            let pairs = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs);
        }
    }
    #[inline(always)]
    fn join(even: Avx512, odd: Avx512, to: &mut Pairs) {
        // SAFETY: see the type; the pairs are 64 bytes long.
        unsafe {
            let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(even.0));
            _mm512_store_si512(to.0.as_mut_ptr().cast(), _mm512_or_si512(low, _mm512_castps_si512(odd.0)));
        }
    }
    #[inline(always)]
    fn table(numbers: &[u16; 64]) -> [__m512i; 2] {
        // SAFETY: see the type; the table is 128 bytes long.
        unsafe {
            [_mm512_loadu_si512(numbers.as_ptr().cast()), _mm512_loadu_si512(numbers[2 * LANES..].as_ptr().cast())]
        }
    }
    #[inline(always)]
    fn look_up(codes: __m512i, [low, high]: [__m512i; 2], long: bool, to: &mut [Pairs; 2]) {
        // SAFETY: see the type; the pairs are 64 bytes long each.
        unsafe {
            for (to, bytes) in to.iter_mut().zip([0x8001_8000_u32, 0x8003_8002]) {
                // Bytes of each word with a zero behind each.
                let order = _mm_add_epi32(
                    _mm_set1_epi32(bytes as i32),
                    _mm_setr_epi32(0, 0x0004_0004, 0x0008_0008, 0x000c_000c),
                );
                let words = _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(order));
                let halves = match long {
                    true => _mm512_permutex2var_epi16(low, words, high),
                    false => _mm512_permutexvar_epi16(words, low),
                };
                _mm512_store_si512(to.0.as_mut_ptr().cast(), halves);
            }
        }
    }
    #[inline(always)]
    fn interleave(even: &[u16; LANES], odd: &[u16; LANES], to: &mut Pairs) {
        // SAFETY: see the type; the rows are 32 bytes long, the pairs 64.
        unsafe {
            let even = _mm512_cvtepu16_epi32(_mm256_loadu_si256(even.as_ptr().cast()));
            let odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256(odd.as_ptr().cast()));
            let pairs = _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd));
            _mm512_store_si512(to.0.as_mut_ptr().cast(), pairs);
        }
    }
    #[inline(always)]
    fn transpose(rows: [&[u16; 2 * LANES]; LANES], to: &mut [Pairs; LANES]) {
        // No closures: they are compiled without the instruction set.
        let mut square = [Avx512::splat(0.0); LANES];
        for (vector, row) in square.iter_mut().zip(rows) {
            // SAFETY: see the type; the row is 64 bytes long.
            vector.0 = unsafe { _mm512_loadu_ps(row.as_ptr().cast()) };
        }
        for (line, vector) in to.iter_mut().zip(Avx512::transpose(square)) {
            // SAFETY: see the type; the pairs are 64 bytes long.
            unsafe { _mm512_store_ps(line.0.as_mut_ptr().cast(), vector.0) };
        }
    }
}

/// Calls `$kernel::<D>(args…)` compiled for an [`Isa`](crate::Isa); the caller must have checked
/// [`Isa::is_available`](crate::Isa::is_available).
///
/// The kernel must be `#[inline(always)]` and generic over [`PairLanes`](crate::pairs::PairLanes) as its first type parameter. It
/// may have one type parameter of the caller with its bound, `kernel::<T: Bound>(…)`, as its second.
#[macro_export]
macro_rules! dispatch_pairs {
    ($isa:expr, $kernel:ident $(::<$t:ident: $bound:path>)? ($($arg:ident : $ty:ty),* $(,)?)) => {{
        use $crate::pairs;
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
        fn avx512_bf16$(<$t: $bound>)?($($arg: $ty),*) { $kernel::<pairs::Avx512Bf16 $(, $t)?>($($arg),*) }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2$(<$t: $bound>)?($($arg: $ty),*) { $kernel::<pairs::Emulated $(, $t)?>($($arg),*) }
        match $isa {
            // SAFETY: the caller has checked that this CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx512Bf16 | $crate::Isa::Amx if $crate::compiled::AVX512_BF16 => unsafe {
                avx512_bf16$(::<$t>)?($($arg),*)
            },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx512 | $crate::Isa::Avx2 if $crate::compiled::AVX2_PAIRS => unsafe { avx2$(::<$t>)?($($arg),*) },
            _ => $kernel::<pairs::Emulated $(, $t)?>($($arg),*),
        }
    }};
}
