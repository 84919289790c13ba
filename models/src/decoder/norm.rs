//! Norms of rows, or of groups of elements within rows.

use serde::Serialize;

/// A norm of groups of `width` elements of a row: `x̂ * weight + bias`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Norm {
    /// How x̂ is computed.
    pub kind: NormKind,
    /// Names of the weight tensors, which are concatenated; empty: all weights are 1.
    pub weight: Vec<String>,
    /// Name of the bias tensor.
    pub bias: Option<String>,
    /// Shape of each of these tensors. Together they have `width` elements, which serve every group, or one for each element of
    /// the row.
    pub shape: Vec<usize>,
    /// The first of these elements that is used and how many are, if other ranks use the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<(usize, usize)>,
    /// Number of elements in a group.
    pub width: usize,
    /// Term added to the mean of the squares.
    pub eps: f32,
    /// Whether the stored weights are less by 1 than those that are used.
    pub plus_one: bool,
    /// Factor of the weights.
    pub factor: f32,
}

/// Kind of a [`Norm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// `x / sqrt(mean(x²) + eps)` (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019).
    Rms,
    /// `(x - mean(x)) / sqrt(variance(x) + eps)` (Ba et al., "Layer Normalization", 2016).
    Layer,
}

impl Norm {
    /// Names and shapes of its tensors.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        self.weight.iter().chain(&self.bias).map(|name| (name.clone(), self.shape.clone()))
    }
}
