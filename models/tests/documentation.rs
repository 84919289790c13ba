//! `docs/models.md` against the families of the code. `QUIRE_WRITE_DOCS=1 cargo test -p models --test all documentation` writes its
//! table.

use attention_kernels::BlockSparse;
use models::decoder::{Attention, Decoder, Mixer, Rule};
use models::{ModelConfig, Supported, gguf, supported};
use serde_json::{Value, json};

use crate::common::{Copy, Opened, files};
use crate::naive::{cases, encoders};

const PAGE: &str = "docs/models.md";
const HEAD_OF_GGUF: &str = "| `general.architecture` | families |\n|---|---|\n";
const HEAD: &str = "| architectures | `model_type` | what it has | reference case | largest known checkpoint |\n|---|---|---|---|---|\n";

/// A configuration of families that have neither a reference case nor one of the oracle.
fn every_key() -> Value {
    json!({
        "vocab_size": 64, "max_position_embeddings": 128, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    })
}

/// What a decoder may have beyond Llama, and whether it does.
fn features(decoder: &Decoder) -> Vec<(bool, &'static str)> {
    let layers = || decoder.attention();
    let branches = || decoder.branches();
    let mut features = Vec::new();
    let mut add = |has: bool, name: &'static str| features.push((has, name));
    let windows = layers().filter(|layer| layer.window.is_some()).count();
    let ropes = layers().filter(|layer| layer.rope.is_some()).count();
    add(decoder.is_encoder(), "an encoder");
    add(decoder.embedding.types.is_some(), "token types");
    add(layers().any(|layer| layer.distances.is_some()), "biases by distance");
    add(windows == layers().count(), "window");
    let is_window = windows > 0 && windows < layers().count() && layers().all(|layer| layer.sparse.is_none());
    add(is_window, "window in some layers");
    let is_chunked = |rule: BlockSparse| rule == BlockSparse::chunks(rule.block_size);
    add(layers().any(|layer| layer.sparse.is_some_and(is_chunked)), "chunks in some layers");
    add(layers().any(|layer| layer.sparse.is_some_and(|rule| !is_chunked(rule))), "block-sparse attention");
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
    let chooses = |layer: &Attention| layer.latent.as_ref().is_some_and(|latent| latent.choice.is_some());
    add(layers().any(chooses), "an indexer");
    add(layers().any(|layer| layer.value_dim.is_some()), "narrow values");
    add(branches().any(|branch| branch.norm_after.is_some()), "norms after branches");
    add(decoder.layers.iter().any(|layer| layer.parallel > 0), "parallel branches");
    add(branches().any(|branch| matches!(&branch.mixer, Mixer::Mlp(mlp) if !mlp.gated)), "no gate");
    let has_rule = |is: fn(&Rule) -> bool| decoder.recurrent().any(|layer| is(&layer.rule));
    add(has_rule(|rule| matches!(rule, Rule::GatedDelta { .. })), "gated delta nets");
    add(has_rule(|rule| matches!(rule, Rule::ShortConvolution)), "short convolutions");
    add(has_rule(|rule| matches!(rule, Rule::StateSpace { .. })), "Mamba-2");
    add(has_rule(|rule| matches!(rule, Rule::Selective(_))), "Mamba-1");
    add(has_rule(|rule| matches!(rule, Rule::ChannelDelta(_))), "delta nets with decays of channels");
    add(decoder.streams.is_some(), "several streams");
    add(decoder.experts().next().is_some(), "experts");
    add(decoder.experts().any(|experts| experts.shared.is_some()), "shared expert");
    features
}

fn row(family: &Supported) -> String {
    let load = |config: Value| {
        let copy = Copy::of("llama").edit("config.json", |file| *file = config);
        ModelConfig::load(&copy.files()).unwrap_or_else(|error| panic!("{family:?}: {error}"))
    };
    let of_family = |config: &Value| family.architectures.iter().any(|name| config["architectures"][0] == *name);
    let cases = cases::all().into_iter().chain(encoders::cases(36)).map(|case| case.config).filter(of_family);
    let mut configs: Vec<ModelConfig> = match family.reference.first() {
        Some(case) => vec![ModelConfig::load(&files(case)).unwrap()],
        None => cases.map(load).collect(),
    };
    if configs.is_empty() {
        let mut config = every_key();
        config["architectures"] = json!([family.architectures[0]]);
        configs.push(load(config));
    }
    let all: Vec<_> = configs.iter().map(|config| features(&config.decoder)).collect();
    let names = (0..all[0].len()).filter(|i| all.iter().any(|features| features[*i].0)).map(|i| all[0][i].1);
    let features = names.collect::<Vec<_>>().join(", ");
    let code = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let [architectures, types, cases] = [family.architectures, family.model_types, family.reference].map(code);
    let pickled = if family.pickled { " (pickles)" } else { "" };
    format!("| {architectures} | {types} | {features} | {cases} | {}{pickled} |\n", family.largest)
}

/// The page with these lines for its table with this head.
fn with_table(page: &str, head: &str, lines: &str) -> String {
    let start = page.find(head.lines().next().unwrap()).unwrap();
    let end = start + page[start..].find("\n\n").map_or(page.len() - start, |end| end + 1);
    format!("{}{head}{lines}{}", &page[..start], &page[end..])
}

/// An architecture of GGUF files and its families.
fn row_of_gguf(architecture: gguf::Supported) -> String {
    let mut classes: Vec<String> =
        architecture.classes.iter().filter(|name| !name.is_empty()).map(|name| format!("`{name}`")).collect();
    classes.dedup();
    format!("| `{}` | {} |\n", architecture.name, classes.join(", "))
}

#[test]
fn the_page_of_models_lists_every_family_and_architecture_of_the_code() {
    let path = testkit::workspace::root().join(PAGE);
    let page = std::fs::read_to_string(&path).unwrap();
    let written = with_table(&page, HEAD, &supported().map(|family| row(&family)).collect::<String>());
    let written = with_table(&written, HEAD_OF_GGUF, &gguf::supported().map(row_of_gguf).collect::<String>());
    if std::env::var_os("QUIRE_WRITE_DOCS").is_some() {
        return std::fs::write(&path, &written).unwrap();
    }
    assert!(
        page == written,
        "{PAGE} is out of date; write its table with QUIRE_WRITE_DOCS=1 cargo test -p models --test all documentation"
    );
}

#[test]
fn the_number_of_families_is_that_of_the_code() {
    // Families that are published as pickles alone are not counted.
    let number = format!("[{} families]", supported().filter(|family| !family.pickled).count());
    let of_gguf = format!("; {} architectures |", gguf::supported().count());
    let text = std::fs::read_to_string(testkit::workspace::root().join("README.md")).unwrap();
    assert!(text.contains(&of_gguf), "README.md must say {of_gguf}");
    for page in ["README.md", "docs/status.md"] {
        let text = std::fs::read_to_string(testkit::workspace::root().join(page)).unwrap();
        assert!(text.contains(&number), "{page} must say {number}");
    }
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

#[test]
fn the_page_names_every_architecture_and_pre_tokenizer_of_gguf_files() {
    use crate::gguf::made_vocabulary::{byte_level, files};
    use crate::texts::TextFiles;
    let page = std::fs::read_to_string(testkit::workspace::root().join(PAGE)).unwrap();
    let mut checked = 0;
    let mut unknown = byte_level(Some("unknown"), &[], &[]);
    let opened = files(&unknown.made()).unwrap();
    let no_pre_tokenizer = text::Tokenizer::load(&TextFiles(&opened)).err().unwrap().to_string();
    unknown.architecture = "unknown";
    let no_architecture = files(&unknown.made()).unwrap_err().to_string();
    for message in [no_pre_tokenizer, no_architecture] {
        for name in message.split_once("one of ").unwrap().1.split(", ") {
            assert!(page.contains(&format!("`{name}`")), "{PAGE} does not name {name}");
            checked += 1;
        }
    }
    assert!(checked > 60, "only {checked} names");
}
