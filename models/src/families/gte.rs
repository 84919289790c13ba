//! GTE: BERT's layers with rotary embeddings instead of positions, packed projections and a gated network whose up projection comes
//! first.

use super::{
    Activation, Common, Decoder, DenseActivation, Family, Fields, LoadError, Packing, Part, Pick, Pooling,
    RopeDefaults, Spec, bert,
};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["NewModel", "NewForMaskedLM", "NewForSequenceClassification", "GteModel"],
    model_types: &["new", "gte"],
    positions: (&["max_position_embeddings"], Some(8192)),
    declare,
    classify: |_, hidden, labels| {
        Ok(bert::layers(hidden, labels, ["new.pooler.dense", "classifier"], DenseActivation::Tanh))
    },
    pool_classes: |_| Ok(Pooling::Cls),
    encoder: true,
    largest: "Alibaba-NLP/gte-large-en-v1.5",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    eps: ("layer_norm_eps", 1e-12),
    activation: (&["hidden_act"], Activation::Gelu),
    tied: true,
    rope: Some(RopeDefaults::theta(160_000.0)),
    root: "new",
    tokens: "embeddings.word_embeddings",
    layers: "encoder.layer",
    ..Spec::LAYER_NORM
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    for (key, expected) in [("position_embedding_type", "rope"), ("layer_norm_type", "layer_norm")] {
        if fields.string(key)?.is_some_and(|found| found != expected) {
            return Err(fields.wrong(key, format!("\"{expected}\"")));
        }
    }
    for (key, expected) in [("pack_qkv", true), ("logn_attention_scale", false)] {
        if fields.boolean(key)?.is_some_and(|found| found != expected) {
            return Err(fields.wrong(key, expected.to_string()));
        }
    }
    let common = Common::read(fields, max_positions, SPEC)?;
    let width = common.intermediate_size;
    let decoder = common.decoder(|layer| {
        let attention = common.attention_of(common.at(layer, "attention"), Packing::Rows("qkv_proj"), "o_proj");
        let of_half = |first: usize| {
            Part::picked(common.at(layer, "mlp.up_gate_proj"), width, Pick::rows(2 * width, first, width))
        };
        let down = Part::new(common.at(layer, "mlp.down_proj"), common.hidden_size);
        let mut mlp = common.mlp_of([of_half(width), of_half(0)], down, width);
        mlp.down.bias = true;
        common.layer_with(layer, ["attn_ln", "mlp_ln"], attention.biased(true, true), mlp)
    });
    bert::encoder(fields, &common, decoder, Some(1), "embeddings.LayerNorm")
}
