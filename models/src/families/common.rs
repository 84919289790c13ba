//! What most families share: keys of `config.json`, and the parts of Llama's layers with their usual tensor names.
//!
//! A family calls [`Common::read`], then [`Common::decoder`] with a function that builds one layer: [`Common::attention`] and
//! [`Common::mlp`] return the parts of Llama, the family changes the fields that differ, and [`Common::layer`] joins them.

use super::rope;
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::decoder::{
    Activation, Attention, Branch, Decoder, Form, Heads, Layer, Linear, Mixer, Mlp, Norm, Part, Role, Rope,
};

/// Greatest accepted sizes: larger ones mean a broken file. Products of these stay far from overflow.
const MAX_VOCAB: u64 = 1 << 24;
const MAX_WIDTH: u64 = 1 << 20;
const MAX_LAYERS: u64 = 1 << 12;
const MAX_HEADS: u64 = 1 << 12;
const MAX_HEAD_DIM: u64 = 1 << 12;
const MAX_POSITIONS: u64 = 1 << 31;

/// Defaults of transformers for absent keys.
const DEFAULT_SLIDING_WINDOW: usize = 4096;
const DEFAULT_MAX_WINDOW_LAYERS: u64 = 28;
const DEFAULT_RMS_NORM_EPS: f64 = 1e-6;

pub(super) struct Common {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_layers: usize,
    heads: Heads,
    norm_eps: f32,
    rope: Rope,
    tied: bool,
}

/// Layers with a sliding window if `layer_types` is absent.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Windows {
    /// None.
    Never,
    /// All, unless `sliding_window` is `null`.
    Always,
    /// If `use_sliding_window` is set, the layers from `max_window_layers` on.
    FromLayer,
}

impl Common {
    /// Reads the shared keys. `default_head_dim` replaces an absent `head_dim`; `None`: `hidden_size / num_attention_heads`.
    pub fn read(
        fields: &Fields<'_>,
        max_position_embeddings: usize,
        default_head_dim: Option<usize>,
    ) -> Result<Common, LoadError> {
        // `swish` is an older name of the same function.
        if !matches!(fields.string("hidden_act")?, None | Some("silu" | "swish")) {
            return Err(fields.wrong("hidden_act", "\"silu\""));
        }
        let hidden_size = size(fields, "hidden_size", MAX_WIDTH)?;
        let num_heads = size(fields, "num_attention_heads", MAX_HEADS)?;
        let num_kv_heads = optional_size(fields, "num_key_value_heads", MAX_HEADS)?.unwrap_or(num_heads);
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(fields.wrong("num_key_value_heads", format!("a divisor of `num_attention_heads`, {num_heads}")));
        }
        let head_dim = head_dim(fields, default_head_dim, hidden_size, num_heads)?;
        Ok(Common {
            vocab_size: size(fields, "vocab_size", MAX_VOCAB)?,
            hidden_size,
            intermediate_size: size(fields, "intermediate_size", MAX_WIDTH)?,
            num_layers: size(fields, "num_hidden_layers", MAX_LAYERS)?,
            heads: Heads { num_heads, num_kv_heads, head_dim },
            norm_eps: positive(fields, "rms_norm_eps")?.unwrap_or(DEFAULT_RMS_NORM_EPS) as f32,
            rope: rope::read(fields, max_position_embeddings)?,
            tied: fields.boolean("tie_word_embeddings")?.unwrap_or(false),
        })
    }

    /// The window of each layer: according to `layer_types`, or to `rule` if that key is absent.
    pub fn windows(&self, fields: &Fields<'_>, rule: Windows) -> Result<Vec<Option<usize>>, LoadError> {
        let windowed = match rule {
            Windows::Never => false,
            Windows::Always => true,
            Windows::FromLayer => fields.boolean("use_sliding_window")?.unwrap_or(false),
        };
        // `null` disables the window; an absent key means the default.
        let window = match optional_size(fields, "sliding_window", MAX_POSITIONS) {
            _ if !windowed => None,
            Ok(None) if fields.is_absent("sliding_window") => Some(DEFAULT_SLIDING_WINDOW),
            stated => stated?,
        };
        if let Some(sliding) = layer_types(fields, self.num_layers)? {
            if window.is_none() && sliding.contains(&true) {
                let expected = "\"full_attention\" for every layer, because no sliding window is enabled";
                return Err(fields.wrong("layer_types", expected));
            }
            return Ok(sliding.iter().map(|sliding| window.filter(|_| *sliding)).collect());
        }
        let first = match rule {
            Windows::Never | Windows::Always => 0,
            Windows::FromLayer => {
                fields.integer("max_window_layers", 0..=MAX_LAYERS)?.unwrap_or(DEFAULT_MAX_WINDOW_LAYERS) as usize
            }
        };
        Ok((0..self.num_layers).map(|layer| window.filter(|_| layer >= first)).collect())
    }

    /// The decoder whose layers `layer` builds, given their numbers.
    pub fn decoder(&self, layer: impl FnMut(usize) -> Layer) -> Decoder {
        let vocabulary = |name: &str| Linear {
            adapters: false,
            ..linear(self.hidden_size, Role::Column, [(name.to_string(), self.vocab_size)])
        };
        Decoder {
            embedding: vocabulary("model.embed_tokens"),
            layers: (0..self.num_layers).map(layer).collect(),
            final_norm: self.norm("model.norm.weight".to_string(), self.hidden_size),
            head: (!self.tied).then(|| vocabulary("lm_head")),
        }
    }

    /// A layer of attention and a feed-forward network, each with a norm of its input.
    pub fn layer(&self, layer: usize, attention: Attention, mlp: Mlp) -> Layer {
        let norm = |name: &str| self.norm(format!("model.layers.{layer}.{name}.weight"), self.hidden_size);
        Layer {
            branches: vec![
                Branch { norm: norm("input_layernorm"), mixer: Mixer::Attention(attention) },
                Branch { norm: norm("post_attention_layernorm"), mixer: Mixer::Mlp(mlp) },
            ],
        }
    }

    /// Attention over the whole context, without biases or head norms.
    pub fn attention(&self, layer: usize) -> Attention {
        let (name, heads) = (format!("model.layers.{layer}.self_attn"), self.heads);
        let (queries, keys) = (heads.query_width(), heads.num_kv_heads * heads.head_dim);
        let part = |projection: &str, rows| (format!("{name}.{projection}"), rows);
        Attention {
            qkv: linear(
                self.hidden_size,
                Role::Column,
                [part("q_proj", queries), part("k_proj", keys), part("v_proj", keys)],
            ),
            output: linear(queries, Role::Row, [part("o_proj", self.hidden_size)]),
            heads,
            query_norm: None,
            key_norm: None,
            rope: self.rope.clone(),
            window: None,
            scale: 1.0 / (heads.head_dim as f32).sqrt(),
            name,
        }
    }

    /// A feed-forward network gated by SiLU, without biases.
    pub fn mlp(&self, layer: usize) -> Mlp {
        let part = |projection: &str, rows| (format!("model.layers.{layer}.mlp.{projection}"), rows);
        let width = self.intermediate_size;
        Mlp {
            gate_up: linear(self.hidden_size, Role::Column, [part("gate_proj", width), part("up_proj", width)]),
            activation: Activation::Silu,
            down: linear(width, Role::Row, [part("down_proj", self.hidden_size)]),
        }
    }

    /// A norm of query or key heads.
    pub fn head_norm(&self, layer: usize, name: &str) -> Norm {
        self.norm(format!("model.layers.{layer}.{name}.weight"), self.heads.head_dim)
    }

    fn norm(&self, name: String, width: usize) -> Norm {
        Norm { name, width, eps: self.norm_eps }
    }
}

fn linear<const N: usize>(inputs: usize, role: Role, parts: [(String, usize); N]) -> Linear {
    let parts = parts.into_iter().map(|(name, rows)| Part { name, rows }).collect();
    Linear { parts, inputs, bias: false, form: Form::Dense, role, adapters: true }
}

/// Greatest number of tokens in a context, according to the checkpoint.
pub(super) fn max_position_embeddings(fields: &Fields<'_>) -> Result<usize, LoadError> {
    size(fields, "max_position_embeddings", MAX_POSITIONS)
}

fn size(fields: &Fields<'_>, key: &str, greatest: u64) -> Result<usize, LoadError> {
    optional_size(fields, key, greatest)?.ok_or_else(|| fields.wrong(key, format!("an integer, 1 to {greatest}")))
}

fn optional_size(fields: &Fields<'_>, key: &str, greatest: u64) -> Result<Option<usize>, LoadError> {
    Ok(fields.integer(key, 1..=greatest)?.map(|value| value as usize))
}

fn positive(fields: &Fields<'_>, key: &str) -> Result<Option<f64>, LoadError> {
    fields.float(key, "a number above 0", |value| value > 0.0)
}

fn head_dim(
    fields: &Fields<'_>,
    default: Option<usize>,
    hidden_size: usize,
    num_heads: usize,
) -> Result<usize, LoadError> {
    let stated = optional_size(fields, "head_dim", MAX_HEAD_DIM)?;
    let head_dim = match stated.or(default) {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            let expected = format!("a multiple of `num_attention_heads`, {num_heads}, or a `head_dim`");
            return Err(fields.wrong("hidden_size", expected));
        }
    };
    if head_dim % 2 == 1 {
        let expected = format!("an even number of elements per head for the rotary embedding; {head_dim} is odd");
        return Err(fields.wrong(if stated.is_some() { "head_dim" } else { "hidden_size" }, expected));
    }
    Ok(head_dim)
}

/// Whether each layer has a sliding window, by `layer_types`.
fn layer_types(fields: &Fields<'_>, num_layers: usize) -> Result<Option<Vec<bool>>, LoadError> {
    let expected = format!("a list of {num_layers} of \"full_attention\" and \"sliding_attention\"");
    fields.read("layer_types", &expected, |value| {
        let kinds = value.as_array()?.iter().map(|kind| match kind.as_str()? {
            "full_attention" => Some(false),
            "sliding_attention" => Some(true),
            _ => None,
        });
        kinds.collect::<Option<Vec<_>>>().filter(|kinds| kinds.len() == num_layers)
    })
}
