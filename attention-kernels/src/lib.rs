//! Paged attention and cache kernels, and the registry that finds them.
//!
//! A *kernel variant* is a value ([`Variant`]): a name, an [`Operation`], what it can do ([`Capabilities`]) and a
//! function. Variants register themselves with `inventory`, so another crate adds one by linking; the engine asks
//! [`select`] for a set that fits a model and agrees on one cache, and never names a variant itself. Which one runs is data:
//! `"auto"` or a name from the `[kernels]` table of a TOML file.
//!
//! What it is not: it owns no cache (a [`KvCache`] is handed in) and does not know which block belongs to whom.
//!
//! **Layout.** Keys and values are one buffer each per layer, `[num_blocks, num_kv_heads, block_size, head_dim]` or what
//! else a [`Layout`] says that the set of kernels agreed on. Token position p of a sequence lives in block
//! `table[p / block_size]` at slot `p % block_size`.
//!
//! **Devices.** The variants of a CPU work on the arrays of their arguments. Those of `cuda` and `cuda-sim` launch the
//! kernels of `csrc/` on what a [`Workspace`] holds: load a step into one, then pass it along.
//!
//! **Plug-ins** are shared libraries behind a small C ABI (`include/quire_kernels.h`, and [`plugin_abi`] for Rust), named in
//! the `[kernels]` table; `plugin-example/` is one.
//!
//! **Row-invariance.** The output row of a query token depends on its own query, its sequence's keys and values and
//! its absolute position alone: not on the batch, the threads or chunk borders. Keys are reduced in absolute partitions of
//! [`PARTITION`] tokens that are merged in order (PagedAttention v2 and flash decoding do the same to split work). Variants
//! of one family ([`Capabilities::row_invariant`]) agree with each other too, so that it does not matter whether prefill
//! or decode computed a row.
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
mod needs;
mod plugin;
mod registry;
mod runs;
mod select;
mod shape;
mod swap;
mod tables;
pub mod trial;
mod variant;
mod workspace;

pub use args::{AttentionArgs, BlockCopyArgs, CacheWriteArgs, KvCache, KvScales, LinearArgs, Rows};
pub use batch::AttentionBatch;
pub use cuda::{PagedRule, convert_fp8};
pub use describe::{Described, Description, describe};
pub use error::KernelError;
pub use format::{CacheFormat, Dtype, KvDtype, Layout, Strides};
pub use inventory;
pub use needs::Needs;
pub use plugin::abi as plugin_abi;
pub use plugin::{LoadedKernel, PluginError, load as load_plugin};
pub use registry::variants;
pub use select::{KernelChoice, KernelSet, PluginChoice, SelectError, select};
pub use shape::{KvShape, PARTITION};
pub use swap::SwapSpace;
pub use tables::BlockTables;
pub use variant::{Capabilities, Kernel, Operation, Sizes, Variant};
pub use workspace::{Workspace, WorkspaceLimits};
