//! A decoder, or an encoder, as data: what each layer of a checkpoint computes, and the names of the tensors that hold its weights.
//!
//! A family declares a [`Decoder`] from `config.json` (`families/`). It is plain data: no weights, no buffers, no device.
//! Everything else is derived by iterating over it: loading ([`Decoder::linears`], [`Decoder::norms`]), byte counts, cache
//! groups ([`Decoder::attention`]), the buffers of a step, and the program of the forward pass ([`Decoder::branches`]).
//!
//! ```text
//! Decoder   embedding, layers, final norm, head
//! Layer     branches, one after the other: stream += mixer(norm(stream)); the first ones may be parallel: stream += their sum
//! Mixer     Attention   qkv ─▶ qk norm, rope, cache write ─▶ attention ─▶ output
//!           Recurrent   projections ─▶ convolution, update of the state in its page ─▶ norm, gate ─▶ output
//!           Mlp         gate_up ─▶ activation(gate) * up ─▶ down
//!           Experts     router ─▶ for each chosen expert: gate_up ─▶ activation ─▶ down ─▶ weighted sum
//!           PerLayer    gate ─▶ activation(gate) * the layer's inputs of the token ─▶ projection
//!           Laurel      left ─▶ right ─▶ norm ─▶ plus the input
//!           Sum         branches of the same stream, added
//! Linear    one or several tensors of the checkpoint, or rows of them, stacked
//! ```
//!
//! A family builds its layers from the parts in `families/common.rs` and changes the fields that differ. `quire plan --decoder
//! FOLDER` prints the result, one line per part.

mod attention;
mod beside;
mod classifier;
mod layer;
mod linear;
mod mlp;
mod norm;
mod recurrent;
mod rope;
mod shard;
mod stage;
mod streams;
mod tree;

use std::collections::BTreeSet;

use ::linear::Purpose;
pub use attention_kernels::layer::Activation;
use serde::Serialize;

use crate::lora::AdapterLimits;

pub(crate) use attention::MAX_HEAD_DIM;
pub use attention::{Attention, Choice, Distances, HeadShard, Heads, Indexer, Latent, QueryGrowth, alibi_slopes};
pub use beside::Beside;
pub use classifier::{Classifier, Dense, DenseActivation};
pub use layer::{Branch, Layer};
pub use linear::{Form, Linear, Part, Pick, Role};
pub use mlp::{Experts, Groups, Laurel, Mlp, PerLayer, Routing, Scores};
pub(crate) use mlp::{MAX_EXPERT_GROUPS, MAX_EXPERTS};
pub use norm::{Norm, NormKind};
#[cfg(test)]
pub(crate) use recurrent::Piece;
pub use recurrent::{ChannelDelta, Recurrent, Rule, Selective};
pub use rope::{Rope, RopeScaling};
pub use shard::{Reduce, ShardError};
pub use stage::{LayerGroup, Stage};
pub(crate) use streams::MAX_STREAMS;
pub use streams::{Mixing, Streams};

/// A transformer of one stack of layers: a decoder, or an [encoder](Decoder::is_encoder).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decoder {
    /// From tokens to the first rows of the residual stream.
    pub embedding: Embedding,
    /// Layers, in order.
    pub layers: Vec<Layer>,
    /// Norm after the last layer.
    pub final_norm: Option<Norm>,
    /// From hidden states to logits.
    pub head: Head,
    /// Further residual streams.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub streams: Option<Streams>,
    /// Layers in front of which the stream is kept for a [predictor](Beside).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub taps: Vec<usize>,
    /// Sizes of the memory for LoRA adapters; `None`: the decoder takes none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapters: Option<AdapterLimits>,
    /// How the decoder continues others; `None`: it has all layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage: Option<Stage>,
}

/// `norm(projection(scale * tokens[token] + positions[position] + types[type]))`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Embedding {
    /// Table of the tokens, `[vocab_size, width]`.
    pub tokens: Linear,
    /// Factor of the tokens' rows, rounded to the type of the computation.
    pub scale: f32,
    /// Learned position embeddings.
    pub positions: Option<Positions>,
    /// Table of token types, `[types, width]`: type 0, and type 1 from the second text of a pair on, if there are as many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub types: Option<Linear>,
    /// Projection to the width of the residual stream.
    pub projection: Option<Linear>,
    /// Norm of the result.
    pub norm: Option<Norm>,
    /// Inputs of [`PerLayer`] networks.
    pub per_layer: Option<PerLayerInputs>,
    /// Hidden states of another decoder, which a predictor reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
}

/// Inputs that every layer has of its own for a token with the first row x of the residual stream:
/// `(norm(x_scale * projection(x)) + token_scale * tokens[token]) / sqrt(2)`, `[layers, width]`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PerLayerInputs {
    /// Table of the tokens, `[vocab_size, layers * width]`.
    pub tokens: Linear,
    /// Factor of the tokens' rows, rounded to the type of the computation.
    pub token_scale: f32,
    /// Projection of the first row of the stream, `[layers * width, hidden_size]`.
    pub projection: Linear,
    /// Factor of its result.
    pub x_scale: f32,
    /// Norm of each layer's part.
    pub norm: Norm,
    /// Elements of a layer's part.
    pub width: usize,
}

/// Learned position embeddings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Positions {
    /// Table of the positions, `[positions + offset, width]`.
    pub table: Linear,
    /// Row of position 0.
    pub offset: usize,
}

/// `soft_cap(scale * linear(activation(projection(hidden))))`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Head {
    /// Projection from the width of the residual stream to that of the token table, or the first layer of a classifier that pools behind it.
    pub projection: Option<Linear>,
    /// Activation of its result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activation: Option<Activation>,
    /// Output projection, `[vocab_size, width]`; `None` if the embedding's weights are used (`tie_word_embeddings`).
    pub linear: Option<Linear>,
    /// Factor of the logits.
    pub scale: f32,
    /// `Some(c)`: a logit x becomes `c * tanh(x / c)`.
    pub soft_cap: Option<f32>,
    /// Name of a tensor of integers, if the head has rows for some tokens alone: row i is that of token `i + tensor[i]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<String>,
    /// Rows that are no token: their logits are −∞. Only a head without a bias and a soft cap has them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub masked: Vec<u32>,
    /// What computes labels of texts, in place of logits of tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classifier: Option<Classifier>,
}

/// The function that a branch applies to its rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::large_enum_variant)] // there is one per branch
pub enum Mixer {
    /// Self-attention, over the paged cache or over the rows of a sequence.
    Attention(Attention),
    /// A recurrent layer, whose state is kept in pages of the cache.
    Recurrent(Recurrent),
    /// A feed-forward network.
    Mlp(Mlp),
    /// A mixture of experts.
    Experts(Experts),
    /// A network with inputs of the layer's own.
    PerLayer(PerLayer),
    /// A narrow network, added to its input.
    Laurel(Laurel),
    /// The sum of feed-forward branches that read the same stream. The branch that holds it has no norm of its input, and of the
    /// branches within only norms are used.
    Sum(Vec<Branch>),
}

impl Mixer {
    /// Linear layers of the mixer, in order of use. Those of experts are separate ([`Decoder::experts`]).
    pub fn linears(&self) -> Vec<&Linear> {
        match self {
            Mixer::Attention(attention) => attention.linears(),
            Mixer::Recurrent(layer) => layer.linears(),
            Mixer::Mlp(mlp) => vec![&mlp.gate_up, &mlp.down],
            Mixer::Experts(experts) => {
                let shared = experts.shared.iter().flat_map(|mlp| [&mlp.gate_up, &mlp.down]);
                std::iter::once(&experts.router).chain(experts.narrow.iter().flatten()).chain(shared).collect()
            }
            Mixer::PerLayer(layer) => vec![&layer.gate, &layer.projection],
            Mixer::Laurel(layer) => vec![&layer.left, &layer.right],
            Mixer::Sum(branches) => branches.iter().flat_map(|branch| branch.mixer.linears()).collect(),
        }
    }

    /// All linear layers of the mixer, those of experts too.
    fn linears_mut(&mut self) -> Vec<&mut Linear> {
        match self {
            Mixer::Attention(attention) => attention.linears_mut(),
            Mixer::Recurrent(layer) => layer.linears_mut(),
            Mixer::Mlp(mlp) => vec![&mut mlp.gate_up, &mut mlp.down],
            Mixer::Experts(Experts { router, experts, shared, narrow, .. }) => {
                let networks = experts.iter_mut().chain(shared).flat_map(|mlp| [&mut mlp.gate_up, &mut mlp.down]);
                std::iter::once(router).chain(narrow.iter_mut().flatten()).chain(networks).collect()
            }
            Mixer::PerLayer(layer) => vec![&mut layer.gate, &mut layer.projection],
            Mixer::Laurel(layer) => vec![&mut layer.left, &mut layer.right],
            Mixer::Sum(branches) => branches.iter_mut().flat_map(|branch| branch.mixer.linears_mut()).collect(),
        }
    }

    /// Norms within the mixer, in order of use.
    fn norms(&self) -> Vec<&Norm> {
        match self {
            Mixer::Attention(attention) => attention.norms(),
            Mixer::Recurrent(layer) => layer.norms(),
            Mixer::Experts(experts) => experts.router_norm.iter().collect(),
            Mixer::Laurel(layer) => vec![&layer.norm],
            Mixer::Sum(branches) => branches.iter().flat_map(Branch::norms).collect(),
            Mixer::Mlp(_) | Mixer::PerLayer(_) => Vec::new(),
        }
    }

    /// Tensors of the mixer, with their shapes, that are neither weights of a linear layer nor of a norm.
    fn vectors(&self) -> Vec<(&String, Vec<usize>)> {
        match self {
            Mixer::Attention(Attention { sinks, heads, shard, distances, .. }) => {
                let heads = shard.map_or(heads.num_heads, |shard| shard.num_heads);
                let distances = distances.iter().map(|it| (&it.table, vec![it.buckets, heads]));
                sinks.iter().map(|name| (name, vec![heads])).chain(distances).collect()
            }
            Mixer::Recurrent(layer) => layer.vectors(),
            Mixer::Experts(Experts { routing, experts, .. }) => {
                let bias = routing.choice_bias.iter().map(|(name, shape)| (name, shape.clone()));
                bias.chain(routing.expert_scale.iter().map(|name| (name, vec![experts.len()]))).collect()
            }
            Mixer::Sum(branches) => branches.iter().flat_map(|branch| branch.mixer.vectors()).collect(),
            Mixer::Mlp(mlp) => mlp.learned.iter().map(|name| (name, vec![1])).collect(),
            Mixer::PerLayer(_) | Mixer::Laurel(_) => Vec::new(),
        }
    }

    /// The mixer, or those whose results it adds.
    pub(crate) fn leaves(&self) -> Vec<&Mixer> {
        match self {
            Mixer::Sum(branches) => branches.iter().flat_map(|branch| branch.mixer.leaves()).collect(),
            leaf => vec![leaf],
        }
    }
}

impl Decoder {
    /// Rows of the embedding and of the output projection; may be greater than the tokenizer's vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.embedding.tokens.rows()
    }

    /// Number of logits of a row.
    pub fn num_logits(&self) -> usize {
        self.head.linear.as_ref().map_or(self.vocab_size(), Linear::all_rows)
    }

    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        self.embedding.projection.as_ref().map_or(self.embedding.tokens.inputs, Linear::rows)
    }

    /// Width of the hidden states from which logits are computed.
    pub fn output_width(&self) -> usize {
        self.head.projection.as_ref().map_or(self.hidden_size(), Linear::rows)
    }

    /// Whether the stream comes from another stage of a pipeline.
    pub fn receives(&self) -> bool {
        self.stage.as_ref().is_some_and(|stage| stage.receives)
    }

    /// Whether the stream goes to another stage of a pipeline, which has the head.
    pub fn sends(&self) -> bool {
        self.stage.as_ref().is_some_and(|stage| stage.sends)
    }

    /// Whether the output projection uses the weights of the embedding.
    pub fn is_tied(&self) -> bool {
        self.head.linear.is_none()
    }

    /// Branches of all layers, in order.
    pub fn branches(&self) -> impl Iterator<Item = &Branch> {
        self.layers.iter().flat_map(|layer| &layer.branches)
    }

    /// Attention layers, in order.
    pub fn attention(&self) -> impl Iterator<Item = &Attention> {
        self.branches().filter_map(|branch| match &branch.mixer {
            Mixer::Attention(attention) => Some(attention),
            _ => None,
        })
    }

    /// Recurrent layers, in order.
    pub fn recurrent(&self) -> impl Iterator<Item = &Recurrent> {
        self.branches().filter_map(|branch| match &branch.mixer {
            Mixer::Recurrent(recurrent) => Some(recurrent),
            _ => None,
        })
    }

    /// Mixers that read other rows than their own, in order: attention and recurrent layers. All but those that see [both
    /// sides](Attention::both_sides) do so in pages of the cache.
    pub fn paged(&self) -> impl Iterator<Item = &Mixer> {
        let mixers = self.branches().map(|branch| &branch.mixer);
        mixers.filter(|mixer| matches!(mixer, Mixer::Attention(_) | Mixer::Recurrent(_)))
    }

    /// Whether the layers have no cache, so that all tokens of a sequence are computed in one step. All layers are alike in this.
    pub fn is_encoder(&self) -> bool {
        self.attention().any(|attention| attention.both_sides)
    }

    /// Mixtures of experts, in order.
    pub fn experts(&self) -> impl Iterator<Item = &Experts> {
        self.branches().flat_map(|branch| branch.mixer.leaves()).filter_map(|mixer| match mixer {
            Mixer::Experts(experts) => Some(experts),
            _ => None,
        })
    }

    /// Heads of the attention layer with the greatest heads. Most models have the same in all layers.
    pub fn heads(&self) -> Heads {
        let heads = self.attention().map(|attention| attention.heads);
        heads.max_by_key(|heads| heads.head_dim).unwrap_or_default()
    }

    /// Elements of a latent, if the layers have latent attention; all layers have it or none.
    pub fn latent_dim(&self) -> Option<usize> {
        self.attention().find_map(|attention| attention.latent.as_ref()).map(|latent| latent.rank)
    }

    /// Tokens of the blocks of block-sparse layers, of which blocks of the cache must be divisors: the greatest common divisor, if
    /// layers differ.
    pub fn sparse_block(&self) -> Option<usize> {
        let sizes = self.attention().filter_map(|attention| attention.sparse).map(|sparse| sparse.block_size);
        sizes.reduce(|mut a, mut b| {
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a
        })
    }

    /// Linear layers without those of experts, in order: those of the embedding (tokens, positions, types, projection, inputs of layers),
    /// hidden states of another decoder), of the layers, of the head (projection, logits).
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let Embedding { tokens, positions, types, projection, per_layer, beside, .. } = &self.embedding;
        let tables = std::iter::once(tokens).chain(positions.iter().map(|it| &it.table)).chain(types);
        let of_embedding = tables.chain(projection);
        let of_embedding = of_embedding.chain(per_layer.iter().flat_map(|it| [&it.projection, &it.tokens]));
        let of_embedding = of_embedding.chain(beside.iter().flat_map(Beside::linears)).filter(|_| !self.receives());
        let of_embedding = of_embedding.chain(self.streams.iter().map(|streams| &streams.project));
        let of_layers = self.layers.iter().flat_map(Layer::linears);
        of_embedding.chain(of_layers).chain(&self.head.projection).chain(&self.head.linear)
    }

    /// Linear layers of parts of a row: for each layer of latent attention those of heads before and after it, then those of streams.
    pub fn head_linears(&self) -> impl Iterator<Item = &Vec<Linear>> {
        let latent = self.attention().filter_map(|attention| attention.latent.as_ref());
        let of_heads = latent.flat_map(|latent| [&latent.absorb, &latent.expand]);
        of_heads.chain(self.streams.iter().map(|streams| &streams.merge))
    }

    /// All linear layers, those of heads and experts last.
    pub fn all_linears(&self) -> impl Iterator<Item = &Linear> {
        let of_experts = self.experts().flat_map(|experts| &experts.experts);
        let others = self.linears().chain(self.head_linears().flatten());
        others.chain(of_experts.flat_map(|mlp| [&mlp.gate_up, &mlp.down]))
    }

    /// What the matrix of a layer of [`Decoder::linears`] is for: single rows of tables of tokens and positions are read.
    pub(crate) fn purpose(&self, linear: &Linear) -> Purpose {
        let Embedding { tokens, positions, types, per_layer, .. } = &self.embedding;
        let (positions, of_layers) = (positions.as_ref().map(|it| &it.table), per_layer.as_ref().map(|it| &it.tokens));
        let tables = [Some(tokens), positions, types.as_ref(), of_layers];
        match tables.into_iter().flatten().any(|table| std::ptr::eq(table, linear)) {
            true => Purpose::Numbers,
            false => Purpose::Product,
        }
    }

    /// Norms, in order: those of the embedding, those of the layers, the final norm.
    pub fn norms(&self) -> impl Iterator<Item = &Norm> {
        let beside = self.embedding.beside.iter().flat_map(Beside::norms);
        let of_embedding = beside.chain(&self.embedding.norm).chain(self.embedding.per_layer.iter().map(|it| &it.norm));
        let of_embedding = of_embedding.filter(|_| !self.receives());
        of_embedding.chain(self.layers.iter().flat_map(Layer::norms)).chain(&self.final_norm)
    }

    /// Names and shapes of tensors that are neither weights of a linear layer nor of a norm: attention sinks, biases of routers,
    /// convolutions and decays, factors of experts and layers.
    pub fn vectors(&self) -> impl Iterator<Item = (&String, Vec<usize>)> {
        self.layers.iter().flat_map(Layer::vectors)
    }

    /// Names and shapes of the tensors that the model reads from the checkpoint. A tensor with several parts occurs several times.
    pub fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        self.all_linears().flat_map(Linear::tensors).chain(self.other_tensors())
    }

    /// The tensors that are not those of linear layers.
    pub(crate) fn other_tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        let vectors = self.vectors().map(|(name, shape)| (name.clone(), shape));
        let classifier = self.head.classifier.iter().flat_map(|it| it.layers.iter().flat_map(Dense::tensors));
        self.norms().flat_map(Norm::tensors).chain(vectors).chain(classifier)
    }

    /// Number of weights; tied ones count once.
    pub fn num_parameters(&self) -> u64 {
        let product = |(_, shape): (String, Vec<usize>)| shape.into_iter().map(|n| n as u64).product::<u64>();
        // Parallel branches may share one.
        let norms: BTreeSet<_> = self.norms().flat_map(Norm::tensors).collect();
        let norms: u64 = norms.into_iter().map(product).sum();
        let vectors: usize = self.vectors().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        self.all_linears().map(Linear::num_parameters).sum::<u64>() + norms + vectors as u64
    }

    /// Number of weights of experts that a single token does not use.
    pub fn idle_parameters(&self) -> u64 {
        let of = |experts: &Experts| {
            let all = experts.experts.iter().flat_map(|mlp| [&mlp.gate_up, &mlp.down]);
            let (all, count) = (all.map(Linear::num_parameters).sum::<u64>(), experts.experts.len() as u64);
            all / count.max(1) * count.saturating_sub(experts.routing.top_k as u64)
        };
        self.experts().map(of).sum()
    }

    /// All linear layers but tables of positions and types, in no particular order.
    pub(crate) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let Decoder { embedding, layers, head, streams, .. } = self;
        let of_layers = layers.iter_mut().flat_map(Layer::linears_mut);
        let of_streams = streams.iter_mut().flat_map(|it| std::iter::once(&mut it.project).chain(&mut it.merge));
        let Embedding { tokens, projection, per_layer, beside, .. } = embedding;
        let per_layer = per_layer.iter_mut().flat_map(|it| [&mut it.projection, &mut it.tokens]);
        let beside = beside.iter_mut().flat_map(Beside::linears_mut);
        let others = std::iter::once(tokens).chain(projection).chain(per_layer).chain(beside);
        others.chain(of_layers).chain(of_streams).chain(&mut head.projection).chain(&mut head.linear)
    }

    /// The same decoder with every linear layer in this form, except replicated ones ([`Role::Replicated`]).
    pub fn in_form(mut self, form: Form) -> Decoder {
        let all = self.linears_mut().filter(|linear| linear.role != Role::Replicated);
        all.for_each(|linear| linear.form = form);
        self
    }

    /// The same decoder for rows with LoRA adapters. Rows without an adapter have the same results as without this.
    pub fn with_adapters(self, limits: Option<AdapterLimits>) -> Decoder {
        Decoder { adapters: limits, ..self }
    }

    /// The same decoder for contexts of up to `len` tokens. Rotary embeddings whose frequencies depend on the context's length
    /// are chosen here, once, because keys in the cache cannot change.
    pub fn for_context(mut self, len: usize) -> Decoder {
        for branch in self.layers.iter_mut().flat_map(|layer| &mut layer.branches) {
            if let Mixer::Attention(Attention { rope: Some(rope), .. }) = &mut branch.mixer {
                rope.set_context(len);
            }
        }
        self
    }
}
