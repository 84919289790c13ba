//! The weights of a decoder on a device.

use std::sync::Arc;

use attention_kernels::{Dtype, KernelError, KernelSet, KvScales, KvShape, LinearArgs, LinearScratch, Rows};
use device::{Buffer, Device};

use super::linear::{Linear, LoadedExperts, Norm, RecurrentLayer};
use crate::decoder::{Attention, Decoder, Experts, Heads};

/// Weights of a decoder on a device, in the order of the decoder's iterators.
pub(super) struct Loaded {
    pub linears: Vec<Arc<Linear>>,
    pub norms: Vec<Norm>,
    pub attention: Vec<AttentionLayer>,
    pub recurrent: Vec<RecurrentLayer>,
    pub experts: Vec<(Experts, LoadedExperts)>,
    /// Factors of the stream.
    pub scalars: Vec<f32>,
    /// Products of heads, with heads, outputs and inputs.
    pub heads: Vec<(Vec<Linear>, [usize; 3])>,
    /// Bias of the output projection if some rows are no token: −∞ for these, 0 for the others.
    pub mask: Option<Buffer>,
}

impl Loaded {
    /// Returns the output projection, and the bias of its products.
    pub fn head(&self, decoder: &Decoder) -> (&Linear, Option<&Buffer>) {
        let head = &self.linears[if decoder.is_tied() { 0 } else { self.linears.len() - 1 }];
        (head, self.mask.as_ref().or(head.bias.as_ref()))
    }

    /// Computes the logits of `rows` rows in float32, before [`Model::finish_logits`].
    pub fn logits(
        &self,
        decoder: &Decoder,
        (kernels, device): (&KernelSet, &dyn Device),
        x: &Buffer,
        rows: usize,
        y: &mut Buffer,
        scratch: &mut LinearScratch,
    ) -> Result<(), KernelError> {
        let (head, bias) = self.head(decoder);
        let (x, weights, scratch) = (Rows::Numbers(x), &head.weights, Some(scratch));
        kernels.linear.linear(device, LinearArgs { x, rows, weights, bias, y, output: Dtype::F32, scratch })
    }
}

/// State of an attention layer in addition to its linear layers and norms.
pub(super) struct AttentionLayer {
    pub declared: Attention,
    /// Float32 `[num_heads]`.
    pub alibi_slopes: Option<Buffer>,
    /// Float32 `[num_heads]`.
    pub sinks: Option<Buffer>,
    /// Index of its [`View`](super::groups::View).
    pub view: usize,
    /// Its place in a page.
    pub place: usize,
    /// Index of the attention layer whose keys and values it reads: itself, or one before it that has their scales.
    pub donor: usize,
    /// Scales of 8-bit keys and values, if the cache takes scales.
    pub kv_scales: Option<Arc<KvScales>>,
    /// The next step that computes tokens sets these scales.
    pub uncalibrated: bool,
}

impl AttentionLayer {
    /// The shape in which the layer sees the cache of its place, which has as many elements.
    pub fn shape(&self, cache: KvShape) -> KvShape {
        let Heads { num_kv_heads, head_dim, .. } = self.declared.heads;
        let elements = cache.num_blocks * cache.block_elements();
        let num_blocks = elements / (num_kv_heads * cache.block_size * head_dim).max(1);
        KvShape { num_blocks, num_kv_heads, head_dim, ..cache }
    }
}
