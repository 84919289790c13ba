//! DeepSeek V2 and V3 (and R1, Kimi K2): latent attention and experts, of which some are shared.
//!
//! The first layers are dense. V2 scores experts by softmax; V3 by sigmoid, with a bias for the choice alone. Both may restrict
//! the choice to the best groups of experts. A layer behind the last one predicts a further token.

use super::experts::{self, Shared};
use super::indexer;
use super::rope::{self, yarn_mscale};
use super::sizes::{self, MAX_EXPERTS, MAX_GROUPS, MAX_HEAD_DIM, MAX_LAYERS, MAX_MODULES, MAX_WIDTH, positive};
use super::{
    Attention, Common, Decoder, Family, Fields, Layer, LoadError, Mixer, Norm, Packing, Part, Pick, RopeDefaults,
};
use super::{Role, Routing, Scores, Spec};
use crate::decoder::{Experts, Groups, Heads, Latent, Linear, RopeScaling};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["DeepseekV2ForCausalLM"],
        model_types: &["deepseek_v2"],
        declare: |fields, max_positions| {
            let (common, layer) = layers(fields, max_positions, Generation { routing: routing_v2, ..V3 })?;
            Ok(common.decoder(layer))
        },
        reference: &["deepseek-v2-lite"],
        largest: "deepseek-ai/DeepSeek-V2.5 (236B)",
        ..Family::BASE
    },
    Family {
        architectures: &["DeepseekV3ForCausalLM"],
        model_types: &["deepseek_v3", "kimi_k2"],
        declare: |fields, max_positions| {
            let (common, layer) = layers(fields, max_positions, V3)?;
            Ok(common.decoder(layer))
        },
        predict: |fields, max_positions| {
            let (common, layer) = layers(fields, max_positions, V3)?;
            predictor(fields, &common, layer)
        },
        largest: "moonshotai/Kimi-K2-Instruct (1T, in bfloat16)",
        ..Family::BASE
    },
    Family {
        architectures: &["DeepseekV32ForCausalLM"],
        model_types: &["deepseek_v32"],
        declare: |fields, max_positions| {
            let (common, layer) = layers(fields, max_positions, V3)?;
            indexer::declare(fields, &common, layer, indexer::V32)
        },
        predict: |fields, max_positions| {
            let (common, layer) = layers(fields, max_positions, V3)?;
            let layer = indexer::layers(fields, &common, layer, indexer::V32)?;
            predictor(fields, &common, layer)
        },
        reference: &["deepseek-v32"],
        largest: "deepseek-ai/DeepSeek-V3.2 (685B)",
        ..Family::BASE
    },
];

/// Defaults of models with these layers, and their router.
pub(super) struct Generation {
    /// That of `rms_norm_eps`.
    pub eps: f64,
    /// Number of layers without experts.
    pub first_sparse: u64,
    /// Number of experts that compute every row.
    pub shared: u64,
    /// Reads the number of experts and their routing.
    pub routing: fn(&Fields<'_>) -> Result<(usize, Routing), LoadError>,
}

pub(super) const V3: Generation = Generation { eps: 1e-6, first_sparse: 0, shared: 0, routing };

/// Sizes of latent attention.
pub(super) struct LatentSizes {
    nope_dim: usize,
    rope_dim: usize,
    rank: usize,
    value_dim: usize,
    query_rank: Option<usize>,
    bias: bool,
    /// Factor of the scores.
    scale: f32,
}

impl LatentSizes {
    /// Reads the sizes, and gives `common` the heads of the cache and the rotary embedding. `interleaved` is the default of
    /// `rope_interleave`, `value_dim` that of `v_head_dim`, if it has one.
    pub fn read(
        fields: &Fields<'_>,
        common: &mut Common,
        max_positions: usize,
        interleaved: bool,
        value_dim: Option<usize>,
    ) -> Result<LatentSizes, LoadError> {
        let nope_dim = sizes::required(fields, "qk_nope_head_dim", MAX_HEAD_DIM)?;
        let rope_dim = sizes::required(fields, "qk_rope_head_dim", MAX_HEAD_DIM)?;
        let rank = sizes::required(fields, "kv_lora_rank", MAX_WIDTH)?;
        if sizes::optional(fields, "qk_head_dim", MAX_WIDTH)?.is_some_and(|dim| dim != nope_dim + rope_dim) {
            let expected = format!("{}, `qk_nope_head_dim` and `qk_rope_head_dim`", nope_dim + rope_dim);
            return Err(fields.wrong("qk_head_dim", expected));
        }
        if common.heads.num_heads * common.num_layers > MAX_MODULES {
            return Err(fields.wrong("num_attention_heads", format!("at most {MAX_MODULES} heads in all layers")));
        }
        let interleaved = fields.boolean("rope_interleave")?.unwrap_or(interleaved);
        let rope = rope::read(fields, max_positions, rope_dim, RopeDefaults { interleaved, ..RopeDefaults::LLAMA })?;
        let mut scale = ((nope_dim + rope_dim) as f32).powf(-0.5);
        if let RopeScaling::Yarn { factor, .. } = rope.scaling {
            let all_dim = rope::number(fields, "mscale_all_dim")?.unwrap_or(0.0);
            scale *= (yarn_mscale(factor, all_dim) as f32).powi(2);
        }
        common.rope = Some(rope);
        common.heads = Heads { num_kv_heads: 1, head_dim: rank + rope_dim, ..common.heads };
        Ok(LatentSizes {
            nope_dim,
            rope_dim,
            rank,
            value_dim: match (sizes::optional(fields, "v_head_dim", MAX_HEAD_DIM)?, value_dim) {
                (Some(stated), _) => stated,
                (None, Some(default)) => default,
                (None, None) => sizes::required(fields, "v_head_dim", MAX_HEAD_DIM)?,
            },
            query_rank: sizes::optional(fields, "q_lora_rank", MAX_WIDTH)?,
            bias: fields.boolean("attention_bias")?.unwrap_or(false),
            scale,
        })
    }
}

/// The predictor in the layer behind the last one, if there is one.
pub(super) fn predictor(
    fields: &Fields<'_>,
    common: &Common,
    layer: impl Fn(usize) -> Layer,
) -> Result<Option<Decoder>, LoadError> {
    predictor_normed(fields, common, layer, "shared_head.norm")
}

/// [`predictor`] with another name of the norm of its output.
pub(super) fn predictor_normed(
    fields: &Fields<'_>,
    common: &Common,
    layer: impl Fn(usize) -> Layer,
    norm: &str,
) -> Result<Option<Decoder>, LoadError> {
    let count = fields.integer("num_nextn_predict_layers", 0..=MAX_LAYERS)?.unwrap_or(0);
    let number = common.num_layers;
    let modules = ["enorm", "hnorm", "eh_proj", norm].map(|name| common.at(number, name));
    Ok((count > 0).then(|| common.predictor(layer(number), modules)))
}

/// What builds a layer, given its number.
pub(super) fn layers(
    fields: &Fields<'_>,
    max_positions: usize,
    generation: Generation,
) -> Result<(Common, impl Fn(usize) -> Layer), LoadError> {
    // The heads are those of latents.
    let spec = Spec { sizes: &[("head_dim", 1)], rope: None, eps: ("rms_norm_eps", generation.eps), ..Spec::LLAMA };
    let mut common = Common::read(fields, max_positions, spec)?;
    let sizes = LatentSizes::read(fields, &mut common, max_positions, true, None)?;
    let stated = fields.integer("first_k_dense_replace", 0..=MAX_LAYERS)?;
    let first_sparse = stated.unwrap_or(generation.first_sparse) as usize;
    let kinds = sizes::kinds(fields, "mlp_layer_types", common.num_layers, &[("dense", false), ("sparse", true)])?;
    let step = sizes::optional(fields, "moe_layer_freq", MAX_LAYERS)?.unwrap_or(1);
    let width = sizes::required(fields, "moe_intermediate_size", MAX_WIDTH)?;
    let shared = width * fields.integer("n_shared_experts", 0..=64)?.unwrap_or(generation.shared) as usize;
    let (count, routing) = (generation.routing)(fields)?;
    let parts = common.clone();
    let layer = move |layer| {
        let attention = latent(&parts, layer, &sizes);
        let is_sparse = kinds.as_ref().and_then(|kinds| kinds.get(layer).copied());
        let mlp = match is_sparse.unwrap_or(layer >= first_sparse && layer.is_multiple_of(step)) {
            false => Mixer::Mlp(parts.mlp(layer)),
            true => Mixer::Experts(self::mixture(&parts, layer, &routing, count, width, shared)),
        };
        parts.layer(layer, attention, mlp)
    };
    Ok((common, layer))
}

/// Latent attention with the tensors of DeepSeek. `kv_b_proj` holds for each head the rows of its keys, then of its values. GGUF files
/// have a matrix for each of both, that of the keys transposed.
pub(super) fn latent(common: &Common, layer: usize, sizes: &LatentSizes) -> Attention {
    let LatentSizes { nope_dim, rope_dim, rank, value_dim, query_rank, bias, scale } = *sizes;
    let (heads, hidden) = (common.heads.num_heads, common.hidden_size);
    let name = common.at(layer, "self_attn");
    let linear = |inputs: usize, projection: &str, rows: usize, bias: bool| Linear {
        bias,
        ..Linear::new(inputs, Role::Column, [Part::new(format!("{name}.{projection}"), rows)])
    };
    // The norms of latents have an epsilon of their own.
    let norm = |norm: &str, width: usize| Norm { eps: 1e-6, ..common.norm_of(format!("{name}.{norm}"), width) };
    let queries = heads * (nope_dim + rope_dim);
    let (query_down, query) = match query_rank {
        None => (None, linear(hidden, "q_proj", queries, false)),
        Some(rank) => {
            let down = (linear(hidden, "q_a_proj", rank, bias), norm("q_a_layernorm", rank));
            (Some(down), linear(rank, "q_b_proj", queries, false))
        }
    };
    let (stride, tensor) = (nope_dim + value_dim, format!("{name}.kv_b_proj"));
    let total = heads * stride;
    let head = |inputs: usize, rows: usize, pick: Pick, own: String| {
        let own = Some((format!("{name}.{own}"), Pick::all(rows)));
        let part = Part { own, ..Part::picked(tensor.clone(), rows, pick) };
        Linear { adapters: false, ..Linear::new(inputs, Role::Column, [part]) }
    };
    let absorb = |h: usize| {
        let pick = Pick { transposed: true, inputs: Some((h * stride, total)), ..Pick::all(rank) };
        head(nope_dim, rank, pick, format!("k_b_proj.{h}"))
    };
    let expand = |h: usize| {
        let pick = Pick::rows(total, h * stride + nope_dim, value_dim);
        head(rank, value_dim, pick, format!("v_b_proj.{h}"))
    };
    let mut attention = common.attention_of(name.clone(), Packing::Rows("kv_a_proj_with_mqa"), "o_proj");
    attention.scale = scale;
    attention.qkv = linear(hidden, "kv_a_proj_with_mqa", rank + rope_dim, bias);
    let output = Part::new(format!("{name}.o_proj"), hidden);
    attention.output = Linear { bias, ..Linear::new(heads * value_dim, Role::Row, [output]) };
    attention.latent = Some(Latent {
        query_down,
        query,
        norm: norm("kv_a_layernorm", rank),
        nope_dim,
        rope_dim,
        rank,
        value_dim,
        absorb: (0..heads).map(absorb).collect(),
        expand: (0..heads).map(expand).collect(),
        choice: None,
    });
    attention
}

/// Number of experts and routing of V3 itself, with the groups that transformers takes for absent keys.
fn routing(fields: &Fields<'_>) -> Result<(usize, Routing), LoadError> {
    routing_v3(fields, [8, 4])
}

/// Checks that experts are scored as the family does it.
fn check_scores(fields: &Fields<'_>, scores: &str) -> Result<(), LoadError> {
    match fields.string("scoring_func")? {
        Some(other) if other != scores => Err(fields.wrong("scoring_func", format!("{scores:?}"))),
        _ => Ok(()),
    }
}

/// Number of experts and routing of V2: softmax scores, groups ranked by their best expert.
fn routing_v2(fields: &Fields<'_>) -> Result<(usize, Routing), LoadError> {
    check_scores(fields, "softmax")?;
    let (count, top_k) = experts::counts(fields, ["n_routed_experts", "num_experts_per_tok"])?;
    let groups = match fields.string("topk_method")? {
        None | Some("greedy") => {
            // Without groups, their numbers are of no effect.
            for key in ["n_group", "topk_group"] {
                fields.get(key);
            }
            None
        }
        Some("group_limited_greedy") => groups(fields, count, top_k, [1, 1], false)?,
        Some(_) => return Err(fields.wrong("topk_method", "\"greedy\" or \"group_limited_greedy\"")),
    };
    let scale = positive(fields, "routed_scaling_factor")?.unwrap_or(1.0) as f32;
    Ok((count, Routing { groups, scale, ..experts::routing(Scores::Softmax, top_k) }))
}

/// Number of experts and routing: sigmoid scores, a bias for the choice alone, groups ranked by their two best experts. `default`: the
/// numbers of groups, and of those that are chosen from, if they are not stated.
pub(super) fn routing_v3(fields: &Fields<'_>, default: [usize; 2]) -> Result<(usize, Routing), LoadError> {
    check_scores(fields, "sigmoid")?;
    if !matches!(fields.string("topk_method")?, None | Some("noaux_tc")) {
        return Err(fields.wrong("topk_method", "\"noaux_tc\""));
    }
    let (count, top_k) = experts::counts(fields, ["n_routed_experts", "num_experts_per_tok"])?;
    let groups = groups(fields, count, top_k, default, true)?;
    let routing = Routing {
        choice_bias: Some(("gate.e_score_correction_bias".to_string(), vec![count])),
        groups,
        renormalise: fields.boolean("norm_topk_prob")?.unwrap_or(true),
        scale: positive(fields, "routed_scaling_factor")?.unwrap_or(1.0) as f32,
        ..experts::routing(Scores::Sigmoid, top_k)
    };
    Ok((count, routing))
}

/// The groups of experts; `None` for one group.
pub(super) fn groups(
    fields: &Fields<'_>,
    count: usize,
    top_k: usize,
    default: [usize; 2],
    by_two: bool,
) -> Result<Option<Groups>, LoadError> {
    let groups = sizes::optional(fields, "n_group", MAX_GROUPS)?.unwrap_or(default[0]);
    let top = sizes::optional(fields, "topk_group", MAX_EXPERTS)?.unwrap_or(default[1]);
    checked_groups(fields, "n_group", (count, top_k), (groups, top), by_two)
}

/// So many groups of experts, and so many of them chosen; `None` for one group. `key`: that of their number.
pub(super) fn checked_groups(
    fields: &Fields<'_>,
    key: &str,
    (count, top_k): (usize, usize),
    (groups, top): (usize, usize),
    by_two: bool,
) -> Result<Option<Groups>, LoadError> {
    if !count.is_multiple_of(groups) {
        return Err(fields.wrong(key, format!("a divisor of the number of experts, {count}")));
    }
    if top > groups || top_k > top * (count / groups) || by_two && groups > 1 && count / groups < 2 {
        return Err(fields.wrong("topk_group", format!("a number of groups with enough experts, at most {groups}")));
    }
    Ok((groups > 1).then_some(Groups { count: groups, top, by_two }))
}

/// The experts of a layer, and a shared network of the width `shared`. The name of the choice bias is completed with the module.
pub(super) fn mixture(
    common: &Common,
    layer: usize,
    routing: &Routing,
    count: usize,
    width: usize,
    shared: usize,
) -> Experts {
    let module = common.at(layer, "mlp");
    let shared =
        (shared > 0).then(|| Shared { module: format!("{module}.shared_experts"), width: shared, gate: false });
    let networks = experts::separate(common, &module, count, ["gate_proj", "up_proj", "down_proj"], width);
    experts::mixture(common, format!("{module}.gate"), routing.of_module(&module), networks, shared)
}
