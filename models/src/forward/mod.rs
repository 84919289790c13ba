//! The forward pass: tokens in, hidden states and logits out, keys and values in pages.
//!
//! ```text
//! tokens ─embed─▶ hidden ─┬─norm─▶ qkv ─▶ qk norm, rope, cache write ─▶ paged attention ─▶ output ─▶(+)─┐
//!                         └───────────────────────────── residual ──────────────────────────────────┘  │
//!                    ┌─────────────────────────────────────────────────────────────────────────────────┘
//!                    └┬─norm─▶ gate_up ─▶ silu and mul ─▶ down ─▶(+)─▶ next layer … ─▶ norm ─▶ logits of chosen rows
//!                     └──────────────── residual ──────────────────┘
//! ```
//!
//! | file | what it owns |
//! |---|---|
//! | [`op`], [`program`] | the [`Decoder`](crate::Decoder) as a sequence of operations over registers, and the rewrites that merge some |
//! | [`pass`]; [`row_ops`], [`blocks`] | the interpreter: products and attention by the registry's kernels, the rest by [`ops::LayerOps`]; operations on single rows, and on blocks of rows by each thread of a CPU |
//! | [`ops`]; [`cpu`], [`rows`], [`routing`], [`recurrent`], [`streams`], [`chosen`], [`values`]; [`launched`], [`launched_both`], [`launched_chosen`], [`launched_experts`], [`launched_latent`], [`launched_recurrent`], [`launched_streams`], [`kernels`] | layer operations; on the CPU; on devices that launch kernels, and those kernels |
//! | [`model`], [`linear`], [`loaded`], [`scales`], [`outline`], [`weight_bytes`] | loading |
//! | [`step`], [`groups`] | memory: buffers of a step, groups of layers that share pages |
//! | [`adapters`] | LoRA adapters of the rows of a step |
//! | [`ranks`], [`stages`] | the exchange of rows between ranks; the stages of a pipeline |
//! | [`predictor`] | predictors of further tokens, which read hidden states of another model |
//! | [`warm_up`], [`graphs`], [`results`] | what is prepared before the first request; decode steps as CUDA graphs; logits and hidden states |
//!
//! **Memory.** All buffers of a step are allocated at start for the largest step ([`step::StepBuffers`]), so a step allocates
//! nothing and its peak is known before it runs.
//!
//! **Needed rows.** After the last attention, only rows whose results may be requested are computed further
//! ([`ForwardBatch::needed`]): usually the last one of a prompt.
//!
//! **Row-invariance.** Every operation computes a row from that row alone, or, in attention, from its sequence's context in
//! absolute order; see the docs of `attention_kernels` and `linear`.

mod adapters;
mod batch;
mod blocks;
mod chosen;
mod clock;
mod cpu;
mod graph_sizes;
mod graphs;
mod groups;
mod head_rows;
pub mod kernels;
mod key_offsets;
mod launched;
mod launched_both;
mod launched_chosen;
mod launched_experts;
mod launched_latent;
mod launched_recurrent;
mod launched_streams;
mod linear;
mod loaded;
mod model;
mod op;
mod ops;
mod outline;
mod pass;
mod predictor;
mod program;
mod ranks;
mod recurrent;
mod results;
mod routing;
mod row_ops;
mod scales;
mod stages;
mod step;
mod streams;
mod values;
mod warm_up;
mod weight_bytes;
mod writer;

pub use batch::{ForwardBatch, GroupBatch};
pub use graph_sizes::{GraphCount, draft_graph_sizes, graph_sizes};
pub use groups::PageLayout;
pub use linear::{Progress, check_weights, checkpoint_dtype, in_stored_forms, load_matrix};
pub use model::{Model, Observer};
pub use outline::MatrixOutline;
pub use predictor::head_tokens;
pub use scales::{kv_scale_bytes, layers_with_kv_scales};
pub use stages::{StageError, partition};
pub use step::{Fill, LOGIT_ROWS, States, StepLimits, most_drawn_rows};
pub use weight_bytes::{WeightBytes, weight_bytes, weight_bytes_beside};
