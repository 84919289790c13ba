//! Layer operations other than matrix products and attention: norms, rotary embedding, activation, gathers.
//!
//! [`LayerOps`] has one implementation per kind of backend: plain functions on a CPU (here), launches on devices with kernels
//! ([`super::launched`]). One operation is what a GPU does in one kernel, so that one interpreter serves both. Each output row
//! depends on its own input row alone.

use attention_kernels::{Dtype, KernelError, KvCache, Workspace};
use device::gemm::RowBlock;
use device::simd::{LANES, Lanes};
use device::{Buffer, Device, Isa, Matrix, Pool};

use super::{ForwardBatch, StepLimits};
use crate::decoder::Activation;

/// Arguments of [`LayerOps::qk_norm_rope_cache`].
pub(super) struct QkvRows<'a> {
    /// `[rows, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values.
    pub qkv: &'a mut Buffer,
    pub rows: usize,
    /// Number of query heads.
    pub num_heads: usize,
    pub query_norm: Option<&'a Norm>,
    pub key_norm: Option<&'a Norm>,
    /// The [`LayerOps::rope_table`] of the rows.
    pub rope: &'a Buffer,
    /// The layer's group in the batch.
    pub group: usize,
    pub cache: &'a KvCache,
    /// Write keys and values to the cache too. Only for devices with such a kernel.
    pub fused: bool,
}

pub(super) struct Norm {
    /// Float32 `[width]`.
    pub weight: Buffer,
    pub eps: f32,
}

/// Output rows of an operation: in the model's type, or quantised to 8 bits ([`RowBlock`]s), which only a CPU supports.
pub(super) enum Out<'a> {
    Numbers(&'a mut Buffer),
    Q8(&'a mut Buffer),
}

/// Operations of a backend other than linear layers and attention. Rows are of the model's type; weights of norms, rotary
/// tables and logits are float32. The defaults are those of a CPU, which reads the batch itself.
pub(super) trait LayerOps: Send {
    /// Allocates memory for steps of this size.
    fn reserve(&mut self, _limits: &StepLimits) -> Result<(), KernelError> {
        Ok(())
    }
    /// Copies a batch to where the other operations and the kernels read it. `fixed`: choose grids that fit contexts of any
    /// length, as a graph needs them.
    fn load(&mut self, _batch: &ForwardBatch, _fixed: bool) -> Result<(), KernelError> {
        Ok(())
    }
    /// Copies a list of block copies to where the kernel reads it; at most [`LayerOps::most_copies`].
    fn load_copies(&mut self, _copies: &[(u32, u32)]) -> Result<(), KernelError> {
        Ok(())
    }
    /// Greatest number of block copies that can be loaded at once.
    fn most_copies(&self) -> usize {
        usize::MAX
    }
    /// Device array of the loaded batch's tokens; `None` if operations read the batch itself.
    fn tokens(&self) -> Option<&Buffer> {
        None
    }
    /// Workspace of a group for the registry's kernels; `None` if they read the batch itself.
    fn workspace(&self, _group: usize) -> Option<&Workspace> {
        None
    }
    /// Row t of `out` = the embedding of token t of the loaded batch.
    fn embed(&self, batch: &ForwardBatch, table: &Matrix, out: &mut Buffer) -> Result<(), KernelError>;
    /// Row t of `out` = cos(p·f) for all frequencies f of a rotary embedding, then sin(p·f); p is the position of token t.
    fn rope_table(&self, table: usize, batch: &ForwardBatch, out: &mut Buffer) -> Result<(), KernelError>;
    /// `out = x / sqrt(mean(x²) + eps) * weight` (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019).
    fn rms_norm(&self, x: &Buffer, norm: &Norm, rows: usize, out: Out<'_>) -> Result<(), KernelError>;
    /// `x += y`, rounded to the type, for rows of `width` elements.
    fn add(&self, x: &mut Buffer, y: &Buffer, rows: usize, width: usize) -> Result<(), KernelError>;
    /// `x += y`, then `y`, or `q8` if given, = the norm of `x`.
    fn fused_add_rms_norm(
        &self,
        x: &mut Buffer,
        y: &mut Buffer,
        norm: &Norm,
        rows: usize,
        q8: Option<&mut Buffer>,
    ) -> Result<(), KernelError>;
    /// RMS norm (where the model has it) and rotation of query and key heads in place, and the cache write if `fused`.
    fn qk_norm_rope_cache(&self, args: QkvRows<'_>) -> Result<(), KernelError>;
    /// `out = activation(gate) * up`; rows of `gate_up` are `[gate; width][up; width]`.
    fn act_and_mul(
        &self,
        activation: Activation,
        gate_up: &Buffer,
        width: usize,
        rows: usize,
        out: Out<'_>,
    ) -> Result<(), KernelError>;
    /// Row i of `out` = row [`ForwardBatch::needed`]`[i]` of `x`, for the loaded batch.
    fn gather_needed(
        &self,
        batch: &ForwardBatch,
        x: &Buffer,
        width: usize,
        out: &mut Buffer,
    ) -> Result<(), KernelError>;
    /// Row i of `out` = row `rows[i]` of `x`, for at most as many rows as results of a step.
    fn gather_rows(&mut self, x: &Buffer, rows: &[u32], width: usize, out: &mut Buffer) -> Result<(), KernelError>;
    /// Waits for the device and returns the first `elements` of a buffer of type `dtype` in float32. The only wait of a step.
    fn to_host<'a>(&'a mut self, buffer: &'a Buffer, dtype: Dtype, elements: usize) -> Result<&'a [f32], KernelError>;
}

pub(super) struct Cpu {
    isa: Isa,
    threads: Pool,
    /// Angular frequencies of each rotary embedding, `[head_dim / 2]`.
    frequencies: Vec<Vec<f32>>,
}

/// Rough costs per element in multiply-adds, from which the pool decides how many threads to use: of a pass over it, of its
/// exponential, and of reading it from a packed matrix.
const PASS_COST: usize = 8;
const EXP_COST: usize = 16;
const GATHER_COST: usize = 32;

impl LayerOps for Cpu {
    fn embed(&self, batch: &ForwardBatch, table: &Matrix, out: &mut Buffer) -> Result<(), KernelError> {
        let table = table.host()?;
        let (tokens, width) = (&batch.tokens, table.k());
        let out = &mut out.host_mut::<f32>()?[..tokens.len() * width];
        self.threads.chunks_mut(out, width, width * GATHER_COST, |t, row| table.copy_row(tokens[t] as usize, row));
        Ok(())
    }

    fn rope_table(&self, table: usize, batch: &ForwardBatch, out: &mut Buffer) -> Result<(), KernelError> {
        let (positions, frequencies) = (&batch.positions, &self.frequencies[table]);
        let half = frequencies.len();
        let out = &mut out.host_mut::<f32>()?[..positions.len() * 2 * half];
        self.threads.chunks_mut(out, 2 * half, half * EXP_COST, |t, row| {
            let (cos, sin) = row.split_at_mut(half);
            for ((&f, cos), sin) in frequencies.iter().zip(cos).zip(sin) {
                (*sin, *cos) = (positions[t] as f32 * f).sin_cos();
            }
        });
        Ok(())
    }

    fn rms_norm(&self, x: &Buffer, norm: &Norm, rows: usize, out: Out<'_>) -> Result<(), KernelError> {
        let (x, weight, eps) = (x.host::<f32>()?, norm.weight.host::<f32>()?, norm.eps);
        let (isa, width) = (self.isa, weight.len());
        match out {
            Out::Q8(blocks) => {
                let (blocks, per_row) = q8_rows(blocks, rows, width)?;
                self.threads.chunks_mut(blocks, per_row, width * RowBlock::COST, |t, out| {
                    let x = &x[t * width..][..width];
                    device::dispatch!(isa, norm_row_q8(x: &[f32], weight: &[f32], eps: f32, out: &mut [RowBlock]));
                });
            }
            Out::Numbers(out) => {
                let out = &mut out.host_mut::<f32>()?[..rows * width];
                self.threads.chunks_mut(out, width, width * PASS_COST, |t, out| {
                    let x = &x[t * width..][..width];
                    device::dispatch!(isa, norm_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]));
                });
            }
        }
        Ok(())
    }

    fn add(&self, x: &mut Buffer, y: &Buffer, rows: usize, width: usize) -> Result<(), KernelError> {
        let (x, y) = (&mut x.host_mut::<f32>()?[..rows * width], y.host::<f32>()?);
        self.threads.chunks_mut(x, width, width * PASS_COST, |t, x| {
            x.iter_mut().zip(&y[t * width..]).for_each(|(x, y)| *x += y);
        });
        Ok(())
    }

    /// One pass over the rows: each is still in the first-level cache when it is normed.
    fn fused_add_rms_norm(
        &self,
        x: &mut Buffer,
        y: &mut Buffer,
        norm: &Norm,
        rows: usize,
        q8: Option<&mut Buffer>,
    ) -> Result<(), KernelError> {
        let (weight, eps) = (norm.weight.host::<f32>()?, norm.eps);
        let (isa, width) = (self.isa, weight.len());
        let (x, y) = (&mut x.host_mut::<f32>()?[..rows * width], &mut y.host_mut::<f32>()?[..rows * width]);
        if let Some(blocks) = q8 {
            let (blocks, per_row) = q8_rows(blocks, rows, width)?;
            let y = &*y;
            self.threads.zip_chunks_mut((x, width), (blocks, per_row), width * RowBlock::COST, |t, x, out| {
                let y = &y[t * width..][..width];
                device::dispatch!(
                    isa,
                    add_norm_row_q8(x: &mut [f32], y: &[f32], weight: &[f32], eps: f32, out: &mut [RowBlock])
                );
            });
            return Ok(());
        }
        self.threads.zip_chunks_mut((x, width), (y, width), width * PASS_COST, |_, x, y| {
            device::dispatch!(isa, add_norm_row(x: &mut [f32], y: &mut [f32], weight: &[f32], eps: f32));
        });
        Ok(())
    }

    fn qk_norm_rope_cache(&self, args: QkvRows<'_>) -> Result<(), KernelError> {
        let QkvRows { qkv, rows, num_heads, query_norm, key_norm, rope, cache, .. } = args;
        let (isa, dim, table) = (self.isa, cache.shape.head_dim, rope.host::<f32>()?);
        let (queries, keys) = (num_heads * dim, cache.shape.num_kv_heads * dim);
        let width = queries + 2 * keys;
        let [query_norm, key_norm] = [query_norm, key_norm]
            .map(|norm| norm.map(|norm| norm.weight.host::<f32>().map(|weight| (weight, norm.eps))).transpose());
        let (query_norm, key_norm) = (query_norm?, key_norm?);
        let qkv = &mut qkv.host_mut::<f32>()?[..rows * width];
        self.threads.chunks_mut(qkv, width, (queries + keys) * PASS_COST, |t, row| {
            let (query_heads, others) = row.split_at_mut(queries);
            for (heads, norm) in [(query_heads, query_norm), (&mut others[..keys], key_norm)] {
                if let Some((weight, eps)) = norm {
                    device::dispatch!(isa, norm_heads(heads: &mut [f32], weight: &[f32], eps: f32));
                }
            }
            let (heads, table) = (&mut row[..queries + keys], &table[t * dim..][..dim]);
            device::dispatch!(isa, rotate_heads(heads: &mut [f32], table: &[f32]));
        });
        Ok(())
    }

    fn act_and_mul(
        &self,
        activation: Activation,
        gate_up: &Buffer,
        width: usize,
        rows: usize,
        out: Out<'_>,
    ) -> Result<(), KernelError> {
        if activation != Activation::Silu {
            let found = format!("activation {activation:?}");
            return Err(KernelError::Unsupported { variant: "cpu.layer", found });
        }
        let (gate_up, isa) = (gate_up.host::<f32>()?, self.isa);
        match out {
            Out::Q8(blocks) => {
                let (blocks, per_row) = q8_rows(blocks, rows, width)?;
                self.threads.chunks_mut(blocks, per_row, width * (EXP_COST + RowBlock::COST), |t, out| {
                    let (gate, up) = gate_up[t * 2 * width..][..2 * width].split_at(width);
                    device::dispatch!(isa, silu_mul_row_q8(gate: &[f32], up: &[f32], out: &mut [RowBlock]));
                });
            }
            Out::Numbers(out) => {
                let out = &mut out.host_mut::<f32>()?[..rows * width];
                self.threads.chunks_mut(out, width, width * EXP_COST, |t, out| {
                    let (gate, up) = gate_up[t * 2 * width..][..2 * width].split_at(width);
                    device::dispatch!(isa, silu_mul_row(gate: &[f32], up: &[f32], out: &mut [f32]));
                });
            }
        }
        Ok(())
    }

    fn gather_needed(
        &self,
        batch: &ForwardBatch,
        x: &Buffer,
        width: usize,
        out: &mut Buffer,
    ) -> Result<(), KernelError> {
        gather_rows(x, batch.needed.iter().flatten(), width, out)
    }

    fn gather_rows(&mut self, x: &Buffer, rows: &[u32], width: usize, out: &mut Buffer) -> Result<(), KernelError> {
        gather_rows(x, rows, width, out)
    }

    fn to_host<'a>(&'a mut self, buffer: &'a Buffer, _dtype: Dtype, elements: usize) -> Result<&'a [f32], KernelError> {
        Ok(&buffer.host::<f32>()?[..elements])
    }
}

impl Cpu {
    pub fn new(device: &dyn Device, frequencies: Vec<Vec<f32>>) -> Cpu {
        Cpu { isa: Isa::best(), threads: device.pool().clone(), frequencies }
    }
}

fn gather_rows<'a>(
    x: &Buffer,
    rows: impl IntoIterator<Item = &'a u32>,
    width: usize,
    out: &mut Buffer,
) -> Result<(), KernelError> {
    let x = x.host::<f32>()?;
    for (row, out) in rows.into_iter().zip(out.host_mut::<f32>()?.chunks_mut(width)) {
        out.copy_from_slice(&x[*row as usize * width..][..width]);
    }
    Ok(())
}

/// The first `rows` rows of `width` numbers in 8 bits, and the number of blocks per row.
fn q8_rows(blocks: &mut Buffer, rows: usize, width: usize) -> Result<(&mut [RowBlock], usize), KernelError> {
    let per_row = width.div_ceil(RowBlock::LEN);
    Ok((&mut blocks.host_mut()?[..rows * per_row], per_row))
}

// Plain loops, which the compiler vectorises inside functions that are compiled for the instruction set.

/// `out = x / sqrt(mean(x²) + eps) * weight`.
#[inline(always)]
fn norm_row<L: Lanes>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    scale_row(x, inverse_rms::<L>(x, eps), weight, out);
}

#[inline(always)]
fn add_norm_row<L: Lanes>(x: &mut [f32], y: &mut [f32], weight: &[f32], eps: f32) {
    for (x, y) in x.iter_mut().zip(&*y) {
        *x += y;
    }
    norm_row::<L>(x, weight, eps, y);
}

/// [`norm_row`] quantised block by block.
#[inline(always)]
fn norm_row_q8<L: Lanes>(x: &[f32], weight: &[f32], eps: f32, out: &mut [RowBlock]) {
    let factor = inverse_rms::<L>(x, eps);
    let (x, x_rest) = x.as_chunks::<{ RowBlock::LEN }>();
    let (weight, weight_rest) = weight.as_chunks::<{ RowBlock::LEN }>();
    let mut numbers = [0.0; RowBlock::LEN];
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        scale_row(x, factor, weight, &mut numbers);
        out.set::<L>(&numbers);
    }
    if let Some(out) = out.get_mut(x.len()) {
        numbers = [0.0; RowBlock::LEN];
        scale_row(x_rest, factor, weight_rest, &mut numbers);
        out.set::<L>(&numbers);
    }
}

/// [`add_norm_row`] quantised block by block.
#[inline(always)]
fn add_norm_row_q8<L: Lanes>(x: &mut [f32], y: &[f32], weight: &[f32], eps: f32, out: &mut [RowBlock]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
    norm_row_q8::<L>(x, weight, eps, out);
}

#[inline(always)]
fn scale_row(x: &[f32], factor: f32, weight: &[f32], out: &mut [f32]) {
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * factor * w;
    }
}

#[inline(always)]
fn norm_heads<L: Lanes>(heads: &mut [f32], weight: &[f32], eps: f32) {
    for head in heads.chunks_exact_mut(weight.len()) {
        let factor = inverse_rms::<L>(head, eps);
        for (x, w) in head.iter_mut().zip(weight) {
            *x *= factor * w;
        }
    }
}

/// Rotates each head by the angles in `table`: cosines, then sines.
#[allow(clippy::extra_unused_type_parameters)] // the instruction set, for the loops
#[inline(always)]
fn rotate_heads<L: Lanes>(heads: &mut [f32], table: &[f32]) {
    let half = table.len() / 2;
    let (cos, sin) = table.split_at(half);
    for head in heads.chunks_exact_mut(table.len()) {
        let (low, high) = head.split_at_mut(half);
        for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
        }
    }
}

/// `1 / sqrt(mean(row²) + eps)`. Sixteen lanes sum whole vectors, then the rest is added in order.
#[inline(always)]
fn inverse_rms<L: Lanes>(row: &[f32], eps: f32) -> f32 {
    let (vectors, tail) = row.as_chunks::<LANES>();
    let mut lanes = L::splat(0.0);
    for vector in vectors {
        let x = L::load(vector);
        lanes = x.mul_add(x, lanes);
    }
    let mut squares = lanes.sum();
    for x in tail {
        squares += x * x;
    }
    1.0 / (squares / row.len() as f32 + eps).sqrt()
}

/// `out = gate / (1 + e^-gate) * up`.
#[inline(always)]
fn silu_mul_row<L: Lanes>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let (gates, gate_tail) = gate.as_chunks();
    let (ups, up_tail) = up.as_chunks();
    let (outs, out_tail) = out.as_chunks_mut();
    for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
        silu_mul_lanes::<L>(gate, up, out);
    }
    if !out_tail.is_empty() {
        let mut ends = [[0.0; LANES]; 3];
        ends[0][..gate_tail.len()].copy_from_slice(gate_tail);
        ends[1][..up_tail.len()].copy_from_slice(up_tail);
        let [gate, up, out] = &mut ends;
        silu_mul_lanes::<L>(gate, up, out);
        out_tail.copy_from_slice(&out[..out_tail.len()]);
    }
}

/// [`silu_mul_row`] quantised block by block.
#[inline(always)]
fn silu_mul_row_q8<L: Lanes>(gate: &[f32], up: &[f32], out: &mut [RowBlock]) {
    let (gate, gate_rest) = gate.as_chunks::<{ RowBlock::LEN }>();
    let (up, up_rest) = up.as_chunks::<{ RowBlock::LEN }>();
    let mut numbers = [0.0; RowBlock::LEN];
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        silu_mul_row::<L>(gate, up, &mut numbers);
        out.set::<L>(&numbers);
    }
    if let Some(out) = out.get_mut(gate.len()) {
        numbers = [0.0; RowBlock::LEN];
        silu_mul_row::<L>(gate_rest, up_rest, &mut numbers[..gate_rest.len()]);
        out.set::<L>(&numbers);
    }
}

#[inline(always)]
fn silu_mul_lanes<L: Lanes>(gate: &[f32; LANES], up: &[f32; LANES], out: &mut [f32; LANES]) {
    let gate = L::load(gate);
    // e^87.3 is finite, and adding 1 does not change it.
    let e = gate.max(L::splat(-87.3)).mul(L::splat(-1.0)).exp();
    gate.div(e.add(L::splat(1.0))).mul(L::load(up)).store(out);
}
