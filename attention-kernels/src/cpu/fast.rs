//! Vectorised attention: splits a call into tasks and merges their results. Also the linear layer.
//!
//! ```text
//! a call     sequences → units of adjacent rows → KV heads → partitions of 512 tokens, if there are too few units
//!            ─────────────────────────── tasks, on all threads ────────────────────────────
//!            results of a unit's tasks are merged in the order of the partitions into its output rows
//! ```
//!
//! How a call is split changes no bit: a task merges its partitions as the last pass merges tasks. So a single long
//! sequence uses every thread. Results and scratch memory of tasks stay allocated from call to call.

use std::cell::Cell;
use std::ops::Range;

use device::Device;
use linear::{Arithmetic, gemm, gemm_activated};
use simd::{Isa, Lanes, dispatch};

use super::kernel::{self, result_len};
use super::merge::Merged;
use super::reference::{of_heads, with_gemm};
use super::stored::{GivenScales, Halves, Pages};
use super::tile::{Next, Scratch, Shared, Task};
use crate::args::{AttentionArgs, LinearArgs};
use crate::error::KernelError;
use crate::shape::PARTITION;

/// Range of the number of queries (rows times heads of a group) of a task, if its sequence has as many. With more, the cost
/// of transposing keys and widening elements is shared by more queries; with fewer, there are more tasks.
const QUERIES: Range<usize> = 16..96;

/// Most queries of a task on tiles, which copies values for all of them.
const ON_TILES: usize = 384;

/// Contexts are split if there are fewer tasks than this per thread.
const TASKS: usize = 4;

pub(super) fn linear(isa: Isa, device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    let Some(activation) = args.activation else {
        return with_gemm(device, args, |pool, operands| gemm(isa, pool, operands));
    };
    if !args.weights.host()?.takes_activation(isa) {
        let found = "an activation of outputs whose weights or instructions take none".to_string();
        return Err(KernelError::Unsupported { variant: "cpu", found });
    }
    with_gemm(device, args, |pool, operands| gemm_activated(isa, pool, operands, activation))
}

/// Adjacent rows of one sequence.
struct Unit {
    seq: usize,
    rows: Range<usize>,
    /// Position of the first row.
    position: usize,
    /// Partitions that the rows see; none for padding.
    partitions: Range<usize>,
    /// Index of the unit's first piece. Its pieces end where those of the next unit start.
    piece: usize,
}

/// The units of a call, and how their contexts are split. Kept from call to call.
#[derive(Default)]
struct Plan {
    units: Vec<Unit>,
    /// Index of the unit, and the partitions of the piece.
    pieces: Vec<(usize, Range<usize>)>,
    /// Result of each piece and KV head.
    results: Vec<f32>,
}

thread_local! {
    static PLAN: Cell<Plan> = Cell::default();
    static SCRATCH: Cell<Scratch> = Cell::default();
}

impl Plan {
    /// Splits a call into units, and these into pieces if there are too few for all threads.
    fn split(&mut self, args: &AttentionArgs<'_>, arithmetic: Arithmetic, threads: usize) {
        let (batch, kv_heads) = (args.batch, args.cache.shape.num_kv_heads);
        let queries = args.rows().len() * args.num_heads / (TASKS * threads);
        let most = if arithmetic == Arithmetic::Tiles { ON_TILES } else { QUERIES.end };
        let step = (queries.clamp(QUERIES.start, most) * kv_heads / args.num_heads).max(1);
        self.units.clear();
        for seq in args.seqs.clone() {
            let (start, end) = (batch.query_starts[seq] as usize, batch.query_starts[seq + 1] as usize);
            let context = batch.context_lens[seq] as usize;
            for first in (start..end).step_by(step) {
                let rows = first..end.min(first + step);
                let (position, partitions) = match context {
                    0 => (0, 0..0),
                    _ => {
                        let position = context - (end - first);
                        let seen = args.window.map_or(0, |w| (position + 1).saturating_sub(w));
                        (position, seen / PARTITION..(position + rows.len()).div_ceil(PARTITION))
                    }
                };
                self.units.push(Unit { seq, rows, position, partitions, piece: 0 });
            }
        }
        let whole = self.units.len() * kv_heads >= TASKS * threads || threads == 1;
        self.pieces.clear();
        for (i, unit) in self.units.iter_mut().enumerate() {
            unit.piece = self.pieces.len();
            if whole {
                self.pieces.push((i, unit.partitions.clone()));
            } else {
                self.pieces.extend(unit.partitions.clone().map(|p| (i, p..p + 1)));
            }
        }
    }

    /// Returns the pieces of a unit.
    fn pieces_of(&self, unit: usize) -> Range<usize> {
        self.units[unit].piece..self.units.get(unit + 1).map_or(self.pieces.len(), |next| next.piece)
    }
}

/// Attention in float32, or in another arithmetic for a cache of bfloat16.
pub(super) fn attention(
    (isa, arithmetic): (Isa, Arithmetic),
    device: &dyn Device,
    args: AttentionArgs<'_>,
) -> Result<(), KernelError> {
    args.check()?;
    let mut plan = PLAN.take();
    let done = in_pieces((isa, arithmetic), device, args, &mut plan);
    PLAN.set(plan);
    done
}

fn in_pieces(
    (isa, arithmetic): (Isa, Arithmetic),
    device: &dyn Device,
    args: AttentionArgs<'_>,
    plan: &mut Plan,
) -> Result<(), KernelError> {
    let (shape, batch, pool) = (args.cache.shape, args.batch, device.pool());
    let (kv_heads, dim, stride) = (shape.num_kv_heads, shape.head_dim, args.query_stride);
    let value_dim = args.cache.value_dim();
    let group = args.num_heads / kv_heads;
    let pages = Pages::of(args.cache)?;
    let (window, sparse) = (args.window, args.sparse);
    let halves = if arithmetic.rounds() { Halves::of(args.cache)? } else { None };
    let shared = Shared { shape, value_dim, pages, halves, arithmetic, window, sparse, soft_cap: args.soft_cap };
    let scales = GivenScales::of(args.cache.given_scales())?;
    let query = args.query.host::<f32>()?;
    let (slopes, sinks) = (of_heads(args.alibi_slopes)?, of_heads(args.sinks)?);
    plan.split(&args, arithmetic, pool.threads());
    let most_rows = plan.units.iter().map(|unit| unit.rows.len()).max().unwrap_or(0);
    let len = result_len(most_rows, group, value_dim).max(1);
    let mut results = std::mem::take(&mut plan.results);
    results.resize(results.len().max(plan.pieces.len() * kv_heads * len), 0.0);
    let planned = &*plan;
    let longest = planned.pieces.iter().map(|(_, partitions)| partitions.len()).max().unwrap_or(0);
    let work = 2 * most_rows * group * dim * longest * PARTITION;
    let tasks = planned.pieces.len() * kv_heads;
    let begin = |i: usize| {
        let (unit, partitions) = &planned.pieces[i / kv_heads];
        let (unit, first) = (&planned.units[*unit], partitions.start * PARTITION);
        let start = args.window.map_or(first, |window| first.max((unit.position + 1).saturating_sub(window)));
        let end = (unit.position + unit.rows.len()).min(first + PARTITION);
        let tokens = if partitions.is_empty() { 0..0 } else { start..end };
        Next { kv_head: i % kv_heads, table: batch.table(unit.seq), tokens }
    };
    pool.chunks_mut(&mut results[..tasks * len], len, work, |i, result| {
        let (piece, kv_head) = (i / kv_heads, i % kv_heads);
        let (unit, partitions) = &planned.pieces[piece];
        let unit = &planned.units[*unit];
        let task = Task {
            query: &query[unit.rows.start * stride + kv_head * group * dim..],
            query_stride: stride,
            rows: unit.rows.len(),
            group,
            position: unit.position,
            kv_head,
            table: batch.table(unit.seq),
            partitions: partitions.clone(),
            scale: args.scale * scales.head(kv_head)[0],
            slopes: slopes.map(|slopes| &slopes[kv_head * group..][..group]),
            next: (i + 1 < tasks && sparse.is_none()).then(|| begin(i + 1)),
        };
        let mut scratch = SCRATCH.take();
        kernel::run(isa, &shared, &task, &mut scratch, &mut result[..result_len(task.rows, group, value_dim)]);
        SCRATCH.set(scratch);
    });
    let (rows, width, num_heads) = (args.rows(), args.num_heads * value_dim, args.num_heads);
    let merge = &Merge { plan: planned, results: &results, len, heads: (num_heads, kv_heads), value_dim, sinks };
    let output = &mut args.output.host_mut::<f32>()?[rows.start * width..rows.end * width];
    let pieces = planned.pieces.len() / planned.units.len().max(1);
    // Few rows are cut into heads, so that all threads have some.
    let heads = if rows.len() < TASKS * pool.threads() { 1 } else { num_heads };
    pool.chunks_mut(output, heads * value_dim, 2 * heads * value_dim * pieces, |i, out| {
        let (row, first, scales) = (rows.start + i * heads / num_heads, i * heads % num_heads, &scales);
        dispatch!(isa, write(merge: &Merge<'_>, row: usize, first: usize, scales: &GivenScales<'_>, out: &mut [f32]));
    });
    if let Some(lse) = args.lse {
        let lse = &mut lse.host_mut::<f32>()?[rows.start * num_heads..rows.end * num_heads];
        for (i, lse) in lse.iter_mut().enumerate() {
            let (row, head) = (rows.start + i / num_heads, i % num_heads);
            *lse = merge.head(merge.unit(row), row, head, &mut []).0.log_of_sum();
        }
    }
    plan.results = results;
    Ok(())
}

/// The results of all tasks, which are merged into rows.
struct Merge<'a> {
    plan: &'a Plan,
    results: &'a [f32],
    /// Numbers between the results of two tasks.
    len: usize,
    /// Number of query heads, and of KV heads.
    heads: (usize, usize),
    value_dim: usize,
    sinks: Option<&'a [f32]>,
}

impl Merge<'_> {
    /// Returns the unit of a row.
    fn unit(&self, row: usize) -> usize {
        self.plan.units.partition_point(|unit| unit.rows.end <= row)
    }

    /// Merges the results of a row and head: values into `out`, or only the state if `out` is empty. Returns the state, with the
    /// head's sink, and the factor of the values.
    #[inline(always)]
    fn head(&self, unit: usize, row: usize, head: usize, out: &mut [f32]) -> (Merged, f32) {
        let Merge { plan, results, len, heads: (num_heads, kv_heads), value_dim, sinks } = *self;
        let (group, rows) = (num_heads / kv_heads, &plan.units[unit].rows);
        let (query, states) = ((row - rows.start) * group + head % group, rows.len() * group * value_dim);
        let mut merged = Merged::default();
        for piece in plan.pieces_of(unit) {
            let result = &results[(piece * kv_heads + head / group) * len..];
            let state = &result[states + 2 * query..];
            let part = Merged { greatest: state[0], total: state[1] };
            if part.total != 0.0 {
                merged.merge(part, out, &result[query * value_dim..][..out.len()]);
            }
        }
        let share = match sinks {
            Some(sinks) if merged.total != 0.0 => merged.add_sink(sinks[head]),
            _ => 1.0,
        };
        (merged, share)
    }
}

/// Writes heads of a row from head `first` on. `L` is not used: the loops are compiled for its instruction set.
#[allow(clippy::extra_unused_type_parameters)]
#[inline(always)]
fn write<L: Lanes>(merge: &Merge<'_>, row: usize, first: usize, scales: &GivenScales<'_>, out: &mut [f32]) {
    let (unit, group) = (merge.unit(row), merge.heads.0 / merge.heads.1);
    for (head, out) in (first..).zip(out.chunks_mut(merge.value_dim)) {
        let (merged, share) = merge.head(unit, row, head, out);
        if merged.total == 0.0 {
            out.fill(0.0);
            continue;
        }
        let value_scale = scales.head(head / group)[1];
        for value in out {
            *value = *value * share / merged.total * value_scale;
        }
    }
}
