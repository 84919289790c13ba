//! Self-attention over the paged cache.

use serde::Serialize;

use super::linear::Linear;
use super::norm::Norm;
use super::rope::Rope;

/// Self-attention with grouped queries (Ainslie et al., "GQA", 2023).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Attention {
    /// Name of the module in the checkpoint, under which the scales of an 8-bit cache are looked up.
    pub name: String,
    /// Projections to queries, keys and values, `[(num_heads + 2 * num_kv_heads) * head_dim, inputs]`, and behind them to the
    /// output gate, `[num_heads * head_dim, inputs]`, if there is one.
    pub qkv: Linear,
    /// Number and size of the heads.
    pub heads: Heads,
    /// `Some(c)`: queries, keys and values are clamped to -c..=c after the projection.
    pub clip: Option<f32>,
    /// Norm of the queries; its groups are heads or the whole row.
    pub query_norm: Option<Norm>,
    /// Norm of the keys.
    pub key_norm: Option<Norm>,
    /// Whether these norms come after the rotary embedding.
    pub norm_after_rope: bool,
    /// Rotary embedding of queries and keys.
    pub rope: Option<Rope>,
    /// Growth of the queries with their position.
    pub query_growth: Option<QueryGrowth>,
    /// Sliding window. `Some(w)`: position i attends only to positions i-w+1..=i. `None`: to the whole context.
    pub window: Option<usize>,
    /// Factor of the scores (products of queries and keys), usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// `Some(c)`: a score s becomes `c * tanh(s / c)`.
    pub soft_cap: Option<f32>,
    /// Slopes of ALiBi (Press et al., 2022), one per head: a score is increased by `slope * (key position - query position)`.
    pub alibi_slopes: Option<Vec<f32>>,
    /// Name of the attention sinks: a learned logit per head that takes part in the softmax and attends to nothing.
    pub sinks: Option<String>,
    /// Whether the output of attention is multiplied by `sigmoid(gate)`, the last rows of `qkv`.
    pub gate: bool,
    /// Output projection, `[hidden_size, num_heads * head_dim]`.
    pub output: Linear,
}

/// Number and size of the heads of an attention layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Heads {
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl Heads {
    /// Elements per row of fused queries, keys and values.
    pub fn qkv_width(self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }

    /// Elements per row of queries, and of the output of attention.
    pub fn query_width(self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Elements per row of keys, and of values.
    pub fn key_width(self) -> usize {
        self.num_kv_heads * self.head_dim
    }
}

/// Queries at position p are multiplied by `1 + beta * ln(1 + floor(p / original))` after the rotary embedding (Llama 4,
/// Ministral 3).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct QueryGrowth {
    /// Rate of the growth (`llama_4_scaling_beta`).
    pub beta: f32,
    /// Context length of the pre-training.
    pub original_max_position_embeddings: usize,
}

impl QueryGrowth {
    /// The factor at a position.
    pub fn at(self, position: u32) -> f32 {
        let periods = position as usize / self.original_max_position_embeddings.max(1);
        1.0 + self.beta * (1.0 + periods as f32).ln()
    }
}

/// Slopes of ALiBi for `num_heads` heads (Press et al., "Train Short, Test Long", 2022): the powers of `2^(-bias_max / n)` for the
/// greatest power of two n, and for further heads the odd powers of its square root. `bias_max` is 8 in the paper.
pub fn alibi_slopes(num_heads: usize, bias_max: f64) -> Vec<f32> {
    let n = if num_heads.is_power_of_two() { num_heads } else { num_heads.next_power_of_two() / 2 };
    let slope = |power: usize, of: usize| (-bias_max * power as f64 / of as f64).exp2() as f32;
    let first = (1..=n).map(|k| slope(k, n));
    let rest = (0..num_heads - n).map(|k| slope(2 * k + 1, 2 * n));
    first.chain(rest).collect()
}
