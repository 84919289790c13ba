//! Attention to the tokens that an indexer chooses: `csrc/chosen.cu`, then `csrc/paged_latent.cu` or `csrc/paged_generic.cu`.

use device::{Arg, Buffer, Device, DeviceError};

use super::attention::{Call, Grid};
use super::names::{self, Name};
use super::parameters::{IndexShape, count};
use crate::args::AttentionArgs;
use crate::cpu::chosen::IndexRows;
use crate::error::{KernelError, at_least, expect};
use crate::format::Dtype;
use crate::shape::KvShape;
use crate::variant::most_shared_bytes;

/// Most bytes of scores, unless those of one row are more. Rows that do not fit are scored in several passes.
const MOST_SCORES: usize = 64 << 20;
/// Tokens that a block of `score_tokens` scores at a time, and most blocks of a row.
const SCORED: usize = 32;
const MOST_BLOCKS: usize = 64;
/// Rows of a block of `latent_chosen`, and the shared memory that the larger of them needs.
const ROWS: [usize; 2] = [32, 16];
const LARGE_BYTES: usize = 163 << 10;

/// Memory for choices of tokens, which the layers of a model share: a layer may use the choice of one before.
pub struct ChosenMemory {
    /// `[max_rows, most]` u32: the chosen positions of each row, ascending.
    chosen: Buffer,
    /// `[rows of a pass, max_tokens]` float32.
    scores: Buffer,
    most: usize,
    max_rows: usize,
    max_tokens: usize,
}

impl ChosenMemory {
    /// Rows that are scored at a time.
    fn rows_of_pass(max_rows: usize, max_tokens: usize) -> usize {
        (MOST_SCORES / size_of::<f32>() / max_tokens.max(1)).clamp(1, max_rows.max(1))
    }

    /// Bytes of device memory for steps of at most this many rows, each of which chooses at most `most` of the given number of tokens.
    pub fn bytes(most: usize, max_rows: usize, max_tokens: usize) -> usize {
        let scores = ChosenMemory::rows_of_pass(max_rows, max_tokens).saturating_mul(max_tokens);
        most.saturating_mul(max_rows).saturating_add(scores).saturating_mul(size_of::<u32>())
    }

    /// Allocates the memory.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(
        device: &dyn Device,
        most: usize,
        max_rows: usize,
        max_tokens: usize,
    ) -> Result<ChosenMemory, DeviceError> {
        let scores = ChosenMemory::rows_of_pass(max_rows, max_tokens).saturating_mul(max_tokens);
        Ok(ChosenMemory {
            chosen: device.alloc(most.saturating_mul(max_rows).saturating_mul(size_of::<u32>()))?,
            scores: device.alloc(scores.saturating_mul(size_of::<f32>()))?,
            most,
            max_rows,
            max_tokens,
        })
    }

    /// The chosen positions, `[max_rows, most]` u32. A row at a position below `most` has its first tokens.
    pub fn chosen(&self) -> &Buffer {
        &self.chosen
    }
}

/// Arguments of [`launch_chosen`].
pub struct LaunchedChosen<'a> {
    /// Queries, a latent cache with one KV head, and a workspace that has the batch. `query` begins each head with `dim` elements,
    /// and heads are as wide as keys of the cache.
    pub attention: AttentionArgs<'a>,
    /// Number of first elements of a key that a query is multiplied with.
    pub dim: usize,
    /// The choice that is made or used.
    pub memory: &'a mut ChosenMemory,
    /// What chooses; `None`: the memory has the choice.
    pub index: Option<IndexRows<'a>>,
}

/// [`attend_chosen`](crate::attend_chosen) on a device that launches kernels.
///
/// # Errors
/// Arguments that do not match each other, more rows or longer contexts than the memory is for, and errors of the device.
pub fn launch_chosen(device: &dyn Device, args: LaunchedChosen<'_>) -> Result<(), KernelError> {
    let LaunchedChosen { attention, dim, memory, index } = args;
    let cache = attention.cache;
    let (format, value_dim, heads) = (cache.format, cache.value_dim(), attention.num_heads);
    let KvShape { num_kv_heads, head_dim, .. } = cache.shape;
    let call = Call::new("cuda.chosen", &attention)?.with_dim(dim);
    expect("KV heads of a latent cache", num_kv_heads, 1)?;
    at_least("elements of a key", head_dim, dim.max(value_dim))?;
    at_least("rows of a choice", memory.max_rows, attention.batch.num_rows())?;
    let longest = attention.batch.context_lens.iter().copied().max().unwrap_or(0) as usize;
    at_least("tokens to choose from", memory.max_tokens, longest)?;
    if let Some(index) = index {
        choose(device, &call, memory, &index)?;
    }
    let more = [Arg::pointer(&memory.chosen, 0), Arg::from(count(memory.most)?)];
    let is_latent = cache.is_latent() && format.dtype != Dtype::F32 && names::LATENTS.contains(&[dim, value_dim]);
    if is_latent {
        expect("query stride modulo 8", attention.query_stride % 8, 0)?;
        expect("elements of a key modulo 8", head_dim % 8, 0)?;
        let is_large = device.compute_capability().is_none_or(|found| most_shared_bytes(found) >= LARGE_BYTES);
        let rows = if is_large { ROWS[0] } else { ROWS[1] };
        let suffix = names::suffix(format);
        let kernel = Name::new(format_args!("latent_chosen_{rows}_{}_h{dim}{suffix}", format.dtype));
        let grid = Grid::Exact([call.rows(), heads.div_ceil(rows), 1]);
        return call.launch(device, &kernel, grid, &more);
    }
    at_least("greatest head size", names::WIDEST_HEAD, dim)?;
    let wide = if dim > 256 { "_wide" } else { "" };
    let kernel = Name::new(format_args!("paged_chosen_{}{wide}", format.dtype));
    call.launch(device, &kernel, Grid::Exact([call.rows() * heads, 1, 1]), &more)
}

/// Scores the tokens of each row and lists the best.
fn choose(
    device: &dyn Device,
    call: &Call<'_>,
    memory: &mut ChosenMemory,
    index: &IndexRows<'_>,
) -> Result<(), KernelError> {
    let &IndexRows { queries, weights, heads, dim, first } = index;
    let (cache, batch) = (call.args().cache, call.args().batch);
    let (dtype, rows) = (cache.format.dtype, batch.num_rows());
    at_least("index queries", queries.len_bytes() / dtype.bytes(), rows * heads * dim)?;
    at_least("factors of index heads", weights.len_bytes() / dtype.bytes(), rows * heads)?;
    at_least("elements of a key", cache.shape.head_dim, first + dim)?;
    // Queries, keys and products; keys have an odd pitch.
    let shared = (heads * dim + SCORED * (dim | 1) + heads * SCORED) * size_of::<f32>();
    let scorer = Name::new(format_args!("score_tokens_{dtype}"));
    let pass = ChosenMemory::rows_of_pass(memory.max_rows, memory.max_tokens);
    let blocks = memory.max_tokens.div_ceil(SCORED).clamp(1, MOST_BLOCKS);
    for first_row in (0..call.rows()).step_by(pass) {
        let rows = pass.min(call.rows() - first_row);
        let shape = IndexShape {
            heads: count(heads)?,
            dim: count(dim)?,
            first: count(first)?,
            most: count(memory.most)?,
            stride: count(memory.max_tokens)?,
            first_row: count(first_row)?,
        };
        let scores = Arg::pointer(&memory.scores, 0);
        let more = [Arg::pointer(queries, 0), Arg::pointer(weights, 0), scores, Arg::bytes(&shape)];
        call.launch_with(device, &scorer, Grid::Exact([blocks, rows, 1]), &more, shared)?;
        let more = [scores, Arg::pointer(&memory.chosen, 0), Arg::bytes(&shape)];
        call.launch(device, "choose_tokens", Grid::Exact([rows, 1, 1]), &more)?;
    }
    Ok(())
}
