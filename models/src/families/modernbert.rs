//! ModernBERT: an encoder with rotary embeddings, norms before the branches and a gated network. Each third layer sees the whole text, the
//! others a window to both sides, with a rotary embedding of their own. The first layer has no norm before its attention.

use super::sizes::{self, MAX_LAYERS, MAX_POSITIONS};
use super::{
    Activation, Common, Decoder, Dense, DenseActivation, Family, Fields, LoadError, Packing, Pooling, RopeDefaults,
    Spec, labels, rope,
};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"],
    model_types: &["modernbert"],
    positions: (&["max_position_embeddings"], Some(8192)),
    declare,
    classify,
    pool_classes,
    encoder: true,
    largest: "answerdotai/ModernBERT-large",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    sizes: &[
        ("vocab_size", 50_368),
        ("hidden_size", 768),
        ("intermediate_size", 1152),
        ("num_hidden_layers", 22),
        ("num_attention_heads", 12),
    ],
    eps: ("norm_eps", 1e-5),
    activation: (&["hidden_activation"], Activation::Gelu),
    tied: true,
    rope: None,
    tokens: "embeddings.tok_embeddings",
    final_norm: "final_norm",
    ..Spec::LAYER_NORM
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let flag = |key: &str| Ok::<_, LoadError>(fields.boolean(key)?.unwrap_or(false));
    let common = Common::read(fields, max_positions, Spec { norm_bias: flag("norm_bias")?, ..SPEC })?;
    let every = sizes::optional(fields, "global_attn_every_n_layers", MAX_LAYERS)?.unwrap_or(3);
    let types = [("full_attention", false), ("sliding_attention", true)];
    let slides = sizes::kinds(fields, "layer_types", common.num_layers, &types)?;
    let width = sizes::optional(fields, "local_attention", MAX_POSITIONS)?.unwrap_or(128);
    let head_dim = common.heads.head_dim;
    let rope = |kind: &str, key: &'static str, theta: f64| {
        let defaults = RopeDefaults { theta: (key, theta), ..RopeDefaults::LLAMA };
        match rope::read_type(fields, kind, max_positions, head_dim, defaults)? {
            Some(rope) => Ok(rope),
            None => rope::read(fields, max_positions, head_dim, defaults),
        }
    };
    let global = rope("full_attention", "global_rope_theta", 160_000.0)?;
    let local = rope("sliding_attention", "local_rope_theta", 10_000.0)?;
    let [attention_bias, mlp_bias] = [flag("attention_bias")?, flag("mlp_bias")?];
    let mut decoder = common.decoder(|layer| {
        let mut attention = common
            .attention_of(common.at(layer, "attn"), Packing::Rows("Wqkv"), "Wo")
            .biased(attention_bias, attention_bias);
        let is_local = slides.as_ref().map_or(!layer.is_multiple_of(every), |slides| slides[layer]);
        attention.both_sides = true;
        // Up to half of the width away.
        attention.window = is_local.then_some(width / 2 + 1);
        attention.rope = Some(if is_local { local.clone() } else { global.clone() });
        let mlp = common.gated_rows(common.at(layer, "mlp"), ["Wi", "Wo"], common.intermediate_size).biased(mlp_bias);
        let mut declared = common.layer_with(layer, ["attn_norm", "mlp_norm"], attention, mlp);
        if layer == 0 {
            declared.branches[0].norm = None;
        }
        declared
    });
    decoder.embedding.norm = Some(common.norm("model.embeddings.norm".to_string()));
    Ok(decoder)
}

fn classify(fields: &Fields<'_>, hidden: usize, count: usize) -> Result<Vec<Dense>, LoadError> {
    let activation = labels::activation(fields, DenseActivation::Gelu)?;
    let bias = fields.boolean("classifier_bias")?.unwrap_or(false);
    let spec = Spec { norm_bias: fields.boolean("norm_bias")?.unwrap_or(false), ..SPEC };
    let common = Common::read(fields, 1, spec)?;
    let head = Dense::new("head.dense", hidden, hidden).activated(bias, activation);
    let head = Dense { norm: Some(common.norm("head.norm".to_string())), ..head };
    Ok(vec![head, Dense::new("classifier", count, hidden).activated(true, DenseActivation::Identity)])
}

fn pool_classes(fields: &Fields<'_>) -> Result<Pooling, LoadError> {
    let named = fields.read("classifier_pooling", "\"cls\" or \"mean\"", |value| match value.as_str()? {
        "cls" => Some(Pooling::Cls),
        "mean" => Some(Pooling::Mean),
        _ => None,
    })?;
    Ok(named.unwrap_or(Pooling::Cls))
}
