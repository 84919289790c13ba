//! Files of adapters that cannot be used: one line each that names the file and what does not fit.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use linear::Arithmetic;
use models::lora::{Adapter, AdapterError, AdapterRef, AdapterStore};
use models::{Decoder, ModelConfig, ModelFiles};
use proptest::prelude::*;
use serde_json::{Value, json};
use testkit::adapters::{Matrix, Module, factors, simple, write};

use super::{LIMITS, fuzzed, modules};
use crate::common::folder;

fn decoder(case: &str) -> Decoder {
    ModelConfig::load(&ModelFiles::open(&folder(case)).unwrap()).unwrap().decoder
}

fn message(result: Result<Adapter, AdapterError>, parts: &[&str]) {
    let message = result.err().unwrap().to_string();
    assert!(!message.contains('\n'), "not one line: {message:?}");
    parts.iter().for_each(|part| assert!(message.contains(part), "{message:?} does not say {part:?}"));
}

fn targets(decoder: &Decoder) -> Vec<Module> {
    modules(decoder).into_iter().filter(|(name, ..)| name.ends_with("q_proj") || name.ends_with("v_proj")).collect()
}

#[test]
fn settings_that_are_not_supported_are_refused_by_name() {
    let decoder = decoder("llama");
    let matrices = factors(&targets(&decoder), |_| 4, 1);
    let read = |change: Value| {
        let temporary = tempfile::TempDir::new().unwrap();
        let mut config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"],
                                "modules_to_save": null, "bias": "none", "use_dora": false, "layer_replication": []});
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        write(temporary.path(), &config.to_string(), &matrices);
        Adapter::read(temporary.path(), &decoder, &LIMITS, Arithmetic::Exact)
    };
    assert_eq!(read(json!({})).unwrap().rank(), 4);
    for (change, parts) in [
        (json!({"peft_type": "IA3"}), ["`peft_type` is \"IA3\"", "LORA"]),
        (json!({"bias": "lora_only"}), ["`bias`", "not supported"]),
        (json!({"use_dora": true}), ["`use_dora` is true", "not supported"]),
        (json!({"modules_to_save": ["lm_head"]}), ["`modules_to_save`", "not supported"]),
        (json!({"layer_replication": [[0, 2]]}), ["`layer_replication`", "not supported"]),
        (json!({"r": 65}), ["found rank 65 for r; expected at most 64", "--max-lora-rank"]),
        (json!({"r": 0}), ["`r` is 0", "an integer, 1 to"]),
        (
            json!({"rank_pattern": {"q_proj": 100}}),
            ["found rank 100 for model.layers.0.self_attn.q_proj", "at most 64"],
        ),
        (json!({"rank_pattern": {"q_proj": 5}}), ["q_proj.lora_A.weight\" has shape [4, 64]", "expected [5, 64]"]),
        (json!({"rank_pattern": {"(": 5}}), ["`rank_pattern`", "regular expression that cannot be used"]),
        (json!({"lora_alpha": "x"}), ["`lora_alpha` is \"x\"", "a finite number"]),
        (json!({"target_modules": null}), ["`target_modules`", "a list of modules"]),
        (
            json!({"target_modules": ["q_proj"]}),
            ["v_proj.lora_A.weight\", which adapter_config.json does not target", ""],
        ),
        (
            json!({"target_modules": ["q_proj", "v_proj", "k_proj"]}),
            ["k_proj.lora_A.weight\" not found", "BF16 [4, 64]"],
        ),
        (json!({"target_modules": "(a+)+$", "layers_to_transform": 1}), ["`layers_to_transform`", "null"]),
    ] {
        message(read(change), &[&parts[..], &["adapter_"]].concat());
    }
}

#[test]
fn an_adapter_for_another_model_names_the_first_tensor_that_does_not_fit() {
    let decoder = decoder("llama");
    let temporary = tempfile::TempDir::new().unwrap();
    let read = |change: &dyn Fn(&mut Vec<Matrix>)| {
        let mut matrices = factors(&targets(&decoder), |_| 4, 1);
        change(&mut matrices);
        let config =
            r#"{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "embed_tokens", "lm_head", "x_proj"]}"#;
        write(temporary.path(), config, &matrices);
        Adapter::read(temporary.path(), &decoder, &LIMITS, Arithmetic::Exact)
    };
    read(&|_| {}).unwrap();
    let rename = |name: &'static str| move |matrices: &mut Vec<Matrix>| matrices[0].name = name.to_string();
    let place = "base_model.model.model.layers.0";
    message(
        read(&rename("base_model.model.model.layers.0.self_attn.x_proj.lora_A.weight")),
        &[
            "adapter_model.safetensors: found tensor",
            place,
            "x_proj.lora_A.weight\", which fits no module of this model",
        ],
    );
    message(
        read(&rename("base_model.model.lm_head.lora_A.weight")),
        &["lm_head", "are not supported (embedding, head"],
    );
    message(read(&rename("base_model.model.model.embed_tokens.lora_embedding_A")), &["adapts an embedding"]);
    message(read(&rename("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector")), &["DoRA"]);
    message(read(&rename("base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight")), &["is no factor of LoRA"]);
    message(read(&|matrices| drop(matrices.remove(1))), &["q_proj.lora_B.weight\" not found"]);
    message(read(&|matrices| matrices.truncate(2)), &["not found"]);
    message(
        read(&|matrices| matrices[1].shape = [4, matrices[1].shape[0]]),
        &["q_proj.lora_B.weight\" has shape [4, ", "another model?"],
    );
    message(read(&|matrices| matrices.clear()), &["q_proj.lora_A.weight\" not found"]);
    // More numbers than the greatest rank allows.
    message(
        read(&|matrices| {
            let size = 1 << 20;
            matrices.push(Matrix { name: "x".into(), shape: [1, size], values: vec![0.0; size] });
        }),
        &["bytes; expected at most", "rank 64"],
    );
}

#[test]
fn damaged_files_are_refused_at_every_length() {
    let decoder = decoder("llama");
    let temporary = tempfile::TempDir::new().unwrap();
    let read = || Adapter::read(temporary.path(), &decoder, &LIMITS, Arithmetic::Exact);
    simple(temporary.path(), &targets(&decoder), 2, 1);
    let whole = fs::read(temporary.path().join("adapter_model.safetensors")).unwrap();
    for length in (0..200).chain((200..whole.len()).step_by(97)) {
        fs::write(temporary.path().join("adapter_model.safetensors"), &whole[..length]).unwrap();
        assert!(!read().err().unwrap().to_string().contains('\n'), "{length} bytes");
    }
    fs::remove_file(temporary.path().join("adapter_model.safetensors")).unwrap();
    fs::write(temporary.path().join("adapter_model.bin"), b"a pickle").unwrap();
    message(read(), &["adapter_model.safetensors: not found"]);
    fs::write(temporary.path().join("adapter_config.json"), "[1]").unwrap();
    message(read(), &["adapter_config.json", "broken JSON"]);
    message(
        Adapter::read(Path::new("/nowhere/at/all"), &decoder, &LIMITS, Arithmetic::Exact),
        &["/nowhere/at/all", "no such folder"],
    );
}

#[test]
fn experts_and_latent_heads_take_no_adapters() {
    for (case, module) in [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w1"),
        ("deepseek-v2-lite", "model.layers.0.self_attn.kv_b_proj"),
    ] {
        let decoder = decoder(case);
        let temporary = tempfile::TempDir::new().unwrap();
        let linear = decoder.all_linears().find(|it| it.parts[0].name == module).unwrap();
        simple(temporary.path(), &[(module.to_string(), linear.inputs, linear.rows())], 2, 1);
        message(
            Adapter::read(temporary.path(), &decoder, &LIMITS, Arithmetic::Exact),
            &[module, "adapters are not supported"],
        );
    }
}

#[test]
fn the_store_keeps_the_adapters_used_last_and_reads_the_others_again() {
    let decoder = decoder("llama");
    let temporary = tempfile::TempDir::new().unwrap();
    let path = |name: &str| temporary.path().join(name);
    let targets = targets(&decoder);
    for (name, seed) in [("a", 1), ("b", 2), ("c", 3), ("copy", 1)] {
        simple(&path(name), &targets, 2, seed);
    }
    let store = AdapterStore::new(decoder, LIMITS, Arithmetic::Exact, 2);
    let load = |name: &str| store.load(path(name)).unwrap().0;
    let [a, b] = ["a", "b"].map(load);
    // Equal contents in another folder are the same adapter.
    assert_eq!(load("copy").digest, a.digest);
    assert_eq!(store.resident(), [b.digest.clone(), a.digest.clone()]);
    let c = load("c");
    assert_eq!(store.resident(), [a.digest.clone(), c.digest.clone()]);
    let again = store.get(&b).unwrap();
    assert_eq!((again.digest(), store.resident()), (b.digest.as_str(), vec![c.digest.clone(), b.digest.clone()]));
    assert!(Arc::ptr_eq(&again, &store.get(&b).unwrap()));
    // One that is pinned stays; if all are, another is read and not kept.
    store.pin(vec![c.digest.clone()]);
    load("a");
    assert_eq!(store.resident(), [c.digest.clone(), a.digest.clone()]);
    assert_eq!(store.pin_all(), store.resident());
    load("b");
    assert_eq!(store.resident(), [c.digest.clone(), a.digest.clone()]);
    // The store of another rank has what that of the first has.
    store.follow(&b, &[a.digest.clone(), b.digest.clone()]).unwrap();
    assert_eq!(store.resident(), [a.digest.clone(), b.digest.clone()]);
    store.follow(&c, std::slice::from_ref(&b.digest)).unwrap();
    assert_eq!(store.resident(), std::slice::from_ref(&b.digest));
    store.pin(Vec::new());
    // The scale is part of the contents.
    let config = fs::read_to_string(path("a").join("adapter_config.json")).unwrap();
    fs::write(path("a").join("adapter_config.json"), config.replace("\"lora_alpha\":4", "\"lora_alpha\":5")).unwrap();
    assert_ne!(load("a").digest, a.digest);
    store.forget(&b.digest);
    let problem = store.get(&AdapterRef { digest: b.digest, path: path("c") }).err().unwrap().to_string();
    assert!(problem.contains("other contents than when it was loaded"), "{problem}");
}

#[test]
fn any_change_of_the_bytes_is_accepted_or_refused_in_one_line() {
    let demo = ModelConfig::load(&models::demo()).unwrap().decoder;
    let temporary = tempfile::TempDir::new().unwrap();
    simple(temporary.path(), &modules(&demo)[..2], 2, 1);
    let file = |name: &str| fs::read(temporary.path().join(name)).unwrap();
    let (config, tensors) = (file("adapter_config.json"), file("adapter_model.safetensors"));
    let whole = [&(config.len() as u16).to_le_bytes()[..], &config, &tensors].concat();
    assert!(fuzzed::read(temporary.path(), &whole));
    // The settings and the header are where changes matter.
    let ends = 2 + config.len() + 900;
    let change = (0..ends, any::<u8>());
    let changes = (prop::collection::vec(change, 1..4), prop::option::weighted(0.1, 0..whole.len()));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(512));
    let tried = |(changes, length): (Vec<(usize, u8)>, Option<usize>)| {
        let mut bytes = whole.clone();
        changes.into_iter().for_each(|(at, byte)| bytes[at] = byte);
        bytes.truncate(length.unwrap_or(bytes.len()));
        fuzzed::read(temporary.path(), &bytes);
        Ok(())
    };
    runner.run(&changes, tried).unwrap();
}
