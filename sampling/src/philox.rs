//! Philox4x32-10: random numbers as a function of a counter and a key.
//!
//! Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Each of ten rounds multiplies two words,
//! permutes the halves and mixes in the round's key. It has no state and uses only integers, so host and device compute
//! the same words.

/// Multipliers of the two pairs of words.
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Increments of the key between rounds: the golden ratio and √3 − 1 as fractions of 2³².
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Returns four independent uniform words for each pair of `counter` and `key`.
///
/// ```
/// // One of the known answers published by the authors.
/// let words = sampling::philox4x32_10([0; 4], [0; 2]);
/// assert_eq!(words, [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
/// ```
// Measured: a call per token of the vocabulary would cost more than the ten rounds.
#[inline(always)]
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut x0, mut x1, mut x2, mut x3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(x0);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(x2);
        (x0, x1, x2, x3) = ((b >> 32) as u32 ^ x1 ^ k0, b as u32, (a >> 32) as u32 ^ x3 ^ k1, a as u32);
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [x0, x1, x2, x3]
}
