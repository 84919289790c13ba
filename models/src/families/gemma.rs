//! Gemma 1, 2 and 3 (text).
//!
//! The embedding is multiplied by the root of the width, norms store their weights less 1, and the feed-forward network is gated
//! by GELU. Gemma 2 and 3 norm the output of each branch too, and alternate layers with and without a sliding window. Gemma 2
//! caps scores and logits; Gemma 3 norms query and key heads, and its layers with a window have a rotary embedding of their own.

use super::sizes::{self, positive};
use super::{
    Activation, Common, Decoder, Family, Fields, LoadError, Mixer, Rope, RopeDefaults, RopeScaling, Spec, Windows, rope,
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["GemmaForCausalLM"],
        model_types: &["gemma"],
        declare: declare_1,
        largest: "google/gemma-7b",
        ..Family::BASE
    },
    Family {
        architectures: &["Gemma2ForCausalLM"],
        model_types: &["gemma2"],
        declare: |fields, max_positions| declare(fields, max_positions, GEMMA2),
        reference: &["gemma2"],
        largest: "google/gemma-2-27b",
        ..Family::BASE
    },
    Family {
        architectures: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
        model_types: &["gemma3_text", "gemma3"],
        positions: (&["max_position_embeddings"], Some(131_072)),
        declare: |fields, max_positions| declare(fields, max_positions, GEMMA3),
        reference: &["gemma3-text"],
        largest: "google/gemma-3-27b-it",
        ..Family::BASE
    },
];

const SPEC: Spec = Spec {
    sizes: &[("head_dim", 256)],
    activation: (&["hidden_activation"], Activation::GeluTanh),
    tied: true,
    norm_plus_one: true,
    ..Spec::LLAMA
};

/// How Gemma 2 and 3 differ.
struct Generation {
    spec: Spec,
    soft_caps: [Option<f64>; 2],
    head_norms: bool,
    /// Period of the layers without a window; a key may change it.
    pattern: usize,
}

const GEMMA2: Generation =
    Generation { spec: SPEC, soft_caps: [Some(50.0), Some(30.0)], head_norms: false, pattern: 2 };

const GEMMA3: Generation = Generation {
    spec: Spec {
        sizes: &[
            ("head_dim", 256),
            ("vocab_size", 262_208),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 26),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
        ],
        rope: Some(RopeDefaults::theta(1_000_000.0)),
        ..SPEC
    },
    soft_caps: [None, None],
    head_norms: true,
    pattern: 6,
};

fn declare_1(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let mut decoder =
        common.decoder(|layer| common.layer(layer, common.attention(layer).biased(bias, bias), common.mlp(layer)));
    decoder.embedding.scale = (common.hidden_size as f32).sqrt();
    Ok(decoder)
}

fn declare(fields: &Fields<'_>, max_positions: usize, generation: Generation) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, generation.spec)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let scalar = positive(fields, "query_pre_attn_scalar")?.unwrap_or(256.0);
    let [score_cap, logit_cap] = generation.soft_caps;
    let soft_cap = soft_cap(fields, "attn_logit_softcapping", score_cap)?;
    let pattern = sizes::optional(fields, "sliding_window_pattern", sizes::MAX_LAYERS)?;
    let windows = common.windows(fields, Windows::AllButEach(pattern.unwrap_or(generation.pattern)))?;
    let [global, local] = match generation.head_norms {
        true => ropes(fields, max_positions, &common)?,
        false => [common.rope.clone(), common.rope.clone()],
    };
    let mut decoder = common.decoder(|layer| {
        let mut attention = common.attention(layer).biased(bias, bias);
        attention.scale = (scalar as f32).powf(-0.5);
        attention.soft_cap = soft_cap;
        attention.window = windows[layer];
        attention.rope = if windows[layer].is_some() { local.clone() } else { global.clone() };
        if generation.head_norms {
            attention = attention.head_normed(&common, ["q_norm", "k_norm"]);
        }
        let norms = ["input_layernorm", "pre_feedforward_layernorm"];
        let mut declared = common.layer_with(layer, norms, attention, Mixer::Mlp(common.mlp(layer)));
        let after = ["post_attention_layernorm", "post_feedforward_layernorm"];
        for (branch, name) in declared.branches.iter_mut().zip(after) {
            branch.norm_after = Some(common.norm(common.at(layer, name)));
        }
        declared
    });
    decoder.embedding.scale = (common.hidden_size as f32).sqrt();
    decoder.head.soft_cap = self::soft_cap(fields, "final_logit_softcapping", logit_cap)?;
    Ok(decoder)
}

/// Rotary embeddings of layers without a window and with one.
pub(super) fn ropes(
    fields: &Fields<'_>,
    max_positions: usize,
    common: &Common,
) -> Result<[Option<Rope>; 2], LoadError> {
    let head_dim = common.heads.head_dim;
    let of_type =
        |kind: &str, theta: f64| rope::read_type(fields, kind, max_positions, head_dim, RopeDefaults::theta(theta));
    let global = of_type("full_attention", 1_000_000.0)?.or_else(|| common.rope.clone());
    let local = match of_type("sliding_attention", 10_000.0)? {
        Some(rope) => Some(rope),
        None => {
            let theta = positive(fields, "rope_local_base_freq")?.unwrap_or(10_000.0);
            common.rope.clone().map(|rope| Rope { theta, scaling: RopeScaling::None, ..rope })
        }
    };
    Ok([global, local])
}

/// A cap: the stated one, none if it is `null`, or the default.
pub(super) fn soft_cap(fields: &Fields<'_>, key: &str, default: Option<f64>) -> Result<Option<f32>, LoadError> {
    let cap = if fields.is_absent(key) { default } else { positive(fields, key)? };
    Ok(cap.map(|cap| cap as f32))
}
