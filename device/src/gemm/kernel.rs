//! The tile that computes M rows × P panels in registers, and the walk over all tiles.

use super::output::Output;
use super::pack::Panels;
use super::{Gemm, PackedMatrix, integer};
use crate::simd::int8::DotIsa;
use crate::simd::{LANES, Lanes, ask_for};
use crate::{Isa, Pool};

/// Panels per task: enough to feed the widest tile several times, few enough to share among threads.
const PANELS_PER_TASK: usize = 16;

/// Below so many rows a band waits for memory, which is asked for so many bytes ahead.
const FEW_ROWS: usize = 12;
const AHEAD: usize = 4 << 10;

/// One line of a panel: sixteen weights for one k.
trait Line: Copy + Sync {
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

/// A share of the product: all rows, some panels.
struct Task<'a, W> {
    x: &'a [f32],
    k: usize,
    rows: usize,
    lines: &'a [W],
    first_panel: usize,
    panels: usize,
    bias: Option<&'a [f32]>,
    out: Output,
}

pub(super) fn run(isa: Isa, pool: &Pool, rows: usize, args: Gemm<'_>) {
    let weights: &PackedMatrix = args.weights;
    match &weights.panels {
        Panels::F32(lines) => run_lines(isa, pool, rows, args, lines),
        Panels::Bf16(lines) => run_lines(isa, pool, rows, args, lines),
        Panels::Q8(blocks) => integer::run(isa, DotIsa::beside(isa), pool, rows, args, blocks),
        Panels::Q4(blocks) => integer::run(isa, DotIsa::beside(isa), pool, rows, args, blocks),
    }
}

fn run_lines<W: Line>(isa: Isa, pool: &Pool, rows: usize, args: Gemm<'_>, lines: &[W]) {
    let (n, k) = (args.weights.n(), args.weights.k());
    let panels = n.div_ceil(LANES);
    let out = Output::new(args.y, n);
    let (x, bias) = (args.x.numbers(), args.bias);
    pool.run(panels.div_ceil(PANELS_PER_TASK), rows * k * LANES * PANELS_PER_TASK, |task| {
        let first_panel = task * PANELS_PER_TASK;
        let count = PANELS_PER_TASK.min(panels - first_panel);
        let task = &Task { x, k, rows, lines, first_panel, panels: count, bias, out };
        share(isa, task);
    });
}

fn share<W: Line>(isa: Isa, task: &Task<'_, W>) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn avx512<W: Line>(task: &Task<'_, W>) {
        walk::<crate::simd::Avx512, W>(task)
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn avx2<W: Line>(task: &Task<'_, W>) {
        walk::<crate::simd::Avx2, W>(task)
    }
    match isa {
        // SAFETY: `gemm` has checked that this CPU has the instructions.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512(task) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(task) },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => walk::<crate::simd::Neon, W>(task),
        _ => walk::<crate::simd::Portable, W>(task),
    }
}

/// Covers rows × panels with tiles that fill the registers. Few rows wait for memory, not for sums: they take two panels at a
/// time, for of many streams side by side memory gives less. Sums get 24 of the 32 registers of AVX-512, else 12 of 16.
#[inline(always)]
fn walk<L: Lanes, W: Line>(task: &Task<'_, W>) {
    let mut row = 0;
    while row < task.rows {
        let left = task.rows - row;
        let step = match (L::MANY, left) {
            (true, 12..) => tiles::<L, W, 12, 2>(task, row),
            (true, 8..) => tiles::<L, W, 8, 2>(task, row),
            (true, 4..) => tiles::<L, W, 4, 2>(task, row),
            (false, 6..) => tiles::<L, W, 6, 1>(task, row),
            (_, 4..) => tiles::<L, W, 4, 1>(task, row),
            (_, 2..) => tiles::<L, W, 2, 2>(task, row),
            _ => tiles::<L, W, 1, 2>(task, row),
        };
        row += step;
    }
}

/// One band of M rows over all panels of the task.
#[inline(always)]
fn tiles<L: Lanes, W: Line, const M: usize, const P: usize>(task: &Task<'_, W>, row: usize) -> usize {
    let mut panel = 0;
    while panel + P <= task.panels {
        tile::<L, W, M, P>(task, row, task.first_panel + panel);
        panel += P;
    }
    while panel < task.panels {
        tile::<L, W, M, 1>(task, row, task.first_panel + panel);
        panel += 1;
    }
    M
}

#[inline(always)]
fn tile<L: Lanes, W: Line, const M: usize, const P: usize>(task: &Task<'_, W>, row: usize, panel: usize) {
    let k = task.k;
    let x: [&[f32]; M] = std::array::from_fn(|m| &task.x[(row + m) * k..][..k]);
    let w: [&[W]; P] = std::array::from_fn(|p| &task.lines[(panel + p) * k..][..k]);
    let mut acc = [[L::splat(0.0); P]; M];
    for i in 0..k {
        if M < FEW_ROWS {
            for w in w {
                ask_for(w.as_ptr().wrapping_add(i).wrapping_byte_add(AHEAD).cast());
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
    // Out of the registers in loops so short that they vanish: where they stay, so do the sums, in memory with every block.
    let mut values = [[[0.0; LANES]; P]; M];
    for m in 0..M {
        for p in 0..P {
            acc[m][p].store(&mut values[m][p]);
        }
    }
    // SAFETY: rows row..row+M exist, and these panels belong to this task alone.
    unsafe { task.out.write_tile(row, panel, &values, task.bias) };
}
