//! Command-R (Cohere) and Command-R7B, Command-A (Cohere 2).
//!
//! Layer norms without a bias; attention and feed-forward network read the same norm of the stream and are added to it together.
//! RoPE is interleaved. Cohere 2 has sliding windows, and only layers with a window have a rotary embedding.

use super::sizes::{self, MAX_LAYERS, positive};
use super::{Common, Decoder, Family, Fields, LoadError, Norm, NormKind, RopeDefaults, Spec, Windows};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["CohereForCausalLM"],
        model_types: &["cohere"],
        declare: |fields, max_positions| declare(fields, max_positions, false),
        largest: "CohereLabs/c4ai-command-r-plus (104B)",
        ..Family::BASE
    },
    Family {
        architectures: &["Cohere2ForCausalLM"],
        model_types: &["cohere2"],
        declare: |fields, max_positions| declare(fields, max_positions, true),
        largest: "CohereLabs/c4ai-command-a-03-2025 (111B)",
        ..Family::BASE
    },
];

const SPEC: Spec = Spec {
    eps: ("layer_norm_eps", 1e-5),
    tied: true,
    norm: NormKind::Layer,
    rope: Some(RopeDefaults { interleaved: true, ..RopeDefaults::LLAMA }),
    ..Spec::LLAMA
};

fn declare(fields: &Fields<'_>, max_positions: usize, windowed: bool) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let head_norms = !windowed && fields.boolean("use_qk_norm")?.unwrap_or(false);
    let pattern = sizes::optional(fields, "sliding_window_pattern", MAX_LAYERS)?.unwrap_or(4);
    let rule = if windowed { Windows::AllButEach(pattern) } else { Windows::Never };
    let windows = common.windows(fields, rule)?;
    let heads = common.heads;
    let head_norm = |layer: usize, name: &str, count: usize| Norm {
        shape: vec![count, heads.head_dim],
        ..common.head_norm(layer, name)
    };
    let mut decoder = common.decoder(|layer| {
        let mut attention = common.attention(layer).biased(bias, bias);
        attention.window = windows[layer];
        attention.rope = attention.rope.filter(|_| !windowed || windows[layer].is_some());
        if head_norms {
            attention.query_norm = Some(head_norm(layer, "self_attn.q_norm", heads.num_heads));
            attention.key_norm = Some(head_norm(layer, "self_attn.k_norm", heads.num_kv_heads));
        }
        let norms = ["input_layernorm"; 2];
        common.layer_with(layer, norms, attention, common.mlp(layer)).in_parallel()
    });
    decoder.head.scale = positive(fields, "logit_scale")?.unwrap_or(0.0625) as f32;
    Ok(decoder)
}
