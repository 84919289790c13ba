//! OLMo 1, 2 and 3, and OLMoE.
//!
//! OLMo 1 has layer norms without weights. OLMo 2 norms the output of each branch instead of its input, and norms whole rows of
//! queries and keys. OLMo 3 adds sliding windows to three layers of four, whose rotary embedding is not scaled. OLMoE has the
//! norms of Llama, the query and key norms of OLMo 2, and experts.

use super::experts;
use super::sizes::positive;
use super::{
    Attention, Common, Decoder, Family, Fields, LoadError, Mixer, Norm, NormKind, RopeDefaults, RopeScaling, Routing,
    Scores, Spec, Windows, rope,
};
use crate::decoder::Rope;

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["OlmoForCausalLM"],
        model_types: &["olmo"],
        declare: declare_1,
        largest: "allenai/OLMo-7B-hf",
        ..Family::BASE
    },
    Family {
        architectures: &["Olmo2ForCausalLM"],
        model_types: &["olmo2"],
        declare: declare_2,
        largest: "allenai/OLMo-2-0325-32B",
        ..Family::BASE
    },
    Family {
        architectures: &["Olmo3ForCausalLM"],
        model_types: &["olmo3"],
        declare: declare_3,
        largest: "allenai/Olmo-3-1125-32B",
        ..Family::BASE
    },
    Family {
        architectures: &["OlmoeForCausalLM"],
        model_types: &["olmoe"],
        declare: declare_moe,
        largest: "allenai/OLMoE-1B-7B-0125",
        ..Family::BASE
    },
];

const OLMO2: Spec = Spec { eps: ("rms_norm_eps", 1e-5), ..Spec::LLAMA };

fn declare_1(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let spec = Spec { eps: ("", 1e-5), norm: NormKind::Layer, norm_weight: false, ..Spec::LLAMA };
    let common = Common::read(fields, max_positions, spec)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let clip = clip(fields)?;
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer).biased(bias, bias);
        attention.clip = clip;
        common.layer(layer, attention, common.mlp(layer))
    }))
}

fn declare_2(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, OLMO2)?;
    let windows = vec![None; common.num_layers];
    decoder(fields, &common, &windows, common.rope.clone())
}

fn declare_3(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let mut common = Common::read(fields, max_positions, OLMO2)?;
    let windows = common.windows(fields, Windows::AllButEach(4))?;
    let defaults = RopeDefaults::LLAMA;
    let of_type = |kind: &str| rope::read_type(fields, kind, max_positions, common.heads.head_dim, defaults);
    let local = match of_type("sliding_attention")? {
        Some(local) => Some(local),
        None => common.rope.clone().map(|rope| Rope { scaling: RopeScaling::None, ..rope }),
    };
    if let Some(global) = of_type("full_attention")? {
        common.rope = Some(global);
    }
    decoder(fields, &common, &windows, local)
}

/// The layers of OLMo 2 and 3. Those with a window have the rotary embedding `local`.
fn decoder(
    fields: &Fields<'_>,
    common: &Common,
    windows: &[Option<usize>],
    local: Option<Rope>,
) -> Result<Decoder, LoadError> {
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    Ok(common.decoder(|layer| {
        let mut attention = with_row_norms(common, layer, common.attention(layer).biased(bias, bias));
        attention.window = windows[layer];
        if attention.window.is_some() {
            attention.rope = local.clone();
        }
        common.post_norm_layer(layer, attention, common.mlp(layer))
    }))
}

fn declare_moe(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, OLMO2)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let (count, top_k) = experts::counts(fields, ["num_experts", "num_experts_per_tok"])?;
    let renormalise = fields.boolean("norm_topk_prob")?.unwrap_or(false);
    let routing = Routing { renormalise, ..experts::routing(Scores::Softmax, top_k) };
    let clip = clip(fields)?;
    Ok(common.decoder(|layer| {
        let mut attention = with_row_norms(&common, layer, common.attention(layer).biased(bias, bias));
        attention.clip = clip;
        let (module, names) = (common.at(layer, "mlp"), ["gate_proj", "up_proj", "down_proj"]);
        let networks = experts::separate(&common, &module, count, names, common.intermediate_size);
        let mixture = experts::mixture(&common, format!("{module}.gate"), routing.clone(), networks, None);
        common.layer(layer, attention, Mixer::Experts(mixture))
    }))
}

/// Norms of whole rows of queries and keys.
fn with_row_norms(common: &Common, layer: usize, mut attention: Attention) -> Attention {
    let norm = |name: &str, width: usize| -> Norm { common.norm_of(common.at(layer, name), width) };
    attention.query_norm = Some(norm("self_attn.q_norm", common.heads.query_width()));
    attention.key_norm = Some(norm("self_attn.k_norm", common.heads.key_width()));
    attention
}

fn clip(fields: &Fields<'_>) -> Result<Option<f32>, LoadError> {
    Ok(positive(fields, "clip_qkv")?.map(|clip| clip as f32))
}
