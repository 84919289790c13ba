//! Calls of plug-in functions: arguments of this crate become the structures of the header.

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};

use device::{Buffer, Device};
use simd::Pool;

use super::abi;
use crate::args::{AttentionArgs, BlockCopyArgs, CacheWriteArgs, KvCache, Values};
use crate::error::KernelError;
use crate::format::{Dtype, KvDtype, Layout};
use crate::sparse::BlockSparse;

/// Function of a variant in a plug-in.
#[derive(Clone, Copy)]
pub struct LoadedKernel {
    pub(super) name: &'static str,
    pub(super) run: abi::Run,
    pub(super) last_error: unsafe extern "C" fn(*mut c_char, usize),
}

impl LoadedKernel {
    /// Computes attention.
    pub(crate) fn attention(&self, device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
        args.check()?;
        let (batch, seqs) = (args.batch, args.seqs.clone());
        let of_heads = |numbers: Option<&Buffer>| numbers.map_or(Ok(null()), read).map(<*const c_void>::cast::<f32>);
        let sparse = |field: fn(&BlockSparse) -> usize| args.sparse.as_ref().map_or(0, field) as u64;
        let arguments = abi::Attention {
            size: size_of::<abi::Attention>() as u32,
            num_heads: args.num_heads as u32,
            query: read(args.query)?,
            query_stride: args.query_stride as u64,
            output: written(args.output)?,
            lse: args.lse.map_or(Ok(null_mut()), written)?.cast(),
            cache: cache(args.cache)?,
            query_starts: batch.query_starts.as_ptr(),
            context_lens: batch.context_lens.as_ptr(),
            block_tables: batch.block_tables.rectangle().as_ptr(),
            max_blocks: batch.block_tables.longest() as u64,
            first_seq: seqs.start as u64,
            num_seqs: seqs.len() as u64,
            window: args.window.unwrap_or(0) as u64,
            scale: args.scale,
            soft_cap: args.soft_cap.unwrap_or(0.0),
            alibi_slopes: of_heads(args.alibi_slopes)?,
            sinks: of_heads(args.sinks)?,
            sparse_block_size: sparse(|it| it.block_size),
            local_blocks: sparse(|it| it.local_blocks),
            vertical_stride: sparse(|it| it.vertical_stride),
            first_head: sparse(|it| it.first_head),
            first_kv_head: sparse(|it| it.first_kv_head),
            head_sliding_step: args.sparse.map_or(0, |it| it.head_sliding_step),
            reserved: 0,
        };
        self.call(device, &arguments)
    }

    /// Writes keys and values into their slots.
    pub(crate) fn cache_write(&self, device: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
        args.check()?;
        let (source, bytes) = (read(args.source)?, args.cache.format.dtype.bytes());
        let arguments = abi::CacheWrite {
            size: size_of::<abi::CacheWrite>() as u32,
            reserved: 0,
            keys: source.wrapping_byte_add(args.key_offset * bytes),
            values: source.wrapping_byte_add(args.value_offset * bytes),
            source_stride: args.stride as u64,
            slot_mapping: args.slot_mapping.as_ptr(),
            rows: args.slot_mapping.len() as u64,
            cache: written_cache(args.cache)?,
        };
        self.call(device, &arguments)
    }

    /// Copies whole blocks.
    pub(crate) fn block_copy(&self, device: &dyn Device, args: BlockCopyArgs<'_>) -> Result<(), KernelError> {
        args.check()?;
        let pairs: Vec<u32> = args.copies.iter().flat_map(|&(src, dst)| [src, dst]).collect();
        let arguments = abi::BlockCopy {
            size: size_of::<abi::BlockCopy>() as u32,
            reserved: 0,
            pairs: pairs.as_ptr(),
            num_pairs: args.copies.len() as u64,
            cache: written_cache(args.cache)?,
        };
        self.call(device, &arguments)
    }

    fn call<T>(&self, device: &dyn Device, arguments: &T) -> Result<(), KernelError> {
        let pool = device.pool();
        let host = abi::Host {
            size: size_of::<abi::Host>() as u32,
            threads: pool.threads() as u32,
            pool: std::ptr::from_ref(pool).cast_mut().cast(),
            parallel_for,
        };
        // SAFETY: the arguments are those of the variant's operation, their sizes are checked, and pointers are valid until
        // the call returns.
        let code = unsafe { (self.run)(&host, std::ptr::from_ref(arguments).cast()) };
        if code == 0 { Ok(()) } else { Err(self.failure(code)) }
    }

    fn failure(&self, code: i32) -> KernelError {
        let mut text = [0u8; 512];
        // SAFETY: the function writes at most `text.len()` bytes, the last of them a 0.
        unsafe { (self.last_error)(text.as_mut_ptr().cast::<c_char>(), text.len()) };
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        let message = String::from_utf8_lossy(&text[..end]).replace(['\n', '\r'], " ");
        KernelError::Plugin { variant: self.name, code, message }
    }
}

/// Parallel loop of the host, as `parallel_for` of the header.
unsafe extern "C" fn parallel_for(pool: *mut c_void, tasks: u64, task: abi::Task, context: *mut c_void) {
    /// Context of the plug-in's function.
    struct Context(*mut c_void);
    // SAFETY: the header states that tasks run on several threads at once; the plug-in is responsible for what the pointer
    // refers to.
    unsafe impl Sync for Context {}
    // SAFETY: as above.
    unsafe impl Send for Context {}
    impl Context {
        fn get(&self) -> *mut c_void {
            self.0
        }
    }
    // SAFETY: this is the pool from `LoadedKernel::call`, which does not return before this function does.
    let pool = unsafe { &*pool.cast_const().cast::<Pool>() };
    let context = Context(context);
    pool.run(usize::try_from(tasks).unwrap_or(usize::MAX), usize::MAX, |index| {
        // SAFETY: the plug-in's function is called with the plug-in's context.
        unsafe { task(context.get(), index as u64) }
    });
}

fn read(buffer: &Buffer) -> Result<*const c_void, KernelError> {
    Ok(buffer.host::<u8>()?.as_ptr().cast())
}

fn written(buffer: &mut Buffer) -> Result<*mut c_void, KernelError> {
    Ok(buffer.host_mut::<u8>()?.as_mut_ptr().cast())
}

fn written_cache(found: &mut KvCache) -> Result<abi::Cache, KernelError> {
    let keys = written(&mut found.keys)?;
    let values = if let Values::Separate(values) = &mut found.values { written(values)? } else { keys };
    Ok(abi::Cache { keys, values, ..cache(found)? })
}

/// Returns the description of a cache that is only read, although its pointers are mutable. It is not latent: no plug-in
/// states that it supports that.
fn cache(cache: &KvCache) -> Result<abi::Cache, KernelError> {
    let (shape, format) = (cache.shape, cache.format);
    let strides = format.strides(&shape);
    let scales = |of: fn(&crate::args::KvScales) -> &Buffer| match &cache.scales {
        Some(scales) => Ok::<_, KernelError>(read(of(scales))?.cast::<f32>()),
        None => Ok(null()),
    };
    Ok(abi::Cache {
        keys: read(&cache.keys)?.cast_mut(),
        values: read(cache.values())?.cast_mut(),
        k_scales: scales(|s| &s.keys)?,
        v_scales: scales(|s| &s.values)?,
        scales_per_head: cache.scale_stride(),
        dtype: number(&Dtype::ALL, format.dtype),
        kv_dtype: format.kv_code("a plug-in", &KvDtype::COMMON)?,
        layout: number(&Layout::COMMON, format.layout),
        num_blocks: shape.num_blocks as u64,
        num_kv_heads: shape.num_kv_heads as u64,
        block_size: shape.block_size as u64,
        head_dim: shape.head_dim as u64,
        block_stride: strides.block as u64,
        head_stride: strides.head as u64,
        token_stride: strides.token as u64,
    })
}

/// Returns the header's number of a type or layout: its index in the list.
fn number<T: PartialEq>(all: &[T], value: T) -> u32 {
    all.iter().position(|other| *other == value).unwrap_or(0) as u32
}
