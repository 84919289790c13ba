//! Other spellings of a checkpoint give the same bits: the text part of a multimodal one, old class names, nested ropes.

use serde_json::{Value, json};

use super::cases::all;
use super::tensors::Tensors;
use super::tests::{computed, make, write};

/// A case's configuration inside of a wrapper of class `class`.
fn wrapped(text: &Value, class: &str, model_type: &str) -> Value {
    let mut text = text.clone();
    text.as_object_mut().unwrap().shift_remove("architectures");
    json!({"architectures": [class], "model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 8}})
}

#[test]
fn the_text_part_of_a_multimodal_checkpoint_gives_the_bits_of_the_plain_one() {
    for (name, class, model_type) in [
        ("gemma3, linear rope of full layers", "Gemma3ForConditionalGeneration", "gemma3"),
        ("gemma3, layer types", "Gemma3ForConditionalGeneration", "gemma3"),
        ("mistral, window and wide heads", "Mistral3ForConditionalGeneration", "mistral3"),
        ("ministral3", "Mistral3ForConditionalGeneration", "mistral3"),
        ("gemma4, dense", "Gemma4ForConditionalGeneration", "gemma4"),
        ("gemma4, everything, odd heads", "Gemma4ForConditionalGeneration", "gemma4"),
        ("qwen3_5, one key head, no older inputs, mrope", "Qwen3_5ForConditionalGeneration", "qwen3_5"),
        ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"),
        ("llama4, every second layer, two experts", "Llama4ForConditionalGeneration", "llama4"),
        ("qwen3_5_moe, stacked experts", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
        ("qwen3_5_moe, separate experts, none shared, biased", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    ] {
        let case = all().into_iter().find(|case| case.name == name).unwrap();
        let (tensors, _) = make(&case.config, 3, 1);
        let plain = write(&case.config, tensors.to_bytes(|name, _| Some(name.to_string())));
        let want = computed(plain.path()).unwrap();
        for other in
            ["vision_tower.embeddings.weight", "visual.blocks.0.attn.qkv.weight", "mtp.layers.0.mlp.up_proj.weight"]
        {
            tensors.vector(other, 5);
        }
        let mut config = wrapped(&case.config, class, model_type);
        let new = |name: &str| match name.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None if name.starts_with("vis") => format!("model.{name}"),
            None => name.to_string(),
        };
        let old = |name: &str| match name.starts_with("vision_tower") {
            true => name.to_string(),
            false => format!("language_model.{name}"),
        };
        for weights in [tensors.to_bytes(|name, _| Some(new(name))), tensors.to_bytes(|name, _| Some(old(name)))] {
            let folder = write(&config, weights);
            assert!(computed(folder.path()).map_err(|error| format!("{name}: {error}")).unwrap() == want, "{name}");
        }
        // Old configurations keep the type of the weights outside.
        let text = config["text_config"].as_object_mut().unwrap();
        if let Some(dtype) = text.shift_remove("torch_dtype") {
            config["torch_dtype"] = dtype;
            let folder = write(&config, tensors.to_bytes(|name, _| Some(old(name))));
            assert!(computed(folder.path()).unwrap() == want, "{name}");
        }
    }
}

/// A case, its tensors and what the crate computes from them.
fn plain(name: &str) -> (Value, Tensors, Vec<f32>) {
    let case = all().into_iter().find(|case| case.name == name).unwrap();
    let (tensors, _) = make(&case.config, 5, 1);
    let folder = write(&case.config, tensors.to_bytes(|name, _| Some(name.to_string())));
    let logits = computed(folder.path()).unwrap();
    (case.config, tensors, logits)
}

#[test]
fn layers_behind_the_last_one_are_not_read() {
    for (name, layer) in [("deepseek v3, groups and yarn", 3), ("glm4_moe, norms of heads", 2)] {
        let (config, tensors, want) = plain(name);
        for part in ["eh_proj.weight", "enorm.weight", "shared_head.norm.weight", "self_attn.o_proj.weight"] {
            tensors.vector(&format!("model.layers.{layer}.{part}"), 3);
        }
        let folder = write(&config, tensors.to_bytes(|name, _| Some(name.to_string())));
        assert!(computed(folder.path()).map_err(|error| format!("{name}: {error}")).unwrap() == want, "{name}");
    }
}

#[test]
fn keys_and_values_of_layers_that_share_them_are_not_read() {
    let (config, tensors, want) = plain("gemma4, inputs of layers, shared keys, wide networks");
    for (layer, dim) in [(4, 32), (5, 16), (6, 32)] {
        let at = format!("model.layers.{layer}.self_attn");
        tensors.get(&format!("{at}.k_proj.weight"), &[dim, 48], 0.0, 1.0);
        tensors.get(&format!("{at}.v_proj.weight"), &[dim, 48], 0.0, 1.0);
        tensors.vector(&format!("{at}.k_norm.weight"), dim);
    }
    let folder = write(&config, tensors.to_bytes(|name, _| Some(name.to_string())));
    assert!(computed(folder.path()).unwrap() == want);
}

#[test]
fn old_class_names_and_nested_ropes_give_the_same_bits() {
    let rope = json!({"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}});
    let nested =
        json!({"rope_parameters": rope, "rope_scaling": null, "rope_theta": null, "rope_local_base_freq": null});
    for (name, changes) in [
        ("falcon, one key head", json!({"architectures": ["RWForCausalLM"]})),
        ("mpt, odd heads and clip", json!({"architectures": ["MPTForCausalLM"]})),
        ("gemma3, linear rope of full layers", nested),
    ] {
        let (mut config, tensors, want) = plain(name);
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let folder = write(&config, tensors.to_bytes(|name, _| Some(name.to_string())));
        assert!(computed(folder.path()).map_err(|error| format!("{name}: {error}")).unwrap() == want, "{name}");
    }
}
