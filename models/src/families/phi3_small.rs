//! Phi-3-small: block-sparse attention in most layers, layer norms, a clamped GELU of neighbouring rows, and the factors of muP.

use attention_kernels::BlockSparse;
use serde_json::Value;

use super::sizes::{self, MAX_POSITIONS, positive};
use super::{
    Activation, Common, Decoder, Family, Fields, LoadError, Packing, Part, Pick, RopeDefaults, RopeScaling, Spec,
};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["Phi3SmallForCausalLM"],
    model_types: &["phi3small"],
    positions: (&["max_position_embeddings"], Some(8192)),
    declare,
    reference: &[],
    largest: "microsoft/Phi-3-small-128k-instruct (7B)",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    intermediate_size: "ff_intermediate_size",
    sizes: &[
        ("vocab_size", PADDED_VOCAB),
        ("hidden_size", 4096),
        ("num_hidden_layers", 32),
        ("num_attention_heads", 32),
        ("num_key_value_heads", 8),
        ("ff_intermediate_size", 14336),
    ],
    eps: ("layer_norm_epsilon", 1e-5),
    activation: (&[], Activation::Silu), // replaced
    rope: Some(RopeDefaults { theta: ("rope_embedding_base", 1e6), ..RopeDefaults::LLAMA }),
    final_norm: "final_layernorm",
    tied: true,
    ..Spec::LAYER_NORM
};

/// Rows of the published embedding, and those of them that are no token: the published configuration does not state them.
const PADDED_VOCAB: usize = 100_352;
const NO_TOKENS: [std::ops::RangeInclusive<u32>; 4] =
    [100_256..=100_256, 100_258..=100_260, 100_264..=100_265, 100_267..=100_351];

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let mut common = Common::read(fields, max_positions, SPEC)?;
    if fields.string("hidden_act")?.is_some_and(|name| name != "gegelu") {
        return Err(fields.wrong("hidden_act", "\"gegelu\""));
    }
    if fields.get("ff_dim_multiplier").is_some() {
        return Err(fields.wrong("ff_dim_multiplier", "null, with the width in `ff_intermediate_size`"));
    }
    common.activation = Activation::ClampedSwiglu { limit: or(fields, "gegelu_limit", 20.0, f64::from(f32::MAX))? };
    scale_positions(fields, &mut common)?;
    let heads = common.heads;
    let attn_multiplier = or(fields, "mup_attn_multiplier", 1.0, 1.0)?;
    let scale = match fields.boolean("mup_use_scaling")?.unwrap_or(true) {
        true => attn_multiplier / heads.head_dim as f32,
        false => 1.0 / (heads.head_dim as f32).sqrt(),
    };
    let sparse = sparse(fields, heads.num_heads)?;
    let dense_each = match sizes::optional(fields, "dense_attention_every_n_layers", MAX_POSITIONS)? {
        None if fields.is_absent("dense_attention_every_n_layers") => Some(2),
        stated => stated,
    };
    let width = common.intermediate_size;
    let mut decoder = common.decoder(|layer| {
        let packing = Packing::Groups("query_key_value");
        let mut attention = common.attention_of(common.at(layer, "self_attn"), packing, "dense").biased(true, true);
        attention.scale = scale;
        attention.sparse = Some(sparse).filter(|_| dense_each.is_none_or(|each| !(layer + 1).is_multiple_of(each)));
        let module = common.at(layer, "mlp");
        let half = |first| Part::picked(format!("{module}.up_proj"), width, Pick::runs(2 * width, first, 1, 2));
        let down = Part::new(format!("{module}.down_proj"), common.hidden_size);
        common.layer(layer, attention, common.mlp_of([half(0), half(1)], down, width).biased(true))
    });
    decoder.embedding.scale = or(fields, "mup_embedding_multiplier", 10.0, 1.0)?;
    decoder.head.scale = 1.0 / or(fields, "mup_width_multiplier", 8.0, 1.0)?;
    decoder.head.masked = masked(fields, common.vocab_size)?;
    Ok(decoder)
}

/// A number above 0, with its values if the key is absent and if it is `null`.
fn or(fields: &Fields<'_>, key: &str, absent: f64, null: f64) -> Result<f32, LoadError> {
    let default = if fields.is_absent(key) { absent } else { null };
    Ok(positive(fields, key)?.unwrap_or(default) as f32)
}

/// The blocks that heads see in layers that are not dense.
fn sparse(fields: &Fields<'_>, num_heads: usize) -> Result<BlockSparse, LoadError> {
    let size = |key, default| Ok::<_, LoadError>(sizes::optional(fields, key, MAX_POSITIONS)?.unwrap_or(default));
    let vertical_stride = size("blocksparse_vert_stride", 8)?;
    let alike = fields.boolean("blocksparse_homo_head_pattern")?.unwrap_or(false);
    Ok(BlockSparse {
        block_size: size("blocksparse_block_size", 64)?,
        local_blocks: size("blocksparse_num_local_blocks", 16)?,
        vertical_stride,
        head_sliding_step: if alike { 0 } else { (vertical_stride / num_heads).max(1) as i32 },
        first_head: 0,
        first_kv_head: 0,
    })
}

/// Positions are multiplied by `rope_position_scale`, unless LongRoPE scales the frequencies.
fn scale_positions(fields: &Fields<'_>, common: &mut Common) -> Result<(), LoadError> {
    let scale = or(fields, "rope_position_scale", 1.0, 1.0)?;
    let Some(rope) = &mut common.rope else { return Ok(()) };
    match &mut rope.scaling {
        RopeScaling::None if scale == 1.0 => {}
        RopeScaling::None => rope.scaling = RopeScaling::Linear { factor: 1.0 / f64::from(scale) },
        RopeScaling::LongRope { short_attention_factor, .. } => {
            let stated = fields.object("rope_scaling")?.is_some_and(|scaling| scaling.get("short_mscale").is_some());
            *short_attention_factor = if stated { *short_attention_factor } else { 1.0 };
        }
        _ => return Err(fields.wrong("rope_scaling", "null, or an object of the type \"longrope\" or \"su\"")),
    }
    Ok(())
}

/// Rows of the vocabulary that are no token.
fn masked(fields: &Fields<'_>, vocab_size: usize) -> Result<Vec<u32>, LoadError> {
    let expected = format!("a list of token ids below `vocab_size`, {vocab_size}");
    let stated = fields.read("dummy_token_indices", &expected, |value| {
        let id = |id: &Value| id.as_u64().filter(|id| (*id as usize) < vocab_size).map(|id| id as u32);
        value.as_array()?.iter().map(id).collect::<Option<Vec<u32>>>()
    })?;
    let default = || NO_TOKENS.into_iter().flatten().filter(|_| vocab_size == PADDED_VOCAB).collect();
    Ok(stated.unwrap_or_else(default))
}
