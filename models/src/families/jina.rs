//! JinaBERT (jina-embeddings-v2): BERT's layers with ALiBi to both sides instead of positions, and a gated network.

use super::{
    Activation, Common, Decoder, DenseActivation, Family, Fields, LoadError, Packing, Pooling, Spec, alibi_slopes, bert,
};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["JinaBertModel", "JinaBertForMaskedLM", "JinaBertForSequenceClassification"],
    positions: (&["max_position_embeddings"], Some(512)),
    declare,
    classify: |_, hidden, labels| {
        Ok(bert::layers(hidden, labels, ["bert.pooler.dense", "classifier"], DenseActivation::Tanh))
    },
    pool_classes: |_| Ok(Pooling::Cls),
    encoder: true,
    largest: "jinaai/jina-embeddings-v2-base-en",
    ..Family::BASE
}];

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    if fields.string("position_embedding_type")? != Some("alibi") {
        return Err(fields.wrong("position_embedding_type", "\"alibi\""));
    }
    let code = fields.get("auto_map").map(ToString::to_string).unwrap_or_default();
    if code.contains("qk-post-norm") {
        let expected = "the code of jina-bert-implementation: layers that add their input twice are not supported";
        return Err(fields.wrong("auto_map", expected));
    }
    let network = "feed_forward_type";
    let activation = fields.read(network, "\"geglu\" or \"reglu\"", |value| match value.as_str()? {
        "geglu" => Some(Activation::Gelu),
        "reglu" => Some(Activation::Relu),
        _ => None,
    })?;
    let activation = activation.ok_or_else(|| fields.wrong(network, "\"geglu\" or \"reglu\""))?;
    let common = Common::read(fields, max_positions, Spec { activation: (&[], activation), ..bert::SPEC })?;
    let decoder = common.decoder(|layer| {
        let packing = Packing::Separate(["self.query", "self.key", "self.value"]);
        let mut attention = common.attention_of(common.at(layer, "attention"), packing, "output.dense");
        attention.alibi_slopes = Some(alibi_slopes(common.heads.num_heads, 8.0));
        let mut mlp = common.gated_rows(common.at(layer, "mlp"), ["gated_layers", "wo"], common.intermediate_size);
        mlp.down.bias = true;
        common.layer_with(layer, ["attention.output.LayerNorm", "mlp.layernorm"], attention.biased(true, true), mlp)
    });
    bert::encoder(fields, &common, decoder, Some(2), "embeddings.LayerNorm")
}
