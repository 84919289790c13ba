//! The sums of a tile of float weights.

use crate::simd::{LANES, Lanes, prefetch};

/// Bands of fewer rows are bound by memory, so they prefetch.
const FEW_ROWS: usize = 12;

/// Prefetch distance in bytes.
const AHEAD: usize = 4 << 10;

/// A line of a panel: sixteen weights for one k.
pub(super) trait Line: Copy + Sync {
    fn load<L: Lanes>(&self) -> L;
}
impl Line for [f32; LANES] {
    #[inline(always)]
    fn load<L: Lanes>(&self) -> L {
        L::load(self)
    }
}
impl Line for [u16; LANES] {
    #[inline(always)]
    fn load<L: Lanes>(&self) -> L {
        L::load_bf16(self)
    }
}

/// Adds the products of rows with panels, input after input. `FROM_MEMORY`: the panels are not in a cache yet.
#[inline(always)]
pub(super) fn accumulate<L: Lanes, W: Line, const M: usize, const P: usize, const FROM_MEMORY: bool>(
    x: [&[f32]; M],
    w: [&[W]; P],
    mut acc: [[L; P]; M],
) -> [[L; P]; M] {
    let k = w.first().map_or(0, |w| w.len());
    // The compiler sees that no index is out of bounds.
    let x = x.map(|x| &x[..k]);
    let w = w.map(|w| &w[..k]);
    for i in 0..k {
        if M < FEW_ROWS && FROM_MEMORY {
            for w in w {
                prefetch(w.as_ptr().wrapping_add(i).wrapping_byte_add(AHEAD).cast());
            }
        }
        let weights: [L; P] = std::array::from_fn(|p| w[p][i].load());
        for m in 0..M {
            let value = L::splat(x[m][i]);
            for p in 0..P {
                acc[m][p] = value.mul_add(weights[p], acc[m][p]);
            }
        }
    }
    acc
}
