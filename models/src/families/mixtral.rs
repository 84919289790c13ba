//! Mixtral: Mistral's attention with experts.

use super::experts;
use super::{Common, Decoder, Family, Fields, LoadError, Mixer, RopeDefaults, Routing, Scores, Spec, Windows};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["MixtralForCausalLM"],
    model_types: &["mixtral"],
    declare,
    reference: &["mixtral"],
    largest: "mistralai/Mixtral-8x22B-v0.1",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    sizes: &[("num_key_value_heads", 8)],
    eps: ("rms_norm_eps", 1e-5),
    rope: Some(RopeDefaults::theta(1_000_000.0)),
    ..Spec::LLAMA
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let windows = common.windows(fields, Windows::IfStated)?;
    let (count, top_k) = experts::counts(fields, ["num_local_experts", "num_experts_per_tok"])?;
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer);
        attention.window = windows[layer];
        let module = common.at(layer, "block_sparse_moe");
        let networks = experts::separate(&common, &module, count, ["w1", "w3", "w2"], common.intermediate_size);
        let routing = Routing { renormalise: true, ..experts::routing(Scores::Softmax, top_k) };
        let mixture = experts::mixture(&common, format!("{module}.gate"), routing, networks, None);
        common.layer(layer, attention, Mixer::Experts(mixture))
    }))
}
