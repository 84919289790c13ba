//! Qwen3-Next and Qwen3.5: gated delta nets, and gated attention in each fourth layer.
//!
//! Attention has norms of query and key heads and a rotary embedding on a quarter of each head. All norms but those within
//! recurrent layers store their weights less 1. A layer of attention predicts a further token. Qwen3-Next packs the projections of recurrent layers by key head; Qwen3.5 has a
//! tensor for each, and its mixtures have one tensor for all experts.

use super::experts;
use super::qwen;
use super::sizes::{self, MAX_HEAD_DIM, MAX_HEADS, MAX_KERNEL, MAX_LAYERS};
use super::{
    Activation, Attention, Common, Decoder, Family, Fields, LoadError, Mixer, Packing, Part, Pick, Role, RopeDefaults,
    Spec,
};
use crate::decoder::{Branch, Layer, Linear, Norm, Recurrent, Rule};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["Qwen3NextForCausalLM"],
        model_types: &["qwen3_next"],
        declare: |fields, max_positions| declare(fields, max_positions, Generation::Next),
        predict: |fields, max_positions| predict(fields, max_positions, Generation::Next),
        reference: &["qwen3-next"],
        largest: "Qwen/Qwen3-Next-80B-A3B-Instruct",
        ..Family::BASE
    },
    Family {
        architectures: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
        model_types: &["qwen3_5_text", "qwen3_5"],
        declare: |fields, max_positions| declare(fields, max_positions, Generation::Dense),
        predict: |fields, max_positions| predict(fields, max_positions, Generation::Dense),
        largest: "Qwen/Qwen3.5-27B",
        ..Family::BASE
    },
    Family {
        architectures: &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
        model_types: &["qwen3_5_moe_text", "qwen3_5_moe"],
        declare: |fields, max_positions| declare(fields, max_positions, Generation::Mixture),
        predict: |fields, max_positions| predict(fields, max_positions, Generation::Mixture),
        largest: "Qwen/Qwen3.5-397B-A17B",
        ..Family::BASE
    },
];

/// What differs between the families.
#[derive(Clone, Copy, PartialEq)]
enum Generation {
    /// Packed projections, experts with separate tensors.
    Next,
    /// Separate projections, a feed-forward network.
    Dense,
    /// Separate projections, experts in each layer, in common tensors.
    Mixture,
}

fn common(fields: &Fields<'_>, max_positions: usize, generation: Generation) -> Result<Common, LoadError> {
    let sizes = match generation {
        Generation::Dense => &[("head_dim", 256), ("num_key_value_heads", 4)][..],
        // All layers of a mixture may be sparse, so `intermediate_size` may be absent.
        _ => &[("head_dim", 256), ("num_key_value_heads", 2), ("intermediate_size", 0)],
    };
    let rope = RopeDefaults { partial: ("partial_rotary_factor", 0.25), ..RopeDefaults::LLAMA };
    let spec = Spec { sizes, norm_plus_one: true, rope: Some(rope), ..Spec::LLAMA };
    Common::read(fields, max_positions, spec)
}

fn declare(fields: &Fields<'_>, max_positions: usize, generation: Generation) -> Result<Decoder, LoadError> {
    let common = common(fields, max_positions, generation)?;
    if common.activation != Activation::Silu {
        return Err(fields.wrong("hidden_act", "\"silu\", which the convolutions of recurrent layers compute"));
    }
    if fields.boolean("attn_output_gate")? == Some(false) {
        return Err(fields.wrong("attn_output_gate", "true"));
    }
    let recurrent = Sizes::read(fields)?;
    let is_recurrent = recurrent_layers(fields, common.num_layers)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let sparse = match generation {
        Generation::Next => qwen::sparse_layers(fields, &common)?,
        _ => vec![generation == Generation::Mixture; common.num_layers],
    };
    let build = Build { fields, common: &common, recurrent: &recurrent, bias, generation };
    common.try_decoder(|layer| build.layer(layer, is_recurrent[layer], sparse[layer]))
}

/// The predictor: an attention layer, under names of its own.
fn predict(fields: &Fields<'_>, max_positions: usize, generation: Generation) -> Result<Option<Decoder>, LoadError> {
    for key in ["num_nextn_predict_layers", "mtp_num_hidden_layers"] {
        if fields.integer(key, 0..=MAX_LAYERS)? == Some(0) {
            return Ok(None);
        }
    }
    let common = common(fields, max_positions, generation)?;
    let recurrent = Sizes::read(fields)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let own = Common { spec: Spec { root: "mtp", ..common.spec }, ..common.clone() };
    let build = Build { fields, common: &own, recurrent: &recurrent, bias, generation };
    let layer = build.layer(0, false, generation != Generation::Dense)?;
    let modules = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"].map(|name| format!("mtp.{name}"));
    Ok(Some(common.predictor(layer, modules).continuing_normed()))
}

/// What a layer is built from.
struct Build<'a> {
    fields: &'a Fields<'a>,
    common: &'a Common,
    recurrent: &'a Sizes,
    bias: bool,
    generation: Generation,
}

impl Build<'_> {
    fn layer(&self, layer: usize, is_recurrent: bool, is_sparse: bool) -> Result<Layer, LoadError> {
        let &Build { fields, common, recurrent, bias, generation } = self;
        let mixer = if is_recurrent {
            Mixer::Recurrent(recurrent.layer(common, layer, generation))
        } else {
            let packing = Packing::Gated(["q_proj", "k_proj", "v_proj"]);
            let module = common.at(layer, "self_attn");
            let attention = common.attention_of(module, packing, "o_proj").biased(bias, bias);
            Mixer::Attention(Attention { gate: true, ..attention.head_normed(common, ["q_norm", "k_norm"]) })
        };
        let mlp = if is_sparse {
            let mut mixture = qwen::mixture(fields, common, layer, Some(512))?;
            mixture.routing.renormalise = true;
            if generation == Generation::Mixture {
                let names = ["gate_up_proj", "down_proj"].map(|name| common.at(layer, &format!("mlp.experts.{name}")));
                mixture.experts = experts::stacked(mixture.experts, names, false);
            } else {
                mixture.routing.renormalise = fields.boolean("norm_topk_prob")?.unwrap_or(true);
            }
            Mixer::Experts(mixture)
        } else {
            Mixer::Mlp(common.mlp(layer))
        };
        let branch = |name: &str, mixer: Mixer| Branch::new(common.norm(common.at(layer, name)), mixer);
        let branches = vec![branch("input_layernorm", mixer), branch("post_attention_layernorm", mlp)];
        Ok(Layer::new(branches))
    }
}

/// Whether each layer is recurrent: according to `layer_types`, or all but each `full_attention_interval`-th.
fn recurrent_layers(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    let types = [("full_attention", false), ("linear_attention", true)];
    let stated = sizes::kinds(fields, "layer_types", num_layers, &types)?;
    let interval = sizes::optional(fields, "full_attention_interval", MAX_LAYERS)?.unwrap_or(4);
    Ok(stated.unwrap_or_else(|| (0..num_layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect()))
}

/// Sizes of the recurrent layers.
struct Sizes {
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    kernel: usize,
}

impl Sizes {
    fn read(fields: &Fields<'_>) -> Result<Sizes, LoadError> {
        let size = |key: &str, greatest: u64, default: usize| {
            Ok::<_, LoadError>(sizes::optional(fields, key, greatest)?.unwrap_or(default))
        };
        let key_heads = size("linear_num_key_heads", MAX_HEADS, 16)?;
        let value_heads = size("linear_num_value_heads", MAX_HEADS, 32)?;
        if !value_heads.is_multiple_of(key_heads) {
            let expected = format!("a multiple of `linear_num_key_heads`, {key_heads}");
            return Err(fields.wrong("linear_num_value_heads", expected));
        }
        Ok(Sizes {
            key_heads,
            value_heads,
            key_dim: size("linear_key_head_dim", MAX_HEAD_DIM, 128)?,
            value_dim: size("linear_value_head_dim", MAX_HEAD_DIM, 128)?,
            kernel: size("linear_conv_kernel_dim", MAX_KERNEL, 4)?,
        })
    }

    fn layer(&self, common: &Common, layer: usize, generation: Generation) -> Recurrent {
        let &Sizes { key_heads, value_heads, key_dim, value_dim, kernel } = self;
        let at = |name: &str| common.at(layer, &format!("linear_attn.{name}"));
        let (keys, values) = (key_heads * key_dim, value_heads * value_dim);
        let parts = if generation == Generation::Next {
            // For each key head the rows of q, k, v, z, and in the other tensor those of b and a. GGUF files have the first as Qwen3.5.
            let (per_head, heads) = (values / key_heads, value_heads / key_heads);
            let group = 2 * key_dim + 2 * per_head;
            let wide = |rows: usize, first: usize, run: usize, (own, total, before): (&str, usize, usize)| Part {
                own: Some((at(own), Pick::rows(total, before, rows))),
                ..Part::picked(at("in_proj_qkvz"), rows, Pick::runs(2 * (keys + values), first, run, group))
            };
            let joint = |before: usize| ("in_proj_qkv", 2 * keys + values, before);
            let narrow = |first: usize| {
                Part::picked(at("in_proj_ba"), value_heads, Pick::runs(2 * value_heads, first, heads, 2 * heads))
            };
            vec![
                wide(keys, 0, key_dim, joint(0)),
                wide(keys, key_dim, key_dim, joint(keys)),
                wide(values, 2 * key_dim, per_head, joint(2 * keys)),
                wide(values, 2 * key_dim + per_head, per_head, ("in_proj_z", values, 0)),
                narrow(0),
                narrow(heads),
            ]
        } else {
            let part = |name: &str, rows: usize| Part::new(at(name), rows);
            vec![
                part("in_proj_qkv", 2 * keys + values),
                part("in_proj_z", values),
                part("in_proj_b", value_heads),
                part("in_proj_a", value_heads),
            ]
        };
        let output = Part::new(at("out_proj"), common.hidden_size);
        Recurrent {
            rule: Rule::GatedDelta { a_log: at("A_log"), dt_bias: at("dt_bias") },
            shard: None,
            projections: Linear::new(common.hidden_size, Role::Column, parts),
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            kernel,
            conv: vec![at("conv1d.weight")],
            conv_bias: None,
            norm: Some(Norm { plus_one: false, ..common.norm_of(at("norm"), value_dim) }),
            output: Linear::new(values, Role::Row, [output]),
        }
    }
}
