//! Tiles of bfloat16 pairs and their products: the definition of their bits, which any instruction set can compute.
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
//! **Invariants.** Rows of a tile do not influence each other, and neither do outputs. So a sum does not depend on the number of rows.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod amx;
pub mod trial;

use super::{LANES, Pairs};

/// Inputs that one product of tiles adds.
pub const GROUP: usize = 2 * LANES;

/// Memory of a tile: sixteen cache lines. A tile in memory that is not aligned to them would load several times slower.
pub type Tile = [Pairs; LANES];

/// A tile of zeros.
pub const EMPTY: Tile = [Pairs::ZERO; LANES];

/// Eight tile registers: 0 to 3 for sums, 4 and 5 for A tiles, 6 and 7 for B tiles. Sums and A tiles have the same number of rows.
/// A register is an index that is known at compile time.
pub trait Registers {
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
fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(x) } else { x }
}

/// The NaN of a result.
fn nan(operands: &[f32]) -> f32 {
    let first = operands.iter().find(|x| x.is_nan());
    f32::from_bits(first.map_or(DEFAULT_NAN, |x| x.to_bits() | 0x0040_0000))
}

fn add(a: f32, b: f32) -> f32 {
    // A sum of normal numbers that is subnormal is exact.
    let sum = flush(flush(a) + flush(b));
    if sum.is_nan() { nan(&[a, b]) } else { sum }
}

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
pub fn are_normal(a: u32, b: u32) -> bool {
    a + b >= NORMAL
}

/// Tile registers in plain memory.
pub struct Emulated {
    rows: usize,
    tiles: [Tile; 8],
}

impl Emulated {
    /// Returns registers of zeros whose sums and A tiles have this number of rows.
    ///
    /// # Panics
    /// If it is not in 1..=16.
    pub fn new(rows: usize) -> Emulated {
        assert!((1..=LANES).contains(&rows), "{rows} rows of a tile");
        Emulated { rows, tiles: [EMPTY; 8] }
    }

    fn rows<const T: usize>(&self) -> usize {
        if T < 6 { self.rows } else { LANES }
    }
}

impl Registers for Emulated {
    fn zero<const T: usize>(&mut self) {
        self.tiles[T] = EMPTY;
    }
    fn load<const T: usize>(&mut self, from: &Tile) {
        let rows = self.rows::<T>();
        self.tiles[T][..rows].copy_from_slice(&from[..rows]);
    }
    fn stream<const T: usize>(&mut self, from: &Tile) {
        self.load::<T>(from);
    }
    fn store<const T: usize>(&mut self, to: &mut Tile) {
        let rows = self.rows::<T>();
        to[..rows].copy_from_slice(&self.tiles[T][..rows]);
    }
    fn add_products<const C: usize, const A: usize, const B: usize>(&mut self) {
        let (a, b) = (self.tiles[A], self.tiles[B]);
        for (sums, a) in self.tiles[C].iter_mut().zip(&a).take(self.rows) {
            for (output, sum) in sums.0.iter_mut().enumerate() {
                let pairs = a.0.iter().zip(&b).map(|(a, b)| (*a, b.0[output]));
                *sum = add_group(f32::from_bits(*sum), pairs).to_bits();
            }
        }
    }
}
