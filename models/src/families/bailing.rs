//! Ling and Ring V2: the layers of Llama with packed projections, norms of query and key heads, RoPE on a part of each head, and from
//! some layer on the experts of DeepSeek V3. A layer behind the last one predicts a further token.

use super::sizes::{self, MAX_LAYERS, MAX_WIDTH};
use super::{Common, Decoder, Family, Fields, Layer, LoadError, Mixer, Packing, RopeDefaults, Routing, Spec, deepseek};
use super::{Scores, experts};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["BailingMoeV2ForCausalLM"],
    model_types: &["bailing_moe_v2"],
    declare: |fields, max_positions| {
        let (common, layer) = layers(fields, max_positions)?;
        Ok(common.decoder(layer))
    },
    predict: |fields, max_positions| {
        let (common, layer) = layers(fields, max_positions)?;
        let predictor = deepseek::predictor_normed(fields, &common, layer, "final_layernorm")?;
        Ok(predictor.map(Decoder::continuing_normed))
    },
    largest: "inclusionAI/Ring-1T",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    rope: Some(RopeDefaults { partial: ("partial_rotary_factor", 0.5), ..RopeDefaults::theta(600_000.0) }),
    tokens: "word_embeddings",
    ..Spec::LLAMA
};

/// What builds a layer, given its number.
fn layers(fields: &Fields<'_>, max_positions: usize) -> Result<(Common, impl Fn(usize) -> Layer), LoadError> {
    let dims = fields.get("rotary_dim").map(|_| ("rotary_dim", 0));
    let rope = SPEC.rope.map(|rope| RopeDefaults { dims, ..rope });
    let common = Common::read(fields, max_positions, Spec { rope, ..SPEC })?;
    let flag = |key: &str, default: bool| Ok::<_, LoadError>(fields.boolean(key)?.unwrap_or(default));
    let (qkv_bias, bias) = (flag("use_qkv_bias", false)?, flag("use_bias", false)?);
    let head_norms = flag("use_qk_norm", true)?;
    if !flag("use_rmsnorm", true)? {
        return Err(fields.wrong("use_rmsnorm", "true"));
    }
    // Ling 2.5 and later have other layers under the same name.
    if fields.get("kv_lora_rank").is_some() {
        return Err(fields.wrong("kv_lora_rank", "null: latent and linear attention are not supported in this family"));
    }
    if fields.string("score_function")?.is_some_and(|name| name != "sigmoid") {
        return Err(fields.wrong("score_function", "\"sigmoid\""));
    }
    let (count, top_k) = experts::counts(fields, ["num_experts", "num_experts_per_tok"])?;
    let has_bias = flag("moe_router_enable_expert_bias", true)?;
    let routing = Routing {
        choice_bias: has_bias.then(|| ("gate.expert_bias".to_string(), vec![count])),
        groups: deepseek::groups(fields, count, top_k, [8, 4], true)?,
        renormalise: flag("norm_topk_prob", true)?,
        scale: sizes::positive(fields, "routed_scaling_factor")?.unwrap_or(2.5) as f32,
        ..experts::routing(Scores::Sigmoid, top_k)
    };
    let first_sparse = fields.integer("first_k_dense_replace", 0..=MAX_LAYERS)?.unwrap_or(1) as usize;
    let width = sizes::required(fields, "moe_intermediate_size", MAX_WIDTH)?;
    let shared = fields.integer("num_shared_experts", 0..=64)?.unwrap_or(1) as usize;
    let stated = sizes::optional(fields, "moe_shared_expert_intermediate_size", MAX_WIDTH)?;
    let parts = common.clone();
    let layer = move |layer| {
        let module = parts.at(layer, "attention");
        let mut attention = parts.attention_of(module, Packing::Rows("query_key_value"), "dense");
        attention = attention.biased(qkv_bias, bias);
        if head_norms {
            attention = attention.head_normed(&parts, ["query_layernorm", "key_layernorm"]);
        }
        let mlp = match layer < first_sparse {
            true => Mixer::Mlp(parts.mlp(layer)),
            false => {
                let shared = shared * stated.unwrap_or(width);
                Mixer::Experts(deepseek::mixture(&parts, layer, &routing, count, width, shared))
            }
        };
        parts.layer(layer, attention, mlp)
    };
    Ok((common, layer))
}
