//! What most families share: keys of `config.json`, and the parts of Llama's layers with their usual tensor names.
//!
//! A family states in a [`Spec`] how its keys and defaults differ from Llama's, calls [`Common::read`], then [`Common::decoder`]
//! with a function that builds one layer: [`Common::attention`] and [`Common::mlp`] return the parts of Llama, the family changes
//! the fields that differ, and [`Common::layer`] joins them.

use super::activations::activation;
use super::packing::Packing;
use super::rope::{self, RopeDefaults};
use super::sizes::{self, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::decoder::{
    Activation, Attention, Beside, Branch, Decoder, Embedding, Head, Heads, Layer, Linear, Mixer, Mlp, Norm, NormKind,
    Part, Pick, Positions, Role, Rope,
};

/// Defaults of transformers for absent keys.
const DEFAULT_SLIDING_WINDOW: usize = 4096;
const DEFAULT_MAX_WINDOW_LAYERS: u64 = 28;

/// How a family's keys, defaults and names differ from those of Llama, [`Spec::LLAMA`].
#[derive(Clone, Copy)]
pub(super) struct Spec {
    /// Keys of sizes.
    pub hidden_size: &'static str,
    pub intermediate_size: &'static str,
    pub num_layers: &'static str,
    pub num_heads: &'static str,
    pub num_kv_heads: &'static str,
    /// Values of absent keys of sizes, also of `head_dim` and `sliding_window`. Without one, `num_kv_heads` defaults to
    /// `num_heads`, `head_dim` to `hidden_size / num_heads`, and other keys must be present. `intermediate_size` is four times
    /// `hidden_size` if it is listed here as 0.
    pub sizes: &'static [(&'static str, usize)],
    /// Key of the epsilon of norms, and its default.
    pub eps: (&'static str, f64),
    /// Keys of the activation, of which the first that is present counts, and its default.
    pub activation: (&'static [&'static str], Activation),
    /// Default of `tie_word_embeddings`.
    pub tied: bool,
    /// Norms: their kind, whether they have weights and a bias, and whether the weights are stored less 1.
    pub norm: NormKind,
    pub norm_weight: bool,
    pub norm_bias: bool,
    pub norm_plus_one: bool,
    /// Defaults of the rotary embedding; `None`: the family has none, or reads it itself.
    pub rope: Option<RopeDefaults>,
    /// Prefix of all tensors but the head. Tensors without the prefix are found too.
    pub root: &'static str,
    /// Names within `root`: of the table of tokens, of the list of layers, of the norm after the last layer.
    pub tokens: &'static str,
    pub layers: &'static str,
    pub final_norm: &'static str,
    /// Name of the head, and whether it has a bias; only a head of its own can have one.
    pub head: &'static str,
    pub head_bias: bool,
}

impl Spec {
    pub const LLAMA: Spec = Spec {
        hidden_size: "hidden_size",
        intermediate_size: "intermediate_size",
        num_layers: "num_hidden_layers",
        num_heads: "num_attention_heads",
        num_kv_heads: "num_key_value_heads",
        sizes: &[],
        eps: ("rms_norm_eps", 1e-6),
        activation: (&["hidden_act"], Activation::Silu),
        tied: false,
        norm: NormKind::Rms,
        norm_weight: true,
        norm_bias: false,
        norm_plus_one: false,
        rope: Some(RopeDefaults::LLAMA),
        root: "model",
        tokens: "embed_tokens",
        layers: "layers",
        final_norm: "norm",
        head: "lm_head",
        head_bias: false,
    };

    /// The keys of Llama, layer norms with a bias.
    pub const LAYER_NORM: Spec =
        Spec { eps: ("layer_norm_eps", 1e-5), norm: NormKind::Layer, norm_bias: true, ..Spec::LLAMA };

    /// A size that must be present or have a default.
    pub fn size(&self, fields: &Fields<'_>, key: &str, greatest: u64) -> Result<usize, LoadError> {
        match (sizes::optional(fields, key, greatest)?, self.sizes.iter().find(|(name, _)| *name == key)) {
            (Some(size), _) => Ok(size),
            (None, Some((_, default))) => Ok(*default),
            (None, None) => Err(fields.wrong(key, format!("an integer, 1 to {greatest}"))),
        }
    }
}

/// Shared values of a configuration. A family may change them before it declares layers.
#[derive(Clone)]
pub(super) struct Common {
    pub spec: Spec,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_layers: usize,
    pub heads: Heads,
    pub eps: f32,
    pub activation: Activation,
    pub rope: Option<Rope>,
    pub tied: bool,
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
    /// If `use_sliding_window` is set, all.
    IfEnabled,
    /// All but each n-th layer: n − 1, 2n − 1, … have none.
    AllButEach(usize),
    /// Layers 0, 2, 4, ….
    EvenLayers,
    /// All, if `sliding_window` is present and not `null`.
    IfStated,
}

impl Common {
    /// Reads the shared keys.
    pub fn read(fields: &Fields<'_>, max_position_embeddings: usize, spec: Spec) -> Result<Common, LoadError> {
        let hidden_size = spec.size(fields, spec.hidden_size, MAX_WIDTH)?;
        let num_heads = spec.size(fields, spec.num_heads, MAX_HEADS)?;
        let num_kv_heads = match sizes::optional(fields, spec.num_kv_heads, MAX_HEADS)? {
            None if fields.is_absent(spec.num_kv_heads) => {
                let default = spec.sizes.iter().find(|(name, _)| *name == spec.num_kv_heads);
                default.map_or(num_heads, |(_, default)| *default)
            }
            stated => stated.unwrap_or(num_heads),
        };
        if !num_heads.is_multiple_of(num_kv_heads) {
            let expected = format!("a divisor of `{}`, {num_heads}", spec.num_heads);
            return Err(fields.wrong(spec.num_kv_heads, expected));
        }
        let head_dim = head_dim(fields, &spec, hidden_size, num_heads)?;
        let heads = Heads { num_heads, num_kv_heads, head_dim };
        let intermediate_size = match spec.size(fields, spec.intermediate_size, MAX_WIDTH)? {
            0 => 4 * hidden_size,
            stated => stated,
        };
        let rope = spec.rope.map(|defaults| rope::read(fields, max_position_embeddings, head_dim, defaults));
        let tied = fields.boolean("tie_word_embeddings")?.unwrap_or(spec.tied);
        if tied && spec.head_bias {
            return Err(fields.wrong("tie_word_embeddings", "false, because the output projection has a bias"));
        }
        Ok(Common {
            vocab_size: spec.size(fields, "vocab_size", MAX_VOCAB)?,
            hidden_size,
            intermediate_size,
            num_layers: spec.size(fields, spec.num_layers, MAX_LAYERS)?,
            heads,
            eps: sizes::positive(fields, spec.eps.0)?.unwrap_or(spec.eps.1) as f32,
            activation: activation(fields, spec.activation)?,
            rope: rope.transpose()?,
            tied,
            spec,
        })
    }

    /// The window of each layer: according to `layer_types`, or to `rule` if that key is absent.
    pub fn windows(&self, fields: &Fields<'_>, rule: Windows) -> Result<Vec<Option<usize>>, LoadError> {
        let windowed = match rule {
            Windows::Never => false,
            Windows::FromLayer | Windows::IfEnabled => fields.boolean("use_sliding_window")?.unwrap_or(false),
            Windows::IfStated => fields.get("sliding_window").is_some(),
            _ => true,
        };
        // `null` disables the window; an absent key means the default.
        let window = match sizes::optional(fields, "sliding_window", MAX_POSITIONS) {
            _ if !windowed => None,
            Ok(None) if fields.is_absent("sliding_window") => {
                let default = self.spec.sizes.iter().find(|(name, _)| *name == "sliding_window");
                Some(default.map_or(DEFAULT_SLIDING_WINDOW, |(_, default)| *default))
            }
            stated => stated?,
        };
        let types = [("full_attention", false), ("sliding_attention", true)];
        if let Some(sliding) = sizes::kinds(fields, "layer_types", self.num_layers, &types)? {
            if window.is_none() && sliding.contains(&true) {
                let expected = "\"full_attention\" for every layer, because no sliding window is enabled";
                return Err(fields.wrong("layer_types", expected));
            }
            return Ok(sliding.iter().map(|sliding| window.filter(|_| *sliding)).collect());
        }
        let first = match rule {
            Windows::FromLayer => {
                fields.integer("max_window_layers", 0..=MAX_LAYERS)?.unwrap_or(DEFAULT_MAX_WINDOW_LAYERS) as usize
            }
            _ => 0,
        };
        let slides = |layer: usize| match rule {
            Windows::AllButEach(n) => !(layer + 1).is_multiple_of(n),
            Windows::EvenLayers => layer.is_multiple_of(2),
            _ => layer >= first,
        };
        Ok((0..self.num_layers).map(|layer| window.filter(|_| slides(layer))).collect())
    }

    /// The decoder whose layers `layer` builds, given their numbers.
    pub fn decoder(&self, layer: impl FnMut(usize) -> Layer) -> Decoder {
        self.decoder_of((0..self.num_layers).map(layer).collect())
    }

    /// [`Common::decoder`] for layers whose configuration may be wrong.
    pub fn try_decoder(&self, layer: impl FnMut(usize) -> Result<Layer, LoadError>) -> Result<Decoder, LoadError> {
        Ok(self.decoder_of((0..self.num_layers).map(layer).collect::<Result<_, _>>()?))
    }

    fn decoder_of(&self, layers: Vec<Layer>) -> Decoder {
        let Spec { root, tokens, final_norm, head, head_bias, .. } = self.spec;
        let head = Linear { bias: head_bias, ..self.vocabulary(head, self.hidden_size) };
        Decoder {
            embedding: Embedding {
                tokens: self.vocabulary(format!("{root}.{tokens}"), self.hidden_size),
                scale: 1.0,
                positions: None,
                types: None,
                projection: None,
                norm: None,
                per_layer: None,
                beside: None,
            },
            layers,
            final_norm: Some(self.norm(format!("{root}.{final_norm}"))),
            head: Head {
                projection: None,
                activation: None,
                linear: (!self.tied).then_some(head),
                scale: 1.0,
                soft_cap: None,
                tokens: None,
                masked: Vec::new(),
                classifier: None,
            },
            streams: None,
            taps: Vec::new(),
            adapters: None,
            stage: None,
        }
    }

    /// The predictor of one layer that reads a token and the hidden state before it ("DeepSeek-V3 Technical Report", 2024, section
    /// 2.2), with the table of tokens and the head of the decoder. `modules` are the norm of the embedding, that of the state, the
    /// projection of both, and the norm of the result.
    pub fn predictor(&self, layer: Layer, modules: [String; 4]) -> Decoder {
        let [token_norm, state_norm, projection, final_norm] = modules;
        let hidden = self.hidden_size;
        let half = |first: usize| {
            let pick = Pick { inputs: Some((first, 2 * hidden)), ..Pick::all(hidden) };
            let part = Part::picked(projection.clone(), hidden, pick);
            Linear { adapters: false, ..Linear::new(hidden, Role::Column, [part]) }
        };
        let decoder = self.decoder_of(vec![layer]);
        let beside = Beside {
            zero_first: true,
            token_norm: self.norm(token_norm),
            state_norm: Some(self.norm(state_norm)),
            states: vec![half(hidden)],
            projects_own: true,
            token: Some(half(0)),
            continues_normed: false,
        };
        let embedding = Embedding { beside: Some(beside), ..decoder.embedding };
        Decoder { embedding, final_norm: Some(self.norm(final_norm)), ..decoder }
    }

    /// A table with a row per token, or the head.
    pub fn vocabulary(&self, name: impl Into<String>, width: usize) -> Linear {
        Linear { adapters: false, ..Linear::new(width, Role::Column, [Part::new(name, self.vocab_size)]) }
    }

    /// Learned position embeddings: the name of their table within [`Spec::root`], its rows, and the row of position 0.
    pub fn positions(&self, name: &str, rows: usize, offset: usize) -> Positions {
        let table = Part::new(format!("{}.{name}", self.spec.root), rows);
        let table = Linear { adapters: false, ..Linear::new(self.hidden_size, Role::Replicated, [table]) };
        Positions { table, offset }
    }

    /// The name of a tensor or module of a layer, or of the layer's own module if `name` is empty.
    pub fn at(&self, layer: usize, name: &str) -> String {
        let dot = if name.is_empty() { "" } else { "." };
        format!("{}.{}.{layer}{dot}{name}", self.spec.root, self.spec.layers)
    }

    /// A layer of attention, or a mixer in its place, and a feed-forward network, each with a norm of its input.
    pub fn layer(&self, layer: usize, attention: impl Into<Mixer>, mlp: impl Into<Mixer>) -> Layer {
        self.layer_with(layer, ["input_layernorm", "post_attention_layernorm"], attention, mlp)
    }

    /// A layer of attention and a feed-forward network, with these norms of their inputs.
    pub fn layer_with(
        &self,
        layer: usize,
        norms: [&str; 2],
        attention: impl Into<Mixer>,
        mlp: impl Into<Mixer>,
    ) -> Layer {
        let [first, second] = norms.map(|name| self.norm(self.at(layer, name)));
        let branches = vec![Branch::new(first, attention.into()), Branch::new(second, mlp.into())];
        Layer::new(branches)
    }

    /// A layer with norms of the outputs of its branches alone.
    pub fn post_norm_layer(&self, layer: usize, attention: Attention, mlp: Mlp) -> Layer {
        let norms = ["post_attention_layernorm", "post_feedforward_layernorm"];
        let mut declared = self.layer_with(layer, norms, attention, mlp);
        declared.branches.iter_mut().for_each(|branch| branch.norm_after = branch.norm.take());
        declared
    }

    /// Attention over the whole context with Llama's names, without biases or head norms.
    pub fn attention(&self, layer: usize) -> Attention {
        let name = self.at(layer, "self_attn");
        self.attention_of(name, Packing::Separate(["q_proj", "k_proj", "v_proj"]), "o_proj")
    }

    /// Attention of a module with these projections.
    pub fn attention_of(&self, name: String, packing: Packing, output: &str) -> Attention {
        let heads = self.heads;
        let output = Part::new(format!("{name}.{output}"), self.hidden_size);
        Attention {
            qkv: packing.linear(&name, heads, self.hidden_size),
            beside: None,
            heads,
            clip: None,
            query_norm: None,
            key_norm: None,
            value_norm: None,
            shard: None,
            norm_after_rope: false,
            rope: self.rope.clone(),
            query_growth: None,
            window: None,
            both_sides: false,
            distances: None,
            sparse: None,
            scale: 1.0 / (heads.head_dim as f32).sqrt(),
            soft_cap: None,
            alibi_slopes: None,
            sinks: None,
            gate: false,
            latent: None,
            value_dim: None,
            shares: None,
            output: Linear::new(heads.query_width(), Role::Row, [output]),
            name,
        }
    }

    /// A gated feed-forward network with Llama's names, without biases.
    pub fn mlp(&self, layer: usize) -> Mlp {
        self.gated(self.at(layer, "mlp"), ["gate_proj", "up_proj", "down_proj"], self.intermediate_size)
    }

    /// A gated feed-forward network: names of gate, up and down in a module.
    pub fn gated(&self, module: String, [gate, up, down]: [&str; 3], width: usize) -> Mlp {
        let part = |name: &str| Part::new(format!("{module}.{name}"), width);
        self.mlp_of([part(gate), part(up)], Part::new(format!("{module}.{down}"), self.hidden_size), width)
    }

    /// A gated feed-forward network whose gate and up projections are one tensor.
    pub fn gated_rows(&self, module: String, [gate_up, down]: [&str; 2], width: usize) -> Mlp {
        let part = Part::new(format!("{module}.{gate_up}"), 2 * width);
        self.mlp_of([part], Part::new(format!("{module}.{down}"), self.hidden_size), width)
    }

    /// Builds an ungated feed-forward network from the tensors `up` and `down` of `module`.
    pub fn plain(&self, module: String, [up, down]: [&str; 2]) -> Mlp {
        self.plain_of(module, [up, down], self.intermediate_size)
    }

    /// [`Common::plain`] of another width.
    pub fn plain_of(&self, module: String, [up, down]: [&str; 2], width: usize) -> Mlp {
        let part = Part::new(format!("{module}.{up}"), width);
        let down = Part::new(format!("{module}.{down}"), self.hidden_size);
        Mlp { gated: false, ..self.mlp_of([part], down, width) }
    }

    /// A gated feed-forward network of these parts.
    pub fn mlp_of(&self, gate_up: impl IntoIterator<Item = Part>, down: Part, width: usize) -> Mlp {
        Mlp {
            gate_up: Linear::new(self.hidden_size, Role::Column, gate_up),
            gated: true,
            activation: self.activation,
            learned: Vec::new(),
            sparsity: None,
            down: Linear::new(width, Role::Row, [down]),
        }
    }

    /// A norm of rows of the stream, given its module.
    pub fn norm(&self, module: String) -> Norm {
        self.norm_of(module, self.hidden_size)
    }

    /// A norm of query or key heads of the kind of the other norms: one weight per element of a head.
    pub fn head_norm(&self, layer: usize, name: &str) -> Norm {
        self.norm_of(self.at(layer, name), self.heads.head_dim)
    }

    /// A norm of groups of `width` elements.
    pub fn norm_of(&self, module: String, width: usize) -> Norm {
        Norm {
            kind: self.spec.norm,
            bias: self.spec.norm_bias.then(|| format!("{module}.bias")),
            weight: self.spec.norm_weight.then(|| format!("{module}.weight")).into_iter().collect(),
            shape: vec![width],
            width,
            part: None,
            eps: self.eps,
            plus_one: self.spec.norm_plus_one,
            factor: 1.0,
        }
    }
}

impl Decoder {
    /// The same predictor, which reads every embedding and continues with its output after the final norm.
    pub(super) fn continuing_normed(mut self) -> Decoder {
        if let Some(beside) = &mut self.embedding.beside {
            (beside.zero_first, beside.continues_normed) = (false, true);
        }
        self
    }
}

impl From<Mlp> for Mixer {
    fn from(mlp: Mlp) -> Mixer {
        Mixer::Mlp(mlp)
    }
}

impl Layer {
    /// The same with branches that read the same stream. Each must have a norm of its input and none after it. Equal norms of
    /// consecutive branches are computed once.
    pub(super) fn in_parallel(self) -> Layer {
        Layer { parallel: self.branches.len(), ..self }
    }
}

impl Attention {
    /// The same with or without biases of the projections to queries, keys and values, and of the output.
    pub(super) fn biased(mut self, qkv: bool, output: bool) -> Attention {
        (self.qkv.bias, self.output.bias) = (qkv, output);
        self
    }

    /// The same with norms of query and key heads, given their names in the module.
    pub(super) fn head_normed(mut self, common: &Common, names: [&str; 2]) -> Attention {
        let [query, key] = names.map(|name| common.norm_of(format!("{}.{name}", self.name), self.heads.head_dim));
        (self.query_norm, self.key_norm) = (Some(query), Some(key));
        self
    }
}

impl Mlp {
    /// The same with or without biases.
    pub(super) fn biased(mut self, bias: bool) -> Mlp {
        (self.gate_up.bias, self.down.bias) = (bias, bias);
        self
    }
}

fn head_dim(fields: &Fields<'_>, spec: &Spec, hidden_size: usize, num_heads: usize) -> Result<usize, LoadError> {
    let default = spec.sizes.iter().find(|(name, _)| *name == "head_dim").map(|(_, size)| *size);
    match sizes::optional(fields, "head_dim", MAX_HEAD_DIM)?.or(default) {
        Some(head_dim) => Ok(head_dim),
        None if hidden_size.is_multiple_of(num_heads) => Ok(hidden_size / num_heads),
        None => {
            let expected = format!("a multiple of `{}`, {num_heads}, or a `head_dim`", spec.num_heads);
            Err(fields.wrong(spec.hidden_size, expected))
        }
    }
}
