//! Names of blocks and of prefixes.

/// A block of the pool. A newtype, so that a block is not taken for a slot or for a position in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BlockId(pub u32);

impl BlockId {
    /// The id as an index into arrays with one element per block.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl std::fmt::Display for BlockId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "block {}", self.0)
    }
}

/// Id of a block of host memory. A type of its own, so that it cannot be confused with a block of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct HostBlockId(pub u32);

impl HostBlockId {
    /// The id as an index into arrays with one element per host block.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl std::fmt::Display for HostBlockId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "host block {}", self.0)
    }
}

/// The name of a prefix that ends with a full block, as block events carry it. Pools of one seed name alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PrefixHash(pub u128);
