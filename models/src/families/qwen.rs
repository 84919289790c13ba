//! Qwen2, Qwen2.5 and Qwen3, their mixtures of experts, the text parts of their multimodal models, and MiMo-7B.
//!
//! The layers of Llama. Qwen2 has biases of queries, keys and values, Qwen3 RMS norms of query and key heads before the rotary
//! embedding. If `use_sliding_window` is set, the layers from `max_window_layers` on have a sliding window. In the mixtures, a
//! layer has experts unless `mlp_only_layers` lists it or `decoder_sparse_step` skips it; Qwen2's have a shared expert behind a
//! gate.

use super::experts::{self, Shared};
use super::sizes::{self, MAX_LAYERS, MAX_WIDTH};
use super::{Attention, Common, Decoder, Family, Fields, LoadError, Mixer, Routing, Scores, Spec, Windows};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &[
            "Qwen2ForCausalLM",
            "MiMoForCausalLM",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
        ],
        model_types: &["qwen2", "mimo", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"],
        declare: |fields, max_positions| declare(fields, max_positions, Spec::LLAMA, qwen2, None),
        reference: &["qwen2"],
        largest: "Qwen/Qwen2.5-72B",
        ..Family::BASE
    },
    Family {
        architectures: &["Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"],
        model_types: &["qwen3", "qwen3_vl", "qwen3_vl_text"],
        declare: |fields, max_positions| declare(fields, max_positions, QWEN3, qwen3, None),
        reference: &["qwen3"],
        largest: "Qwen/Qwen3-32B",
        ..Family::BASE
    },
    Family {
        architectures: &["Qwen3VLMoeForConditionalGeneration"],
        model_types: &["qwen3_vl_moe", "qwen3_vl_moe_text"],
        declare: declare_vl_moe,
        largest: "Qwen/Qwen3-VL-235B-A22B-Instruct",
        ..Family::BASE
    },
    Family {
        architectures: &["Qwen2MoeForCausalLM"],
        model_types: &["qwen2_moe"],
        declare: |fields, max_positions| declare(fields, max_positions, Spec::LLAMA, qwen2, Some(Some(5632))),
        reference: &["qwen2-moe"],
        largest: "Qwen/Qwen2-57B-A14B",
        ..Family::BASE
    },
    Family {
        architectures: &["Qwen3MoeForCausalLM"],
        model_types: &["qwen3_moe"],
        declare: |fields, max_positions| declare(fields, max_positions, QWEN3, qwen3, Some(None)),
        reference: &["qwen3-moe"],
        largest: "Qwen/Qwen3-235B-A22B",
        ..Family::BASE
    },
];

const QWEN3: Spec = Spec { sizes: &[("head_dim", 128)], ..Spec::LLAMA };

/// The text part of Qwen3-VL's mixtures: Qwen3-MoE, whose experts are in common tensors.
fn declare_vl_moe(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let mut decoder = declare(fields, max_positions, QWEN3, qwen3, Some(None))?;
    for branch in decoder.layers.iter_mut().flat_map(|layer| &mut layer.branches) {
        if let Mixer::Experts(mixture) = &mut branch.mixer {
            mixture.routing.renormalise = fields.boolean("norm_topk_prob")?.unwrap_or(true);
            let module = mixture.router.parts.first().and_then(|router| router.name.strip_suffix(".gate"));
            let names = ["gate_up_proj", "down_proj"].map(|name| format!("{}.experts.{name}", module.unwrap_or("mlp")));
            mixture.experts = experts::stacked(std::mem::take(&mut mixture.experts), names, true);
        }
    }
    Ok(decoder)
}

/// Qwen2's attention.
fn qwen2(common: &Common, fields: &Fields<'_>, layer: usize) -> Result<Attention, LoadError> {
    Ok(common.attention(layer).biased(fields.boolean("qkv_bias")?.unwrap_or(true), false))
}

/// Qwen3's attention.
fn qwen3(common: &Common, fields: &Fields<'_>, layer: usize) -> Result<Attention, LoadError> {
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    Ok(common.attention(layer).biased(bias, bias).head_normed(common, ["q_norm", "k_norm"]))
}

/// `experts`: the `shared` of [`mixture`]; `None` for dense models.
fn declare(
    fields: &Fields<'_>,
    max_positions: usize,
    spec: Spec,
    attention: fn(&Common, &Fields<'_>, usize) -> Result<Attention, LoadError>,
    experts: Option<Option<u64>>,
) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, spec)?;
    let windows = common.windows(fields, Windows::FromLayer)?;
    let sparse = if experts.is_some() { sparse_layers(fields, &common)? } else { Vec::new() };
    common.try_decoder(|layer| {
        let mut attention = attention(&common, fields, layer)?;
        attention.window = windows[layer];
        let mlp = match experts.filter(|_| sparse[layer]) {
            Some(shared) => Mixer::Experts(mixture(fields, &common, layer, shared)?),
            None => Mixer::Mlp(common.mlp(layer)),
        };
        Ok(common.layer(layer, attention, mlp))
    })
}

/// Whether each layer has experts.
pub(super) fn sparse_layers(fields: &Fields<'_>, common: &Common) -> Result<Vec<bool>, LoadError> {
    let step = sizes::optional(fields, "decoder_sparse_step", MAX_LAYERS)?.unwrap_or(1);
    let dense = fields.read("mlp_only_layers", "a list of numbers of layers", |value| {
        value.as_array()?.iter().map(|layer| layer.as_u64()).collect::<Option<Vec<_>>>()
    })?;
    let dense = dense.unwrap_or_default();
    Ok((0..common.num_layers)
        .map(|layer| !dense.contains(&(layer as u64)) && (layer + 1).is_multiple_of(step))
        .collect())
}

/// The experts of a layer of Qwen2-MoE, Qwen3-MoE, Qwen3-Next or Qwen3.5-MoE. `shared`: the width of the shared expert where
/// the configuration does not state it; `None`: the family has none.
pub(super) fn mixture(
    fields: &Fields<'_>,
    common: &Common,
    layer: usize,
    shared: Option<u64>,
) -> Result<crate::decoder::Experts, LoadError> {
    let (count, top_k) = experts::counts(fields, ["num_experts", "num_experts_per_tok"])?;
    let width = sizes::required(fields, "moe_intermediate_size", MAX_WIDTH)?;
    let module = common.at(layer, "mlp");
    let stated = fields.integer("shared_expert_intermediate_size", 0..=MAX_WIDTH)?;
    let shared = match shared.map(|default| stated.unwrap_or(default)) {
        None | Some(0) => None,
        Some(width) => Some(Shared { module: format!("{module}.shared_expert"), width: width as usize, gate: true }),
    };
    let routing = Routing {
        renormalise: fields.boolean("norm_topk_prob")?.unwrap_or(false),
        ..experts::routing(Scores::Softmax, top_k)
    };
    let networks = experts::separate(common, &module, count, ["gate_proj", "up_proj", "down_proj"], width);
    Ok(experts::mixture(common, format!("{module}.gate"), routing, networks, shared))
}
