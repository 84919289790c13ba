//! EAGLE-3 heads: predictors with checkpoints of their own (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language
//! Models via Training-Time Test", 2025).
//!
//! Layers of Llama, of which the first reads the token's embedding beside the stream. The stream begins with a projection of three
//! hidden states of the target. The head may have rows for frequent tokens alone; `d2t` says which.

use serde_json::{Map, Value};

use super::sizes::{self, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH};
use super::{Common, Fields, Spec};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::files::ModelFiles;
use crate::checkpoint::weights::Weights;
use crate::decoder::{Attention, Beside, Branch, Decoder, Embedding, Head, Layer, Linear, Mixer, Part, Pick, Role};

const FILE: &str = "config.json";
const ARCHITECTURES: [&str; 2] = ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"];
/// Number of hidden states of the target.
const NUM_STATES: usize = 3;

/// The declaration of an EAGLE-3 head.
pub struct Eagle3 {
    /// The predictor.
    pub decoder: Decoder,
    /// Layers of the target in front of which it reads the stream ([`Decoder::taps`]).
    pub taps: Vec<usize>,
    /// Greatest number of tokens in a context.
    pub max_position_embeddings: usize,
}

impl Eagle3 {
    /// Reads the declaration of a head for a target.
    ///
    /// # Errors
    /// The checkpoint is not an EAGLE-3 head, or it is one for a model of other sizes, or it sets an option that is not supported.
    pub fn load(files: &ModelFiles, weights: &Weights, target: &Decoder) -> Result<Eagle3, LoadError> {
        let map: Map<String, Value> = files.read_json(FILE)?;
        let fields = Fields::new(files.locate(FILE), String::new(), &map);
        let is_eagle3 = |name: &Value| name.as_str().is_some_and(|name| ARCHITECTURES.contains(&name));
        let is_known = |value: &Value| value.as_array()?.iter().any(is_eagle3).then_some(());
        let expected = format!("a list with one of {}, or another method", ARCHITECTURES.join(", "));
        if fields.read("architectures", &expected, is_known)?.is_none() {
            return Err(fields.wrong("architectures", expected));
        }
        let max_position_embeddings = sizes::optional(&fields, "max_position_embeddings", MAX_POSITIONS)?;
        let max_position_embeddings = max_position_embeddings.unwrap_or(2048);
        let common = Common::read(&fields, max_position_embeddings, Spec::LLAMA)?;
        let wide = target.hidden_size();
        let stated = sizes::optional(&fields, "target_hidden_size", MAX_WIDTH)?;
        if stated.unwrap_or(common.hidden_size) != wide {
            let key = if stated.is_some() { "target_hidden_size" } else { "hidden_size" };
            return Err(fields.wrong(key, format!("{wide}, the hidden size of the model")));
        }
        if common.vocab_size != target.vocab_size() {
            let expected = format!("{}, the vocabulary of the model", target.vocab_size());
            return Err(fields.wrong("vocab_size", expected));
        }
        let taps = taps(&fields, target.layers.len())?;
        let norms_stream = fields.boolean("norm_before_residual")?.unwrap_or(false);
        for option in ["norm_before_fc", "fc_norm", "norm_output"] {
            if fields.boolean(option)? == Some(true) {
                return Err(fields.wrong(option, "false, because heads with this norm are not supported"));
            }
        }
        let mlp_bias = fields.boolean("mlp_bias")?.unwrap_or(false);
        let bias = fields.boolean("attention_bias")?.unwrap_or(false);
        let root = if weights.raw("midlayer.input_layernorm.weight").is_some() { "midlayer" } else { "model.layers.0" };
        let first = first_layer(&common, root, (bias, mlp_bias), norms_stream);
        let others = (1..common.num_layers).map(|layer| {
            let attention = common.attention(layer).biased(bias, bias);
            common.layer(layer, attention, common.mlp(layer).biased(mlp_bias))
        });
        let layers = std::iter::once(first).chain(others).collect();
        let decoder = Decoder { layers, ..common.decoder(|_| empty()) };
        let tokens = match weights.raw("embed_tokens.weight").is_some() {
            true => common.vocabulary("embed_tokens", common.hidden_size),
            false if common.hidden_size == wide => target.embedding.tokens.clone(),
            false => return Err(weights.missing("embed_tokens.weight", &format!("{:?}", [common.vocab_size, wide]))),
        };
        let state = |number: usize| {
            let pick = Pick { inputs: Some((number * wide, NUM_STATES * wide)), ..Pick::all(common.hidden_size) };
            let part = Part::picked("fc", common.hidden_size, pick);
            Linear { adapters: false, ..Linear::new(wide, Role::Column, [part]) }
        };
        let beside = Beside {
            zero_first: false,
            token_norm: common.norm(format!("{root}.input_layernorm")),
            state_norm: None,
            states: (0..NUM_STATES).map(state).collect(),
            projects_own: false,
            token: None,
            continues_normed: false,
        };
        let norm = norms_stream.then(|| common.norm(format!("{root}.hidden_norm")));
        let embedding = Embedding { tokens, norm, beside: Some(beside), ..decoder.embedding };
        let head = head(&fields, weights, &common, target)?;
        let decoder = Decoder { embedding, head, final_norm: Some(common.norm("norm".to_string())), ..decoder };
        Ok(Eagle3 { decoder, taps, max_position_embeddings })
    }
}

fn empty() -> Layer {
    Layer::new(Vec::new())
}

/// The layers in front of which the streams are read: three that the configuration lists, or an early, a middle and a late one.
fn taps(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<usize>, LoadError> {
    let key = "eagle_aux_hidden_state_layer_ids";
    let expected = format!("{NUM_STATES} numbers of layers of the model, which has {num_layers}");
    let list = |value: &Value| {
        let ids = value.as_array()?.iter().map(|id| usize::try_from(id.as_u64()?).ok().filter(|id| *id < num_layers));
        ids.collect::<Option<Vec<_>>>().filter(|ids| ids.len() == NUM_STATES)
    };
    let mut stated = fields.read(key, &expected, list)?;
    if let Some(options) = fields.object("eagle_config")? {
        if options.boolean("use_aux_hidden_state")? == Some(false) {
            return Err(options.wrong("use_aux_hidden_state", "true"));
        }
        stated = stated.or(options.read(key, &expected, list)?);
    }
    match stated {
        Some(mut taps) => {
            taps.sort_unstable();
            Ok(taps)
        }
        None if num_layers > NUM_STATES => Ok(vec![2, num_layers / 2, num_layers - 3]),
        None => Err(fields.wrong(key, expected)),
    }
}

/// The layer that reads the embedding beside the stream: its projections have columns for the embedding, then for the stream.
fn first_layer(common: &Common, root: &str, (bias, mlp_bias): (bool, bool), norms_stream: bool) -> Layer {
    let hidden = common.hidden_size;
    let attention = Common { spec: Spec { root: "", ..common.spec }, ..common.clone() };
    let names = super::Packing::Separate(["q_proj", "k_proj", "v_proj"]);
    let mut attention: Attention = attention.attention_of(format!("{root}.self_attn"), names, "o_proj");
    let columns = |linear: &Linear, first: usize| {
        let pick = |part: &Part| Part { pick: Pick { inputs: Some((first, 2 * hidden)), ..part.pick }, ..part.clone() };
        Linear { parts: linear.parts.iter().map(pick).collect(), inputs: hidden, ..linear.clone() }
    };
    attention.beside = Some(columns(&attention.qkv, 0));
    attention.qkv = columns(&attention.qkv, hidden);
    let attention = attention.biased(bias, bias);
    let mlp = common
        .gated(format!("{root}.mlp"), ["gate_proj", "up_proj", "down_proj"], common.intermediate_size)
        .biased(mlp_bias);
    let norm = |name: &str| common.norm(format!("{root}.{name}"));
    // A stream that has been normed is read as it is.
    let mut first = Branch::new(norm("hidden_norm"), Mixer::Attention(attention));
    first.norm = first.norm.filter(|_| !norms_stream);
    let branches = vec![first, Branch::new(norm("post_attention_layernorm"), mlp.into())];
    Layer { branches, ..empty() }
}

/// The head of the checkpoint, or that of the target.
fn head(fields: &Fields<'_>, weights: &Weights, common: &Common, target: &Decoder) -> Result<Head, LoadError> {
    let rows = sizes::optional(fields, "draft_vocab_size", MAX_VOCAB)?.unwrap_or(common.vocab_size);
    if rows > common.vocab_size {
        return Err(fields.wrong("draft_vocab_size", format!("at most {}, the vocabulary", common.vocab_size)));
    }
    let own = weights.raw("lm_head.weight").is_some();
    if !own && rows == common.vocab_size && common.hidden_size == target.hidden_size() {
        let linear = target.head.linear.clone().or(Some(target.embedding.tokens.clone()));
        let (tokens, masked, classifier) = (None, Vec::new(), None);
        return Ok(Head {
            projection: None,
            activation: None,
            linear,
            scale: 1.0,
            soft_cap: None,
            tokens,
            masked,
            classifier,
        });
    }
    let linear = Linear::new(common.hidden_size, Role::Column, [Part::new("lm_head", rows)]);
    let linear = Some(Linear { adapters: false, ..linear });
    let scale = fields.float("logit_scale", "a number above 0", |scale| scale > 0.0)?.unwrap_or(1.0) as f32;
    let tokens = (rows < common.vocab_size).then(|| "d2t".to_string());
    let masked = Vec::new();
    Ok(Head { projection: None, activation: None, linear, scale, soft_cap: None, tokens, masked, classifier: None })
}
