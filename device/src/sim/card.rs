//! Cards whose times can be predicted, as data.
//!
//! Peaks are those of NVIDIA's data sheets, without sparsity:
//!
//! | card | source |
//! |---|---|
//! | H200 | H200 Tensor Core GPU data sheet, SXM; the chip is that of the H100 |
//! | H100 | H100 Tensor Core GPU data sheet, SXM; the H100 whitepaper (132 SMs, 50 MB of L2 cache, 1.83 GHz for tensor cores) |
//! | A100 | A100 80GB data sheet, SXM; the A100 whitepaper (108 SMs, 40 MB of L2 cache of 5120 bytes per clock, 1.41 GHz) |
//! | L40S | L40S data sheet; the Ada whitepaper (142 SMs, 96 MB of L2 cache, 2.52 GHz) |
//! | RTX 4090 | the Ada whitepaper, appendix A: the peak of bf16 is that of sums in f32 |
//!
//! Not published, and so assumptions: the bandwidth of L2 caches other than the A100's, the rate of `mma.sync` on Hopper, and
//! everything in [`assumption`].

use std::fmt;

/// Rates that NVIDIA does not publish, or that no kernel reaches.
pub mod assumption {
    /// Share of the published bandwidth of memory that a kernel which only reads reaches.
    pub const MEMORY_SHARE: f64 = 0.9;
    /// Share of the bandwidth of the L2 cache that such a kernel reaches. With it, the H100 and the A100 have 5.6 and 4.3 TB/s, about
    /// what microbenchmarks measure (<https://chipsandcheese.com/2023/07/02/nvidias-h100-funny-l2-and-tons-of-bandwidth/>).
    pub const L2_SHARE: f64 = 0.6;
    /// Share of the dense peak that `mma.sync` reaches on Hopper, whose whole rate only wgmma has: between 0.6 and 0.65 in
    /// microbenchmarks (Luo et al., "Benchmarking and Dissecting the NVIDIA Hopper GPU Architecture via Microbenchmarking", 2024).
    pub const HOPPER_MMA_SHARE: f64 = 0.62;
    /// Bytes per clock that a multiprocessor gets from the L2 cache.
    pub const L2_BYTES_PER_SM: f64 = 64.0;
    /// Blocks that a card starts per clock.
    pub const BLOCKS_PER_CLOCK: f64 = 1.0;
    /// Seconds from one launch of a graph to the next.
    pub const GRAPH_LAUNCH: f64 = 1e-6;
    /// Seconds from one launch of a stream to the next.
    pub const EAGER_LAUNCH: f64 = 3e-6;
}

/// Exponentials per clock of a multiprocessor of all these cards: the throughput of special functions for compute capability 8.0 to 9.0 in
/// the CUDA C++ Programming Guide.
pub(super) const EXPONENTIALS_PER_CLOCK: f64 = 16.0;

/// A GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Card {
    /// Name, as [`Card::find`] takes it.
    pub name: &'static str,
    /// Architecture of its code as `nvcc` names it: `sm_90a`.
    pub architecture: &'static str,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Clock in Hz that its tensor peak is stated for.
    pub clock: f64,
    /// Bytes per second of its memory.
    pub memory: f64,
    /// Bytes of its L2 cache.
    pub l2_bytes: u64,
    /// Bytes that its L2 cache gives per clock.
    pub l2_bytes_per_clock: f64,
    /// Operations per second in f32 outside of tensor cores.
    pub f32: f64,
    /// Operations per second of `mma.sync` in bf16 and f16.
    pub mma: f64,
    /// Operations per second of `wgmma` in bf16 and f16; `None` if it has no such instruction.
    pub wgmma: Option<f64>,
}

const H100: Card = Card {
    name: "H100",
    architecture: "sm_90a",
    multiprocessors: 132,
    clock: 1.83e9,
    memory: 3.35e12,
    l2_bytes: 50 << 20,
    l2_bytes_per_clock: 5120.0,
    f32: 67e12,
    mma: assumption::HOPPER_MMA_SHARE * 989.4e12,
    wgmma: Some(989.4e12),
};

impl Card {
    /// The known cards; the first is the default.
    pub const ALL: [Card; 5] = [
        Card { name: "H200", memory: 4.8e12, ..H100 },
        H100,
        Card {
            name: "A100",
            architecture: "sm_80",
            multiprocessors: 108,
            clock: 1.41e9,
            memory: 2.039e12,
            l2_bytes: 40 << 20,
            l2_bytes_per_clock: 5120.0,
            f32: 19.5e12,
            mma: 312e12,
            wgmma: None,
        },
        Card {
            name: "L40S",
            architecture: "sm_89",
            multiprocessors: 142,
            clock: 2.52e9,
            memory: 864e9,
            l2_bytes: 96 << 20,
            l2_bytes_per_clock: 3072.0,
            f32: 91.6e12,
            mma: 362.05e12,
            wgmma: None,
        },
        Card {
            name: "RTX 4090",
            architecture: "sm_89",
            multiprocessors: 128,
            clock: 2.52e9,
            memory: 1.008e12,
            l2_bytes: 72 << 20,
            l2_bytes_per_clock: 3072.0,
            f32: 82.6e12,
            mma: 165.2e12,
            wgmma: None,
        },
    ];

    /// Returns the card of a name; case, spaces and hyphens make no difference.
    ///
    /// # Errors
    /// [`UnknownCard`].
    ///
    /// ```
    /// use device::sim::Card;
    /// assert_eq!(Card::find("rtx4090")?.multiprocessors, 128);
    /// let problem = Card::find("V100").unwrap_err().to_string();
    /// assert_eq!(problem, "found no card \"V100\", expected one of: H200, H100, A100, L40S, RTX 4090");
    /// # Ok::<(), device::sim::UnknownCard>(())
    /// ```
    pub fn find(name: &str) -> Result<Card, UnknownCard> {
        let plain = |name: &str| name.replace([' ', '-'], "").to_ascii_lowercase();
        let found = Card::ALL.into_iter().find(|card| plain(card.name) == plain(name));
        found.ok_or_else(|| UnknownCard(name.to_owned()))
    }
}

/// No card has this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownCard(pub String);

impl fmt::Display for UnknownCard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Card::ALL.map(|card| card.name).join(", ");
        write!(f, "found no card {:?}, expected one of: {names}", self.0)
    }
}

impl std::error::Error for UnknownCard {}
