//! The recurrences on a CPU: in parallel over sequences and value heads, token by token within each, so that
//! a row's bits do not depend on the batch or on the chunk.
//!
//! The loops over numbers are in [`attention_kernels::layer`].
//!
//! The rows of drafts, the last ones of a sequence, go on from a copy of the state, so that they change no page.

use std::cell::Cell;

use attention_kernels::KernelError;
use attention_kernels::layer::{self, Activate, Activation, Convolution, NormRow, Update};
use device::Buffer;
use simd::{Isa, Pool};

use super::loaded::RecurrentLayer;
use super::ops::{RecurrentPart, RecurrentRows};
use crate::decoder::{Recurrent, Rule};

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
    conv: Convolution<'a>,
    decay: &'a [f32],
    dt_bias: &'a [f32],
    skip: &'a [f32],
    norm: Option<NormRow<'a>>,
    scan: Option<Scan<'a>>,
    /// Steps and gates of all rows of a delta net with decays of channels.
    channels: Option<[&'a [f32]; 2]>,
    /// Numbers of the state of a head that this part has, and how many of these are inputs of the convolution.
    state: (usize, usize),
    projected: &'a [f32],
    block_size: usize,
}

/// What the matrices of a selective state space read: values and steps, k and q, of all rows, and the norms of k and of q.
#[derive(Clone, Copy)]
struct Scan<'a> {
    values: &'a [f32],
    steps: &'a [f32],
    keys: &'a [f32],
    norms: [NormRow<'a>; 2],
}

/// Numbers that some rules do not have.
fn numbers(buffer: &Option<Buffer>) -> Result<&[f32], KernelError> {
    Ok(buffer.as_ref().map(|buffer| buffer.host()).transpose()?.unwrap_or_default())
}

pub(super) fn run(
    lists: &mut Lists,
    isa: Isa,
    threads: &Pool,
    norm: Option<NormRow<'_>>,
    args: RecurrentRows<'_>,
) -> Result<(), KernelError> {
    let RecurrentRows { batch, layer, part, projected, output, rows, cache, .. } = args;
    let RecurrentLayer { declared, conv, conv_bias, decay, dt_bias, skip, group, .. } = layer;
    let block_size = cache.shape.block_size;
    let (own, tail) = (part.state(declared), declared.head_tail());
    let scan = match part {
        RecurrentPart::Matrix { values, steps, keys, norms: [of_k, of_q] } => {
            let norms = [of_k.row()?, of_q.row()?];
            Some(Scan { values: values.host()?, steps: steps.host()?, keys: keys.host()?, norms })
        }
        RecurrentPart::Whole | RecurrentPart::Convolution | RecurrentPart::Channels { .. } => None,
    };
    let channels = match part {
        RecurrentPart::Channels { steps, gates } => Some([steps.host()?, gates.host()?]),
        _ => None,
    };
    let shared = Shared {
        declared,
        scan,
        channels,
        state: (own.len(), tail.saturating_sub(own.start)),
        conv: Convolution { weights: conv.host()?, bias: numbers(conv_bias)?, width: declared.conv_width() },
        decay: numbers(decay)?,
        dt_bias: numbers(dt_bias)?,
        skip: numbers(skip)?,
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
            // The state of each head is one piece, of which another part of the layer may have the rest.
            for at in (0..count).map(|head| head * size + own.start) {
                let to = to * page_len + at;
                match from.map(|from| from * page_len + at) {
                    Some(from) => pages.copy_within(from..from + own.len(), to),
                    None => pages[to..to + own.len()].fill(0.0),
                }
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
                states[before.1 * heads + head * pages + i] = &mut state[own.clone()];
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
    let Shared { declared, block_size, state: (size, _), .. } = shared;
    let copied = if span.certain < span.rows { size } else { 0 };
    let own = 2 * declared.key_dim + 3 * declared.head_channels() + 3 * declared.value_dim;
    scratch.resize(own + copied, 0.0);
    let (own, copy) = scratch.split_at_mut(own);
    let mut head = Head::new(isa, shared, task.head, own);
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
        head.token(state, span.first_row + i, output);
    }
}

/// One value head, with memory for a token.
struct Head<'a> {
    isa: Isa,
    shared: Shared<'a>,
    head: usize,
    /// Where q, k and v lie in a row of projections and in the head's channels.
    pieces: [(usize, usize, usize); 3],
    /// Weights of an RMS norm that scales q and k to length 1, q also by `1 / sqrt(key_dim)`.
    units: &'a mut [f32],
    /// Inputs of the convolution, its sums, and these after the activation.
    newest: &'a mut [f32],
    sums: &'a mut [f32],
    qkv: &'a mut [f32],
    attended: &'a mut [f32],
    /// A gate and what it multiplies.
    gated: &'a mut [f32],
}

impl<'a> Head<'a> {
    fn new(isa: Isa, shared: Shared<'a>, head: usize, scratch: &'a mut [f32]) -> Head<'a> {
        let declared = shared.declared;
        let (key_dim, value_dim, channels) = (declared.conv_key_dim(), declared.value_dim, declared.head_channels());
        let (key_head, keys) = (head / (declared.value_heads / declared.key_heads), declared.key_heads * key_dim);
        let pieces = [
            (key_head * key_dim, 0, key_dim),
            (keys + key_head * key_dim, key_dim, key_dim),
            (2 * keys + head * value_dim, 2 * key_dim, value_dim),
        ];
        let key_dim = declared.key_dim;
        let (units, rest) = scratch.split_at_mut(2 * key_dim);
        let (newest, rest) = rest.split_at_mut(channels);
        let (sums, rest) = rest.split_at_mut(channels);
        let (qkv, rest) = rest.split_at_mut(channels);
        let (attended, gated) = rest.split_at_mut(value_dim);
        let unit = (key_dim as f32).sqrt().recip();
        units[..key_dim].fill(unit * unit);
        units[key_dim..].fill(unit);
        Head { isa, shared, head, pieces, units, newest, sums, qkv, attended, gated }
    }

    /// Computes a token: its state from the one before, its output from its row of projections.
    fn token(&mut self, state: &mut [f32], number: usize, output: &mut [f32]) {
        let Shared { declared, projected, state: (_, tail), .. } = self.shared;
        let stride = declared.projections.rows();
        let row = &projected[number * stride..][..stride];
        let (tail, matrix) = state.split_at_mut(tail);
        for (from, to, len) in self.pieces {
            self.newest[to..to + len].copy_from_slice(&row[from..from + len]);
        }
        // What follows q, k, v and z.
        let after = &row[declared.conv_width()..];
        if let Some(channels) = self.shared.channels {
            self.convolve(tail);
            return self.channel_delta(matrix, channels, number, after[self.head], output);
        }
        let (z, rest) = after.split_at(declared.value_width());
        let own = self.head * declared.value_dim..(self.head + 1) * declared.value_dim;
        let z = &z[own.clone()];
        match declared.rule {
            Rule::GatedDelta { .. } => {
                self.convolve(tail);
                self.gated_delta(matrix, z, rest, output);
            }
            Rule::ShortConvolution => {
                self.newest.iter_mut().zip(&rest[own]).for_each(|(x, b)| *x *= b);
                self.convolve(tail);
                output.iter_mut().zip(&*self.sums).zip(z).for_each(|((out, sum), z)| *out = sum * z);
            }
            Rule::StateSpace { steps, factors: [.., of_z, of_dt], .. } => {
                self.convolve(tail);
                self.state_space(matrix, (z, of_z), rest[self.head] * of_dt, steps, output);
            }
            Rule::Selective(_) => match self.shared.scan {
                Some(scan) => self.scan(scan, matrix, z, number, output),
                None => {
                    self.convolve(tail);
                    layer::activate(self.isa, SILU, self.sums, output);
                }
            },
            // Computed above.
            Rule::ChannelDelta(_) => {}
        }
    }

    /// The convolution of the newest inputs, which become the last ones of the tail.
    fn convolve(&mut self, tail: &mut [f32]) {
        layer::convolve(self.isa, self.shared.conv, tail, self.newest, self.pieces, self.sums);
        if let Some(last) = tail.len().checked_sub(self.newest.len()) {
            tail.copy_within(self.newest.len().., 0);
            tail[last..].copy_from_slice(self.newest);
        }
    }

    /// The convolved q, k and v, of which q and k have length 1, q also by `1 / sqrt(key_dim)`.
    fn unit_keys(&mut self) {
        let &mut Head { isa, shared, .. } = self;
        let key_dim = shared.declared.key_dim;
        layer::activate(isa, SILU, self.sums, self.qkv);
        for (x, weight) in self.qkv.chunks_exact_mut(key_dim).zip(self.units.chunks_exact(key_dim)) {
            let eps = L2_EPS / key_dim as f32;
            layer::norm_heads(isa, x, NormRow { weight, bias: &[], width: key_dim, eps, centre: false });
        }
    }

    fn channel_delta(
        &mut self,
        matrix: &mut [f32],
        [steps, gates]: [&'a [f32]; 2],
        number: usize,
        b: f32,
        output: &mut [f32],
    ) {
        self.unit_keys();
        let &mut Head { isa, shared, head, .. } = self;
        let Recurrent { key_dim, value_dim, value_heads, .. } = *shared.declared;
        let own = |of: &'a [f32], row: usize, dim: usize| &of[(row * value_heads + head) * dim..][..dim];
        let channels = own(steps, number, key_dim).iter().zip(own(shared.dt_bias, 0, key_dim));
        for (row, (step, bias)) in matrix.chunks_exact_mut(value_dim).zip(channels) {
            layer::scale(isa, row, (shared.decay[head] * softplus(step + bias)).exp());
        }
        let update = Update { decay: 1.0, beta: 1.0 / (1.0 + (-b).exp()), corrects: true };
        layer::update(isa, matrix, (self.qkv, key_dim), update, self.attended);
        match shared.norm {
            Some(norm) => layer::norm(isa, self.attended, norm, output),
            None => output.copy_from_slice(self.attended),
        }
        layer::gate(isa, output, own(gates, number, value_dim));
    }

    fn gated_delta(&mut self, matrix: &mut [f32], z: &[f32], rest: &[f32], output: &mut [f32]) {
        self.unit_keys();
        let &mut Head { isa, shared, head, .. } = self;
        let key_dim = shared.declared.key_dim;
        let (b, a) = (rest[head], rest[shared.declared.value_heads + head]);
        let decay = (shared.decay[head] * softplus(a + shared.dt_bias[head])).exp();
        let update = Update { decay, beta: 1.0 / (1.0 + (-b).exp()), corrects: true };
        layer::update(isa, matrix, (self.qkv, key_dim), update, self.attended);
        let (gate, normed) = self.gated.split_at_mut(z.len());
        gate.copy_from_slice(z);
        match shared.norm {
            Some(norm) => layer::norm(isa, self.attended, norm, normed),
            None => normed.copy_from_slice(self.attended),
        }
        layer::activate(isa, GATED_SILU, self.gated, output);
    }

    fn scan(&mut self, scan: Scan<'_>, matrix: &mut [f32], z: &[f32], row: usize, output: &mut [f32]) {
        let &mut Head { isa, shared, .. } = self;
        let (key_dim, width) = (shared.declared.key_dim, shared.declared.value_width());
        let own = self.head * z.len()..(self.head + 1) * z.len();
        let (k, q) = self.units.split_at_mut(key_dim);
        let keys = scan.keys[row * 2 * key_dim..][..2 * key_dim].chunks_exact(key_dim);
        for ((out, keys), norm) in [&mut *k, &mut *q].into_iter().zip(keys).zip(scan.norms) {
            layer::norm(isa, keys, norm, out);
        }
        let values = &scan.values[row * width..][own.clone()];
        let steps = &scan.steps[row * width..][own.clone()];
        self.sums.iter_mut().zip(steps).for_each(|(step, x)| *step = softplus(*x));
        let decays = (&shared.decay[own.start..], width);
        layer::scan(isa, matrix, decays, [k, q], self.sums, values, self.attended);
        let skips = values.iter().zip(&shared.skip[own]);
        self.attended.iter_mut().zip(skips).for_each(|(out, (v, skip))| *out += v * skip);
        layer::activate_by(isa, GATED_SILU, z, self.attended, output);
    }

    fn state_space(
        &mut self,
        matrix: &mut [f32],
        (z, of_z): (&[f32], f32),
        dt: f32,
        steps: (f32, f32),
        output: &mut [f32],
    ) {
        let &mut Head { isa, shared, head, .. } = self;
        let key_dim = shared.declared.key_dim;
        layer::activate(isa, SILU, self.sums, self.qkv);
        let step = softplus(dt + shared.dt_bias[head]).max(steps.0).min(steps.1);
        let update = Update { decay: (shared.decay[head] * step).exp(), beta: step, corrects: false };
        layer::update(isa, matrix, (self.qkv, key_dim), update, self.attended);
        layer::add(isa, self.attended, &self.qkv[2 * key_dim..], shared.skip[head]);
        let gate = &mut self.gated[..z.len()];
        gate.copy_from_slice(z);
        layer::scale(isa, gate, of_z);
        layer::activate_by(isa, GATED_SILU, gate, self.attended, output);
    }
}

const SILU: Activate = Activate { activation: Activation::Silu, gated: false };
const GATED_SILU: Activate = Activate { gated: true, ..SILU };

fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

#[cfg(test)]
mod tests;
