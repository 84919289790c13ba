//! Small configurations of every family with its options, in the keys that transformers writes.

use serde_json::{Value, json};

use super::case::{Case, skeleton, with};
use super::gemma4_cases::gemma4;
use super::{falcon_h1, gemma3n, kimi, mimo, minicpm, phi3_small, recent_cases, recurrent, states, variants};

pub fn all() -> Vec<Case> {
    let families = [
        llama(),
        mistral_and_qwen(),
        gemma(),
        post_norm(),
        glm_and_deepseek(),
        experts(),
        layer_norm(),
        falcon_and_mpt(),
        gemma3n::cases(),
        gemma4(),
        variants::cases(),
        mimo::cases(),
        minicpm::cases(),
        phi3_small::cases(),
        recurrent::cases(),
        states::cases(),
        falcon_h1::cases(),
        kimi::cases(),
        recent_cases::cases(),
    ];
    families.into_iter().flatten().collect()
}

fn llama() -> Vec<Case> {
    let llama = skeleton("LlamaForCausalLM", "llama");
    let granite = skeleton("GraniteForCausalLM", "granite");
    let phi3 = skeleton("Phi3ForCausalLM", "phi3");
    let short: Vec<f64> = (0..6).map(|i| 1.0 + 0.1 * f64::from(i)).collect();
    let long: Vec<f64> = (0..6).map(|i| 1.0 + 0.7 * f64::from(i)).collect();
    let longrope = json!({
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 32, "max_position_embeddings": 96,
        "rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": long},
        "attention_bias": false, "head_dim": null, "num_attention_heads": 3, "num_key_value_heads": 3,
        "sliding_window": 23, "tie_word_embeddings": true,
    });
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8,
        "mscale": 0.9, "mscale_all_dim": 0.4, "rope_theta": 5000.0});
    vec![
        with(
            &llama,
            "llama, every bias, odd heads",
            json!({"attention_bias": true, "mlp_bias": true,
            "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 12}),
        ),
        with(
            &llama,
            "llama, tied, linear rope",
            json!({"tie_word_embeddings": true,
            "rope_scaling": {"type": "linear", "factor": 3.0}}),
        ),
        with(&llama, "llama, dynamic rope", json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})),
        with(
            &llama,
            "llama, yarn with mscale",
            json!({"rope_parameters": yarn, "rope_theta": null, "dtype": "bfloat16"}),
        ),
        with(
            &llama,
            "llama, llama3 rope",
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
        ),
        with(
            &granite,
            "granite",
            json!({"attention_bias": true, "mlp_bias": true, "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 2.5, "head_dim": null,
            "num_attention_heads": 3, "num_key_value_heads": 1}),
        ),
        with(&phi3, "phi3, longrope", longrope),
        with(&phi3, "phi3, packed groups", json!({"head_dim": null, "num_attention_heads": 6, "sliding_window": null})),
        with(
            &skeleton("OlmoForCausalLM", "olmo"),
            "olmo",
            json!({"clip_qkv": 0.9, "head_dim": null,
            "num_attention_heads": 3, "num_key_value_heads": 3}),
        ),
        with(
            &skeleton("OlmoForCausalLM", "olmo"),
            "olmo, no clip, biased",
            json!({"attention_bias": true,
            "clip_qkv": null, "head_dim": null, "num_attention_heads": 2, "num_key_value_heads": 1}),
        ),
        with(
            &skeleton("SmolLM3ForCausalLM", "smollm3"),
            "smollm3, biased, intervals",
            json!({"attention_bias": true,
            "mlp_bias": true, "num_hidden_layers": 3, "no_rope_layer_interval": 2, "head_dim": null,
            "no_rope_layers": null, "tie_word_embeddings": true}),
        ),
        with(
            &skeleton("SmolLM3ForCausalLM", "smollm3"),
            "smollm3, sliding",
            json!({"use_sliding_window": true,
            "sliding_window": 11, "no_rope_layers": [1, 0], "head_dim": null}),
        ),
    ]
}

fn mistral_and_qwen() -> Vec<Case> {
    let mistral = skeleton("MistralForCausalLM", "mistral");
    let qwen2 = skeleton("Qwen2ForCausalLM", "qwen2");
    let qwen3 = skeleton("Qwen3ForCausalLM", "qwen3");
    let ministral3 = skeleton("Ministral3ForCausalLM", "ministral3");
    let scaling = json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1});
    vec![
        with(&mistral, "mistral, window and wide heads", json!({"head_dim": 20, "sliding_window": 9})),
        with(
            &ministral3,
            "ministral3",
            json!({"rope_parameters": scaling, "rope_theta": null, "dtype": "bfloat16",
            "sliding_window": 29}),
        ),
        with(
            &qwen2,
            "qwen2, layers from 1 slide",
            json!({"head_dim": null, "use_sliding_window": true,
            "sliding_window": 10, "max_window_layers": 1, "num_hidden_layers": 3, "num_attention_heads": 3,
            "num_key_value_heads": 3}),
        ),
        with(
            &qwen3,
            "qwen3, biased and tied",
            json!({"attention_bias": true, "tie_word_embeddings": true,
            "head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 1}),
        ),
    ]
}

fn gemma() -> Vec<Case> {
    let gemma = skeleton("GemmaForCausalLM", "gemma");
    let gemma2 = skeleton("Gemma2ForCausalLM", "gemma2");
    let gemma3 = skeleton("Gemma3ForCausalLM", "gemma3_text");
    let tied = json!({"tie_word_embeddings": null});
    let base = |class: &Value, more: Value| with(&with(class, "", tied.clone()).config, "", more).config;
    let gemma3 = base(
        &gemma3,
        json!({"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 20, "sliding_window": 7, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "attn_logit_softcapping": null, "final_logit_softcapping": null, "num_hidden_layers": 4}),
    );
    vec![
        with(
            &base(&gemma, json!({})),
            "gemma, old activation",
            json!({"hidden_act": "gelu", "num_key_value_heads": 1,
            "head_dim": 32}),
        ),
        with(
            &base(&gemma, json!({})),
            "gemma, narrow, biased",
            json!({"hidden_act": "gelu_pytorch_tanh",
            "attention_bias": true, "torch_dtype": "bfloat16"}),
        ),
        with(
            &base(&gemma2, json!({})),
            "gemma2, no caps",
            json!({"hidden_act": null,
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 8,
            "attn_logit_softcapping": null, "final_logit_softcapping": null, "num_hidden_layers": 3}),
        ),
        with(
            &base(&gemma2, json!({})),
            "gemma2, biased, small caps",
            json!({"hidden_act": null, "attention_bias": true,
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12, "sliding_window": 13,
            "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
        ),
        with(
            &gemma3,
            "gemma3, linear rope of full layers",
            json!({"sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ),
        with(
            &gemma3,
            "gemma3, layer types",
            json!({"num_hidden_layers": 3, "torch_dtype": "bfloat16",
            "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ),
    ]
}

fn post_norm() -> Vec<Case> {
    let olmo2 = skeleton("Olmo2ForCausalLM", "olmo2");
    let olmo3 = skeleton("Olmo3ForCausalLM", "olmo3");
    let exaone4 = skeleton("Exaone4ForCausalLM", "exaone4");
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
        "beta_slow": 1.0, "attention_factor": 1.2});
    let llama3 = json!({"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16});
    let cohere = skeleton("CohereForCausalLM", "cohere");
    let cohere2 = skeleton("Cohere2ForCausalLM", "cohere2");
    let cohere_keys = json!({"layer_norm_eps": 1e-5, "logit_scale": 0.3, "head_dim": null, "rms_norm_eps": null,
        "tie_word_embeddings": null});
    let (cohere, cohere2) = (with(&cohere, "", cohere_keys.clone()).config, with(&cohere2, "", cohere_keys).config);
    vec![
        with(
            &olmo2,
            "olmo2, biased",
            json!({"attention_bias": true, "head_dim": null, "num_attention_heads": 3,
            "num_key_value_heads": 1}),
        ),
        with(
            &olmo3,
            "olmo3, pattern and yarn",
            json!({"head_dim": null, "num_hidden_layers": 4, "sliding_window": 6,
            "rope_scaling": yarn}),
        ),
        with(
            &olmo3,
            "olmo3, layer types",
            json!({"head_dim": null, "num_attention_heads": 3, "num_key_value_heads": 1, "attention_bias": true, "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention"]}),
        ),
        with(
            &exaone4,
            "exaone4, pattern LLG",
            json!({"num_hidden_layers": 3, "sliding_window": 8,
            "sliding_window_pattern": "LLG", "rope_scaling": llama3}),
        ),
        with(
            &exaone4,
            "exaone4, no window",
            json!({"sliding_window": null, "sliding_window_pattern": null,
            "tie_word_embeddings": true, "rope_scaling": llama3}),
        ),
        with(
            &cohere,
            "cohere, norms of heads",
            json!({"use_qk_norm": true, "num_attention_heads": 6,
            "num_key_value_heads": 3}),
        ),
        with(
            &cohere,
            "cohere, biased",
            json!({"use_qk_norm": false, "attention_bias": true,
            "num_attention_heads": 3, "num_key_value_heads": 3}),
        ),
        with(&cohere2, "cohere2", json!({"num_hidden_layers": 3, "sliding_window": 9, "sliding_window_pattern": 3})),
        with(
            &cohere2,
            "cohere2, layer types, untied",
            json!({"num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": 9, "tie_word_embeddings": false,
            "layer_types": ["full_attention", "sliding_attention"]}),
        ),
    ]
}

fn glm_and_deepseek() -> Vec<Case> {
    let glm = skeleton("GlmForCausalLM", "glm");
    let glm4 = skeleton("Glm4ForCausalLM", "glm4");
    let moe = json!({"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "moe_intermediate_size": 20, "routed_scaling_factor": 2.5, "norm_topk_prob": true, "n_group": 1, "topk_group": 1});
    let glm4_moe = with(&skeleton("Glm4MoeForCausalLM", "glm4_moe"), "", moe.clone()).config;
    let mla = json!({"q_lora_rank": 20, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
        "head_dim": null, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "moe_layer_freq": 1, "scoring_func": "sigmoid"});
    let v2 = with(&skeleton("DeepseekV2ForCausalLM", "deepseek_v2"), "", moe.clone()).config;
    let v3 = with(&skeleton("DeepseekV3ForCausalLM", "deepseek_v3"), "", moe).config;
    let (v2, v3) = (with(&v2, "", mla.clone()).config, with(&v3, "", mla).config);
    let indexed = json!({"index_topk": 7, "index_n_heads": 3, "index_head_dim": 20, "num_hidden_layers": 4});
    let of_class = |class: &str, kind: &str| {
        with(&with(&v3, "", indexed.clone()).config, "", json!({"architectures": [class], "model_type": kind})).config
    };
    let v32 = of_class("DeepseekV32ForCausalLM", "deepseek_v32");
    let glm5 = of_class("GlmMoeDsaForCausalLM", "glm_moe_dsa");
    let yarn = json!({"type": "yarn", "factor": 8, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 0.8});
    vec![
        with(
            &glm,
            "glm",
            json!({"attention_bias": true, "partial_rotary_factor": 0.5, "num_attention_heads": 3,
            "num_key_value_heads": 1, "rms_norm_eps": 1.5625e-7}),
        ),
        with(&glm4, "glm4, no bias", json!({"partial_rotary_factor": 0.25})),
        with(
            &glm4_moe,
            "glm4_moe, norms of heads",
            json!({"attention_bias": true, "use_qk_norm": true,
            "partial_rotary_factor": 0.5}),
        ),
        with(
            &glm4_moe,
            "glm4_moe, groups, no renorm",
            json!({"attention_bias": false, "use_qk_norm": false,
            "partial_rotary_factor": 0.5, "norm_topk_prob": false, "n_group": 4, "topk_group": 2,
            "n_shared_experts": 2, "first_k_dense_replace": 0, "num_hidden_layers": 2, "tie_word_embeddings": true}),
        ),
        with(
            &v2,
            "deepseek v2, groups",
            json!({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "scoring_func": "softmax", "norm_topk_prob": false, "num_hidden_layers": 3, "routed_scaling_factor": 16.0, "rope_scaling": yarn.clone()}),
        ),
        with(
            &v2,
            "deepseek v2, no rank of queries, biased",
            json!({"topk_method": "greedy", "scoring_func": "softmax",
            "norm_topk_prob": false, "q_lora_rank": null, "attention_bias": true, "n_shared_experts": 2}),
        ),
        with(
            &v3,
            "deepseek v3, groups and yarn",
            json!({"topk_method": "noaux_tc", "n_group": 4, "topk_group": 2,
            "rope_scaling": yarn, "num_hidden_layers": 3, "num_nextn_predict_layers": 1}),
        ),
        with(
            &v32,
            "deepseek v3.2, yarn",
            json!({"rope_scaling": yarn.clone(), "layer_types": vec!["indexed_attention"; 4], "num_attention_heads": 3,
                "num_key_value_heads": 3}),
        ),
        with(
            &glm5,
            "glm 5, shared choices, whole pieces of 8 elements",
            json!({"indexer_types": ["full", "shared", "full", "shared"], "index_head_dim": 24}),
        ),
        with(
            &glm5,
            "glm 5, a pattern, halves",
            json!({"index_topk_pattern": "FFSS", "indexer_rope_interleave": false}),
        ),
        with(&glm5, "glm 5, every second", json!({"index_topk_freq": 2, "index_skip_topk_offset": 1})),
        with(
            &v3,
            "deepseek v3, one group, no renorm",
            json!({"topk_method": "noaux_tc", "norm_topk_prob": false,
            "torch_dtype": "bfloat16", "num_attention_heads": 3, "num_key_value_heads": 3}),
        ),
    ]
}

fn experts() -> Vec<Case> {
    let mixtral = skeleton("MixtralForCausalLM", "mixtral");
    let olmoe = skeleton("OlmoeForCausalLM", "olmoe");
    let granite = json!({"num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 3.0, "head_dim": null});
    let granite_moe = with(&skeleton("GraniteMoeForCausalLM", "granitemoe"), "", granite.clone()).config;
    let granite_shared = with(&skeleton("GraniteMoeSharedForCausalLM", "granitemoeshared"), "", granite).config;
    let qwen = json!({"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": false, "shared_expert_intermediate_size": 28});
    let qwen2 = with(&skeleton("Qwen2MoeForCausalLM", "qwen2_moe"), "", qwen.clone()).config;
    let qwen3 = with(&skeleton("Qwen3MoeForCausalLM", "qwen3_moe"), "", json!({"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": false})).config;
    let gpt_oss = skeleton("GptOssForCausalLM", "gpt_oss");
    vec![
        with(
            &mixtral,
            "mixtral, window, one expert each",
            json!({"num_local_experts": 3, "num_experts_per_tok": 1,
            "sliding_window": 10}),
        ),
        with(
            &olmoe,
            "olmoe, clip",
            json!({"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": false,
            "clip_qkv": 0.8, "head_dim": null}),
        ),
        with(
            &olmoe,
            "olmoe, renorm, biased",
            json!({"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": true,
            "attention_bias": true, "head_dim": null, "num_attention_heads": 3, "num_key_value_heads": 3}),
        ),
        with(
            &granite_moe,
            "granitemoe",
            json!({"num_attention_heads": 3, "num_key_value_heads": 1, "attention_bias": true}),
        ),
        with(&granite_shared, "granitemoeshared", json!({"shared_intermediate_size": 24, "tie_word_embeddings": true})),
        with(
            &granite_shared,
            "granitemoeshared, none shared",
            json!({"num_attention_heads": 3, "num_key_value_heads": 1, "shared_intermediate_size": 0}),
        ),
        with(
            &qwen2,
            "qwen2_moe, renorm, every second layer",
            json!({"norm_topk_prob": true, "decoder_sparse_step": 2,
            "head_dim": null, "num_hidden_layers": 3}),
        ),
        with(&qwen2, "qwen2_moe, no bias", json!({"qkv_bias": false, "head_dim": null})),
        with(&qwen3, "qwen3_moe, no renorm, dense layer", json!({"mlp_only_layers": [0], "attention_bias": true})),
        with(
            &gpt_oss,
            "gpt_oss, odd",
            json!({"attention_bias": true, "num_local_experts": 3, "num_experts_per_tok": 2,
            "sliding_window": 5, "intermediate_size": 20, "swiglu_limit": 0.5, "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ),
    ]
}

fn layer_norm() -> Vec<Case> {
    let stablelm = with(
        &skeleton("StableLmForCausalLM", "stablelm"),
        "",
        json!({"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "head_dim": null, "hidden_size": 64}),
    )
    .config;
    let starcoder2 = with(
        &skeleton("Starcoder2ForCausalLM", "starcoder2"),
        "",
        json!({"norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh", "head_dim": null, "tie_word_embeddings": null}),
    )
    .config;
    let bigcode = json!({"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "vocab_size": 80,
        "n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 64, "n_inner": null, "multi_query": true,
        "activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5, "bos_token_id": 0, "eos_token_id": 0});
    let gpt2 = json!({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 80, "n_embd": 48,
        "n_layer": 2, "n_head": 3, "n_positions": 64, "n_ctx": 64, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "bos_token_id": 0, "eos_token_id": 0});
    let opt = json!({"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 80, "hidden_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 70, "max_position_embeddings": 64,
        "word_embed_proj_dim": 48, "do_layer_norm_before": true, "activation_function": "relu", "bos_token_id": 2,
        "eos_token_id": 2, "pad_token_id": 1, "_remove_final_layer_norm": false});
    let neox = json!({"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 80,
        "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 112,
        "max_position_embeddings": 64, "rotary_pct": 0.25, "rotary_emb_base": 10000, "layer_norm_eps": 1e-5,
        "hidden_act": "gelu", "use_parallel_residual": false, "tie_word_embeddings": false, "eos_token_id": 0});
    vec![
        with(
            &stablelm,
            "stablelm, parallel, norms of heads",
            json!({"use_qkv_bias": true, "qk_layernorm": true,
            "use_parallel_residual": true}),
        ),
        with(
            &stablelm,
            "stablelm, sequential",
            json!({"use_qkv_bias": false, "qk_layernorm": false,
            "use_parallel_residual": false, "partial_rotary_factor": 0.5}),
        ),
        with(
            &stablelm,
            "stablelm, sequential, norms of heads, tied",
            json!({"use_qkv_bias": true, "qk_layernorm": true,
            "tie_word_embeddings": true}),
        ),
        with(
            &starcoder2,
            "starcoder2, no bias, untied",
            json!({"use_bias": false, "tie_word_embeddings": false,
            "sliding_window": null, "num_attention_heads": 3, "num_key_value_heads": 1}),
        ),
        with(&bigcode, "gpt_bigcode, one key head", json!({"n_inner": 70})),
        with(&bigcode, "gpt_bigcode, a key head each", json!({"multi_query": false})),
        with(
            &gpt2,
            "gpt2, inner size, scale by layer",
            json!({"n_inner": 70, "scale_attn_by_inverse_layer_idx": true}),
        ),
        with(&opt, "opt, norms after, narrow words", json!({"do_layer_norm_before": false, "word_embed_proj_dim": 32})),
        with(
            &opt,
            "opt, norms before, no bias, no last norm",
            json!({"enable_bias": false,
            "_remove_final_layer_norm": true, "activation_function": "gelu"}),
        ),
        with(&neox, "gpt_neox, sequential", json!({})),
        with(
            &neox,
            "gpt_neox, no bias, half rotary",
            json!({"attention_bias": false, "rotary_pct": 0.5,
            "use_parallel_residual": true, "tie_word_embeddings": true}),
        ),
    ]
}

fn falcon_and_mpt() -> Vec<Case> {
    let falcon = json!({"architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": 80,
        "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 64,
        "layer_norm_epsilon": 1e-5, "alibi": false, "bias": false, "multi_query": true, "parallel_attn": true,
        "new_decoder_architecture": false, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2});
    let mpt = json!({"architectures": ["MptForCausalLM"], "model_type": "mpt", "vocab_size": 80, "d_model": 60,
        "n_layers": 2, "n_heads": 5, "expansion_ratio": 2, "max_seq_len": 64, "no_bias": true,
        "attn_config": {"alibi": true, "alibi_bias_max": 8, "clip_qkv": 0.7, "attn_type": "multihead_attention",
            "softmax_scale": null, "qk_ln": false}});
    vec![
        with(
            &falcon,
            "falcon, groups, two norms",
            json!({"new_decoder_architecture": true, "num_kv_heads": 3,
            "num_ln_in_parallel_attn": null}),
        ),
        with(
            &falcon,
            "falcon, groups, one norm, biased",
            json!({"new_decoder_architecture": true, "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1, "bias": true, "ffn_hidden_size": 100, "tie_word_embeddings": false}),
        ),
        with(&falcon, "falcon, one key head", json!({})),
        with(
            &falcon,
            "falcon, ALiBi, sequential, biased",
            json!({"alibi": true, "multi_query": false,
            "parallel_attn": false, "bias": true}),
        ),
        with(
            &falcon,
            "falcon, rope, sequential, a key head each",
            json!({"multi_query": false, "parallel_attn": false}),
        ),
        with(&mpt, "mpt, odd heads and clip", json!({})),
        with(
            &mpt,
            "mpt, own scale",
            json!({"d_model": 48, "n_heads": 6, "expansion_ratio": 4,
            "attn_config": {"alibi": true, "alibi_bias_max": 4, "softmax_scale": 0.2}}),
        ),
        with(
            &json!({"architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 80, "hidden_size": 60,
            "n_layer": 2, "n_head": 5, "layer_norm_epsilon": 1e-5, "bos_token_id": 1, "eos_token_id": 2}),
            "bloom, odd heads",
            json!({"torch_dtype": "bfloat16"}),
        ),
    ]
}
