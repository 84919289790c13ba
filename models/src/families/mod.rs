//! Families of decoders and encoders: each declares a [`Decoder`] from the keys of `config.json`.
//!
//! A family is one file that reads like its model card: the keys that it reads, with the defaults of transformers, and its
//! layers. To add one, write a file here and add it to [`FAMILIES`]; docs/adding-a-model.md shows the steps. A value that would
//! change the results and is not supported (another activation, another rope, a quantised checkpoint) is an error that names the
//! key. Keys that are known not to affect the results are ignored; [`ModelConfig::unread`] names the others that a family does not
//! read.

mod activations;
mod afmoe;
mod apertus;
mod arcee;
mod bailing;
mod bert;
mod bloom;
mod cohere;
mod common;
mod config;
mod deepseek;
mod dots1;
mod eagle3;
mod ernie;
mod eurobert;
mod exaone4;
mod experts;
mod falcon;
mod falcon_h1;
mod gemma;
mod gemma3n;
mod gemma4;
mod glm;
mod gpt2;
mod gpt_neo;
mod gpt_oss;
mod gptj;
mod granite;
mod gte;
mod hunyuan;
mod indexer;
mod internlm2;
mod jamba;
mod jina;
mod kimi;
mod labels;
mod lfm2;
mod llama;
mod llama4;
mod mimo;
mod minicpm;
mod minimax;
mod mistral;
mod mixtral;
mod modernbert;
mod mpt;
mod nemotron;
mod nemotron_h;
mod neox;
mod nomic_bert;
mod olmo;
mod opt;
mod packing;
mod persimmon;
mod phi;
mod phi3;
mod phi3_small;
mod phimoe;
mod qwen;
mod qwen3_next;
mod rope;
mod seed_oss;
mod sizes;
mod smollm3;
mod stablelm;
mod starcoder2;
mod state_space;
mod unknown;
mod unread;

use serde_json::Value;

pub use config::ModelConfig;
pub use eagle3::Eagle3;

// What a family file imports.
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::decoder::{
    Activation, Attention, Branch, Decoder, Dense, DenseActivation, Heads, Layer, Linear, Mixer, Mlp, Norm, NormKind,
    Part, PerLayer, PerLayerInputs, Pick, QueryGrowth, Role, Rope, RopeScaling, Routing, Scores, alibi_slopes,
};
use crate::pooling::Pooling;
use common::{Common, Spec, Windows};
use packing::Packing;
use rope::RopeDefaults;

/// A family of decoders.
#[derive(Clone, Copy)]
pub(crate) struct Family {
    /// Names in `architectures`.
    pub architectures: &'static [&'static str],
    /// Names in `model_type`.
    pub model_types: &'static [&'static str],
    /// Keys of the greatest number of tokens in a context, of which the first that is present counts, and the number if all are
    /// absent; `None`: one must be present.
    pub positions: (&'static [&'static str], Option<usize>),
    /// Declares the decoder, given the keys of `config.json` and that number.
    pub declare: fn(&Fields<'_>, usize) -> Result<Decoder, LoadError>,
    /// Declares the predictor that the checkpoint carries, given the same; `None` if it carries none.
    pub predict: fn(&Fields<'_>, usize) -> Result<Option<Decoder>, LoadError>,
    /// Declares the layers of a classifier, given the keys, the width of hidden states and the number of labels.
    pub classify: fn(&Fields<'_>, usize, usize) -> Result<Vec<Dense>, LoadError>,
    /// How a classifier pools hidden states.
    pub pool_classes: fn(&Fields<'_>) -> Result<Pooling, LoadError>,
    /// Activation of the first layer of a classifier, if the rows of all tokens go through it before they are pooled.
    pub late: fn(&Fields<'_>) -> Result<Option<Activation>, LoadError>,
    /// Whether it is a family of encoders, which have no output layer for tokens.
    pub encoder: bool,
    /// Reference cases whose results the tests compare.
    pub reference: &'static [&'static str],
    /// Largest checkpoint that is known to the authors.
    pub largest: &'static str,
    /// Whether the published checkpoints are pickles, which are not read.
    pub pickled: bool,
}

impl Family {
    /// A family without checkpoints.
    const BASE: Family = Family {
        architectures: &[],
        model_types: &[],
        positions: (&["max_position_embeddings"], None),
        declare: |fields, _| Err(fields.wrong("model_type", "the name of a family")),
        predict: |_, _| Ok(None),
        classify: |_, hidden, labels| Ok(vec![Dense::new("score", labels, hidden)]),
        pool_classes: |_| Ok(Pooling::Last),
        late: |_| Ok(None),
        encoder: false,
        reference: &[],
        largest: "",
        pickled: false,
    };
}

/// All supported families.
const FAMILIES: &[&[Family]] = &[
    llama::FAMILIES,
    mistral::FAMILIES,
    mixtral::FAMILIES,
    qwen::FAMILIES,
    qwen3_next::FAMILIES,
    gemma::FAMILIES,
    gemma3n::FAMILIES,
    gemma4::FAMILIES,
    phi3::FAMILIES,
    phi3_small::FAMILIES,
    olmo::FAMILIES,
    granite::FAMILIES,
    smollm3::FAMILIES,
    glm::FAMILIES,
    deepseek::FAMILIES,
    indexer::FAMILIES,
    mimo::FAMILIES,
    gpt_oss::FAMILIES,
    cohere::FAMILIES,
    starcoder2::FAMILIES,
    stablelm::FAMILIES,
    exaone4::FAMILIES,
    gpt2::FAMILIES,
    opt::FAMILIES,
    neox::FAMILIES,
    falcon::FAMILIES,
    bloom::FAMILIES,
    mpt::FAMILIES,
    internlm2::FAMILIES,
    phi::FAMILIES,
    nemotron::FAMILIES,
    seed_oss::FAMILIES,
    arcee::FAMILIES,
    ernie::FAMILIES,
    hunyuan::FAMILIES,
    minicpm::FAMILIES,
    gptj::FAMILIES,
    persimmon::FAMILIES,
    dots1::FAMILIES,
    gpt_neo::FAMILIES,
    minimax::FAMILIES,
    llama4::FAMILIES,
    bailing::FAMILIES,
    afmoe::FAMILIES,
    phimoe::FAMILIES,
    apertus::FAMILIES,
    lfm2::FAMILIES,
    nemotron_h::FAMILIES,
    jamba::FAMILIES,
    falcon_h1::FAMILIES,
    kimi::FAMILIES,
    bert::FAMILIES,
    modernbert::FAMILIES,
    eurobert::FAMILIES,
    gte::FAMILIES,
    nomic_bert::FAMILIES,
    jina::FAMILIES,
];

/// All supported families, in the order of the documentation.
fn all() -> impl Iterator<Item = &'static Family> + Clone {
    FAMILIES.iter().copied().flatten()
}

/// A supported family, for documentation.
#[derive(Clone, Copy, Debug)]
pub struct Supported {
    /// Names in `architectures` of `config.json`.
    pub architectures: &'static [&'static str],
    /// Names in `model_type`.
    pub model_types: &'static [&'static str],
    /// Reference cases of the tests.
    pub reference: &'static [&'static str],
    /// Largest checkpoint that is known to the authors.
    pub largest: &'static str,
    /// Whether the published checkpoints are pickles, which are not read.
    pub pickled: bool,
    /// Whether it is a family of encoders.
    pub encoder: bool,
}

/// Returns the supported families.
pub fn supported() -> impl Iterator<Item = Supported> {
    all().map(|family| Supported {
        architectures: family.architectures,
        model_types: family.model_types,
        reference: family.reference,
        largest: family.largest,
        pickled: family.pickled,
        encoder: family.encoder,
    })
}

/// What of a family's model a checkpoint has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    /// All of it.
    Whole,
    /// No output layer (`MistralModel`, `BertForMaskedLM`).
    Headless,
    /// A classifier of texts in place of the output layer.
    Classifier,
}

const CLASSIFIER: &str = "ForSequenceClassification";

/// Finds the family named by `architectures`, or by `model_type` if that key is absent. For the text part of a multimodal
/// checkpoint, `model_type` counts first, because one wrapper serves several families.
fn find(fields: &Fields<'_>, is_part: bool) -> Result<(&'static Family, Extent), LoadError> {
    let class = fields.read("architectures", "a list with the name of one architecture", |value| {
        match value.as_array()?.as_slice() {
            [Value::String(name)] => Some(name.as_str()),
            _ => None,
        }
    })?;
    let model_type = fields.string("model_type")?;
    let by_class = || all().find(|family| family.architectures.iter().any(|name| Some(*name) == class));
    let by_type = || all().find(|family| family.model_types.iter().any(|name| Some(*name) == model_type));
    let found = match (is_part, class) {
        (true, _) => by_type().or_else(by_class),
        (false, Some(_)) => by_class(),
        (false, None) => by_type(),
    };
    let name = if is_part { model_type.or(class) } else { class.or(model_type) };
    let ends_with = |end: &str| class.filter(|_| !is_part)?.strip_suffix(end);
    // The names of a decoder without its output layer, and with another one.
    let of_decoder = |end: &str, extent: Extent| {
        let stem = ends_with(end)?;
        let stem = stem.strip_suffix("Text").unwrap_or(stem);
        let whole = ["ForCausalLM", "LMHeadModel"].map(|end| format!("{stem}{end}"));
        let known = |family: &&Family| family.architectures.iter().any(|name| whole.iter().any(|whole| whole == name));
        Some((all().find(known)?, extent))
    };
    let of_encoder = |family: &Family| match ends_with(CLASSIFIER) {
        _ if !family.encoder => Extent::Whole,
        Some(_) => Extent::Classifier,
        None => Extent::Headless,
    };
    let found = found.map(|family| (family, of_encoder(family)));
    let found = found.or_else(|| of_decoder("Model", Extent::Headless));
    let found = found.or_else(|| of_decoder(CLASSIFIER, Extent::Classifier));
    found.ok_or_else(|| unknown::error(fields, name, all()))
}
