//! GLM-4, GLM-4.5 and GLM-4.7-Flash.
//!
//! RoPE rotates half of each head, interleaved in GLM-4. GLM-4-0414 also norms the output of each branch; its
//! `post_attention_layernorm` is the norm of the feed-forward network's input. GLM-4.5 has the router and the
//! predictor of DeepSeek V3, GLM-4.7-Flash its latent attention too.

use super::deepseek::{self, Generation};
use super::sizes::{self, MAX_LAYERS, MAX_WIDTH};
use super::{Common, Decoder, Family, Fields, Layer, LoadError, Mixer, Packing, RopeDefaults, Spec};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["GlmForCausalLM"],
        model_types: &["glm"],
        declare: |fields, max_positions| declare(fields, max_positions, false),
        largest: "zai-org/glm-4-9b-chat-hf",
        ..Family::BASE
    },
    Family {
        architectures: &["Glm4ForCausalLM"],
        model_types: &["glm4"],
        declare: |fields, max_positions| declare(fields, max_positions, true),
        largest: "zai-org/GLM-4-32B-0414",
        ..Family::BASE
    },
    Family {
        architectures: &["Glm4MoeForCausalLM"],
        model_types: &["glm4_moe"],
        declare: |fields, max_positions| {
            let (common, layer) = layers_moe(fields, max_positions)?;
            Ok(common.decoder(layer))
        },
        predict: |fields, max_positions| {
            let (common, layer) = layers_moe(fields, max_positions)?;
            deepseek::predictor(fields, &common, layer)
        },
        largest: "zai-org/GLM-4.5 (355B)",
        ..Family::BASE
    },
    Family {
        architectures: &["Glm4MoeLiteForCausalLM"],
        model_types: &["glm4_moe_lite"],
        declare: |fields, max_positions| {
            let (common, layer) = deepseek::layers(fields, max_positions, LITE)?;
            Ok(common.decoder(layer))
        },
        predict: |fields, max_positions| {
            let (common, layer) = deepseek::layers(fields, max_positions, LITE)?;
            deepseek::predictor(fields, &common, layer)
        },
        largest: "zai-org/GLM-4.7-Flash (31B)",
        ..Family::BASE
    },
];

const LITE: Generation =
    Generation { eps: 1e-5, first_sparse: 1, shared: 1, routing: |fields| deepseek::routing_v3(fields, [1, 1]) };

const HALF: RopeDefaults = RopeDefaults { partial: ("partial_rotary_factor", 0.5), ..RopeDefaults::LLAMA };

const GLM4: Spec = Spec {
    sizes: &[("num_key_value_heads", 2), ("head_dim", 128)],
    eps: ("rms_norm_eps", 1.562_5e-7),
    rope: Some(RopeDefaults { interleaved: true, ..HALF }),
    ..Spec::LLAMA
};

fn declare(fields: &Fields<'_>, max_positions: usize, norms_after: bool) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, GLM4)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    Ok(common.decoder(|layer| {
        let packing = Packing::Separate(["q_proj", "k_proj", "v_proj"]);
        let attention = common.attention_of(common.at(layer, "self_attn"), packing, "o_proj").biased(bias, false);
        let mlp = common.gated_rows(common.at(layer, "mlp"), ["gate_up_proj", "down_proj"], common.intermediate_size);
        let mut declared = common.layer(layer, attention, mlp);
        if norms_after {
            for (branch, name) in declared.branches.iter_mut().zip(["post_self_attn_layernorm", "post_mlp_layernorm"]) {
                branch.norm_after = Some(common.norm(common.at(layer, name)));
            }
        }
        declared
    }))
}

/// What builds a layer of GLM-4.5, given its number.
fn layers_moe(fields: &Fields<'_>, max_positions: usize) -> Result<(Common, impl Fn(usize) -> Layer), LoadError> {
    let spec = Spec { eps: ("rms_norm_eps", 1e-5), rope: Some(HALF), ..Spec::LLAMA };
    let common = Common::read(fields, max_positions, spec)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let head_norms = fields.boolean("use_qk_norm")?.unwrap_or(false);
    let first_sparse = fields.integer("first_k_dense_replace", 0..=MAX_LAYERS)?.unwrap_or(1) as usize;
    let width = sizes::required(fields, "moe_intermediate_size", MAX_WIDTH)?;
    let (count, routing) = deepseek::routing_v3(fields, [1, 1])?;
    let shared = width * fields.integer("n_shared_experts", 0..=64)?.unwrap_or(1) as usize;
    let parts = common.clone();
    let layer = move |layer| {
        let mut attention = parts.attention(layer).biased(bias, false);
        if head_norms {
            attention = attention.head_normed(&parts, ["q_norm", "k_norm"]);
        }
        let mlp = match layer < first_sparse {
            true => Mixer::Mlp(parts.mlp(layer)),
            false => Mixer::Experts(deepseek::mixture(&parts, layer, &routing, count, width, shared)),
        };
        parts.layer(layer, attention, mlp)
    };
    Ok((common, layer))
}
