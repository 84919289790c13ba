//! The architectures of GGUF files: how their keys and tensors are called in Hugging Face layout, in which the families are declared.

mod classic;
mod encoders;
mod gemma;
mod hybrid;
mod latent;
mod plain;
mod sparse;

use serde_json::{Map, Value as Json};

use super::metadata::Metadata;
use crate::checkpoint::error::LoadError;

/// An architecture: what differs from [`KEYS`] and [`MODULES`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Architecture {
    /// Value of `general.architecture`, the prefix of its keys.
    pub name: &'static str,
    /// Name in `architectures` of `config.json`, for models without and with experts.
    pub class: &'static str,
    pub class_of_experts: &'static str,
    /// Further keys: name in `config.json`, name in the file without the architecture.
    pub keys: &'static [(&'static str, &'static str)],
    /// Further keys that several architectures share.
    pub shared_keys: &'static [(&'static str, &'static str)],
    /// Keys that may be lists with a value for each layer, which [`Architecture::derive`] reads.
    pub lists: &'static [&'static str],
    /// Keys that say whether any layer has a tensor: name in `config.json`, the tensor in its layer.
    pub flags: &'static [(&'static str, &'static str)],
    /// Values that the file does not state, as JSON.
    pub constants: &'static [(&'static str, &'static str)],
    /// Modules of a layer that have other names: name in the file, name in Hugging Face layout. They precede [`MODULES`]. Whole names of
    /// tensors (`ssm_dt.bias`) precede those of modules.
    pub modules: &'static [(&'static str, &'static str)],
    /// Further modules that several architectures share.
    pub shared_modules: &'static [(&'static str, &'static str)],
    /// A tensor, and modules that have other names in files with it.
    pub variant: Option<(&'static str, &'static [(&'static str, &'static str)])>,
    /// Arrays of the metadata with a number for each layer, which is a tensor of the layer: whole keys, names of tensors.
    pub arrays: &'static [(&'static str, &'static str)],
    /// Shared keys that the family does not have.
    pub absent: &'static [&'static str],
    /// Modules outside of layers that have other names, which precede [`OUTER`].
    pub outer: &'static [(&'static str, &'static str)],
    /// The module of the layers.
    pub layers: &'static str,
    /// Where the predictor of a further token is, if it is not numbered behind the layers.
    pub predictor: Option<Predictor>,
    /// Name of the module of an expert, and names of gate, up and down in it.
    pub experts: (&'static str, [&'static str; 3]),
    /// Norms are stored with 1 added.
    pub norms_plus_one: bool,
    /// Rows of queries and keys are stored for interleaved RoPE.
    pub pairs: bool,
    /// Joint rows of queries, keys and values belong to one key head after another in Hugging Face layout, and are apart in files.
    pub groups: bool,
    /// Further keys of the scaling of RoPE, if the file has one, as in `keys`.
    pub scaling: &'static [(&'static str, &'static str)],
    /// Values of the scaling that the file does not state, as JSON.
    pub yarn: &'static [(&'static str, &'static str)],
    /// Keys that another model with this name has, and what is expected instead.
    pub refused: &'static [(&'static str, &'static str)],
    /// Key of the types of layers, and the types of those without and with key/value heads.
    pub layer_types: Option<(&'static str, [&'static str; 2])>,
    /// Value heads of recurrent layers are stored by their number within a key head.
    pub tiled: bool,
    /// Adds keys that are computed from several.
    pub derive: Derive,
    /// Layers of the variant whose scores are scaled by its width per head instead of the size of a head; 0 for none.
    pub scaled_by_width: u64,
}

/// A predictor of a further token in Hugging Face layout. In files it is the layer behind the last one; of several the first is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Predictor {
    /// Its module.
    pub root: &'static str,
    /// Modules that have other names than in layers, within the root.
    pub modules: &'static [(&'static str, &'static str)],
    /// Which of its layers has the other modules.
    pub layer: usize,
}

/// A supported architecture of GGUF files, for documentation.
#[derive(Clone, Copy, Debug)]
pub struct Supported {
    /// Value of `general.architecture`.
    pub name: &'static str,
    /// Names of the families in `architectures` of `config.json`, without and with experts; empty if there is none.
    pub classes: [&'static str; 2],
}

/// Returns the supported architectures of GGUF files.
pub fn supported() -> impl Iterator<Item = Supported> {
    all().map(|known| Supported { name: known.name, classes: [known.class, known.class_of_experts] })
}

/// What computes keys of `config.json` from several keys of the file.
pub(super) type Derive = fn(&Metadata<'_>, &mut Map<String, Json>) -> Result<(), LoadError>;

/// Keys that all architectures share.
pub(super) const KEYS: &[(&str, &str)] = &[
    ("max_position_embeddings", "context_length"),
    ("hidden_size", "embedding_length"),
    ("num_hidden_layers", "block_count"),
    ("intermediate_size", "feed_forward_length"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("rope_theta", "rope.freq_base"),
];

/// Keys without which nothing can be computed.
pub(super) const REQUIRED: &[&str] =
    &["context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"];

/// Number of key/value heads, of all layers or of each.
pub(super) const KEY_HEADS: &str = "attention.head_count_kv";

/// Size of a value.
pub(super) const VALUES: &str = "attention.value_length";

/// Epsilon of norms that are no RMS norms.
const LAYER_EPS: &str = "attention.layer_norm_epsilon";

/// Number of elements of a head that are rotated.
pub(super) const ROTATED: &str = "rope.dimension_count";

/// Which layers have a window: an array of truth values.
pub(super) const WINDOWED: &str = "attention.sliding_window_pattern";

/// Number of layers at the end that predict a second token.
pub(super) const PREDICTORS: &str = "nextn_predict_layers";

/// Modules of a layer.
pub(super) const MODULES: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("attn_sinks.weight", "self_attn.sinks"),
    ("ssm_in", "mamba.in_proj"),
    ("ssm_conv1d", "mamba.conv1d"),
    ("ssm_dt.bias", "mamba.dt_bias"),
    ("ssm_a", "mamba.A_log"),
    ("ssm_d", "mamba.D"),
    ("ssm_norm", "mamba.norm"),
    ("ssm_out", "mamba.out_proj"),
    // The predictor of a second token, behind the layers.
    ("nextn.eh_proj", "eh_proj"),
    ("nextn.enorm", "enorm"),
    ("nextn.hnorm", "hnorm"),
    ("nextn.embed_tokens", "embed_tokens"),
    ("nextn.shared_head_norm", "shared_head.norm"),
    ("nextn.shared_head_head", "shared_head.head"),
];

/// Modules of experts in DeepSeek's names.
const EXPERT_MODULES: &[(&str, &str)] = &[
    ("ffn_gate_inp", "mlp.gate"),
    (CHOICE_BIAS, "mlp.gate.e_score_correction_bias"),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

/// Modules outside of layers.
pub(super) const OUTER: &[(&str, &str)] = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    // That of the output, under another name.
    ("token_embd_norm", "model.embedding_norm"),
    ("output", "lm_head"),
];

/// A vector in the file, a matrix of one row in Hugging Face layout.
pub(super) const ONE_ROW: &str = "ffn_gate_inp_shexp";

/// A bias of the choice of experts, which is a tensor and no module in Hugging Face layout.
const CHOICE_BIAS: &str = "exp_probs_b.bias";

/// One that is a matrix of one row in Hugging Face layout.
pub(super) const CHOICE_BIAS_ROW: &str = "mlp.moe_statics.e_score_correction_bias";

/// Tensors with the weights of all experts of a layer: gate, up, down.
pub(super) const EXPERTS: [&str; 3] = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];

/// Tensors that become part of the configuration.
pub(super) const ROPE_FACTORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

const BASE: Architecture = Architecture {
    name: "",
    class: "",
    class_of_experts: "",
    keys: &[],
    shared_keys: &[],
    lists: &[],
    flags: &[],
    constants: &[],
    modules: &[],
    shared_modules: &[],
    variant: None,
    arrays: &[],
    absent: &[],
    outer: &[],
    layers: "model.layers",
    predictor: None,
    experts: ("mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
    norms_plus_one: false,
    pairs: false,
    groups: false,
    scaling: &[],
    yarn: &[],
    refused: &[],
    layer_types: None,
    tiled: false,
    derive: |_, _| Ok(()),
    scaled_by_width: 0,
};

/// Biases that checkpoints of Llama's layers may have.
const BIASES: &[(&str, &str)] = &[("attention_bias", "attn_q.bias"), ("mlp_bias", "ffn_up.bias")];

/// Keys of experts in Qwen's names.
const QWEN_EXPERTS: &[(&str, &str)] = &[
    ("num_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
];

/// Keys of experts in DeepSeek's names.
const DEEPSEEK_EXPERTS: &[(&str, &str)] = &[
    ("n_routed_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
    ("n_shared_experts", "expert_shared_count"),
    ("first_k_dense_replace", "leading_dense_block_count"),
    ("routed_scaling_factor", "expert_weights_scale"),
    ("norm_topk_prob", "expert_weights_norm"),
];

const GEMMA_MODULES: &[(&str, &str)] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

const LLAMA: Architecture = Architecture { class: "LlamaForCausalLM", flags: BIASES, pairs: true, ..BASE };

const QWEN3_MOE: Architecture = Architecture {
    class_of_experts: "Qwen3MoeForCausalLM",
    keys: QWEN_EXPERTS,
    // The file's format knows only this form of the family.
    constants: &[("norm_topk_prob", "true"), ("decoder_sparse_step", "1")],
    modules: &[("ffn_gate_inp", "mlp.gate")],
    ..BASE
};

/// All supported architectures.
pub(super) fn all() -> impl Iterator<Item = &'static Architecture> {
    let decoders = [DENSE, plain::ARCHITECTURES, sparse::ARCHITECTURES, hybrid::ARCHITECTURES, latent::ARCHITECTURES];
    decoders.into_iter().chain([gemma::ARCHITECTURES, classic::ARCHITECTURES, encoders::ARCHITECTURES]).flatten()
}

const DENSE: &[Architecture] = &[
    Architecture {
        name: "llama",
        class: "LlamaForCausalLM",
        class_of_experts: "MixtralForCausalLM",
        keys: &[("num_local_experts", "expert_count"), ("num_experts_per_tok", "expert_used_count")],
        modules: &[("ffn_gate_inp", "block_sparse_moe.gate")],
        experts: ("block_sparse_moe.experts", ["w1", "w3", "w2"]),
        ..LLAMA
    },
    Architecture {
        name: "mistral3",
        class: "Ministral3ForCausalLM",
        scaling: &[("llama_4_scaling_beta", "attention.temperature_scale")],
        yarn: &[("mscale", "1.0"), ("mscale_all_dim", "1.0")],
        ..LLAMA
    },
    Architecture { name: "qwen2", class: "Qwen2ForCausalLM", ..BASE },
    Architecture { name: "qwen3", class: "Qwen3ForCausalLM", ..BASE },
    // Files of vision models hold the decoder. Text has the same position in every dimension of their RoPE.
    Architecture { name: "qwen2vl", class: "Qwen2ForCausalLM", ..BASE },
    Architecture { name: "qwen3vl", class: "Qwen3ForCausalLM", ..BASE },
    Architecture { name: "qwen3moe", ..QWEN3_MOE },
    Architecture { name: "qwen3vlmoe", ..QWEN3_MOE },
    Architecture {
        name: "gemma2",
        class: "Gemma2ForCausalLM",
        keys: &[
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("sliding_window", "attention.sliding_window"),
        ],
        modules: GEMMA_MODULES,
        norms_plus_one: true,
        scaled_by_width: 46,
        ..BASE
    },
    Architecture {
        name: "gemma3",
        class: "Gemma3ForCausalLM",
        keys: &[
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("sliding_window", "attention.sliding_window"),
            ("rope_local_base_freq", "rope.freq_base_swa"),
        ],
        modules: GEMMA_MODULES,
        norms_plus_one: true,
        scaled_by_width: 62,
        ..BASE
    },
    Architecture {
        name: "phi3",
        class: "Phi3ForCausalLM",
        keys: &[
            ("sliding_window", "attention.sliding_window"),
            ("original_max_position_embeddings", "rope.scaling.original_context_length"),
        ],
        modules: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")],
        ..BASE
    },
    Architecture {
        name: "gpt-oss",
        class_of_experts: "GptOssForCausalLM",
        keys: &[
            ("num_local_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("intermediate_size", "expert_feed_forward_length"),
            ("sliding_window", "attention.sliding_window"),
        ],
        modules: &[("post_attention_norm", "post_attention_layernorm"), ("ffn_gate_inp", "mlp.router")],
        yarn: &[("truncate", "false")],
        ..BASE
    },
    Architecture {
        name: "qwen2moe",
        class_of_experts: "Qwen2MoeForCausalLM",
        keys: &[
            ("num_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
            ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ],
        constants: &[("norm_topk_prob", "false"), ("decoder_sparse_step", "1")],
        modules: &[
            ("ffn_gate_inp", "mlp.gate"),
            (ONE_ROW, "mlp.shared_expert_gate"),
            ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
            ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
        ],
        ..BASE
    },
    Architecture { name: "gemma", class: "GemmaForCausalLM", norms_plus_one: true, ..BASE },
    Architecture {
        name: "granite",
        class: "GraniteForCausalLM",
        keys: &[
            ("attention_multiplier", "attention.scale"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("logits_scaling", "logit_scale"),
        ],
        ..LLAMA
    },
    Architecture { name: "smollm3", class: "SmolLM3ForCausalLM", ..LLAMA },
    Architecture {
        name: "olmo2",
        class: "Olmo2ForCausalLM",
        keys: &[("sliding_window", "attention.sliding_window")],
        modules: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ],
        // OLMo 3 has the layers of OLMo 2, most of them with a window.
        derive: |_, map| {
            if map.contains_key("sliding_window") {
                map.insert("architectures".into(), serde_json::json!(["Olmo3ForCausalLM"]));
            }
            Ok(())
        },
        ..BASE
    },
    Architecture {
        name: "seed_oss",
        class: "SeedOssForCausalLM",
        modules: &[("post_attention_norm", "post_attention_layernorm")],
        ..BASE
    },
    Architecture { name: "arcee", class: "ArceeForCausalLM", ..LLAMA },
    // Its RoPE is interleaved in Hugging Face layout too.
    Architecture { name: "ernie4_5", class: "Ernie4_5ForCausalLM", ..BASE },
    Architecture {
        name: "hunyuan-dense",
        class: "HunYuanDenseV1ForCausalLM",
        modules: &[("attn_q_norm", "self_attn.query_layernorm"), ("attn_k_norm", "self_attn.key_layernorm")],
        ..BASE
    },
    Architecture {
        name: "command-r",
        class: "CohereForCausalLM",
        keys: &[("layer_norm_eps", "attention.layer_norm_epsilon"), ("logit_scale", "logit_scale")],
        flags: &[("use_qk_norm", "attn_q_norm.weight")],
        ..BASE
    },
    Architecture {
        name: "cohere2",
        class: "Cohere2ForCausalLM",
        keys: &[
            ("layer_norm_eps", "attention.layer_norm_epsilon"),
            ("logit_scale", "logit_scale"),
            ("sliding_window", "attention.sliding_window"),
        ],
        ..BASE
    },
    Architecture {
        name: "glm4",
        class: "Glm4ForCausalLM",
        flags: &[("attention_bias", "attn_q.bias")],
        modules: &[
            ("post_attention_norm", "post_self_attn_layernorm"),
            ("post_ffw_norm", "post_mlp_layernorm"),
            ("ffn_up", "mlp.gate_up_proj"),
        ],
        ..BASE
    },
    Architecture {
        name: "glm4moe",
        class_of_experts: "Glm4MoeForCausalLM",
        keys: DEEPSEEK_EXPERTS,
        flags: &[("attention_bias", "attn_q.bias"), ("use_qk_norm", "attn_q_norm.weight")],
        modules: &[("post_attention_norm", "post_attention_layernorm")],
        shared_modules: EXPERT_MODULES,
        ..BASE
    },
    Architecture {
        name: "dots1",
        class_of_experts: "Dots1ForCausalLM",
        keys: DEEPSEEK_EXPERTS,
        shared_modules: EXPERT_MODULES,
        ..BASE
    },
    Architecture {
        name: "minimax-m2",
        class_of_experts: "MiniMaxM2ForCausalLM",
        keys: &[
            ("num_local_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("intermediate_size", "expert_feed_forward_length"),
            ("rotary_dim", ROTATED),
        ],
        modules: &[
            ("ffn_gate_inp", "block_sparse_moe.gate"),
            (CHOICE_BIAS, "block_sparse_moe.e_score_correction_bias"),
        ],
        experts: ("block_sparse_moe.experts", ["w1", "w3", "w2"]),
        ..BASE
    },
    Architecture {
        name: "exaone4",
        class: "Exaone4ForCausalLM",
        keys: &[("sliding_window", "attention.sliding_window")],
        modules: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ],
        ..BASE
    },
    Architecture {
        name: "starcoder2",
        class: "Starcoder2ForCausalLM",
        keys: &[("norm_epsilon", "attention.layer_norm_epsilon")],
        modules: &[("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")],
        ..BASE
    },
];
