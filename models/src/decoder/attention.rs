//! Self-attention: over the paged cache, or to both sides over the rows of a sequence.

use attention_kernels::BlockSparse;
use serde::Serialize;

use super::Mixer;
use super::linear::Linear;
use super::norm::Norm;
use super::rope::Rope;

/// Greatest size of a head: a larger one means a broken file.
pub(crate) const MAX_HEAD_DIM: u64 = 1 << 12;

/// Self-attention with grouped queries (Ainslie et al., "GQA", 2023).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Attention {
    /// Name of the module in the checkpoint, under which the scales of an 8-bit cache are looked up.
    pub name: String,
    /// Projections to queries, keys and values, `[(num_heads + 2 * own_kv_heads) * head_dim, inputs]` (narrower with a
    /// [`value_dim`](Attention::value_dim)), and behind them to the output gate, `[num_heads * head_dim, inputs]`, if there is one.
    pub qkv: Linear,
    /// A second product for queries, keys and values, of the normed embedding of a [predictor](super::Beside); the two are added.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beside: Option<Linear>,
    /// Number and size of the heads.
    pub heads: Heads,
    /// Which heads these are, if other ranks have more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<HeadShard>,
    /// `Some(c)`: queries, keys and values are clamped to -c..=c after the projection and the norms before the rotary embedding.
    pub clip: Option<f32>,
    /// Norm of the queries; its groups are heads or the whole row.
    pub query_norm: Option<Norm>,
    /// Norm of the keys.
    pub key_norm: Option<Norm>,
    /// Norm of the values.
    pub value_norm: Option<Norm>,
    /// Whether these norms come after the rotary embedding.
    pub norm_after_rope: bool,
    /// Rotary embedding of queries and keys.
    pub rope: Option<Rope>,
    /// Growth of the queries with their position.
    pub query_growth: Option<QueryGrowth>,
    /// Sliding window. `Some(w)`: position i attends only to positions i-w+1..=i. `None`: to the whole context.
    pub window: Option<usize>,
    /// Whether a position also attends to those behind it, with a window to positions less than w away. Such a layer has no cache:
    /// all rows of a sequence are in one step. Sinks and blocks of the context are for the other layers.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub both_sides: bool,
    /// What is added to the scores of a layer that sees both sides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distances: Option<Distances>,
    /// Blocks of the context that each head sees; `None`: all. Keys and values of all blocks are kept: other heads, and later
    /// queries, see those that one skips.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sparse: Option<BlockSparse>,
    /// Factor of the scores (products of queries and keys), usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// `Some(c)`: a score s becomes `c * tanh(s / c)`.
    pub soft_cap: Option<f32>,
    /// Slopes of ALiBi (Press et al., 2022), one per head: a score is increased by `slope * (key position - query position)`, in a
    /// layer that sees both sides decreased by `slope * distance`.
    pub alibi_slopes: Option<Vec<f32>>,
    /// Name of the attention sinks: a learned logit per head that takes part in the softmax and attends to nothing.
    pub sinks: Option<String>,
    /// Whether the output of attention is multiplied by `sigmoid(gate)`, the last rows of `qkv`.
    pub gate: bool,
    /// Keys and values are latent vectors.
    pub latent: Option<Latent>,
    /// Elements of a head's value, if they are fewer than those of a key, and at least half as many. In the cache a value is followed by
    /// copies of its first elements, and so is the output of a head, which nothing reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_dim: Option<usize>,
    /// `Some(i)`: the layer has queries alone and reads the keys and values of mixer i of [`Decoder::paged`], an attention layer
    /// before it with the same key/value heads and window.
    ///
    /// [`Decoder::paged`]: super::Decoder::paged
    pub shares: Option<usize>,
    /// Output projection, `[hidden_size, num_heads * head_dim]`.
    pub output: Linear,
}

/// Multi-head latent attention ("DeepSeek-V2", DeepSeek-AI, 2024, section 2.1) in its absorbed form.
///
/// The cache holds one vector per token, `[latent, rotated key]`, which is `qkv` of the token after the norm of the latent and the
/// rotation. It is the key of every head, and its latent is the value. What would expand the latent to the keys and values of a head
/// is applied to the query before attention and to the output after it:
///
/// ```text
/// q·k = q_nope · (K latent) + q_rope · key_rope = [Kᵀ q_nope, q_rope] · [latent, key_rope]
/// sum of p * (V latent) = V (sum of p * latent)
/// ```
///
/// [`Attention::heads`] are those of the cache: `num_kv_heads` is 1 and `head_dim` is that of the vector.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Latent {
    /// Projection of the input to a narrow query, and its norm.
    pub query_down: Option<(Linear, Norm)>,
    /// Projection to the queries, `[num_heads * (nope_dim + rope_dim), inputs]`: each head's plain part, then its rotated part.
    pub query: Linear,
    /// Norm of the latent.
    pub norm: Norm,
    /// Elements of the plain part of a query.
    pub nope_dim: usize,
    /// Elements of the rotated part of queries and keys.
    pub rope_dim: usize,
    /// Elements of the latent.
    pub rank: usize,
    /// Elements of a head's value.
    pub value_dim: usize,
    /// Which tokens a query attends to; `None`: all up to its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub choice: Option<Choice>,
    /// Kᵀ of each head, `[rank, nope_dim]`.
    pub absorb: Vec<Linear>,
    /// V of each head, `[value_dim, rank]`.
    pub expand: Vec<Linear>,
}

/// The tokens that a query of latent attention attends to ("DeepSeek-V3.2", DeepSeek-AI, 2025). The vector of a token in the cache
/// ends with an index key, which the queries of attention do not see.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::large_enum_variant)] // there is one per layer
pub enum Choice {
    /// The layer's own indexer chooses them.
    Own(Indexer),
    /// The layer uses the choice of the last indexer before it. Its own index keys are not used.
    Before {
        /// Greatest number of tokens.
        top_k: usize,
        /// Elements of an index key.
        dim: usize,
    },
}

/// Scores each token t for a query s and chooses the best, of equal ones the earlier:
///
/// ```text
/// score = sum over heads h of weights_h(x_s) / sqrt(heads) · max(query_h(s) · key(t) / sqrt(dim), 0)
/// ```
///
/// Queries are projections of the narrow query of attention. The first `rope_dim` elements of queries and keys are rotated, keys are
/// normed before.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Indexer {
    /// `[heads * dim, query rank]`.
    pub query: Linear,
    /// `[heads, inputs]`.
    pub weights: Linear,
    /// Norm of the keys, whose projection is the last rows of `qkv`.
    pub norm: Norm,
    /// Number of heads.
    pub heads: usize,
    /// Elements of a query and of a key.
    pub dim: usize,
    /// Greatest number of tokens.
    pub top_k: usize,
    /// Whether neighbours are rotated instead of halves.
    pub interleaved: bool,
}

impl Choice {
    /// Greatest number of tokens.
    pub fn top_k(&self) -> usize {
        match self {
            Choice::Own(Indexer { top_k, .. }) | Choice::Before { top_k, .. } => *top_k,
        }
    }

    /// Elements of an index key.
    pub fn dim(&self) -> usize {
        match self {
            Choice::Own(Indexer { dim, .. }) | Choice::Before { dim, .. } => *dim,
        }
    }
}

impl Latent {
    /// What chooses the tokens, if the layer has it.
    pub fn indexer(&self) -> Option<&Indexer> {
        match &self.choice {
            Some(Choice::Own(indexer)) => Some(indexer),
            Some(Choice::Before { .. }) | None => None,
        }
    }
}

impl From<Attention> for Mixer {
    fn from(attention: Attention) -> Mixer {
        Mixer::Attention(attention)
    }
}

impl Attention {
    /// Key heads in a row of `qkv`, and value heads: none if it reads those of another layer.
    pub fn own_kv_heads(&self) -> usize {
        if self.shares.is_some() { 0 } else { self.heads.num_kv_heads }
    }

    /// Elements per row of what attention reads: queries, keys, values, gate.
    pub fn row_width(&self) -> usize {
        match (&self.latent, self.value_dim) {
            (Some(_), _) => self.heads.query_width() + self.heads.head_dim,
            (None, Some(_)) => self.heads.qkv_width(),
            (None, None) => self.qkv.rows(),
        }
    }

    /// Elements per row of the output of attention.
    pub fn attended_width(&self) -> usize {
        let value = self.latent.as_ref().map_or(self.heads.head_dim, |latent| latent.rank);
        self.heads.num_heads * value
    }

    /// Linear layers in order of use, without those of single heads.
    pub(super) fn linears(&self) -> Vec<&Linear> {
        let latent = self.latent.as_ref();
        let down = latent.and_then(|latent| latent.query_down.as_ref()).map(|(down, _)| down);
        let query = latent.map(|latent| &latent.query);
        let indexer = latent.and_then(Latent::indexer).into_iter().flat_map(|it| [&it.query, &it.weights]);
        down.into_iter()
            .chain(query)
            .chain(indexer)
            .chain([&self.qkv])
            .chain(&self.beside)
            .chain([&self.output])
            .collect()
    }

    /// All linear layers.
    pub(super) fn linears_mut(&mut self) -> Vec<&mut Linear> {
        let mut all = vec![&mut self.qkv, &mut self.output];
        all.extend(&mut self.beside);
        if let Some(latent) = &mut self.latent {
            all.extend(latent.query_down.as_mut().map(|(down, _)| down));
            all.push(&mut latent.query);
            if let Some(Choice::Own(indexer)) = &mut latent.choice {
                all.extend([&mut indexer.query, &mut indexer.weights]);
            }
            all.extend(latent.absorb.iter_mut().chain(&mut latent.expand));
        }
        all
    }

    /// Norms in order of use.
    pub(super) fn norms(&self) -> Vec<&Norm> {
        let latent = self.latent.as_ref();
        let down = latent.and_then(|latent| latent.query_down.as_ref()).map(|(_, norm)| norm);
        let norms = self.query_norm.iter().chain(&self.key_norm).chain(&self.value_norm);
        let indexer = latent.and_then(Latent::indexer).map(|indexer| &indexer.norm);
        norms.chain(down).chain(indexer).chain(latent.map(|latent| &latent.norm)).collect()
    }
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

/// A learned bias for each head and bucket of distances from query to key (Raffel et al., "T5", 2020): half of the buckets are for keys
/// behind the query. Of a half, the first half are distances of their own, the others grow by a constant factor up to `reach`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Distances {
    /// Name of the tensor `[buckets, num_heads]`.
    pub table: String,
    /// Number of buckets, a multiple of 4.
    pub buckets: usize,
    /// Distance from which all others share the last bucket.
    pub reach: usize,
}

impl Distances {
    /// The bucket of a key this far behind the query; negative before it.
    pub fn bucket(&self, distance: isize) -> usize {
        let half = self.buckets / 2;
        let (first, away) = (if distance > 0 { half } else { 0 }, distance.unsigned_abs());
        let exact = half / 2;
        if away < exact {
            return first + away;
        }
        // In float32, as the library that trains these models has it.
        let (away, exact_f, reach) = (away as f32, exact as f32, self.reach as f32);
        let grown = ((away / exact_f).ln() / (reach / exact_f).ln() * (half - exact) as f32) as usize;
        first + (exact + grown).min(half - 1)
    }
}

/// The heads of a layer that a rank computes, among those of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HeadShard {
    /// The first query head, or value head of a recurrent layer.
    pub first: usize,
    /// The first key/value head, or key head of a recurrent layer.
    pub first_kv: usize,
    /// Number of query heads, or value heads, of all ranks.
    pub num_heads: usize,
    /// Number of key/value heads, or key heads, of all ranks.
    pub num_kv_heads: usize,
}

/// Queries at position p are multiplied by `1 + beta * ln(1 + floor((p + first) / original))` after the rotary embedding (Llama 4,
/// Ministral 3).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct QueryGrowth {
    /// Rate of the growth (`llama_4_scaling_beta`).
    pub beta: f32,
    /// Context length of the pre-training.
    pub original_max_position_embeddings: usize,
    /// Number of position 0.
    pub first: u32,
}

impl QueryGrowth {
    /// The factor at a position.
    pub fn at(self, position: u32) -> f32 {
        let periods = (position as usize + self.first as usize) / self.original_max_position_embeddings.max(1);
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
