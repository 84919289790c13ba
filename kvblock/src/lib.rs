//! Block manager for a paged KV cache.
//!
//! A paged KV cache is a pool of blocks of `block_size` token slots each. This crate decides which sequences own which
//! blocks. It provides reference-counted block tables, copy-on-write between forked sequences, and a prefix cache that
//! lets equal prompts share blocks (after PagedAttention, Kwon et al. 2023, arXiv:2309.06180).
//!
//! It manages blocks, not tensors: it stores no keys or values, performs no I/O, takes no locks, and does not depend on
//! any device. It emits an ordered list of memory operations ([`MemOp`]), which the owner of the memory applies.
//!
//! # Invariants
//! - Every block is free or referenced, never both. The reference counts sum to the occurrences in live tables.
//! - A block with more than one owner is never written. A sole owner writes in place.
//! - Only full blocks of committed tokens enter the prefix index, and a hit is verified by its tokens. So neither a
//!   hash collision nor a crafted prompt returns the cache of another prompt, salt, adapter or image ([`PrefixKey`]).
//! - Blocks that are not cached are reused before cached ones. Cached blocks are evicted least recently used first, and
//!   the end of a sequence before its beginning.
//! - A prefix that the pool evicts can stay in host memory. A host block is owned by a swapped sequence or free, never
//!   both, and only free ones are cached ([`PoolConfig::host_caching`]).
//! - With several groups of layers ([`CacheGroup`]) a hit serves all of them. A table entry behind a window is a hole.
//! - A block that a failed copy should have filled, and any block after it in a table, cannot enter the index
//!   ([`BlockPool::forget_contents`]).
//! - An operation that fails changes nothing. A table of another pool is rejected. A table that is dropped instead of
//!   released is reported ([`Leak`]), and its blocks are freed.
//! - [`Gauges`] sum to the size of the pool. [`BlockPool::audit`] checks all of this against the live tables.
//!
//! The default pool, with one full group and no host blocks, needs only [`admit`](BlockPool::admit),
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
//! let mut first = pool.admit(prompt).open(0)?; // nothing is cached, so the table is empty
//! pool.append(&mut first, &tokens)?;
//! assert_eq!(first.slots(0..6).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
//! pool.commit(&mut first, 6)?; // the model has computed these six tokens
//!
//! // An equal prompt shares the full block.
//! let second = pool.admit(prompt).open(0)?;
//! assert_eq!((second.committed(), second.blocks()[0]), (4, first.blocks()[0]));
//!
//! // A fork shares all blocks until one of the two tables writes.
//! let mut fork = pool.fork(&first)?;
//! pool.append(&mut fork, &[7])?;
//! let (src, dst) = (first.blocks()[1], fork.blocks()[1]);
//! let mut copied = false;
//! for op in pool.drain_memory_ops() {
//!     // The owner of the memory applies every operation here.
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
mod host_cache;
mod host_copies;
mod host_pool;
mod ids;
mod key;
mod leak;
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
pub use host_copies::HostCopy;
pub use ids::{BlockId, HostBlockId, PrefixHash, Tier};
pub use key::PrefixKey;
pub use leak::Leak;
pub use pool::{BlockPool, MemOp};
pub use prompt::{Media, Prompt, PromptHashes};
pub use stats::{Counters, Gauges, HostGauges, MissReason, PrefixStats};
pub use swap::Swapped;
pub use table::BlockTable;

/// Compiles and runs the example in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
