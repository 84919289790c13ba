//! Random numbers that are the same in every run (SplitMix64).

/// A generator.
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// Returns `count` words of five letters, separated by spaces.
    pub fn words(&mut self, count: usize) -> String {
        let mut word = || (0..5).map(|_| char::from(b'a' + self.below(26) as u8)).collect::<String>();
        (0..count).map(|_| word()).collect::<Vec<_>>().join(" ")
    }
}
