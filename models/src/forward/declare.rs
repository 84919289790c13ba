//! What weights an architecture has, by name and shape. The four families so far differ in their biases, head norms
//! and windows, which are settings; a family with another structure declares another list.

use crate::ModelConfig;

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

/// Number of weights of a model, each counted once.
pub fn parameters(config: &ModelConfig) -> u64 {
    let names = declare(config);
    let linear = |names: &LinearNames, inputs: usize| {
        let rows: usize = names.parts.iter().map(|part| part.1).sum();
        (rows * (inputs + usize::from(names.bias))) as u64
    };
    let hidden = config.hidden_size;
    let layer = |l: &LayerNames| {
        let norms = 2 * hidden + if l.query_norm.is_some() { 2 * config.head_dim } else { 0 };
        linear(&l.qkv, hidden)
            + linear(&l.output, config.num_heads * config.head_dim)
            + linear(&l.gate_up, hidden)
            + linear(&l.down, config.intermediate_size)
            + norms as u64
    };
    let ends = linear(&names.embedding, hidden) + names.head.as_ref().map_or(0, |h| linear(h, hidden)) + hidden as u64;
    ends + names.layers.iter().map(layer).sum::<u64>()
}
