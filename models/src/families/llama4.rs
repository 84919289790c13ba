//! Llama 4: layers with interleaved RoPE that see a chunk of the context, and norms without weights behind the rotation; layers
//! without RoPE that see all of it, and whose queries grow with their position; experts whose inputs are scaled.

use attention_kernels::BlockSparse;

use super::experts::{self, Shared};
use super::sizes::{self, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH};
use super::{
    Attention, Common, Decoder, Family, Fields, LoadError, Mixer, QueryGrowth, RopeDefaults, Routing, Scores, Spec,
};
use crate::decoder::Norm;

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["Llama4ForCausalLM", "Llama4ForConditionalGeneration"],
    model_types: &["llama4_text", "llama4"],
    declare,
    reference: &["llama4"],
    largest: "meta-llama/Llama-4-Maverick-17B-128E-Instruct (400B)",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    sizes: &[("head_dim", 128)],
    eps: ("rms_norm_eps", 1e-5),
    rope: Some(RopeDefaults { interleaved: true, ..RopeDefaults::theta(500_000.0) }),
    ..Spec::LLAMA
};

/// What a layer may have.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Chunks,
    Full,
}

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let has_rope = rotated(fields, common.num_layers)?;
    let types = [("chunked_attention", Kind::Chunks), ("full_attention", Kind::Full)];
    let kinds = sizes::kinds(fields, "layer_types", common.num_layers, &types)?;
    let is_chunked = |layer: usize| kinds.as_ref().map_or(has_rope[layer], |kinds| kinds[layer] == Kind::Chunks);
    let chunk = match fields.is_absent("attention_chunk_size") {
        true => Some(8192),
        false => sizes::optional(fields, "attention_chunk_size", MAX_POSITIONS)?,
    };
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let norms = fields.boolean("use_qk_norm")?.unwrap_or(true);
    let growth = growth(fields)?;
    let (count, top_k) = experts::counts(fields, ["num_local_experts", "num_experts_per_tok"])?;
    let dense_width = sizes::optional(fields, "intermediate_size_mlp", MAX_WIDTH)?.unwrap_or(16_384);
    let sparse = sparse_layers(fields, common.num_layers)?;
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer).biased(bias, bias);
        if has_rope[layer] && norms {
            attention = normed(&common, attention);
        }
        if !has_rope[layer] {
            (attention.rope, attention.query_growth) = (None, growth);
        }
        if is_chunked(layer) {
            // A chunk lies within this window, so that pages behind it are free.
            (attention.window, attention.sparse) = (chunk, chunk.map(BlockSparse::chunks));
        }
        let (module, names) = (common.at(layer, "feed_forward"), ["gate_proj", "up_proj", "down_proj"]);
        let mlp = match sparse.contains(&layer) {
            false => Mixer::Mlp(common.gated(module, names, dense_width)),
            true => {
                let width = common.intermediate_size;
                let stacks = ["gate_up_proj", "down_proj"].map(|name| format!("{module}.experts.{name}"));
                let networks = experts::separate(&common, &module, count, names, width);
                let networks = experts::stacked(networks, stacks, true);
                let routing = Routing { scales_inputs: true, ..experts::routing(Scores::Sigmoid, top_k) };
                let shared = Shared { module: format!("{module}.shared_expert"), width, gate: false };
                let router = format!("{module}.router");
                Mixer::Experts(experts::mixture(&common, router, routing, networks, Some(shared)))
            }
        };
        common.layer(layer, attention, mlp)
    }))
}

/// The same with norms of heads behind the rotation.
fn normed(common: &Common, attention: Attention) -> Attention {
    let unweighted = |norm: Option<Norm>| norm.map(|norm| Norm { weight: Vec::new(), ..norm });
    let Attention { query_norm, key_norm, .. } = attention.clone().head_normed(common, ["q_norm", "k_norm"]);
    let (query_norm, key_norm) = (unweighted(query_norm), unweighted(key_norm));
    Attention { query_norm, key_norm, norm_after_rope: true, ..attention }
}

/// Whether each layer has a rotary embedding.
fn rotated(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    let interval = sizes::optional(fields, "no_rope_layer_interval", MAX_LAYERS)?.unwrap_or(4);
    let expected = format!("a list of {num_layers} of 0 (no rotary embedding) and 1, or an empty one");
    let stated = fields.read("no_rope_layers", &expected, |value| {
        let layers = value.as_array()?.iter().map(|layer| layer.as_u64().filter(|flag| *flag <= 1));
        let layers = layers.map(|flag| Some(flag? == 1)).collect::<Option<Vec<_>>>()?;
        (layers.is_empty() || layers.len() == num_layers).then_some(layers)
    })?;
    let default = || (0..num_layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect();
    Ok(stated.filter(|layers| !layers.is_empty()).unwrap_or_else(default))
}

/// The layers with experts.
fn sparse_layers(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<usize>, LoadError> {
    let step = sizes::optional(fields, "interleave_moe_layer_step", MAX_LAYERS)?.unwrap_or(1);
    let stated = fields.read("moe_layers", &format!("a list of numbers of layers, below {num_layers}"), |value| {
        let layer = |layer: &serde_json::Value| usize::try_from(layer.as_u64()?).ok().filter(|at| *at < num_layers);
        value.as_array()?.iter().map(layer).collect::<Option<Vec<_>>>()
    })?;
    Ok(stated.unwrap_or_else(|| (step - 1..num_layers).step_by(step).collect()))
}

/// Growth of the queries of layers without a rotary embedding.
fn growth(fields: &Fields<'_>) -> Result<Option<QueryGrowth>, LoadError> {
    // Early files state a number.
    let tuned = fields.read("attn_temperature_tuning", "true or false", |value| {
        value.as_bool().or_else(|| value.as_u64().map(|number| number > 0))
    })?;
    let original_max_position_embeddings = sizes::optional(fields, "floor_scale", MAX_POSITIONS)?.unwrap_or(8192);
    let beta = sizes::not_negative(fields, "attn_scale")?.unwrap_or(0.1) as f32;
    let growth = QueryGrowth { beta, original_max_position_embeddings, first: 1 };
    Ok(tuned.unwrap_or(true).then_some(growth))
}
