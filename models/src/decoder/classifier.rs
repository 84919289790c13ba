//! Classifiers: from the pooled hidden state of a text to the logits of labels.

use serde::Serialize;

use super::norm::Norm;
use crate::pooling::{Pooling, ScoreFunction};

/// From the pooled hidden state of a text to the logits of its labels.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Classifier {
    /// How hidden states are pooled.
    pub pooling: Pooling,
    /// The layers, in order.
    pub layers: Vec<Dense>,
    /// Names of the labels: one per logit.
    pub labels: Vec<String>,
    /// From logits to scores.
    pub scores: ScoreFunction,
}

/// `norm(activation(W x + b))` of a vector.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Dense {
    /// Names of the rows of W, without `.weight` and `.bias`: a tensor, or rows of another layer's.
    pub name: String,
    /// Number of outputs.
    pub outputs: usize,
    /// Number of inputs.
    pub inputs: usize,
    /// Whether there is a b.
    pub bias: bool,
    /// The activation.
    pub activation: DenseActivation,
    /// Norm of the result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm: Option<Norm>,
}

/// Activation of a [`Dense`] layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DenseActivation {
    /// None.
    #[default]
    Identity,
    /// Hyperbolic tangent.
    Tanh,
    /// The positive part.
    Relu,
    /// GELU with the error function.
    Gelu,
    /// SiLU.
    Silu,
    /// The logistic function.
    Sigmoid,
}

impl DenseActivation {
    /// The activation of this name in transformers or torch: `gelu`, `Tanh`, `torch.nn.modules.activation.Tanh`.
    pub fn named(name: &str) -> Option<DenseActivation> {
        Some(match name.rsplit('.').next()?.to_ascii_lowercase().as_str() {
            "identity" | "linear" => DenseActivation::Identity,
            "tanh" => DenseActivation::Tanh,
            "relu" => DenseActivation::Relu,
            "gelu" => DenseActivation::Gelu,
            "silu" | "swish" => DenseActivation::Silu,
            "sigmoid" => DenseActivation::Sigmoid,
            _ => return None,
        })
    }

    /// The names that [`DenseActivation::named`] knows, for messages.
    pub const NAMES: &str = "Identity, Tanh, ReLU, GELU, SiLU or Sigmoid";
}

impl Dense {
    /// A layer without a bias, an activation and a norm.
    pub fn new(name: impl Into<String>, outputs: usize, inputs: usize) -> Dense {
        let (activation, norm) = (DenseActivation::Identity, None);
        Dense { name: name.into(), outputs, inputs, bias: false, activation, norm }
    }

    /// The same with a bias and an activation.
    pub fn activated(self, bias: bool, activation: DenseActivation) -> Dense {
        Dense { bias, activation, ..self }
    }

    /// Names and shapes of its tensors.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        let weight = (format!("{}.weight", self.name), vec![self.outputs, self.inputs]);
        let bias = self.bias.then(|| (format!("{}.bias", self.name), vec![self.outputs]));
        std::iter::once(weight).chain(bias).chain(self.norm.iter().flat_map(Norm::tensors))
    }
}
