//! Recurrent layers: a state of fixed size per sequence instead of keys and values.

use std::ops::Range;

use serde::Serialize;

use super::Mixer;
use super::attention::HeadShard;
use super::linear::Linear;
use super::norm::Norm;

/// A recurrent layer. Every value head has a matrix S of `key_dim` by `value_dim`, or no matrix, and the last inputs of a causal
/// convolution. `conv` is that convolution over the last `kernel` tokens, with a bias if there is one, and [`Rule`] what follows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recurrent {
    /// What the layer computes.
    pub rule: Rule,
    /// Projections to q, k (`key_heads * key_dim` rows each), v, z (`value_heads * value_dim` rows each), and behind them what the rule
    /// reads besides, in this order. z may come from elsewhere ([`Rule::ChannelDelta`]).
    pub projections: Linear,
    /// Number of heads of q and k; value head h uses head `h / (value_heads / key_heads)`.
    pub key_heads: usize,
    /// Number of heads of v; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Which heads these are, if other ranks have more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<HeadShard>,
    /// Elements per head of q and k; 0 if there is no matrix.
    pub key_dim: usize,
    /// Elements per head of v.
    pub value_dim: usize,
    /// Number of tokens that the convolution reads, at least 1.
    pub kernel: usize,
    /// Names of the weights of the convolution: of one tensor, `[conv_width, 1, kernel]`, or of one each for q, k and v.
    pub conv: Vec<String>,
    /// Name of the biases of the convolution, `[conv_width]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conv_bias: Option<String>,
    /// Norm of the output: of each value head, before the gate, in a gated delta net; of groups of heads, behind it, elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm: Option<Norm>,
    /// Output projection, `[hidden_size, value_heads * value_dim]`.
    pub output: Linear,
}

/// What a recurrent layer computes for a token.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// A gated delta net (Yang et al., "Gated Delta Networks", 2024), with q and k scaled to length 1 (q also by `1 / sqrt(key_dim)`),
    /// and a and b of each value head:
    ///
    /// ```text
    /// [q | k | v] = silu(conv [q | k | v])
    /// S ← e^(-e^A_log · softplus(a + dt_bias)) · S;   S ← S + k ⊗ σ(b) · (v − Sᵀk);   o = Sᵀq
    /// output(norm(o) · silu(z))
    /// ```
    GatedDelta {
        /// Name of the logarithms of the decay, `[value_heads]`.
        a_log: String,
        /// Name of what is added to a, `[value_heads]`.
        dt_bias: String,
    },
    /// A short convolution without a matrix (Liquid AI, "LFM2", 2025), with a factor b of each channel: `output(z · conv(b · v))`.
    ShortConvolution,
    /// A selective state space (Dao & Gu, "Transformers are SSMs", 2024: Mamba-2), with one step dt of each value head:
    ///
    /// ```text
    /// [q | k | v] = silu(conv [q | k | v])
    /// step = clamp(softplus(dt + dt_bias));   S ← e^(-e^A_log · step) · S + k ⊗ step · v;   o = Sᵀq + skip · v
    /// output(norm(o · silu(z)))
    /// ```
    ///
    /// Its papers call q, k and v C, B and x. Checkpoints have the channels of the convolution in the order v, k, q. The results of the
    /// projections are multiplied by `factors` before.
    StateSpace {
        /// Name of the logarithms of the decay, `[value_heads]`.
        a_log: String,
        /// Name of what is added to dt, `[value_heads]`.
        dt_bias: String,
        /// Name of the factors of v in the output, `[value_heads]`.
        skip: String,
        /// Least and greatest step.
        steps: (f32, f32),
        /// Factors of q, k, v, z and dt.
        factors: [f32; 5],
    },
    /// A selective state space with a step of each channel (Gu & Dao, "Mamba", 2023: Mamba-1). q, k and the steps are projections of
    /// the convolved v, and there is one head of q and k.
    ///
    /// ```text
    /// v = silu(conv v);   step = softplus(step(norm(low(v))));   [k | q] = norms(keys(v))
    /// S ← e^(-e^A_log · step) · S + k ⊗ step · v;   o = Sᵀq + skip · v
    /// output(o · silu(z))
    /// ```
    ///
    /// Its paper calls q, k and v C, B and x.
    Selective(Box<Selective>),
    /// A gated delta net with a decay of each element of k (Kimi Team, "Kimi Linear", 2025). The decays and the gate are products of a few
    /// numbers, and the gate is a sigmoid:
    ///
    /// ```text
    /// [q | k | v] = silu(conv [q | k | v]);   a = decay(low(x));   z = gate(low(x))
    /// S ← e^(-e^A_log · softplus(a + dt_bias)) · S, by rows;   S ← S + k ⊗ σ(b) · (v − Sᵀk);   o = Sᵀq
    /// output(norm(o) · σ(z))
    /// ```
    ChannelDelta(Box<ChannelDelta>),
}

/// What a [delta net with decays of channels](Rule::ChannelDelta) has beside its projections.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChannelDelta {
    /// From the input to a few numbers, and from these to a of each element of k, `[value_heads * key_dim]`.
    pub decay: [Linear; 2],
    /// From the input to a few numbers, and from these to z, `[value_heads * value_dim]`.
    pub gate: [Linear; 2],
    /// Name of the logarithms of the decay, `[1, 1, value_heads, 1]`.
    pub a_log: String,
    /// Name of what is added to a, `[value_heads * key_dim]`.
    pub dt_bias: String,
}

/// What a [selective state space](Rule::Selective) computes from its convolved values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Selective {
    /// From v to a few numbers, from which the steps are computed.
    pub low: Linear,
    /// Norm of these numbers.
    pub low_norm: Norm,
    /// From these numbers to the steps, `[value_width, rank]`.
    pub step: Linear,
    /// From v to k and q, `[2 * key_dim, value_width]`.
    pub keys: Linear,
    /// Norms of k and of q.
    pub key_norms: [Norm; 2],
    /// Name of the logarithms of the decay, `[value_width, key_dim]`.
    pub a_log: String,
    /// Name of the factors of v in the output, `[value_width]`.
    pub skip: String,
}

/// Rows of the projections that belong to heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Whether the heads are those of q and k.
    pub of_keys: bool,
    /// Rows of a head.
    pub dim: usize,
}

impl From<Recurrent> for Mixer {
    fn from(layer: Recurrent) -> Mixer {
        Mixer::Recurrent(layer)
    }
}

impl Rule {
    /// What it computes of these value heads.
    pub(super) fn of_heads(&self, heads: &Range<usize>, key_dim: usize, value_dim: usize) -> Rule {
        let Rule::ChannelDelta(rule) = self else { return self.clone() };
        let of = |linear: &Linear, dim: usize| linear.outputs(std::iter::once(heads.start * dim..heads.end * dim));
        let (mut decay, mut gate) = (rule.decay.clone(), rule.gate.clone());
        (decay[1], gate[1]) = (of(&decay[1], key_dim), of(&gate[1], value_dim));
        Rule::ChannelDelta(Box::new(ChannelDelta { decay, gate, ..(**rule).clone() }))
    }
}

impl Recurrent {
    /// Elements per row of q and of k.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Elements per row of v, of z and of the output of the recurrence.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Elements of a head of q and of k that come from the convolution: all, or none.
    pub(crate) fn conv_key_dim(&self) -> usize {
        if matches!(self.rule, Rule::Selective(_)) { 0 } else { self.key_dim }
    }

    /// Elements per row of q, k and v together: the channels of the convolution.
    pub fn conv_width(&self) -> usize {
        2 * self.key_heads * self.conv_key_dim() + self.value_width()
    }

    /// Channels of the convolution that one value head reads: those of its q, k and v.
    pub fn head_channels(&self) -> usize {
        2 * self.conv_key_dim() + self.value_dim
    }

    /// Numbers of the state of a value head that are inputs of the convolution.
    pub(crate) fn head_tail(&self) -> usize {
        (self.kernel - 1) * self.head_channels()
    }

    /// Linear layers in order of use.
    pub(super) fn linears(&self) -> Vec<&Linear> {
        let inner = match &self.rule {
            Rule::Selective(rule) => vec![&rule.low, &rule.step, &rule.keys],
            Rule::ChannelDelta(rule) => rule.decay.iter().chain(&rule.gate).collect(),
            Rule::GatedDelta { .. } | Rule::ShortConvolution | Rule::StateSpace { .. } => Vec::new(),
        };
        std::iter::once(&self.projections).chain(inner).chain([&self.output]).collect()
    }

    pub(super) fn linears_mut(&mut self) -> Vec<&mut Linear> {
        let inner = match &mut self.rule {
            Rule::Selective(rule) => vec![&mut rule.low, &mut rule.step, &mut rule.keys],
            Rule::ChannelDelta(rule) => rule.decay.iter_mut().chain(&mut rule.gate).collect(),
            Rule::GatedDelta { .. } | Rule::ShortConvolution | Rule::StateSpace { .. } => Vec::new(),
        };
        std::iter::once(&mut self.projections).chain(inner).chain([&mut self.output]).collect()
    }

    /// Norms in order of use.
    pub(super) fn norms(&self) -> Vec<&Norm> {
        let inner = match &self.rule {
            Rule::Selective(rule) => std::iter::once(&rule.low_norm).chain(&rule.key_norms).collect(),
            _ => Vec::new(),
        };
        inner.into_iter().chain(&self.norm).collect()
    }

    /// Float32 numbers of the state of one value head: the last `kernel - 1` inputs of its convolution, then S by rows. Heads
    /// that share q and k keep their own copies of these inputs, so that no head reads what another one writes. At least 1.
    pub fn head_state(&self) -> usize {
        (self.head_tail() + self.key_dim * self.value_dim).max(1)
    }

    /// Bytes of the state of a sequence.
    pub fn state_bytes(&self) -> usize {
        self.value_heads * self.head_state() * size_of::<f32>()
    }

    /// Number of value heads whose states lie in the keys of a page; those of the others lie in the values. Attention beside delta nets
    /// with decays of channels is latent, and its pages have no values.
    pub fn heads_in_keys(&self) -> usize {
        match self.rule {
            Rule::ChannelDelta(_) => self.value_heads,
            _ => self.value_heads.div_ceil(2),
        }
    }

    /// The rows of the projections in order: q, k, v, z, and what the rule reads besides.
    pub(crate) fn pieces(&self) -> Vec<Piece> {
        let keys = Piece { of_keys: true, dim: self.conv_key_dim() };
        let values = |dim: usize| Piece { of_keys: false, dim };
        let first = [keys, keys, values(self.value_dim)];
        let z = values(self.value_dim);
        let rest = match self.rule {
            // b, a.
            Rule::GatedDelta { .. } => vec![z, values(1), values(1)],
            // b.
            Rule::ShortConvolution => vec![z, values(self.value_dim)],
            // dt.
            Rule::StateSpace { .. } => vec![z, values(1)],
            Rule::Selective(_) => vec![z],
            // b; z is no row of the projections.
            Rule::ChannelDelta(_) => vec![values(1)],
        };
        first.into_iter().chain(rest).collect()
    }

    /// Factors of the convolution's weights for q, k and v.
    pub(crate) fn conv_factors(&self) -> [f32; 3] {
        match self.rule {
            Rule::StateSpace { factors: [q, k, v, ..], .. } => [q, k, v],
            _ => [1.0; 3],
        }
    }

    /// Whether the norm of the output is that of each value head, before the gate.
    pub(crate) fn norms_before_gate(&self) -> bool {
        matches!(self.rule, Rule::GatedDelta { .. } | Rule::ChannelDelta(_))
    }

    /// The heads of all ranks, and which of them these are.
    fn whole(&self) -> HeadShard {
        let own = HeadShard { first: 0, first_kv: 0, num_heads: self.value_heads, num_kv_heads: self.key_heads };
        self.shard.unwrap_or(own)
    }

    /// The channels of the convolution, the parts of q, k and v, among those of its tensor.
    pub fn channels(&self) -> [Range<usize>; 3] {
        let HeadShard { first, first_kv, num_heads, num_kv_heads } = self.whole();
        let key_dim = self.conv_key_dim();
        let (keys, values) = (num_kv_heads * key_dim, num_heads * self.value_dim);
        let [q, k, v] = match self.rule {
            Rule::GatedDelta { .. } | Rule::ShortConvolution | Rule::Selective(_) | Rule::ChannelDelta(_) => {
                [0, keys, 2 * keys]
            }
            Rule::StateSpace { .. } => [values + keys, values, 0],
        };
        let (own, key, value) = (self.key_heads * key_dim, first_kv * key_dim, first * self.value_dim);
        [q + key..q + key + own, k + key..k + key + own, v + value..v + value + self.value_width()]
    }

    /// The value heads, among those of all ranks.
    pub fn heads(&self) -> Range<usize> {
        let first = self.whole().first;
        first..first + self.value_heads
    }

    /// Names and shapes of its tensors that are weights neither of a linear layer nor of the norm.
    pub(crate) fn vectors(&self) -> Vec<(&String, Vec<usize>)> {
        let HeadShard { num_heads, num_kv_heads, .. } = self.whole();
        let (keys, values) = (num_kv_heads * self.conv_key_dim(), num_heads * self.value_dim);
        let channels = 2 * keys + values;
        let widths = if self.conv.len() == 1 { vec![channels] } else { vec![keys, keys, values] };
        let conv = self.conv.iter().zip(widths).map(|(name, width)| (name, vec![width, 1, self.kernel]));
        let biases = self.conv_bias.iter().map(|name| (name, vec![channels]));
        let (heads, width) = (vec![num_heads], num_heads * self.value_dim);
        let rest = match &self.rule {
            Rule::GatedDelta { a_log, dt_bias } => vec![(a_log, heads.clone()), (dt_bias, heads)],
            Rule::ShortConvolution => Vec::new(),
            Rule::StateSpace { a_log, dt_bias, skip, .. } => {
                [a_log, dt_bias, skip].map(|name| (name, heads.clone())).to_vec()
            }
            Rule::Selective(rule) => vec![(&rule.a_log, vec![width, self.key_dim]), (&rule.skip, vec![width])],
            Rule::ChannelDelta(rule) => {
                vec![(&rule.a_log, vec![1, 1, num_heads, 1]), (&rule.dt_bias, vec![num_heads * self.key_dim])]
            }
        };
        conv.chain(biases).chain(rest).collect()
    }
}
