//! Products with the packed weights of a matrix, by the form of each of its segments.

use std::ops::Range;

use simd::{Isa, LANES, Lanes, dispatch};

use super::output::Output;
use super::pack::{Panels, Segment};
use super::processor::Processor;
use super::tile::{Floats, Line, Task, walk};
use super::{Arithmetic, Gemm, integer, rounded, stored, tiled};

pub(super) fn run(processor: Processor<'_>, rows: usize, args: Gemm<'_>) {
    let Gemm { x, weights, bias, y } = args;
    for Segment { first, n, panels } in &weights.segments {
        let bias = bias.map(|bias| &bias[*first..first + n]);
        let out = (Output::new(y, weights.n(), *first, *n), *n);
        match panels {
            Panels::F32(lines) => run_lines(processor, weights.k(), (x.numbers(), rows), lines, bias, out),
            Panels::Bf16(halves) => {
                let (k, x) = (weights.k(), (x.numbers(), rows));
                match (halves.arithmetic, processor.isa) {
                    (Arithmetic::Exact, _) => run_lines(processor, k, x, &halves.lines, bias, out),
                    (Arithmetic::Tiles, Isa::Amx | Isa::Portable) => {
                        tiled::run(processor, k, x, halves, (bias, None), out);
                    }
                    (Arithmetic::Pairs | Arithmetic::Tiles, _) => rounded::run(processor, k, x, halves, bias, out),
                }
            }
            Panels::Q8(blocks) => integer::run(processor, weights.k(), (x, rows), blocks, bias, out),
            Panels::Q4(blocks) => integer::run(processor, weights.k(), (x, rows), blocks, bias, out),
            Panels::Stored(panels) => stored::run(processor, panels, (x, rows), bias, out),
        }
    }
}

fn run_lines<W: Line>(
    Processor { isa, pool, .. }: Processor<'_>,
    k: usize,
    (x, rows): (&[f32], usize),
    lines: &[W],
    bias: Option<&[f32]>,
    (out, n): (Output, usize),
) {
    let task = Task { x, rows, row: k, lines, panels: 0..n.div_ceil(LANES), bias, out };
    let task = &task;
    task.run(pool, |pairs| dispatch!(isa, walk_lines::<W: Line>(task: &Task<'_, f32, W>, pairs: Range<usize>)));
}

#[inline(always)]
fn walk_lines<L: Lanes, W: Line>(task: &Task<'_, f32, W>, pairs: Range<usize>) {
    walk::<Floats<L, W>>(task, pairs);
}
