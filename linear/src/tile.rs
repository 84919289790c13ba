//! Products with float weights: a tile of M rows × P panels in registers, and the loop over all tiles.

use std::marker::PhantomData;
use std::ops::Range;

use simd::pairs::is_amd;
use simd::{LANES, Lanes, Pairs, Pool, prefetch};

use super::blocks::PAIR;
use super::output::Output;

/// Most rows of a band.
const MOST_ROWS: usize = 12;

/// Prefetch distance in bytes.
pub(super) const AHEAD: usize = 4 << 10;

/// A part of a product: all rows, some panels.
pub(super) struct Task<'a, X, W> {
    /// `[rows, row]`.
    pub x: &'a [X],
    pub rows: usize,
    /// Elements of a row.
    pub row: usize,
    /// `[panels, lines]`.
    pub lines: &'a [W],
    pub panels: Range<usize>,
    pub bias: Option<&'a [f32]>,
    pub out: Output,
}

impl<X: Sync, W: Sync> Task<'_, X, W> {
    /// Calls `walk` for ranges of all pairs of panels, on all threads.
    pub fn run(&self, pool: &Pool, walk: impl Fn(Range<usize>) + Sync) {
        pool.ranges(self.pairs(), self.x.len() * LANES * PAIR, walk);
    }

    /// Returns the number of pairs of panels.
    #[inline(always)]
    fn pairs(&self) -> usize {
        self.panels.len().div_ceil(PAIR)
    }

    /// Returns the first panel of a pair, or the second. The last pair may have no second panel.
    #[inline(always)]
    pub fn panel(&self, pair: usize, second: usize) -> Option<usize> {
        let [next, other] = self.steps();
        let panel = self.panels.start + pair * next + second * other;
        (panel < self.panels.end).then_some(panel)
    }

    /// Returns the panels from one pair to the next, and from the first panel of a pair to the second. For rows of a single band half
    /// of all panels is between the two, so that a thread that computes pair after pair reads two streams of memory, each in order.
    /// More rows read each pair again, and gain by panels side by side.
    #[inline(always)]
    fn steps(&self) -> [usize; 2] {
        if self.rows <= MOST_ROWS { [1, self.pairs()] } else { [PAIR, 1] }
    }
}

/// How a tile is summed.
pub(super) trait Tile {
    /// An element of a row of activations.
    type Number: Sync;
    /// A line of a panel.
    type Line: Sync;
    /// Sums of one row with sixteen outputs.
    type Sums: Lanes;
    /// Elements of a row that one line is multiplied with.
    const NUMBERS_PER_LINE: usize;
    /// Whether one shape of a tile is compiled instead of all that fill the registers, as without vectors.
    const IS_ONE_SHAPE: bool = false;
    /// Most rows of a band that need no more registers than there are.
    #[inline(always)]
    fn most_rows() -> usize {
        MOST_ROWS
    }
    /// Multiplies rows with panels, and prefetches as many lines from each of `ahead` as a panel has.
    fn accumulate<const M: usize, const P: usize>(
        x: [&[Self::Number]; M],
        w: [&[Self::Line]; P],
        ahead: [*const Self::Line; P],
    ) -> [[Self::Sums; P]; M];
}

/// Sums of float32 activations, input after input.
pub(super) struct Floats<L, W>(PhantomData<(L, W)>);

impl<L: Lanes, W: Line> Tile for Floats<L, W> {
    type Number = f32;
    type Line = W;
    type Sums = L;
    const NUMBERS_PER_LINE: usize = W::INPUTS;
    const IS_ONE_SHAPE: bool = !L::VECTORS;

    /// Widening the second weights of pairs takes registers, and Intel's cores lose more by sums in memory than AMD's.
    #[inline(always)]
    fn most_rows() -> usize {
        if W::INPUTS == 2 && !is_amd() { 8 } else { MOST_ROWS }
    }

    #[inline(always)]
    fn accumulate<const M: usize, const P: usize>(x: [&[f32]; M], w: [&[W]; P], ahead: [*const W; P]) -> [[L; P]; M] {
        accumulate::<L, W, M, P>(x, w, Some(ahead), [[L::splat(0.0); P]; M])
    }
}

/// Covers rows × pairs of panels with tiles that fill the registers. All rows are multiplied with a pair before the next one, so that
/// weights are read from memory once. Sums take 24 of the 32 registers of AVX-512, otherwise 12 of 16, or 8 if weights are widened.
/// The conditions on constants stand alone, so that tiles of other instruction sets are not compiled.
#[inline(always)]
pub(super) fn walk<T: Tile>(task: &Task<'_, T::Number, T::Line>, pairs: Range<usize>) {
    for pair in pairs {
        let (mut row, mut band) = (0, 0);
        while row < task.rows {
            let rows = match (task.rows - row, T::most_rows()) {
                // Two bands of 8 are faster than 12 and 4.
                (16, MOST_ROWS) => 8,
                (rows, most) => rows.min(most),
            };
            let at = At { pair, row, band };
            row += if T::IS_ONE_SHAPE {
                tiles::<T, 1, 1>(task, at)
            } else if rows < 4 {
                if rows < 2 { tiles::<T, 1, 2>(task, at) } else { tiles::<T, 2, 2>(task, at) }
            } else if T::Sums::MANY {
                match rows {
                    12.. => tiles::<T, 12, 2>(task, at),
                    8.. => tiles::<T, 8, 2>(task, at),
                    _ => tiles::<T, 4, 2>(task, at),
                }
            } else if T::NUMBERS_PER_LINE == 2 || rows < 6 {
                tiles::<T, 4, 1>(task, at)
            } else {
                tiles::<T, 6, 1>(task, at)
            };
            band += 1;
        }
    }
}

/// Rows and panels that are multiplied next.
#[derive(Clone, Copy)]
struct At {
    pair: usize,
    row: usize,
    /// Bands of rows before these.
    band: usize,
}

/// Multiplies M rows with a pair of panels, P at a time. Returns M.
#[inline(always)]
fn tiles<T: Tile, const M: usize, const P: usize>(task: &Task<'_, T::Number, T::Line>, at: At) -> usize {
    match [0, 1].map(|second| task.panel(at.pair, second)) {
        [Some(first), Some(second)] if P == PAIR => {
            tile::<T, M, P>(task, at, 0, std::array::from_fn(|p| [first, second][p]))
        }
        panels => {
            for (index, panel) in panels.into_iter().enumerate() {
                if let Some(panel) = panel {
                    tile::<T, M, 1>(task, at, index, [panel]);
                }
            }
        }
    }
    M
}

/// Multiplies M rows with the panels of a pair from `index` on.
#[inline(always)]
fn tile<T: Tile, const M: usize, const P: usize>(
    task: &Task<'_, T::Number, T::Line>,
    At { row, band, .. }: At,
    index: usize,
    panels: [usize; P],
) {
    let x: [&[T::Number]; M] = std::array::from_fn(|m| &task.x[(row + m) * task.row..][..task.row]);
    let lines = task.row.div_ceil(T::NUMBERS_PER_LINE);
    let w: [&[T::Line]; P] = std::array::from_fn(|p| &task.lines[panels[p] * lines..][..lines]);
    let ahead = std::array::from_fn(|p| {
        let line = w[p].as_ptr();
        if M == task.rows {
            line.wrapping_byte_add(AHEAD)
        } else if index + p == band {
            // The first band prefetches the first panel of the next pair, the second the other: memory is read all the time.
            line.wrapping_add(task.steps()[0] * lines)
        } else {
            line
        }
    });
    let sums = T::accumulate::<M, P>(x, w, ahead);
    // SAFETY: rows row..row+M exist, and only this task writes these panels.
    unsafe { task.out.write_tile(row, panels, sums, task.bias) };
}

/// A line of a panel: sixteen weights for each of some inputs.
pub(super) trait Line: Copy + Sync {
    /// Number of inputs, 1 or 2.
    const INPUTS: usize;
    /// As many inputs.
    type Inputs: AsRef<[f32]>;
    /// Returns the inputs of whole lines.
    fn inputs(x: &[f32]) -> &[Self::Inputs];
    /// The weights of the first input (`SECOND`: of the second).
    fn load<L: Lanes, const SECOND: bool>(&self) -> L;
}
impl Line for [f32; LANES] {
    const INPUTS: usize = 1;
    type Inputs = [f32; 1];
    #[inline(always)]
    fn inputs(x: &[f32]) -> &[[f32; 1]] {
        x.as_chunks().0
    }
    #[inline(always)]
    fn load<L: Lanes, const SECOND: bool>(&self) -> L {
        L::load(self)
    }
}
impl Line for Pairs {
    const INPUTS: usize = 2;
    type Inputs = [f32; 2];
    #[inline(always)]
    fn inputs(x: &[f32]) -> &[[f32; 2]] {
        x.as_chunks().0
    }
    #[inline(always)]
    fn load<L: Lanes, const SECOND: bool>(&self) -> L {
        L::load_half::<SECOND>(self)
    }
}

/// Adds the products of rows with panels, input after input, and prefetches as many lines from each of `ahead`.
#[inline(always)]
pub(super) fn accumulate<L: Lanes, W: Line, const M: usize, const P: usize>(
    x: [&[f32]; M],
    w: [&[W]; P],
    ahead: Option<[*const W; P]>,
    mut acc: [[L; P]; M],
) -> [[L; P]; M] {
    let k = x.first().map_or(0, |x| x.len());
    let whole = k / W::INPUTS;
    // The compiler sees that no index is out of bounds.
    let inputs = x.map(|x| &W::inputs(x)[..whole]);
    let w = w.map(|w| &w[..k.div_ceil(W::INPUTS)]);
    for i in 0..whole {
        if let Some(ahead) = ahead {
            for ahead in ahead {
                prefetch(ahead.wrapping_add(i).cast());
            }
        }
        acc = add::<L, W, W::Inputs, M, P, false>(inputs, i, w, i, acc);
        if W::INPUTS == 2 {
            acc = add::<L, W, W::Inputs, M, P, true>(inputs, i, w, i, acc);
        }
    }
    if W::INPUTS * whole < k {
        acc = add::<L, W, [f32; 1], M, P, false>(x.map(|x| x.as_chunks().0), k - 1, w, whole, acc);
    }
    acc
}

/// Adds the products of the first input at an index, or of the second.
#[inline(always)]
fn add<L: Lanes, W: Line, X: AsRef<[f32]>, const M: usize, const P: usize, const SECOND: bool>(
    x: [&[X]; M],
    index: usize,
    w: [&[W]; P],
    line: usize,
    mut acc: [[L; P]; M],
) -> [[L; P]; M] {
    // A loop instead of a closure: see `simd`.
    let mut weights = [L::splat(0.0); P];
    for p in 0..P {
        weights[p] = w[p][line].load::<L, SECOND>();
    }
    for m in 0..M {
        let value = L::splat(x[m][index].as_ref()[usize::from(SECOND)]);
        for p in 0..P {
            acc[m][p] = value.mul_add(weights[p], acc[m][p]);
        }
    }
    acc
}
