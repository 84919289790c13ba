//! Kimi-Linear: delta nets with a decay of each channel in most layers, latent attention without positions in the others, and the experts
//! of DeepSeek V3 under other names.

use super::deepseek::{self, LatentSizes};
use super::experts;
use super::sizes::{
    self, MAX_EXPERTS, MAX_GROUPS, MAX_HEAD_DIM, MAX_HEADS, MAX_KERNEL, MAX_LAYERS, MAX_WIDTH, positive,
};
use super::{Activation, Common, Decoder, Family, Fields, LoadError, Mixer, Mlp, Part, Role, RopeScaling, Routing};
use super::{Scores, Spec};
use crate::decoder::{ChannelDelta, Groups, Linear, Recurrent, Rule};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["KimiLinearForCausalLM"],
    model_types: &["kimi_linear"],
    positions: (&["max_position_embeddings", "model_max_length"], Some(4096)),
    declare,
    largest: "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    ..Family::BASE
}];

const LAYERS: &str = "linear_attn_config";

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let mut common = Common::read(fields, max_positions, Spec { rope: None, ..Spec::LLAMA })?;
    if common.activation != Activation::Silu {
        return Err(fields.wrong("hidden_act", "\"silu\", which the convolutions compute"));
    }
    if fields.boolean("mla_use_nope")? != Some(true) {
        return Err(
            fields.wrong("mla_use_nope", "true: latent attention with positions is not supported in this family")
        );
    }
    if fields.boolean("mla_use_output_gate")? == Some(true) {
        return Err(fields.wrong("mla_use_output_gate", "false"));
    }
    for key in ["attn_res_block_size", "routed_expert_hidden_size", "activation_situ_beta"] {
        if fields.get(key).is_some() {
            return Err(fields.wrong(key, "null"));
        }
    }
    let latents = LatentSizes::read(fields, &mut common, max_positions, false, None)?;
    if let Some(rope) = &mut common.rope {
        // What other models rotate is the same for all positions.
        rope.scaling = RopeScaling::Proportional { pairs: 0, factor: 1.0 };
    }
    let (is_delta, sizes) = Sizes::read(fields, common.num_layers)?;
    sizes::check_attention(fields, LAYERS, is_delta.contains(&false))?;
    let mixture = match fields.get("num_experts").is_some() {
        true => Some(Mixture::read(fields)?),
        false => None,
    };
    Ok(common.decoder(|layer| {
        let mixer = match is_delta[layer] {
            true => Mixer::Recurrent(sizes.layer(&common, layer)),
            false => Mixer::Attention(deepseek::latent(&common, layer, &latents)),
        };
        let network = match &mixture {
            Some(mixture) if mixture.is_sparse(layer) => mixture.layer(&common, layer),
            _ => Mixer::Mlp(common.mlp(layer)),
        };
        common.layer(layer, mixer, network)
    }))
}

/// Sizes of the delta nets.
struct Sizes {
    heads: usize,
    dim: usize,
    kernel: usize,
}

impl Sizes {
    /// Which layers are delta nets, and their sizes. The lists of layers count from 1.
    fn read(fields: &Fields<'_>, layers: usize) -> Result<(Vec<bool>, Sizes), LoadError> {
        let inner = fields.object(LAYERS)?.ok_or_else(|| fields.wrong(LAYERS, "an object"))?;
        let listed = |key: &str| {
            inner.read(key, &format!("a list of numbers of layers, 1 to {layers}"), |value| {
                let number = |value: &serde_json::Value| value.as_u64().filter(|n| (1..=layers as u64).contains(n));
                value.as_array()?.iter().map(number).collect::<Option<Vec<u64>>>()
            })
        };
        let (delta, full) =
            (listed("kda_layers")?.unwrap_or_default(), listed("full_attn_layers")?.unwrap_or_default());
        let is_delta: Vec<bool> = (1..=layers as u64).map(|layer| delta.contains(&layer)).collect();
        if (1..=layers as u64).any(|layer| delta.contains(&layer) == full.contains(&layer)) {
            return Err(inner.wrong("kda_layers", "the layers that `full_attn_layers` does not list"));
        }
        if inner.get("gate_lower_bound").is_some() {
            return Err(inner.wrong("gate_lower_bound", "null"));
        }
        let heads = sizes::required(&inner, "num_heads", MAX_HEADS)?;
        let dim = sizes::required(&inner, "head_dim", MAX_HEAD_DIM)?;
        let kernel = sizes::optional(&inner, "short_conv_kernel_size", MAX_KERNEL)?.unwrap_or(4);
        Ok((is_delta, Sizes { heads, dim, kernel }))
    }

    fn layer(&self, common: &Common, layer: usize) -> Recurrent {
        let &Sizes { heads, dim, kernel } = self;
        let at = |name: &str| common.at(layer, &format!("self_attn.{name}"));
        let (width, hidden) = (heads * dim, common.hidden_size);
        let part = |name: &str, rows: usize| Part::new(at(name), rows);
        let inner =
            |inputs: usize, role: Role, part: Part| Linear { adapters: false, ..Linear::new(inputs, role, [part]) };
        let narrow = |low: &str, wide: &str| {
            [inner(hidden, Role::Replicated, part(low, dim)), inner(dim, Role::Column, part(wide, width))]
        };
        let rule = ChannelDelta {
            decay: narrow("f_a_proj", "f_b_proj"),
            gate: narrow("g_a_proj", "g_b_proj"),
            a_log: at("A_log"),
            dt_bias: at("dt_bias"),
        };
        let projections = [part("q_proj", width), part("k_proj", width), part("v_proj", width), part("b_proj", heads)];
        Recurrent {
            rule: Rule::ChannelDelta(Box::new(rule)),
            projections: Linear::new(hidden, Role::Column, projections),
            key_heads: heads,
            value_heads: heads,
            shard: None,
            key_dim: dim,
            value_dim: dim,
            kernel,
            conv: ["q", "k", "v"].map(|name| at(&format!("{name}_conv1d.weight"))).to_vec(),
            conv_bias: None,
            norm: Some(common.norm_of(at("o_norm"), dim)),
            output: Linear::new(width, Role::Row, [part("o_proj", hidden)]),
        }
    }
}

/// Experts of all layers but the first ones.
struct Mixture {
    first: usize,
    step: usize,
    count: usize,
    width: usize,
    /// Width of the network that computes every row; 0 if there is none.
    shared: usize,
    routing: Routing,
}

impl Mixture {
    fn read(fields: &Fields<'_>) -> Result<Mixture, LoadError> {
        let (count, top_k) = experts::counts(fields, ["num_experts", "num_experts_per_token"])?;
        if fields.string("moe_router_activation_func")?.is_some_and(|name| name != "sigmoid") {
            return Err(fields.wrong("moe_router_activation_func", "\"sigmoid\""));
        }
        let width = sizes::required(fields, "moe_intermediate_size", MAX_WIDTH)?;
        let routing = Routing {
            choice_bias: Some(("gate.e_score_correction_bias".to_string(), vec![count])),
            groups: groups(fields, count, top_k)?,
            renormalise: fields.boolean("moe_renormalize")?.unwrap_or(true),
            scale: positive(fields, "routed_scaling_factor")?.unwrap_or(1.0) as f32,
            ..experts::routing(Scores::Sigmoid, top_k)
        };
        Ok(Mixture {
            first: fields.integer("first_k_dense_replace", 0..=MAX_LAYERS)?.unwrap_or(0) as usize,
            step: sizes::optional(fields, "moe_layer_freq", MAX_LAYERS)?.unwrap_or(1),
            count,
            width,
            shared: width * fields.integer("num_shared_experts", 0..=64)?.unwrap_or(0) as usize,
            routing,
        })
    }

    fn is_sparse(&self, layer: usize) -> bool {
        layer >= self.first && layer.is_multiple_of(self.step)
    }

    fn layer(&self, common: &Common, layer: usize) -> Mixer {
        let module = common.at(layer, "block_sparse_moe");
        let networks = experts::separate(common, &module, self.count, ["w1", "w3", "w2"], self.width);
        let routing = self.routing.of_module(&module);
        let mut mixture = experts::mixture(common, format!("{module}.gate"), routing, networks, None);
        let names = ["gate_proj", "up_proj", "down_proj"];
        let shared = |width: usize| -> Mlp { common.gated(format!("{module}.shared_experts"), names, width) };
        mixture.shared = Some(self.shared).filter(|width| *width > 0).map(shared);
        Mixer::Experts(mixture)
    }
}

/// The groups of experts, of which each is ranked by its two best; `None` for one group.
fn groups(fields: &Fields<'_>, count: usize, top_k: usize) -> Result<Option<Groups>, LoadError> {
    let groups = sizes::optional(fields, "num_expert_group", MAX_GROUPS)?.unwrap_or(1);
    let top = sizes::optional(fields, "topk_group", MAX_EXPERTS)?.unwrap_or(1);
    // A flag of other engines: with one group it is of no effect.
    if fields.boolean("use_grouped_topk")? == Some(false) && groups > 1 {
        return Err(fields.wrong("use_grouped_topk", "true, if there are groups"));
    }
    deepseek::checked_groups(fields, "num_expert_group", (count, top_k), (groups, top), true)
}
