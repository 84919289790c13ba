//! Errors as values: too few blocks, a misused table, an invalid configuration, inconsistent books.
//!
//! Each displays as one line: what, found, expected, what to do.

use std::error::Error;
use std::fmt::{Display, Formatter, Result};

use crate::BlockId;

/// An operation needed more blocks than are free; it changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSpace {
    /// Blocks the operation would have taken off the free list.
    pub wanted: usize,
    /// Blocks on the free list, those that still hold a cached prefix included.
    pub free: usize,
}

/// Why an operation on a table was refused; nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TableError {
    /// More blocks of the pool are needed than are free.
    NoSpace(NoSpace),
    /// More host blocks are needed than are free.
    NoHostSpace(NoSpace),
    /// The table was opened by another pool.
    ForeignTable,
    /// The table has tokens that are not committed. A fork would write them to shared blocks.
    Uncommitted {
        /// Committed tokens of the table.
        committed: usize,
        /// Tokens of the table.
        len: usize,
    },
    /// A commit or a truncation names more tokens than the table has, or a pin more than are committed.
    BeyondEnd {
        /// Number of tokens that the call names.
        wanted: usize,
        /// Number of tokens that it may name at most.
        len: usize,
    },
    /// The pool, or its host tier, has no block of this id.
    NoSuchBlock {
        /// The id.
        id: u32,
        /// Number of blocks that exist; ids start at 0.
        blocks: usize,
    },
    /// A part of the window that a sequence of this length reads has been given back.
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
        /// What the configuration says.
        found: usize,
    },
    /// The number of host blocks does not fit a block id.
    HostBlocks {
        /// What the configuration says.
        found: usize,
    },
    /// The tokens per block are not a power of two.
    BlockSize {
        /// What the configuration says.
        found: usize,
    },
    /// The number of hash bits is not between 1 and 128.
    HashBits {
        /// What the configuration says.
        found: u32,
    },
    /// There is no group of layers, or more than an entry of the prefix index can name.
    Groups {
        /// What the configuration says.
        found: usize,
    },
    /// A sliding group sees nothing.
    Window {
        /// Its index.
        group: usize,
    },
}

/// What an audit found: the pool's books do not agree with the live tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditError {
    /// A table of another pool was among the live ones.
    ForeignTable,
    /// A reference count differs from the block's occurrences in live tables.
    References {
        /// The block.
        block: BlockId,
        /// What the pool believes.
        counted: u32,
        /// What the tables say.
        found: u32,
    },
    /// A block is both free and referenced, or neither, or twice on the free list.
    FreeList {
        /// The block.
        block: BlockId,
        /// Occurrences on the free list.
        count: u32,
        /// References on the books.
        references: u32,
    },
    /// A block without a hash lies behind a cached one, so that a cached prefix would be evicted before it.
    EvictionOrder {
        /// The block.
        block: BlockId,
    },
    /// The gauges do not sum to the total.
    Gauges {
        /// Sum of the three gauges.
        found: usize,
        /// Blocks in the pool.
        total: usize,
    },
    /// Host blocks in use and in swapped sequences differ, or one is owned twice.
    Host {
        /// Host blocks in use by the books.
        counted: usize,
        /// Distinct host blocks of swapped sequences.
        found: usize,
    },
    /// An entry of the prefix index is not what the block or its table says.
    Prefix {
        /// The block.
        block: BlockId,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A table's blocks do not fit its length.
    TableLength {
        /// Tokens in the table.
        len: usize,
        /// Entries of one of its groups, holes included.
        blocks: usize,
        /// Tokens per block.
        block_size: usize,
    },
}

impl Display for NoSpace {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let NoSpace { wanted, free } = self;
        write!(f, "{wanted} blocks wanted, {free} can be had; free a sequence first")
    }
}

impl Display for TableError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            TableError::NoSpace(no_space) => no_space.fmt(f),
            TableError::NoHostSpace(NoSpace { wanted, free }) => {
                write!(f, "{wanted} host blocks wanted, {free} are free; swap a sequence in, or drop one instead")
            }
            TableError::ForeignTable => {
                f.write_str("the table belongs to another pool than the one called; use the pool that opened it")
            }
            TableError::Uncommitted { committed, len } => {
                write!(f, "{committed} of {len} tokens are committed; commit or truncate before forking")
            }
            TableError::BeyondEnd { wanted, len } => {
                write!(f, "{wanted} tokens: expected at most {len}; append or commit them first")
            }
            TableError::NoSuchBlock { id, blocks } => {
                write!(
                    f,
                    "block {id} does not exist: found {blocks} blocks, expected an id below that; use an id of this pool"
                )
            }
            TableError::BehindWindow { len, group } => {
                write!(
                    f,
                    "length {len}: blocks that its window needs in group {group} have been given back; open the sequence anew"
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
            PoolError::BlockSize { found } => write!(f, "block_size: found {found} tokens, expected a power of two"),
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
                f.write_str("a table of another pool is among the live ones; audit each pool with its own")
            }
            AuditError::References { block, counted, found } => {
                write!(f, "{block}: {counted} references on the books, {found} in live tables")
            }
            AuditError::FreeList { block, count, references } => {
                write!(f, "{block}: {count} times on the free list with {references} references")
            }
            AuditError::EvictionOrder { block } => {
                write!(f, "{block}: free without a hash, but behind a cached block on the free list")
            }
            AuditError::Gauges { found, total } => write!(f, "gauges: {found} blocks counted, the pool has {total}"),
            AuditError::Host { counted, found } => {
                write!(f, "host: {counted} blocks in use on the books, {found} in swapped sequences")
            }
            AuditError::Prefix { block, what } => write!(f, "{block}: prefix index entry is wrong: {what}"),
            AuditError::TableLength { len, blocks, block_size } => {
                write!(f, "a table of {len} tokens has {blocks} blocks of {block_size}")
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
