//! NomicBERT: BERT's layers with rotary embeddings instead of positions and a gated network, without biases. Its keys are those of GPT-2.

use super::{
    Activation, Common, Decoder, Family, Fields, LoadError, Packing, RopeDefaults, RopeScaling, Spec, bert, sizes,
};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["NomicBertModel"],
    model_types: &["nomic_bert"],
    positions: (&["n_positions", "max_position_embeddings"], Some(8192)),
    declare,
    encoder: true,
    largest: "nomic-ai/nomic-embed-text-v1.5",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    hidden_size: "n_embd",
    intermediate_size: "n_inner",
    num_layers: "n_layer",
    num_heads: "n_head",
    eps: ("layer_norm_epsilon", 1e-12),
    activation: (&[], Activation::Silu),
    tied: true,
    rope: Some(RopeDefaults {
        theta: ("rotary_emb_base", 1000.0),
        partial: ("rotary_emb_fraction", 1.0),
        ..RopeDefaults::LLAMA
    }),
    tokens: "embeddings.word_embeddings",
    layers: "encoder.layers",
    ..Spec::LAYER_NORM
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    for (key, expected) in [
        ("prenorm", false),
        ("parallel_block", false),
        ("use_rms_norm", false),
        ("rotary_emb_interleaved", false),
        ("causal", false),
        ("qkv_proj_bias", false),
        ("mlp_fc1_bias", false),
        ("mlp_fc2_bias", false),
    ] {
        if fields.boolean(key)?.unwrap_or(expected) != expected {
            return Err(fields.wrong(key, expected.to_string()));
        }
    }
    let has_experts = sizes::not_negative(fields, "moe_every_n_layers")?.is_some_and(|every| every > 0.0);
    if has_experts {
        return Err(fields.wrong("moe_every_n_layers", "0: encoders with experts are not supported"));
    }
    if fields.string("activation_function")?.is_some_and(|name| name != "swiglu") {
        return Err(fields.wrong("activation_function", "\"swiglu\""));
    }
    let mut common = Common::read(fields, max_positions, SPEC)?;
    // The base grows for texts longer than those of the training, of `max_trained_positions` tokens.
    let factor = sizes::positive(fields, "rotary_scaling_factor")?.filter(|factor| *factor > 1.0);
    let trained = sizes::optional(fields, "max_trained_positions", sizes::MAX_POSITIONS)?.unwrap_or(2048) as f64;
    if let (Some(factor), Some(rope)) = (factor, &mut common.rope) {
        let context = max_positions as f64;
        rope.scaling = RopeScaling::Dynamic { factor, max_position_embeddings: trained, context };
    }
    let decoder = common.decoder(|layer| {
        let attention = common.attention_of(common.at(layer, "attn"), Packing::Rows("Wqkv"), "out_proj");
        let mlp = common.gated(common.at(layer, "mlp"), ["fc12", "fc11", "fc2"], common.intermediate_size);
        common.layer_with(layer, ["norm1", "norm2"], attention, mlp)
    });
    bert::encoder(fields, &common, decoder, Some(2), "emb_ln")
}
