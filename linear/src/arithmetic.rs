//! Families of bits: how products with packed numbers round, and in which order they sum.

use std::fmt;

use simd::tiles::GROUP;
use simd::{LANES, Pairs};

/// Definition of every sum of a product. Each instruction set computes the same bits in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Rounds nothing: float32 sums, input after input.
    #[default]
    Exact,
    /// Rounds weights and activations to bfloat16, and sums as [`simd::pairs`] defines.
    Pairs,
    /// Rounds weights and activations to bfloat16, and sums as [`simd::tiles`] defines.
    Tiles,
}

impl Arithmetic {
    /// Returns whether weights and activations are rounded to bfloat16.
    pub fn rounds(self) -> bool {
        self != Arithmetic::Exact
    }

    /// Most bytes that a product with `k` inputs rounds its activations to.
    pub fn rounded_bytes(self, rows: usize, k: usize) -> usize {
        let rows = match self {
            Arithmetic::Exact => 0,
            Arithmetic::Pairs => rows,
            Arithmetic::Tiles if rows <= LANES => LANES,
            Arithmetic::Tiles => rows.next_multiple_of(2 * LANES),
        };
        let pairs = if self == Arithmetic::Tiles { k.next_multiple_of(GROUP) / 2 } else { k.div_ceil(2) };
        rows * pairs * size_of::<Pairs>() / LANES
    }
}

impl fmt::Display for Arithmetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Arithmetic::Exact => "exact",
            Arithmetic::Pairs => "pairs",
            Arithmetic::Tiles => "tiles",
        })
    }
}
