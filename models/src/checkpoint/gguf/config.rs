//! `config.json` from the metadata of a GGUF file.

use serde_json::{Map, Value as Json, json};

use super::architectures::{self, Architecture, KEY_HEADS, KEYS, PREDICTORS, REQUIRED, ROPE_FACTORS, ROTATED, VALUES};
use super::file::Gguf;
use super::metadata::Metadata;
use crate::checkpoint::error::{LoadError, one_line};
use crate::decoder::MAX_HEAD_DIM;

const ARCHITECTURE: &str = "general.architecture";

/// The architecture of a file.
///
/// # Errors
/// It is not stated or not supported.
pub(super) fn architecture(gguf: &Gguf) -> Result<&'static Architecture, LoadError> {
    let stated = gguf.value(ARCHITECTURE);
    let name = stated.and_then(|value| value.text());
    architectures::all().find(|known| Some(known.name) == name).ok_or_else(|| LoadError::UnsupportedArchitecture {
        file: gguf.file(0).to_string(),
        found: stated.map_or(format!("no {ARCHITECTURE}"), one_line),
        supported: architectures::all().map(|known| known.name).collect::<Vec<_>>().join(", "),
        advice: String::new(),
    })
}

/// The keys of `config.json` that the family reads.
///
/// # Errors
/// A key is missing or has an unusable value.
pub(super) fn config(
    gguf: &Gguf,
    architecture: &'static Architecture,
    end_tokens: &[u32],
) -> Result<Map<String, Json>, LoadError> {
    let metadata = Metadata { gguf, architecture };
    if let Some(missing) = REQUIRED.iter().find(|key| metadata.value(key).is_none()) {
        return Err(metadata.wrong(missing, "a number"));
    }
    if let Some((key, expected)) = architecture.refused.iter().find(|(key, _)| metadata.value(key).is_some()) {
        return Err(metadata.wrong(key, *expected));
    }
    let mut map = Map::new();
    let experts = metadata.count("expert_count")?.unwrap_or(0) > 0;
    map.insert(
        "architectures".into(),
        json!([if experts { architecture.class_of_experts } else { architecture.class }]),
    );
    for (name, text) in architecture.constants {
        map.insert((*name).into(), constant(text));
    }
    let has_types = layer_types(&metadata, &mut map)?;
    for (name, key) in KEYS.iter().chain(architecture.keys).chain(architecture.shared_keys) {
        let is_list = || architecture.lists.contains(key) && metadata.value(key).is_some_and(|it| it.array().is_some());
        if has_types && *key == KEY_HEADS || is_list() {
            continue;
        }
        if let Some(number) = metadata.number(key)? {
            // Converters write 0 for no window, which a folder has as `null`.
            let is_off = *name == "sliding_window" && number.as_u64() == Some(0);
            map.insert((*name).into(), if is_off { Json::Null } else { number });
        }
    }
    let rows = gguf.tensors().get("token_embd.weight").and_then(|tensor| tensor.shape.first());
    if let Some(rows) = rows {
        map.insert("vocab_size".into(), json!(rows));
    }
    let has = |name: &str| gguf.tensors().contains_key(name);
    map.insert("tie_word_embeddings".into(), json!(!has("output.weight")));
    for (name, tensor) in architecture.flags {
        // Queries may be in one tensor with keys and values.
        let joint = tensor.strip_prefix("attn_q.").map(|end| format!("attn_qkv.{end}"));
        let mut found = metadata.in_layers(tensor).chain(joint.iter().flat_map(|joint| metadata.in_layers(joint)));
        map.insert((*name).into(), json!(found.next().is_some()));
    }
    behind_the_layers(&metadata, &mut map)?;
    windows(&metadata, &mut map)?;
    let pairs = heads(&metadata, &mut map)?;
    if let Some(scaling) = rope_scaling(&metadata, pairs)? {
        // The other name of the map, under which its own keys are read.
        let (name, theta) = match architecture.scaling {
            [] => ("rope_scaling", None),
            _ => ("rope_parameters", map.get("rope_theta").cloned().map(|theta| ("rope_theta".to_string(), theta))),
        };
        map.insert(name.into(), Json::Object(scaling.into_iter().chain(theta).collect()));
    }
    (architecture.derive)(&metadata, &mut map)?;
    for name in architecture.absent {
        map.remove(*name);
    }
    map.insert("eos_token_id".into(), json!(end_tokens));
    Ok(map)
}

/// Layers that predict a second token count as layers in the file alone.
fn behind_the_layers(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    if let Some(predictors) = metadata.count(PREDICTORS)? {
        map.insert("num_hidden_layers".into(), json!(metadata.layers()?));
        map.insert("num_nextn_predict_layers".into(), json!(predictors));
    }
    Ok(())
}

/// The types of layers, if the file says which of them have a window.
fn windows(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    let Some(slides) = metadata.slides()? else { return Ok(()) };
    let kinds = slides.iter().map(|slides| if *slides { "sliding_attention" } else { "full_attention" });
    map.insert("layer_types".into(), kinds.collect());
    Ok(())
}

/// The number of key/value heads and the types of layers, of which those without such heads have states. Returns whether the file has
/// these numbers for each layer.
fn layer_types(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<bool, LoadError> {
    let Some((key, [without, with])) = metadata.architecture.layer_types else { return Ok(false) };
    let Some(list) = metadata.value(KEY_HEADS).and_then(|value| value.array()) else { return Ok(false) };
    let wrong = || metadata.wrong(KEY_HEADS, "0 for layers with states and the same number for all others");
    let counts: Vec<u64> = list.iter().map(|count| count.unsigned()).collect::<Option<_>>().ok_or_else(wrong)?;
    let heads = counts.iter().copied().max().unwrap_or(0);
    if counts.iter().any(|count| ![0, heads].contains(count)) {
        return Err(wrong());
    }
    let types: Vec<&str> = counts.iter().map(|count| if *count == 0 { without } else { with }).collect();
    map.insert("num_key_value_heads".into(), json!(heads));
    map.insert(key.into(), json!(types));
    Ok(true)
}

/// The size of a head, the share of it that is rotated, and the scale of the scores. Returns the number of pairs that are rotated.
fn heads(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<usize, LoadError> {
    let count = |key: &str| metadata.count(key);
    if count("attention.kv_lora_rank")?.is_some() {
        // The heads are those of latents, which the architecture reads.
        return Ok(count(ROTATED)?.unwrap_or(0) as usize / 2);
    }
    let (width, heads) = (count("embedding_length")?.unwrap_or(0), count("attention.head_count")?.unwrap_or(0).max(1));
    let head_dim = count("attention.key_length")?.unwrap_or(width / heads);
    if head_dim > MAX_HEAD_DIM {
        return Err(metadata.wrong("attention.key_length", format!("heads of at most {MAX_HEAD_DIM}")));
    }
    let is_read = |key: &str| metadata.architecture.keys.iter().any(|(_, own)| *own == key);
    if !is_read(VALUES) && count(VALUES)?.is_some_and(|value| value != head_dim) {
        return Err(metadata.wrong(VALUES, format!("{head_dim}, the size of a key")));
    }
    map.insert("head_dim".into(), json!(head_dim));
    let rotated = count(ROTATED)?.unwrap_or(head_dim);
    let is_number = is_read(ROTATED);
    if rotated < head_dim && !is_number {
        // The family multiplies the share with the size and drops the fraction.
        map.insert("partial_rotary_factor".into(), json!((rotated as f64 / head_dim as f64).next_up()));
    } else if rotated > head_dim {
        return Err(metadata.wrong(ROTATED, format!("at most {head_dim}, the size of a head")));
    }
    if metadata.architecture.scaled_by_width > 0 {
        let by_width = count("block_count")? == Some(metadata.architecture.scaled_by_width);
        map.insert("query_pre_attn_scalar".into(), json!(if by_width { width / heads } else { head_dim }));
    }
    Ok(rotated as usize / 2)
}

/// `rope_scaling`, from the keys or from the factors of each frequency.
fn rope_scaling(metadata: &Metadata<'_>, pairs: usize) -> Result<Option<Map<String, Json>>, LoadError> {
    let Metadata { gguf, architecture } = *metadata;
    let factors = |name: &str| {
        let Some(tensor) = gguf.tensors().get(name) else { return Ok(None) };
        let found: usize = tensor.shape.iter().product();
        match found == pairs {
            // Few, so that neither their values nor their text cost much.
            true => Ok(Some(tensor.kind.values(gguf.data(tensor)))),
            false => Err(LoadError::Gguf {
                file: gguf.file(tensor.part).to_string(),
                found: format!("tensor {name} of {found} values"),
                expected: format!("{pairs}, one for each pair of elements of a head that is rotated"),
            }),
        }
    };
    let mut map = Map::new();
    let mut set = |name: &str, value: Json| map.insert(name.to_string(), value);
    let [all, long, short] = ROPE_FACTORS;
    let (all, long, short) = (factors(all)?, factors(long)?, factors(short)?);
    let original = metadata.number("rope.scaling.original_context_length")?;
    if let Some(original) = &original {
        set("original_max_position_embeddings", original.clone());
    }
    if let Some(factors) = all {
        // The factors already hold for every length, and nothing else is scaled.
        set("rope_type", json!("longrope"));
        set("short_factor", json!(factors));
        set("long_factor", json!(factors));
        set("attention_factor", json!(1.0));
        return Ok(Some(map));
    }
    if let (Some(long), Some(short)) = (long, short) {
        set("rope_type", json!("longrope"));
        set("long_factor", json!(long));
        set("short_factor", json!(short));
        if let Some(factor) = metadata.number("rope.scaling.attn_factor")? {
            set("attention_factor", factor);
        }
        return Ok(Some(map));
    }
    const TYPE: &str = "rope.scaling.type";
    let kind = metadata.value(TYPE);
    match kind.map(|value| value.text()) {
        None | Some(Some("none")) => return Ok(None),
        Some(Some(kind @ ("linear" | "yarn"))) => set("rope_type", json!(kind)),
        Some(_) => return Err(metadata.wrong(TYPE, "none, linear or yarn, or longrope with its tensors of factors")),
    };
    let keys = [
        ("factor", "factor"),
        ("attention_factor", "attn_factor"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ];
    let keys = keys.iter().map(|(name, key)| (*name, format!("rope.scaling.{key}")));
    let own = architecture.scaling.iter().map(|(name, key)| (*name, key.to_string()));
    for (name, key) in keys.chain(own) {
        if let Some(number) = metadata.number(&key)? {
            set(name, number);
        }
    }
    for (name, text) in architecture.yarn {
        set(name, constant(text));
    }
    Ok(Some(map))
}

/// A value of a table of this crate.
fn constant(text: &str) -> Json {
    serde_json::from_str(text).unwrap_or_default()
}
