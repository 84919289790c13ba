//! Qwen3: the layers of Llama with RMS norms of query and key heads before the rotary embedding, a default head size of 128, and
//! the windows of Qwen2.

use super::{Common, Decoder, Family, Fields, LoadError, Windows};

pub(super) const FAMILY: Family = Family { class: "Qwen3ForCausalLM", model_type: "qwen3", declare };

const DEFAULT_HEAD_DIM: usize = 128;

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let common = Common::read(fields, max_positions, Some(DEFAULT_HEAD_DIM))?;
    let bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let windows = common.windows(fields, Windows::FromLayer)?;
    Ok(common.decoder(|layer| {
        let mut attention = common.attention(layer);
        (attention.qkv.bias, attention.output.bias) = (bias, bias);
        attention.query_norm = Some(common.head_norm(layer, "self_attn.q_norm"));
        attention.key_norm = Some(common.head_norm(layer, "self_attn.k_norm"));
        attention.window = windows[layer];
        common.layer(layer, attention, common.mlp(layer))
    }))
}
