//! ERNIE 4.5: the layers of Llama with interleaved RoPE. The mixtures have experts in some layers, of which some are shared.

use super::experts::{self, Shared};
use super::sizes::{self, MAX_LAYERS, MAX_WIDTH};
use super::{Common, Decoder, Family, Fields, LoadError, Mixer, RopeDefaults, Routing, Scores, Spec};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["Ernie4_5ForCausalLM"],
        model_types: &["ernie4_5"],
        declare,
        largest: "baidu/ERNIE-4.5-0.3B-PT",
        ..Family::BASE
    },
    Family {
        architectures: &["Ernie4_5_MoeForCausalLM"],
        model_types: &["ernie4_5_moe"],
        declare: declare_moe,
        largest: "baidu/ERNIE-4.5-300B-A47B-PT",
        ..Family::BASE
    },
];

const SPEC: Spec = Spec {
    sizes: &[("num_key_value_heads", 2), ("head_dim", 128)],
    eps: ("rms_norm_eps", 1e-5),
    tied: true,
    rope: Some(RopeDefaults { interleaved: true, ..RopeDefaults::theta(500_000.0) }),
    ..Spec::LLAMA
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let bias = fields.boolean("use_bias")?.unwrap_or(false);
    Ok(common.decoder(|layer| {
        common.layer(layer, common.attention(layer).biased(bias, bias), common.mlp(layer).biased(bias))
    }))
}

fn declare_moe(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, Spec { sizes: &[("num_key_value_heads", 4)], ..SPEC })?;
    let bias = fields.boolean("use_bias")?.unwrap_or(false);
    let (count, top_k) = experts::counts(fields, ["moe_num_experts", "moe_k"])?;
    let width = sizes::required(fields, "moe_intermediate_size", MAX_WIDTH)?;
    let shared = fields.integer("moe_num_shared_experts", 0..=64)?.unwrap_or(2) as usize;
    let interval = sizes::optional(fields, "moe_layer_interval", MAX_LAYERS)?.unwrap_or(1);
    let start = fields.integer("moe_layer_start_index", 0..=MAX_LAYERS)?.unwrap_or(1) as usize;
    let end = fields.read("moe_layer_end_index", "-1 for the last layer, or the number of a layer", |value| {
        value.as_i64().filter(|end| (-1..=MAX_LAYERS as i64).contains(end))
    })?;
    let end = usize::try_from(end.unwrap_or(-1)).unwrap_or(common.num_layers);
    // A floor of the sum of probabilities, which is far below any.
    fields.float("moe_norm_min", "a number, at most 1e-6", |least| (0.0..=1e-6).contains(&least))?;
    Ok(common.decoder(|layer| {
        let attention = common.attention(layer).biased(bias, bias);
        if !((layer + 1).is_multiple_of(interval) && (start..=end).contains(&layer)) {
            return common.layer(layer, attention, common.mlp(layer).biased(bias));
        }
        let module = common.at(layer, "mlp");
        let routing = Routing {
            choice_bias: Some((format!("{module}.moe_statics.e_score_correction_bias"), vec![1, count])),
            renormalise: true,
            ..experts::routing(Scores::Softmax, top_k)
        };
        let networks = experts::separate(&common, &module, count, ["gate_proj", "up_proj", "down_proj"], width);
        let networks = networks.into_iter().map(|network| network.biased(bias)).collect();
        let name = format!("{module}.shared_experts");
        let shared = (shared > 0).then(|| Shared { module: name, width: shared * width, gate: false });
        let mut mixture = experts::mixture(&common, format!("{module}.gate"), routing, networks, shared);
        mixture.shared = mixture.shared.map(|shared| shared.biased(bias));
        common.layer(layer, attention, Mixer::Experts(mixture))
    }))
}
