//! Predicted times of launches: a roofline model of what the simulator counted.
//!
//! The time of a launch is its launch cost plus the longest of the times that the resources of a card need for it:
//!
//! | bound | time |
//! |---|---|
//! | [`Bound::Memory`] | distinct sectors, and of the repeats the share that the L2 cache does not hold, at the bandwidth of memory |
//! | [`Bound::L2`] | all sectors at the bandwidth of the L2 cache |
//! | [`Bound::Load`] | the sectors of the busiest multiprocessor at its share of the way to the L2 cache |
//! | [`Bound::Shared`] | the passes of the busiest multiprocessor over its shared memory, one of 128 bytes per clock |
//! | [`Bound::Tensor`] | the products of the busiest multiprocessor at the peak of its instruction |
//! | [`Bound::Exponential`] | the exponentials of the busiest multiprocessor, 16 per clock |
//! | [`Bound::Blocks`] | all blocks, busy or not, at the rate at which a card starts blocks |
//!
//! Busy blocks count as equally long and evenly spread, so the busiest multiprocessor has `ceil(blocks / multiprocessors)` of them.
//! How many of them are resident at once does not matter here: they share what the multiprocessor has.
//!
//! The L2 cache holds a share of the repeats: its size over the distinct bytes of a launch. That is too little where blocks that run
//! at the same time read the same bytes, as the query heads of a KV head do; then [`Bound::Memory`] is too long, and the part of
//! [`Bound::L2`] is the better figure.
//!
//! The longest time alone counts as if the other resources worked beside it. In attention that is true of products and exponentials only
//! if some warps compute weights while others multiply, which ping-pong arranges (`prefill_sm90`) and several blocks of a multiprocessor
//! do by chance. Where nothing overlaps, the two times add up.
//!
//! What the simulator does not count takes no time: instructions other than products and `exp2_approx`, the latency of memory and of
//! barriers, the accesses of boxes and of wgmma to shared memory. So a GPU may well take longer. The model compares kernels and shows what limits
//! them; only a run on a GPU confirms or refutes it.

use super::Counts;
use super::card::{Card, EXPONENTIALS_PER_CLOCK, assumption};

/// Bytes of a sector.
pub const SECTOR: u64 = 32;

/// Multiplications with an addition in a product of a warp, m16n8k16.
const OF_WARP: u64 = 16 * 8 * 16;

/// What limits a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Starting it.
    Launch,
    /// Starting its blocks.
    Blocks,
    /// Memory.
    Memory,
    /// The L2 cache.
    L2,
    /// The way from the L2 cache to the busiest multiprocessor.
    Load,
    /// Shared memory.
    Shared,
    /// Tensor cores.
    Tensor,
    /// The units that compute exponentials.
    Exponential,
}

impl Bound {
    /// Returns the name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Bound::Launch => "launch",
            Bound::Blocks => "blocks",
            Bound::Memory => "memory",
            Bound::L2 => "l2",
            Bound::Load => "load",
            Bound::Shared => "shared",
            Bound::Tensor => "tensor",
            Bound::Exponential => "exponential",
        }
    }
}

/// The predicted time of the launches of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Number of launches.
    pub launches: u64,
    /// Seconds that each resource needs for all launches.
    pub parts: [(Bound, f64); 7],
}

impl Prediction {
    /// Returns the greatest of the parts.
    fn longest(&self) -> (Bound, f64) {
        self.parts.into_iter().fold((Bound::Launch, 0.0), |most, part| if part.1 > most.1 { part } else { most })
    }

    fn seconds_with(&self, launch: f64) -> f64 {
        self.launches as f64 * launch + self.longest().1
    }

    /// Returns the seconds in a graph.
    pub fn seconds(&self) -> f64 {
        self.seconds_with(assumption::GRAPH_LAUNCH)
    }

    /// Returns the seconds if the launches are enqueued one by one.
    pub fn eager_seconds(&self) -> f64 {
        self.seconds_with(assumption::EAGER_LAUNCH)
    }

    /// Returns what takes most of the time in a graph.
    pub fn bound(&self) -> Bound {
        let (bound, seconds) = self.longest();
        if seconds > self.launches as f64 * assumption::GRAPH_LAUNCH { bound } else { Bound::Launch }
    }
}

impl Card {
    /// Predicts the time of the launches of a kernel from the sum of their counts, as if all launches were alike.
    ///
    /// ```
    /// use device::sim::{Bound, Card, Counts};
    /// let card = Card::find("H200")?;
    /// let counts = Counts { blocks: 1320, busy_blocks: 1320, sectors: 1 << 25, distinct_sectors: 1 << 25, ..Counts::default() };
    /// let prediction = card.predict(1, &counts);
    /// // A GiB at 90 % of 4.8 TB/s.
    /// assert_eq!((prediction.bound(), (prediction.seconds() * 1e6).round()), (Bound::Memory, 250.0));
    /// # Ok::<(), device::sim::UnknownCard>(())
    /// ```
    pub fn predict(&self, launches: u64, counts: &Counts) -> Prediction {
        let sms = f64::from(self.multiprocessors);
        // The work of the busiest multiprocessor over that of the mean one.
        let busy = counts.busy_blocks as f64 / launches.max(1) as f64;
        let uneven = if busy > 0.0 { (busy / sms).ceil() * sms / busy } else { 1.0 };
        let bytes = |sectors: u64| (sectors * SECTOR) as f64;
        let distinct = bytes(counts.distinct_sectors);
        let footprint = distinct / launches.max(1) as f64;
        let missed = if footprint > 0.0 { 1.0 - (self.l2_bytes as f64 / footprint).min(1.0) } else { 0.0 };
        let repeats = bytes(counts.sectors.saturating_sub(counts.distinct_sectors));
        let of_warps = counts.multiply_adds.min(counts.products * OF_WARP);
        let of_warpgroups = counts.multiply_adds - of_warps;
        let tensor = 2.0 * of_warps as f64 / self.mma + 2.0 * of_warpgroups as f64 / self.wgmma.unwrap_or(self.mma);
        let shared = counts.shared_passes as f64 / (sms * self.clock);
        let exponential = counts.exponentials as f64 / (EXPONENTIALS_PER_CLOCK * sms * self.clock);
        Prediction {
            launches,
            parts: [
                (Bound::Blocks, counts.blocks as f64 / (assumption::BLOCKS_PER_CLOCK * self.clock)),
                (Bound::Memory, (distinct + missed * repeats) / (assumption::MEMORY_SHARE * self.memory)),
                (Bound::L2, bytes(counts.sectors) / (assumption::L2_SHARE * self.l2_bytes_per_clock * self.clock)),
                (Bound::Load, uneven * bytes(counts.sectors) / (assumption::L2_BYTES_PER_SM * sms * self.clock)),
                (Bound::Shared, uneven * shared),
                (Bound::Tensor, uneven * tensor),
                (Bound::Exponential, uneven * exponential),
            ],
        }
    }

    /// Returns the shortest time of work with these bytes and operations: the roofline of the card, with the share of the
    /// bandwidth that a kernel reaches. `tensor`: its numbers have a type that tensor cores multiply.
    ///
    /// ```
    /// use device::sim::Card;
    /// let card = Card::find("A100")?;
    /// assert_eq!(card.least_seconds(0, 312_000_000_000, true), 1e-3);
    /// assert_eq!(card.least_seconds(0, 19_500_000_000, false), 1e-3);
    /// # Ok::<(), device::sim::UnknownCard>(())
    /// ```
    pub fn least_seconds(&self, bytes: u64, operations: u64, tensor: bool) -> f64 {
        let peak = if tensor { self.wgmma.unwrap_or(self.mma) } else { self.f32 };
        (bytes as f64 / (assumption::MEMORY_SHARE * self.memory)).max(operations as f64 / peak)
    }
}
