//! The bytes of a model's weights on a device, known before they are loaded, and those that its products need beside them.

use attention_kernels::{Dtype, KernelSet, Rewritten, ScratchSizes, slices};
use device::{FactorType, Features};
use linear::{Purpose, Tiles};

use super::key_offsets;
use super::linear::{shared, stack_of};
use super::outline::MatrixOutline;
use crate::decoder::{self, Decoder, Form};
use crate::{LoadError, Weights};

/// Bytes of a model's weights on a device, and how its matrices are stored there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// All weights.
    pub all: u64,
    /// Matrices that are codes on the device: stored in fewer bits by the checkpoint, or quantised while loading.
    pub codes: u64,
    /// Matrices that the checkpoint stores in fewer bits and that become numbers on the device.
    pub unpacked: u64,
}

/// Returns the bytes of the weights on a device with these features, for these kernels. Reads only the headers of the checkpoint.
///
/// # Errors
/// The first matrix that is missing or has an unexpected shape or type.
pub fn weight_bytes(
    decoder: &Decoder,
    weights: &Weights,
    features: Features,
    kernels: &KernelSet,
) -> Result<WeightBytes, LoadError> {
    weight_bytes_beside(decoder, weights, features, kernels, None)
}

/// [`weight_bytes`] of a predictor, without the matrices that it shares with its target.
///
/// # Errors
/// Those of [`weight_bytes`].
pub fn weight_bytes_beside(
    decoder: &Decoder,
    weights: &Weights,
    features: Features,
    kernels: &KernelSet,
    target: Option<&Decoder>,
) -> Result<WeightBytes, LoadError> {
    let is_own = |linear: &&decoder::Linear| target.is_none_or(|target| shared(decoder, linear, target).is_none());
    let dtype = kernels.format.dtype;
    let width = |norm: &decoder::Norm| {
        let weights = norm.shape.iter().product::<usize>() * norm.weight.len();
        weights.max(norm.width) * (1 + usize::from(norm.bias.is_some()))
    };
    let mut bytes = decoder.norms().map(width).sum::<usize>() * size_of::<f32>();
    let slopes = decoder.attention().flat_map(|attention| &attention.alibi_slopes).map(Vec::len);
    bytes += decoder.vectors().map(|(_, shape)| shape.iter().product::<usize>()).chain(slopes).sum::<usize>()
        * size_of::<f32>();
    if kernels.format.kv_dtype.is_byte() {
        bytes +=
            decoder.attention().filter_map(|layer| key_offsets::len(decoder, layer)).sum::<usize>() * size_of::<f32>();
    }
    let single = decoder.linears().filter(is_own).map(|linear| (vec![linear], decoder.purpose(linear)));
    let heads = decoder.head_linears().flatten().map(|linear| (vec![linear], Purpose::Numbers));
    let experts = decoder.experts().flat_map(|experts| {
        let stacks = experts.stacks();
        match features.launches {
            true => stacks.map(|stack| (stack_of(&stack), stack)).map(|(purpose, stack)| (stack, purpose)).to_vec(),
            false => stacks.into_iter().flatten().map(|linear| (vec![linear], Purpose::Product)).collect(),
        }
    });
    let mut found = WeightBytes::default();
    for (linears, purpose) in single.chain(heads).chain(experts) {
        let Some(first) = linears.first() else { continue };
        let biases = linears.iter().filter(|linear| linear.bias).map(|linear| linear.rows() * dtype.bytes());
        let outline = MatrixOutline::of(&linears, weights)?;
        let ([n, k], quantization) = (outline.shape(), first.form.quantization());
        let purpose = if kernels.linear.capabilities.takes_codes { purpose } else { Purpose::Numbers };
        let codes = match features.packs_matrices {
            true => Some(outline.packed_bytes(kernels.arithmetic)),
            false => Tiles::stored_bytes(features, purpose, dtype, k, quantization, &outline.forms()),
        };
        let matrix = codes.unwrap_or(n * k * dtype.bytes());
        if first.form != Form::Dense {
            *(if codes.is_some() { &mut found.codes } else { &mut found.unpacked }) += matrix as u64;
        }
        bytes += matrix + biases.sum::<usize>();
    }
    found.all = bytes as u64;
    Ok(found)
}

/// The memory that linear layers of a device that launches kernels need beside their operands, in steps of this size.
pub(super) fn scratch_sizes(
    features: Features,
    decoder: &Decoder,
    kernels: &KernelSet,
    max_rows: usize,
) -> ScratchSizes {
    let mut sizes = ScratchSizes::default();
    if !features.launches || !kernels.linear.capabilities.takes_codes || kernels.format.dtype == Dtype::F32 {
        return sizes;
    }
    for linear in decoder.linears() {
        let (rounds, may_be_codes) = match linear.form {
            Form::Dense => {
                let (shape, format) = ([linear.rows(), linear.inputs], FactorType::Numbers(kernels.format.dtype));
                let slices = slices(features, shape, format);
                if slices > 1 {
                    sizes.add(Rewritten::Slices(slices), shape, max_rows);
                }
                continue;
            }
            Form::Quantized(_) => (false, true),
            Form::Stored { rounds, .. } => (rounds, !rounds || !features.multiplies_e4m3),
        };
        let shape = [linear.rows(), linear.inputs];
        if rounds {
            sizes.add(Rewritten::Rows, shape, max_rows);
        }
        if may_be_codes {
            sizes.add(Rewritten::Order, shape, max_rows);
            if !features.deterministic {
                sizes.add(Rewritten::Weights, shape, max_rows);
            }
        }
    }
    sizes
}
