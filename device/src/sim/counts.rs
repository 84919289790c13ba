//! What a launch does, counted.

/// What a launch did: `quire_sim_counts` of the C interface.
///
/// A request is one load, store or atomic operation of the lanes of a warp that execute it together. The copy engine makes one for
/// each row of a box. Parameters, constants and local memory are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counts {
    /// Blocks of the grid.
    pub blocks: u64,
    /// Blocks that wrote to global memory.
    pub busy_blocks: u64,
    /// Bytes that all lanes read from global memory.
    pub read_bytes: u64,
    /// Bytes that all lanes wrote to global memory.
    pub written_bytes: u64,
    /// Bytes of global memory that were read, each counted once.
    pub distinct_read_bytes: u64,
    /// Bytes of global memory that were written, each counted once.
    pub distinct_written_bytes: u64,
    /// Requests to global memory.
    pub requests: u64,
    /// Sectors of 32 bytes that the requests touch.
    pub sectors: u64,
    /// Requests to shared memory.
    pub shared_requests: u64,
    /// Passes over the 32 banks of shared memory beyond those that the width of the requests needs.
    pub bank_conflicts: u64,
    /// Barriers that opened: of blocks, named ones, and of warps.
    pub barriers: u64,
    /// Products of a warp (mma).
    pub products: u64,
    /// Products of a warpgroup (wgmma).
    pub warpgroup_products: u64,
    /// Multiplications with an addition in all products.
    pub multiply_adds: u64,
}
