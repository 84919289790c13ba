//! The recurrence of gated delta nets on a CPU: in parallel over sequences and value heads, token by token within each, so that
//! a row's bits do not depend on the batch or on the chunk.
//!
//! The loops over numbers are in [`attention_kernels::layer`].
//!
//! The rows of drafts, the last ones of a sequence, go on from a copy of the state, so that they change no page.

use std::cell::Cell;

use attention_kernels::KernelError;
use attention_kernels::layer::{self, Activate, Activation, NormRow};
use simd::{Isa, Pool};

use super::loaded::RecurrentLayer;
use super::ops::RecurrentRows;
use crate::decoder::Recurrent;

/// Term added to the sum of the squares of q and of k.
const L2_EPS: f32 = 1e-6;

/// The tokens of one sequence.
struct Span {
    first_row: usize,
    rows: usize,
    /// Number of rows before the drafts, at least one.
    certain: usize,
    /// Position of the first row.
    start: usize,
    /// Number of pages that are written.
    pages: usize,
    /// Numbers of rows and of written pages of the spans before.
    before: (usize, usize),
}

/// One value head of a sequence.
struct Task<'list, 'a> {
    span: usize,
    head: usize,
    /// The state in the page of each block that the rows before the drafts lie in, in order.
    states: &'list mut [&'a mut [f32]],
    /// A row of output for each row.
    outputs: &'list mut [&'a mut [f32]],
}

/// Lists of a call, which are empty between calls. They keep their memory, so that a step in steady state allocates nothing.
#[derive(Default)]
pub(super) struct Lists {
    spans: Vec<Span>,
    /// Pages that are written, with the span and the number of the page in it.
    written: Vec<(usize, usize, usize)>,
    /// Pages to begin with: the page of the block, and that of the one before it unless the sequence begins.
    begun: Vec<(usize, Option<usize>)>,
    /// By span, then by head, then by page or row.
    states: Vec<&'static mut [f32]>,
    outputs: Vec<&'static mut [f32]>,
    tasks: Vec<Task<'static, 'static>>,
}

thread_local! {
    /// Numbers of [`head`].
    static SCRATCH: Cell<Vec<f32>> = Cell::default();
}

/// An empty list of borrows with another lifetime in the memory of `list`.
fn recycled<T, U>(mut list: Vec<T>) -> Vec<U> {
    list.clear();
    list.into_iter().filter_map(|_| None).collect()
}

/// Weights that all heads of a layer share.
#[derive(Clone, Copy)]
struct Shared<'a> {
    declared: &'a Recurrent,
    conv: &'a [f32],
    decay: &'a [f32],
    dt_bias: &'a [f32],
    norm: NormRow<'a>,
    projected: &'a [f32],
    block_size: usize,
}

pub(super) fn run(
    lists: &mut Lists,
    isa: Isa,
    threads: &Pool,
    norm: NormRow<'_>,
    args: RecurrentRows<'_>,
) -> Result<(), KernelError> {
    let RecurrentRows { batch, layer, projected, output, rows, cache, .. } = args;
    let RecurrentLayer { declared, conv, decay, dt_bias, group, .. } = layer;
    let block_size = cache.shape.block_size;
    let shared = Shared {
        declared,
        conv: conv.host()?,
        decay: decay.host()?,
        dt_bias: dt_bias.host()?,
        norm,
        projected: projected.host()?,
        block_size,
    };
    let attention = &batch.groups[*group].attention;
    let Lists { spans, written, begun, .. } = lists;
    spans.clear();
    written.clear();
    begun.clear();
    // Rows and written pages so far.
    let mut before = (0, 0);
    for seq in 0..attention.num_seqs() {
        let row_of = |seq: usize| attention.query_starts[seq] as usize;
        let (first_row, end_row) = (row_of(seq), row_of(seq + 1));
        let (context, count) = (attention.context_lens[seq] as usize, end_row - first_row);
        if context == 0 || count == 0 {
            continue;
        }
        let num_blocks = cache.shape.num_blocks;
        let page = |block: usize| {
            let id = attention.table(seq).get(block).copied().unwrap_or(-1);
            let found = usize::try_from(id).ok().filter(|id| *id < num_blocks);
            found.ok_or(KernelError::Shape { what: "block id", found: id as usize, expected: num_blocks })
        };
        let start = context - count;
        let drafts = batch.num_drafts(seq) as usize;
        let blocks = start / block_size..(context - drafts).div_ceil(block_size);
        if start.is_multiple_of(block_size) {
            begun.push((page(blocks.start)?, blocks.start.checked_sub(1).map(page).transpose()?));
        }
        let pages = blocks.len();
        for (i, block) in blocks.enumerate() {
            written.push((page(block)?, spans.len(), i));
        }
        spans.push(Span { first_row, rows: count, certain: count - drafts, start, pages, before });
        before = (before.0 + count, before.1 + pages);
    }
    written.sort_unstable();
    let (heads, size, in_keys) = (declared.value_heads, declared.head_state(), declared.heads_in_keys());
    let mut states: Vec<&mut [f32]> = recycled(std::mem::take(&mut lists.states));
    let mut outputs: Vec<&mut [f32]> = recycled(std::mem::take(&mut lists.outputs));
    states.resize_with(before.1 * heads, Default::default);
    outputs.resize_with(before.0 * heads, Default::default);
    let num_blocks = cache.shape.num_blocks.max(1);
    let halves = [(0, in_keys), (in_keys, heads - in_keys)];
    for (pages, (first, count)) in cache.buffers_mut().zip(halves) {
        let pages = pages.host_mut::<f32>()?;
        let page_len = pages.len() / num_blocks;
        for &(to, from) in &*begun {
            let to = to * page_len;
            match from {
                Some(from) => pages.copy_within(from * page_len..from * page_len + count * size, to),
                None => pages[to..to + count * size].fill(0.0),
            }
        }
        let (mut rest, mut passed) = (pages, 0);
        for &(page, span, i) in &*written {
            // Two sequences never write the same page.
            let skipped = page.checked_sub(passed).ok_or(KernelError::Shape {
                what: "sequences that write a block",
                found: 2,
                expected: 1,
            })?;
            let (found, after) = rest.split_at_mut((skipped + 1) * page_len);
            let Span { pages, before, .. } = spans[span];
            for (head, state) in (first..).zip(found[skipped * page_len..].chunks_exact_mut(size).take(count)) {
                states[before.1 * heads + head * pages + i] = state;
            }
            (rest, passed) = (after, page + 1);
        }
    }
    let (dim, width) = (declared.value_dim, declared.value_width());
    let (mut rest, mut row) = (&mut output.host_mut::<f32>()?[..rows * width], 0);
    for span in &*spans {
        let (padding, from) = rest.split_at_mut((span.first_row - row) * width);
        let (found, after) = from.split_at_mut(span.rows * width);
        padding.fill(0.0);
        for (i, output) in found.chunks_exact_mut(dim).enumerate() {
            outputs[span.before.0 * heads + i % heads * span.rows + i / heads] = output;
        }
        (rest, row) = (after, span.first_row + span.rows);
    }
    rest.fill(0.0);
    let mut tasks: Vec<Task<'_, '_>> = recycled(std::mem::take(&mut lists.tasks));
    let (mut rest, mut rest_of_outputs) = (&mut states[..], &mut outputs[..]);
    for (span, of) in spans.iter().enumerate() {
        for head in 0..heads {
            let (states, outputs);
            (states, rest) = rest.split_at_mut(of.pages);
            (outputs, rest_of_outputs) = rest_of_outputs.split_at_mut(of.rows);
            tasks.push(Task { span, head, states, outputs });
        }
    }
    let cost = 4 * size * rows.div_ceil(spans.len().max(1));
    threads.chunks_mut(&mut tasks, 1, cost, |_, tasks| {
        let mut scratch = SCRATCH.take();
        tasks.iter_mut().for_each(|task| head(isa, shared, &spans[task.span], task, &mut scratch));
        SCRATCH.set(scratch);
    });
    lists.tasks = recycled(tasks);
    (lists.states, lists.outputs) = (recycled(states), recycled(outputs));
    Ok(())
}

/// Computes all rows of one value head of a sequence.
fn head(isa: Isa, shared: Shared<'_>, span: &Span, task: &mut Task<'_, '_>, scratch: &mut Vec<f32>) {
    let Shared { declared, conv, block_size, .. } = shared;
    let (key_dim, value_dim, kernel) = (declared.key_dim, declared.value_dim, declared.kernel);
    let (channels, width, stride) = (declared.head_channels(), declared.conv_width(), declared.projections.rows());
    let key_head = task.head / (declared.value_heads / declared.key_heads);
    // Where q, k and v lie in a row of projections and in the head's channels.
    let pieces = [
        (key_head * key_dim, 0, key_dim),
        (declared.key_width() + key_head * key_dim, key_dim, key_dim),
        (2 * declared.key_width() + task.head * value_dim, 2 * key_dim, value_dim),
    ];
    let copied = if span.certain < span.rows { declared.head_state() } else { 0 };
    scratch.resize(2 * key_dim + 2 * channels + 3 * value_dim + copied, 0.0);
    let (weights, rest) = scratch.split_at_mut(2 * key_dim);
    let (sums, rest) = rest.split_at_mut(channels);
    let (qkv, rest) = rest.split_at_mut(channels);
    let (attended, rest) = rest.split_at_mut(value_dim);
    let (gated, copy) = rest.split_at_mut(2 * value_dim);
    // An RMS norm with these weights scales a row to length 1, q also by 1 / sqrt(key_dim).
    let unit = (key_dim as f32).sqrt().recip();
    weights[..key_dim].fill(unit * unit);
    weights[key_dim..].fill(unit);
    let silu = |gated: bool| Activate { activation: Activation::Silu, gated };
    let mut at = 0;
    for (i, output) in task.outputs.iter_mut().enumerate() {
        let position = span.start + i;
        if i > 0 && i < span.certain && position.is_multiple_of(block_size) {
            at += 1;
            if let Some([before, state]) = task.states.get_mut(at - 1..=at) {
                state.copy_from_slice(before);
            }
        }
        let Some(page) = task.states.get_mut(at) else { return };
        if i == span.certain {
            copy.copy_from_slice(page);
        }
        let state = if i < span.certain { &mut **page } else { &mut *copy };
        let (tail, matrix) = state.split_at_mut((kernel - 1) * channels);
        let row = &shared.projected[(span.first_row + i) * stride..][..stride];
        layer::convolve(isa, conv, tail, row, pieces, sums);
        if kernel > 1 {
            tail.copy_within(channels.., 0);
            let last = tail.len() - channels;
            for (from, to, len) in pieces {
                tail[last + to..][..len].copy_from_slice(&row[from..from + len]);
            }
        }
        layer::activate(isa, silu(false), sums, qkv);
        for (x, weight) in qkv.chunks_exact_mut(key_dim).zip(weights.chunks_exact(key_dim)) {
            let eps = L2_EPS / key_dim as f32;
            layer::norm_heads(isa, x, NormRow { weight, bias: &[], width: key_dim, eps, centre: false });
        }
        let after = width + declared.value_width();
        let (b, a) = (row[after + task.head], row[after + declared.value_heads + task.head]);
        let decay = (shared.decay[task.head] * softplus(a + shared.dt_bias[task.head])).exp();
        let scales = (decay, 1.0 / (1.0 + (-b).exp()));
        layer::delta_rule(isa, matrix, (qkv, key_dim), scales, attended);
        let (gate, normed) = gated.split_at_mut(value_dim);
        gate.copy_from_slice(&row[width + task.head * value_dim..][..value_dim]);
        layer::norm(isa, attended, shared.norm, normed);
        layer::activate(isa, silu(true), gated, output);
    }
}

fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

#[cfg(test)]
mod tests;
