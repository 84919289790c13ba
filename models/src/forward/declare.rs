//! What weights an architecture has, by name and shape. The four families so far differ in their biases, head norms
//! and windows, which are settings; a family with another structure declares another list.

use attention_kernels::Dtype;
use device::gemm::{PackedMatrix, Quantization};

use super::linear::format;
use crate::{LoadError, ModelConfig, WeightDtype, Weights};

/// A linear layer made of one or more checkpoint tensors, their rows one below the other.
pub(super) struct LinearNames {
    /// `(name without ".weight", rows)`.
    pub parts: Vec<(String, usize)>,
    /// Each part has a `.bias`.
    pub bias: bool,
}

/// The weights of one decoder layer.
pub(super) struct LayerNames {
    pub input_norm: String,
    pub qkv: LinearNames,
    pub query_norm: Option<String>,
    pub key_norm: Option<String>,
    pub output: LinearNames,
    pub post_norm: String,
    pub gate_up: LinearNames,
    pub down: LinearNames,
}

/// The weights of a model.
pub(super) struct ModelNames {
    pub embedding: LinearNames,
    pub layers: Vec<LayerNames>,
    pub final_norm: String,
    /// `None` when tied to the embedding.
    pub head: Option<LinearNames>,
}

/// The weights that `config` asks for.
pub(super) fn declare(config: &ModelConfig) -> ModelNames {
    let one = |name: &str, rows| LinearNames { parts: vec![(name.to_string(), rows)], bias: false };
    let (queries, keys) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let layer = |index: usize| {
        let name = |rest: &str| format!("model.layers.{index}.{rest}");
        let linear = |bias: bool, parts: &[(&str, usize)]| LinearNames {
            parts: parts.iter().map(|&(part, rows)| (name(part), rows)).collect(),
            bias,
        };
        LayerNames {
            input_norm: name("input_layernorm.weight"),
            qkv: linear(
                config.qkv_bias,
                &[("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)],
            ),
            query_norm: config.qk_norm.then(|| name("self_attn.q_norm.weight")),
            key_norm: config.qk_norm.then(|| name("self_attn.k_norm.weight")),
            output: linear(config.output_bias, &[("self_attn.o_proj", config.hidden_size)]),
            post_norm: name("post_attention_layernorm.weight"),
            gate_up: linear(
                config.mlp_bias,
                &[("mlp.gate_proj", config.intermediate_size), ("mlp.up_proj", config.intermediate_size)],
            ),
            down: linear(config.mlp_bias, &[("mlp.down_proj", config.hidden_size)]),
        }
    };
    ModelNames {
        embedding: one("model.embed_tokens", config.vocab_size),
        layers: (0..config.num_layers).map(layer).collect(),
        final_norm: "model.norm.weight".to_string(),
        head: (!config.tie_word_embeddings).then(|| one("lm_head", config.vocab_size)),
    }
}

impl ModelNames {
    /// Every linear layer and its inputs.
    fn linears(&self, config: &ModelConfig) -> Vec<(&LinearNames, usize)> {
        let (hidden, heads) = (config.hidden_size, config.num_heads * config.head_dim);
        let mut all = vec![(&self.embedding, hidden)];
        for layer in &self.layers {
            let LayerNames { qkv, output, gate_up, down, .. } = layer;
            all.extend([(qkv, hidden), (output, heads), (gate_up, hidden), (down, config.intermediate_size)]);
        }
        all.extend(self.head.iter().map(|head| (head, hidden)));
        all
    }

    /// Every other tensor, a vector, and its length.
    fn vectors(&self, config: &ModelConfig) -> Vec<(String, usize)> {
        let mut all = vec![(self.final_norm.clone(), config.hidden_size)];
        for layer in &self.layers {
            all.extend([&layer.input_norm, &layer.post_norm].map(|name| (name.clone(), config.hidden_size)));
            let head_norms = layer.query_norm.iter().chain(&layer.key_norm);
            all.extend(head_norms.map(|name| (name.clone(), config.head_dim)));
        }
        for (linear, _) in self.linears(config) {
            let biases = linear.parts.iter().filter(|_| linear.bias);
            all.extend(biases.map(|(name, rows)| (format!("{name}.bias"), *rows)));
        }
        all
    }
}

/// Every tensor that a model of this configuration reads: name and shape.
fn tensors(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let names = declare(config);
    let matrices = names.linears(config).into_iter().flat_map(|(linear, inputs)| {
        linear.parts.iter().map(move |(name, rows)| (format!("{name}.weight"), vec![*rows, inputs]))
    });
    matrices.chain(names.vectors(config).into_iter().map(|(name, len)| (name, vec![len]))).collect()
}

/// Type that the checkpoint stores its embedding in, for a model that is computed in the checkpoint's type; `None` where the
/// tensor is missing.
pub fn checkpoint_dtype(config: &ModelConfig, weights: &Weights) -> Option<WeightDtype> {
    let (name, _) = declare(config).embedding.parts.into_iter().next()?;
    weights.get(&format!("{name}.weight")).map(|view| view.dtype)
}

/// Bytes that the weights will take on the device. Reads headers alone.
///
/// # Errors
/// The first matrix that is missing or of another shape or type.
pub fn weight_bytes(
    config: &ModelConfig,
    weights: &Weights,
    quantization: Option<Quantization>,
) -> Result<u64, LoadError> {
    let names = declare(config);
    let vectors: usize = names.vectors(config).iter().map(|(_, len)| len * size_of::<f32>()).sum();
    let mut bytes = vectors as u64;
    for (linear, inputs) in names.linears(config) {
        let view = |(name, rows): &(String, usize)| weights.expect(&format!("{name}.weight"), &[*rows, inputs]);
        let formats = linear.parts.iter().map(|part| Ok(format(view(part)?.dtype)));
        let formats = formats.collect::<Result<Vec<_>, LoadError>>()?;
        let rows = linear.parts.iter().map(|(_, rows)| rows).sum();
        bytes += PackedMatrix::packed_bytes(rows, inputs, formats, quantization) as u64;
    }
    Ok(bytes)
}

/// Bytes of the weights on a device that launches kernels: matrices and biases of that type, norms in float32.
pub fn dense_weight_bytes(config: &ModelConfig, dtype: Dtype) -> u64 {
    let names = declare(config);
    let linear = |(linear, inputs): (&LinearNames, usize)| {
        let rows: usize = linear.parts.iter().map(|(_, rows)| rows).sum();
        rows * (inputs + usize::from(linear.bias)) * dtype.bytes()
    };
    let linears: usize = names.linears(config).into_iter().map(linear).sum();
    let norms = names.vectors(config).into_iter().filter(|(name, _)| !name.ends_with(".bias"));
    (linears + norms.map(|(_, len)| len * size_of::<f32>()).sum::<usize>()) as u64
}

/// Number of weights of a model, each counted once.
pub fn parameters(config: &ModelConfig) -> u64 {
    tensors(config).into_iter().map(|(_, shape)| shape.into_iter().map(|n| n as u64).product::<u64>()).sum()
}

/// Whether the checkpoint has every tensor that the model reads, in a type and shape that will do. Reads headers alone.
///
/// # Errors
/// The first tensor that is missing or of another shape or type.
pub fn check_weights(config: &ModelConfig, weights: &Weights) -> Result<(), LoadError> {
    tensors(config).into_iter().try_for_each(|(name, shape)| weights.expect(&name, &shape).map(drop))
}
