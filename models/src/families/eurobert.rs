//! EuroBERT: the layers of Llama as an encoder.

use super::{
    Activation, Common, Decoder, DenseActivation, Family, Fields, LoadError, Pooling, RopeDefaults, Spec, bert,
};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["EuroBertModel", "EuroBertForMaskedLM", "EuroBertForSequenceClassification"],
    model_types: &["eurobert"],
    positions: (&["max_position_embeddings"], Some(8192)),
    declare,
    classify: |_, hidden, labels| Ok(bert::layers(hidden, labels, ["dense", "classifier"], DenseActivation::Gelu)),
    pool_classes: |fields| Ok(pooling(fields)?.unwrap_or(Pooling::Mean)),
    late: |fields| Ok(pooling(fields)?.is_none().then_some(Activation::Gelu)),
    encoder: true,
    largest: "EuroBERT/EuroBERT-2.1B",
    ..Family::BASE
}];

const SPEC: Spec = Spec { eps: ("rms_norm_eps", 1e-5), rope: Some(RopeDefaults::theta(250_000.0)), ..Spec::LLAMA };

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let attention_bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let mlp_bias = fields.boolean("mlp_bias")?.unwrap_or(false);
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer).biased(attention_bias, attention_bias);
        attention.both_sides = true;
        common.layer(layer, attention, common.mlp(layer).biased(mlp_bias))
    }))
}

/// How a classifier pools hidden states; `None`: their logits have a mean, which is what the last layer makes of the mean of its inputs.
fn pooling(fields: &Fields<'_>) -> Result<Option<Pooling>, LoadError> {
    // The key of the checkpoints that came with code of their own.
    let older = "clf_pooling";
    let key = if fields.get(older).is_some() { older } else { "classifier_pooling" };
    let named = fields.read(key, "\"bos\", \"mean\" or \"late\"", |value| match value.as_str()? {
        "bos" => Some(Some(Pooling::Cls)),
        "mean" => Some(Some(Pooling::Mean)),
        "late" => Some(None),
        _ => None,
    })?;
    Ok(named.flatten())
}
