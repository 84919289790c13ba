//! The C ABI of plug-ins in Rust: `include/quire_kernels.h`, field by field. The header documents the meaning.
//!
//! This file uses nothing else of the crate, so a plug-in written in Rust can include it as a module.

#![allow(missing_docs)] // The header documents the fields.

use std::ffi::{c_char, c_void};

/// Version of this ABI. A host loads plug-ins of this version only.
pub const ABI: u32 = 1;
/// Number of compatible additions to this version. 1: [`SINKS`]. 2: [`BLOCK_SPARSE`].
pub const MINOR: u32 = 2;
/// `QUIREKRN` as a little-endian number.
pub const MAGIC: u64 = u64::from_le_bytes(*b"QUIREKRN");
/// Name of the exported symbol, an [`Entry`].
pub const SYMBOL: &str = "quire_kernels_plugin";

/// Attention of one query row per sequence.
pub const DECODE: u32 = 0;
/// Attention of any number of query rows.
pub const PREFILL: u32 = 1;
/// Write of keys and values into their slots.
pub const CACHE_WRITE: u32 = 2;
/// Copies of whole blocks.
pub const BLOCK_COPY: u32 = 3;

/// Supports sliding windows.
pub const WINDOW: u32 = 1;
/// Supports soft-capped scores.
pub const SOFT_CAP: u32 = 2;
/// Supports ALiBi slopes.
pub const ALIBI: u32 = 4;
/// Can output the log of the sum of exp(score).
pub const LSE: u32 = 8;
/// Supports attention sinks.
pub const SINKS: u32 = 16;
/// Supports block-sparse attention.
pub const BLOCK_SPARSE: u32 = 32;

/// Body of a parallel loop, called for each index.
pub type Task = unsafe extern "C" fn(context: *mut c_void, index: u64);
/// Parallel loop of the host.
pub type ParallelFor = unsafe extern "C" fn(pool: *mut c_void, tasks: u64, task: Task, context: *mut c_void);
/// Function of a variant. Returns 0, or another number after an error, which the plug-in's `last_error` describes.
pub type Run = unsafe extern "C" fn(host: *const Host, arguments: *const c_void) -> i32;
/// Exported function.
pub type Entry = unsafe extern "C" fn() -> *const Plugin;

/// Services of the host.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Host {
    pub size: u32,
    pub threads: u32,
    pub pool: *mut c_void,
    pub parallel_for: ParallelFor,
}

/// Paged keys and values of one layer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Cache {
    pub keys: *mut c_void,
    pub values: *mut c_void,
    pub k_scales: *const f32,
    pub v_scales: *const f32,
    pub scales_per_head: u32,
    pub dtype: u32,
    pub kv_dtype: u32,
    pub layout: u32,
    pub num_blocks: u64,
    pub num_kv_heads: u64,
    pub block_size: u64,
    pub head_dim: u64,
    pub block_stride: u64,
    pub head_stride: u64,
    pub token_stride: u64,
}

/// Arguments of [`DECODE`] and [`PREFILL`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Attention {
    pub size: u32,
    pub num_heads: u32,
    pub query: *const c_void,
    pub query_stride: u64,
    pub output: *mut c_void,
    pub lse: *mut f32,
    pub cache: Cache,
    pub query_starts: *const u32,
    pub context_lens: *const u32,
    pub block_tables: *const i32,
    pub max_blocks: u64,
    pub first_seq: u64,
    pub num_seqs: u64,
    pub window: u64,
    pub scale: f32,
    pub soft_cap: f32,
    pub alibi_slopes: *const f32,
    pub sinks: *const f32,
    pub sparse_block_size: u64,
    pub local_blocks: u64,
    pub vertical_stride: u64,
    pub first_head: u64,
    pub first_kv_head: u64,
    pub head_sliding_step: i32,
    pub reserved: u32,
}

/// Arguments of [`CACHE_WRITE`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CacheWrite {
    pub size: u32,
    pub reserved: u32,
    pub keys: *const c_void,
    pub values: *const c_void,
    pub source_stride: u64,
    pub slot_mapping: *const i64,
    pub rows: u64,
    pub cache: Cache,
}

/// Arguments of [`BLOCK_COPY`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BlockCopy {
    pub size: u32,
    pub reserved: u32,
    pub pairs: *const u32,
    pub num_pairs: u64,
    pub cache: Cache,
}

/// One implementation of one operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Variant {
    pub size: u32,
    pub operation: u32,
    pub name: *const c_char,
    pub device: *const c_char,
    pub dtypes: u32,
    pub kv_dtypes: u32,
    pub layouts: u32,
    pub features: u32,
    pub max_head_dim: u32,
    pub head_dim_step: u32,
    pub max_block_size: u32,
    pub block_size_step: u32,
    pub max_query_len: u64,
    pub row_invariant: *const c_char,
    pub rank: u32,
    pub reserved: u32,
    pub run: Run,
}

/// Description of a plug-in.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Plugin {
    pub magic: u64,
    pub abi: u32,
    pub size: u32,
    pub name: *const c_char,
    pub num_variants: u64,
    pub variants: *const *const Variant,
    pub last_error: unsafe extern "C" fn(buffer: *mut c_char, capacity: usize),
}
