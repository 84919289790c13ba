//! GPT-J and CodeGen: attention and a feed-forward network without a gate read the same layer norm. The first `rotary_dim` elements
//! of a head are rotated in pairs of neighbours. Only the feed-forward network and the head have biases.

use super::{Attention, Common, Decoder, Family, Fields, LoadError, Packing, Part, Pick, Role};
use super::{RopeDefaults, Spec, gpt2};
use crate::decoder::Linear;

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["GPTJForCausalLM"],
        model_types: &["gptj"],
        positions: (&["n_positions", "n_ctx"], Some(2048)),
        declare: |fields, max_positions| declare(fields, max_positions, gptj),
        largest: "EleutherAI/gpt-j-6b",
        pickled: true,
        ..Family::BASE
    },
    Family {
        architectures: &["CodeGenForCausalLM"],
        model_types: &["codegen"],
        positions: (&["n_positions", "n_ctx"], Some(2048)),
        declare: |fields, max_positions| declare(fields, max_positions, codegen),
        largest: "Salesforce/codegen-16B-mono",
        pickled: true,
        ..Family::BASE
    },
];

const SPEC: Spec = Spec {
    tied: false,
    rope: Some(RopeDefaults { dims: Some(("rotary_dim", 64)), interleaved: true, ..RopeDefaults::LLAMA }),
    head_bias: true,
    ..gpt2::SPEC
};

/// CodeGen was trained on this number of devices, of which each has its own rows of `qkv_proj`.
const PARTITIONS: usize = 4;

fn declare(
    fields: &Fields<'_>,
    max_positions: usize,
    attention: fn(&Fields<'_>, &Common, usize) -> Result<Attention, LoadError>,
) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, SPEC)?;
    common.try_decoder(|layer| {
        let mlp = common.plain(common.at(layer, "mlp"), ["fc_in", "fc_out"]).biased(true);
        Ok(common.layer_with(layer, ["ln_1"; 2], attention(fields, &common, layer)?, mlp).in_parallel())
    })
}

fn gptj(_: &Fields<'_>, common: &Common, layer: usize) -> Result<Attention, LoadError> {
    let packing = Packing::Separate(["q_proj", "k_proj", "v_proj"]);
    Ok(common.attention_of(common.at(layer, "attn"), packing, "out_proj"))
}

/// `qkv_proj` has for each partition the rows of its queries, of its values, of its keys.
fn codegen(fields: &Fields<'_>, common: &Common, layer: usize) -> Result<Attention, LoadError> {
    if !common.heads.num_heads.is_multiple_of(PARTITIONS) {
        return Err(fields.wrong("n_head", format!("a multiple of {PARTITIONS}, the partitions of `qkv_proj`")));
    }
    let name = common.at(layer, "attn");
    let mut attention = common.attention_of(name.clone(), Packing::Rows("qkv_proj"), "out_proj");
    let (rows, run) = (common.heads.query_width(), common.heads.query_width() / PARTITIONS);
    let part =
        |block: usize| Part::picked(format!("{name}.qkv_proj"), rows, Pick::runs(3 * rows, block * run, run, 3 * run));
    attention.qkv = Linear::new(common.hidden_size, Role::Column, [part(0), part(2), part(1)]);
    Ok(attention)
}
