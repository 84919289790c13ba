//! What is subtracted from the keys of an 8-bit cache.
//!
//! The bias of a key projection can be a hundred times larger than what depends on the token, as in Qwen2: then it takes the whole range
//! of an 8-bit number. A vector that is the same for all positions can be taken out of the keys of a layer without a change of its
//! output: each score of a query q becomes smaller by the same q·c, and softmax does not depend on that. After the rotary embedding the
//! bias depends on the position, but large biases lie in the pairs that turn slowest ("Massive Values in Self-Attention Modules", Jin
//! et al., 2025), so most of it is in the mean over the positions of a usual context:
//!
//! ```text
//! key at p = R(p) (W x + b)        c = mean of R(p) b over p < POSITIONS        stored: key − c
//! ```

use std::sync::Arc;

use attention_kernels::Dtype;
use device::{Buffer, Device};

use super::linear::{Linear, Loader};
use super::pass::numbers_on_host;
use crate::LoadError;
use crate::decoder::{Attention, Decoder, Rope};

/// Number of positions of the mean. A constant, so that replicas with other limits can exchange blocks.
const POSITIONS: f64 = 8192.0;

/// Whether a layer's output stays what it is if all keys change by the same vector, and whether the bias is a part of its keys.
fn is_exact(decoder: &Decoder, layer: &Attention) -> bool {
    let score_counts = layer.soft_cap.is_some() || layer.sinks.is_some();
    let is_changed =
        layer.clip.is_some() || layer.key_norm.is_some() || layer.beside.is_some() || layer.latent.is_some();
    let is_shared = decoder.attention().any(|other| other.shares.is_some());
    layer.qkv.bias && !score_counts && !is_changed && !is_shared && !layer.both_sides
}

/// Elements of a layer's offset; `None` if it has none.
pub(super) fn len(decoder: &Decoder, layer: &Attention) -> Option<usize> {
    is_exact(decoder, layer).then_some(layer.heads.num_kv_heads * layer.heads.head_dim)
}

/// Cosine and sine of an angle's multiples 0, 1, …, summed up and divided by their number.
fn mean_rotation(angle: f64) -> (f64, f64) {
    if angle == 0.0 {
        return (1.0, 0.0);
    }
    let length = (POSITIONS * angle / 2.0).sin() / (POSITIONS * (angle / 2.0).sin());
    let middle = (POSITIONS - 1.0) * angle / 2.0;
    (length * middle.cos(), length * middle.sin())
}

/// Rotates the bias of each head to the mean of all positions.
fn rotate(rope: &Rope, bias: &mut [f32], head_dim: usize) {
    let (half, factor) = (rope.dims / 2, f64::from(rope.attention_factor()));
    for (i, angle) in rope.frequencies().into_iter().enumerate() {
        let (cos, sin) = mean_rotation(f64::from(angle));
        let (low, high) = if rope.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
        for head in bias.chunks_exact_mut(head_dim) {
            let (a, b) = (f64::from(head[low]) * factor, f64::from(head[high]) * factor);
            (head[low], head[high]) = ((a * cos - b * sin) as f32, (b * cos + a * sin) as f32);
        }
    }
}

impl Loader<'_> {
    /// Uploads what a layer's keys of an 8-bit cache have less, float32 `[num_kv_heads, head_dim]`; `None` if that is nothing. `linears`
    /// are those of the decoder, loaded to a device that computes in `dtype`.
    pub fn key_offset(
        &mut self,
        decoder: &Decoder,
        layer: &Attention,
        linears: &[Arc<Linear>],
        (device, dtype): (&dyn Device, Dtype),
    ) -> Result<Option<Buffer>, LoadError> {
        let number = decoder.linears().position(|linear| std::ptr::eq(linear, &layer.qkv));
        let bias = number.and_then(|number| linears[number].bias.as_ref());
        let Some((bias, keys)) = bias.zip(len(decoder, layer)) else { return Ok(None) };
        let queries = layer.heads.query_width();
        let mut offset = numbers_on_host(device, bias, dtype, queries + keys)?[queries..].to_vec();
        if let Some(rope) = &layer.rope {
            rotate(rope, &mut offset, layer.heads.head_dim);
        }
        self.numbers(&offset).map(Some)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::decoder::{Mixer, RopeScaling};
    use crate::{ModelConfig, ModelFiles};

    /// Two layers with biases of all projections.
    const BIASED: &[u8] = br#"{"architectures": ["Qwen2ForCausalLM"], "vocab_size": 32, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6}"#;

    /// The decoder with a change of its first layer, and whether that layer has an offset.
    fn has_offset(change: impl FnOnce(&mut Attention, &mut Attention)) -> bool {
        let files = ModelFiles::Embedded { name: "biased", files: &[("config.json", BIASED)] };
        let mut decoder = ModelConfig::load(&files).unwrap().decoder;
        let mut layers = decoder.layers.iter_mut().flat_map(|layer| &mut layer.branches).filter_map(|branch| {
            match &mut branch.mixer {
                Mixer::Attention(attention) => Some(attention),
                _ => None,
            }
        });
        let (first, second) = (layers.next().unwrap(), layers.next().unwrap());
        change(first, second);
        let layer = decoder.attention().next().unwrap();
        let len = len(&decoder, layer);
        assert!(len.is_none_or(|len| len == 2 * 4));
        len.is_some()
    }

    /// A constant in all keys changes the output of layers whose scores are compared with something else, and keys that are normed,
    /// clipped or made of something else do not have the bias in them.
    #[test]
    fn only_layers_whose_output_stays_have_an_offset() {
        assert!(has_offset(|_, _| {}));
        assert!(has_offset(|layer, _| layer.rope = None));
        assert!(has_offset(|layer, _| layer.window = Some(4)));
        assert!(!has_offset(|layer, _| layer.qkv.bias = false));
        assert!(!has_offset(|layer, _| layer.sinks = Some("sinks".to_string())));
        assert!(!has_offset(|layer, _| layer.soft_cap = Some(50.0)));
        let norm = |layer: &mut Attention| {
            layer.key_norm = Some(crate::decoder::Norm {
                kind: crate::decoder::NormKind::Rms,
                weight: vec!["norm".to_string()],
                bias: None,
                shape: vec![4],
                part: None,
                width: 4,
                eps: 1e-6,
                plus_one: false,
                factor: 1.0,
            });
        };
        assert!(!has_offset(|layer, _| norm(layer)));
        assert!(!has_offset(|layer, _| layer.clip = Some(8.0)));
        assert!(!has_offset(|layer, _| layer.both_sides = true));
        assert!(!has_offset(|layer, _| layer.beside = Some(layer.qkv.clone())));
        // Another layer reads its keys.
        assert!(!has_offset(|_, other| other.shares = Some(0)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20))]

        /// The offset is the mean of the bias as the positions rotate it; what is not rotated stays.
        #[test]
        fn an_offset_is_the_mean_of_the_rotated_bias(
            bias in prop::collection::vec(-9.0_f32..9.0, 24),
            theta in 10.0_f64..1e6,
            interleaved: bool,
        ) {
            let rope = Rope { theta, dims: 8, interleaved, scaling: RopeScaling::None };
            let mut offset = bias.clone();
            rotate(&rope, &mut offset, 12);
            let mut sums = [0.0_f64; 24];
            for position in 0..POSITIONS as usize {
                for (at, sum) in sums.iter_mut().enumerate() {
                    let (head, i) = (at / 12 * 12, at % 12);
                    let (pair, other, sign) = match i {
                        8.. => {
                            *sum += f64::from(bias[at]);
                            continue;
                        }
                        _ if interleaved => (i / 2, i ^ 1, if i % 2 == 0 { -1.0 } else { 1.0 }),
                        _ => (i % 4, (i + 4) % 8, if i < 4 { -1.0 } else { 1.0 }),
                    };
                    let angle = position as f64 * f64::from(rope.frequencies()[pair]);
                    *sum += f64::from(bias[at]) * angle.cos() + sign * f64::from(bias[head + other]) * angle.sin();
                }
            }
            for (got, sum) in offset.iter().zip(sums) {
                prop_assert!((f64::from(*got) - sum / POSITIONS).abs() < 1e-4, "{} {}", got, sum / POSITIONS);
            }
        }
    }
}
