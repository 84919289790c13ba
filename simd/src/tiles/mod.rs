//! Tiles of bfloat16 pairs or bytes and their products: the definition of their bits, which any instruction set can compute.
//!
//! ```text
//! A tile: up to 16 rows × 16 pairs    B tile: 16 pairs × 16 outputs     sums: up to 16 rows × 16 outputs
//!   row 0   x0 x1 | x2 x3 | …           pair 0   w0 w1 of output 0 | 1 | …     row 0   output 0 | 1 | …
//!   row 1   …                           pair 1   w2 w3 of output 0 | …         row 1   …
//! ```
//!
//! **Bits.** One product adds a group of 16 pairs (32 inputs) to a sum:
//!
//! ```text
//! even = odd = +0
//! for each pair, in order:   even = fma(x.even, w.even, even)      odd = fma(x.odd, w.odd, odd)
//! sum = sum + (even + odd)
//! ```
//!
//! Each operation rounds once, to nearest even. Subnormal operands, also the sum, are zeros of their sign. A result that is below
//! the smallest normal number after rounding to 24 bits with any exponent becomes a zero of its sign. The NaN of a result is the
//! first NaN of its operands, in the order x, w, sum (fma) or left, right (+), with the quiet bit set; `0xffc00000` if no operand is
//! NaN. That is `tdpbf16ps` of Intel AMX, compared with it on millions of sums. A matrix is padded with +0 to whole groups.
//!
//! **Bytes.** A row of an A tile can also have 32 signed bytes, of which four inputs are a word, as are those of an output in a
//! line of a B tile. Their products and sums are integers, exact modulo 2^32.
//!
//! **Invariants.** Rows of a tile do not influence each other, and neither do outputs. So a sum does not depend on the number of rows.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod amx;
pub mod trial;

use super::{LANES, Lanes, Pairs, Portable};

/// Inputs that one product of tiles adds.
pub const GROUP: usize = 2 * LANES;

/// Memory of a tile: sixteen cache lines. A tile in memory that is not aligned to them would load several times slower.
pub type Tile = [Pairs; LANES];

/// A tile of zeros.
pub const EMPTY: Tile = [Pairs::ZERO; LANES];

/// Signed bytes of sixteen rows: an A tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct ByteRows(pub [[i8; BYTES]; LANES]);

/// Signed bytes of sixteen outputs, four inputs of each in a line: a B tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct ByteLines(pub [[u8; 4 * LANES]; BYTES / 4]);

/// Inputs of [`ByteRows`] and [`ByteLines`].
pub const BYTES: usize = 32;

/// Eight tile registers: 0 to 3 for sums, 4 and 5 for A tiles, 6 and 7 for B tiles. Sums and A tiles have the same number of rows.
/// A register is an index that is known at compile time.
pub trait Registers {
    /// Bytes of a row of an A tile: 64 for pairs, 32 for bytes.
    const WIDTH: usize;
    /// Sets a tile to zero.
    fn zero<const T: usize>(&mut self);
    /// Loads a tile.
    fn load<const T: usize>(&mut self, from: &Tile);
    /// As [`Registers::load`], for memory that should not displace other memory from the first level of the cache.
    fn stream<const T: usize>(&mut self, from: &Tile);
    /// Stores the rows of a tile. Other rows of the memory keep what they are.
    fn store<const T: usize>(&mut self, to: &mut Tile);
    /// Adds the products of an A tile and a B tile to the sums of tile C.
    fn add_products<const C: usize, const A: usize, const B: usize>(&mut self);
    /// Loads the bytes of an A tile.
    fn load_rows<const T: usize>(&mut self, from: &ByteRows);
    /// Loads the bytes of a B tile.
    fn load_lines<const T: usize>(&mut self, from: &ByteLines);
    /// Adds the products of bytes of an A tile and a B tile to the sums of tile C.
    fn add_byte_products<const C: usize, const A: usize, const B: usize>(&mut self);
}

/// Adds the products of one group of pairs to a sum.
pub fn add_group(sum: f32, pairs: impl Iterator<Item = (u32, u32)>) -> f32 {
    let (mut even, mut odd) = (0.0, 0.0);
    for (a, b) in pairs {
        even = multiply_add(f32::from_bits(a << 16), f32::from_bits(b << 16), even);
        odd = multiply_add(f32::from_bits(a & 0xffff_0000), f32::from_bits(b & 0xffff_0000), odd);
    }
    add(sum, add(even, odd))
}

/// The NaN of 0 × ∞ and ∞ − ∞.
const DEFAULT_NAN: u32 = 0xffc0_0000;

/// Replaces a subnormal number by zero.
#[inline]
fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(x) } else { x }
}

/// The NaN of a result.
fn nan(operands: &[f32]) -> f32 {
    let first = operands.iter().find(|x| x.is_nan());
    f32::from_bits(first.map_or(DEFAULT_NAN, |x| x.to_bits() | 0x0040_0000))
}

#[inline]
fn add(a: f32, b: f32) -> f32 {
    // A sum of normal numbers that is subnormal is exact.
    let sum = flush(flush(a) + flush(b));
    if sum.is_nan() { nan(&[a, b]) } else { sum }
}

#[inline]
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    let (x, y, z) = (flush(a), flush(b), flush(c));
    let rounded = x.mul_add(y, z);
    if rounded.is_nan() {
        return nan(&[a, b, c]);
    }
    if rounded.abs() > f32::MIN_POSITIVE {
        return rounded;
    }
    // From half a step below the smallest normal number on, 24 bits round up to it. A product of bfloat16 numbers is exact in f64,
    // and so is what decides this.
    let least = f64::from(f32::MIN_POSITIVE) - f64::from_bits((1023 - 151) << 52);
    let exact = f64::from(x) * f64::from(y) + f64::from(z);
    if exact.abs() < least { 0.0f32.copysign(rounded) } else { rounded }
}

/// Exponents that two factors' [`least_exponent`]s must have in total for [`are_normal`].
const NORMAL: u32 = 2 * 127 - 112;

/// Returns the biased exponent of the smallest number of some pairs that is not zero; 255 if all are zeros.
pub fn least_exponent(pairs: impl Iterator<Item = u32>) -> u32 {
    let exponent = |half: u32| if half << 1 == 0 { 255 } else { half >> 23 & 255 };
    pairs.map(|pair| exponent(pair << 16).min(exponent(pair & 0xffff_0000))).min().unwrap_or(255)
}

/// Returns whether all products and sums of two factors with these [`least_exponent`]s are zeros or normal numbers, so that plain
/// multiply-adds have the bits of the definition, except for those of a NaN.
///
/// The last bit of a bfloat16 number with exponent e has the exponent e − 7, so every product is a multiple of 2^(a + b − 14). From
/// 2^-126 on, so is every sum, and its roundings.
#[inline]
pub fn are_normal(a: u32, b: u32) -> bool {
    a + b >= NORMAL
}

/// Tile registers in plain memory. A kernel that is compiled for an instruction set inlines them, so its vectors multiply what needs no
/// care.
pub struct Emulated<const WIDTH: usize> {
    rows: usize,
    tiles: [Tile; 8],
}

impl<const WIDTH: usize> Emulated<WIDTH> {
    /// Returns registers of zeros whose sums and A tiles have this number of rows.
    ///
    /// # Panics
    /// If it is not in 1..=16.
    #[inline]
    pub fn new(rows: usize) -> Self {
        assert!((1..=LANES).contains(&rows), "{rows} rows of a tile");
        Emulated { rows, tiles: [EMPTY; 8] }
    }

    #[inline(always)]
    fn rows<const T: usize>(&self) -> usize {
        if T < 6 { self.rows } else { LANES }
    }
}

impl<const WIDTH: usize> Registers for Emulated<WIDTH> {
    const WIDTH: usize = WIDTH;

    #[inline(always)]
    fn zero<const T: usize>(&mut self) {
        self.tiles[T] = EMPTY;
    }
    #[inline(always)]
    fn load<const T: usize>(&mut self, from: &Tile) {
        let rows = self.rows::<T>();
        self.tiles[T][..rows].copy_from_slice(&from[..rows]);
    }
    #[inline(always)]
    fn stream<const T: usize>(&mut self, from: &Tile) {
        self.load::<T>(from);
    }
    #[inline(always)]
    fn store<const T: usize>(&mut self, to: &mut Tile) {
        let rows = self.rows::<T>();
        to[..rows].copy_from_slice(&self.tiles[T][..rows]);
    }
    #[inline(always)]
    fn add_products<const C: usize, const A: usize, const B: usize>(&mut self) {
        let (a, b) = (self.tiles[A], self.tiles[B]);
        let least = least_exponent(b.iter().flat_map(|line| line.0));
        for (sums, a) in self.tiles[C].iter_mut().zip(&a).take(self.rows) {
            let of_row = least_exponent(a.0.into_iter());
            let added = if are_normal(of_row, least) { quickly(sums, a, &b) } else { None };
            *sums = added.unwrap_or_else(|| exactly(sums, a, &b));
        }
    }
    #[inline(always)]
    fn load_rows<const T: usize>(&mut self, from: &ByteRows) {
        for (words, bytes) in self.tiles[T].iter_mut().zip(&from.0) {
            for (word, four) in words.0.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *word = u32::from_le_bytes(four.map(|byte| byte as u8));
            }
        }
    }
    #[inline(always)]
    fn load_lines<const T: usize>(&mut self, from: &ByteLines) {
        for (words, bytes) in self.tiles[T].iter_mut().zip(&from.0) {
            for (word, four) in words.0.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *word = u32::from_le_bytes(*four);
            }
        }
    }
    #[inline(always)]
    fn add_byte_products<const C: usize, const A: usize, const B: usize>(&mut self) {
        let (a, b) = (self.tiles[A], self.tiles[B]);
        for (sums, a) in self.tiles[C].iter_mut().zip(&a).take(self.rows) {
            for (a, line) in a.0.iter().zip(&b).take(BYTES / 4) {
                for (sum, b) in sums.0.iter_mut().zip(line.0) {
                    for byte in 0..4 {
                        let product = i32::from((a >> (8 * byte)) as i8) * i32::from((b >> (8 * byte)) as i8);
                        *sum = sum.wrapping_add(product as u32);
                    }
                }
            }
        }
    }
}

/// Adds the products of a row of an A tile and a B tile, whose products and sums are zeros or normal numbers, with vectors. `None`: the
/// definition gives other bits.
#[inline(always)]
fn quickly(sums: &Pairs, a: &Pairs, b: &Tile) -> Option<Pairs> {
    type Floats = Portable<true>;
    let (mut even, mut odd) = (Floats::splat(0.0), Floats::splat(0.0));
    for (pair, line) in a.0.iter().zip(b) {
        let [low, high] = [pair << 16, pair & 0xffff_0000].map(|bits| Floats::splat(f32::from_bits(bits)));
        even = low.mul_add(Floats::load_half::<false>(line), even);
        odd = high.mul_add(Floats::load_half::<true>(line), odd);
    }
    let (mut added, mut is_equal) = ([0.0; LANES], true);
    Floats::load(sums.as_floats()).add(even.add(odd)).store(&mut added);
    for (sum, added) in sums.0.iter().zip(added) {
        // A sum from 2^-103 on is a multiple of 2^-126 too.
        is_equal &= (sum << 1 == 0 || sum >> 23 & 255 >= 24) & !added.is_nan();
    }
    is_equal.then_some(Pairs(added.map(f32::to_bits)))
}

/// Adds the products of a row of an A tile and a B tile.
#[cold]
#[inline(never)]
fn exactly(sums: &Pairs, a: &Pairs, b: &Tile) -> Pairs {
    Pairs(std::array::from_fn(|output| {
        let pairs = a.0.iter().zip(b).map(|(a, line)| (*a, line.0[output]));
        add_group(f32::from_bits(sums.0[output]), pairs).to_bits()
    }))
}

/// Evaluates `$work` with `$registers` as tile registers, of which sums and A tiles have `$rows` rows, and A tiles `$width` bytes in each
/// (64 if it is not given): those of the CPU for
/// [`Isa::Amx`](crate::Isa::Amx), which are released afterwards, otherwise emulated ones. The caller must have checked
/// [`Isa::is_available`](crate::Isa::is_available).
#[macro_export]
macro_rules! on_tiles {
    ($isa:expr, [$rows:expr, $width:expr], |$registers:ident| $work:expr) => {{
        use $crate::tiles;
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        let unit = if $isa == $crate::Isa::Amx { tiles::amx::Amx::get().ok() } else { None };
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        let (_, unit) = ($isa, None::<()>);
        match unit {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Some(amx) => {
                let $registers = &mut tiles::amx::Hardware::<{ $width }>::configure(amx, $rows);
                $work
            }
            _ => {
                let $registers = &mut tiles::Emulated::<{ $width }>::new($rows);
                $work
            }
        }
    }};
    ($isa:expr, $rows:expr, |$registers:ident| $work:expr) => {
        $crate::on_tiles!($isa, [$rows, 64], |$registers| $work)
    };
}
