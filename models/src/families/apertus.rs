//! Apertus: the layers of Llama with norms of query and key heads, and a network without a gate whose activation has learned
//! parameters.

use super::{Activation, Common, Decoder, Family, Fields, LoadError, RopeDefaults, RopeScaling, Spec};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["ApertusForCausalLM"],
    model_types: &["apertus"],
    declare,
    largest: "swiss-ai/Apertus-70B-Instruct-2509",
    ..Family::BASE
}];

const XIELU: Activation = Activation::Xielu { positive: 0.0, negative: 0.0, beta: 0.5, eps: -1e-6 };

const SPEC: Spec = Spec {
    eps: ("rms_norm_eps", 1e-5),
    activation: (&[], XIELU),
    rope: Some(RopeDefaults::theta(12_000_000.0)),
    ..Spec::LLAMA
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let mut common = Common::read(fields, max_positions, SPEC)?;
    if fields.string("hidden_act")?.is_some_and(|name| name != "xielu") {
        return Err(fields.wrong("hidden_act", "\"xielu\""));
    }
    if fields.is_absent("rope_scaling")
        && fields.is_absent("rope_parameters")
        && let Some(rope) = &mut common.rope
    {
        rope.scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        };
    }
    for (key, expected) in [("qk_norm", true), ("post_norm", false), ("mlp_bias", false)] {
        if fields.boolean(key)?.is_some_and(|stated| stated != expected) {
            return Err(fields.wrong(key, format!("{expected}")));
        }
    }
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    Ok(common.decoder(|layer| {
        let attention = common.attention(layer).biased(bias, bias).head_normed(&common, ["q_norm", "k_norm"]);
        let mut mlp = common.plain(common.at(layer, "mlp"), ["up_proj", "down_proj"]);
        mlp.learned = ["alpha_p", "alpha_n"].map(|name| common.at(layer, &format!("mlp.act_fn.{name}"))).into();
        common.layer_with(layer, ["attention_layernorm", "feedforward_layernorm"], attention, mlp)
    }))
}
