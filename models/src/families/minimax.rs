//! MiniMax-M2: norms of whole rows of queries and keys, RoPE on a part of each head, and experts in every layer.

use super::experts;
use super::{Common, Decoder, Family, Fields, LoadError, Mixer, RopeDefaults, Routing, Scores, Spec};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["MiniMaxM2ForCausalLM"],
    model_types: &["minimax_m2"],
    declare,
    largest: "MiniMaxAI/MiniMax-M2 (230B)",
    ..Family::BASE
}];

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let dims = fields.get("rotary_dim").map(|_| ("rotary_dim", 0));
    let rope = Some(RopeDefaults { dims, ..RopeDefaults::theta(5_000_000.0) });
    let common = Common::read(fields, max_positions, Spec { rope, ..Spec::LLAMA })?;
    let (count, top_k) = experts::counts(fields, ["num_local_experts", "num_experts_per_tok"])?;
    let norms = fields.boolean("use_qk_norm")?.unwrap_or(true);
    if fields.string("qk_norm_type")?.is_some_and(|name| name != "per_layer") {
        return Err(fields.wrong("qk_norm_type", "\"per_layer\""));
    }
    if fields.string("scoring_func")?.is_some_and(|name| name != "sigmoid") {
        return Err(fields.wrong("scoring_func", "\"sigmoid\""));
    }
    fields.integer("shared_intermediate_size", 0..=0)?;
    // 0 is linear attention.
    fields.read("attn_type_list", "a list of 1: attention in every layer", |value| {
        value.as_array()?.iter().all(|kind| *kind == 1).then_some(())
    })?;
    let bias = fields.boolean("use_routing_bias")?.unwrap_or(true);
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer);
        if norms {
            let norm = |name: &str, width: usize| Some(common.norm_of(format!("{}.{name}", attention.name), width));
            let heads = attention.heads;
            (attention.query_norm, attention.key_norm) =
                (norm("q_norm", heads.query_width()), norm("k_norm", heads.key_width()));
        }
        let module = common.at(layer, "block_sparse_moe");
        let networks = experts::separate(&common, &module, count, ["w1", "w3", "w2"], common.intermediate_size);
        let routing = Routing {
            choice_bias: bias.then(|| (format!("{module}.e_score_correction_bias"), vec![count])),
            renormalise: true,
            ..experts::routing(Scores::Sigmoid, top_k)
        };
        let mixture = experts::mixture(&common, format!("{module}.gate"), routing, networks, None);
        common.layer(layer, attention, Mixer::Experts(mixture))
    }))
}
