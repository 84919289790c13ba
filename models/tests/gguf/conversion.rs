//! Every architecture: a file made from a configuration in Hugging Face layout declares the same decoder and gives the same tensors.

use std::collections::BTreeMap;

use models::{ModelConfig, ModelFiles, Weights, check_weights};
use serde_json::{Value, json};

use super::made::{Made, f32_value, text_value, u32_value, usual_keys};
use super::made_vocabulary::{files, sized};
use crate::common::{folder, message};
use crate::texts::TextFiles;

/// Number `i` of a tensor: a multiple of 1/64 from 1 to 2, so that 1 can be added without rounding.
fn value(name: &str, i: usize) -> f32 {
    let seed = name.bytes().fold(7_usize, |seed, byte| seed.wrapping_mul(31).wrapping_add(usize::from(byte)));
    1.0 + ((seed ^ i.wrapping_mul(2_654_435_761)) >> 7 & 63) as f32 / 64.0
}

fn values(name: &str, shape: &[usize]) -> Vec<f32> {
    (0..shape.iter().product()).map(|i| value(name, i)).collect()
}

/// A reference case, its architecture, changes of its configuration, and keys that only this architecture has.
struct Case(&'static str, &'static str, Value, Vec<(&'static str, Vec<u8>)>);

fn cases() -> Vec<Case> {
    let (u, f, t) = (u32_value, f32_value, text_value);
    vec![
        Case("llama", "llama", json!({}), vec![]),
        Case("mixtral", "llama", json!({}), vec![("expert_count", u(4)), ("expert_used_count", u(2))]),
        Case("qwen2", "qwen2", json!({}), vec![]),
        Case("qwen3", "qwen3", json!({}), vec![]),
        Case(
            "qwen3-moe",
            "qwen3moe",
            json!({"mlp_only_layers": []}),
            vec![("expert_count", u(8)), ("expert_used_count", u(3)), ("expert_feed_forward_length", u(32))],
        ),
        Case(
            "gemma2",
            "gemma2",
            json!({"query_pre_attn_scalar": 32}),
            vec![
                ("attention.sliding_window", u(32)),
                ("attn_logit_softcapping", f(20.0)),
                ("final_logit_softcapping", f(30.0)),
            ],
        ),
        Case("gemma3-text", "gemma3", json!({"sliding_window_pattern": 6}), vec![("attention.sliding_window", u(24))]),
        Case(
            "phi3-longrope",
            "phi3",
            json!({"rope_scaling": null, "original_max_position_embeddings": null, "sliding_window": 40}),
            vec![("attention.sliding_window", u(40)), ("rope.dimension_count", u(24))],
        ),
        Case(
            "phi3-longrope",
            "phi3",
            json!({"rope_scaling": {
                "type": "longrope",
                "original_max_position_embeddings": 96,
                "long_factor": vec![1.5; 12],
                "short_factor": vec![1.25; 12],
            }}),
            vec![
                ("attention.sliding_window", u(1024)),
                ("rope.dimension_count", u(24)),
                ("rope.scaling.original_context_length", u(96)),
            ],
        ),
        Case(
            "gpt-oss",
            "gpt-oss",
            json!({}),
            vec![
                ("expert_count", u(5)),
                ("expert_used_count", u(2)),
                ("expert_feed_forward_length", u(48)),
                ("attention.sliding_window", u(16)),
                ("rope.scaling.type", t("yarn")),
                ("rope.scaling.factor", f(4.0)),
                ("rope.scaling.original_context_length", u(64)),
                ("rope.scaling.yarn_beta_fast", f(8.0)),
                ("rope.scaling.yarn_beta_slow", f(1.0)),
            ],
        ),
        Case(
            "qwen2-moe",
            "qwen2moe",
            json!({}),
            vec![
                ("expert_count", u(6)),
                ("expert_used_count", u(3)),
                ("expert_feed_forward_length", u(20)),
                ("expert_shared_feed_forward_length", u(48)),
            ],
        ),
        Case("gemma2", "gemma", json!({"architectures": ["GemmaForCausalLM"]}), vec![]),
        Case(
            "granite",
            "granite",
            json!({}),
            vec![
                ("attention.scale", f(0.2625)),
                ("embedding_scale", f(12.0)),
                ("residual_scale", f(0.45)),
                ("logit_scale", f(5.0)),
            ],
        ),
        Case("smollm3", "smollm3", json!({}), vec![]),
        Case("olmo2", "olmo2", json!({}), vec![]),
        Case("llama", "seed_oss", json!({"architectures": ["SeedOssForCausalLM"], "attention_bias": true}), vec![]),
        Case("llama", "arcee", json!({"architectures": ["ArceeForCausalLM"], "hidden_act": "relu2"}), vec![]),
        Case("llama", "ernie4_5", json!({"architectures": ["Ernie4_5ForCausalLM"]}), vec![]),
        Case(
            "lfm2-moe",
            "lfm2",
            json!({"architectures": ["Lfm2ForCausalLM"], "num_experts": null, "block_auto_adjust_ff_dim": false}),
            vec![("attention.head_count_kv", kv_heads()), ("shortconv.l_cache", u(3))],
        ),
        Case(
            "lfm2-moe",
            "lfm2moe",
            json!({"routed_scaling_factor": null}),
            vec![
                ("attention.head_count_kv", kv_heads()),
                ("shortconv.l_cache", u(3)),
                ("expert_count", u(6)),
                ("expert_used_count", u(2)),
                ("expert_feed_forward_length", u(24)),
                ("leading_dense_block_count", u(1)),
            ],
        ),
        Case("qwen2", "qwen2vl", json!({}), vec![]),
        Case("qwen3", "qwen3vl", json!({}), vec![]),
        Case(
            "qwen3-moe",
            "qwen3vlmoe",
            json!({"mlp_only_layers": []}),
            vec![("expert_count", u(8)), ("expert_used_count", u(3)), ("expert_feed_forward_length", u(32))],
        ),
        Case(
            "llama",
            "mistral3",
            json!({"architectures": ["Ministral3ForCausalLM"], "rope_parameters": {
                "rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
            }}),
            vec![
                ("rope.scaling.type", t("yarn")),
                ("rope.scaling.factor", f(4.0)),
                ("rope.scaling.original_context_length", u(128)),
                ("rope.scaling.yarn_beta_fast", f(32.0)),
                ("rope.scaling.yarn_beta_slow", f(1.0)),
                ("rope.scaling.yarn_log_multiplier", f(1.0)),
                ("attention.temperature_scale", f(0.5)),
            ],
        ),
        Case(
            "llama",
            "command-r",
            json!({"architectures": ["CohereForCausalLM"], "layer_norm_eps": 0.125, "logit_scale": 0.25, "use_qk_norm": true}),
            vec![
                ("attention.layer_norm_epsilon", f(0.125)),
                ("logit_scale", f(0.25)),
                ("rope.scaling.type", t("none")),
            ],
        ),
        Case(
            "llama",
            "cohere2",
            json!({"architectures": ["Cohere2ForCausalLM"], "layer_norm_eps": 0.125, "logit_scale": 0.25,
                "sliding_window": 48, "sliding_window_pattern": 4, "num_hidden_layers": 5}),
            vec![
                ("attention.layer_norm_epsilon", f(0.125)),
                ("logit_scale", f(0.25)),
                ("attention.sliding_window", u(48)),
                ("rope.dimension_count", u(32)),
            ],
        ),
        Case(
            "llama",
            "glm4",
            json!({"architectures": ["Glm4ForCausalLM"], "attention_bias": true, "partial_rotary_factor": 0.5}),
            vec![("rope.dimension_count", u(16))],
        ),
        Case(
            "llama",
            "glm4moe",
            json!({"architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "use_qk_norm": true,
                "partial_rotary_factor": 0.5, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1,
                "moe_intermediate_size": 24, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
                "norm_topk_prob": true, "num_hidden_layers": 3}),
            deepseek_experts(vec![
                ("block_count", u(4)),
                ("nextn_predict_layers", u(1)),
                ("rope.dimension_count", u(16)),
            ]),
        ),
        Case(
            "llama",
            "dots1",
            json!({"architectures": ["Dots1ForCausalLM"], "n_routed_experts": 5, "num_experts_per_tok": 2,
                "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
                "routed_scaling_factor": 1.5, "norm_topk_prob": true}),
            deepseek_experts(vec![]),
        ),
        Case(
            "llama",
            "minimax-m2",
            json!({"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2,
                "intermediate_size": 24, "rotary_dim": 16}),
            vec![
                ("feed_forward_length", u(24)),
                ("expert_count", u(5)),
                ("expert_used_count", u(2)),
                ("expert_feed_forward_length", u(24)),
                ("rope.dimension_count", u(16)),
            ],
        ),
        Case(
            "llama",
            "exaone4",
            json!({"architectures": ["Exaone4ForCausalLM"], "sliding_window": 48,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
            vec![
                ("attention.sliding_window", u(48)),
                ("attention.sliding_window_pattern", super::made::array_value(7, 3, &[1, 0, 1])),
            ],
        ),
        Case(
            "llama",
            "starcoder2",
            json!({"architectures": ["Starcoder2ForCausalLM"], "norm_epsilon": 0.125, "use_bias": true, "hidden_act": "gelu_pytorch_tanh"}),
            vec![("attention.layer_norm_epsilon", f(0.125))],
        ),
        Case("llama", "hunyuan-dense", json!({"architectures": ["HunYuanDenseV1ForCausalLM"]}), vec![]),
    ]
}

/// Keys of experts of the kind of DeepSeek V3, and others.
fn deepseek_experts(mut keys: Vec<(&'static str, Vec<u8>)>) -> Vec<(&'static str, Vec<u8>)> {
    let (u, truth) = (u32_value, [&7_u32.to_le_bytes()[..], &[1]].concat());
    keys.extend([
        ("expert_count", u(5)),
        ("expert_used_count", u(2)),
        ("expert_feed_forward_length", u(24)),
        ("expert_shared_count", u(1)),
        ("leading_dense_block_count", u(1)),
        ("expert_weights_scale", f32_value(1.5)),
        ("expert_weights_norm", truth),
        ("expert_gating_func", u(2)),
    ]);
    keys
}

/// Key/value heads of four layers: none, one, none, one.
fn kv_heads() -> Vec<u8> {
    super::made::array_value(4, 4, &[0_u32, 1, 0, 1].map(u32::to_le_bytes).concat())
}

/// The name of a tensor in the file, and of which expert it is.
fn stored(architecture: &str, name: &str) -> (String, Option<usize>) {
    let Some(rest) = name.strip_prefix("model.layers.") else {
        let plain = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm");
        let plain = plain.replace("model.embedding_norm", "token_embd_norm");
        return (plain.replace("lm_head", "output"), None);
    };
    let (layer, rest) = rest.split_once('.').unwrap();
    if let Some((_, expert)) = rest.split_once(".experts.") {
        let (expert, rest) = expert.split_once('.').unwrap();
        let (part, suffix) = rest.split_once('.').unwrap();
        let part = match part {
            "gate_proj" | "w1" => "ffn_gate_exps",
            "up_proj" | "w3" => "ffn_up_exps",
            _ => "ffn_down_exps",
        };
        if architecture == "llama" && layer == "1" {
            // Files of early 2024 have a tensor for each expert.
            return (format!("blk.{layer}.{}.{expert}.{suffix}", part.replace("_exps", "")), None);
        }
        return (format!("blk.{layer}.{part}.{suffix}"), Some(expert.parse().unwrap()));
    }
    let norms_after =
        ["gemma2", "gemma3", "gpt-oss", "olmo2", "seed_oss", "glm4moe", "exaone4"].contains(&architecture);
    let (module, suffix) = rest.rsplit_once('.').unwrap();
    let module = match rest {
        "self_attn.sinks" => return (format!("blk.{layer}.attn_sinks.weight"), None),
        "feed_forward.expert_bias"
        | "mlp.gate.e_score_correction_bias"
        | "block_sparse_moe.e_score_correction_bias" => return (format!("blk.{layer}.exp_probs_b.bias"), None),
        _ => match module {
            "input_layernorm" | "operator_norm" => "attn_norm",
            "post_attention_layernorm" if norms_after => "post_attention_norm",
            "post_attention_layernorm" | "pre_feedforward_layernorm" | "ffn_norm" => "ffn_norm",
            "conv.conv" => "shortconv.conv",
            "conv.in_proj" => "shortconv.in_proj",
            "conv.out_proj" => "shortconv.out_proj",
            "post_feedforward_layernorm" | "post_mlp_layernorm" => "post_ffw_norm",
            "post_self_attn_layernorm" => "post_attention_norm",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.qkv_proj" => "attn_qkv",
            "self_attn.o_proj" | "self_attn.out_proj" => "attn_output",
            "self_attn.q_layernorm" => "attn_q_norm",
            "self_attn.k_layernorm" => "attn_k_norm",
            "self_attn.q_norm" | "self_attn.query_layernorm" => "attn_q_norm",
            "self_attn.k_norm" | "self_attn.key_layernorm" => "attn_k_norm",
            "feed_forward.gate" => "ffn_gate_inp",
            "feed_forward.w1" => "ffn_gate",
            "feed_forward.w3" => "ffn_up",
            "feed_forward.w2" => "ffn_down",
            "mlp.gate" | "mlp.router" | "block_sparse_moe.gate" => "ffn_gate_inp",
            "mlp.gate_proj" => "ffn_gate",
            "mlp.up_proj" | "mlp.gate_up_proj" | "mlp.c_fc" => "ffn_up",
            "mlp.down_proj" | "mlp.c_proj" => "ffn_down",
            "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
            "mlp.shared_expert.gate_proj" | "mlp.shared_experts.gate_proj" => "ffn_gate_shexp",
            "mlp.shared_expert.up_proj" | "mlp.shared_experts.up_proj" => "ffn_up_shexp",
            "mlp.shared_expert.down_proj" | "mlp.shared_experts.down_proj" => "ffn_down_shexp",
            other => panic!("{other}"),
        },
    };
    (format!("blk.{layer}.{module}.{suffix}"), None)
}

/// The tensors of a decoder; those of gpt-oss's experts as files of this format have them.
fn tensors(config: &ModelConfig, json: &Value) -> BTreeMap<String, Vec<usize>> {
    let mut tensors: BTreeMap<_, _> = config.decoder.tensors().collect();
    let size = |key: &str| json[key].as_u64().unwrap() as usize;
    let is_stacked = |name: &&String| name.contains("mlp.experts.") && !name.contains("_proj.");
    let stacked: Vec<String> = tensors.keys().filter(is_stacked).cloned().collect();
    for name in stacked {
        tensors.remove(&name);
        let (module, rest) = name.split_once("experts.").unwrap();
        let (parts, shape) = match rest.starts_with("gate_up") {
            true => (&["gate_proj", "up_proj"][..], [size("intermediate_size"), size("hidden_size")]),
            false => (&["down_proj"][..], [size("hidden_size"), size("intermediate_size")]),
        };
        let (suffix, shape) = if rest.ends_with("_bias") { ("bias", &shape[..1]) } else { ("weight", &shape[..]) };
        for (expert, part) in (0..size("num_local_experts")).flat_map(|e| parts.iter().map(move |part| (e, part))) {
            tensors.insert(format!("{module}experts.{expert}.{part}.{suffix}"), shape.to_vec());
        }
    }
    tensors
}

/// A file with the metadata of a configuration and its tensors.
fn convert(
    architecture: &str,
    json: &Value,
    tensors: &BTreeMap<String, Vec<usize>>,
    keys: &[(&'static str, Vec<u8>)],
) -> Made {
    let mut made = Made::new().key("general.architecture", text_value(architecture));
    let shared = usual_keys(json).filter(|(key, _)| keys.iter().all(|(own, _)| own != key));
    for (key, value) in shared.chain(keys.iter().cloned()) {
        made = made.key(&format!("{architecture}.{key}"), value);
    }
    for kind in ["long", "short"] {
        let factors = json["rope_scaling"][format!("{kind}_factor")].as_array();
        let factors = factors.map(|list| list.iter().map(|x| x.as_f64().unwrap() as f32).collect::<Vec<_>>());
        if let Some(factors) = factors {
            made = made.floats(&format!("rope_factors_{kind}.weight"), &[factors.len() as u64], &factors);
        }
    }
    let head_dim = json["head_dim"].as_u64().unwrap_or(32) as usize;
    // Dimensions and the data of each expert, or of all.
    type Parts = (Vec<u64>, BTreeMap<usize, Vec<f32>>);
    let mut files: BTreeMap<String, Parts> = BTreeMap::new();
    for (name, shape) in tensors {
        let mut data = values(name, shape);
        let (stored, expert) = stored(architecture, name);
        let pairs = ["llama", "mistral3", "smollm3", "granite", "arcee"].contains(&architecture);
        if pairs && (stored.contains("attn_q.") || stored.contains("attn_k.")) {
            let width = data.len() / shape[0];
            let rows: Vec<&[f32]> = data.chunks(width).collect();
            let mut pairs = Vec::new();
            for head in rows.chunks(head_dim) {
                for i in 0..head_dim / 2 {
                    pairs.extend_from_slice(head[i]);
                    pairs.extend_from_slice(head[i + head_dim / 2]);
                }
            }
            data = pairs;
        }
        if architecture.starts_with("gemma") && stored.contains("norm.") {
            data.iter_mut().for_each(|value| *value += 1.0);
        }
        let entry = files.entry(stored).or_default();
        entry.0 = shape.iter().rev().map(|dim| *dim as u64).collect();
        if name.contains("shared_expert_gate") {
            entry.0.truncate(1);
        }
        if name.contains("conv.conv.") {
            entry.0.remove(1);
        }
        entry.1.insert(expert.unwrap_or(usize::MAX), data);
    }
    for (name, (mut dims, parts)) in files {
        if !parts.contains_key(&usize::MAX) {
            dims.push(parts.len() as u64);
        }
        made = made.floats(&name, &dims, &parts.into_values().flatten().collect::<Vec<_>>());
    }
    made
}

#[test]
fn every_architecture_reads_as_the_family_that_it_stands_for() {
    for Case(case, architecture, changes, keys) in cases() {
        println!("{case} as {architecture}");
        let own = testkit::workspace::root().join(format!("models/tests/gguf/{case}.json"));
        let file = if own.exists() { own } else { folder(case).join("config.json") };
        let mut json: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let temporary = tempfile::TempDir::new().unwrap();
        std::fs::write(temporary.path().join("config.json"), json.to_string()).unwrap();
        let want = ModelConfig::load(&ModelFiles::open(temporary.path()).unwrap()).unwrap();
        let tensors = tensors(&want, &json);
        let path = temporary.path().join("m.gguf");
        let made = convert(architecture, &json, &tensors, &keys);
        std::fs::write(&path, made.bytes()).unwrap();
        let files = ModelFiles::open(&path).unwrap();
        let found = ModelConfig::load(&files).unwrap();
        assert_eq!(found.architecture, want.architecture);
        assert_eq!(found.decoder, want.decoder, "{case}");
        assert_eq!(found.max_position_embeddings, want.max_position_embeddings);
        let weights = Weights::open(&files).unwrap();
        check_weights(&found.decoder, &weights).unwrap();
        for (name, shape) in &tensors {
            let tensor = weights.expect(name, shape).unwrap();
            assert!(tensor.to_f32() == values(name, shape), "{case}: {name}");
        }
        assert_eq!(weights.names().count(), tensors.len(), "{case}");
    }
}

#[test]
fn a_window_of_zero_is_none() {
    for architecture in ["phi3", "gemma3"] {
        let made = sized(architecture).key(&format!("{architecture}.attention.sliding_window"), u32_value(0)).floats(
            "token_embd.weight",
            &[64, 8],
            &[0.0; 512],
        );
        let config = ModelConfig::load(&files(&made).unwrap()).unwrap();
        assert!(config.decoder.attention().all(|attention| attention.window.is_none()), "{architecture}");
    }
}

#[test]
fn a_file_that_cannot_be_served_says_why() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("m.gguf");
    let open = |made: Made| {
        std::fs::write(&path, made.bytes()).unwrap();
        ModelFiles::open(&path)
    };
    let base = || Made::new().key("general.architecture", text_value("qwen2"));
    message(open(Made::new()), &["m.gguf", "no general.architecture", "qwen3moe", "gpt-oss"]);
    message(open(Made::new().key("general.architecture", text_value("rwkv6"))), &["rwkv6", "llama, mistral3"]);
    message(open(base()), &["m.gguf: `qwen2.context_length` is missing", "a number"]);
    let mut sized = base();
    for key in ["context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"] {
        sized = sized.key(&format!("qwen2.{key}"), u32_value(4));
    }
    message(open(sized.clone().key("qwen2.rope.scaling.type", text_value("su"))), &["scaling.type", "\"su\"", "yarn"]);
    message(open(sized.clone().key("qwen2.attention.value_length", u32_value(3))), &["value_length` is 3", "1, the"]);
    message(open(sized.clone().key("qwen2.rope.freq_base", f32_value(f32::NAN))), &["freq_base` is NaN", "finite"]);
    let layers = super::made::array_value(4, 2, &[1, 0, 0, 0, 2, 0, 0, 0]);
    message(open(sized.clone().key("qwen2.attention.head_count_kv", layers)), &["an array of 2", "every layer"]);
    let as_other = |name: &str| {
        let keys = sized.keys[1..].iter().map(|(key, value)| (key.replace("qwen2", name), value.clone()));
        let mut made = Made::new().key("general.architecture", text_value(name));
        made.keys.extend(keys);
        made
    };
    let llama4 = as_other("llama4").key("llama4.attention.sliding_window", u32_value(0));
    message(open(llama4), &["`llama4.attention.sliding_window` is 0", "expected absent"]);
    let beta = as_other("apertus").key("xielu.beta", f32_value(0.25));
    message(open(beta), &["`xielu.beta` is 0.25", "0.5 for every layer"]);
    let learned = as_other("mpt").key("mpt.attention.max_alibi_bias", f32_value(0.0));
    message(open(learned), &["`mpt.attention.max_alibi_bias` is 0", "learned positions are not supported"]);
    let odd = as_other("minicpm").key("minicpm.logit_scale", f32_value(3.0));
    message(open(odd), &["`minicpm.logit_scale` is 3", "a whole number"]);
    for name in ["bailingmoe2", "afmoe", "mimo2", "deepseek32"] {
        let latent = |made: Made| match name {
            "deepseek32" => ["kv_lora_rank", "value_length"]
                .iter()
                .fold(made, |made, key| made.key(&format!("{name}.attention.{key}"), u32_value(2))),
            _ => made,
        };
        let made = latent(as_other(name)).key(&format!("{name}.expert_gating_func"), u32_value(1));
        let made = made.key(&format!("{name}.attention.head_count_kv"), u32_value(1));
        let made = made.key(&format!("{name}.attention.key_length"), u32_value(3));
        let made = made.key(&format!("{name}.rope.dimension_count"), u32_value(2));
        message(open(made), &["expert_gating_func` is 1", "2 (sigmoid)"]);
    }
    let flags = super::made::array_value(4, 4, &[0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    let pattern = as_other("mimo2").key("mimo2.attention.sliding_window_pattern", flags);
    message(open(pattern), &["sliding_window_pattern` is an array of 4", "true or false for each layer"]);
    let files = open(sized).unwrap();
    message(ModelConfig::load(&files), &["m.gguf (as config.json)", "vocab_size"]);
    message(
        text::Tokenizer::load(&TextFiles(&files)).map(|_| ()),
        &["m.gguf (as tokenizer.json)", "tokenizer.ggml.model"],
    );
}
