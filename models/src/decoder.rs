//! A decoder as data: what each layer of a checkpoint computes, and the names of the tensors that hold its weights.
//!
//! A family declares a [`Decoder`] from `config.json` (`families/`). It is plain data: no weights, no buffers, no device.
//! Everything else is derived by iterating over it: loading ([`Decoder::linears`], [`Decoder::norms`]), byte counts, cache
//! groups ([`Decoder::attention`]), the buffers of a step, and the program of the forward pass ([`Decoder::branches`]).
//!
//! ```text
//! Decoder   embedding, layers, final norm, head
//! Layer     branches, in order: stream += mixer(norm(stream))
//! Mixer     Attention   qkv ─▶ qk norm, rope, cache write ─▶ attention ─▶ output
//!           Mlp         gate_up ─▶ activation(gate) * up ─▶ down
//! Linear    one or several tensors of the checkpoint, stacked by rows
//! ```
//!
//! A family builds its layers from the parts in `families/common.rs` and changes the fields that differ. `quire plan --decoder
//! FOLDER` prints the result, one line per part.

mod rope;
mod tree;

use std::fmt;

use device::gemm::Quantization;
use serde::{Serialize, Serializer};

/// A decoder-only transformer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decoder {
    /// Token embedding, `[vocab_size, hidden_size]`.
    pub embedding: Linear,
    /// Layers, in order.
    pub layers: Vec<Layer>,
    /// Norm after the last layer.
    pub final_norm: Norm,
    /// Output projection, `[vocab_size, hidden_size]`; `None` if the embedding's weights are used (`tie_word_embeddings`).
    pub head: Option<Linear>,
}

/// One layer: residual branches, applied one after the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Layer {
    /// Branches, in order.
    pub branches: Vec<Branch>,
}

/// A residual branch: `stream += mixer(norm(stream))`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Branch {
    /// Norm of the mixer's input.
    pub norm: Norm,
    /// What the branch computes.
    pub mixer: Mixer,
}

/// The function that a branch applies to its normed rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mixer {
    /// Self-attention over the paged cache.
    Attention(Attention),
    /// A gated feed-forward network.
    Mlp(Mlp),
}

/// Self-attention with grouped queries (Ainslie et al., "GQA", 2023).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Attention {
    /// Name of the module in the checkpoint, under which the scales of an 8-bit cache are looked up.
    pub name: String,
    /// Projections to queries, keys and values, `[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]`.
    pub qkv: Linear,
    /// Number and size of the heads.
    pub heads: Heads,
    /// RMS norm of each query head before the rotary embedding, `[head_dim]`.
    pub query_norm: Option<Norm>,
    /// RMS norm of each key head before the rotary embedding, `[head_dim]`.
    pub key_norm: Option<Norm>,
    /// Rotary embedding of queries and keys.
    pub rope: Rope,
    /// Sliding window. `Some(w)`: position i attends only to positions i-w+1..=i. `None`: to the whole context.
    pub window: Option<usize>,
    /// Factor of the scores (products of queries and keys), usually `1 / sqrt(head_dim)`.
    pub scale: f32,
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
}

/// A gated feed-forward network: `down(activation(gate(x)) * up(x))` (Shazeer, "GLU Variants Improve Transformer", 2020).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mlp {
    /// Gate projection, then up projection, `[2 * intermediate_size, hidden_size]`.
    pub gate_up: Linear,
    /// Activation of the gate.
    pub activation: Activation,
    /// Down projection, `[hidden_size, intermediate_size]`.
    pub down: Linear,
}

/// Activation function of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// Gaussian error linear unit, approximated with tanh (Hendrycks & Gimpel, 2016).
    GeluTanh,
}

/// Linear layer `y = x·Wᵀ + bias`. W may consist of several tensors of the checkpoint, stacked by rows: one fused product.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Linear {
    /// The tensors, in order.
    pub parts: Vec<Part>,
    /// Number of inputs: the columns of every tensor.
    pub inputs: usize,
    /// Whether every part has a bias tensor.
    pub bias: bool,
    /// How the weights are stored on the device.
    pub form: Form,
    /// How the ranks of a tensor-parallel group split it.
    pub role: Role,
    /// Whether LoRA adapters may target its parts.
    pub adapters: bool,
}

/// One tensor of a [`Linear`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// Name in the checkpoint, without `.weight` or `.bias`.
    pub name: String,
    /// Rows of the tensor: its number of outputs.
    pub rows: usize,
}

/// How the weights of a [`Linear`] are stored on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Unquantised: in the checkpoint's type, or on a device that launches kernels in the type of the computation.
    #[default]
    Dense,
    /// Quantised while loading.
    Quantized(Quantization),
}

impl Form {
    /// The quantisation; `None` for [`Form::Dense`].
    pub fn quantization(self) -> Option<Quantization> {
        match self {
            Form::Dense => None,
            Form::Quantized(quantization) => Some(quantization),
        }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Form::Dense => f.write_str("dense"),
            Form::Quantized(quantization) => quantization.fmt(f),
        }
    }
}

impl Serialize for Form {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// How the ranks of a tensor-parallel group split a [`Linear`] (Shoeybi et al., "Megatron-LM", 2019).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// By outputs: each rank computes some of the outputs.
    Column,
    /// By inputs: each rank has some of the inputs, and the partial sums are added.
    Row,
}

/// RMS norm: `x / sqrt(mean(x²) + eps) * weight` (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Norm {
    /// Name of the weight in the checkpoint.
    pub name: String,
    /// Number of weights.
    pub width: usize,
    /// Term added to the mean of the squares.
    pub eps: f32,
}

/// Rotary position embedding (Su et al., "RoFormer", 2021): pairs (i, i + head_dim / 2) of a head are rotated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rope {
    /// Base of the geometric series of wavelengths (`rope_theta`).
    pub theta: f64,
    /// Scaling of the frequencies for contexts longer than those of the pre-training.
    pub scaling: RopeScaling,
}

/// Supported frequency scalings of `rope_scaling` / `rope_parameters`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Divides all frequencies by `factor`.
    Linear {
        /// Divisor, at least 1.
        factor: f64,
    },
    /// Llama 3.1: divides low frequencies by `factor`, keeps high ones, and interpolates between them.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are scaled in full.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the pre-training.
        original_max_position_embeddings: f64,
    },
}

impl Linear {
    /// Number of outputs: the rows of all parts.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows).sum()
    }

    /// Names and shapes of its tensors in the checkpoint, weights and biases.
    fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        self.parts.iter().flat_map(|Part { name, rows }| {
            let bias = self.bias.then(|| (format!("{name}.bias"), vec![*rows]));
            std::iter::once((format!("{name}.weight"), vec![*rows, self.inputs])).chain(bias)
        })
    }
}

impl Mixer {
    /// Linear layers of the mixer, in order of use.
    pub fn linears(&self) -> [&Linear; 2] {
        match self {
            Mixer::Attention(attention) => [&attention.qkv, &attention.output],
            Mixer::Mlp(mlp) => [&mlp.gate_up, &mlp.down],
        }
    }

    fn linears_mut(&mut self) -> [&mut Linear; 2] {
        match self {
            Mixer::Attention(attention) => [&mut attention.qkv, &mut attention.output],
            Mixer::Mlp(mlp) => [&mut mlp.gate_up, &mut mlp.down],
        }
    }

    /// Head norms of the mixer.
    fn norms(&self) -> impl Iterator<Item = &Norm> {
        let norms = match self {
            Mixer::Attention(attention) => [attention.query_norm.as_ref(), attention.key_norm.as_ref()],
            Mixer::Mlp(_) => [None, None],
        };
        norms.into_iter().flatten()
    }
}

impl Decoder {
    /// Rows of the embedding and of the output projection; may be greater than the tokenizer's vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.embedding.rows()
    }

    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        self.embedding.inputs
    }

    /// Whether the output projection uses the weights of the embedding.
    pub fn is_tied(&self) -> bool {
        self.head.is_none()
    }

    /// Branches of all layers, in order.
    pub fn branches(&self) -> impl Iterator<Item = &Branch> {
        self.layers.iter().flat_map(|layer| &layer.branches)
    }

    /// Attention layers, in order.
    pub fn attention(&self) -> impl Iterator<Item = &Attention> {
        self.branches().filter_map(|branch| match &branch.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::Mlp(_) => None,
        })
    }

    /// Heads of the attention layers; all layers have the same.
    pub fn heads(&self) -> Heads {
        self.attention().next().map_or(Heads::default(), |attention| attention.heads)
    }

    /// Linear layers, in order: the embedding, those of the layers, the head if it has its own weights.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let of_layers = self.branches().flat_map(|branch| branch.mixer.linears());
        std::iter::once(&self.embedding).chain(of_layers).chain(&self.head)
    }

    /// Norms, in order: those of the layers, then the final norm.
    pub fn norms(&self) -> impl Iterator<Item = &Norm> {
        let of_layers = self.branches().flat_map(|branch| std::iter::once(&branch.norm).chain(branch.mixer.norms()));
        of_layers.chain([&self.final_norm])
    }

    /// Names and shapes of the tensors that the model reads from the checkpoint.
    pub fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        let norms = self.norms().map(|norm| (norm.name.clone(), vec![norm.width]));
        self.linears().flat_map(Linear::tensors).chain(norms)
    }

    /// Number of weights; tied ones count once.
    pub fn num_parameters(&self) -> u64 {
        self.tensors().map(|(_, shape)| shape.into_iter().map(|n| n as u64).product::<u64>()).sum()
    }

    /// The same decoder with every linear layer in this form.
    pub fn in_form(mut self, form: Form) -> Decoder {
        let mixers = self.layers.iter_mut().flat_map(|layer| &mut layer.branches);
        let of_layers = mixers.flat_map(|branch| branch.mixer.linears_mut());
        let all = std::iter::once(&mut self.embedding).chain(of_layers).chain(&mut self.head);
        all.for_each(|linear| linear.form = form);
        self
    }
}
