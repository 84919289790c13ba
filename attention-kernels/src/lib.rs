//! Paged attention and cache kernels, and the registry that finds them.
//!
//! A *kernel variant* is a value ([`Variant`]): a name, an [`Operation`], what it can do ([`Capabilities`]) and a
//! function. Variants register themselves with `inventory`, so another crate adds one by linking; the engine asks
//! [`select`] for a set that fits a model and never names a variant itself. Which one runs is data: `"auto"` or a name
//! from the `[kernels]` table of a TOML file.
//!
//! What it is not: it owns no cache (a [`KvCache`] is handed in) and does not know which block belongs to whom.
//!
//! **Layout.** Keys and values are `[num_blocks, num_kv_heads, block_size, head_dim]`, one buffer each per layer.
//! Token position p of a sequence lives in block `table[p / block_size]` at slot `p % block_size`.
//!
//! **Row-invariance.** The output row of a query token depends on its own query, its sequence's keys and values and
//! its absolute position alone: not on the batch, the threads, chunk borders, or whether prefill or decode computed
//! it. Keys are reduced in absolute partitions of [`PARTITION`] tokens that are merged in order (PagedAttention v2 and
//! flash decoding do the same to split work).
//!
//! ```
//! use attention_kernels::{KernelChoice, Needs, select};
//! let needs = Needs { device: "cpu".into(), head_dim: 64, window: false };
//! let kernels = select(&KernelChoice::default(), &needs)?;
//! println!("decode runs on {}", kernels.decode.name);
//! let choice = KernelChoice { decode: "cpu.reference".into(), ..Default::default() };
//! assert_eq!(select(&choice, &needs)?.decode.name, "cpu.reference");
//! # Ok::<(), attention_kernels::SelectError>(())
//! ```

mod args;
mod cpu;
mod registry;
mod select;

pub use args::{
    AttentionArgs, AttentionBatch, BlockCopyArgs, CacheWriteArgs, KernelError, KvCache, KvShape, LinearArgs, PARTITION,
};
pub use inventory;
pub use registry::{Capabilities, Kernel, Operation, Variant, variants};
pub use select::{KernelChoice, KernelSet, Needs, SelectError, describe, select};
