//! Who owns which block: the memory manager of a paged KV cache, without the memory.
//!
//! A paged KV cache is a pool of blocks of `block_size` token slots each. This crate decides which sequence
//! owns which blocks: reference-counted block tables, copy-on-write between forked sequences, and a prefix
//! cache that lets equal prompts share blocks (after PagedAttention, Kwon et al. 2023, arXiv:2309.06180).
//!
//! It is not a cache of tensors: it holds no keys or values, does no I/O, takes no locks, and knows of no
//! device. What the memory must undergo comes out as an ordered list of [`MemOp`]; who holds the memory
//! applies it.
//!
//! # What is always true
//! - Every block is free or referenced, never both; the reference counts sum to the occurrences in live tables.
//! - A block with more than one owner is never written; a sole owner writes in place.
//! - Only full blocks of committed tokens can be found by prefix, and a hit is verified by its tokens, so
//!   neither a hash collision nor a crafted prompt returns another prompt's cache. Nor does another salt's,
//!   adapter's or image's ([`PrefixKey`]).
//! - Blocks without a hash are reused before cached ones; those go least recently used first, the tail of a
//!   chain before its head.
//! - With several groups of layers ([`CacheGroup`]) a hit serves all of them; an entry behind a window is a hole.
//! - What a failed copy should have filled, and what follows it in a table, cannot enter the index
//!   ([`BlockPool::forget_contents`]).
//! - An operation that fails changes nothing. A table of another pool is refused, and a table that is dropped
//!   instead of released is named ([`Leak`]) and its blocks come back.
//! - [`Gauges`] sum to the pool, and [`BlockPool::audit`] rebuilds all of this from the live tables.
//!
//! A pool with one full group and no host blocks, the default, needs only [`admit`](BlockPool::admit),
//! [`append`](BlockPool::append), [`commit`](BlockPool::commit), [`fork`](BlockPool::fork),
//! [`truncate`](BlockPool::truncate) and [`release`](BlockPool::release).
//!
//! ```
//! use kvblock::{BlockPool, MemOp, PoolConfig, Prompt};
//!
//! let mut pool = BlockPool::new(PoolConfig::new(8, 4))?;
//! let tokens = [1, 2, 3, 4, 5, 6];
//! let prompt = Prompt::new(&tokens);
//!
//! let mut first = pool.admit(prompt).open(0)?; // nothing is cached: an empty table
//! pool.append(&mut first, &tokens)?;
//! assert_eq!(first.slots(0..6).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
//! pool.commit(&mut first, 6)?; // the model has computed these six
//!
//! // An equal prompt begins with the block that is full.
//! let second = pool.admit(prompt).open(0)?;
//! assert_eq!((second.committed(), second.blocks()[0]), (4, first.blocks()[0]));
//!
//! // A fork shares everything, until one of the two writes.
//! let mut fork = pool.fork(&first)?;
//! pool.append(&mut fork, &[7])?;
//! let (src, dst) = (first.blocks()[1], fork.blocks()[1]);
//! let mut copied = false;
//! for op in pool.drain_memory_ops() {
//!     // Whoever holds the memory applies every one of them here.
//!     copied |= op == MemOp::Copy { src, dst };
//! }
//! assert!(copied);
//!
//! for table in [first, second, fork] {
//!     pool.release(table);
//! }
//! assert_eq!(pool.gauges().in_use, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod admit;
mod audit;
mod config;
mod error;
mod events;
mod free_list;
mod group_table;
mod hash;
mod host_pool;
mod ids;
mod key;
mod leak;
mod pin;
mod pool;
mod prefix;
mod prompt;
mod sequence;
mod stats;
mod swap;
mod table;

pub use admit::{Admission, Lookup};
pub use config::{CacheGroup, PoolConfig};
pub use error::{AuditError, NoSpace, PoolError, TableError};
pub use events::BlockEvent;
pub use group_table::GroupTable;
pub use ids::{BlockId, HostBlockId, PrefixHash};
pub use key::PrefixKey;
pub use leak::Leak;
pub use pin::PinnedPrefix;
pub use pool::{BlockPool, MemOp};
pub use prompt::{Media, Prompt, PromptHashes};
pub use stats::{Counters, Gauges, HostGauges, MissReason, PrefixStats};
pub use swap::Swapped;
pub use table::BlockTable;

/// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
