//! What a caller reports: plain values.

use std::num::NonZeroU64;
use std::sync::Arc;

/// Hash of a prefix that ends with a full block, as it appears on the wire. Never 0, which consumers take for "no parent".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(NonZeroU64);

impl BlockHash {
    /// Keeps the low 64 bits of a longer hash, as vLLM does; 0 becomes 1.
    pub fn new(hash: u128) -> BlockHash {
        BlockHash(NonZeroU64::new(hash as u64).unwrap_or(NonZeroU64::MIN))
    }

    /// The number on the wire.
    pub fn get(self) -> u64 {
        self.0.get()
    }
}

/// The memory that holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Medium {
    /// The tier the model reads, even on a CPU; consumers treat this name as the fastest tier.
    Gpu,
    /// Host memory behind the working tier.
    Cpu,
}

impl Medium {
    /// The name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Medium::Gpu => "GPU",
            Medium::Cpu => "CPU",
        }
    }
}

/// A change of the set of cached prefixes: what a caller reports, and the events that subscribers get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Consecutive full blocks of one sequence are cached from now on.
    Stored {
        /// Where they are.
        medium: Medium,
        /// Hash of the prefix before the first block; `None` at the start of a sequence.
        parent: Option<BlockHash>,
        /// One hash per block, in order.
        hashes: Vec<BlockHash>,
        /// Their tokens: the block size for each hash. A caller leaves them out if another medium holds the blocks, which it
        /// reported before; events always have them.
        token_ids: Vec<u32>,
        /// Name of the adapter that the sequence uses.
        lora_name: Option<Arc<str>>,
        /// The request's cache salt.
        cache_salt: Option<Arc<str>>,
    },
    /// A prefix is no longer cached.
    Removed {
        /// Where it was.
        medium: Medium,
        /// Its hash.
        hash: BlockHash,
    },
    /// No prefix is cached any more.
    Cleared,
}

/// What the reported blocks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of tokens per block.
    pub block_size: usize,
    /// The layers that read the blocks; `None`: all layers attend to the full context.
    pub group: Option<SpecKind>,
}

impl Layout {
    /// Creates the layout of a model whose layers attend to the full context.
    pub fn new(block_size: usize) -> Layout {
        Layout { block_size, group: None }
    }
}

/// The layers that read the blocks, for models whose layers do not all attend to the full context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecKind {
    /// Full attention; other layers of the model keep less.
    Full {
        /// Index of the cache group.
        group: usize,
    },
    /// Sliding window attention.
    Sliding {
        /// Index of the cache group.
        group: usize,
        /// Number of positions that a query reads.
        window: usize,
    },
}
