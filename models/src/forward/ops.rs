//! Layer operations beside the matrix products: norms, rotary embedding, activation, gathers.
//!
//! One trait, one implementation per backend. Each output row depends on its own input row alone.

use attention_kernels::KernelError;
use device::simd::{LANES, Lanes};
use device::{Buffer, Device, Isa, Matrix, Pool};

/// Some heads of every row of a fused QKV buffer.
#[derive(Clone, Copy)]
pub(super) struct HeadSpan {
    /// Elements from row to row.
    pub stride: usize,
    /// First head.
    pub first: usize,
    /// Number of heads.
    pub heads: usize,
    /// Elements per head.
    pub dim: usize,
}

/// What a backend must be able to do besides linear layers and attention. Buffers hold float32 rows.
pub(super) trait LayerOps: Send {
    /// Row t of `out` becomes the embedding of `tokens[t]`.
    fn embed(&self, tokens: &[u32], table: &Matrix, out: &mut Buffer) -> Result<(), KernelError>;
    /// Row t of `out` becomes cos(p·f) for all f, then sin(p·f), with p = `positions[t]`.
    fn rope_table(&self, positions: &[u32], frequencies: &[f32], out: &mut Buffer) -> Result<(), KernelError>;
    /// `out = x / sqrt(mean(x²) + eps) * weight` (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019).
    fn rms_norm(&self, x: &Buffer, weight: &Buffer, eps: f32, rows: usize, out: &mut Buffer)
    -> Result<(), KernelError>;
    /// RMS norm of every head of a span on its own, in place.
    fn norm_heads(
        &self,
        qkv: &mut Buffer,
        span: HeadSpan,
        weight: &Buffer,
        eps: f32,
        rows: usize,
    ) -> Result<(), KernelError>;
    /// Rotates every head of a span by its row of the [`LayerOps::rope_table`].
    fn rotate(&self, qkv: &mut Buffer, span: HeadSpan, table: &Buffer, rows: usize) -> Result<(), KernelError>;
    /// `x += y` for the first `elements`.
    fn add(&self, x: &mut Buffer, y: &Buffer, elements: usize) -> Result<(), KernelError>;
    /// `x += y`, then the RMS norm of it: what stands between two parts of a layer.
    fn add_norm(
        &self,
        x: &mut Buffer,
        y: &Buffer,
        weight: &Buffer,
        eps: f32,
        rows: usize,
        out: &mut Buffer,
    ) -> Result<(), KernelError> {
        self.add(x, y, rows * weight.len_bytes() / size_of::<f32>())?;
        self.rms_norm(x, weight, eps, rows, out)
    }
    /// `out = silu(gate) * up`, with `gate_up` rows of `[gate; width][up; width]`.
    fn silu_mul(&self, gate_up: &Buffer, width: usize, rows: usize, out: &mut Buffer) -> Result<(), KernelError>;
    /// Row i of `out` becomes row `rows[i]` of `x`.
    fn gather(&self, x: &Buffer, rows: &[u32], width: usize, out: &mut Buffer) -> Result<(), KernelError>;
}

/// The operations of a backend.
pub(super) fn for_device(device: &dyn Device) -> Box<dyn LayerOps> {
    Box::new(Cpu { isa: Isa::best(), threads: device.pool().clone() })
}

struct Cpu {
    isa: Isa,
    threads: Pool,
}

/// A rough cost of an element in multiply-adds, to decide whether a second thread is worth waking.
const EXP_COST: usize = 16;

impl LayerOps for Cpu {
    fn embed(&self, tokens: &[u32], table: &Matrix, out: &mut Buffer) -> Result<(), KernelError> {
        let table = table.host()?;
        for (&token, row) in tokens.iter().zip(out.host_mut::<f32>()?.chunks_mut(table.k())) {
            if token as usize >= table.n() {
                return Err(KernelError::Shape { what: "token id", found: token as usize, expected: table.n() });
            }
            table.copy_row(token as usize, row);
        }
        Ok(())
    }

    fn rope_table(&self, positions: &[u32], frequencies: &[f32], out: &mut Buffer) -> Result<(), KernelError> {
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

    fn rms_norm(
        &self,
        x: &Buffer,
        weight: &Buffer,
        eps: f32,
        rows: usize,
        out: &mut Buffer,
    ) -> Result<(), KernelError> {
        let (x, weight) = (x.host::<f32>()?, weight.host::<f32>()?);
        let width = weight.len();
        self.threads.chunks_mut(&mut out.host_mut::<f32>()?[..rows * width], width, width, |t, out| {
            norm_row(&x[t * width..][..width], weight, eps, out);
        });
        Ok(())
    }

    fn norm_heads(
        &self,
        qkv: &mut Buffer,
        span: HeadSpan,
        weight: &Buffer,
        eps: f32,
        rows: usize,
    ) -> Result<(), KernelError> {
        let weight = weight.host::<f32>()?;
        self.for_each_head(qkv, span, rows, |_, head| {
            let factor = inverse_rms(head, eps);
            for (x, w) in head.iter_mut().zip(weight) {
                *x *= factor * w;
            }
        })
    }

    fn rotate(&self, qkv: &mut Buffer, span: HeadSpan, table: &Buffer, rows: usize) -> Result<(), KernelError> {
        let (table, half) = (table.host::<f32>()?, span.dim / 2);
        self.for_each_head(qkv, span, rows, |t, head| {
            let (cos, sin) = table[t * span.dim..][..span.dim].split_at(half);
            let (low, high) = head.split_at_mut(half);
            for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        })
    }

    fn add(&self, x: &mut Buffer, y: &Buffer, elements: usize) -> Result<(), KernelError> {
        for (x, y) in x.host_mut::<f32>()?[..elements].iter_mut().zip(y.host::<f32>()?) {
            *x += y;
        }
        Ok(())
    }

    /// One pass over the rows: each is still in the nearest cache when it is normed.
    fn add_norm(
        &self,
        x: &mut Buffer,
        y: &Buffer,
        weight: &Buffer,
        eps: f32,
        rows: usize,
        out: &mut Buffer,
    ) -> Result<(), KernelError> {
        let (y, weight) = (y.host::<f32>()?, weight.host::<f32>()?);
        let width = weight.len();
        let (x, out) = (&mut x.host_mut::<f32>()?[..rows * width], &mut out.host_mut::<f32>()?[..rows * width]);
        self.threads.zip_chunks_mut(x, out, width, 2 * width, |t, x, out| {
            for (x, y) in x.iter_mut().zip(&y[t * width..][..width]) {
                *x += y;
            }
            norm_row(x, weight, eps, out);
        });
        Ok(())
    }

    fn silu_mul(&self, gate_up: &Buffer, width: usize, rows: usize, out: &mut Buffer) -> Result<(), KernelError> {
        let gate_up = gate_up.host::<f32>()?;
        let isa = self.isa;
        self.threads.chunks_mut(&mut out.host_mut::<f32>()?[..rows * width], width, width * EXP_COST, |t, out| {
            let (gate, up) = gate_up[t * 2 * width..][..2 * width].split_at(width);
            device::dispatch!(isa, silu_mul_row(gate: &[f32], up: &[f32], out: &mut [f32]));
        });
        Ok(())
    }

    fn gather(&self, x: &Buffer, rows: &[u32], width: usize, out: &mut Buffer) -> Result<(), KernelError> {
        let x = x.host::<f32>()?;
        for (&row, out) in rows.iter().zip(out.host_mut::<f32>()?.chunks_mut(width)) {
            out.copy_from_slice(&x[row as usize * width..][..width]);
        }
        Ok(())
    }
}

impl Cpu {
    /// Calls `f(row, head)` for every head of the span.
    fn for_each_head(
        &self,
        qkv: &mut Buffer,
        span: HeadSpan,
        rows: usize,
        f: impl Fn(usize, &mut [f32]) + Sync + Send,
    ) -> Result<(), KernelError> {
        let qkv = &mut qkv.host_mut::<f32>()?[..rows * span.stride];
        self.threads.chunks_mut(qkv, span.stride, span.heads * span.dim * 2, |t, row| {
            for head in row[span.first * span.dim..][..span.heads * span.dim].chunks_mut(span.dim) {
                f(t, head);
            }
        });
        Ok(())
    }
}

/// `out = x / sqrt(mean(x²) + eps) * weight`.
fn norm_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let factor = inverse_rms(x, eps);
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * factor * w;
    }
}

/// `1 / sqrt(mean(row²) + eps)`, summed in sixteen lanes and then over the lanes.
fn inverse_rms(row: &[f32], eps: f32) -> f32 {
    let (vectors, tail) = row.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for vector in vectors {
        for (sum, x) in lanes.iter_mut().zip(vector) {
            *sum += x * x;
        }
    }
    let squares = lanes.iter().sum::<f32>() + tail.iter().map(|x| x * x).sum::<f32>();
    1.0 / (squares / row.len() as f32 + eps).sqrt()
}

/// `silu(x) = x * sigmoid(x)`, with the sigmoid from exp(-|x|), which never overflows.
#[inline(always)]
fn silu_mul_row<L: Lanes>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((gate, up), out) in gate.chunks(LANES).zip(up.chunks(LANES)).zip(out.chunks_mut(LANES)) {
        let mut e = [0.0f32; LANES];
        for (e, x) in e.iter_mut().zip(gate) {
            *e = -x.abs();
        }
        L::load(&e.clone()).exp().store(&mut e);
        for (((out, x), u), e) in out.iter_mut().zip(gate).zip(up).zip(e) {
            let sigmoid = if *x >= 0.0 { 1.0 } else { e } / (1.0 + e);
            *out = x * sigmoid * u;
        }
    }
}
