//! `docs/models.md` against the families of the code. `QUIRE_WRITE_DOCS=1 cargo test -p models --test all documentation` writes its
//! table.

use models::decoder::{Decoder, Mixer};
use models::{ModelConfig, Supported, supported};
use serde_json::{Value, json};

use crate::common::{Copy, files};

const PAGE: &str = "docs/models.md";
const HEAD: &str = "| architectures | `model_type` | what it has | reference case | largest known checkpoint |\n|---|---|---|---|---|\n";

/// A configuration with the sizes of every family, under all their names, and its options on.
fn every_key() -> Value {
    json!({
        "vocab_size": 64, "max_position_embeddings": 128, "n_positions": 128, "max_seq_len": 128,
        "hidden_size": 64, "n_embd": 64, "n_embed": 64, "d_model": 64, "intermediate_size": 64, "ffn_dim": 64,
        "num_hidden_layers": 12, "n_layer": 12, "n_layers": 12,
        "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 6, "alibi": false,
        "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1,
        "shared_intermediate_size": 16, "use_qk_norm": true, "qk_layernorm": true,
        "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    })
}

/// What a decoder has beyond Llama.
fn features(decoder: &Decoder) -> Vec<&'static str> {
    let layers = || decoder.attention();
    let branches = || decoder.branches();
    let mut features = Vec::new();
    let mut add = |has: bool, name: &'static str| features.extend(has.then_some(name));
    let windows = layers().filter(|layer| layer.window.is_some()).count();
    let ropes = layers().filter(|layer| layer.rope.is_some()).count();
    add(windows == layers().count(), "window");
    add(windows > 0 && windows < layers().count(), "window in some layers");
    add(ropes > 0 && ropes < layers().count(), "rope in some layers");
    add(layers().flat_map(|layer| &layer.rope).any(|rope| rope.interleaved), "rope of neighbours");
    add(
        layers().any(|layer| {
            layer.rope.as_ref().is_some_and(|rope| rope.dims < layer.heads.head_dim) && layer.latent.is_none()
        }),
        "partial rope",
    );
    add(layers().any(|layer| layer.alibi_slopes.is_some()), "ALiBi");
    add(decoder.embedding.positions.is_some(), "learned positions");
    add(layers().any(|layer| layer.query_norm.is_some()), "query and key norms");
    add(layers().any(|layer| layer.sinks.is_some()), "sinks");
    add(layers().any(|layer| layer.soft_cap.is_some()), "soft cap");
    add(layers().any(|layer| layer.gate), "output gate");
    add(layers().any(|layer| layer.latent.is_some()), "latent attention");
    add(branches().any(|branch| branch.norm_after.is_some()), "norms after branches");
    add(decoder.layers.iter().any(|layer| layer.parallel), "parallel branches");
    add(branches().any(|branch| matches!(&branch.mixer, Mixer::Mlp(mlp) if !mlp.gated)), "no gate");
    add(decoder.experts().next().is_some(), "experts");
    add(decoder.experts().any(|experts| experts.shared.is_some()), "shared expert");
    features
}

fn row(family: &Supported) -> String {
    let config = match family.reference.first() {
        Some(case) => ModelConfig::load(&files(case)).unwrap(),
        None => {
            let copy = Copy::of("llama").edit("config.json", |config| *config = every_key());
            let named = copy.set("config.json", json!({"architectures": [family.architectures[0]]}));
            ModelConfig::load(&named.files()).unwrap_or_else(|error| panic!("{family:?}: {error}"))
        }
    };
    let code = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let features = features(&config.decoder).join(", ");
    let [architectures, types, cases] = [family.architectures, family.model_types, family.reference].map(code);
    format!("| {architectures} | {types} | {features} | {cases} | {} |\n", family.largest)
}

#[test]
fn the_page_of_models_lists_every_family_of_the_code() {
    let table = HEAD.to_string() + &supported().map(|family| row(&family)).collect::<String>();
    let path = testkit::workspace::root().join(PAGE);
    let page = std::fs::read_to_string(&path).unwrap();
    let start = page.find("| architectures |").unwrap();
    let end = start + page[start..].find("\n\n").map_or(page.len() - start, |end| end + 1);
    let written = format!("{}{table}{}", &page[..start], &page[end..]);
    if std::env::var_os("QUIRE_WRITE_DOCS").is_some() {
        return std::fs::write(&path, &written).unwrap();
    }
    assert!(
        page == written,
        "{PAGE} is out of date; write its table with QUIRE_WRITE_DOCS=1 cargo test -p models --test all documentation"
    );
}

#[test]
fn the_example_of_the_tutorial_is_the_code() {
    let root = testkit::workspace::root();
    let page = std::fs::read_to_string(root.join("docs/adding-a-model.md")).unwrap();
    let (_, shown) = page.split_once("+++ b/models/src/families/smollm3.rs\n").unwrap();
    let lines = shown.lines().map_while(|line| line.strip_prefix('+'));
    let code = std::fs::read_to_string(root.join("models/src/families/smollm3.rs")).unwrap();
    assert!(lines.eq(code.lines()), "docs/adding-a-model.md shows another smollm3.rs");
}
