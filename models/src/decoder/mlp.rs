//! Feed-forward networks: dense ones, and mixtures of experts.

use attention_kernels::layer::Activation;
use serde::Serialize;

use super::linear::Linear;
use super::norm::Norm;

/// A feed-forward network: `down(activation(gate(x)) * up(x))` (Shazeer, "GLU Variants Improve Transformer", 2020), or
/// `down(activation(up(x)))`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mlp {
    /// Gate projection, then up projection, `[2 * intermediate_size, inputs]`; without a gate `[intermediate_size, inputs]`.
    pub gate_up: Linear,
    /// Whether there is a gate.
    pub gated: bool,
    /// Activation of the gate, or of the up projection if there is no gate.
    pub activation: Activation,
    /// Names of tensors `[1]` of learned parameters of the activation, before a softplus: of [`Activation::Xielu`] `positive`, and
    /// `negative` less `beta`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub learned: Vec<String>,
    /// `Some(d)`: a gate g becomes `max(g - (mean + d * deviation), 0)` before the activation, with the mean and the standard deviation of
    /// the gates of its row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sparsity: Option<f32>,
    /// Down projection, `[hidden_size, intermediate_size]`.
    pub down: Linear,
}

/// Greatest number of experts of a layer.
pub(crate) const MAX_EXPERTS: usize = 1 << 12;
/// Greatest number of groups of experts.
pub(crate) const MAX_EXPERT_GROUPS: usize = 1 << 8;

/// A mixture of experts (Shazeer et al., "Outrageously Large Neural Networks", 2017): each row is computed by the few
/// feed-forward networks that the router chooses for it, and their outputs are added with the router's weights.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Experts {
    /// Scores of the experts, `[num_experts, inputs]`, and behind them the gate of the shared expert, `[1, inputs]`, if there is
    /// one ([`Experts::shared_gate`]).
    pub router: Linear,
    /// Norm of the router's input, which is then the residual stream instead of the input of the experts.
    pub router_norm: Option<Norm>,
    /// How experts are chosen and weighted.
    pub routing: Routing,
    /// The experts.
    pub experts: Vec<Mlp>,
    /// A network that computes every row and whose output is added.
    pub shared: Option<Mlp>,
    /// Whether the output of the shared network is multiplied by `sigmoid(gate)`.
    pub shared_gate: bool,
    /// What makes the inputs of narrow experts, `[width, hidden_size]`, and what widens the sum of their outputs, `[hidden_size, width]`. The
    /// shared network, without a gate, is as wide as the stream (NVIDIA, "Nemotron 3", 2025).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub narrow: Option<[Linear; 2]>,
    /// How many outputs each rank of a group computes, if those of all ranks are gathered behind the sum; else empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gathered_outputs: Vec<usize>,
    /// Whether each rank of a group has some of the inputs of the down projections, and the results of all are added.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub summed: bool,
}

impl Experts {
    /// Width of the inputs of the experts.
    pub(crate) fn inputs(&self) -> usize {
        self.experts.first().map_or(self.router.inputs, |expert| expert.gate_up.inputs)
    }

    /// Whether the output of the shared network is a part of the sum of the experts' outputs.
    pub(crate) fn adds_shared(&self) -> bool {
        self.shared.is_some() && self.narrow.is_none()
    }

    /// The projections of all experts that a device stacks: gate and up, down.
    pub(crate) fn stacks(&self) -> [Vec<&Linear>; 2] {
        let of = |linear: fn(&Mlp) -> &Linear| self.experts.iter().map(linear).collect();
        [of(|mlp| &mlp.gate_up), of(|mlp| &mlp.down)]
    }
}

/// How a router chooses experts for a row and weights their outputs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Routing {
    /// Number of experts chosen for each row.
    pub top_k: usize,
    /// Scores from the router's logits.
    pub scores: Scores,
    /// Name and shape of a tensor with an element per expert that is added to the scores for the choice, but not for the weights.
    pub choice_bias: Option<(String, Vec<usize>)>,
    /// The choice is restricted to the best groups of experts.
    pub groups: Option<Groups>,
    /// Normalises the top-k weights to sum to 1 (`norm_topk_prob`).
    pub renormalise: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// Whether the weights multiply the inputs of experts instead of their outputs (Llama 4). Such experts have no biases.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub scales_inputs: bool,
    /// Name of a tensor `[num_experts]`: a factor of each expert's weights.
    pub expert_scale: Option<String>,
}

/// Scores of experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scores {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// The logits; the weights are the softmax over the chosen experts.
    Logits,
    /// The logits. The weight of an expert z is its share in a softmax over the experts i that are neither chosen before nor far
    /// from the best of these: `(best - i) / max(|i|, best) <= threshold` (SparseMixer, Liu et al., 2023, as Phi-3.5-MoE infers).
    SparseMixer {
        /// Greatest relative distance, twice the jitter of the training.
        threshold: f32,
    },
}

/// Groups of consecutive experts of equal number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Groups {
    /// Number of groups.
    pub count: usize,
    /// Number of groups from which experts are chosen.
    pub top: usize,
    /// Whether a group is ranked by the sum of its two best scores. Otherwise it is ranked by its best score.
    pub by_two: bool,
}

/// A network whose gate is multiplied by inputs of the layer's own instead of by an up projection:
/// `projection(activation(gate(x)) * input)` (Gemma 3n, Google, 2025). See [`PerLayerInputs`](super::PerLayerInputs).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PerLayer {
    /// Gate, `[width, hidden_size]`.
    pub gate: Linear,
    /// Its activation.
    pub activation: Activation,
    /// Output projection, `[hidden_size, width]`.
    pub projection: Linear,
    /// Which of the inputs it uses.
    pub layer: usize,
}

/// A narrow network without an activation whose normed output is added to its input: `x + norm(right(left(x)))` (Menghani et al.,
/// "LAuReL: Learned Augmented Residual Layer", 2024).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Laurel {
    /// `[rank, hidden_size]`.
    pub left: Linear,
    /// `[hidden_size, rank]`.
    pub right: Linear,
    /// Norm of the output.
    pub norm: Norm,
}

impl Mlp {
    /// Elements per row between activation and down projection.
    pub fn width(&self) -> usize {
        self.gate_up.rows() / if self.gated { 2 } else { 1 }
    }
}
