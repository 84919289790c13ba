//! The sums of a tile of float weights.

use crate::simd::pairs::Pairs;
use crate::simd::{LANES, Lanes, prefetch};

/// Bands of fewer rows are bound by memory, so they prefetch.
const FEW_ROWS: usize = 12;

/// Prefetch distance in bytes.
const AHEAD: usize = 4 << 10;

/// A line of a panel: sixteen weights for each of some inputs.
pub(super) trait Line: Copy + Sync {
    /// Number of inputs, 1 or 2.
    const INPUTS: usize;
    /// The weights of the first input (`SECOND`: of the second).
    fn load<L: Lanes, const SECOND: bool>(&self) -> L;
}
impl Line for [f32; LANES] {
    const INPUTS: usize = 1;
    #[inline(always)]
    fn load<L: Lanes, const SECOND: bool>(&self) -> L {
        L::load(self)
    }
}
impl Line for Pairs {
    const INPUTS: usize = 2;
    #[inline(always)]
    fn load<L: Lanes, const SECOND: bool>(&self) -> L {
        L::load_half::<SECOND>(self)
    }
}

/// Adds the products of rows with panels, input after input. `FROM_MEMORY`: the panels are not in a cache yet.
#[inline(always)]
pub(super) fn accumulate<L: Lanes, W: Line, const M: usize, const P: usize, const FROM_MEMORY: bool>(
    x: [&[f32]; M],
    w: [&[W]; P],
    mut acc: [[L; P]; M],
) -> [[L; P]; M] {
    let k = x.first().map_or(0, |x| x.len());
    // The compiler sees that no index is out of bounds.
    let x = x.map(|x| &x[..k]);
    let w = w.map(|w| &w[..k.div_ceil(W::INPUTS)]);
    let whole = k / W::INPUTS;
    for i in 0..whole {
        if M < FEW_ROWS && FROM_MEMORY {
            for w in w {
                prefetch(w.as_ptr().wrapping_add(i).wrapping_byte_add(AHEAD).cast());
            }
        }
        acc = add::<L, W, M, P, false>(x, w, i, W::INPUTS * i, acc);
        if W::INPUTS == 2 {
            acc = add::<L, W, M, P, true>(x, w, i, W::INPUTS * i + 1, acc);
        }
    }
    if W::INPUTS * whole < k {
        acc = add::<L, W, M, P, false>(x, w, whole, k - 1, acc);
    }
    acc
}

/// Adds the products of one input.
#[inline(always)]
fn add<L: Lanes, W: Line, const M: usize, const P: usize, const SECOND: bool>(
    x: [&[f32]; M],
    w: [&[W]; P],
    line: usize,
    input: usize,
    mut acc: [[L; P]; M],
) -> [[L; P]; M] {
    let weights: [L; P] = std::array::from_fn(|p| w[p][line].load::<L, SECOND>());
    for m in 0..M {
        let value = L::splat(x[m][input]);
        for p in 0..P {
            acc[m][p] = value.mul_add(weights[p], acc[m][p]);
        }
    }
    acc
}
