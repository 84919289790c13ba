//! Recurrent layers: a state of fixed size per sequence instead of keys and values.

use std::ops::Range;

use serde::Serialize;

use super::attention::HeadShard;
use super::linear::Linear;
use super::norm::Norm;

/// A gated delta net (Yang et al., "Gated Delta Networks", 2024). Every value head has a matrix S of `key_dim` by `value_dim`.
/// For each token, with q and k scaled to length 1 (q also by `1 / sqrt(key_dim)`):
///
/// ```text
/// [q | k | v] = silu(causal convolution of [q | k | v] over the last `kernel` tokens)
/// S ← e^(-e^A_log · softplus(a + dt_bias)) · S;   S ← S + k ⊗ σ(b) · (v − Sᵀk);   o = Sᵀq
/// output(norm(o) · silu(z))
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recurrent {
    /// Projections to q, k (`key_heads * key_dim` rows each), v, z (`value_heads * value_dim` rows each), b and a (`value_heads`
    /// rows each), in this order.
    pub projections: Linear,
    /// Number of heads of q and k; value head h uses head `h / (value_heads / key_heads)`.
    pub key_heads: usize,
    /// Number of heads of v; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Which heads these are, if other ranks have more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<HeadShard>,
    /// Elements per head of q and k.
    pub key_dim: usize,
    /// Elements per head of v.
    pub value_dim: usize,
    /// Number of tokens that the convolution reads, at least 1.
    pub kernel: usize,
    /// Name of the weights of the convolution, `[conv_width, 1, kernel]`.
    pub conv: String,
    /// Name of the logarithms of the decay, `[value_heads]`.
    pub a_log: String,
    /// Name of what is added to a, `[value_heads]`.
    pub dt_bias: String,
    /// Norm of the output of each value head.
    pub norm: Norm,
    /// Output projection, `[hidden_size, value_heads * value_dim]`.
    pub output: Linear,
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

    /// Elements per row of q, k and v together: the channels of the convolution.
    pub fn conv_width(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Channels of the convolution that one value head reads: those of its q, k and v.
    pub fn head_channels(&self) -> usize {
        2 * self.key_dim + self.value_dim
    }

    /// Float32 numbers of the state of one value head: the last `kernel - 1` inputs of its convolution, then S by rows. Heads
    /// that share q and k keep their own copies of these inputs, so that no head reads what another one writes.
    pub fn head_state(&self) -> usize {
        (self.kernel - 1) * self.head_channels() + self.key_dim * self.value_dim
    }

    /// Bytes of the state of a sequence.
    pub fn state_bytes(&self) -> usize {
        self.value_heads * self.head_state() * size_of::<f32>()
    }

    /// Number of value heads whose states lie in the keys of a page; those of the others lie in the values.
    pub fn heads_in_keys(&self) -> usize {
        self.value_heads.div_ceil(2)
    }

    /// The channels of the convolution, the parts of q, k and v, among those of all ranks.
    pub fn channels(&self) -> [Range<usize>; 3] {
        let whole = HeadShard { first: 0, first_kv: 0, num_heads: self.value_heads, num_kv_heads: self.key_heads };
        let shard = self.shard.unwrap_or(whole);
        let (keys, width) = (shard.num_kv_heads * self.key_dim, self.key_width());
        let key = shard.first_kv * self.key_dim;
        let value = 2 * keys + shard.first * self.value_dim;
        [key..key + width, keys + key..keys + key + width, value..value + self.value_width()]
    }

    /// Names and shapes of its tensors that are weights neither of a linear layer nor of the norm.
    pub(crate) fn vectors(&self) -> [(&String, Vec<usize>); 3] {
        let (keys, values) =
            self.shard.map_or((self.key_heads, self.value_heads), |it| (it.num_kv_heads, it.num_heads));
        let (channels, heads) = (2 * keys * self.key_dim + values * self.value_dim, vec![values]);
        [(&self.conv, vec![channels, 1, self.kernel]), (&self.a_log, heads.clone()), (&self.dt_bias, heads)]
    }
}
