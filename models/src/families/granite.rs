//! Granite 3 and 4 and their mixtures of experts: the layers of Llama with factors of the embedding, the scores, the branches and
//! the logits. Layers of Granite 4 may be Mamba-2 instead of attention, and a network that is shared by all rows is the only one of
//! those without experts.

use super::experts;
use super::sizes::{self, MAX_EXPERTS, MAX_WIDTH, positive};
use super::state_space::StateSpace;
use super::{Common, Decoder, Family, Fields, LoadError, Mixer, Mlp, Part, Pick, Scores, Spec};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        architectures: &["GraniteForCausalLM"],
        model_types: &["granite"],
        declare: |fields, max_positions| declare(fields, max_positions, Generation::Dense),
        largest: "ibm-granite/granite-3.3-8b-instruct",
        ..Family::BASE
    },
    Family {
        architectures: &["GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"],
        model_types: &["granitemoe", "granitemoeshared"],
        declare: |fields, max_positions| declare(fields, max_positions, Generation::Mixture),
        largest: "ibm-granite/granite-3.1-3b-a800m-instruct",
        ..Family::BASE
    },
    Family {
        architectures: &["GraniteMoeHybridForCausalLM"],
        model_types: &["granitemoehybrid"],
        declare: |fields, max_positions| declare(fields, max_positions, Generation::Four),
        reference: &["granite4-hybrid"],
        largest: "ibm-granite/granite-4.0-h-small (32B)",
        ..Family::BASE
    },
];

/// What differs between the families.
#[derive(Clone, Copy, PartialEq)]
enum Generation {
    /// A feed-forward network.
    Dense,
    /// Experts, and a shared network if it has a width.
    Mixture,
    /// A shared network, and experts if there are any.
    Four,
}

fn declare(fields: &Fields<'_>, max_positions: usize, generation: Generation) -> Result<Decoder, LoadError> {
    let mut common = Common::read(fields, max_positions, Spec::LLAMA)?;
    let factor = |key: &str| Ok::<_, LoadError>(positive(fields, key)?.unwrap_or(1.0) as f32);
    let attention_bias = fields.boolean("attention_bias")?.unwrap_or(false);
    let mlp_bias = fields.boolean("mlp_bias")?.unwrap_or(false);
    let (scale, branch_scale) = (factor("attention_multiplier")?, factor("residual_multiplier")?);
    let shared_width = fields.integer("shared_intermediate_size", 0..=MAX_WIDTH)?.unwrap_or(0) as usize;
    let has_experts = match generation {
        Generation::Dense => false,
        Generation::Mixture => true,
        Generation::Four => fields.integer("num_local_experts", 0..=MAX_EXPERTS)?.unwrap_or(0) > 0,
    };
    let counts = match has_experts {
        true => Some(experts::counts(fields, ["num_local_experts", "num_experts_per_tok"])?),
        false => None,
    };
    let mut state_spaces = vec![None; common.num_layers];
    if generation == Generation::Four {
        state_spaces = hybrid(fields, &mut common)?;
        if counts.is_none() && shared_width == 0 {
            return Err(fields.wrong("shared_intermediate_size", format!("an integer, 1 to {MAX_WIDTH}")));
        }
    }
    let mut decoder = common.decoder(|layer| {
        let mut attention = common.attention(layer).biased(attention_bias, attention_bias);
        attention.scale = scale;
        let shared = || shared(&common, common.at(layer, "shared_mlp"), shared_width);
        let mlp = match counts {
            None if generation == Generation::Dense => Mixer::Mlp(common.mlp(layer).biased(mlp_bias)),
            None => Mixer::Mlp(shared()),
            Some((count, top_k)) => {
                let module = common.at(layer, "block_sparse_moe");
                let names = ["input_linear.weight", "output_linear.weight"].map(|name| format!("{module}.{name}"));
                let separate = ["gate_proj", "up_proj", "down_proj"];
                let networks = experts::separate(&common, &module, count, separate, common.intermediate_size);
                let networks = experts::stacked(networks, names, false);
                let routing = experts::routing(Scores::Logits, top_k);
                let router = format!("{module}.router.layer");
                let mut mixture = experts::mixture(&common, router, routing, networks, None);
                mixture.shared = (shared_width > 0).then(shared);
                Mixer::Experts(mixture)
            }
        };
        let mixer = match &state_spaces[layer] {
            Some(sizes) => Mixer::Recurrent(sizes.layer(&common, &common.at(layer, "mamba"))),
            None => Mixer::Attention(attention),
        };
        let mut declared = common.layer(layer, mixer, mlp);
        declared.branches.iter_mut().for_each(|branch| branch.scale = branch_scale);
        declared
    });
    decoder.embedding.scale = factor("embedding_multiplier")?;
    decoder.head.scale = 1.0 / factor("logits_scaling")?;
    Ok(decoder)
}

/// The network that computes every row. GGUF files have its gate and its other half in tensors of their own.
fn shared(common: &Common, module: String, width: usize) -> Mlp {
    let half = |first: usize, own: &str| Part {
        own: Some((format!("{module}.{own}"), Pick::all(width))),
        ..Part::picked(format!("{module}.input_linear"), width, Pick::rows(2 * width, first, width))
    };
    let halves = [half(0, "gate_proj"), half(width, "up_proj")];
    common.mlp_of(halves, Part::new(format!("{module}.output_linear"), common.hidden_size), width)
}

/// Reads what Granite 4 has beside the keys of Granite 3. Returns the sizes of the layers that are Mamba-2.
fn hybrid(fields: &Fields<'_>, common: &mut Common) -> Result<Vec<Option<StateSpace>>, LoadError> {
    let types = [("attention", false), ("mamba", true), ("full_attention", false), ("linear_attention", true)];
    let key = if fields.get("layer_types").is_some() { "layer_types" } else { "layers_block_type" };
    let kinds = sizes::kinds(fields, key, common.num_layers, &types)?.unwrap_or(vec![true; common.num_layers]);
    sizes::check_attention(fields, "layer_types", kinds.contains(&false))?;
    match fields.string("position_embedding_type")? {
        Some("rope") => {}
        None | Some("nope") => common.rope = None,
        Some(_) => return Err(fields.wrong("position_embedding_type", "\"rope\" or \"nope\"")),
    }
    if fields.string("normalization_function")?.is_some_and(|name| name != "rmsnorm") {
        return Err(fields.wrong("normalization_function", "\"rmsnorm\""));
    }
    let inner =
        || Ok::<_, LoadError>(sizes::optional(fields, "mamba_expand", MAX_WIDTH)?.unwrap_or(2) * common.hidden_size);
    let sizes = if kinds.contains(&true) { Some(StateSpace::read_mamba(fields, inner()?)?) } else { None };
    // What no layer needs: sizes of layers that do not exist, and how states are trained.
    for key in fields.keys().filter(|key| key.starts_with("mamba_")) {
        fields.get(key);
    }
    Ok(kinds.into_iter().map(|is_recurrent| sizes.filter(|_| is_recurrent)).collect())
}
