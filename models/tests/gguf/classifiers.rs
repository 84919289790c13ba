//! Classifiers of texts in GGUF files: their tensors under the names of llama.cpp's converter give the logits of the checkpoint.

use serde_json::{Value, json};

use super::converted::{names, numbered};
use super::made::{Made, f32_value, text_value, u32_value};
use super::made_vocabulary::truth;
use crate::common::{list, text};
use crate::encoders::{logits, made, tensors};

/// The file that a case of `classifiers.json` becomes.
fn file(case: &Value, architecture: &str) -> Made {
    let config = &case["config"];
    let size = |keys: [&str; 2]| u32_value(keys.iter().find_map(|key| config[*key].as_u64()).unwrap() as u32);
    let mut file = Made::new().key("general.architecture", text_value(architecture));
    for (key, value) in [
        ("context_length", size(["max_position_embeddings"; 2])),
        ("embedding_length", size(["hidden_size", "dim"])),
        ("block_count", size(["num_hidden_layers", "n_layers"])),
        ("feed_forward_length", size(["intermediate_size", "hidden_dim"])),
        ("attention.head_count", size(["num_attention_heads", "n_heads"])),
        ("attention.layer_norm_epsilon", f32_value(if architecture == "bert" { 1e-12 } else { 1e-5 })),
        ("attention.causal", truth(false)),
        ("pooling_type", u32_value(4)),
    ] {
        file = file.key(&format!("{architecture}.{key}"), value);
    }
    if architecture == "modern-bert" {
        file = file.key("modern-bert.attention.sliding_window", size(["local_attention"; 2]));
    }
    let known = names(architecture);
    for (name, shape, numbers) in tensors(case) {
        let bare = ["bert.", "distilbert.", "model."].iter().find_map(|root| name.strip_prefix(root)).unwrap_or(&name);
        let (stem, end) = bare.rsplit_once('.').unwrap();
        // The converter keeps the pooler of classifiers under the name of RoBERTa's.
        let stem = match stem {
            "pooler.dense" => "classifier.dense",
            "classifier" => "classifier.out_proj",
            other => other,
        };
        let (spelled, layer) = numbered(stem);
        let stored = known.get(spelled.as_str()).unwrap_or_else(|| panic!("no name of {spelled}"));
        let stored = stored.replace("{}", &layer.unwrap_or(0).to_string());
        let dims: Vec<u64> = shape.iter().rev().map(|dim| *dim as u64).collect();
        file = file.floats(&format!("{stored}.{end}"), &dims, &numbers);
    }
    file
}

#[test]
fn a_classifier_of_each_architecture_gives_the_logits_of_its_checkpoint() {
    let cases: Value = serde_json::from_str(include_str!("../classifiers.json")).unwrap();
    for (name, architecture, changes) in [
        ("bert", "bert", json!({})),
        ("distilbert", "bert", json!({})),
        // What files do not state.
        ("modernbert, first token", "modern-bert", json!({"classifier_pooling": "mean"})),
        ("modernbert, mean, biased", "modern-bert", json!({"classifier_activation": "gelu"})),
    ] {
        let case = list(&cases).iter().find(|case| text(&case["name"]) == name).unwrap();
        let mut config = case["config"].clone();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let folder = made(case, &config);
        let want = logits(folder.path(), case);
        let path = folder.path().join("m.gguf");
        std::fs::write(&path, file(case, architecture).bytes()).unwrap();
        assert_eq!(logits(&path, case), want, "{name}");
    }
}
