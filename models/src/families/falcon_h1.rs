//! Falcon-H1: Mamba-2 and attention that read the same stream in each layer, and a factor of nearly every product.
//!
//! All factors are linear, so each is where it costs nothing: in the weights of a norm or a convolution, which are float32, in the scale of
//! the scores, or in what is added to the stream.

use super::sizes::{self, MAX_WIDTH, positive};
use super::state_space::StateSpace;
use super::{Activation, Branch, Common, Decoder, Family, Fields, Layer, LoadError, Norm, RopeDefaults, Spec};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["FalconH1ForCausalLM"],
    model_types: &["falcon_h1"],
    positions: (&["max_position_embeddings"], Some(8192)),
    declare,
    largest: "tiiuae/Falcon-H1-34B-Instruct",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    sizes: &[("num_key_value_heads", 8)],
    eps: ("rms_norm_eps", 1e-5),
    rope: Some(RopeDefaults::theta(1e5)),
    final_norm: "final_layernorm",
    ..Spec::LLAMA
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    if common.activation != Activation::Silu {
        return Err(fields.wrong("hidden_act", "\"silu\", which the convolutions compute"));
    }
    let factor = |key: &str| Ok::<_, LoadError>(positive(fields, key)?.unwrap_or(1.0) as f32);
    let flag = |key: &str| Ok::<_, LoadError>(fields.boolean(key)?.unwrap_or(false));
    let (attention_bias, mlp_bias) = (flag("attention_bias")?, flag("mlp_bias")?);
    let [of_gate, of_down] = factors(fields, "mlp_multipliers")?;
    // The factor of the gate is in the norm of its input and taken back behind the network, which a bias between them would not follow.
    if mlp_bias && of_gate != 1.0 {
        return Err(fields.wrong("mlp_bias", "false, or a first one of `mlp_multipliers` of 1"));
    }
    let state_space = state_space(fields, &common)?;
    let of_state_space = [factor("ssm_in_multiplier")?, factor("ssm_out_multiplier")?];
    let of_attention = [factor("attention_in_multiplier")?, factor("attention_out_multiplier")?];
    let of_keys = factor("key_multiplier")?;
    // How states are trained and kept in other engines.
    for key in ["mamba_chunk_size", "mamba_use_mlp", "num_logits_to_keep", "time_step_min", "time_step_max"]
        .into_iter()
        .chain(["time_step_floor"])
    {
        fields.get(key);
    }
    let mut decoder = common.decoder(|layer| {
        let branch = |norm: &str, [before, after]: [f32; 2], mixer| {
            let norm = Norm { factor: before, ..common.norm(common.at(layer, norm)) };
            Branch { scale: after, ..Branch::new(norm, mixer) }
        };
        let mut attention = common.attention(layer).biased(attention_bias, attention_bias);
        attention.scale *= of_keys;
        let recurrent = state_space.layer(&common, &common.at(layer, "mamba"));
        let names = ["gate_proj", "up_proj", "down_proj"];
        let mlp = common.gated(common.at(layer, "feed_forward"), names, common.intermediate_size).biased(mlp_bias);
        let branches = vec![
            branch("input_layernorm", of_state_space, recurrent.into()),
            branch("input_layernorm", of_attention, attention.into()),
            branch("pre_ff_layernorm", [of_gate, of_down / of_gate], mlp.into()),
        ];
        Layer { parallel: 2, ..Layer::new(branches) }
    });
    decoder.embedding.scale = factor("embedding_multiplier")?;
    decoder.head.scale = factor("lm_head_multiplier")?;
    Ok(decoder)
}

fn state_space(fields: &Fields<'_>, common: &Common) -> Result<StateSpace, LoadError> {
    let expanded = sizes::optional(fields, "mamba_expand", MAX_WIDTH)?.unwrap_or(2) * common.hidden_size;
    let stated = sizes::optional(fields, "mamba_d_ssm", MAX_WIDTH)?;
    let default = if fields.is_absent("mamba_d_ssm") { 1024 } else { expanded };
    let mut sizes = StateSpace::read_mamba(fields, stated.unwrap_or(default))?;
    sizes.output_bias = fields.boolean("projectors_bias")?.unwrap_or(false);
    let [z, v, k, q, dt] = factors(fields, "ssm_multipliers")?;
    sizes.factors = [q, k, v, z, dt];
    sizes.norm_groups = if fields.boolean("mamba_rms_norm")?.unwrap_or(false) { sizes.groups } else { 0 };
    if sizes.norm_groups > 0 && fields.boolean("mamba_norm_before_gate")?.unwrap_or(true) {
        return Err(fields.wrong("mamba_norm_before_gate", "false, if `mamba_rms_norm` is true"));
    }
    fields.get("mamba_norm_before_gate");
    Ok(sizes)
}

/// A list of factors, all 1 if there is none.
fn factors<const N: usize>(fields: &Fields<'_>, key: &str) -> Result<[f32; N], LoadError> {
    let expected = format!("a list of {N} numbers above 0, in the range of float32");
    let stated = fields.read(key, &expected, |value| {
        let factor =
            |value: &serde_json::Value| value.as_f64().map(|it| it as f32).filter(|it| *it > 0.0 && it.is_normal());
        let all = value.as_array()?.iter().map(factor).collect::<Option<Vec<f32>>>()?;
        <[f32; N]>::try_from(all).ok()
    })?;
    Ok(stated.unwrap_or([1.0; N]))
}
