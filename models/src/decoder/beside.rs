//! What a predictor reads beside its tokens: hidden states of another decoder.
//!
//! A *predictor* proposes further tokens of a decoder, its *target*. It is a decoder of usually one layer. Its row at position p has
//! the token p + 1 and the state of the target at position p, and predicts the token p + 2; the next row continues with the
//! predictor's own output in place of a state. Two kinds exist:
//!
//! ```text
//! MTP       stream = E·norm(embedding) + H·norm(state)          DeepSeek-V3 Technical Report (2024), section 2.2
//! EAGLE-3   stream = sum of Fᵢ·stateᵢ, or its own output         Li et al., "EAGLE-3" (2025)
//!           queries, keys, values of the first layer = A·norm(embedding) + B·norm(stream)
//! ```
//!
//! Checkpoints have E and H, the Fᵢ, and A and B each as one matrix, whose columns are picked.

use serde::Serialize;

use super::linear::Linear;
use super::norm::Norm;

/// What a predictor reads beside its tokens: the product of a normed embedding, and that of hidden states of its target.
///
/// MTP modules add both ("DeepSeek-V3 Technical Report", 2024, section 2.2). An EAGLE-3 head (Li et al., 2025) begins with the states
/// alone, and its first attention layer reads the embedding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Beside {
    /// Whether the embedding at position 0 is zero.
    pub zero_first: bool,
    /// Norm of the embedding.
    pub token_norm: Norm,
    /// Norm of the state.
    pub state_norm: Option<Norm>,
    /// Products of the states of the target, which are added. A row has as many states.
    pub states: Vec<Linear>,
    /// Whether the predictor's own outputs go through norm and product too. Otherwise they are the stream.
    pub projects_own: bool,
    /// Product of the embedding, which is added to the stream; `None` if the first attention layer reads the embedding
    /// ([`Attention::beside`](super::Attention::beside)).
    pub token: Option<Linear>,
    /// Whether the output that the next row continues with is the one after the final norm. Otherwise it is the stream before it.
    pub continues_normed: bool,
}

impl Beside {
    /// Linear layers in order of use.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.states.iter().chain(&self.token)
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.states.iter_mut().chain(&mut self.token)
    }

    /// Norms in order of use.
    pub(super) fn norms(&self) -> impl Iterator<Item = &Norm> {
        std::iter::once(&self.token_norm).chain(&self.state_norm)
    }
}
