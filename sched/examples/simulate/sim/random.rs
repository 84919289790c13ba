//! Random numbers for traces.

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1].
    pub fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    pub fn below(&mut self, bound: u64) -> usize {
        (self.next() % bound) as usize
    }

    /// Exponential with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -self.unit().ln()
    }

    /// A length with this mean and a standard deviation of 1 in the logarithm, clamped to `1..=most`.
    pub fn log_normal(&mut self, mean: f64, most: usize) -> usize {
        // Box-Muller transform (1958).
        let normal = (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos();
        ((mean.ln() - 0.5 + normal).exp().round() as usize).clamp(1, most)
    }
}
