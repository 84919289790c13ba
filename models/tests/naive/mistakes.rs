//! Wrong tensors and senseless sizes of every family are refused by name.

use models::{ModelConfig, ModelFiles};
use serde_json::{Value, json};

use super::case::Case;
use super::cases::all;
use super::tests::{checked, make, write};
use crate::common::message;

#[test]
fn a_missing_an_unused_and_a_misshapen_tensor_of_every_family_are_named() {
    const FILE: &str = "model.safetensors";
    for (seed, Case { config, .. }) in all().into_iter().enumerate() {
        let (tensors, _) = make(&config, seed as u64, 1);
        let names = tensors.names();
        let (chosen, shape) = &names[seed * 7 % names.len()];
        let other = |name: &str| name != *chosen;
        let without = tensors.to_bytes(|name, _| other(name).then(|| name.to_string()));
        let expected = format!("{shape:?}");
        message(checked(write(&config, without).path()), &[FILE, chosen, "not found", &expected]);
        let misshapen = tensors.to_bytes(|name, shape| {
            if !other(name) {
                shape.insert(0, 1);
            }
            Some(name.to_string())
        });
        let found = format!("[1, {}", shape[0]);
        message(checked(write(&config, misshapen).path()), &[FILE, chosen, &found, &expected]);
        let unused = format!("{chosen}.unheard_of");
        tensors.vector(&unused, 3);
        let with_unused = tensors.to_bytes(|name, _| Some(name.to_string()));
        message(checked(write(&config, with_unused).path()), &[FILE, &unused, "[3]"]);
    }
}

/// The error of a configuration, which must name these.
fn refused(case: &str, config: &Value, parts: &[&str]) {
    let folder = tempfile::TempDir::new().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let result = ModelConfig::load(&ModelFiles::open(folder.path()).unwrap());
    assert!(result.is_err(), "{case}: {parts:?} is accepted");
    message(result, parts);
}

#[test]
fn senseless_sizes_of_every_family_are_refused() {
    const SIZES: [&str; 76] = [
        "vocab_size",
        "hidden_size",
        "n_embd",
        "d_model",
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_key_value_heads",
        "num_global_key_value_heads",
        "head_dim",
        "global_head_dim",
        "intermediate_size",
        "moe_intermediate_size",
        "ffn_dim",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_experts_per_tok",
        "top_k_experts",
        "num_layers",
        "num_heads",
        "window_size",
        "n_inner",
        "q_lora_rank",
        "kv_lora_rank",
        "rotary_dim",
        "dim_model_base",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "max_position_embeddings",
        "n_positions",
        "word_embed_proj_dim",
        "ff_intermediate_size",
        "blocksparse_block_size",
        "blocksparse_num_local_blocks",
        "blocksparse_vert_stride",
        "dense_attention_every_n_layers",
        "moe_num_experts",
        "moe_k",
        "moe_topk",
        "moe_layer_interval",
        "intermediate_size_mlp",
        "attention_chunk_size",
        "floor_scale",
        "no_rope_layer_interval",
        "interleave_moe_layer_step",
        "global_attn_every_n_layers",
        "block_ff_dim",
        "block_multiple_of",
        "conv_dim",
        "conv_L_cache",
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_d_ssm",
        "laurel_rank",
        "swa_num_attention_heads",
        "swa_v_head_dim",
        "index_topk",
        "index_n_heads",
        "index_head_dim",
        "altup_num_inputs",
        "mamba_d_state",
        "mamba_d_conv",
        "attn_layer_period",
        "mamba_dt_rank",
        "mamba_n_groups",
        "mamba_num_heads",
        "mamba_head_dim",
        "ssm_state_size",
        "n_groups",
        "conv_kernel",
        "attention_head_dim",
    ];
    for Case { name, config } in all() {
        for key in SIZES.into_iter().filter(|key| config[*key].is_u64()) {
            for value in [json!(0), json!(u64::MAX), json!(-3)] {
                // Granite 4 may have no experts.
                if key == "num_local_experts" && value == 0 && config["model_type"] == "granitemoehybrid" {
                    continue;
                }
                let mut config = config.clone();
                config[key] = value;
                refused(name, &config, &["config.json", key]);
            }
        }
        let mut many = config.clone();
        for (experts, each) in [
            ("num_experts", "num_experts_per_tok"),
            ("num_experts", "top_k_experts"),
            ("num_experts", "moe_topk"),
            ("moe_num_experts", "moe_k"),
            ("num_local_experts", "num_experts_per_tok"),
            ("n_routed_experts", "num_experts_per_tok"),
        ] {
            if let Some(count) = config[experts].as_u64().filter(|_| config[each].is_u64()) {
                let mut config = config.clone();
                config[each] = json!(count + 1);
                refused(name, &config, &["config.json", each]);
                many[experts] = json!(4096);
                many["num_hidden_layers"] = json!(4096);
                for key in ["layer_types", "mlp_layer_types", "no_rope_layers"] {
                    many.as_object_mut().unwrap().shift_remove(key);
                }
                refused(name, &many, &["config.json", experts]);
            }
        }
        if config["num_key_value_heads"].is_u64() {
            let mut config = config.clone();
            config["num_key_value_heads"] = json!(7);
            refused(name, &config, &["config.json", "num_key_value_heads"]);
        }
        if config["sliding_window"].is_u64() {
            let mut config = config.clone();
            config["sliding_window"] = json!(0);
            refused(name, &config, &["config.json", "sliding_window"]);
        }
        if config["n_group"].as_u64().is_some_and(|groups| groups > 1) {
            let count = config["n_routed_experts"].as_u64().or(config["num_experts"].as_u64());
            let no_divisor = count.unwrap() - 1;
            for (key, value) in [("n_group", no_divisor), ("n_group", 0), ("topk_group", 9)] {
                let mut config = config.clone();
                config[key] = json!(value);
                refused(name, &config, &["config.json", "group"]);
            }
        }
        if config["layer_types"].is_array() {
            let mut config = config.clone();
            config["layer_types"] = json!(["full_attention"]);
            refused(name, &config, &["config.json", "layer_types"]);
        }
    }
}

#[test]
fn senseless_shared_layers_and_inputs_of_layers_are_refused() {
    let name = "gemma4, everything, odd heads";
    let case = all().into_iter().find(|case| case.name == name).unwrap();
    for (key, values) in [
        // All six layers; all but one, which slides, so that full layers have no keys.
        ("num_kv_shared_layers", [json!(6), json!(5), json!(u64::MAX), json!(-3)]),
        ("hidden_size_per_layer_input", [json!(1u64 << 62), json!("8"), json!(u64::MAX), json!(-3)]),
        ("vocab_size_per_layer_input", [json!(0), json!(1u64 << 62), json!(u64::MAX), json!(-3)]),
    ] {
        for value in values {
            let mut config = case.config.clone();
            config[key] = value;
            refused(name, &config, &["config.json", key]);
        }
    }
}
/// Every place in a configuration, as a JSON pointer.
fn places(value: &Value, at: &str, all: &mut Vec<String>) {
    for (key, value) in value.as_object().into_iter().flatten() {
        all.push(format!("{at}/{key}"));
        places(value, &format!("{at}/{key}"), all);
    }
}

#[test]
fn nonsense_under_any_key_is_refused_by_name_or_has_no_effect() {
    let load = |config: &Value| {
        let folder = write(config, Vec::new());
        ModelConfig::load(&ModelFiles::open(folder.path()).unwrap())
    };
    let mut accepted = Vec::new();
    for (number, Case { name, config }) in all().into_iter().enumerate() {
        let plain = load(&config).unwrap().decoder;
        let mut all = Vec::new();
        places(&config, "", &mut all);
        for (at, place) in all.iter().enumerate().filter(|(_, place)| *place != "/architectures") {
            let mut values = vec![json!("nonsense"), json!([]), json!(-1), json!(1e300)];
            if let Some(list) = config.pointer(place).and_then(Value::as_array) {
                values.push(list.iter().skip(1).cloned().collect());
            }
            // The values take turns: most keys occur in many cases.
            if !testkit::everything() {
                values = vec![values.swap_remove((number + at) % values.len())];
            }
            for value in values.into_iter().filter(|value| config.pointer(place) != Some(value)) {
                let mut changed = config.clone();
                *changed.pointer_mut(place).unwrap() = value.clone();
                match load(&changed) {
                    // Without dense layers, all layers have experts.
                    Ok(_) if place == "/mlp_only_layers" && value == json!([]) => {}
                    // The last layer is a place like any other, and all layers may be dense.
                    Ok(_) if place == "/moe_layer_end_index" && value == -1 => {}
                    Ok(_) if place == "/moe_layers" && value.is_array() => {}
                    Ok(_) if place == "/full_attn_idxs" && value.is_array() => {}
                    // Fewer rows without a token make sense too.
                    Ok(_) if place == "/dummy_token_indices" && value.is_array() => {}
                    Ok(found) if found.decoder != plain => accepted.push(format!("{name}: {place} = {value}")),
                    Ok(_) => {}
                    refused => drop(message(refused, &["config.json", place.rsplit('/').next().unwrap()])),
                }
            }
        }
    }
    assert!(accepted.is_empty(), "{}", accepted.join("\n"));
}
