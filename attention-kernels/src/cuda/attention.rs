//! Launches of the attention kernels.

use device::{Arg, Buffer, Device, Launch, Tensor};

use super::names::{self, MODULE};
use super::parameters::{AttentionShape, count, kv_format, scale_pointers};
use super::rule::PagedRule;
use crate::args::AttentionArgs;
use crate::error::{KernelError, at_least, expect};
use crate::format::KvDtype;
use crate::shape::PARTITION;
use crate::workspace::Workspace;

/// Threads per block of `paged_decode` and `paged_reduce`.
const ROW_THREADS: u32 = 128;

/// How a decode kernel works through a context.
#[derive(Clone, Copy)]
pub(super) enum Context {
    /// One thread block per row and head (PagedAttention v1).
    Whole,
    /// One thread block per partition, and a second launch that merges them (PagedAttention v2).
    Split,
    /// As [`PagedRule::VLLM`] says, if the workspace has space for partial results. The bits are the same either way.
    ByRule,
}

pub(super) fn decode(
    variant: &'static str,
    context: Context,
    device: &dyn Device,
    args: AttentionArgs<'_>,
) -> Result<(), KernelError> {
    let call = Call::new(variant, &args)?;
    call.by_rows(device, &call.instance("paged_decode")?, context)
}

/// Decode and prefill of queries of any type, any head size up to [`names::WIDEST_HEAD`].
pub(super) fn generic(device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let call = Call::new("cuda.generic", &args)?;
    let dim = args.cache.shape.head_dim;
    at_least("greatest head size", names::WIDEST_HEAD, dim)?;
    let wide = if dim > 256 { "_wide" } else { "" };
    call.by_rows(device, &format!("paged_generic_{}{wide}", args.cache.format.dtype), Context::ByRule)
}

/// Decode in which all query heads of a KV head read it once. Contexts are always split.
pub(super) fn grouped(device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let call = Call::new("cuda.paged_gqa", &args)?;
    let kernel = call.instance("paged_gqa")?;
    let partitions = call.checked_partitions()?;
    let shape = args.cache.shape;
    let threads = if shape.head_dim <= 128 { 128 } else { 64 };
    let blocks = call.rows * shape.num_kv_heads * call.group().div_ceil(16);
    call.launch(device, &kernel, [count(blocks)?, count(partitions)?, 1], threads, partitions, &[])?;
    call.reduce(device, partitions)
}

/// Prefill in tiles of query rows. A thread block merges the partitions of a context one after the other.
pub(super) fn prefill(device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let call = Call::new("cuda.paged_prefill", &args)?;
    let kernel = call.instance("paged_prefill")?;
    let shape = args.cache.shape;
    let rows = if shape.head_dim <= 128 { 64 } else { 32 };
    let blocks = call.rows * call.group() / rows + args.seqs.len();
    call.launch(device, &kernel, [count(blocks)?, count(shape.num_kv_heads)?, 1], 128, 0, &[])
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
    let blocks = call.rows * call.group() / 128 + args.seqs.len();
    let strides = format.layout.strides(&shape);
    let bytes = format.element_bytes();
    let tensor = |buffer| Tensor {
        buffer,
        sizes: [dim, size, shape.num_kv_heads, shape.num_blocks],
        strides: [strides.token * bytes, strides.head * bytes, strides.block * bytes],
        tile: [64, size as u32, 1, 1],
    };
    let tensors = [tensor(&args.cache.keys), tensor(args.cache.values())];
    let grid = [count(blocks)?, count(shape.num_kv_heads)?, 1];
    call.launch(device, &kernel, grid, 384, 0, &tensors.each_ref().map(Arg::tensor))
}

/// A call whose sizes are checked.
struct Call<'a> {
    variant: &'static str,
    args: &'a AttentionArgs<'a>,
    workspace: &'a Workspace,
    /// Query rows of the sequences.
    rows: usize,
}

impl<'a> Call<'a> {
    fn new(variant: &'static str, args: &'a AttentionArgs<'a>) -> Result<Call<'a>, KernelError> {
        args.check_sizes()?;
        let missing = |what| KernelError::NotLoaded { variant, what };
        let workspace = args.workspace.ok_or(missing("workspace"))?;
        if !workspace.has_batch(args.batch, args.window) {
            return Err(missing("batch with these lengths and this window"));
        }
        workspace.check_cache(&args.cache.shape)?;
        args.cache.format.check_scaled_rows(variant, &args.cache.shape)?;
        Ok(Call { variant, args, workspace, rows: args.rows().len() })
    }

    fn unsupported(&self, found: String) -> KernelError {
        KernelError::Unsupported { variant: self.variant, found }
    }

    /// Returns the name of a kernel that is compiled for each head size.
    fn instance(&self, kernel: &str) -> Result<String, KernelError> {
        let (format, dim) = (self.args.cache.format, self.args.cache.shape.head_dim);
        if self.args.cache.is_latent() {
            return Err(self.unsupported("a latent cache".to_string()));
        }
        // Rows are read in vectors of 16 bytes.
        expect("query stride modulo 8", self.args.query_stride % 8, 0)?;
        names::instance(kernel, format, dim).ok_or_else(|| self.unsupported(format!("heads of {dim} and {format}")))
    }

    /// Query heads per KV head.
    fn group(&self) -> usize {
        self.args.num_heads / self.args.cache.shape.num_kv_heads
    }

    /// Length in tokens of the longest context that the launch covers: that of the widest block table, or in a graph the
    /// widest that any step may have.
    fn max_context(&self) -> usize {
        self.workspace.launch_blocks() * self.args.cache.shape.block_size
    }

    /// Number of partitions, at least 1: a driver refuses an empty grid, and a batch of padding may have empty tables.
    fn partitions(&self) -> usize {
        self.max_context().div_ceil(PARTITION).max(1)
    }

    fn can_split(&self) -> bool {
        let dim = self.args.cache.value_dim();
        self.workspace.can_split(self.rows, self.args.num_heads, self.partitions(), dim)
    }

    /// The number of partitions, if the workspace has space for the results of all.
    fn checked_partitions(&self) -> Result<usize, KernelError> {
        if self.can_split() {
            return Ok(self.partitions());
        }
        let expected = self.rows * self.args.num_heads * self.partitions();
        let found = self.workspace.partial_states.len_bytes() / (2 * size_of::<f32>());
        Err(KernelError::Shape { what: "partial results that fit the workspace", found, expected })
    }

    /// Launches a thread block for each row and head, or for each of their partitions.
    fn by_rows(&self, device: &dyn Device, kernel: &str, context: Context) -> Result<(), KernelError> {
        let rule = PagedRule::VLLM.splits(self.max_context(), self.rows, self.args.num_heads);
        let split = match context {
            Context::Whole => 0,
            Context::Split => self.checked_partitions()?,
            Context::ByRule if rule && self.can_split() => self.partitions(),
            Context::ByRule => 0,
        };
        let blocks = count(self.rows * self.args.num_heads)?;
        self.launch(device, kernel, [blocks, count(split.max(1))?, 1], ROW_THREADS, split, &[])?;
        if split > 0 { self.reduce(device, split) } else { Ok(()) }
    }

    /// Launches the kernel that merges the partitions.
    fn reduce(&self, device: &dyn Device, partitions: usize) -> Result<(), KernelError> {
        let blocks = count(self.rows * self.args.num_heads)?;
        let kernel = format!("paged_reduce_{}", self.args.cache.format.dtype);
        self.launch(device, &kernel, [blocks, 1, 1], ROW_THREADS, partitions, &[])
    }

    /// Launches a kernel. `more` follows the parameters that all attention kernels have: nothing, or two tensor maps.
    fn launch(
        &self,
        device: &dyn Device,
        kernel: &str,
        grid: [u32; 3],
        threads: u32,
        partitions: usize,
        more: &[Arg<'_>],
    ) -> Result<(), KernelError> {
        if self.rows == 0 {
            return Ok(());
        }
        let (args, workspace, cache) = (self.args, self.workspace, self.args.cache);
        let shape = self.shape(partitions)?;
        let first = args.seqs.start;
        let [key_scales, value_scales] = scale_pointers(cache);
        let of_heads = |numbers: Option<&'a Buffer>| numbers.map_or(Arg::null(), |numbers| Arg::pointer(numbers, 0));
        let partial = |buffer| if partitions > 0 { Arg::pointer(buffer, 0) } else { Arg::null() };
        let common = [
            Arg::pointer(args.query, 0),
            Arg::pointer(&cache.keys, 0),
            Arg::pointer(cache.values(), 0),
            Arg::pointer(args.output, 0),
            args.lse.as_deref().map_or(Arg::null(), |lse| Arg::pointer(lse, 0)),
            partial(&workspace.partial_sums),
            partial(&workspace.partial_states),
            Arg::pointer(workspace.block_tables.buffer(), first * workspace.limits().max_blocks * size_of::<i32>()),
            Arg::pointer(workspace.context_lens.buffer(), first * size_of::<u32>()),
            Arg::pointer(workspace.query_starts.buffer(), first * size_of::<u32>()),
            key_scales,
            value_scales,
            of_heads(args.alibi_slopes),
            of_heads(args.sinks),
            Arg::bytes(&shape),
        ];
        let mut parameters = [Arg::null(); 17];
        parameters[..common.len()].copy_from_slice(&common);
        parameters[common.len()..][..more.len()].copy_from_slice(more);
        let parameters = &parameters[..common.len() + more.len()];
        let block = [threads, 1, 1];
        device.launch(&Launch { module: MODULE, kernel, grid, block, shared_bytes: 0, args: parameters })?;
        Ok(())
    }

    fn shape(&self, partitions: usize) -> Result<AttentionShape, KernelError> {
        let (args, shape) = (self.args, self.args.cache.shape);
        let strides = args.cache.format.strides(&shape);
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
            head_dim: count(shape.head_dim)?,
            value_dim: count(args.cache.value_dim())?,
            block_size: count(shape.block_size)?,
            max_blocks: count(self.workspace.limits().max_blocks)?,
            max_partitions: count(partitions)?,
            window: count(args.window.unwrap_or(0))?,
            kv_format: kv_format(self.variant, args.cache.format)?,
            scale_stride: args.cache.scale_stride(),
            reserved: 0,
        })
    }
}
