//! The recurrences as launches of the kernels in `csrc/recurrent.cu`.

use attention_kernels::{Dtype, KernelError, Workspace};
use device::{Arg, Buffer, Device, Launch};

use super::kernels::{MODULE, count, holds, instance, optional};
use super::loaded::RecurrentLayer;
use super::ops::{RecurrentPart, RecurrentRows};
use crate::LoadError;
use crate::decoder::{Recurrent, Rule};

device::kernel_structs! {
    /// The struct of the same name in `recurrent.cu`.
    struct RecurrentShape: 64 bytes {
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
        head_state: u32,
        eps: f32,
        least_step: f32,
        greatest_step: f32,
        z_factor: f32,
        step_factor: f32,
    }
}

/// Rows of the state that a thread holds.
const STATE_ROWS: usize = 32;
/// Greatest sizes of heads, and number of tokens that the convolution reads, which shared memory has space for.
const MAX_KEY_DIM: usize = 256;
const MAX_VALUE_DIM: usize = 128;
const MAX_KERNEL: usize = 8;
/// Greatest number of threads.
const MAX_THREADS: usize = 512;

/// Number of threads of a head, in whole warps.
fn threads(layer: &Recurrent) -> usize {
    // A thread has a whole column of a selective state space.
    let parts = if is_selective(layer) { 1 } else { layer.key_dim.div_ceil(STATE_ROWS).max(1) };
    (layer.value_dim * parts).next_multiple_of(32)
}

fn is_selective(layer: &Recurrent) -> bool {
    matches!(layer.rule, Rule::Selective(_))
}

/// Checks that the kernel computes a layer of these sizes.
///
/// # Errors
/// The sizes that it does not compute, in one line.
pub(super) fn check(layer: &Recurrent) -> Result<(), LoadError> {
    let &Recurrent { key_dim, value_dim, kernel, .. } = layer;
    let most_rows = if is_selective(layer) { STATE_ROWS } else { MAX_KEY_DIM };
    if key_dim <= most_rows && value_dim <= MAX_VALUE_DIM && threads(layer) <= MAX_THREADS && kernel <= MAX_KERNEL {
        return Ok(());
    }
    let most = STATE_ROWS * MAX_THREADS;
    Err(LoadError::Device(format!(
        "recurrent layers on this device: found heads of {key_dim} and {value_dim} and a convolution over {kernel} tokens, \
         expected heads of at most {most_rows} and {MAX_VALUE_DIM}, {most} numbers in a matrix and {MAX_KERNEL} tokens; \
         use --device cpu"
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
    let RecurrentRows { batch, layer, norm, part, projected, output, rows, cache } = args;
    let RecurrentLayer { declared, conv, conv_bias, decay, dt_bias, skip, group, .. } = layer;
    let &Recurrent { key_heads, value_heads, key_dim, value_dim, kernel, .. } = declared;
    let ((least_step, greatest_step), [z_factor, step_factor]) = match declared.rule {
        Rule::StateSpace { steps, factors: [.., z, dt], .. } => (steps, [z, dt]),
        _ => ((0.0, f32::INFINITY), [1.0; 2]),
    };
    let stride = declared.projections.rows();
    holds("elements in the projections", projected, rows * stride, dtype.bytes())?;
    holds("sequences with a number of drafts", drafts, batch.num_seqs(), size_of::<u32>())?;
    holds("elements in the output of the recurrence", output, rows * declared.value_width(), dtype.bytes())?;
    let norms = match part {
        RecurrentPart::Matrix { values, steps, keys, norms } => {
            holds("elements in the values of a recurrence", values, rows * declared.value_width(), dtype.bytes())?;
            holds("elements in the steps of a recurrence", steps, rows * declared.value_width(), dtype.bytes())?;
            holds("elements in the keys of a recurrence", keys, rows * 2 * key_dim, dtype.bytes())?;
            Some(norms)
        }
        RecurrentPart::Channels { steps, gates } => {
            holds("elements in the steps of a recurrence", steps, rows * value_heads * key_dim, dtype.bytes())?;
            holds("elements in the gates of a recurrence", gates, rows * declared.value_width(), dtype.bytes())?;
            None
        }
        RecurrentPart::Whole | RecurrentPart::Convolution => None,
    };
    let page = cache.format.block_bytes(&cache.shape) / size_of::<f32>();
    for pages in cache.buffers() {
        holds("pages of states", pages, cache.shape.num_blocks * page, size_of::<f32>())?;
    }
    let shape = RecurrentShape {
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
        head_state: count(declared.head_state())?,
        eps: norm.or(norms.map(|[of_k, _]| of_k)).map_or(0.0, |norm| norm.eps),
        least_step,
        greatest_step,
        z_factor,
        step_factor,
    };
    let seqs = batch.groups[*group].attention.num_seqs();
    let [tables, lens, starts] = workspace.sequences();
    let (decay, skip) = (decay.as_ref(), skip.as_ref());
    let own = match part {
        RecurrentPart::Matrix { values, steps, keys, norms: [of_k, of_q] } => {
            let rows = [projected, values, steps, keys, &*output].map(Some);
            rows.into_iter().chain([decay, skip, Some(&of_k.weight), Some(&of_q.weight)]).collect::<Vec<_>>()
        }
        RecurrentPart::Channels { steps, gates } => {
            let weights = [Some(conv), decay, dt_bias.as_ref(), norm.map(|it| &it.weight)];
            [projected, steps, gates, &*output].map(Some).into_iter().chain(weights).collect()
        }
        RecurrentPart::Whole | RecurrentPart::Convolution => {
            let weights = [Some(conv), conv_bias.as_ref(), decay, dt_bias.as_ref(), skip, norm.map(|it| &it.weight)];
            [projected, &*output].map(Some).into_iter().chain(weights).collect()
        }
    };
    let of_sequences = [&cache.keys, cache.values(), tables, lens, starts, drafts];
    let mut all: Vec<Arg<'_>> = own.into_iter().chain(of_sequences.map(Some)).map(optional).collect();
    all.push(Arg::bytes(&shape));
    if seqs == 0 {
        return Ok(());
    }
    let kernel = match declared.rule {
        Rule::GatedDelta { .. } => instance!("gated_delta_net", dtype),
        Rule::ShortConvolution => instance!("short_convolution", dtype),
        Rule::StateSpace { .. } => instance!("state_space", dtype),
        Rule::Selective(_) if norms.is_some() => instance!("selective_scan", dtype),
        Rule::Selective(_) => instance!("convolution", dtype),
        Rule::ChannelDelta(_) => instance!("channel_delta_net", dtype),
    };
    Ok(device.launch(&Launch {
        module: MODULE,
        kernel,
        grid: [count(seqs)?, shape.value_heads, 1],
        block: [count(threads(declared))?, 1, 1],
        shared_bytes: 0,
        args: &all,
    })?)
}
