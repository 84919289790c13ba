//! Gemma 4 (text): Gemma 3 with norms of plain weights, and layers of two sizes.
//!
//! Layers without a window have greater heads (`global_head_dim`), rotate the first pairs of a head alone, and may use their keys as
//! values (`attention_k_eq_v`). The last layers may read the keys and values of the last one before them of their type
//! (`num_kv_shared_layers`). Small checkpoints have inputs of each layer per token (`hidden_size_per_layer_input`), the one with
//! experts adds them to a dense network (`enable_moe_block`).

use super::sizes::{self, MAX_HEAD_DIM, MAX_HEADS, MAX_VOCAB, MAX_WIDTH};
use super::{
    Activation, Attention, Branch, Common, Decoder, Family, Fields, Heads, Layer, Linear, LoadError, Mixer, Norm,
    Packing, Part, PerLayer, PerLayerInputs, Pick, Role, RopeDefaults, Routing, Scores, Spec, Windows, experts, rope,
};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"],
    model_types: &["gemma4_text", "gemma4"],
    positions: (&["max_position_embeddings"], Some(131_072)),
    declare,
    largest: "google/gemma-4-31b-it",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    sizes: &[
        ("head_dim", 256),
        ("vocab_size", 262_144),
        ("hidden_size", 2304),
        ("intermediate_size", 9216),
        ("num_hidden_layers", 30),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("sliding_window", 512),
    ],
    activation: (&["hidden_activation"], Activation::GeluTanh),
    tied: true,
    rope: None,
    ..Spec::LLAMA
};

/// What the checkpoints differ in, beside sizes.
struct Options {
    keys_are_values: bool,
    bias: bool,
    /// Number of the first layer that reads the keys and values of another.
    first_shared: usize,
    double_wide: bool,
    /// Number of experts, number chosen for a token, and their width.
    experts: Option<(usize, usize, usize)>,
    /// Width of the inputs of a layer.
    per_layer: usize,
}

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let sliding = Common::read(fields, max_positions, SPEC)?;
    let flag = |key: &str| Ok::<_, LoadError>(fields.boolean(key)?.unwrap_or(false));
    let shared = fields.integer("num_kv_shared_layers", 0..=sliding.num_layers as u64 - 1)?.unwrap_or(0) as usize;
    let options = Options {
        keys_are_values: flag("attention_k_eq_v")?,
        bias: flag("attention_bias")?,
        first_shared: sliding.num_layers - shared,
        double_wide: flag("use_double_wide_mlp")?,
        experts: match flag("enable_moe_block")? {
            false => None,
            true => {
                let (count, top_k) = experts::counts(fields, ["num_experts", "top_k_experts"])?;
                Some((count, top_k, sizes::required(fields, "moe_intermediate_size", MAX_WIDTH)?))
            }
        },
        per_layer: fields
            .integer("hidden_size_per_layer_input", 0..=MAX_WIDTH)?
            .unwrap_or_else(|| if fields.is_absent("hidden_size_per_layer_input") { 256 } else { 0 })
            as usize,
    };
    let full_heads = full_heads(fields, sliding.heads, options.keys_are_values)?;
    let of_type = |kind: &str, head_dim: usize, theta: f64, partial: f64| {
        let defaults = RopeDefaults { partial: ("partial_rotary_factor", partial), ..RopeDefaults::theta(theta) };
        rope::read_type(fields, kind, max_positions, head_dim, defaults)
    };
    let head_dim = sliding.heads.head_dim;
    let local = of_type("sliding_attention", head_dim, 1e4, 1.0)?;
    let global = of_type("full_attention", full_heads.head_dim, 1e6, 0.25)?;
    let global = global.unwrap_or_else(|| rope::proportional(1e6, full_heads.head_dim, 0.25, 1.0));
    let plain = super::Rope { theta: 1e4, dims: head_dim, interleaved: false, scaling: super::RopeScaling::None };
    let full = Common { heads: full_heads, rope: Some(global), ..sliding.clone() };
    let sliding = Common { rope: Some(local.unwrap_or(plain)), ..sliding };

    let mut windows = sliding.windows(fields, Windows::AllButEach(6))?;
    windows[sliding.num_layers - 1] = None;
    let donors = donors(fields, &windows, options.first_shared)?;
    let mut decoder = sliding.decoder(|layer| {
        let common = if windows[layer].is_some() { &sliding } else { &full };
        declared(common, &options, layer, windows[layer], donors[layer])
    });
    let root = (sliding.hidden_size as f32).sqrt();
    decoder.embedding.scale = root;
    decoder.head.soft_cap = sizes::positive(fields, "final_logit_softcapping")?.map(|cap| cap as f32);
    if options.per_layer > 0 {
        let (key, vocab) = per_layer_vocab(fields)?;
        if vocab < sliding.vocab_size {
            return Err(fields.wrong(key, format!("at least `vocab_size`, {}", sliding.vocab_size)));
        }
        decoder.embedding.per_layer = Some(per_layer_inputs(&sliding, options.per_layer, vocab));
    }
    Ok(decoder)
}

/// The layer whose keys and values each layer reads, from the first that has none of its own: the last of its type before that.
pub(super) fn donors(
    fields: &Fields<'_>,
    windows: &[Option<usize>],
    first_shared: usize,
) -> Result<Vec<Option<usize>>, LoadError> {
    let of = |layer: usize| {
        let donor = (0..first_shared).rev().find(|other| windows[*other] == windows[layer]);
        match donor.filter(|_| layer >= first_shared) {
            None if layer >= first_shared => {
                let what = format!("few enough that a layer of the type of layer {layer} has its own keys and values");
                Err(fields.wrong("num_kv_shared_layers", what))
            }
            donor => Ok(donor),
        }
    };
    (0..windows.len()).map(of).collect()
}

/// Heads of the layers without a window.
fn full_heads(fields: &Fields<'_>, heads: Heads, keys_are_values: bool) -> Result<Heads, LoadError> {
    let head_dim = sizes::optional(fields, "global_head_dim", MAX_HEAD_DIM)?.unwrap_or(512);
    let stated = sizes::optional(fields, "num_global_key_value_heads", MAX_HEADS)?;
    let num_kv_heads = stated.filter(|_| keys_are_values).unwrap_or(heads.num_kv_heads);
    if !heads.num_heads.is_multiple_of(num_kv_heads) {
        let expected = format!("a divisor of `num_attention_heads`, {}", heads.num_heads);
        return Err(fields.wrong("num_global_key_value_heads", expected));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(fields.wrong("global_head_dim", "an even number"));
    }
    Ok(Heads { num_kv_heads, head_dim, ..heads })
}

fn declared(common: &Common, options: &Options, layer: usize, window: Option<usize>, shares: Option<usize>) -> Layer {
    let norm = |name: &str| common.norm(common.at(layer, name));
    let branch = |before: &str, mixer: Mixer, after: &str| Branch {
        norm_after: Some(norm(after)),
        ..Branch::new(norm(before), mixer)
    };
    let values = if options.keys_are_values && window.is_none() { "k_proj" } else { "v_proj" };
    let attention = Mixer::Attention(attention(common, layer, (values, options.bias), window, shares));
    let width = common.intermediate_size * if options.double_wide && shares.is_some() { 2 } else { 1 };
    let mlp = common.gated(common.at(layer, "mlp"), ["gate_proj", "up_proj", "down_proj"], width);
    let network = match options.experts {
        None => branch("pre_feedforward_layernorm", mlp.into(), "post_feedforward_layernorm"),
        Some(counts) => {
            let dense = branch("pre_feedforward_layernorm", mlp.into(), "post_feedforward_layernorm_1");
            let mixture = mixture(common, layer, counts);
            let mixture = branch("pre_feedforward_layernorm_2", mixture, "post_feedforward_layernorm_2");
            Branch {
                norm: None,
                ..branch("pre_feedforward_layernorm", Mixer::Sum(vec![dense, mixture]), "post_feedforward_layernorm")
            }
        }
    };
    let mut branches = vec![branch("input_layernorm", attention, "post_attention_layernorm"), network];
    if options.per_layer > 0 {
        let mixer = Mixer::PerLayer(per_layer(common, layer, options.per_layer));
        branches.push(Branch { norm: None, ..branch("input_layernorm", mixer, "post_per_layer_input_norm") });
    }
    Layer { scalar: Some(common.at(layer, "layer_scalar")), ..Layer::new(branches) }
}

/// Attention of a layer with norms of queries, keys and values, a scale of 1, and this name of the projection to values.
pub(super) fn attention(
    common: &Common,
    layer: usize,
    (values, bias): (&'static str, bool),
    window: Option<usize>,
    shares: Option<usize>,
) -> Attention {
    let name = common.at(layer, "self_attn");
    let mut attention = common.attention_of(name.clone(), Packing::Separate(["q_proj", "k_proj", values]), "o_proj");
    attention.scale = 1.0;
    attention.window = window;
    attention.query_norm = Some(common.head_norm(layer, "self_attn.q_norm"));
    if shares.is_some() {
        let queries = Part::new(format!("{name}.q_proj"), common.heads.query_width());
        attention.qkv = Linear::new(common.hidden_size, Role::Column, [queries]);
        attention.shares = shares;
    } else {
        attention.key_norm = Some(common.head_norm(layer, "self_attn.k_norm"));
        attention.value_norm = Some(Norm { weight: Vec::new(), ..common.head_norm(layer, "self_attn.v_norm") });
    }
    attention.biased(bias, bias)
}

fn mixture(common: &Common, layer: usize, (count, top_k, width): (usize, usize, usize)) -> Mixer {
    let at = |name: &str| common.at(layer, name);
    let names = ["experts.gate_up_proj", "experts.down_proj"].map(at);
    let separate = experts::separate(common, &at(""), count, ["gate_proj", "up_proj", "down_proj"], width);
    let networks = experts::stacked(separate, names, false);
    let routing = Routing {
        renormalise: true,
        expert_scale: Some(at("router.per_expert_scale")),
        ..experts::routing(Scores::Softmax, top_k)
    };
    let mut mixture = experts::mixture(common, at("router.proj"), routing, networks, None);
    let factor = 1.0 / (common.hidden_size as f32).sqrt();
    mixture.router_norm = Some(Norm { weight: vec![at("router.scale")], factor, ..common.norm(at("router")) });
    Mixer::Experts(mixture)
}

/// The network of a layer with inputs of its own.
pub(super) fn per_layer(common: &Common, layer: usize, width: usize) -> PerLayer {
    let part = |name: &str, rows: usize| [Part::new(common.at(layer, name), rows)];
    let hidden = common.hidden_size;
    PerLayer {
        gate: Linear::new(hidden, Role::Column, part("per_layer_input_gate", width)),
        activation: common.activation,
        projection: Linear::new(width, Role::Row, part("per_layer_projection", hidden)),
        layer,
    }
}

/// The key of the number of tokens that have inputs of layers, and that number.
pub(super) fn per_layer_vocab(fields: &Fields<'_>) -> Result<(&'static str, usize), LoadError> {
    const VOCAB: &str = "vocab_size_per_layer_input";
    Ok((VOCAB, sizes::optional(fields, VOCAB, MAX_VOCAB)?.unwrap_or(262_144)))
}

/// Inputs of all layers. The first `vocab` tokens have a row in the table; the others have that of token 0.
pub(super) fn per_layer_inputs(common: &Common, width: usize, vocab: usize) -> PerLayerInputs {
    let all = common.num_layers * width;
    let root = &common.spec.root;
    let part = |name: &str, rows: usize| [Part::new(format!("{root}.{name}"), rows)];
    let [table] = part("embed_tokens_per_layer", vocab);
    let missing = common.vocab_size.saturating_sub(vocab);
    let others = Part::picked(table.name.clone(), missing, Pick::runs(vocab, 0, 1, 0));
    let tokens = std::iter::once(table).chain((missing > 0).then_some(others));
    PerLayerInputs {
        tokens: Linear { adapters: false, ..Linear::new(all, Role::Column, tokens) },
        token_scale: (width as f32).sqrt(),
        projection: Linear::new(common.hidden_size, Role::Column, part("per_layer_model_projection", all)),
        x_scale: 1.0 / (common.hidden_size as f32).sqrt(),
        norm: common.norm_of(format!("{root}.per_layer_projection_norm"), width),
        width,
    }
}
