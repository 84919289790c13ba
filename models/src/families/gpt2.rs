//! GPT-2 and GPTBigCode (StarCoder 1): learned position embeddings, layer norms, biases everywhere, GELU without a gate.
//!
//! GPT-2 stores its matrices transposed. GPTBigCode does not, and shares one key and value between all heads.

use super::sizes::{self, MAX_WIDTH};
use super::{Activation, Common, Decoder, Family, Fields, LoadError, Packing, Pick, Spec};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["GPT2LMHeadModel"],
        model_types: &["gpt2"],
        positions: (&["n_positions", "n_ctx"], None),
        declare: |fields, max_positions| declare(fields, max_positions, true),
        reference: &["gpt2"],
        largest: "openai-community/gpt2-xl",
        ..Family::BASE
    },
    Family {
        architectures: &["GPTBigCodeForCausalLM"],
        model_types: &["gpt_bigcode"],
        positions: (&["n_positions", "n_ctx"], None),
        declare: |fields, max_positions| declare(fields, max_positions, false),
        largest: "bigcode/starcoder (15B)",
        ..Family::BASE
    },
];

pub(super) const SPEC: Spec = Spec {
    hidden_size: "n_embd",
    intermediate_size: "n_inner",
    num_layers: "n_layer",
    num_heads: "n_head",
    sizes: &[("n_inner", 0)],
    eps: ("layer_norm_epsilon", 1e-5),
    activation: (&["activation_function"], Activation::GeluTanh),
    tied: true,
    rope: None,
    root: "transformer",
    tokens: "wte",
    layers: "h",
    final_norm: "ln_f",
    ..Spec::LAYER_NORM
};

fn declare(fields: &Fields<'_>, max_positions: usize, transposed: bool) -> Result<Decoder, LoadError> {
    let mut common = Common::read(fields, max_positions, SPEC)?;
    let multi_query = !transposed && fields.boolean("multi_query")?.unwrap_or(true);
    if multi_query {
        common.heads.num_kv_heads = 1;
    }
    let packing = match (transposed, multi_query) {
        (true, _) => Packing::Columns("c_attn"),
        (false, true) => Packing::Rows("c_attn"),
        (false, false) => Packing::Groups("c_attn"),
    };
    let unscaled = !fields.boolean("scale_attn_weights")?.unwrap_or(true);
    let by_layer = fields.boolean("scale_attn_by_inverse_layer_idx")?.unwrap_or(false);
    let mut decoder = common.decoder(|layer| {
        let mut attention = common.attention_of(common.at(layer, "attn"), packing, "c_proj").biased(true, true);
        if unscaled {
            attention.scale = 1.0;
        }
        if by_layer {
            attention.scale /= (layer + 1) as f32;
        }
        let mut mlp = common.plain(common.at(layer, "mlp"), ["c_fc", "c_proj"]).biased(true);
        if transposed {
            for linear in [&mut attention.output, &mut mlp.gate_up, &mut mlp.down] {
                linear.parts.iter_mut().for_each(|part| part.pick = Pick { transposed, ..part.pick });
            }
        }
        common.layer_with(layer, ["ln_1", "ln_2"], attention, mlp)
    });
    let rows = sizes::optional(fields, "n_positions", MAX_WIDTH)?.unwrap_or(max_positions);
    decoder.embedding.positions = Some(common.positions("wpe", rows, 0));
    Ok(decoder)
}
