//! The weights of a decoder on a device.

use std::sync::Arc;

use attention_kernels::{Dtype, KernelError, KernelSet, KvScales, KvShape, LinearArgs, LinearScratch, Rows};
use device::{Buffer, Device};

use super::linear::{Linear, LoadedExperts, Loader, Norm};
use crate::decoder::{self, Activation, Attention, Decoder, Experts, Heads, Mixer, Mlp, Rule};
use crate::{LoadError, Weights};

/// Weights of a decoder on a device, in the order of the decoder's iterators.
pub(super) struct Loaded {
    pub linears: Vec<Arc<Linear>>,
    pub norms: Vec<Norm>,
    pub attention: Vec<AttentionLayer>,
    pub recurrent: Vec<RecurrentLayer>,
    pub experts: Vec<(Experts, LoadedExperts)>,
    /// Of layers that mix streams.
    pub mixings: Vec<MixingLayer>,
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
        let (x, weights, scratch, output) = (Rows::Numbers(x), &head.weights, Some(scratch), Dtype::F32);
        let args = LinearArgs { x, rows, weights, bias, y, output, activation: None, scratch };
        kernels.linear.linear(device, args)
    }
}

/// State of an attention layer in addition to its linear layers and norms.
pub(super) struct AttentionLayer {
    pub declared: Attention,
    /// Float32 `[num_heads]`.
    pub alibi_slopes: Option<Buffer>,
    /// Float32 `[num_heads]`.
    pub sinks: Option<Buffer>,
    /// Float32 `[num_heads, 2 * reach + 1]`: what the distance of two rows adds to their score, for a layer that sees both sides.
    pub by_distance: Option<Buffer>,
    /// Index of its [`View`](super::groups::View).
    pub view: usize,
    /// Its place in a page.
    pub place: usize,
    /// Index of the attention layer whose keys and values it reads: itself, or one before it that has their scales.
    pub donor: usize,
    /// Scales of 8-bit keys and values, if the cache takes scales.
    pub kv_scales: Option<Arc<KvScales>>,
    /// What the keys of an 8-bit cache have less, float32 `[num_kv_heads, head_dim]`.
    pub key_offset: Option<Buffer>,
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

/// A recurrent layer's weights in addition to its linear layers and norm, float32.
pub(super) struct RecurrentLayer {
    pub declared: decoder::Recurrent,
    /// `[kernel, conv_width]`: weights of the convolution, that of the newest input last.
    pub conv: Buffer,
    /// `[conv_width]`.
    pub conv_bias: Option<Buffer>,
    /// `[value_heads]`, or `[key_dim, value_width]`: `-e^A_log`.
    pub decay: Option<Buffer>,
    /// `[value_heads]`, or `[value_heads, key_dim]`.
    pub dt_bias: Option<Buffer>,
    /// `[value_heads]`, or `[value_width]`: factors of v in the output.
    pub skip: Option<Buffer>,
    /// Index of its view.
    pub group: usize,
    /// Its place in a page.
    pub place: usize,
}

/// Weights of a layer that mixes streams, float32.
pub(super) struct MixingLayer {
    /// `[streams * streams, streams]`.
    pub predictions: Buffer,
    /// `[streams, streams]`.
    pub corrections: Buffer,
    /// `[hidden_size]`.
    pub output_scale: Buffer,
}

impl Loader<'_> {
    /// The weights of a layer that mixes streams.
    pub fn mixing(&mut self, mixing: &decoder::Mixing) -> Result<MixingLayer, LoadError> {
        let mut load = |(name, shape): (&String, Vec<usize>)| self.vector(name, &shape);
        let [predictions, corrections, output_scale] = mixing.vectors();
        Ok(MixingLayer {
            predictions: load(predictions)?,
            corrections: load(corrections)?,
            output_scale: load(output_scale)?,
        })
    }

    /// What a recurrent layer has beside its linear layers and norm, for this group and place in a page.
    pub fn recurrent(
        &mut self,
        layer: &decoder::Recurrent,
        (group, place): (usize, usize),
    ) -> Result<RecurrentLayer, LoadError> {
        let vectors = layer.vectors();
        let read = |wanted: Option<&String>| {
            let found = vectors.iter().find(|(name, _)| Some(*name) == wanted);
            let values = found.map(|(name, shape)| self.weights.expect(name, shape));
            Ok::<_, LoadError>(values.transpose()?.map(|view| view.to_f32()))
        };
        let parts = layer.channels().into_iter().zip(layer.conv_factors());
        let factors = parts.flat_map(|(channels, factor)| channels.map(move |channel| (channel, factor)));
        let (channels, factors): (Vec<usize>, Vec<f32>) = factors.unzip();
        let convs = layer.conv.iter().map(|name| read(Some(name)).map(Option::unwrap_or_default));
        let conv = convs.collect::<Result<Vec<Vec<f32>>, _>>()?.concat();
        let of_input = |input: usize| channels.iter().map(move |channel| channel * layer.kernel + input);
        let weights = (0..layer.kernel).flat_map(of_input).zip(factors.iter().cycle());
        let transposed: Vec<f32> = weights.map(|(at, factor)| conv[at] * factor).collect();
        let bias = read(layer.conv_bias.as_ref())?;
        let bias = bias.map(|bias| channels.iter().map(|at| bias[*at]).collect::<Vec<f32>>());
        let (a_log, dt_bias, skip) = match &layer.rule {
            Rule::GatedDelta { a_log, dt_bias } => (Some(a_log), Some(dt_bias), None),
            Rule::ShortConvolution => (None, None, None),
            Rule::StateSpace { a_log, dt_bias, skip, .. } => (Some(a_log), Some(dt_bias), Some(skip)),
            Rule::Selective(rule) => (Some(&rule.a_log), None, Some(&rule.skip)),
            Rule::ChannelDelta(rule) => (Some(&rule.a_log), Some(&rule.dt_bias), None),
        };
        // Ranks have all channels of a selective state space.
        let is_whole = matches!(layer.rule, Rule::Selective(_));
        let of_heads = |name: Option<&String>| {
            let (own, count) = (layer.heads(), layer.shard.map_or(layer.value_heads, |shard| shard.num_heads));
            let of = |all: &[f32]| {
                // A head has one number, or several.
                let each = all.len() / count.max(1);
                all[own.start * each..own.end * each].to_vec()
            };
            Ok::<_, LoadError>(read(name)?.map(|all| if is_whole { all } else { of(&all) }))
        };
        let decay = of_heads(a_log)?.map(|logs| {
            // By rows of the matrix.
            let rows = if is_whole { layer.key_dim } else { 1 };
            let by_rows = (0..rows).flat_map(|row| logs.iter().skip(row).step_by(rows));
            by_rows.map(|a| -a.exp()).collect::<Vec<f32>>()
        });
        let (dt_bias, skip) = (of_heads(dt_bias)?, of_heads(skip)?);
        let mut upload = |values: Option<Vec<f32>>| values.map(|values| self.numbers(&values)).transpose();
        Ok(RecurrentLayer {
            declared: layer.clone(),
            conv_bias: upload(bias)?,
            decay: upload(decay)?,
            dt_bias: upload(dt_bias)?,
            skip: upload(skip)?,
            conv: self.numbers(&transposed)?,
            group,
            place,
        })
    }

    /// The attention sinks of a layer's heads.
    pub fn sinks(&mut self, name: &str, layer: &decoder::Attention) -> Result<Buffer, LoadError> {
        let heads = layer.heads.num_heads;
        let (first, all) = layer.shard.map_or((0, heads), |shard| (shard.first, shard.num_heads));
        let sinks = self.weights.expect(name, &[all])?.to_f32();
        self.numbers(&sinks[first..first + heads])
    }

    /// The bias of each distance, for a layer that sees both sides.
    pub fn by_distance(
        &mut self,
        distances: &decoder::Distances,
        layer: &decoder::Attention,
    ) -> Result<Buffer, LoadError> {
        let heads = layer.heads.num_heads;
        let table = self.weights.expect(&distances.table, &[distances.buckets, heads])?.to_f32();
        let reach = distances.reach as isize;
        let of_head = |head: usize| (-reach..=reach).map(move |distance| (distance, head));
        let all = (0..heads).flat_map(of_head).map(|(distance, head)| table[distances.bucket(distance) * heads + head]);
        self.numbers(&all.collect::<Vec<f32>>())
    }

    /// The bias of a head that sets the logits of rows without a token to −∞; `None` if all rows are tokens.
    pub fn mask(&mut self, head: &decoder::Head, vocab_size: usize) -> Result<Option<Buffer>, LoadError> {
        if head.masked.is_empty() {
            return Ok(None);
        }
        let mut mask = vec![0.0; vocab_size];
        for row in &head.masked {
            if let Some(bias) = mask.get_mut(*row as usize) {
                *bias = f32::NEG_INFINITY;
            }
        }
        Ok(Some(self.numbers(&mask)?))
    }
}

/// The decoder with the learned parameters of its activations.
pub(super) fn with_learned(mut decoder: Decoder, weights: &Weights) -> Result<Decoder, LoadError> {
    for branch in decoder.layers.iter_mut().flat_map(|layer| &mut layer.branches) {
        let Mixer::Mlp(Mlp { activation, learned, .. }) = &mut branch.mixer else { continue };
        let ([above, below], Activation::Xielu { positive, negative, beta, eps }) = (&learned[..], activation) else {
            continue;
        };
        // Files may have the constants too.
        let module = above.rsplit_once('.').map_or("", |(module, _)| module);
        for (name, constant) in [("beta", &mut *beta), ("eps", eps)] {
            let stored = weights.get(&format!("{module}.{name}")).and_then(|view| view.to_f32().first().copied());
            *constant = stored.unwrap_or(*constant);
        }
        let softplus = |name: &str| Ok::<_, LoadError>(weights.expect(name, &[1])?.to_f32()[0].exp().ln_1p());
        (*positive, *negative) = (softplus(above)?, *beta + softplus(below)?);
    }
    Ok(decoder)
}
