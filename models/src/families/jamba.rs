//! Jamba: Mamba-1 with norms of steps, B and C, attention without positions in some layers, and experts in some.

use super::experts;
use super::sizes::{self, MAX_HEAD_DIM, MAX_KERNEL, MAX_LAYERS, MAX_WIDTH};
use super::{Activation, Common, Decoder, Family, Fields, LoadError, Mixer, Part, Pick, Role, Scores, Spec};
use crate::decoder::{Linear, Recurrent, Rule, Selective};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["JambaForCausalLM"],
    model_types: &["jamba"],
    positions: (&["max_position_embeddings"], Some(262_144)),
    declare,
    reference: &["jamba"],
    largest: "ai21labs/AI21-Jamba-Large-1.7 (398B)",
    ..Family::BASE
}];

const SPEC: Spec =
    Spec { sizes: &[("num_key_value_heads", 8)], final_norm: "final_layernorm", rope: None, ..Spec::LLAMA };

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    if common.activation != Activation::Silu {
        return Err(fields.wrong("hidden_act", "\"silu\", which the convolutions compute"));
    }
    if fields.boolean("mamba_inner_layernorms")? == Some(false) {
        return Err(fields.wrong("mamba_inner_layernorms", "true"));
    }
    if fields.get("sliding_window").is_some() {
        return Err(fields.wrong("sliding_window", "null"));
    }
    // Other engines read these.
    for key in ["num_logits_to_keep", "use_mamba_kernels"] {
        fields.get(key);
    }
    let layers = common.num_layers;
    let has_attention = every(fields, ["attn_layer_period", "attn_layer_offset"], [8, 4], layers)?;
    sizes::check_attention(fields, "attn_layer_period", has_attention.contains(&true))?;
    let is_sparse = every(fields, ["expert_layer_period", "expert_layer_offset"], [2, 1], layers)?;
    let (count, top_k) = experts::counts(fields, ["num_experts", "num_experts_per_tok"])?;
    let state_space = Sizes::read(fields, &common)?;
    Ok(common.decoder(|layer| {
        let mixer = match has_attention[layer] {
            true => Mixer::Attention(common.attention(layer)),
            false => Mixer::Recurrent(state_space.layer(&common, layer)),
        };
        let (module, names) = (common.at(layer, "feed_forward"), ["gate_proj", "up_proj", "down_proj"]);
        // One expert is a network without a router.
        let network = match count > 1 && is_sparse[layer] {
            true => {
                let networks = experts::separate(&common, &module, count, names, common.intermediate_size);
                let routing = experts::routing(Scores::Softmax, top_k);
                Mixer::Experts(experts::mixture(&common, format!("{module}.router"), routing, networks, None))
            }
            false => Mixer::Mlp(common.gated(module, names, common.intermediate_size)),
        };
        common.layer_with(layer, ["input_layernorm", "pre_ff_layernorm"], mixer, network)
    }))
}

/// Whether each layer is one of those with `offset` among each `period` layers, under these keys and with these defaults.
fn every(
    fields: &Fields<'_>,
    [period, offset]: [&str; 2],
    default: [usize; 2],
    num_layers: usize,
) -> Result<Vec<bool>, LoadError> {
    let each = sizes::optional(fields, period, MAX_LAYERS)?.unwrap_or(default[0]);
    let first = fields.integer(offset, 0..=MAX_LAYERS)?.map_or(default[1], |first| first as usize);
    match first < each {
        true => Ok((0..num_layers).map(|layer| layer % each == first).collect()),
        false => Err(fields.wrong(offset, format!("less than `{period}`, {each}"))),
    }
}

/// Sizes of Mamba-1 layers.
struct Sizes {
    width: usize,
    state: usize,
    rank: usize,
    kernel: usize,
    conv_bias: bool,
    proj_bias: bool,
}

impl Sizes {
    fn read(fields: &Fields<'_>, common: &Common) -> Result<Sizes, LoadError> {
        let width = sizes::optional(fields, "mamba_expand", MAX_WIDTH)?.unwrap_or(2) * common.hidden_size;
        if width > MAX_WIDTH as usize {
            return Err(fields.wrong("mamba_expand", format!("an inner width of at most {MAX_WIDTH}")));
        }
        let rank = match fields.get("mamba_dt_rank") {
            Some(value) if value == "auto" => None,
            _ => sizes::optional(fields, "mamba_dt_rank", MAX_WIDTH)?,
        };
        Ok(Sizes {
            width,
            state: sizes::optional(fields, "mamba_d_state", MAX_HEAD_DIM)?.unwrap_or(16),
            rank: rank.unwrap_or(common.hidden_size.div_ceil(16)),
            kernel: sizes::optional(fields, "mamba_d_conv", MAX_KERNEL)?.unwrap_or(4),
            conv_bias: fields.boolean("mamba_conv_bias")?.unwrap_or(true),
            proj_bias: fields.boolean("mamba_proj_bias")?.unwrap_or(false),
        })
    }

    fn layer(&self, common: &Common, layer: usize) -> Recurrent {
        let &Sizes { width, state, rank, kernel, conv_bias, proj_bias } = self;
        let at = |name: &str| common.at(layer, &format!("mamba.{name}"));
        let hidden = common.hidden_size;
        // The rows of `x_proj` are those of the steps, of B and of C.
        let inner =
            |inputs: usize, part: Part| Linear { adapters: false, ..Linear::new(inputs, Role::Replicated, [part]) };
        let total = rank + 2 * state;
        let picked = |first: usize, rows: usize| Part::picked(at("x_proj"), rows, Pick::rows(total, first, rows));
        let norm = |name: &str, width: usize| common.norm_of(at(name), width);
        let rule = Selective {
            low: inner(width, picked(0, rank)),
            low_norm: norm("dt_layernorm", rank),
            step: Linear { bias: true, ..inner(rank, Part::new(at("dt_proj"), width)) },
            keys: inner(width, picked(rank, 2 * state)),
            key_norms: [norm("b_layernorm", state), norm("c_layernorm", state)],
            a_log: at("A_log"),
            skip: at("D"),
        };
        let value_dim = sizes::channels_of_a_task(width, 64);
        let output = Part::new(at("out_proj"), hidden);
        Recurrent {
            rule: Rule::Selective(Box::new(rule)),
            projections: Linear {
                bias: proj_bias,
                ..Linear::new(hidden, Role::Column, [Part::new(at("in_proj"), 2 * width)])
            },
            key_heads: 1,
            value_heads: width / value_dim,
            shard: None,
            key_dim: state,
            value_dim,
            kernel,
            conv: vec![at("conv1d.weight")],
            conv_bias: conv_bias.then(|| at("conv1d.bias")),
            norm: None,
            output: Linear { bias: proj_bias, ..Linear::new(width, Role::Row, [output]) },
        }
    }
}
