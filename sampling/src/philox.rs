//! Philox4x32-10: a random number as a function of a counter and a key.
//!
//! Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Ten rounds; each multiplies two words, swaps the
//! halves about and adds the round's key. No state, integers only: host and device give the same words.

/// Multipliers of the two pairs of words.
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Added to the key between rounds: the golden ratio and √3 − 1 as fractions of 2³².
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four independent uniform words for each pair of `counter` and `key`.
///
/// ```
/// // From the known answers that the authors publish.
/// let words = sampling::philox4x32_10([0; 4], [0; 2]);
/// assert_eq!(words, [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
/// ```
// By force: a call per token of a vocabulary would cost more than the ten rounds (measured).
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

#[cfg(test)]
mod tests {
    use super::philox4x32_10;

    /// The three vectors for `philox4x32 10` in the `kat_vectors` file of Random123, the authors' library.
    #[test]
    fn the_published_known_answers_hold() {
        let ones = u32::MAX;
        let known = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, words) in known {
            assert_eq!(philox4x32_10(counter, key), words);
        }
    }
}
