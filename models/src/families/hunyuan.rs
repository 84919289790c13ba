//! Hunyuan: the layers of Llama with RMS norms of query and key heads after the rotary embedding, and in the mixtures experts beside
//! a network that computes every row.

use serde_json::Value;

use super::experts::{self, Shared};
use super::sizes::MAX_EXPERTS;
use super::{Attention, Common, Decoder, Family, Fields, LoadError, Mixer, Routing, Scores, Spec};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["HunYuanDenseV1ForCausalLM"],
        model_types: &["hunyuan_v1_dense"],
        positions: (&["max_position_embeddings"], Some(2048)),
        declare,
        largest: "tencent/Hunyuan-7B-Instruct",
        ..Family::BASE
    },
    Family {
        architectures: &["HunYuanMoEV1ForCausalLM"],
        model_types: &["hunyuan_v1_moe"],
        positions: (&["max_position_embeddings"], Some(2048)),
        declare: declare_moe,
        largest: "tencent/Hunyuan-A13B-Instruct",
        ..Family::BASE
    },
];

const SPEC: Spec = Spec { eps: ("rms_norm_eps", 1e-5), ..Spec::LLAMA };

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let attention = attention(fields, &common)?;
    Ok(common.decoder(|layer| common.layer(layer, attention(layer), common.mlp(layer))))
}

/// What builds the attention of a layer, given its number.
fn attention(fields: &Fields<'_>, common: &Common) -> Result<impl Fn(usize) -> Attention, LoadError> {
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let head_norms = fields.boolean("use_qk_norm")?.unwrap_or(true);
    let common = common.clone();
    Ok(move |layer| {
        let attention = common.attention(layer).biased(bias, bias);
        match head_norms {
            false => attention,
            true => Attention {
                norm_after_rope: true,
                ..attention.head_normed(&common, ["query_layernorm", "key_layernorm"])
            },
        }
    })
}

fn declare_moe(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let attention = attention(fields, &common)?;
    if fields.boolean("use_cla")?.unwrap_or(false) {
        return Err(fields.wrong("use_cla", "false: attention to keys of other layers is not supported"));
    }
    let counts = layer_counts(fields, "num_experts", common.num_layers)?;
    let chosen = layer_counts(fields, "moe_topk", common.num_layers)?;
    if let Some((count, _)) = counts.iter().zip(&chosen).find(|(count, chosen)| chosen > count) {
        return Err(fields.wrong("moe_topk", format!("at most `num_experts`, {count}")));
    }
    experts::check_modules(fields, "num_experts", counts.iter().sum())?;
    Ok(common.decoder(|layer| {
        let (module, width) = (common.at(layer, "mlp"), common.intermediate_size);
        let names = ["gate_proj", "up_proj", "down_proj"];
        let networks = experts::separate(&common, &module, counts[layer], names, width);
        let routing = Routing { renormalise: true, ..experts::routing(Scores::Softmax, chosen[layer]) };
        let shared = Shared { module: format!("{module}.shared_mlp"), width, gate: false };
        let mixture = experts::mixture(&common, format!("{module}.gate.wg"), routing, networks, Some(shared));
        common.layer(layer, attention(layer), Mixer::Experts(mixture))
    }))
}

/// A number for each layer: a list, or one for all.
fn layer_counts(fields: &Fields<'_>, key: &str, num_layers: usize) -> Result<Vec<usize>, LoadError> {
    let expected = format!("an integer, 1 to {MAX_EXPERTS}, or a list of {num_layers}");
    let counts = fields.read(key, &expected, |value| {
        let count = |value: &Value| value.as_u64().filter(|n| (1..=MAX_EXPERTS).contains(n)).map(|n| n as usize);
        let list = value.as_array().map(|list| list.iter().map(count).collect::<Option<Vec<_>>>());
        let counts = list.unwrap_or_else(|| Some(vec![count(value)?; num_layers]))?;
        (counts.len() == num_layers).then_some(counts)
    })?;
    counts.ok_or_else(|| fields.wrong(key, expected))
}
