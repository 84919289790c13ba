//! Registers and operations of a [`Program`](super::program::Program).

use std::sync::Arc;

use crate::decoder::Activation;

/// A buffer of a step with one row per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Register {
    /// Residual stream.
    Stream,
    /// Input of a branch after its norm, and later the branch's output.
    Branch,
    /// Fused queries, keys, values and output gate.
    Qkv,
    /// Output of attention.
    Attended,
    /// Gate and up projections of a feed-forward network.
    GateUp,
    /// Output of its activation.
    Activated,
    /// Rows in 8 bits, with a scale for each block of numbers ([`RowBlock`](linear::RowBlock)).
    Q8,
    /// Output of a branch that waits for its norm or for the other branch.
    Held,
    /// Logits of a router.
    Scores,
    /// Output of a mixture of experts.
    Mixed,
    /// Inputs of all layers' [`PerLayer`](crate::decoder::PerLayer) networks.
    PerLayer,
    /// This rank's outputs of a linear layer, before those of all ranks are gathered.
    Shard,
    /// The inputs of a linear layer that all ranks have computed.
    Gathered,
    /// All residual streams but the first, side by side.
    Others,
    /// The first stream as a layer has mixed it, before its branches.
    Mixture,
    /// Queries of an indexer, or inputs of narrow experts.
    Index,
}

/// An operation on several streams ([`Streams`](crate::decoder::Streams), [`Mixing`](crate::decoder::Mixing)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamStep {
    /// Scales the others to the root mean square of `Stream`.
    Rescale,
    /// Mixes all streams by the logits in `Scores`, and keeps the new `Stream` in `Mixture`. The number is that of the layer's mixing.
    Mix(usize),
    /// Corrects all streams by what `Stream` differs from `Mixture`, by the logits in `Scores`. `Branch` = the corrected `Stream` times the
    /// output scale.
    Correct(usize),
    /// Adds `Branch` to the others.
    Add,
    /// `Stream` = the mean of it and the others.
    Mean,
}

impl Register {
    pub const COUNT: usize = 16;
}

/// The heads of a register's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadRows {
    pub register: Register,
    /// Elements between rows.
    pub stride: usize,
    /// Elements between heads.
    pub head_stride: usize,
}

/// A factor of a whole register.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Factor {
    Number(f32),
    /// A tensor of the checkpoint: [`Layer::scalar`](crate::decoder::Layer::scalar), counted.
    Scalar(usize),
}

/// One operation on all rows of a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Op {
    /// `to` = the tokens' rows of a table, which is a linear layer, times `scale`.
    Embed { table: usize, scale: f32, to: Register },
    /// `to` = the rows that the stage before has sent.
    Receive { to: Register },
    /// Sends the rows of `Stream` to the stage behind.
    Send,
    /// `Stream` += learned embeddings of the positions; `table` is a linear layer.
    AddPositions { table: usize, offset: usize },
    /// `Stream` += the embeddings of the tokens' types; `table` is a linear layer.
    AddTypes { table: usize },
    /// Sets the rows of `Stream` at position 0 to zero.
    ZeroFirst,
    /// `Stream` = the sum of the products of the states that the batch of a predictor comes with, after a norm if there is one; or the
    /// predictor's own output. The products are linear layers from `linear` on. Overwrites `Branch` and `Mixed`.
    States { linear: usize, norm: Option<usize> },
    /// Keeps `Stream` for a predictor as its state number `state`.
    Tap { state: usize },
    /// Fills a rotary table with the cosines and sines of the positions.
    RopeTable { table: usize },
    /// `to` = the norm of each of `groups` parts of the rows of `from`.
    Norm { norm: usize, groups: usize, from: Register, to: Register },
    /// `to = linear(from)`.
    Linear { linear: usize, from: Register, to: Register },
    /// `to = activation(gate) * up`, where `linear(from)` is gate and up; `width` is that of the result.
    LinearActivate { linear: usize, from: Register, activation: Activation, width: usize, to: Register },
    /// Head norms and rotation of `Qkv` in place, and the cache write.
    QkNormRopeCache { attention: usize },
    /// Head norms and rotation of `Qkv` in place, for a layer without a cache.
    QkNormRope { attention: usize },
    /// From the queries in `Attended` and the latent row in `GateUp`, which it norms and rotates: the rotated parts of `Qkv`, the
    /// rows of latent attention.
    LatentRows { attention: usize },
    /// `Qkv` = the queries, keys and values in `GateUp`, the values as wide as keys.
    WidenValues { attention: usize },
    /// `Activated` = the output of attention in `Attended` without what widened the values.
    NarrowValues { attention: usize },
    /// Norms and rotates the index keys in the latent rows in `GateUp`, and rotates the index queries in `Index`.
    IndexRows { attention: usize, norm: usize },
    /// `Attended` = attention of the queries in `Qkv` to the tokens that the queries in `Index` choose with the factors in `Scores`, or
    /// that were chosen before.
    AttendChosen { attention: usize },
    /// A product of each head's part of the rows of `from`; `product` counts the decoder's
    /// [`head_linears`](crate::Decoder::head_linears). Overwrites `Activated` and `Mixed`.
    HeadLinear { product: usize, from: HeadRows, to: HeadRows },
    /// The cache write of `Qkv`, if no other operation does it.
    WriteCache { attention: usize },
    /// `Attended` = attention of the queries in `Qkv`.
    Attend { attention: usize },
    /// `Attended` = attention of the queries in `Qkv` to its keys and values, of the rows of a sequence to both sides.
    AttendBoth { attention: usize },
    /// `Attended` = the gated output of a recurrent layer whose projections are in `Qkv`, after the norm of each head if there is one.
    Recurrent { recurrent: usize, norm: Option<usize> },
    /// The same for a delta net with decays of channels: the decays are in `GateUp`, the gate in `Activated`.
    ChannelDelta { recurrent: usize, norm: Option<usize> },
    /// `Activated` = the convolved values of a selective state space whose projections are in `Qkv`.
    Convolve { recurrent: usize },
    /// `Attended` = the gated output of a selective state space: its values are in `Activated`, steps in `GateUp`, k and q in `Mixed`, and
    /// the gate in `Qkv`. `norms` are those of k and of q.
    Scan { recurrent: usize, norms: [usize; 2] },
    /// `Attended *= sigmoid(gate)`, the gate in `Qkv`.
    GateAttended { attention: usize },
    /// Drops the rows whose results are not needed ([`ForwardBatch::needed`](super::ForwardBatch::needed)). Each move gathers the
    /// rest of one register (of that width) into another, then the two registers swap names.
    KeepNeeded { moves: Vec<(Register, Register, usize)> },
    /// `to = activation(gate) * up` of the rows of `GateUp`, or `activation(up)`; `width` is that of the result.
    Activate { activation: Activation, gated: bool, width: usize, to: Register },
    /// Sets the gates of the rows of `GateUp`, of `width` elements before as many others, to 0 up to `deviations` standard deviations above
    /// their mean, and lessens the others by that.
    Sparsify { width: usize, deviations: f32 },
    /// An operation on `Stream` and the other streams, which are in `others`.
    Streams { step: StreamStep, others: Register },
    /// `Activated` = activation of the gate in `GateUp` times the inputs of this layer in `PerLayer`.
    ActivatePerLayer { activation: Activation, width: usize, layer: usize },
    /// `Mixed` = the weighted outputs of the experts that the rows of `Scores` choose, and, if there is a shared network, what
    /// `Mixed` holds. Overwrites `Qkv`, `Attended`, `GateUp` and `Activated`.
    Experts { experts: usize, from: Register },
    /// `to += from` for rows of `width` elements.
    AddRows { to: Register, from: Register, width: usize },
    /// `to += scale * from`.
    Add { to: Register, from: Register, scale: f32 },
    /// `register *= factor`.
    Scale { register: Register, factor: Factor },
    /// `Stream += scale * Branch`, then `to = norm(Stream)`.
    AddNorm { norm: usize, scale: f32, to: Register },
    /// `to` = the rows of `from` of all ranks, side by side; `widths` are the elements of each rank.
    Gather { from: Register, to: Register, widths: Arc<[usize]> },
    /// Adds the rows of a register of all ranks, of `width` elements.
    Sum { register: Register, width: usize },
    /// Swaps the names of two registers of equal width.
    Swap { a: Register, b: Register },
}

impl Op {
    /// Whether the operation reads a register.
    pub fn reads(&self, register: Register) -> bool {
        match *self {
            Op::Embed { .. } | Op::Receive { .. } | Op::RopeTable { .. } | Op::States { .. } => false,
            Op::AddPositions { .. } | Op::AddTypes { .. } | Op::Send | Op::ZeroFirst | Op::Tap { .. } => {
                register == Register::Stream
            }
            Op::Scale { register: own, .. } | Op::Sum { register: own, .. } => register == own,
            Op::ActivatePerLayer { .. } => matches!(register, Register::GateUp | Register::PerLayer),
            Op::Sparsify { .. } => register == Register::GateUp,
            Op::Streams { step, others } => {
                let more: &[Register] = match step {
                    StreamStep::Rescale | StreamStep::Mean => &[],
                    StreamStep::Mix(_) => &[Register::Scores],
                    StreamStep::Correct(_) => &[Register::Scores, Register::Mixture],
                    StreamStep::Add => &[Register::Branch],
                };
                [Register::Stream, others].contains(&register) || more.contains(&register)
            }
            Op::Norm { from, .. }
            | Op::Linear { from, .. }
            | Op::LinearActivate { from, .. }
            | Op::Gather { from, .. } => register == from,
            Op::QkNormRopeCache { .. }
            | Op::Attend { .. }
            | Op::AttendBoth { .. }
            | Op::QkNormRope { .. }
            | Op::WriteCache { .. }
            | Op::Recurrent { .. }
            | Op::Convolve { .. } => register == Register::Qkv,
            Op::ChannelDelta { .. } => matches!(register, Register::Qkv | Register::Activated | Register::GateUp),
            Op::Scan { .. } => {
                matches!(register, Register::Qkv | Register::Activated | Register::GateUp | Register::Mixed)
            }
            Op::LatentRows { .. } => matches!(register, Register::Attended | Register::GateUp),
            Op::WidenValues { .. } => register == Register::GateUp,
            Op::NarrowValues { .. } => register == Register::Attended,
            Op::IndexRows { .. } => matches!(register, Register::Index | Register::GateUp),
            Op::AttendChosen { .. } => matches!(register, Register::Qkv | Register::Index | Register::Scores),
            Op::HeadLinear { from, .. } => register == from.register,
            Op::GateAttended { .. } => matches!(register, Register::Qkv | Register::Attended),
            Op::KeepNeeded { ref moves } => moves.iter().any(|(from, ..)| register == *from),
            Op::Activate { .. } => register == Register::GateUp,
            Op::Experts { from, .. } => [from, Register::Scores, Register::Mixed].contains(&register),
            Op::Add { to, from, .. } | Op::AddRows { to, from, .. } => [from, to].contains(&register),
            Op::AddNorm { .. } => matches!(register, Register::Stream | Register::Branch),
            // Both may be read later, under other names.
            Op::Swap { a, b } => [a, b].contains(&register),
        }
    }

    /// Whether the operation overwrites a register without reading it.
    pub fn overwrites(&self, register: Register) -> bool {
        let written = match *self {
            Op::Embed { to, .. } | Op::Norm { to, .. } | Op::Linear { to, .. } | Op::Activate { to, .. } => vec![to],
            Op::LinearActivate { to, .. } | Op::AddNorm { to, .. } | Op::Gather { to, .. } | Op::Receive { to } => {
                vec![to]
            }
            Op::ActivatePerLayer { .. } | Op::Convolve { .. } | Op::NarrowValues { .. } => vec![Register::Activated],
            Op::WidenValues { .. } => vec![Register::Qkv],
            Op::States { .. } => vec![Register::Stream, Register::Branch, Register::Mixed],
            Op::Streams { step: StreamStep::Mix(_), .. } => vec![Register::Mixture],
            Op::Streams { step: StreamStep::Correct(_), .. } => vec![Register::Branch],
            Op::Attend { .. }
            | Op::AttendChosen { .. }
            | Op::AttendBoth { .. }
            | Op::Recurrent { .. }
            | Op::ChannelDelta { .. }
            | Op::Scan { .. } => {
                vec![Register::Attended]
            }
            Op::Experts { .. } => vec![Register::Qkv, Register::Attended, Register::GateUp, Register::Activated],
            Op::KeepNeeded { ref moves } => moves.iter().map(|(_, to, _)| *to).collect(),
            _ => Vec::new(),
        };
        written.contains(&register) && !self.reads(register)
    }
}

/// What [`Op::QkNormRopeCache`] uses in an attention layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionPlan {
    /// Index of its rotary table.
    pub table: Option<usize>,
    pub query_norm: Option<usize>,
    pub key_norm: Option<usize>,
    pub value_norm: Option<usize>,
    pub latent_norm: Option<usize>,
}
