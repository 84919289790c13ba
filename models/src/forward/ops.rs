//! Layer operations other than matrix products and attention: embeddings, norms, rotary embedding, activations, experts, gathers.
//!
//! [`LayerOps`] has one implementation per kind of backend: plain functions on a CPU ([`super::cpu`]), launches on devices with
//! kernels ([`super::launched`]). One operation is what a GPU does in one kernel, so that one interpreter serves both. Each
//! output row depends on its own input row alone.

use std::ops::Range;

use attention_kernels::{Dtype, KernelError, KernelSet, KvCache, Workspace};
use device::{Buffer, Device};
use linear::Matrix;

use super::adapters::Adapters;
use super::linear::{Linear, LoadedExperts, Norm};
use super::loaded::{AttentionLayer, MixingLayer, RecurrentLayer};
use super::op::{AttentionPlan, HeadRows, StreamStep};
use super::ranks::Ranks;
use super::{ForwardBatch, StepLimits};
use crate::decoder::{Activation, Attention, Choice, Experts, Indexer, Latent, Recurrent};

/// Arguments of [`LayerOps::qk_norm_rope_cache`].
pub(super) struct QkvRows<'a> {
    /// `[rows, (num_heads + 2 * own_kv_heads) * head_dim]`: queries, keys, values, and behind them the output gate.
    pub qkv: &'a mut Buffer,
    pub rows: usize,
    pub layer: &'a Attention,
    pub query_norm: Option<&'a Norm>,
    pub key_norm: Option<&'a Norm>,
    pub value_norm: Option<&'a Norm>,
    /// The [`LayerOps::rope_table`] of the rows.
    pub rope: Option<&'a Buffer>,
    /// The layer's group in the batch, which has one for each view.
    pub group: usize,
    /// [`AttentionLayer::key_offset`].
    pub key_offset: Option<&'a Buffer>,
    /// `None` for a layer without a cache.
    pub cache: Option<&'a KvCache>,
    /// Write keys and values to the cache too. Only for devices with such a kernel.
    pub fused: bool,
}

impl<'a> QkvRows<'a> {
    /// The rows of a layer, without a cache. `norms` are those of the model, `ropes` its rotary tables.
    pub fn of(
        layer: &'a AttentionLayer,
        plan: AttentionPlan,
        (norms, ropes): (&'a [Norm], &'a [Buffer]),
        qkv: &'a mut Buffer,
        rows: usize,
    ) -> QkvRows<'a> {
        let norm = |index: Option<usize>| index.map(|index| &norms[index]);
        QkvRows {
            qkv,
            rows,
            layer: &layer.declared,
            query_norm: norm(plan.query_norm),
            key_norm: norm(plan.key_norm),
            value_norm: norm(plan.value_norm),
            rope: plan.table.map(|table| &ropes[table]),
            group: layer.view,
            key_offset: layer.key_offset.as_ref(),
            cache: None,
            fused: false,
        }
    }
}

/// Arguments of [`LayerOps::attend_both`].
pub(super) struct BothRows<'a> {
    pub layer: &'a AttentionLayer,
    pub qkv: &'a Buffer,
    pub output: &'a mut Buffer,
}

/// Arguments of [`LayerOps::latent_rows`].
pub(super) struct LatentRows<'a> {
    pub layer: &'a Attention,
    pub latent: &'a Latent,
    pub rows: usize,
    /// `[rows, num_heads, nope_dim + rope_dim]`; the rotated parts are overwritten.
    pub queries: &'a mut Buffer,
    /// `[rows, rank + rope_dim]`; overwritten.
    pub latents: &'a mut Buffer,
    pub norm: &'a Norm,
    pub rope: &'a Buffer,
    /// `[rows, num_heads + 1, rank + rope_dim]`: queries, of which only the last `rope_dim` elements are written, then the key.
    pub out: &'a mut Buffer,
}

/// What [`LayerOps::copy_heads`] copies from one buffer to another, given the first element in each.
#[derive(Clone, Copy)]
pub(super) struct HeadSizes {
    pub rows: usize,
    pub heads: usize,
    /// Elements of a head that are copied.
    pub width: usize,
    /// Elements between rows and between heads of the source.
    pub from: [usize; 2],
    /// The same of the target.
    pub to: [usize; 2],
}

/// Arguments of [`LayerOps::index_rows`].
pub(super) struct IndexRows<'a> {
    pub layer: &'a Attention,
    pub latent: &'a Latent,
    pub indexer: &'a Indexer,
    pub rows: usize,
    /// `[rows, heads, dim]`.
    pub queries: &'a mut Buffer,
    /// `[rows, rank + rope_dim + dim]`, of which the last `dim` elements are changed.
    pub latents: &'a mut Buffer,
    pub norm: &'a Norm,
    pub rope: &'a Buffer,
}

/// Arguments of [`LayerOps::attend_chosen`].
pub(super) struct ChosenRows<'a> {
    pub batch: &'a ForwardBatch,
    pub layer: &'a AttentionLayer,
    pub latent: &'a Latent,
    pub choice: &'a Choice,
    pub query: &'a Buffer,
    /// Queries of the indexer, and the factors of its heads.
    pub index: [&'a Buffer; 2],
    pub output: &'a mut Buffer,
    pub cache: &'a KvCache,
}

/// Arguments of [`LayerOps::head_linear`].
pub(super) struct HeadProduct<'a> {
    pub kernels: &'a KernelSet,
    pub device: &'a dyn Device,
    /// One per head; on a device that launches kernels, one whose matrices are stacked.
    pub linears: &'a [Linear],
    /// Heads, outputs and inputs of each.
    pub shape: [usize; 3],
    pub rows: usize,
    pub x: &'a Buffer,
    pub from: HeadRows,
    pub y: &'a mut Buffer,
    pub to: HeadRows,
    /// Scratch of one head: inputs, outputs.
    pub scratch: [&'a mut Buffer; 2],
}

/// Arguments of [`LayerOps::recurrent`].
pub(super) struct RecurrentRows<'a> {
    pub batch: &'a ForwardBatch,
    pub layer: &'a RecurrentLayer,
    /// Norm of the output of each value head, before the gate.
    pub norm: Option<&'a Norm>,
    /// Which part of the layer is computed.
    pub part: RecurrentPart<'a>,
    /// `[rows, projections]`: q, k, v, z, and what the rule reads besides.
    pub projected: &'a Buffer,
    /// `[rows, value_heads * value_dim]`.
    pub output: &'a mut Buffer,
    pub rows: usize,
    /// States of value heads, in the keys and in the values of a page ([`Recurrent::heads_in_keys`]).
    pub cache: &'a mut KvCache,
}

/// Part of a recurrent layer between linear layers. Each part has the state that it reads and writes for itself.
#[derive(Clone, Copy)]
pub(super) enum RecurrentPart<'a> {
    /// Convolution and matrix.
    Whole,
    /// The convolution of a selective state space.
    Convolution,
    /// The matrix of a selective state space.
    Matrix {
        /// `[rows, value_width]`.
        values: &'a Buffer,
        /// `[rows, value_width]`, before the softplus.
        steps: &'a Buffer,
        /// `[rows, 2 * key_dim]`: k and q.
        keys: &'a Buffer,
        /// Norms of k and of q.
        norms: [&'a Norm; 2],
    },
    /// Convolution and matrix of a delta net with decays of channels.
    Channels {
        /// `[rows, value_heads * key_dim]`, before the softplus.
        steps: &'a Buffer,
        /// `[rows, value_width]`, before the sigmoid.
        gates: &'a Buffer,
    },
}

impl RecurrentPart<'_> {
    /// Where the state of the part lies in that of a head.
    pub fn state(&self, layer: &Recurrent) -> Range<usize> {
        match self {
            RecurrentPart::Whole | RecurrentPart::Channels { .. } => 0..layer.head_state(),
            RecurrentPart::Convolution => 0..layer.head_tail(),
            RecurrentPart::Matrix { .. } => layer.head_tail()..layer.head_state(),
        }
    }
}

/// Arguments of [`LayerOps::streams`].
pub(super) struct StreamRows<'a> {
    pub step: StreamStep,
    /// Weights of the layer that mixes or corrects.
    pub layer: Option<&'a MixingLayer>,
    pub rows: usize,
    /// Elements of a row of a stream.
    pub width: usize,
    /// Number of streams but the first.
    pub count: usize,
    /// `[rows, width]`.
    pub stream: &'a mut Buffer,
    /// `[rows, count, width]`.
    pub others: &'a mut Buffer,
    /// `[rows, width]`.
    pub mixture: &'a mut Buffer,
    /// `[rows, width]`.
    pub branch: &'a mut Buffer,
    /// `[rows, count + 1]`.
    pub scores: &'a Buffer,
}

/// Arguments of [`LayerOps::experts`].
pub(super) struct ExpertRows<'a> {
    pub declared: &'a Experts,
    pub loaded: &'a LoadedExperts,
    pub kernels: &'a KernelSet,
    pub device: &'a dyn Device,
    pub rows: usize,
    pub x: &'a Buffer,
    /// Logits of the router, and behind them the gate of the shared network. Overwritten.
    pub scores: &'a mut Buffer,
    /// The result. Holds the output of the shared network before, if there is one.
    pub mixed: &'a mut Buffer,
    /// Scratch of one expert: rows of `x`, projections, this rank's part of their activation, output, activation of all ranks.
    pub scratch: [&'a mut Buffer; 5],
    /// The ranks that compute the same experts.
    pub ranks: &'a mut Option<Ranks>,
}

/// Output rows of an operation: in the model's type, or quantised to 8 bits ([`RowBlock`](linear::RowBlock)s), which only a
/// CPU supports.
pub(super) enum Out<'a> {
    Numbers(&'a mut Buffer),
    Q8(&'a mut Buffer),
}

/// Operations of a backend other than linear layers and attention. Rows are of the model's type; weights of norms, rotary
/// tables and logits are float32. The defaults are those of a CPU, which reads the batch itself.
pub(super) trait LayerOps: Send + Sync {
    /// Allocates memory for steps of this size.
    fn reserve(&mut self, _limits: &StepLimits) -> Result<(), KernelError> {
        Ok(())
    }
    /// Copies a batch, and the rows of adapters that were set, to where the other operations and the kernels read them. `fixed`:
    /// choose grids that fit contexts of any length and this number of rows of a sequence, as a graph needs them.
    fn load(&mut self, _: &ForwardBatch, _fixed: Option<usize>, _: Option<&mut Adapters>) -> Result<(), KernelError> {
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
    /// Row t of `out` = `scale`, rounded to the model's type, times the embedding of token t of the loaded batch.
    fn embed(&self, batch: &ForwardBatch, table: &Matrix, scale: f32, out: &mut Buffer) -> Result<(), KernelError>;
    /// Row t of `x` += row `position + offset` of the table, for the position of token t of the loaded batch.
    fn add_positions(
        &self,
        batch: &ForwardBatch,
        table: &Matrix,
        offset: usize,
        x: &mut Buffer,
    ) -> Result<(), KernelError>;
    /// Row t of `x` += the row of the table for the type of token t of the loaded batch.
    fn add_types(&self, batch: &ForwardBatch, table: &Matrix, x: &mut Buffer) -> Result<(), KernelError>;
    /// Row t of `out` = c·cos(p·f) for all frequencies f of a rotary embedding, then c·sin(p·f); p is the position of token t and
    /// c the embedding's attention factor.
    fn rope_table(&self, table: usize, batch: &ForwardBatch, out: &mut Buffer) -> Result<(), KernelError>;
    /// `out` = the norm of `x`.
    fn norm(&self, x: &Buffer, norm: &Norm, rows: usize, out: Out<'_>) -> Result<(), KernelError>;
    /// `x += scale * y`, rounded to the type after each operation, for rows of `width` elements.
    fn add(&self, x: &mut Buffer, y: &Buffer, scale: f32, rows: usize, width: usize) -> Result<(), KernelError>;
    /// `x += scale * y`, then `y`, or `q8` if given, = the norm of `x`.
    fn add_norm(
        &self,
        x: &mut Buffer,
        y: &mut Buffer,
        scale: f32,
        norm: &Norm,
        rows: usize,
        q8: Option<&mut Buffer>,
    ) -> Result<(), KernelError>;
    /// Clamping, norm and rotation (where the layer has them) of query and key heads in place, the changes of keys for an 8-bit
    /// cache, and the cache write if `fused`.
    fn qk_norm_rope_cache(&self, batch: &ForwardBatch, args: QkvRows<'_>) -> Result<(), KernelError>;
    /// Attention of each row to the rows of its sequence, before and behind it.
    fn attend_both(&self, batch: &ForwardBatch, args: BothRows<'_>) -> Result<(), KernelError>;
    /// Norms the latents, rotates their keys and the queries, and writes both where latent attention reads them.
    fn latent_rows(&self, args: LatentRows<'_>) -> Result<(), KernelError>;
    /// Copies `width` elements of each of `heads` heads of each row.
    fn copy_heads(&self, size: HeadSizes, from: (&Buffer, usize), to: (&mut Buffer, usize)) -> Result<(), KernelError>;
    /// Norms index keys, and rotates index keys and queries.
    fn index_rows(&self, args: IndexRows<'_>) -> Result<(), KernelError>;
    /// Attention of each row to the tokens that are chosen for it. The choice is kept for layers behind.
    fn attend_chosen(&mut self, args: ChosenRows<'_>) -> Result<(), KernelError>;
    /// `y = x·Wᵀ` for each head with its own matrix.
    fn head_linear(&self, args: HeadProduct<'_>) -> Result<(), KernelError>;
    /// The recurrence of the sequences of a batch ([`Recurrent`]), token by token, with their states in pages
    /// ([`super::groups`]).
    fn recurrent(&mut self, args: RecurrentRows<'_>) -> Result<(), KernelError>;
    /// `attended *= sigmoid(gate)` for rows of `width` elements; the gate ends each row of `qkv`, of `stride` elements.
    fn gate(
        &self,
        attended: &mut Buffer,
        qkv: &Buffer,
        stride: usize,
        width: usize,
        rows: usize,
    ) -> Result<(), KernelError>;
    /// `out = activation(gate) * up`; rows of `gate_up` are `[gate; width][up; width]`. Without a gate `out = activation(up)`.
    fn activate(
        &self,
        activation: Activation,
        gated: bool,
        gate_up: &Buffer,
        width: usize,
        rows: usize,
        out: Out<'_>,
    ) -> Result<(), KernelError>;
    /// `out = activation(gate) * inputs`, rows of `width` elements; those of `inputs` begin at element `first` of rows of `stride`.
    fn activate_by(
        &self,
        activation: Activation,
        gate: &Buffer,
        inputs: (&Buffer, usize, usize),
        size: (usize, usize),
        out: &mut Buffer,
    ) -> Result<(), KernelError>;
    /// An operation on several residual streams.
    fn streams(&self, args: StreamRows<'_>) -> Result<(), KernelError>;
    /// Lessens the first `width` elements of each row, of twice as many, by their mean and `deviations` standard deviations, and sets
    /// those that are then negative to 0.
    fn sparsify(&self, x: &mut Buffer, width: usize, deviations: f32, rows: usize) -> Result<(), KernelError>;
    /// `x *= factor` for rows of `width` elements.
    fn scale(&self, x: &mut Buffer, factor: f32, rows: usize, width: usize) -> Result<(), KernelError>;
    /// The weighted sum of the outputs of the experts that the router chooses for each row.
    fn experts(&mut self, args: ExpertRows<'_>) -> Result<(), KernelError>;
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
    /// Multiplies float32 logits by `scale`, then caps each x to `c * tanh(x / c)` if `soft_cap` is `Some(c)`.
    fn finish_logits(
        &self,
        logits: &mut Buffer,
        count: usize,
        scale: f32,
        soft_cap: Option<f32>,
    ) -> Result<(), KernelError>;
    /// Waits for the device and returns the first `elements` of a buffer of type `dtype` in float32. The only wait of a step.
    fn to_host<'a>(&'a mut self, buffer: &'a Buffer, dtype: Dtype, elements: usize) -> Result<&'a [f32], KernelError>;
}
