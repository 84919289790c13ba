//! gpt-oss: attention sinks, a sliding window in every second layer, biases everywhere, experts with a clamped gate.
//!
//! The tensors of the experts hold all of them, transposed, with the columns of gate and up in turn. GGUF files have a tensor for each
//! part of an expert.

use super::experts;
use super::sizes::positive;
use super::{
    Activation, Common, Decoder, Family, Fields, LoadError, Mixer, Mlp, Part, Pick, RopeDefaults, Scores, Spec, Windows,
};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["GptOssForCausalLM"],
    model_types: &["gpt_oss"],
    declare,
    reference: &["gpt-oss"],
    largest: "openai/gpt-oss-120b (in bfloat16)",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    sizes: &[("num_key_value_heads", 8), ("head_dim", 64), ("sliding_window", 128)],
    eps: ("rms_norm_eps", 1e-5),
    activation: (&[], Activation::Silu),
    rope: Some(RopeDefaults::theta(150_000.0)),
    ..Spec::LLAMA
};

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    let windows = common.windows(fields, Windows::EvenLayers)?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(true);
    let (count, top_k) = experts::counts(fields, ["num_local_experts", "num_experts_per_tok"])?;
    let limit = positive(fields, "swiglu_limit")?.unwrap_or(7.0) as f32;
    let (hidden, width) = (common.hidden_size, common.intermediate_size);
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer).biased(bias, bias);
        attention.window = windows[layer];
        attention.sinks = Some(format!("{}.sinks", attention.name));
        let module = common.at(layer, "mlp");
        let part = |name: &str, own: &str, rows: usize, expert: usize, pick: Pick| Part {
            bare: true,
            own: Some((format!("{module}.experts.{expert}.{own}"), Pick::all(rows))),
            ..Part::picked(
                format!("{module}.experts.{name}"),
                rows,
                Pick { transposed: true, matrix: Some((expert, count)), ..pick },
            )
        };
        let network = |expert: usize| -> Mlp {
            let half =
                |own: &str, first: usize| part("gate_up_proj", own, width, expert, Pick::runs(2 * width, first, 1, 2));
            let down = part("down_proj", "down_proj", hidden, expert, Pick::all(hidden));
            let mlp = common.mlp_of([half("gate_proj", 0), half("up_proj", 1)], down, width).biased(true);
            Mlp { activation: Activation::ClampedSwiglu { limit }, ..mlp }
        };
        let routing = experts::routing(Scores::Logits, top_k);
        let networks = (0..count).map(network).collect();
        let mut mixture = experts::mixture(&common, format!("{module}.router"), routing, networks, None);
        mixture.router.bias = true;
        common.layer(layer, attention, Mixer::Experts(mixture))
    }))
}
