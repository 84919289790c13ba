//! What weights an architecture has, by name and shape. The four families so far differ in their biases, head norms
//! and windows, which are settings; a family with another structure declares another list.

use crate::{LoadError, ModelConfig, Weights};

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

/// Every tensor that a model of this configuration reads: name and shape.
fn tensors(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let mut all = Vec::new();
    let linear = |all: &mut Vec<(String, Vec<usize>)>, names: &LinearNames, inputs: usize| {
        for (name, rows) in &names.parts {
            all.push((format!("{name}.weight"), vec![*rows, inputs]));
            if names.bias {
                all.push((format!("{name}.bias"), vec![*rows]));
            }
        }
    };
    let (names, hidden) = (declare(config), config.hidden_size);
    linear(&mut all, &names.embedding, hidden);
    for layer in &names.layers {
        linear(&mut all, &layer.qkv, hidden);
        linear(&mut all, &layer.output, config.num_heads * config.head_dim);
        linear(&mut all, &layer.gate_up, hidden);
        linear(&mut all, &layer.down, config.intermediate_size);
        all.extend([&layer.input_norm, &layer.post_norm].map(|name| (name.clone(), vec![hidden])));
        let head_norms = layer.query_norm.iter().chain(&layer.key_norm);
        all.extend(head_norms.map(|name| (name.clone(), vec![config.head_dim])));
    }
    all.push((names.final_norm, vec![hidden]));
    if let Some(head) = &names.head {
        linear(&mut all, head, hidden);
    }
    all
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
