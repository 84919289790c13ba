//! Architectures of 2019 to 2023: layer norms, learned positions or ALiBi, and one projection to queries, keys and values.

use serde_json::json;

use super::{Architecture, BASE, LAYER_EPS};

/// The shared keys in the names of GPT-2.
pub(super) const GPT2_KEYS: &[(&str, &str)] = &[
    ("n_positions", "context_length"),
    ("n_embd", "embedding_length"),
    ("n_layer", "block_count"),
    ("n_inner", "feed_forward_length"),
    ("n_head", "attention.head_count"),
    ("layer_norm_epsilon", LAYER_EPS),
];

/// The shared keys whose place these take.
pub(super) const GPT2_ABSENT: &[&str] = &[
    "max_position_embeddings",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_theta",
];

const STARCODER: Architecture = Architecture {
    class: "GPTBigCodeForCausalLM",
    keys: GPT2_KEYS,
    absent: GPT2_ABSENT,
    modules: &[
        ("attn_norm", "ln_1"),
        ("attn_qkv", "attn.c_attn"),
        ("attn_output", "attn.c_proj"),
        ("ffn_norm", "ln_2"),
        ("ffn_up", "mlp.c_fc"),
        ("ffn_down", "mlp.c_proj"),
    ],
    outer: &[("token_embd", "transformer.wte"), ("position_embd", "transformer.wpe"), FINAL_NORM],
    layers: "transformer.h",
    ..BASE
};

const FINAL_NORM: (&str, &str) = ("output_norm", "transformer.ln_f");

/// Modules of BLOOM, Falcon and GPT-NeoX.
const NETWORK: &[(&str, &str)] = &[("ffn_up", "mlp.dense_h_to_4h"), ("ffn_down", "mlp.dense_4h_to_h")];

const BLOOM: Architecture = Architecture {
    modules: &[("attn_qkv", "self_attention.query_key_value"), ("attn_output", "self_attention.dense")],
    shared_modules: NETWORK,
    outer: &[
        ("token_embd", "transformer.word_embeddings"),
        ("token_embd_norm", "transformer.word_embeddings_layernorm"),
        FINAL_NORM,
    ],
    layers: "transformer.h",
    groups: true,
    ..BASE
};

pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture { name: "starcoder", ..STARCODER },
    // Files have the matrices as GPTBigCode has them, and GPT-2 does not.
    Architecture { name: "gpt2", constants: &[("multi_query", "false")], groups: true, ..STARCODER },
    Architecture {
        name: "bloom",
        class: "BloomForCausalLM",
        keys: &[("layer_norm_epsilon", LAYER_EPS), ("n_inner", "feed_forward_length")],
        absent: &["intermediate_size", "rope_theta"],
        ..BLOOM
    },
    Architecture {
        name: "falcon",
        class: "FalconForCausalLM",
        keys: &[
            ("layer_norm_epsilon", LAYER_EPS),
            ("ffn_hidden_size", "feed_forward_length"),
            ("num_kv_heads", "attention.head_count_kv"),
        ],
        absent: &["intermediate_size", "num_key_value_heads"],
        variant: Some(("blk.0.attn_norm_2.weight", &[("attn_norm", "ln_mlp"), ("attn_norm_2", "ln_attn")])),
        // Falcon 40B and Falcon 2 have several key heads; only the first has two norms.
        derive: |metadata, map| {
            let heads = metadata.count("attention.head_count_kv")?.unwrap_or(1);
            if heads > 1 {
                let norms = if metadata.shape("blk.0.attn_norm_2.weight").is_some() { 2 } else { 1 };
                map.insert("new_decoder_architecture".into(), json!(true));
                map.insert("num_ln_in_parallel_attn".into(), json!(norms));
            }
            Ok(())
        },
        ..BLOOM
    },
    Architecture {
        name: "gptneox",
        class: "GPTNeoXForCausalLM",
        keys: &[
            ("layer_norm_eps", LAYER_EPS),
            ("use_parallel_residual", "use_parallel_residual"),
            ("rotary_emb_base", "rope.freq_base"),
        ],
        flags: &[("attention_bias", "attn_qkv.bias")],
        modules: &[("attn_qkv", "attention.query_key_value"), ("attn_output", "attention.dense")],
        shared_modules: NETWORK,
        absent: &["num_key_value_heads", "rope_theta", "partial_rotary_factor"],
        outer: &[
            ("token_embd", "gpt_neox.embed_in"),
            ("output_norm", "gpt_neox.final_layer_norm"),
            ("output", "embed_out"),
        ],
        layers: "gpt_neox.layers",
        groups: true,
        derive: |_, map| {
            // Files state the rotated share of a head only where it is not whole.
            let share = map.get("partial_rotary_factor").cloned().unwrap_or(json!(1.0));
            map.insert("rotary_pct".into(), share);
            Ok(())
        },
        ..BASE
    },
    Architecture {
        name: "mpt",
        class: "MptForCausalLM",
        keys: &[
            ("max_seq_len", "context_length"),
            ("d_model", "embedding_length"),
            ("n_layers", "block_count"),
            ("n_heads", "attention.head_count"),
            ("layer_norm_epsilon", LAYER_EPS),
        ],
        absent: GPT2_ABSENT,
        modules: &[
            ("attn_norm", "norm_1"),
            ("attn_qkv", "attn.Wqkv"),
            ("attn_output", "attn.out_proj"),
            ("ffn_norm", "norm_2"),
            ("ffn_up", "ffn.up_proj"),
            ("ffn_down", "ffn.down_proj"),
        ],
        outer: &[("token_embd", "transformer.wte"), ("output_norm", "transformer.norm_f")],
        layers: "transformer.blocks",
        derive: |metadata, map| {
            const BIAS: &str = "attention.max_alibi_bias";
            let bias = metadata.number(BIAS)?.and_then(|bias| bias.as_f64()).filter(|bias| *bias > 0.0);
            let bias =
                bias.ok_or_else(|| metadata.wrong(BIAS, "a number above 0: learned positions are not supported"))?;
            let clip = metadata.number("attention.clamp_kqv")?;
            map.insert("attn_config".into(), json!({"alibi": true, "alibi_bias_max": bias, "clip_qkv": clip}));
            let ratio = metadata.quotient("feed_forward_length", "embedding_length")?;
            map.insert("expansion_ratio".into(), json!(ratio));
            Ok(())
        },
        ..BASE
    },
    Architecture {
        name: "phi2",
        class: "PhiForCausalLM",
        keys: &[("layer_norm_eps", LAYER_EPS)],
        constants: &[("partial_rotary_factor", "1.0")],
        modules: &[("attn_output", "self_attn.dense"), ("ffn_up", "mlp.fc1"), ("ffn_down", "mlp.fc2")],
        outer: &[("output_norm", "model.final_layernorm")],
        ..BASE
    },
];
