//! AFMoE (Trinity): norms around both branches, an output gate with a projection of its own, windows and RoPE in three layers of
//! four, and from some layer on experts.

use super::sizes::{self, MAX_LAYERS, MAX_WIDTH};
use super::{Common, Decoder, Family, Fields, LoadError, Mixer, Part, Routing, Scores, Spec, Windows};
use super::{deepseek, experts};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["AfmoeForCausalLM"],
    model_types: &["afmoe"],
    declare,
    largest: "arcee-ai/Trinity-Mini (26B)",
    ..Family::BASE
}];

const SPEC: Spec =
    Spec { sizes: &[("head_dim", 128), ("sliding_window", 1024)], eps: ("rms_norm_eps", 1e-5), ..Spec::LLAMA };

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let period = sizes::optional(fields, "global_attn_every_n_layers", MAX_LAYERS)?.unwrap_or(4);
    let windows = common.windows(fields, Windows::AllButEach(period))?;
    let (count, top_k) = experts::counts(fields, ["num_experts", "num_experts_per_tok"])?;
    if fields.string("score_func")?.is_some_and(|name| name != "sigmoid") {
        return Err(fields.wrong("score_func", "\"sigmoid\""));
    }
    if fields.boolean("route_norm")? == Some(false) {
        return Err(fields.wrong("route_norm", "true"));
    }
    let routing = Routing {
        choice_bias: Some(("expert_bias".to_string(), vec![count])),
        groups: deepseek::groups(fields, count, top_k, [1, 1], true)?,
        renormalise: true,
        scale: sizes::positive(fields, "route_scale")?.unwrap_or(1.0) as f32,
        ..experts::routing(Scores::Sigmoid, top_k)
    };
    let num_dense = fields.integer("num_dense_layers", 0..=MAX_LAYERS)?.unwrap_or(1) as usize;
    let width = sizes::required(fields, "moe_intermediate_size", MAX_WIDTH)?;
    let shared = fields.integer("num_shared_experts", 0..=64)?.unwrap_or(1) as usize;
    let mut decoder = common.decoder(|layer| {
        let mut attention = common.attention(layer).head_normed(&common, ["q_norm", "k_norm"]);
        let gate = Part::new(format!("{}.gate_proj", attention.name), common.heads.query_width());
        attention.qkv.parts.push(gate);
        attention.gate = true;
        attention.window = windows[layer];
        attention.rope = attention.rope.filter(|_| windows[layer].is_some());
        let mlp = match layer < num_dense {
            true => Mixer::Mlp(common.mlp(layer)),
            false => {
                let mut mixture = deepseek::mixture(&common, layer, &routing, count, width, shared * width);
                mixture.router.parts = vec![Part::new(common.at(layer, "mlp.router.gate"), count)];
                Mixer::Experts(mixture)
            }
        };
        let mut declared = common.layer_with(layer, ["input_layernorm", "pre_mlp_layernorm"], attention, mlp);
        for (branch, name) in declared.branches.iter_mut().zip(["post_attention_layernorm", "post_mlp_layernorm"]) {
            branch.norm_after = Some(common.norm(common.at(layer, name)));
        }
        declared
    });
    if fields.boolean("mup_enabled")?.unwrap_or(false) {
        decoder.embedding.scale = (common.hidden_size as f32).sqrt();
    }
    Ok(decoder)
}
