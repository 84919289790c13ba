//! The forward pass: tokens in, hidden states and logits out, keys and values in pages.
//!
//! ```text
//! tokens ─embed─▶ hidden ─┬─norm─▶ qkv ─ heads: (norm) rotate, cache write ─▶ paged attention ─▶ output ─▶(+)─┐
//!                         └──────────────────────────────── residual ──────────────────────────────────────┘  │
//!                    ┌────────────────────────────────────────────────────────────────────────────────────────┘
//!                    └┬─norm─▶ gate_up ─ silu·mul ─▶ down ─▶(+)─ next layer … ─▶ norm ─▶ logits of chosen rows
//!                     └────────────── residual ─────────────┘
//! ```
//!
//! Nothing here touches a number. The [`Decoder`](crate::Decoder) of a checkpoint is written out as a [`program`] of operations,
//! which [`pass`] runs: linear layers and attention by the kernels that the registry chose, the rest by the layer
//! operations of the device ([`ops::LayerOps`]).
//!
//! **Memory.** All buffers of a step are taken at start-up for the greatest step ([`step::StepBuffers`]), so a step
//! allocates nothing and its peak is known before it runs.
//!
//! **Needed rows.** After the last layer's attention only those rows go on whose results may be asked for
//! ([`ForwardBatch::needed`]): of a prompt usually the last one.
//!
//! **Graphs.** Where a device launches kernels, steps of single tokens are padded to one of a few sizes and replayed
//! ([`graphs`]).
//!
//! **Row-invariance.** Every operation computes a row from that row alone, or, in attention, from its sequence's
//! context in absolute order; see the docs of `attention_kernels` and `device::gemm`.

mod batch;
mod clock;
mod graph_sizes;
mod graphs;
mod groups;
pub mod kernels;
mod launched;
mod linear;
mod model;
mod ops;
mod pass;
mod program;
mod results;
mod rope;
mod scales;
mod step;

pub use batch::{ForwardBatch, GroupBatch};
pub use graph_sizes::{GraphCount, graph_sizes};
pub use groups::{LayerGroup, PageLayout};
pub use linear::{check_weights, checkpoint_dtype, weight_bytes};
pub use model::Model;
pub use scales::{kv_scale_bytes, layers_with_kv_scales};
pub use step::{Fill, LOGIT_ROWS, StepLimits};
