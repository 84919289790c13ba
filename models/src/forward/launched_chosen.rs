//! Attention to the tokens that an indexer chooses, as launches of kernels.

use attention_kernels::{AttentionArgs, ChosenMemory, Dtype, KernelError, LaunchedChosen, Workspace, launch_chosen};
use device::{Buffer, Device, DeviceError};

use super::StepLimits;
use super::chosen::index_of;
use super::kernels;
use super::launched_latent::rotation;
use super::ops::{ChosenRows, IndexRows};
use crate::decoder::{Choice, Decoder, Indexer};

/// Tokens that a layer of the decoder chooses at most; `None`: no layer has an indexer. All layers choose as many.
pub(super) fn most(decoder: &Decoder) -> Option<usize> {
    let choices = decoder.attention().filter_map(|layer| layer.latent.as_ref()?.choice.as_ref());
    choices.map(Choice::top_k).max()
}

/// Chosen tokens, rows and tokens of the memory for choices.
fn sizes(most: Option<usize>, limits: &StepLimits) -> Option<[usize; 3]> {
    let tokens = limits.max_model_len.next_multiple_of(limits.block_size.max(1));
    Some([most?.min(tokens), limits.max_rows, tokens])
}

/// Bytes of the memory for choices.
pub(super) fn bytes(decoder: &Decoder, limits: &StepLimits) -> usize {
    sizes(most(decoder), limits).map_or(0, |[most, rows, tokens]| ChosenMemory::bytes(most, rows, tokens))
}

/// The memory for choices of so many tokens.
pub(super) fn memory(
    device: &dyn Device,
    most: Option<usize>,
    limits: &StepLimits,
) -> Result<Option<ChosenMemory>, DeviceError> {
    sizes(most, limits).map(|[most, rows, tokens]| ChosenMemory::new(device, most, rows, tokens)).transpose()
}

/// [`LayerOps::index_rows`](super::ops::LayerOps::index_rows).
pub(super) fn index_rows(
    device: &dyn Device,
    dtype: Dtype,
    positions: &Buffer,
    args: IndexRows<'_>,
) -> Result<(), KernelError> {
    let IndexRows { layer, latent, indexer, rows, queries, latents, norm, rope } = args;
    let &Indexer { heads, dim, interleaved, .. } = indexer;
    let stride = layer.heads.head_dim;
    kernels::norm_groups(device, dtype, latents, (stride - dim, 1, stride), norm.args(rows))?;
    let rotate = rotation(device, dtype, positions, rows, (rope, latent.rope_dim, interleaved));
    rotate(queries, 0, heads, dim)?;
    rotate(latents, stride - dim, 1, stride)
}

/// [`LayerOps::attend_chosen`](super::ops::LayerOps::attend_chosen).
pub(super) fn attend(
    device: &dyn Device,
    workspace: &Workspace,
    memory: &mut ChosenMemory,
    args: ChosenRows<'_>,
) -> Result<(), KernelError> {
    let ChosenRows { batch, layer, latent, query, index, output, cache, .. } = args;
    let (declared, group) = (&layer.declared, &batch.groups[layer.view].attention);
    let attention = AttentionArgs {
        query,
        query_stride: declared.row_width(),
        num_heads: declared.heads.num_heads,
        output,
        lse: None,
        cache,
        batch: group,
        seqs: 0..group.num_seqs(),
        scale: declared.scale,
        window: None,
        sparse: None,
        soft_cap: None,
        alibi_slopes: None,
        sinks: None,
        workspace: Some(workspace),
    };
    let index = index_of(latent, declared, index);
    launch_chosen(device, LaunchedChosen { attention, dim: latent.rank + latent.rope_dim, memory, index })
}
