//! Ids of blocks and hashes of prefixes.

/// Id of a block of the pool. A newtype, so that it cannot be confused with a slot or a position in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BlockId(pub u32);

impl BlockId {
    /// Returns the id as an index into arrays with one element per block.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl std::fmt::Display for BlockId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "block {}", self.0)
    }
}

/// Id of a block of host memory. A newtype, so that it cannot be confused with a block of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct HostBlockId(pub u32);

impl HostBlockId {
    /// Returns the id as an index into arrays with one element per host block.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl std::fmt::Display for HostBlockId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "host block {}", self.0)
    }
}

/// An id of a block of one tier.
pub(crate) trait Id: Copy {
    fn new(id: u32) -> Self;
    fn index(self) -> usize;
}

impl Id for BlockId {
    fn new(id: u32) -> BlockId {
        BlockId(id)
    }

    fn index(self) -> usize {
        self.index()
    }
}

impl Id for HostBlockId {
    fn new(id: u32) -> HostBlockId {
        HostBlockId(id)
    }

    fn index(self) -> usize {
        self.index()
    }
}

/// Memory that holds blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Blocks of the pool, which steps read and write.
    Device,
    /// Blocks of host memory.
    Host,
}

/// A block of either tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Device(BlockId),
    Host(HostBlockId),
}

impl Place {
    pub fn tier(self) -> Tier {
        match self {
            Place::Device(_) => Tier::Device,
            Place::Host(_) => Tier::Host,
        }
    }
}

/// Hash of a prefix that ends with a full block. Pools with equal seeds compute equal hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PrefixHash(pub u128);
