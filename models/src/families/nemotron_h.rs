//! Nemotron-H and Nemotron Nano 2 and 3: one mixer in each layer, which is Mamba-2, attention without positions, a feed-forward
//! network without a gate, or a mixture of such networks. A predictor of a further token has one layer with several mixers.

use super::deepseek;
use super::experts;
use super::sizes::{self, MAX_HEAD_DIM, MAX_LAYERS, MAX_WIDTH};
use super::state_space::{Keys, StateSpace};
use super::{
    Activation, Branch, Common, Decoder, Family, Fields, Layer, LoadError, Mixer, Packing, Part, Role, Routing,
};
use super::{Linear, Spec};

pub(super) const FAMILIES: &[Family] = &[Family {
    architectures: &["NemotronHForCausalLM"],
    model_types: &["nemotron_h"],
    positions: (&["max_position_embeddings"], Some(4096)),
    declare,
    predict,
    reference: &["nemotron-h"],
    largest: "nvidia/Nemotron-H-56B-Base-8K",
    ..Family::BASE
}];

const SPEC: Spec = Spec {
    eps: ("layer_norm_epsilon", 1e-5),
    activation: (&["mlp_hidden_act"], Activation::Relu2),
    // The number of layers is that of the pattern.
    sizes: &[("num_hidden_layers", 1), ("num_key_value_heads", 8), ("head_dim", 128), ("intermediate_size", 21_504)],
    rope: None,
    root: "backbone",
    tokens: "embeddings",
    final_norm: "norm_f",
    ..Spec::LLAMA
};

const KEYS: Keys = Keys {
    heads: "mamba_num_heads",
    state: "ssm_state_size",
    groups: "n_groups",
    kernel: "conv_kernel",
    conv_bias: "use_conv_bias",
    proj_bias: "use_bias",
};

/// Names of up and down.
const NETWORK: [&str; 2] = ["up_proj", "down_proj"];

/// The mixer of a layer.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    StateSpace,
    Attention,
    Network,
    Experts,
}

/// The keys of the mixers of all layers, and of those of the predictor: a list, and a text.
const PATTERN: [&str; 2] = ["layers_block_type", "hybrid_override_pattern"];
const OF_PREDICTOR: [&str; 2] = ["mtp_layers_block_type", "mtp_hybrid_override_pattern"];

fn common(fields: &Fields<'_>, max_positions: usize) -> Result<Common, LoadError> {
    let mut common = Common::read(fields, max_positions, SPEC)?;
    // Older files name it so.
    let older = sizes::optional(fields, "attention_head_dim", MAX_HEAD_DIM)?;
    if let Some(dim) = older.filter(|_| fields.get("head_dim").is_none()) {
        common.heads.head_dim = dim;
    }
    Ok(common)
}

fn declare(fields: &Fields<'_>, max_positions: usize) -> Result<Decoder, LoadError> {
    let mut common = common(fields, max_positions)?;
    let (key, kinds) = match kinds(fields, PATTERN)? {
        Some(found) => found,
        None => return Err(fields.wrong(PATTERN[1], SPELLED)),
    };
    let mixers = Mixers::read(fields, &kinds)?;
    if !fields.is_absent("num_hidden_layers") && common.num_layers != kinds.len() {
        return Err(fields.wrong("num_hidden_layers", format!("{}, the number of layers of `{key}`", kinds.len())));
    }
    common.num_layers = kinds.len();
    sizes::check_attention(fields, key, kinds.contains(&Kind::Attention))?;
    for copy in ["rms_norm_eps", "norm_eps"] {
        if sizes::positive(fields, copy)?.is_some_and(|eps| eps as f32 != common.eps) {
            return Err(fields.wrong(copy, "the value of `layer_norm_epsilon`"));
        }
    }
    if !matches!(fields.string("mamba_hidden_act")?, None | Some("silu")) {
        return Err(fields.wrong("mamba_hidden_act", "\"silu\""));
    }
    let head_dim = sizes::optional(fields, "mamba_head_dim", MAX_HEAD_DIM)?.unwrap_or(64);
    let mut state_space = StateSpace::read(fields, &KEYS, 8, head_dim)?;
    state_space.norm_groups = state_space.groups;
    // How states are trained and kept in other engines; the inner width is that of the heads.
    for key in ["expand", "chunk_size", "mamba_proj_bias", "use_mamba_kernels", "mamba_ssm_cache_dtype", "rope_theta"]
        .into_iter()
        .chain(["time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "num_logits_to_keep"])
    {
        fields.get(key);
    }
    Ok(common.decoder(|layer| {
        let branch = match kinds[layer] {
            Kind::StateSpace => {
                let mixer = Mixer::Recurrent(state_space.layer(&common, &common.at(layer, "mixer")));
                Branch::new(common.norm(common.at(layer, "norm")), mixer)
            }
            kind => mixers.branch(&common, layer, kind),
        };
        Layer::new(vec![branch])
    }))
}

/// The predictor: the mixers of a pattern of its own, each under the name of a layer. The first has the projection of the token and the
/// state, the last the norm of the output.
fn predict(fields: &Fields<'_>, max_positions: usize) -> Result<Option<Decoder>, LoadError> {
    let stated = kinds(fields, OF_PREDICTOR)?;
    if fields.integer("num_nextn_predict_layers", 0..=MAX_LAYERS)?.unwrap_or(0) == 0 {
        return Ok(None);
    }
    let common = common(fields, max_positions)?;
    let (key, kinds) = stated.unwrap_or((OF_PREDICTOR[1], vec![Kind::Attention, Kind::Experts]));
    if kinds.contains(&Kind::StateSpace) {
        return Err(fields.wrong(key, "attention, networks and experts: predictors with states are not supported"));
    }
    let mixers = Mixers::read(fields, &kinds)?;
    let own = Common { spec: Spec { root: "mtp", ..common.spec }, ..common.clone() };
    let branches = kinds.iter().enumerate().map(|(layer, kind)| mixers.branch(&own, layer, *kind));
    let [token, state, projection] = ["enorm", "hnorm", "eh_proj"].map(|name| own.at(0, name));
    let modules = [token, state, projection, own.at(kinds.len() - 1, "final_layernorm")];
    Ok(Some(common.predictor(Layer::new(branches.collect()), modules).continuing_normed()))
}

/// The mixers without states.
struct Mixers {
    attention_bias: bool,
    mlp_bias: bool,
    /// The experts, if a layer has some.
    mixture: Option<Mixture>,
}

impl Mixers {
    fn read(fields: &Fields<'_>, kinds: &[Kind]) -> Result<Mixers, LoadError> {
        let flag = |key: &str| Ok::<_, LoadError>(fields.boolean(key)?.unwrap_or(false));
        Ok(Mixers {
            mixture: if kinds.contains(&Kind::Experts) { Some(Mixture::read(fields)?) } else { None },
            attention_bias: flag("attention_bias")?,
            mlp_bias: flag("mlp_bias")?,
        })
    }

    fn branch(&self, common: &Common, layer: usize, kind: Kind) -> Branch {
        let module = common.at(layer, "mixer");
        let mixer = match (kind, &self.mixture) {
            (Kind::Attention, _) => {
                let packing = Packing::Separate(["q_proj", "k_proj", "v_proj"]);
                let attention = common.attention_of(module, packing, "o_proj");
                Mixer::Attention(attention.biased(self.attention_bias, self.attention_bias))
            }
            (Kind::Experts, Some(mixture)) => mixture.layer(common, &module, self.mlp_bias),
            _ => Mixer::Mlp(common.plain(module, NETWORK).biased(self.mlp_bias)),
        };
        Branch::new(common.norm(common.at(layer, "norm")), mixer)
    }
}

/// What a text with the mixers of all layers is.
const SPELLED: &str = "a text with a letter for each layer: M, *, - and E";

/// Which of these keys states mixers, and these; `None` if neither is there.
fn kinds(
    fields: &Fields<'_>,
    [list, pattern]: [&'static str; 2],
) -> Result<Option<(&'static str, Vec<Kind>)>, LoadError> {
    let listed = |value: &serde_json::Value| {
        let kind = |name: &serde_json::Value| match name.as_str()? {
            "mamba" | "linear_attention" => Some(Kind::StateSpace),
            "attention" | "full_attention" => Some(Kind::Attention),
            "mlp" => Some(Kind::Network),
            "moe" => Some(Kind::Experts),
            _ => None,
        };
        value.as_array()?.iter().map(kind).collect::<Option<Vec<_>>>()
    };
    let spelled = |value: &serde_json::Value| {
        let kind = |letter: char| match letter {
            'M' => Some(Kind::StateSpace),
            '*' => Some(Kind::Attention),
            '-' => Some(Kind::Network),
            'E' => Some(Kind::Experts),
            _ => None,
        };
        value.as_str()?.chars().map(kind).collect::<Option<Vec<_>>>()
    };
    let fits = |kinds: Vec<Kind>| Some(kinds).filter(|kinds| (1..=MAX_LAYERS as usize).contains(&kinds.len()));
    let expected = "a list of \"mamba\", \"attention\", \"mlp\" and \"moe\"";
    if let Some(kinds) = fields.read(list, expected, |value| listed(value).and_then(fits))? {
        return Ok(Some((list, kinds)));
    }
    let kinds = fields.read(pattern, SPELLED, |value| spelled(value).and_then(fits))?;
    Ok(kinds.map(|kinds| (pattern, kinds)))
}

/// Experts without a gate.
struct Mixture {
    count: usize,
    width: usize,
    /// Width of their inputs and outputs, if it is not that of the stream.
    inputs: Option<usize>,
    /// Width of the network that computes every row; 0 if there is none.
    shared: usize,
    routing: Routing,
}

impl Mixture {
    fn read(fields: &Fields<'_>) -> Result<Mixture, LoadError> {
        let (count, routing) = deepseek::routing_v3(fields, [1, 1])?;
        let shared = sizes::optional(fields, "moe_shared_expert_intermediate_size", MAX_WIDTH)?.unwrap_or(0);
        let networks = fields.integer("n_shared_experts", 0..=64)?.unwrap_or(1) as usize;
        let width = sizes::required(fields, "moe_intermediate_size", MAX_WIDTH)?;
        let inputs = sizes::optional(fields, "moe_latent_size", MAX_WIDTH)?;
        Ok(Mixture { count, width, inputs, shared: shared * networks, routing })
    }

    fn layer(&self, common: &Common, module: &str, bias: bool) -> Mixer {
        let network = |name: String, width: usize| common.plain_of(name, NETWORK, width).biased(bias);
        let hidden = common.hidden_size;
        let narrow = Common { hidden_size: self.inputs.unwrap_or(hidden), ..common.clone() };
        let name = |expert: usize| format!("{module}.experts.{expert}");
        let networks = (0..self.count).map(|expert| narrow.plain_of(name(expert), NETWORK, self.width).biased(bias));
        let networks = networks.collect();
        let routing = self.routing.of_module(module);
        let mut mixture = experts::mixture(common, format!("{module}.gate"), routing, networks, None);
        let linear = |inputs: usize, name: &str, rows: usize| {
            let part = Part::new(format!("{module}.{name}"), rows);
            Linear { adapters: false, bias, ..Linear::new(inputs, Role::Replicated, [part]) }
        };
        mixture.narrow = self
            .inputs
            .map(|width| [linear(hidden, "fc1_latent_proj", width), linear(width, "fc2_latent_proj", hidden)]);
        mixture.shared = (self.shared > 0).then(|| network(format!("{module}.shared_experts"), self.shared));
        Mixer::Experts(mixture)
    }
}
