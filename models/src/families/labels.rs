//! The keys of `config.json` about labels of texts and about the lengths of embeddings.

use serde_json::Value;

use super::sizes::{self, MAX_WIDTH};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::decoder::DenseActivation;
use crate::pooling::{Dimensions, ScoreFunction};

/// Greatest number of labels.
const MAX_LABELS: usize = 1 << 16;

/// Names of the labels of a classifier, and how their logits become scores.
pub(super) fn read(fields: &Fields<'_>) -> Result<(Vec<String>, ScoreFunction), LoadError> {
    let name = |label: usize| format!("LABEL_{label}");
    let expected = format!("an object with the names of labels 0, 1, …, at most {MAX_LABELS}");
    let named = fields.read("id2label", &expected, |value| {
        let map = value.as_object().filter(|map| map.len() <= MAX_LABELS)?;
        let names = (0..map.len()).map(|label| Some(map.get(&label.to_string())?.as_str()?.to_string()));
        names.collect::<Option<Vec<_>>>()
    })?;
    let labels = match named.filter(|names| !names.is_empty()) {
        Some(names) => names,
        // The default of the class.
        None => (0..sizes::optional(fields, "num_labels", MAX_LABELS as u64)?.unwrap_or(2)).map(name).collect(),
    };
    let scores = function(fields, labels.len())?;
    Ok((labels, scores))
}

/// As vLLM has it: the kind of problem decides, then the activation that Sentence Transformers has stored.
fn function(fields: &Fields<'_>, labels: usize) -> Result<ScoreFunction, LoadError> {
    let usual = if labels == 1 { ScoreFunction::Sigmoid } else { ScoreFunction::Softmax };
    let problems = "\"regression\", \"single_label_classification\" or \"multi_label_classification\"";
    let of_problem = fields.read("problem_type", problems, |value| match value.as_str()? {
        "regression" => Some(ScoreFunction::Identity),
        "single_label_classification" => Some(usual),
        "multi_label_classification" => Some(ScoreFunction::Sigmoid),
        _ => None,
    })?;
    let stored = |fields: &Fields<'_>, key: &str| {
        fields.read(key, "Identity, Sigmoid or Softmax of torch", |value| {
            match value.as_str()?.rsplit('.').next()?.to_ascii_lowercase().as_str() {
                "identity" => Some(ScoreFunction::Identity),
                "sigmoid" => Some(ScoreFunction::Sigmoid),
                "softmax" => Some(ScoreFunction::Softmax),
                _ => None,
            }
        })
    };
    let older = stored(fields, "sbert_ce_default_activation_function")?;
    let newer = fields.object("sentence_transformers")?.map(|inner| stored(&inner, "activation_fn")).transpose()?;
    Ok(of_problem.or(newer.flatten()).or(older).unwrap_or(usual))
}

/// The activation of the layer before that of the labels.
pub(super) fn activation(fields: &Fields<'_>, usual: DenseActivation) -> Result<DenseActivation, LoadError> {
    let read = |value: &Value| DenseActivation::named(value.as_str()?);
    Ok(fields.read("classifier_activation", DenseActivation::NAMES, read)?.unwrap_or(usual))
}

/// To which lengths embeddings may be cut (Kusupati et al., "Matryoshka Representation Learning", 2022).
pub(super) fn dimensions(fields: &Fields<'_>) -> Result<Dimensions, LoadError> {
    let listed = fields.read("matryoshka_dimensions", "a list of numbers of dimensions", |value| {
        let number = |value: &Value| value.as_u64().filter(|n| (1..=MAX_WIDTH).contains(n)).map(|n| n as usize);
        value.as_array()?.iter().map(number).collect::<Option<Vec<_>>>()
    })?;
    let any = fields.boolean("is_matryoshka")?.unwrap_or(false);
    Ok(match listed {
        Some(listed) => Dimensions::Listed(listed),
        None if any => Dimensions::Any,
        None => Dimensions::Own,
    })
}
