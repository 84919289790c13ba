//! DeepSeek V3.2 and GLM-5: the layers of DeepSeek V3, in which an indexer chooses the tokens that a query attends to.

use super::deepseek::{self, Generation};
use super::sizes::{self, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS};
use super::{Common, Decoder, Family, Fields, Layer, LoadError, Mixer, Norm, NormKind, Part, Pick, Role};
use crate::decoder::{Attention, Choice, Indexer, Linear};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["GlmMoeDsaForCausalLM"],
    model_types: &["glm_moe_dsa"],
    declare: |fields, max_positions| {
        let (common, layer) = deepseek::layers(fields, max_positions, GLM)?;
        declare(fields, &common, layer, GLM5)
    },
    largest: "zai-org/GLM-5 (744B)",
    ..Family::BASE
}];

const GLM: Generation =
    Generation { eps: 1e-5, first_sparse: 3, shared: 1, routing: |fields| deepseek::routing_v3(fields, [1, 1]) };

/// Defaults of indexers.
pub(super) struct Defaults {
    heads: usize,
    /// Whether neighbours are rotated.
    interleaved: bool,
}

pub(super) const V32: Defaults = Defaults { heads: 64, interleaved: false };
const GLM5: Defaults = Defaults { heads: 32, interleaved: true };

/// Sizes of the indexers of a model.
struct Sizes {
    heads: usize,
    dim: usize,
    top_k: usize,
    interleaved: bool,
}

/// The decoder of these layers, with indexers.
pub(super) fn declare(
    fields: &Fields<'_>,
    common: &Common,
    layer: impl Fn(usize) -> Layer,
    defaults: Defaults,
) -> Result<Decoder, LoadError> {
    Ok(common.decoder(layers(fields, common, layer, defaults)?))
}

/// What builds a layer with an indexer, given what builds one without. A layer behind the last one, which predicts a further token, has an
/// indexer of its own.
pub(super) fn layers(
    fields: &Fields<'_>,
    common: &Common,
    layer: impl Fn(usize) -> Layer,
    defaults: Defaults,
) -> Result<impl Fn(usize) -> Layer, LoadError> {
    let sizes = Sizes {
        heads: sizes::optional(fields, "index_n_heads", MAX_HEADS)?.unwrap_or(defaults.heads),
        dim: sizes::optional(fields, "index_head_dim", MAX_HEAD_DIM)?.unwrap_or(128),
        top_k: sizes::optional(fields, "index_topk", MAX_POSITIONS)?.unwrap_or(2048),
        interleaved: fields.boolean("indexer_rope_interleave")?.unwrap_or(defaults.interleaved),
    };
    if fields.get("q_lora_rank").is_none() {
        return Err(fields.wrong("q_lora_rank", "a size, because indexers read the narrow queries"));
    }
    let rope_dim = common.rope.as_ref().map_or(0, |rope| rope.dims);
    if sizes.dim < rope_dim {
        return Err(fields.wrong("index_head_dim", format!("at least `qk_rope_head_dim`, {rope_dim}")));
    }
    let kinds = [("indexed_attention", ()), ("deepseek_sparse_attention", ())];
    sizes::kinds(fields, "layer_types", common.num_layers, &kinds)?;
    let (own, common) = (own(fields, common.num_layers)?, common.clone());
    Ok(move |number| {
        let mut layer = layer(number);
        for branch in &mut layer.branches {
            if let Mixer::Attention(attention) = &mut branch.mixer {
                choose(&common, attention, &sizes, own.get(number).copied().unwrap_or(true));
            }
        }
        layer
    })
}

/// Lets a layer attend to the tokens that its own indexer chooses, or the one before.
fn choose(common: &Common, attention: &mut Attention, sizes: &Sizes, is_own: bool) {
    let &Sizes { heads, dim, top_k, interleaved } = sizes;
    let name = attention.name.clone();
    let at = |module: &str| format!("{name}.indexer.{module}");
    attention.heads.head_dim += dim;
    let Some(latent) = &mut attention.latent else { return };
    let rank = latent.query_down.as_ref().map_or(0, |(down, _)| down.rows());
    if !is_own {
        latent.choice = Some(Choice::Before { top_k, dim });
        // Index keys that nobody reads: copies of a row.
        let module = format!("{name}.kv_a_proj_with_mqa");
        let total = latent.rank + latent.rope_dim;
        attention.qkv.parts.push(Part::picked(module, dim, Pick::runs(total, 0, 1, 0)));
        return;
    }
    let linear =
        |inputs: usize, module: &str, rows: usize| Linear::new(inputs, Role::Replicated, [Part::new(at(module), rows)]);
    let norm =
        Norm { kind: NormKind::Layer, bias: Some(at("k_norm.bias")), eps: 1e-6, ..common.norm_of(at("k_norm"), dim) };
    latent.choice = Some(Choice::Own(Indexer {
        query: linear(rank, "wq_b", heads * dim),
        weights: linear(common.hidden_size, "weights_proj", heads),
        norm,
        heads,
        dim,
        top_k,
        interleaved,
    }));
    attention.qkv.parts.push(Part::new(at("wk"), dim));
}

/// Which layers have an indexer of their own.
fn own(fields: &Fields<'_>, layers: usize) -> Result<Vec<bool>, LoadError> {
    let (list, pattern, frequency) = ("indexer_types", "index_topk_pattern", "index_topk_freq");
    let expected = format!("a text of {layers} letters: F, of a layer with an indexer, and S");
    let spelled = fields.read(pattern, &expected, |value| {
        let is_own = |letter: char| match letter {
            'F' => Some(true),
            'S' => Some(false),
            _ => None,
        };
        let own = value.as_str()?.chars().map(is_own).collect::<Option<Vec<_>>>()?;
        Some(own).filter(|own| own.len() == layers)
    })?;
    let each = sizes::optional(fields, frequency, MAX_LAYERS)?.unwrap_or(1);
    let offset = fields.integer("index_skip_topk_offset", 0..=MAX_LAYERS)?.unwrap_or(0) as usize;
    let (key, own) = match (sizes::kinds(fields, list, layers, &[("full", true), ("shared", false)])?, spelled) {
        (Some(listed), _) => (list, listed),
        (None, Some(spelled)) => (pattern, spelled),
        // `max(layer - offset + 1, 0)` is a multiple.
        (None, None) => {
            (frequency, (0..layers).map(|layer| (layer + 1).saturating_sub(offset).is_multiple_of(each)).collect())
        }
    };
    match own.first() {
        Some(true) => Ok(own),
        _ => Err(fields.wrong(key, "an indexer in the first layer")),
    }
}
