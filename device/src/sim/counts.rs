//! What launches do, counted.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::sync::Mutex;

use simd::lock;

/// Bytes of a sector.
pub const SECTOR: u64 = 32;

/// Makes the structure and its addition from one list of fields.
macro_rules! counts {
    ($($(#[$what:meta])* $field:ident,)*) => {
        /// What a launch did, or several: `quire_sim_counts` of the C interface.
        ///
        /// A request is one load, store or atomic operation of the lanes of a warp that execute it together. The copy engine makes one for
        /// each row of a box. Parameters, constants and local memory are not counted.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(C)]
        pub struct Counts {
            $($(#[$what])* pub $field: u64,)*
        }

        impl AddAssign for Counts {
            fn add_assign(&mut self, other: Counts) {
                $(self.$field += other.$field;)*
            }
        }
    };
}

counts! {
    /// Blocks of the grid.
    blocks,
    /// Blocks that wrote to global memory.
    busy_blocks,
    /// Bytes that all lanes read from global memory.
    read_bytes,
    /// Bytes that all lanes wrote to global memory.
    written_bytes,
    /// Bytes of global memory that were read, each counted once.
    distinct_read_bytes,
    /// Bytes of global memory that were written, each counted once.
    distinct_written_bytes,
    /// Requests to global memory.
    requests,
    /// Sectors of 32 bytes that the requests touch.
    sectors,
    /// Sectors that were read and sectors that were written, each counted once.
    distinct_sectors,
    /// Bytes of the sectors that some lane of their request accesses. The rest of the sectors moves in vain.
    wanted_bytes,
    /// Requests to shared memory.
    shared_requests,
    /// Passes over the 32 banks of shared memory that the requests take.
    shared_passes,
    /// Passes beyond the number that the width of the requests needs.
    bank_conflicts,
    /// Barriers that opened: of blocks, named ones, and of warps.
    barriers,
    /// Products of a warp (mma).
    products,
    /// Products of a warpgroup (wgmma).
    warpgroup_products,
    /// Multiplications with an addition in all products.
    multiply_adds,
    /// Exponentials that lanes compute with `exp2_approx`. Calls of `exp2f` and `expf` are not counted.
    exponentials,
}

/// The launches of a device, counted by kernel; see [`Options::counts`](crate::Options::counts).
#[derive(Debug, Default)]
pub struct Tally(Mutex<BTreeMap<String, (u64, Counts)>>);

impl Tally {
    pub(super) fn add(&self, kernel: &str, counts: Counts) {
        let mut kernels = lock(&self.0);
        // A launch in the steady state finds its kernel, and allocates nothing.
        if let Some((launches, sum)) = kernels.get_mut(kernel) {
            *launches += 1;
            *sum += counts;
        } else {
            kernels.insert(kernel.to_owned(), (1, counts));
        }
    }

    /// Returns the number of launches and the sum of their counts for each kernel, and starts again from nothing.
    pub fn take(&self) -> BTreeMap<String, (u64, Counts)> {
        std::mem::take(&mut *lock(&self.0))
    }
}
