//! A decoder as data: what the layers of a checkpoint compute, and under which names it stores their weights.
//!
//! A family declares it from `config.json` (`families/`). Loading, byte counts, cache groups, the buffers of a step and
//! the program of the forward pass come from walking it. It holds no weight, no buffer and no device.
//!
//! ```text
//! Decoder   embedding, layers, final norm, head
//! Layer     branches, in order: stream += mixer(norm(stream))
//! Mixer     Attention   qkv ─ head norms, rotary embedding, cache write ─ attention ─ output
//!           Mlp         gate_up ─ activation(gate) * up ─ down
//! Linear    one or several tensors of the checkpoint, their rows one below the other
//! ```

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
    /// Norm behind the last layer.
    pub final_norm: Norm,
    /// Output projection, `[vocab_size, hidden_size]`; `None` if it is the embedding.
    pub head: Option<Linear>,
}

/// One layer: branches that are added to the residual stream, one after the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Layer {
    /// Branches, in order.
    pub branches: Vec<Branch>,
}

/// `stream += mixer(norm(stream))`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Branch {
    /// Norm in front of the mixer.
    pub norm: Norm,
    /// What the branch computes.
    pub mixer: Mixer,
}

/// What a branch computes of normed rows.
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
    /// Module in the checkpoint; scales of an 8-bit cache are looked up below it.
    pub name: String,
    /// Queries, keys and values, `[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]`.
    pub qkv: Linear,
    /// Number and size of the heads.
    pub heads: Heads,
    /// RMS norm of each query head, `[head_dim]`.
    pub query_norm: Option<Norm>,
    /// RMS norm of each key head, `[head_dim]`.
    pub key_norm: Option<Norm>,
    /// Rotary embedding of queries and keys.
    pub rope: Rope,
    /// `Some(w)`: position i sees only i-w+1..=i.
    pub window: Option<usize>,
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// `[hidden_size, num_heads * head_dim]`.
    pub output: Linear,
}

/// Number and size of the heads of an attention layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Heads {
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl Heads {
    /// Elements of a row of fused queries, keys and values.
    pub fn qkv_width(self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }

    /// Elements of a row of queries, and of what attention returns.
    pub fn query_width(self) -> usize {
        self.num_heads * self.head_dim
    }
}

/// A gated feed-forward network: `down(activation(gate(x)) * up(x))` (Shazeer, "GLU Variants Improve Transformer", 2020).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mlp {
    /// Gate, then up, `[2 * intermediate_size, hidden_size]`.
    pub gate_up: Linear,
    /// What the gate passes through.
    pub activation: Activation,
    /// `[hidden_size, intermediate_size]`.
    pub down: Linear,
}

/// What a gate passes through before it multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// Gaussian error linear units by their tanh formula (Hendrycks & Gimpel, 2016).
    GeluTanh,
}

/// `y = x·Wᵀ + bias`, of one or several tensors of the checkpoint whose rows stand one below the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Linear {
    /// The tensors, in order.
    pub parts: Vec<Part>,
    /// Columns of every part.
    pub inputs: usize,
    /// Each part has a bias of its own.
    pub bias: bool,
    /// How the weights are kept.
    pub form: Form,
    /// How ranks of a tensor-parallel group divide it.
    pub role: Role,
    /// LoRA adapters may change its parts.
    pub adapters: bool,
}

/// One tensor of a [`Linear`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// Name in the checkpoint, without `.weight` and `.bias`.
    pub name: String,
    /// Rows of the tensor.
    pub rows: usize,
}

/// How the weights of a [`Linear`] are kept on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// As the checkpoint stores them; where kernels are launched, in the type that they compute in.
    #[default]
    Dense,
    /// Quantised while they are loaded.
    Quantized(Quantization),
}

impl Form {
    /// What the weights are quantised to; `None` if they are not.
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

/// How the ranks of a tensor-parallel group divide a [`Linear`] (Shoeybi et al., "Megatron-LM", 2019).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// By output rows: each rank computes some of the outputs.
    Column,
    /// By inputs: each rank has some of the inputs, and their sums are added.
    Row,
}

/// A normalisation: `x / sqrt(mean(x²) + eps) * weight` (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Norm {
    /// Name of the weight in the checkpoint.
    pub name: String,
    /// Length of the weight.
    pub width: usize,
    /// Added to the mean of the squares.
    pub eps: f32,
}

/// Rotary position embedding (Su et al., "RoFormer", 2021): pairs (i, i + head_dim / 2) of a head are rotated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rope {
    /// Base of the geometric series of wavelengths (`rope_theta`).
    pub theta: f64,
    /// How the frequencies are stretched for contexts beyond the pre-training length.
    pub scaling: RopeScaling,
}

/// The frequency scalings of `rope_scaling` / `rope_parameters` that are understood.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// Frequencies as they are.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Divisor, at least 1.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between them.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched in full.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the pre-training.
        original_max_position_embeddings: f64,
    },
}

impl Linear {
    /// Rows of all parts.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows).sum()
    }

    /// The tensors of the checkpoint: names and shapes, weights and biases.
    fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        self.parts.iter().flat_map(|Part { name, rows }| {
            let bias = self.bias.then(|| (format!("{name}.bias"), vec![*rows]));
            std::iter::once((format!("{name}.weight"), vec![*rows, self.inputs])).chain(bias)
        })
    }
}

impl Mixer {
    /// Its linear layers, in the order of their use.
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

    /// Its norms of heads.
    fn norms(&self) -> impl Iterator<Item = &Norm> {
        let norms = match self {
            Mixer::Attention(attention) => [attention.query_norm.as_ref(), attention.key_norm.as_ref()],
            Mixer::Mlp(_) => [None, None],
        };
        norms.into_iter().flatten()
    }
}

impl Decoder {
    /// Rows of the embedding and of the output projection; may exceed the tokenizer's vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.embedding.rows()
    }

    /// Width of the residual stream.
    pub fn hidden_size(&self) -> usize {
        self.embedding.inputs
    }

    /// Whether the output projection is the embedding.
    pub fn is_tied(&self) -> bool {
        self.head.is_none()
    }

    /// All branches, in order.
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

    /// Heads of the attention layers, which all have the same.
    pub fn heads(&self) -> Heads {
        self.attention().next().map_or(Heads::default(), |attention| attention.heads)
    }

    /// Linear layers: embedding, those of the layers, head.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let of_layers = self.branches().flat_map(|branch| branch.mixer.linears());
        std::iter::once(&self.embedding).chain(of_layers).chain(&self.head)
    }

    /// Norms: those of the layers, then the final one.
    pub fn norms(&self) -> impl Iterator<Item = &Norm> {
        let of_layers = self.branches().flat_map(|branch| std::iter::once(&branch.norm).chain(branch.mixer.norms()));
        of_layers.chain([&self.final_norm])
    }

    /// Tensors that the model reads from the checkpoint: names and shapes.
    pub fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        let norms = self.norms().map(|norm| (norm.name.clone(), vec![norm.width]));
        self.linears().flat_map(Linear::tensors).chain(norms)
    }

    /// Number of weights, each counted once.
    pub fn num_parameters(&self) -> u64 {
        self.tensors().map(|(_, shape)| shape.into_iter().map(|n| n as u64).product::<u64>()).sum()
    }

    /// The same decoder with every linear layer in that form.
    pub fn in_form(mut self, form: Form) -> Decoder {
        let mixers = self.layers.iter_mut().flat_map(|layer| &mut layer.branches);
        let of_layers = mixers.flat_map(|branch| branch.mixer.linears_mut());
        let all = std::iter::once(&mut self.embedding).chain(of_layers).chain(&mut self.head);
        all.for_each(|linear| linear.form = form);
        self
    }
}
