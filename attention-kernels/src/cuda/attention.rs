//! Launches of the attention kernels.

use device::{Arg, Device, Launch, Tensor};

use super::names::{self, MODULE};
use super::rule::PagedRule;
use crate::args::AttentionArgs;
use crate::error::{KernelError, at_least, expect};
use crate::format::{Dtype, KvDtype};
use crate::shape::PARTITION;
use crate::workspace::Workspace;

/// Threads of a block of `paged_decode` and `paged_reduce`.
const ROW_THREADS: u32 = 128;

/// How a decode works through a context.
#[derive(Clone, Copy)]
pub(super) enum Context {
    /// One thread block per row and head: v1.
    Whole,
    /// One per partition, and a second launch: v2.
    Split,
    /// As [`PagedRule::VLLM`] says, and as the workspace has room: whichever it is, the bits are the same.
    ByRule,
}

pub(super) fn decode(
    variant: &'static str,
    context: Context,
    device: &dyn Device,
    args: AttentionArgs<'_>,
) -> Result<(), KernelError> {
    let call = Call::new(variant, &args)?;
    let kernel = call.instance(&names::DECODE)?;
    call.by_rows(device, kernel, context)
}

/// f32: any head size, decode and prefill alike.
pub(super) fn generic(device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let call = Call::new("cuda.generic", &args)?;
    if args.cache.format.dtype != Dtype::F32 {
        return Err(call.unsupported(format!("queries of {}", args.cache.format.dtype)));
    }
    at_least("greatest head size", 256, args.cache.shape.head_dim)?;
    call.by_rows(device, "paged_decode_f32", Context::ByRule)
}

/// All query heads of a KV head read it once; contexts are always split.
pub(super) fn grouped(device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let call = Call::new("cuda.paged_gqa", &args)?;
    let kernel = call.instance(&names::GQA)?;
    let partitions = call.checked_partitions()?;
    let dim = args.cache.shape.head_dim;
    let (threads, tokens) = if dim <= 128 { (128, 64) } else { (64, 32) };
    let warps = threads as usize / 32;
    let tile = 4 * tokens * (dim + 8) + 32 * (tokens + 8) + 16 * tokens + 64 * warps;
    let shared = round16(tile + call.scale_bytes(tokens));
    let blocks = call.rows * args.cache.shape.num_kv_heads * call.group().div_ceil(16);
    call.launch(device, kernel, [grid(blocks)?, grid(partitions)?, 1], threads, shared, partitions)?;
    call.reduce(device, partitions)
}

/// Tiles of query rows; the partitions of a context are folded as they come.
pub(super) fn prefill(device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let call = Call::new("cuda.paged_prefill", &args)?;
    let kernel = call.instance(&names::PREFILL)?;
    let dim = args.cache.shape.head_dim;
    // Beside the tile: the folded sums, 4 bytes each.
    let (rows, tile, folded) = if dim <= 128 {
        (64, 4 * 64 * (dim + 8) + 2 * (64 + 8) + 16 * 64 + 256 + call.scale_bytes(64), 256 * dim)
    } else {
        (32, 4 * 32 * (dim + 8) + 64 * (32 + 8) + 16 * 32 + 256 + call.scale_bytes(32), 128 * dim)
    };
    let blocks = call.rows * call.group() / rows + args.seqs.len();
    let kv_heads = args.cache.shape.num_kv_heads;
    call.launch(device, kernel, [grid(blocks)?, grid(kv_heads)?, 1], 128, round16(tile) + folded as u32, 0)
}

/// The same on Hopper's copy engine and its tensor cores.
pub(super) fn hopper(device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
    let call = Call::new("cuda.prefill_sm90", &args)?;
    let (format, shape) = (args.cache.format, args.cache.shape);
    let kernel = match names::prefill_sm90(format, shape.head_dim) {
        Some(kernel) if names::HOPPER_BLOCKS.contains(&shape.block_size) => kernel,
        _ => {
            let (dim, size) = (shape.head_dim, shape.block_size);
            return Err(call.unsupported(format!("heads of {dim}, blocks of {size} and {format}")));
        }
    };
    // A query, then stages of keys and of values, 64 KiB each, then four mbarriers a stage.
    let stages = 256 / shape.head_dim;
    let shared = (256 * shape.head_dim + 2 * (64 << 10) + 32 * stages).next_multiple_of(1024);
    let blocks = call.rows * call.group() / 128 + args.seqs.len();
    let strides = format.layout.strides(&shape);
    let bytes = format.element_bytes();
    let tensor = |buffer| Tensor {
        buffer,
        sizes: [shape.head_dim, shape.block_size, shape.num_kv_heads, shape.num_blocks],
        strides: [strides.token * bytes, strides.head * bytes, strides.block * bytes],
        tile: [64, shape.block_size as u32, 1, 1],
    };
    let tensors = [tensor(&args.cache.keys), tensor(&args.cache.values)];
    let grid = [grid(blocks)?, grid(shape.num_kv_heads)?, 1];
    call.launch_with(device, kernel, grid, 384, shared as u32, 0, &tensors.each_ref().map(Arg::tensor))
}

/// One call, its shapes checked.
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
        if args.alibi_slopes.is_some_and(|slopes| !workspace.has_slopes(slopes)) {
            return Err(missing("such ALiBi slopes"));
        }
        let shape = args.cache.shape;
        expect("block size of the cache", shape.block_size, workspace.limits().block_size)?;
        at_least("blocks of the cache", shape.num_blocks, workspace.limits().num_blocks)?;
        args.cache.format.check_scaled_rows(variant, &shape)?;
        // Rows are read in vectors of 16 bytes, but for f32.
        let vector = if args.cache.format.dtype == Dtype::F32 { 1 } else { 8 };
        expect("query stride modulo 8", args.query_stride % vector, 0)?;
        Ok(Call { variant, args, workspace, rows: args.rows().len() })
    }

    fn unsupported(&self, found: String) -> KernelError {
        KernelError::Unsupported { variant: self.variant, found }
    }

    fn instance(&self, names: &names::Names) -> Result<&'static str, KernelError> {
        let (format, dim) = (self.args.cache.format, self.args.cache.shape.head_dim);
        names.of(format, dim).ok_or_else(|| self.unsupported(format!("heads of {dim} and {format}")))
    }

    /// Shared memory of a tile for the scales that the keys and values of two tiles of tokens may have: `RowScales` of
    /// `csrc/tile.cuh`.
    fn scale_bytes(&self, tokens: usize) -> usize {
        if self.args.cache.format.kv_dtype.is_byte() { 4 * tokens * size_of::<f32>() } else { 0 }
    }

    /// Query heads of a KV head.
    fn group(&self) -> usize {
        self.args.num_heads / self.args.cache.shape.num_kv_heads
    }

    /// Tokens of the longest context that the launch is made for: what the block tables have room for, or in a graph what
    /// those of any step have.
    fn max_context(&self) -> usize {
        self.workspace.launch_blocks() * self.args.cache.shape.block_size
    }

    /// At least one: the driver refuses a grid of no blocks, and a batch of padding alone may have tables of no width.
    fn partitions(&self) -> usize {
        self.max_context().div_ceil(PARTITION).max(1)
    }

    fn has_room(&self) -> bool {
        let dim = self.args.cache.shape.head_dim;
        self.workspace.has_room(self.rows, self.args.num_heads, self.partitions(), dim)
    }

    /// The partitions, if the workspace has room for them.
    fn checked_partitions(&self) -> Result<usize, KernelError> {
        if self.has_room() {
            return Ok(self.partitions());
        }
        let expected = self.rows * self.args.num_heads * self.partitions();
        let found = self.workspace.partial_states.len_bytes() / (2 * size_of::<f32>());
        Err(KernelError::Shape { what: "partial results that the workspace has room for", found, expected })
    }

    /// A thread block for each row and head, or for each of their partitions.
    fn by_rows(&self, device: &dyn Device, kernel: &str, context: Context) -> Result<(), KernelError> {
        let rule = PagedRule::VLLM.splits(self.max_context(), self.rows, self.args.num_heads);
        let split = match context {
            Context::Whole => 0,
            Context::Split => self.checked_partitions()?,
            Context::ByRule if rule && self.has_room() => self.partitions(),
            Context::ByRule => 0,
        };
        let blocks = grid(self.rows * self.args.num_heads)?;
        self.launch(device, kernel, [blocks, grid(split.max(1))?, 1], ROW_THREADS, 0, split)?;
        if split > 0 { self.reduce(device, split) } else { Ok(()) }
    }

    fn reduce(&self, device: &dyn Device, partitions: usize) -> Result<(), KernelError> {
        let blocks = grid(self.rows * self.args.num_heads)?;
        let kernel = names::reduce(self.args.cache.format.dtype);
        self.launch(device, kernel, [blocks, 1, 1], ROW_THREADS, 0, partitions)
    }

    fn launch(
        &self,
        device: &dyn Device,
        kernel: &str,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        partitions: usize,
    ) -> Result<(), KernelError> {
        self.launch_with(device, kernel, grid, threads, shared_bytes, partitions, &[])
    }

    /// `more`: what the kernel takes behind the parameters of all attention kernels, at most two.
    #[allow(clippy::too_many_arguments)]
    fn launch_with(
        &self,
        device: &dyn Device,
        kernel: &str,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        partitions: usize,
        more: &[Arg<'_>],
    ) -> Result<(), KernelError> {
        if self.rows == 0 {
            return Ok(());
        }
        let (args, workspace, cache) = (self.args, self.workspace, self.args.cache);
        let shape = self.shape(partitions)?;
        let first = args.seqs.start;
        let scales = |which: fn(&crate::KvScales) -> &device::Buffer| match &cache.scales {
            Some(scales) if cache.format.kv_dtype.takes_scales() => Arg::pointer(which(scales), 0),
            _ => Arg::null(),
        };
        let partial = |buffer| if partitions > 0 { Arg::pointer(buffer, 0) } else { Arg::null() };
        let common = [
            Arg::pointer(args.query, 0),
            Arg::pointer(&cache.keys, 0),
            Arg::pointer(&cache.values, 0),
            Arg::pointer(args.output, 0),
            args.lse.as_deref().map_or(Arg::null(), |lse| Arg::pointer(lse, 0)),
            partial(&workspace.partial_sums),
            partial(&workspace.partial_states),
            Arg::pointer(workspace.block_tables(), first * workspace.limits().max_blocks * size_of::<i32>()),
            Arg::pointer(workspace.context_lens(), first * size_of::<u32>()),
            Arg::pointer(workspace.query_starts(), first * size_of::<u32>()),
            scales(|scales| &scales.keys),
            scales(|scales| &scales.values),
            args.alibi_slopes.map_or(Arg::null(), |_| Arg::pointer(workspace.alibi_slopes(), 0)),
            Arg::bytes(&shape),
        ];
        let mut parameters = [Arg::null(); 16];
        parameters[..common.len()].copy_from_slice(&common);
        parameters[common.len()..][..more.len()].copy_from_slice(more);
        let parameters = &parameters[..common.len() + more.len()];
        let block = [threads, 1, 1];
        device.launch(&Launch { module: MODULE, kernel, grid, block, shared_bytes, args: parameters })?;
        Ok(())
    }

    /// `AttentionShape` of `csrc/args.cuh`, word by word.
    fn shape(&self, partitions: usize) -> Result<[u32; 20], KernelError> {
        let (args, shape) = (self.args, self.args.cache.shape);
        let strides = args.cache.format.strides(&shape);
        let mut words = [0; 20];
        for (i, stride) in [args.query_stride, strides.block, strides.head, strides.token].into_iter().enumerate() {
            words[2 * i..2 * i + 2].copy_from_slice(&halves(stride as u64));
        }
        let per_head = args.cache.scales.as_ref().is_some_and(|scales| scales.per_head);
        words[8] = args.scale.to_bits();
        words[9] = args.soft_cap.unwrap_or(0.0).to_bits();
        let counts = [
            args.seqs.len(),
            args.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            self.workspace.limits().max_blocks,
            partitions,
            args.window.unwrap_or(0),
        ];
        for (word, count) in words[10..].iter_mut().zip(counts) {
            *word = grid(count)?;
        }
        words[18] = args.cache.format.kv_code(self.variant, &KvDtype::ON_GPU)?; // `KvFormat` of `csrc/args.cuh`
        words[19] = u32::from(per_head);
        Ok(words)
    }
}

/// The two words of a 64-bit number, in the order of this machine's memory.
pub(super) fn halves(number: u64) -> [u32; 2] {
    let (low, high) = (number as u32, (number >> 32) as u32);
    if cfg!(target_endian = "little") { [low, high] } else { [high, low] }
}

/// A count as a kernel takes it.
pub(super) fn grid(count: usize) -> Result<u32, KernelError> {
    u32::try_from(count).map_err(|_| KernelError::Shape {
        what: "size of a launch",
        found: count,
        expected: u32::MAX as usize,
    })
}

fn round16(bytes: usize) -> u32 {
    bytes.next_multiple_of(16) as u32
}
