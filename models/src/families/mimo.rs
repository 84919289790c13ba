//! MiMo-V2-Flash: layers with a window and attention sinks between layers that see everything, with other numbers of heads, values that are
//! narrower than keys, and the experts of DeepSeek V3 in all layers but the first. A layer with a window and a plain network predicts a
//! further token.

use super::rope::{self, RopeDefaults};
use super::sizes::{self, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, positive};
use super::{Attention, Common, Decoder, Family, Fields, Heads, Layer, LoadError, Mixer, Part, Spec, deepseek};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["MiMoV2FlashForCausalLM"],
    model_types: &["mimo_v2_flash"],
    declare,
    predict,
    largest: "XiaomiMiMo/MiMo-V2-Flash (309B)",
    ..Family::BASE
}];

const SPEC: Spec = Spec { eps: ("layernorm_epsilon", 1e-5), rope: None, ..Spec::LLAMA };

/// Layers with a window, or without one.
struct Kind {
    common: Common,
    window: Option<usize>,
    /// Elements of a value.
    value_dim: usize,
    has_sinks: bool,
}

/// The keys of one kind of layers.
struct Keys {
    num_heads: &'static str,
    num_kv_heads: &'static str,
    head_dim: &'static str,
    value_dim: &'static str,
    sinks: &'static str,
    theta: (&'static str, f64),
    layer_type: &'static str,
}

const FULL: Keys = Keys {
    num_heads: "num_attention_heads",
    num_kv_heads: "num_key_value_heads",
    head_dim: "head_dim",
    value_dim: "v_head_dim",
    sinks: "add_full_attention_sink_bias",
    theta: ("rope_theta", 5e6),
    layer_type: "full_attention",
};

const SLIDING: Keys = Keys {
    num_heads: "swa_num_attention_heads",
    num_kv_heads: "swa_num_key_value_heads",
    head_dim: "swa_head_dim",
    value_dim: "swa_v_head_dim",
    sinks: "add_swa_attention_sink_bias",
    theta: ("swa_rope_theta", 1e4),
    layer_type: "sliding_attention",
};

/// What all layers have.
struct Shared {
    common: Common,
    bias: bool,
    /// Layers without a window, and with one.
    full: Kind,
    sliding: Kind,
    value_scale: f32,
}

fn shared(fields: &Fields<'_>, max_positions: usize) -> Result<Shared, LoadError> {
    let mut common = Common::read(fields, max_positions, SPEC)?;
    if let Some(eps) = positive(fields, "rms_norm_eps")?.filter(|_| fields.get(SPEC.eps.0).is_none()) {
        common.eps = eps as f32;
    }
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let full = Kind::read(fields, max_positions, &common, &FULL, (common.heads, common.heads.head_dim), false)?;
    // Unless stated, layers with a window have twice as many key heads.
    let doubled = Heads { num_kv_heads: (2 * common.heads.num_kv_heads).min(common.heads.num_heads), ..common.heads };
    let mut sliding = Kind::read(fields, max_positions, &common, &SLIDING, (doubled, full.value_dim), true)?;
    let window = sizes::optional(fields, "sliding_window", MAX_POSITIONS)?;
    let also = sizes::optional(fields, "sliding_window_size", MAX_POSITIONS)?;
    sliding.window = window.or(also).or(Some(128));
    let value_scale = positive(fields, "attention_value_scale")?.unwrap_or(1.0) as f32;
    Ok(Shared { common, bias, full, sliding, value_scale })
}

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let all = shared(fields, max_positions)?;
    let common = &all.common;
    // That of another kind of attention.
    fields.get("attention_chunk_size");
    let (count, routing) = deepseek::routing_v3(fields, [1, 1])?;
    let types = [("full_attention", false), ("sliding_attention", true)];
    let slides = flags(fields, ["layer_types", "hybrid_layer_pattern"], common.num_layers, &types)?;
    let types = [("dense", false), ("sparse", true)];
    let is_sparse = flags(fields, ["mlp_layer_types", "moe_layer_freq"], common.num_layers, &types)?;
    let width = sizes::required(fields, "moe_intermediate_size", MAX_WIDTH)?;
    let shared = width * fields.integer("n_shared_experts", 0..=64)?.unwrap_or(0) as usize;
    Ok(common.decoder(|layer| {
        let kind = if slides[layer] { &all.sliding } else { &all.full };
        let mlp = match is_sparse[layer] {
            false => Mixer::Mlp(common.mlp(layer)),
            true => Mixer::Experts(deepseek::mixture(common, layer, &routing, count, width, shared)),
        };
        all.layer(kind, layer, "post_attention_layernorm", mlp)
    }))
}

/// The first of the predictors, under names of its own. The configuration does not say how many there are: three in all checkpoints.
fn predict(fields: &Fields<'_>, max_positions: usize) -> Result<Option<Decoder>, LoadError> {
    if fields.integer("num_nextn_predict_layers", 0..=MAX_LAYERS)? == Some(0) {
        return Ok(None);
    }
    let mut all = shared(fields, max_positions)?;
    let common = all.common.clone();
    for own in [&mut all.common, &mut all.sliding.common] {
        own.spec.root = "model.mtp";
    }
    let layer = all.layer(&all.sliding, 0, "pre_mlp_layernorm", Mixer::Mlp(all.common.mlp(0)));
    let modules = ["enorm", "hnorm", "eh_proj", "final_layernorm"].map(|name| all.common.at(0, name));
    Ok(Some(common.predictor(layer, modules).continuing_normed()))
}

impl Shared {
    fn layer(&self, kind: &Kind, layer: usize, second_norm: &str, mlp: Mixer) -> Layer {
        let attention = kind.attention(layer).biased(self.bias, false);
        let mut declared = self.common.layer_with(layer, ["input_layernorm", second_norm], attention, mlp);
        // Outputs are linear in the values.
        declared.branches[0].scale = self.value_scale;
        declared
    }
}

impl Kind {
    fn read(
        fields: &Fields<'_>,
        max_positions: usize,
        common: &Common,
        keys: &Keys,
        (heads, value_dim): (Heads, usize),
        has_sinks: bool,
    ) -> Result<Kind, LoadError> {
        let size = |key: &str, most: u64, default: usize| {
            Ok::<_, LoadError>(sizes::optional(fields, key, most)?.unwrap_or(default))
        };
        let heads = Heads {
            num_heads: size(keys.num_heads, MAX_HEADS, heads.num_heads)?,
            num_kv_heads: size(keys.num_kv_heads, MAX_HEADS, heads.num_kv_heads)?,
            head_dim: size(keys.head_dim, MAX_HEAD_DIM, heads.head_dim)?,
        };
        if !heads.num_heads.is_multiple_of(heads.num_kv_heads) {
            let expected = format!("a divisor of `{}`, {}", keys.num_heads, heads.num_heads);
            return Err(fields.wrong(keys.num_kv_heads, expected));
        }
        let value_dim = size(keys.value_dim, MAX_HEAD_DIM, value_dim)?;
        if !(heads.head_dim.div_ceil(2)..=heads.head_dim).contains(&value_dim) {
            let expected = format!("at most `{}`, {}, and at least half of it", keys.head_dim, heads.head_dim);
            return Err(fields.wrong(keys.value_dim, expected));
        }
        let share = ("partial_rotary_factor", 1.0);
        let defaults = RopeDefaults { theta: keys.theta, partial: share, ..RopeDefaults::LLAMA };
        let rope = match rope::read_type(fields, keys.layer_type, max_positions, heads.head_dim, defaults)? {
            Some(rope) => rope,
            None => rope::read(fields, max_positions, heads.head_dim, defaults)?,
        };
        let has_sinks = fields.boolean(keys.sinks)?.unwrap_or(has_sinks);
        let common = Common { heads, rope: Some(rope), ..common.clone() };
        Ok(Kind { common, window: None, value_dim, has_sinks })
    }

    fn attention(&self, layer: usize) -> Attention {
        let Heads { num_heads, num_kv_heads, head_dim } = self.common.heads;
        let mut attention = self.common.attention(layer);
        attention.window = self.window;
        attention.sinks = self.has_sinks.then(|| format!("{}.attention_sink_bias", attention.name));
        if self.value_dim < head_dim {
            let values = Part::new(format!("{}.v_proj", attention.name), num_kv_heads * self.value_dim);
            attention.qkv.parts.pop();
            attention.qkv.parts.push(values);
            attention.output.inputs = num_heads * self.value_dim;
            attention.value_dim = Some(self.value_dim);
        }
        attention
    }
}

/// A choice for each layer: of names under the first key, or of 0 and 1 under the second.
fn flags(
    fields: &Fields<'_>,
    [names, numbers]: [&str; 2],
    layers: usize,
    types: &[(&str, bool)],
) -> Result<Vec<bool>, LoadError> {
    let expected = format!("a list of {layers} of 0 and 1");
    let listed = fields.read(numbers, &expected, |value| {
        let flags = value.as_array()?.iter().map(|flag| flag.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1));
        flags.collect::<Option<Vec<_>>>().filter(|flags| flags.len() == layers)
    })?;
    match sizes::kinds(fields, names, layers, types)?.or(listed) {
        Some(flags) => Ok(flags),
        None => Err(fields.wrong(numbers, expected)),
    }
}
