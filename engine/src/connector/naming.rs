//! Names of blocks: equal on two replicas if and only if the blocks have equal bytes.

use std::fmt;

use sha2::{Digest, Sha256};

/// The name of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockName {
    /// SHA-256 of everything that the bytes of the block depend on.
    pub digest: [u8; 32],
    /// Its index in the prompt, which the digest covers too: without the blocks before it, it is useless.
    pub block: usize,
}

/// Formats the name in hexadecimal digits.
impl fmt::Display for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.digest.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The names of a replica's blocks.
#[derive(Clone)]
pub(crate) struct Naming {
    /// Digest of the model, of how it computes, and of the layout of a block.
    replica: [u8; 32],
    block_size: usize,
}

/// Digests of the prefixes that end with each full block of a prompt.
pub(crate) struct Chain(Vec<[u8; 32]>);

impl Naming {
    pub fn new(replica: [u8; 32], block_size: usize) -> Naming {
        Naming { replica, block_size }
    }

    /// The chain of a prompt under a cache salt and the digest of an adapter.
    pub fn chain(&self, tokens: &[u32], salt: Option<&str>, adapter: Option<&str>) -> Chain {
        let mut root = Sha256::new();
        root.update(self.replica);
        for text in [salt, adapter] {
            // The length keeps a salt from being taken for an adapter.
            root.update(text.map_or(u64::MAX, |text| text.len() as u64).to_le_bytes());
            root.update(text.unwrap_or_default());
        }
        let mut parent: [u8; 32] = root.finalize().into();
        let blocks = tokens.chunks_exact(self.block_size).map(|tokens| {
            let mut digest = Sha256::new();
            digest.update(parent);
            tokens.iter().for_each(|token| digest.update(token.to_le_bytes()));
            parent = digest.finalize().into();
            parent
        });
        Chain(blocks.collect())
    }
}

impl Chain {
    /// Number of full blocks.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The name of a block of a cache group; `None` if the prompt has no such block.
    pub fn name(&self, block: usize, group: usize) -> Option<BlockName> {
        let mut digest = Sha256::new();
        digest.update(self.0.get(block)?);
        digest.update((group as u64).to_le_bytes());
        Some(BlockName { digest: digest.finalize().into(), block })
    }
}
