//! Decoders with several residual streams (Baykal et al., "Alternating Updates for Efficient Transformers", 2023).
//!
//! The first stream is that of other decoders: branches read it and add to it. Every layer mixes all of them before its branches, and
//! corrects all of them by what its branches have changed.

use serde::Serialize;

use super::linear::Linear;
use super::norm::Norm;

/// Greatest number of streams, which kernels have memory for.
pub(crate) const MAX_STREAMS: usize = 8;

/// Where the streams come from and where they end. Each of the others is scaled to the root mean square of the first there:
///
/// ```text
/// others = scaled(project(stream))                      behind the embedding
/// stream = mean of stream and scaled(merge(others))     before the final norm
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Streams {
    /// Projection of the first stream to all others, `[others * hidden_size, hidden_size]`.
    pub project: Linear,
    /// Projection of each of the others, `[hidden_size, hidden_size]`.
    pub merge: Vec<Linear>,
}

/// What a layer does with the streams x. `scores = tanh(router(norm(x_0)))`, before the branches and again behind them:
///
/// ```text
/// x_j += sum of predictions_ji(scores) * x_i;   p = x_0
/// all branches but the last add to x_0
/// d = x_0 - p;   x_0 = p + (1 + corrections_0(scores)) * d;   x_j += (1 + corrections_j(scores)) * d
/// x_j += last branch(output_scale * x_0)   for all but the first
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mixing {
    /// Norm of the router's input.
    pub norm: Norm,
    /// A logit for each stream, `[streams, hidden_size]`.
    pub router: Linear,
    /// Name of a tensor `[streams * streams, streams]`: row `j * streams + i` gives the factor of stream i in stream j.
    pub predictions: String,
    /// Name of a tensor `[streams, streams]`.
    pub corrections: String,
    /// Name of a tensor `[hidden_size]`.
    pub output_scale: String,
}

impl Mixing {
    /// Names and shapes of its tensors that are weights neither of a linear layer nor of a norm.
    pub(crate) fn vectors(&self) -> [(&String, Vec<usize>); 3] {
        let (streams, hidden) = (self.router.rows(), self.router.inputs);
        [
            (&self.predictions, vec![streams * streams, streams]),
            (&self.corrections, vec![streams, streams]),
            (&self.output_scale, vec![hidden]),
        ]
    }
}
