//! The recurrence of gated delta nets as a launch of the kernel in `csrc/recurrent.cu`.

use attention_kernels::{Dtype, KernelError, Workspace};
use device::{Arg, Buffer, Device, Launch};

use super::kernels::{MODULE, count, holds, instance};
use super::loaded::RecurrentLayer;
use super::ops::RecurrentRows;
use crate::LoadError;
use crate::decoder::Recurrent;

device::kernel_structs! {
    /// The struct of the same name in `recurrent.cu`.
    struct DeltaShape: 44 bytes {
        key_heads: u32,
        value_heads: u32,
        key_dim: u32,
        value_dim: u32,
        kernel: u32,
        stride: u32,
        block_size: u32,
        max_blocks: u32,
        page: u32,
        heads_in_keys: u32,
        eps: f32,
    }
}

/// Rows of the state that a thread holds.
const STATE_ROWS: usize = 32;
/// Greatest size of a head, and number of tokens that the convolution reads, which shared memory has space for.
const MAX_DIM: usize = 128;
const MAX_KERNEL: usize = 8;

/// Checks that the kernel computes a layer of these sizes.
///
/// # Errors
/// The sizes that it does not compute, in one line.
pub(super) fn check(layer: &Recurrent) -> Result<(), LoadError> {
    let &Recurrent { key_dim, value_dim, kernel, .. } = layer;
    let fits = |dim: usize| dim.is_multiple_of(STATE_ROWS) && dim <= MAX_DIM;
    if fits(key_dim) && fits(value_dim) && kernel <= MAX_KERNEL {
        return Ok(());
    }
    Err(LoadError::Device(format!(
        "recurrent layers on this device: found heads of {key_dim} and {value_dim} and a convolution over {kernel} tokens, \
         expected heads of a multiple of {STATE_ROWS} up to {MAX_DIM} and at most {MAX_KERNEL} tokens; use --device cpu"
    )))
}

/// Launches the kernel on the sequences that the workspace has loaded, and their numbers of drafts. The sequence of a step's launches depends on its number of
/// sequences alone.
pub(super) fn run(
    device: &dyn Device,
    dtype: Dtype,
    (workspace, drafts): (&Workspace, &Buffer),
    args: RecurrentRows<'_>,
) -> Result<(), KernelError> {
    let RecurrentRows { batch, layer, norm, projected, output, rows, cache } = args;
    let RecurrentLayer { declared, conv, decay, dt_bias, group, .. } = layer;
    let &Recurrent { key_heads, value_heads, key_dim, value_dim, kernel, .. } = declared;
    let stride = declared.projections.rows();
    holds("elements in the projections", projected, rows * stride, dtype.bytes())?;
    holds("sequences with a number of drafts", drafts, batch.num_seqs(), size_of::<u32>())?;
    holds("elements in the output of the recurrence", output, rows * declared.value_width(), dtype.bytes())?;
    let page = cache.format.block_bytes(&cache.shape) / size_of::<f32>();
    for pages in cache.buffers() {
        holds("pages of states", pages, cache.shape.num_blocks * page, size_of::<f32>())?;
    }
    let shape = DeltaShape {
        key_heads: count(key_heads)?,
        value_heads: count(value_heads)?,
        key_dim: count(key_dim)?,
        value_dim: count(value_dim)?,
        kernel: count(kernel)?,
        stride: count(stride)?,
        block_size: count(cache.shape.block_size)?,
        max_blocks: count(workspace.limits().max_blocks)?,
        page: count(page)?,
        heads_in_keys: count(declared.heads_in_keys())?,
        eps: norm.eps,
    };
    let seqs = batch.groups[*group].attention.num_seqs();
    let [tables, lens, starts] = workspace.sequences();
    let weights = [conv, decay, dt_bias, &norm.weight];
    let buffers = [projected, &*output].into_iter().chain(weights);
    let buffers = buffers.chain([&cache.keys, cache.values(), tables, lens, starts, drafts]);
    let mut all: Vec<Arg<'_>> = buffers.map(|buffer| Arg::pointer(buffer, 0)).collect();
    all.push(Arg::bytes(&shape));
    if seqs == 0 {
        return Ok(());
    }
    Ok(device.launch(&Launch {
        module: MODULE,
        kernel: instance!("gated_delta_net", dtype),
        grid: [count(seqs)?, shape.value_heads, 1],
        block: [count(value_dim * key_dim / STATE_ROWS)?, 1, 1],
        shared_bytes: 0,
        args: &all,
    })?)
}
