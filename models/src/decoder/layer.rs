//! Layers and their residual branches.

use serde::Serialize;

use super::Mixer;
use super::linear::Linear;
use super::norm::Norm;
use super::streams::Mixing;

/// One layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Layer {
    /// Residual branches, in order.
    pub branches: Vec<Branch>,
    /// Number of first branches that read the same stream and whose outputs are added to it together. Each further branch is applied
    /// to the result of the one before.
    pub parallel: usize,
    /// Name of a tensor `[1]`: a factor of the stream after all branches.
    pub scalar: Option<String>,
    /// How the layer mixes several streams. Its last branch then reads the corrected stream and adds to all streams but the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mixing: Option<Mixing>,
}

/// A residual branch: `stream += scale * norm_after(mixer(norm(stream)))`, then `stream = stream_norm(stream_scale * stream)`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Branch {
    /// Norm of the mixer's input.
    pub norm: Option<Norm>,
    /// What the branch computes.
    pub mixer: Mixer,
    /// Norm of the mixer's output.
    pub norm_after: Option<Norm>,
    /// Factor of what is added to the stream.
    pub scale: f32,
    /// Factor of the stream after the addition.
    pub stream_scale: f32,
    /// Norm of the stream after the addition; the stream becomes its result.
    pub stream_norm: Option<Norm>,
}

impl Branch {
    /// A branch with a norm of its input alone.
    pub fn new(norm: Norm, mixer: Mixer) -> Branch {
        Branch { norm: Some(norm), mixer, norm_after: None, scale: 1.0, stream_scale: 1.0, stream_norm: None }
    }

    /// Norms in order of use.
    pub(super) fn norms(&self) -> Vec<&Norm> {
        let Branch { norm, mixer, norm_after, stream_norm, .. } = self;
        norm.iter().chain(mixer.norms()).chain(norm_after).chain(stream_norm).collect()
    }
}

impl Layer {
    /// A layer of these branches, one after the other.
    pub fn new(branches: Vec<Branch>) -> Layer {
        Layer { branches, parallel: 0, scalar: None, mixing: None }
    }

    /// Linear layers in order of use, without those of experts.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        let of_branches = self.branches.iter().flat_map(|branch| branch.mixer.linears());
        self.mixing.iter().map(|mixing| &mixing.router).chain(of_branches)
    }

    /// All linear layers.
    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let of_branches = self.branches.iter_mut().flat_map(|branch| branch.mixer.linears_mut());
        self.mixing.iter_mut().map(|mixing| &mut mixing.router).chain(of_branches)
    }

    /// Norms in order of use.
    pub(super) fn norms(&self) -> impl Iterator<Item = &Norm> {
        let of_branches = self.branches.iter().flat_map(Branch::norms);
        self.mixing.iter().map(|mixing| &mixing.norm).chain(of_branches)
    }

    /// Names and shapes of tensors that are weights neither of a linear layer nor of a norm.
    pub(super) fn vectors(&self) -> impl Iterator<Item = (&String, Vec<usize>)> {
        let of_branches = self.branches.iter().flat_map(|branch| branch.mixer.vectors());
        let scalar = self.scalar.iter().map(|name| (name, vec![1]));
        of_branches.chain(scalar).chain(self.mixing.iter().flat_map(Mixing::vectors))
    }
}
