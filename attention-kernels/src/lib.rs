//! Paged attention and cache kernels, and the registry that finds them.
//!
//! A *kernel variant* is a value ([`Variant`]): a name, an [`Operation`], its [`Capabilities`] and a function. Variants
//! register themselves with `inventory`, so a crate adds one by being linked. The engine asks [`select`] for a set of
//! variants that can serve a model and agree on one cache layout; it never names a variant itself. The `[kernels]` table of
//! a TOML file can name one for an operation in place of `"auto"`.
//!
//! This crate does not own caches (callers pass a [`KvCache`]) and does not know which sequence a block belongs to.
//!
//! **Layout.** Each layer has one buffer of keys and one of values, `[num_blocks, num_kv_heads, block_size, head_dim]` or
//! the other [`Layout`] if the selected kernels agree on it. Token position p of a sequence is stored in block `table[p /
//! block_size]`, slot `p % block_size`. A latent cache ([`KvCache::latent`]) has only the buffer of keys.
//!
//! **Devices.** CPU variants work on the arrays in their arguments. The variants for `cuda` and `cuda-sim` launch the
//! kernels of `csrc/` on arrays in a [`Workspace`]: load each step into one and pass it along.
//!
//! **Plug-ins** are shared libraries behind a small C ABI (`include/quire_kernels.h`, and [`plugin_abi`] for Rust), named
//! in the `[kernels]` table. `plugin-example/` is one.
//!
//! **Row-invariance.** The output row of a query token depends only on its own query, its sequence's keys and values, and
//! its absolute position, not on the batch, the number of threads or the borders of prefill chunks. Keys are reduced in
//! absolute partitions of [`PARTITION`] tokens, which are merged in order (PagedAttention v2 and flash decoding partition
//! in the same way to split work). Variants of one family ([`Capabilities::row_invariant`]) compute equal bits, so it does
//! not matter whether prefill or decode computed a row.
//!
//! ```
//! use attention_kernels::{KernelChoice, Needs, select};
//! let needs = Needs { head_dim: 64, ..Needs::default() };
//! let kernels = select(&KernelChoice::default(), &needs)?;
//! println!("decode runs on {}", kernels.decode.name);
//! let choice = KernelChoice { decode: "cpu.reference".into(), ..Default::default() };
//! assert_eq!(select(&choice, &needs)?.decode.name, "cpu.reference");
//! # Ok::<(), attention_kernels::SelectError>(())
//! ```

mod args;
mod batch;
mod cost;
mod cpu;
mod cuda;
mod describe;
mod error;
mod format;
pub mod layer;
mod low_rank;
mod mirror;
mod needs;
mod plugin;
mod registry;
mod scratch;
mod select;
mod shape;
mod sparse;
mod swap;
mod tables;
mod upload;
mod variant;
mod work;
mod workspace;

pub use args::{
    AttentionArgs, BlockCopyArgs, CacheWriteArgs, ExpertLinearArgs, KvCache, KvScales, LinearArgs, Rows, Values,
};
pub use batch::AttentionBatch;
pub use cpu::chosen::{ChosenArgs, IndexRows, attend_chosen};
pub use cuda::{ChosenMemory, LaunchedChosen, convert_fp8, expert_linear, launch_chosen, ordered_bytes, read_memory};
pub use describe::{Described, Description, describe};
pub use error::KernelError;
pub use format::{CacheFormat, Dtype, KvDtype, Layout, Strides};
pub use inventory;
pub use low_rank::{LowRankArgs, LowRankFactors, LowRankRows, LowRankSize, LowRankSlots};
pub use mirror::Mirror;
pub use needs::Needs;
pub use plugin::abi as plugin_abi;
pub use plugin::{LoadedKernel, PluginError, load as load_plugin};
pub use registry::{serves_cache, variants};
pub use scratch::{LinearScratch, PlannedProduct, Rewritten, ScratchSizes, linear_products, slices};
pub use select::{KernelChoice, KernelSet, PluginChoice, SelectError, select};
pub use shape::{KvShape, PARTITION};
pub use sparse::{BlockSparse, Pattern, Runs};
pub use swap::SwapSpace;
pub use tables::BlockTables;
pub use upload::Upload;
pub use variant::{Capabilities, ItemsAtOnce, Kernel, Latents, Operation, Sizes, Variant};
pub use workspace::{Workspace, WorkspaceLimits};

/// Parts without a public interface that tests call: they are not compiled a second time for unit tests.
#[doc(hidden)]
pub mod for_tests {
    pub use crate::work::{ALL_PARTITIONS, MOST_ROWS as MOST_SPLIT_ROWS, NO_PARTIALS, WorkList};
}
