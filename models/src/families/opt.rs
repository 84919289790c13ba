//! OPT: learned position embeddings, layer norms, ReLU without a gate. The norms come before the branches, in OPT-350m after the
//! sums, whose embedding is also narrower than its layers.

use super::sizes::{self, MAX_WIDTH};
use super::{Activation, Common, Decoder, Family, Fields, Layer, LoadError, Packing, Part, Role, Spec};
use crate::decoder::Linear;

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["OPTForCausalLM"],
    model_types: &["opt"],
    declare,
    largest: "facebook/opt-66b",
    pickled: true,
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    intermediate_size: "ffn_dim",
    eps: ("", 1e-5),
    activation: (&["activation_function"], Activation::Relu),
    tied: true,
    rope: None,
    root: "model.decoder",
    final_norm: "final_layer_norm",
    ..Spec::LAYER_NORM
};

/// Row of position 0 in the table of positions.
const OFFSET: usize = 2;

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let affine = fields.boolean("layer_norm_elementwise_affine")?.unwrap_or(true);
    let spec = Spec { norm_weight: affine, norm_bias: affine, ..SPEC };
    let common = Common::read(fields, max_positions, spec)?;
    let bias = fields.boolean("enable_bias")?.unwrap_or(true);
    let before = fields.boolean("do_layer_norm_before")?.unwrap_or(true);
    let final_norm = before && !fields.boolean("_remove_final_layer_norm")?.unwrap_or(false);
    let mut decoder = common.decoder(|layer| {
        let packing = Packing::Separate(["q_proj", "k_proj", "v_proj"]);
        let name = common.at(layer, "self_attn");
        let attention = common.attention_of(name, packing, "out_proj").biased(bias, bias);
        let mlp = common.plain(common.at(layer, ""), ["fc1", "fc2"]).biased(bias);
        let mut declared: Layer =
            common.layer_with(layer, ["self_attn_layer_norm", "final_layer_norm"], attention, mlp);
        if !before {
            declared.branches.iter_mut().for_each(|branch| branch.stream_norm = branch.norm.take());
        }
        declared
    });
    decoder.final_norm = decoder.final_norm.filter(|_| final_norm);
    let replicated = |inputs: usize, name: &str, rows: usize| Linear {
        adapters: false,
        ..Linear::new(inputs, Role::Replicated, [Part::new(format!("model.decoder.{name}"), rows)])
    };
    let hidden = common.hidden_size;
    decoder.embedding.positions = Some(common.positions("embed_positions", max_positions + OFFSET, OFFSET));
    let width = sizes::optional(fields, "word_embed_proj_dim", MAX_WIDTH)?.unwrap_or(hidden);
    if width != hidden {
        decoder.embedding.tokens.inputs = width;
        decoder.embedding.projection = Some(replicated(width, "project_in", hidden));
        decoder.head.projection = Some(replicated(hidden, "project_out", width));
        if let Some(head) = &mut decoder.head.linear {
            head.inputs = width;
        }
    }
    Ok(decoder)
}
