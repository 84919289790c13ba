//! Gemma 3n and 4: layers that differ in their sizes, and tensors outside of layers.

use serde_json::{Map, Value as Json, json};

use super::{Architecture, BASE, GEMMA_MODULES, KEY_HEADS, WINDOWED};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::gguf::metadata::Metadata;

const WIDTHS: &str = "feed_forward_length";
const SPARSITY: &str = "activation_sparsity_scale";
const SHARED: &str = "attention.shared_kv_layers";

/// Tensors outside of layers.
const OUTER: &[(&str, &str)] = &[
    ("per_layer_token_embd", "model.embed_tokens_per_layer"),
    ("per_layer_model_proj", "model.per_layer_model_projection"),
    ("per_layer_proj_norm", "model.per_layer_projection_norm"),
    ("altup_proj", "model.altup_projections"),
    ("altup_unembd_proj", "model.altup_unembed_projections"),
];

/// Factors from which on a pair of elements does not turn.
const STILL: f32 = 1e20;

pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "gemma-embedding",
        class: "Gemma3TextModel",
        keys: &[("sliding_window", "attention.sliding_window"), ("rope_local_base_freq", "rope.freq_base_swa")],
        constants: &[("use_bidirectional_attention", "true")],
        modules: GEMMA_MODULES,
        norms_plus_one: true,
        // That of the size of a head for every number of layers.
        scaled_by_width: u64::MAX,
        ..BASE
    },
    Architecture {
        name: "gemma3n",
        class: "Gemma3nForCausalLM",
        keys: &[
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("sliding_window", "attention.sliding_window"),
            ("rope_local_base_freq", "rope.freq_base_swa"),
            ("altup_active_idx", "altup.active_idx"),
            ("altup_num_inputs", "altup.num_inputs"),
            ("hidden_size_per_layer_input", "embedding_length_per_layer_input"),
            ("num_kv_shared_layers", SHARED),
        ],
        lists: &[WIDTHS],
        modules: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
            ("inp_gate", "per_layer_input_gate"),
            ("proj", "per_layer_projection"),
            ("post_norm", "post_per_layer_input_norm"),
            ("altup_correct_coef", "altup.correction_coefs"),
            ("altup_correct_scale.weight", "altup.correct_output_scale"),
            ("altup_predict_coef", "altup.prediction_coefs"),
            ("altup_router", "altup.modality_router"),
            ("altup_router_norm", "altup.router_norm"),
            ("laurel_l", "laurel.linear_left"),
            ("laurel_r", "laurel.linear_right"),
            ("laurel_post_norm", "laurel.post_laurel_norm"),
        ],
        outer: OUTER,
        derive: gemma3n,
        ..BASE
    },
    Architecture {
        name: "gemma4",
        class: "Gemma4ForCausalLM",
        class_of_experts: "Gemma4ForCausalLM",
        keys: &[
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("sliding_window", "attention.sliding_window"),
            ("global_head_dim", "attention.key_length"),
            ("hidden_size_per_layer_input", "embedding_length_per_layer_input"),
            ("num_kv_shared_layers", SHARED),
            ("num_experts", "expert_count"),
            ("top_k_experts", "expert_used_count"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
        ],
        lists: &[WIDTHS, KEY_HEADS],
        modules: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
            ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
            ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
            ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
            ("layer_output_scale.weight", "layer_scalar"),
            ("inp_gate", "per_layer_input_gate"),
            ("proj", "per_layer_projection"),
            ("post_norm", "post_per_layer_input_norm"),
            ("ffn_gate_inp", "router.proj"),
            ("ffn_gate_inp.scale", "router.scale"),
            ("ffn_down_exps.scale", "router.per_expert_scale"),
            ("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
        ],
        outer: OUTER,
        experts: ("experts", ["gate_proj", "up_proj", "down_proj"]),
        derive: gemma4,
        ..BASE
    },
];

fn gemma3n(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    let layers = metadata.count("block_count")?.unwrap_or(0);
    map.insert("intermediate_size".into(), json!(metadata.of_layers(WIDTHS, layers)?));
    let rows = |tensor: &str| metadata.shape(tensor).and_then(|shape| shape.first().copied());
    if let Some(rank) = rows("blk.0.laurel_l.weight") {
        map.insert("laurel_rank".into(), json!(rank));
    }
    per_layer_vocab(metadata, map);
    let number = |value: crate::checkpoint::gguf::Value<'_>| value.float().filter(|number| !number.is_nan());
    let stated = match metadata.value(SPARSITY) {
        None => return Ok(()),
        Some(value) => value.array().and_then(|list| list.iter().map(number).collect::<Option<Vec<f64>>>()),
    };
    let expected = || metadata.wrong(SPARSITY, format!("numbers for {layers} layers"));
    let stated = stated.filter(|list| list.len() as u64 == layers).ok_or_else(expected)?;
    // The number below which nothing lies is no limit.
    let scales: Vec<Json> =
        stated.iter().map(|scale| if scale.is_finite() { json!(scale) } else { Json::Null }).collect();
    map.insert(SPARSITY.into(), json!(scales));
    Ok(())
}

fn gemma4(metadata: &Metadata<'_>, map: &mut Map<String, Json>) -> Result<(), LoadError> {
    let layers = metadata.count("block_count")?.unwrap_or(0);
    if metadata.value(WINDOWED).is_none() {
        return Err(metadata.wrong(WINDOWED, "true or false for each layer"));
    }
    let slides: Vec<bool> = map
        .get("layer_types")
        .and_then(Json::as_array)
        .into_iter()
        .flatten()
        .map(|kind| kind == "sliding_attention")
        .collect();
    const SIZE: &str = "attention.key_length_swa";
    const TURNING: &str = "rope.dimension_count_swa";
    let size = metadata.count(SIZE)?.ok_or_else(|| metadata.wrong(SIZE, "a number"))?;
    map.insert("head_dim".into(), json!(size));
    if metadata.count(TURNING)?.is_some_and(|turning| turning != size) {
        return Err(metadata.wrong(TURNING, format!("{size}, the size of a head of layers with a window")));
    }
    heads(metadata, map, &slides, layers)?;
    widths(metadata, map, layers)?;
    per_layer_vocab(metadata, map);
    map.insert("enable_moe_block".into(), json!(metadata.count("expert_count")?.unwrap_or(0) > 0));
    let (is_full, mut valued) =
        (|layer: &u64| slides.get(*layer as usize) == Some(&false), metadata.in_layers("attn_v.weight"));
    map.insert("attention_k_eq_v".into(), json!(slides.contains(&false) && !valued.any(|layer| is_full(&layer))));
    map.remove("partial_rotary_factor");
    let base = |key: &str| Ok::<_, LoadError>(metadata.number(key)?.unwrap_or(json!(10_000.0)));
    let full = json!({
        "rope_type": "proportional",
        "rope_theta": base("rope.freq_base")?,
        "partial_rotary_factor": turning(metadata)?,
    });
    let sliding = json!({"rope_type": "default", "rope_theta": base("rope.freq_base_swa")?});
    map.remove("rope_scaling");
    map.insert("rope_parameters".into(), json!({"full_attention": full, "sliding_attention": sliding}));
    Ok(())
}

/// The numbers of key/value heads of both kinds of layers.
fn heads(metadata: &Metadata<'_>, map: &mut Map<String, Json>, slides: &[bool], layers: u64) -> Result<(), LoadError> {
    let heads = metadata.of_layers(KEY_HEADS, layers)?;
    for (name, kind) in [("num_key_value_heads", true), ("num_global_key_value_heads", false)] {
        let mut of_kind = heads.iter().zip(slides).filter(|(_, slides)| **slides == kind).map(|(heads, _)| *heads);
        let Some(first) = of_kind.next() else { continue };
        if of_kind.any(|heads| heads != first) {
            return Err(metadata.wrong(KEY_HEADS, "the same number for all layers of a kind"));
        }
        map.insert(name.into(), json!(first));
    }
    Ok(())
}

/// The width of the networks, which may be doubled in layers that read the keys of others.
fn widths(metadata: &Metadata<'_>, map: &mut Map<String, Json>, layers: u64) -> Result<(), LoadError> {
    let widths = metadata.of_layers(WIDTHS, layers)?;
    let shared = metadata.count(SHARED)?.unwrap_or(0).min(layers);
    let (own, later) = widths.split_at((layers - shared) as usize);
    let width = own.first().copied().unwrap_or(0);
    let is_double = later.first().is_some_and(|later| *later != width);
    let expected = if is_double { 2 * width } else { width };
    if own.iter().any(|own| *own != width) || later.iter().any(|later| *later != expected) {
        let what = "one width, which may be doubled in layers that share keys";
        return Err(metadata.wrong(WIDTHS, what));
    }
    map.insert("intermediate_size".into(), json!(width));
    map.insert("use_double_wide_mlp".into(), json!(is_double));
    Ok(())
}

/// The share of the pairs of a head that turn: all factors are 1, then so great that nothing does.
fn turning(metadata: &Metadata<'_>) -> Result<f64, LoadError> {
    const NAME: &str = "rope_freqs.weight";
    let Some(tensor) = metadata.gguf.tensors().get(NAME) else { return Ok(1.0) };
    let factors = tensor.kind.values(metadata.gguf.data(tensor));
    let turning = factors.iter().take_while(|factor| **factor == 1.0).count();
    match turning > 0 && factors[turning..].iter().all(|factor| *factor >= STILL) {
        true => Ok(turning as f64 / factors.len() as f64),
        false => Err(LoadError::Gguf {
            file: metadata.gguf.file(tensor.part).to_string(),
            found: format!("tensor {NAME} with other factors than 1 and, behind these, at least {STILL:e}"),
            expected: "the pairs that turn, then those that do not".to_string(),
        }),
    }
}

fn per_layer_vocab(metadata: &Metadata<'_>, map: &mut Map<String, Json>) {
    let rows = metadata.shape("per_layer_token_embd.weight").and_then(|shape| shape.first());
    if let Some(rows) = rows {
        map.insert("vocab_size_per_layer_input".into(), json!(rows));
    }
}
