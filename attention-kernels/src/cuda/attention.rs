//! Launches of the attention kernels.

use device::{Arg, Buffer, Device, DeviceError, Launch, Tensor};

use super::names::{self, MODULE, Name};
use super::parameters::{AttentionShape, count, kv_format, scale_pointers};
use crate::args::AttentionArgs;
use crate::error::{KernelError, at_least, expect};
use crate::format::{CacheFormat, Dtype, KvDtype};
use crate::shape::KvShape;
use crate::sparse::SparseNumbers;
use crate::workspace::Workspace;

/// How a kernel distributes contexts over thread blocks. The bits are the same.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Split {
    /// A block for each row and head (PagedAttention v1).
    No,
    /// By the work list: a block for each partition and head, and a second launch that merges them (PagedAttention v2).
    ByWorkList,
}

pub(super) fn decode(
    variant: &'static str,
    split: Split,
    device: &dyn Device,
    args: AttentionArgs<'_>,
) -> Result<(), KernelError> {
    let call = Call::new(variant, &args)?;
    call.by_rows(device, &call.instance("paged_decode")?, split)
}

/// Decode and prefill of queries of any type, any head size up to [`names::WIDEST_HEAD`].
pub(super) fn generic(split: Split, device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let call = Call::new("cuda.generic", &args)?;
    let dim = args.cache.shape.head_dim;
    at_least("greatest head size", names::WIDEST_HEAD, dim)?;
    let wide = if dim > 256 { "_wide" } else { "" };
    call.by_rows(device, &Name::new(format_args!("paged_generic_{}{wide}", args.cache.format.dtype)), split)
}

/// Decode in which all query heads of a KV head read it once.
pub(super) fn grouped(device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let call = Call::new("cuda.paged_gqa", &args)?;
    let kernel = call.instance("paged_gqa")?;
    let rows = device.tile(MODULE, &kernel)?.rows.max(1) as usize;
    let tiles = (call.query_len * call.group()).div_ceil(rows);
    call.by_work_list(device, &kernel, args.cache.shape.num_kv_heads * tiles)
}

/// Items of the list of work that [`grouped`] computes at once.
pub(super) fn grouped_at_once(
    device: &dyn Device,
    format: CacheFormat,
    shape: KvShape,
    num_heads: usize,
) -> Result<usize, DeviceError> {
    let kernel = names::instance("paged_gqa", format, shape.head_dim);
    kernel.map_or(Ok(0), |kernel| at_once(device, &kernel, shape, num_heads))
}

/// The same of [`latent_decode`].
pub(super) fn latent_at_once<const ROWS: usize>(
    device: &dyn Device,
    format: CacheFormat,
    shape: KvShape,
    num_heads: usize,
) -> Result<usize, DeviceError> {
    at_once(device, &names::latent("latent_decode", ROWS, format, shape.head_dim), shape, num_heads)
}

/// Thread blocks of a kernel that the device runs at once, over those of an item with one row for each head.
fn at_once(device: &dyn Device, kernel: &str, shape: KvShape, num_heads: usize) -> Result<usize, DeviceError> {
    let tile = device.tile(MODULE, kernel)?;
    let group = num_heads / shape.num_kv_heads.max(1);
    let parts = shape.num_kv_heads * group.div_ceil(tile.rows.max(1) as usize);
    let block = [tile.threads, 1, 1];
    let launch = Launch { module: MODULE, kernel, grid: [1; 3], block, shared_bytes: 0, args: &[] };
    Ok(device.resident_blocks(&launch)? as usize / parts.max(1))
}

/// Prefill in tiles of query rows, by a kernel for these head sizes. A thread block reads the whole context of its rows.
pub(super) fn prefill(
    [variant, kernel]: [&'static str; 2],
    head_sizes: &[usize],
    device: &dyn Device,
    args: AttentionArgs<'_>,
) -> Result<(), KernelError> {
    let call = Call::new(variant, &args)?;
    let dim = args.cache.shape.head_dim;
    if !head_sizes.contains(&dim) {
        return Err(call.unsupported(format!("heads of {dim}")));
    }
    call.launch(device, &call.instance(kernel)?, Grid::Tiles, &[])
}

/// Decode over a latent cache, in tiles of `rows` rows.
pub(super) fn latent_decode(rows: usize, device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let call = Call::new("cuda.latent", &args)?;
    let kernel = call.latent_instance("latent_decode", rows)?;
    let tiles = (call.query_len * call.group()).div_ceil(rows);
    call.by_work_list(device, &kernel, args.cache.shape.num_kv_heads * tiles)
}

/// Prefill over a latent cache, in tiles of `rows` rows.
pub(super) fn latent_prefill(rows: usize, device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let call = Call::new("cuda.latent", &args)?;
    call.launch(device, &call.latent_instance("latent_prefill", rows)?, Grid::Tiles, &[])
}

/// Prefill with the bulk copies and warpgroup products of Hopper.
pub(super) fn prefill_sm90(device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let call = Call::new("cuda.prefill_sm90", &args)?;
    let (format, shape) = (args.cache.format, args.cache.shape);
    let (dim, size) = (shape.head_dim, shape.block_size);
    let exists = format.kv_dtype == KvDtype::Same
        && names::SM90_HEAD_SIZES.contains(&dim)
        && names::SM90_BLOCK_SIZES.contains(&size);
    if !exists {
        return Err(call.unsupported(format!("heads of {dim}, blocks of {size} and {format}")));
    }
    let kernel = call.instance("prefill_sm90")?;
    let strides = format.layout.strides(&shape);
    let bytes = format.element_bytes();
    let tensor = |buffer| Tensor {
        buffer,
        sizes: [dim, size, shape.num_kv_heads, shape.num_blocks],
        strides: [strides.token * bytes, strides.head * bytes, strides.block * bytes],
        tile: [64, size as u32, 1, 1],
    };
    let tensors = [tensor(&args.cache.keys), tensor(args.cache.values())];
    call.launch(device, &kernel, Grid::Tiles, &tensors.each_ref().map(Arg::tensor))
}

/// Thread blocks of a launch.
#[derive(Clone, Copy)]
pub(super) enum Grid {
    /// These.
    Exact([usize; 3]),
    /// Enough for the tiles of each sequence's rows, and for each KV head.
    Tiles,
    /// One for each row and head.
    Rows,
    /// As many as the device runs at once, at most this number. They share the work list.
    Resident(usize),
    /// For each row and head one for as many elements as it has threads, to merge the partial results of the items.
    Merge,
}

/// A call whose sizes are checked.
pub(super) struct Call<'a> {
    variant: &'static str,
    args: &'a AttentionArgs<'a>,
    workspace: &'a Workspace,
    /// Query rows of the sequences.
    rows: usize,
    /// Most query rows of one.
    query_len: usize,
    /// Elements of a key that queries are multiplied with.
    dim: usize,
}

impl<'a> Call<'a> {
    pub fn new(variant: &'static str, args: &'a AttentionArgs<'a>) -> Result<Call<'a>, KernelError> {
        args.check_sizes()?;
        let missing = |what| KernelError::NotLoaded { variant, what };
        let workspace = args.workspace.ok_or(missing("workspace"))?;
        if !workspace.has_batch(args.batch, args.window) {
            return Err(missing("batch with these lengths and this window"));
        }
        workspace.check_cache(&args.cache.shape)?;
        args.cache.format.check_scaled_rows(variant, &args.cache.shape)?;
        let starts = &args.batch.query_starts[args.seqs.start..=args.seqs.end];
        let query_len = workspace.query_len(starts);
        Ok(Call { variant, args, workspace, rows: args.rows().len(), query_len, dim: args.cache.shape.head_dim })
    }

    /// The call for the first elements of keys.
    pub fn with_dim(self, dim: usize) -> Call<'a> {
        Call { dim, ..self }
    }

    /// The arguments.
    pub fn args(&self) -> &'a AttentionArgs<'a> {
        self.args
    }

    /// Query rows of the sequences.
    pub fn rows(&self) -> usize {
        self.rows
    }

    fn unsupported(&self, found: String) -> KernelError {
        KernelError::Unsupported { variant: self.variant, found }
    }

    /// Returns the name of a kernel that is compiled for each head size.
    fn instance(&self, kernel: &str) -> Result<Name, KernelError> {
        let (format, dim) = (self.args.cache.format, self.args.cache.shape.head_dim);
        if self.args.cache.is_latent() {
            return Err(self.unsupported("a latent cache".to_string()));
        }
        // Rows are read in vectors of 16 bytes.
        expect("query stride modulo 8", self.args.query_stride % 8, 0)?;
        names::instance(kernel, format, dim).ok_or_else(|| self.unsupported(format!("heads of {dim} and {format}")))
    }

    /// Returns the name of a kernel that is compiled for sizes of latents and for tiles of `rows` rows.
    fn latent_instance(&self, kernel: &str, rows: usize) -> Result<Name, KernelError> {
        let (format, dim, value_dim) =
            (self.args.cache.format, self.args.cache.shape.head_dim, self.args.cache.value_dim());
        let exists = self.args.cache.is_latent() && format.dtype != Dtype::F32;
        if !exists || !names::LATENTS.contains(&[dim, value_dim]) {
            return Err(self.unsupported(format!("keys of {dim}, values of {value_dim} and {format}")));
        }
        expect("query stride modulo 8", self.args.query_stride % 8, 0)?;
        Ok(names::latent(kernel, rows, format, dim))
    }

    /// Query heads per KV head.
    fn group(&self) -> usize {
        self.args.num_heads / self.args.cache.shape.num_kv_heads
    }

    /// Launches a thread block for each row and head, or for each of their partitions.
    fn by_rows(&self, device: &dyn Device, kernel: &str, split: Split) -> Result<(), KernelError> {
        if split == Split::ByWorkList {
            return self.by_work_list(device, kernel, self.query_len * self.args.num_heads);
        }
        self.launch(device, kernel, Grid::Rows, &[])
    }

    /// Launches a kernel whose blocks share the work list, `parts` for each item, and the kernel that merges partitions.
    fn by_work_list(&self, device: &dyn Device, kernel: &str, parts: usize) -> Result<(), KernelError> {
        self.workspace.check_partials(self.args.num_heads, self.args.cache.value_dim())?;
        let most = self.workspace.items().map_or(usize::MAX, |items| items.saturating_mul(parts));
        self.launch(device, kernel, Grid::Resident(most), &[])?;
        if !self.workspace.may_split() {
            return Ok(());
        }
        let kernel = Name::new(format_args!("paged_reduce_{}", self.args.cache.format.dtype));
        self.launch(device, &kernel, Grid::Merge, &[])
    }

    /// Launches a kernel. `more` follows the parameters that all attention kernels have.
    pub fn launch(&self, device: &dyn Device, kernel: &str, grid: Grid, more: &[Arg<'_>]) -> Result<(), KernelError> {
        self.launch_with(device, kernel, grid, more, 0)
    }

    /// [`Call::launch`] with so many bytes of shared memory, or those that the kernel states.
    pub fn launch_with(
        &self,
        device: &dyn Device,
        kernel: &str,
        grid: Grid,
        more: &[Arg<'_>],
        shared_bytes: usize,
    ) -> Result<(), KernelError> {
        if self.rows == 0 {
            return Ok(());
        }
        let (args, workspace, cache) = (self.args, self.workspace, self.args.cache);
        let shape = self.shape()?;
        let first = args.seqs.start;
        let [key_scales, value_scales] = scale_pointers(cache);
        let of_heads = |numbers: Option<&'a Buffer>| numbers.map_or(Arg::null(), |numbers| Arg::pointer(numbers, 0));
        let is_split = matches!(grid, Grid::Resident(_) | Grid::Merge);
        let split = |buffer| if is_split { Arg::pointer(buffer, 0) } else { Arg::null() };
        // Tiles are found by the starts. Rows need none if each sequence has exactly one.
        let one_each = self.query_len == 1 && self.rows == args.seqs.len();
        let starts = if matches!(grid, Grid::Tiles) || !one_each {
            Arg::pointer(workspace.query_starts.buffer(), first * size_of::<u32>())
        } else {
            Arg::null()
        };
        let common = [
            Arg::pointer(args.query, 0),
            Arg::pointer(&cache.keys, 0),
            Arg::pointer(cache.values(), 0),
            Arg::pointer(args.output, 0),
            args.lse.as_deref().map_or(Arg::null(), |lse| Arg::pointer(lse, 0)),
            split(&workspace.partial_sums),
            split(&workspace.partial_states),
            split(workspace.work.buffer()),
            split(workspace.first_partials.buffer()),
            Arg::pointer(workspace.block_tables.buffer(), first * workspace.limits().max_blocks * size_of::<i32>()),
            Arg::pointer(workspace.context_lens.buffer(), first * size_of::<u32>()),
            starts,
            key_scales,
            value_scales,
            of_heads(args.alibi_slopes),
            of_heads(args.sinks),
            Arg::bytes(&shape),
        ];
        let mut parameters = [Arg::null(); 24];
        parameters[..common.len()].copy_from_slice(&common);
        parameters[common.len()..][..more.len()].copy_from_slice(more);
        let parameters = &parameters[..common.len() + more.len()];
        let tile = device.tile(MODULE, kernel)?;
        let block = [tile.threads, 1, 1];
        let shared_bytes = count(shared_bytes)?;
        let mut launch = Launch { module: MODULE, kernel, grid: [1; 3], block, shared_bytes, args: parameters };
        launch.grid = match grid {
            Grid::Tiles => {
                let tiles = self.rows * self.group() / tile.rows.max(1) as usize + args.seqs.len();
                [count(tiles)?, count(cache.shape.num_kv_heads)?, 1]
            }
            Grid::Exact([x, y, z]) => [count(x)?, count(y)?, count(z)?],
            Grid::Rows => [count(self.rows * args.num_heads)?, 1, 1],
            Grid::Merge => {
                let parts = cache.value_dim().div_ceil(tile.threads.max(1) as usize);
                [count(self.rows * args.num_heads)?, count(parts)?, 1]
            }
            Grid::Resident(most) => [count(most.clamp(1, device.resident_blocks(&launch)? as usize))?, 1, 1],
        };
        Ok(device.launch(&launch)?)
    }

    fn shape(&self) -> Result<AttentionShape, KernelError> {
        let (args, shape) = (self.args, self.args.cache.shape);
        let strides = args.cache.format.strides(&shape);
        let sparse = args.sparse.map_or_else(SparseNumbers::default, |sparse| sparse.numbers());
        Ok(AttentionShape {
            query_stride: args.query_stride as i64,
            block_stride: strides.block as i64,
            head_stride: strides.head as i64,
            token_stride: strides.token as i64,
            scale: args.scale,
            soft_cap: args.soft_cap.unwrap_or(0.0),
            num_seqs: count(args.seqs.len())?,
            num_heads: count(args.num_heads)?,
            num_kv_heads: count(shape.num_kv_heads)?,
            head_dim: count(self.dim)?,
            value_dim: count(args.cache.value_dim())?,
            block_size: count(shape.block_size)?,
            max_blocks: count(self.workspace.limits().max_blocks)?,
            first_seq: count(args.seqs.start)?,
            first_row: count(args.rows().start)?,
            query_len: count(self.query_len)?,
            query_head: count(shape.head_dim)?,
            window: count(args.window.unwrap_or(0))?,
            kv_format: kv_format(self.variant, args.cache.format)?,
            scale_stride: args.cache.scale_stride(),
            sparse_block: sparse.block_size,
            sparse_local: sparse.local_blocks,
            sparse_stride: sparse.stride,
            sparse_step: sparse.step,
            sparse_first: sparse.first,
            sparse_by_kv_head: u32::from(sparse.by_kv_head),
        })
    }
}
