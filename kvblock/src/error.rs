//! Errors: too few free blocks, a misused table, an invalid configuration, inconsistent metadata.
//!
//! Each message is one line: what, found, expected, what to do.

use std::error::Error;
use std::fmt::{Display, Formatter, Result};

use crate::{BlockId, HostBlockId};

/// Greatest number of tokens per block. The number of slots of the largest pool then fits 64 bits.
pub(crate) const MOST_TOKENS_PER_BLOCK: usize = 1 << 20;

/// An operation needs more blocks than are free. It changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSpace {
    /// Number of blocks the operation needs.
    pub wanted: usize,
    /// Number of blocks on the free list, cached ones included.
    pub free: usize,
}

/// Why an operation on a table failed. It changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TableError {
    /// Too few blocks of the pool are free.
    NoSpace(NoSpace),
    /// Too few host blocks are free.
    NoHostSpace(NoSpace),
    /// Another pool opened the table.
    ForeignTable,
    /// The table has tokens that are not committed. A fork would write them to shared blocks.
    Uncommitted {
        /// Number of committed tokens.
        committed: usize,
        /// Number of tokens in the table.
        len: usize,
    },
    /// A commit or a truncation to more tokens than the table has.
    BeyondEnd {
        /// Number of tokens in the call.
        wanted: usize,
        /// Greatest allowed number.
        len: usize,
    },
    /// The pool, or its host tier, has no block with this id.
    NoSuchBlock {
        /// The id.
        id: u32,
        /// Number of blocks; ids start at 0.
        blocks: usize,
    },
    /// A part of the window that a sequence of this length reads has been freed.
    BehindWindow {
        /// The requested length.
        len: usize,
        /// The sliding group that lacks blocks for it.
        group: usize,
    },
}

/// Why a [`PoolConfig`](crate::PoolConfig) is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolError {
    /// The number of blocks is zero or does not fit a block id.
    NumBlocks {
        /// The configured value.
        found: usize,
    },
    /// The number of host blocks does not fit a block id.
    HostBlocks {
        /// The configured value.
        found: usize,
    },
    /// The number of tokens per block is not a power of two, or is too great.
    BlockSize {
        /// The configured value.
        found: usize,
    },
    /// The number of hash bits is not between 1 and 128.
    HashBits {
        /// The configured value.
        found: u32,
    },
    /// There is no cache group, or more than 256.
    Groups {
        /// The configured value.
        found: usize,
    },
    /// A sliding group has a window of 0.
    Window {
        /// Index of the group.
        group: usize,
    },
}

/// An inconsistency between the pool's metadata and the live tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditError {
    /// A table of another pool is among the live tables.
    ForeignTable,
    /// A reference count differs from the block's occurrences in live tables.
    References {
        /// The block.
        block: BlockId,
        /// The pool's reference count.
        counted: u32,
        /// Number of occurrences in live tables.
        found: u32,
    },
    /// A block is both free and referenced, or neither, or twice on the free list.
    FreeList {
        /// The block.
        block: BlockId,
        /// Number of occurrences on the free list.
        count: u32,
        /// The reference count.
        references: u32,
    },
    /// A block that is not cached comes after a cached one on the free list, so the cached one would be evicted first.
    EvictionOrder {
        /// The block.
        block: BlockId,
    },
    /// The gauges do not sum to the total.
    Gauges {
        /// Sum of the gauges.
        found: usize,
        /// Number of blocks in the pool.
        total: usize,
    },
    /// The host blocks in use differ from those of swapped sequences, or one has two owners.
    Host {
        /// Number of host blocks in use.
        counted: usize,
        /// Number of distinct host blocks of swapped sequences.
        found: usize,
    },
    /// A cached host block is in the wrong place.
    HostCache {
        /// The block.
        block: HostBlockId,
        /// What is wrong.
        what: &'static str,
    },
    /// An entry of the prefix index differs from the block or its table.
    Prefix {
        /// The block.
        block: BlockId,
        /// The difference.
        what: &'static str,
    },
    /// A table's number of blocks does not match its length.
    TableLength {
        /// Number of tokens in the table.
        len: usize,
        /// Number of entries of one of its groups, holes included.
        blocks: usize,
        /// Number of tokens per block.
        block_size: usize,
    },
}

impl Display for NoSpace {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let NoSpace { wanted, free } = self;
        write!(f, "too few free blocks: found {free}, expected at least {wanted}; release a table first")
    }
}

impl Display for TableError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            TableError::NoSpace(no_space) => no_space.fmt(f),
            TableError::NoHostSpace(NoSpace { wanted, free }) => {
                write!(
                    f,
                    "too few free host blocks: found {free}, expected at least {wanted}; swap a sequence in or discard one"
                )
            }
            TableError::ForeignTable => f.write_str("the table belongs to another pool; use the pool that opened it"),
            TableError::Uncommitted { committed, len } => {
                write!(
                    f,
                    "found {committed} committed tokens, expected all {len}; commit or truncate the table before forking"
                )
            }
            TableError::BeyondEnd { wanted, len } => {
                write!(f, "found {wanted} tokens, expected at most {len}; append or commit them first")
            }
            TableError::NoSuchBlock { id, blocks } => {
                write!(
                    f,
                    "block {id} does not exist; expected an id below {blocks}, the number of blocks; use an id of this pool"
                )
            }
            TableError::BehindWindow { len, group } => {
                write!(
                    f,
                    "length {len}: blocks of its window in group {group} have been freed; open the sequence again"
                )
            }
        }
    }
}

impl Display for PoolError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            PoolError::NumBlocks { found } => write!(f, "num_blocks: found {found}, expected 1 to {}", u32::MAX - 2),
            PoolError::HostBlocks { found } => write!(f, "host_blocks: found {found}, expected 0 to {}", u32::MAX - 2),
            PoolError::BlockSize { found } => {
                write!(f, "block_size: found {found} tokens, expected a power of two up to {MOST_TOKENS_PER_BLOCK}")
            }
            PoolError::HashBits { found } => write!(f, "hash_bits: found {found}, expected 1 to 128"),
            PoolError::Groups { found } => write!(f, "groups: found {found}, expected 1 to 256"),
            PoolError::Window { group } => {
                write!(f, "groups: found a window of 0 in group {group}, expected at least 1 position")
            }
        }
    }
}

impl Display for AuditError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            AuditError::ForeignTable => {
                f.write_str("a table of another pool is among the live tables; audit each pool with its own tables")
            }
            AuditError::References { block, counted, found } => {
                write!(f, "{block}: the reference count is {counted}, but live tables contain it {found} times")
            }
            AuditError::FreeList { block, count, references } => {
                write!(f, "{block}: it is on the free list {count} times and has {references} references")
            }
            AuditError::EvictionOrder { block } => {
                write!(f, "{block}: it is not cached, but comes after a cached block on the free list")
            }
            AuditError::Gauges { found, total } => {
                write!(f, "the gauges sum to {found} blocks, but the pool has {total}")
            }
            AuditError::Host { counted, found } => {
                write!(f, "{counted} host blocks are in use, but swapped sequences own {found}")
            }
            AuditError::HostCache { block, what } => write!(f, "{block}: {what}"),
            AuditError::Prefix { block, what } => write!(f, "{block}: wrong entry in the prefix index: {what}"),
            AuditError::TableLength { len, blocks, block_size } => {
                write!(f, "a table of {len} tokens has {blocks} blocks of {block_size} tokens")
            }
        }
    }
}

impl Error for NoSpace {}
impl Error for TableError {}
impl Error for PoolError {}
impl Error for AuditError {}

impl From<NoSpace> for TableError {
    fn from(no_space: NoSpace) -> TableError {
        TableError::NoSpace(no_space)
    }
}
