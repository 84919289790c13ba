//! LFM2 and its mixtures: short convolutions, and attention with norms of query and key heads in some layers.

use super::experts;
use super::sizes::{self, MAX_KERNEL, MAX_LAYERS, MAX_WIDTH, positive};
use super::{
    Common, Decoder, Family, Fields, LoadError, Mixer, Packing, Part, Pick, Role, RopeDefaults, Routing, Scores, Spec,
};
use crate::decoder::{Linear, Recurrent, Rule};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["Lfm2ForCausalLM"],
        model_types: &["lfm2"],
        positions: POSITIONS,
        declare: |fields, max_positions| declare(fields, max_positions, false),
        largest: "LiquidAI/LFM2-2.6B",
        ..Family::BASE
    },
    Family {
        architectures: &["Lfm2MoeForCausalLM"],
        model_types: &["lfm2_moe"],
        positions: POSITIONS,
        declare: |fields, max_positions| declare(fields, max_positions, true),
        reference: &["lfm2-moe"],
        largest: "LiquidAI/LFM2-24B-A2B",
        ..Family::BASE
    },
];

const POSITIONS: (&[&str], Option<usize>) = (&["max_position_embeddings"], Some(128_000));

const SPEC: Spec = Spec {
    eps: ("norm_eps", 1e-5),
    tied: true,
    final_norm: "embedding_norm",
    rope: Some(RopeDefaults::theta(1_000_000.0)),
    ..Spec::LLAMA
};

/// Names of gate, up and down.
const NETWORK: [&str; 3] = ["w1", "w3", "w2"];

fn declare(fields: &Fields<'_>, max_positions: usize, has_experts: bool) -> Result<Decoder, LoadError> {
    // The first files name these so.
    let width = if fields.get("block_ff_dim").is_some() { "block_ff_dim" } else { "intermediate_size" };
    let theta = if fields.get("theta").is_some() { "theta" } else { "rope_theta" };
    let rope = RopeDefaults { theta: (theta, 1_000_000.0), ..RopeDefaults::LLAMA };
    let mut common = Common::read(fields, max_positions, Spec { intermediate_size: width, rope: Some(rope), ..SPEC })?;
    if let Some(tied) = fields.boolean("tie_embedding")? {
        common.tied = tied;
    }
    check_copies(fields, &common)?;
    let kernel = sizes::optional(fields, "conv_L_cache", MAX_KERNEL)?.unwrap_or(3);
    let bias = fields.boolean("conv_bias")?.unwrap_or(false);
    let mixture = if has_experts { Some(Mixture::read(fields)?) } else { None };
    let has_attention = attention_layers(fields, common.num_layers, has_experts)?;
    if !has_experts {
        common.intermediate_size = adjusted(fields, common.intermediate_size)?;
    }
    Ok(common.decoder(|layer| {
        let mixer = if has_attention[layer] {
            let packing = Packing::Separate(["q_proj", "k_proj", "v_proj"]);
            let attention = common.attention_of(common.at(layer, "self_attn"), packing, "out_proj");
            Mixer::Attention(attention.head_normed(&common, ["q_layernorm", "k_layernorm"]))
        } else {
            Mixer::Recurrent(convolution(&common, layer, kernel, bias))
        };
        let module = common.at(layer, "feed_forward");
        let network = match &mixture {
            Some(mixture) if layer >= mixture.first => mixture.layer(&common, module),
            _ => Mixer::Mlp(common.gated(module, NETWORK, common.intermediate_size)),
        };
        common.layer_with(layer, ["operator_norm", "ffn_norm"], mixer, network)
    }))
}

/// A short convolution. The rows of its projection are b, z and v.
fn convolution(common: &Common, layer: usize, kernel: usize, bias: bool) -> Recurrent {
    let width = common.hidden_size;
    let at = |name: &str| common.at(layer, &format!("conv.{name}"));
    // Few, because ranks have whole ones.
    let value_dim = sizes::channels_of_a_task(width, 32);
    let rows = |first: usize| Part::picked(at("in_proj"), width, Pick::rows(3 * width, first * width, width));
    let output = Part::new(at("out_proj"), width);
    Recurrent {
        rule: Rule::ShortConvolution,
        projections: Linear { bias, ..Linear::new(width, Role::Column, [rows(2), rows(1), rows(0)]) },
        key_heads: width / value_dim,
        value_heads: width / value_dim,
        shard: None,
        key_dim: 0,
        value_dim,
        kernel,
        conv: vec![at("conv.weight")],
        conv_bias: bias.then(|| at("conv.bias")),
        norm: None,
        output: Linear { bias, ..Linear::new(width, Role::Row, [output]) },
    }
}

/// Experts of all layers but the first ones.
struct Mixture {
    first: usize,
    count: usize,
    width: usize,
    routing: Routing,
}

impl Mixture {
    fn read(fields: &Fields<'_>) -> Result<Mixture, LoadError> {
        let (count, top_k) = experts::counts(fields, ["num_experts", "num_experts_per_tok"])?;
        let bias = fields.boolean("use_expert_bias")?.unwrap_or(true);
        Ok(Mixture {
            first: fields.integer("num_dense_layers", 0..=MAX_LAYERS)?.unwrap_or(2) as usize,
            count,
            width: sizes::required(fields, "moe_intermediate_size", MAX_WIDTH)?,
            routing: Routing {
                choice_bias: bias.then(|| ("expert_bias".to_string(), vec![count])),
                renormalise: fields.boolean("norm_topk_prob")?.unwrap_or(true),
                scale: positive(fields, "routed_scaling_factor")?.unwrap_or(1.0) as f32,
                ..experts::routing(Scores::Sigmoid, top_k)
            },
        })
    }

    fn layer(&self, common: &Common, module: String) -> Mixer {
        let networks = experts::separate(common, &module, self.count, NETWORK, self.width);
        let routing = self.routing.of_module(&module);
        Mixer::Experts(experts::mixture(common, format!("{module}.gate"), routing, networks, None))
    }
}

/// Keys of the first files that repeat others.
fn check_copies(fields: &Fields<'_>, common: &Common) -> Result<(), LoadError> {
    let copies = [
        ("block_dim", common.hidden_size),
        ("conv_dim", common.hidden_size),
        ("conv_dim_out", common.hidden_size),
        ("num_heads", common.heads.num_heads),
    ];
    for (key, size) in copies {
        if sizes::optional(fields, key, MAX_WIDTH)?.is_some_and(|copy| copy != size) {
            return Err(fields.wrong(key, size.to_string()));
        }
    }
    if positive(fields, "block_norm_eps")?.is_some_and(|eps| eps as f32 != common.eps) {
        return Err(fields.wrong("block_norm_eps", "the value of `norm_eps`"));
    }
    // Two keys matter for training alone; GGUF files repeat the third.
    for key in ["block_use_xavier_init", "conv_use_xavier_init", "rms_norm_eps"] {
        fields.get(key);
    }
    for key in ["block_use_swiglu", "use_pos_enc"] {
        if fields.boolean(key)? == Some(false) {
            return Err(fields.wrong(key, "true"));
        }
    }
    Ok(())
}

/// Whether each layer has attention: according to `layer_types`, or to a list of layers, or all.
fn attention_layers(fields: &Fields<'_>, num_layers: usize, is_required: bool) -> Result<Vec<bool>, LoadError> {
    let types = [("full_attention", true), ("conv", false)];
    let (key, found) = match sizes::kinds(fields, "layer_types", num_layers, &types)? {
        Some(kinds) => ("layer_types", kinds),
        None if is_required => {
            return Err(
                fields.wrong("layer_types", format!("a list of {num_layers} of \"full_attention\" and \"conv\""))
            );
        }
        None => {
            let expected = format!("a list of numbers of layers, below {num_layers}");
            let stated = fields.read("full_attn_idxs", &expected, |value| {
                let number = |layer: &serde_json::Value| layer.as_u64().filter(|layer| *layer < num_layers as u64);
                value.as_array()?.iter().map(number).collect::<Option<Vec<_>>>()
            })?;
            let has = |layer: usize| stated.as_ref().is_none_or(|layers| layers.contains(&(layer as u64)));
            ("full_attn_idxs", (0..num_layers).map(has).collect())
        }
    };
    sizes::check_attention(fields, key, found.contains(&true))?;
    Ok(found)
}

/// The width of the networks: two thirds of the stated one, times a factor, rounded up to a multiple, unless it is stated as it is.
fn adjusted(fields: &Fields<'_>, stated: usize) -> Result<usize, LoadError> {
    let adjusts = fields.boolean("block_auto_adjust_ff_dim")?.unwrap_or(true);
    let multiple = sizes::optional(fields, "block_multiple_of", MAX_WIDTH)?.unwrap_or(256);
    // An absent factor is 1; `null` is none, and the width is not rounded either.
    let factor = match fields.is_absent("block_ffn_dim_multiplier") {
        true => Some(1.0),
        false => positive(fields, "block_ffn_dim_multiplier")?,
    };
    let reduced = 2 * stated / 3;
    let width = match factor {
        _ if !adjusts => stated,
        Some(factor) => ((factor * reduced as f64) as usize).next_multiple_of(multiple),
        None => reduced,
    };
    match (1..=MAX_WIDTH as usize).contains(&width) {
        true => Ok(width),
        false => Err(fields.wrong("block_ffn_dim_multiplier", format!("a width of networks from 1 to {MAX_WIDTH}"))),
    }
}
