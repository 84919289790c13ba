//! Draws by the Gumbel-max trick: the argmax of logit + Gumbel noise is distributed as the softmax of the logits
//! (Gumbel 1954; Maddison et al., "A* Sampling", 2014).
//!
//! The noise of a token is a pure function of (seed, output index, sequence index, token id, purpose), so a draw
//! depends only on the row and the request. Noise is computed only for tokens that can still win: the bounds below
//! exclude most of a real vocabulary without a logarithm, and mostly without a random number.

use std::f64::consts::LN_2;

use crate::filter::Candidate;
use crate::numbers::ln;
use crate::philox::philox4x32_10;

/// The last counter word. Another use of the same coordinates would take another number and so stay independent.
const PURPOSE_TOKEN: u32 = 0;

/// Number of bits of a uniform number.
const BITS: u32 = 52;
/// Upper bound of the noise: −ln(−ln u) = 53 ln 2 for u = 1 − 2⁻⁵³, rounded up.
const MAX_NOISE: f64 = 36.75;
/// Allowance for the rounding of [`gumbel_bound`].
const SLACK: f64 = 1e-9;

/// Identifies a draw of a request.
#[derive(Clone, Copy)]
pub(crate) struct Coordinates {
    pub(crate) seed: u64,
    pub(crate) output_index: u32,
    pub(crate) sequence: u32,
}

impl Coordinates {
    /// Returns 52 uniform bits for a token.
    #[inline]
    fn uniform_bits(self, token: u32) -> u64 {
        let counter = [self.output_index, self.sequence, token, PURPOSE_TOKEN];
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let [low, high, ..] = philox4x32_10(counter, key);
        (u64::from(high) << 32 | u64::from(low)) >> (64 - BITS)
    }
}

/// Returns the noise that a draw adds to the logit of `token`: standard Gumbel, −ln(−ln u) with u = (52 bits + ½) / 2⁵²
/// from the first two words of Philox4x32-10, counter (`output_index`, `sequence`, `token`, 0), key = `seed`, low words
/// first.
///
/// Public so that a draw can be reproduced elsewhere.
pub fn gumbel_noise(seed: u64, output_index: u32, sequence: u32, token: u32) -> f64 {
    gumbel(Coordinates { seed, output_index, sequence }.uniform_bits(token))
}

#[inline]
fn gumbel(bits: u64) -> f64 {
    let uniform = (bits as f64 + 0.5) / (1u64 << BITS) as f64;
    -ln(-ln(uniform))
}

/// Returns an upper bound of `gumbel(bits)` from the number of leading ones: −ln u ≥ 1 − u > 2⁻⁽ᵒⁿᵉˢ⁺¹⁾.
#[inline]
fn gumbel_bound(bits: u64) -> f64 {
    let ones = (!(bits << (64 - BITS))).leading_zeros();
    f64::from(ones + 1) * LN_2 + SLACK
}

/// Returns the candidate with the greatest logit + noise, the lowest id on ties, whatever the order of `kept`; `None`
/// if there is none.
///
/// Costs a comparison per candidate, plus a few dozen instructions for each within [`MAX_NOISE`] of the best sum.
pub(crate) fn draw(kept: &[Candidate], coordinates: Coordinates) -> Option<u32> {
    // Start with the likeliest: the higher the first sum, the more candidates it excludes.
    let first = kept.iter().max_by(|a, b| a.logit.total_cmp(&b.logit))?;
    let noise_of = |token| gumbel(coordinates.uniform_bits(token));
    let (mut best, mut winner) = (f64::from(first.logit) + noise_of(first.token), first.token);
    for candidate in kept {
        let logit = f64::from(candidate.logit);
        if logit + MAX_NOISE < best {
            continue;
        }
        let bits = coordinates.uniform_bits(candidate.token);
        if logit + gumbel_bound(bits) < best {
            continue;
        }
        let sum = logit + gumbel(bits);
        if sum > best || sum == best && candidate.token < winner {
            (best, winner) = (sum, candidate.token);
        }
    }
    Some(winner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bounds_are_never_below_the_noise() {
        let top = (1u64 << BITS) - 1;
        let edges = (0..BITS).flat_map(|ones| {
            let leading = top << (BITS - ones) & top; // that many ones, then zeros
            [leading, leading | top >> (ones + 1)] // and with a zero and then ones
        });
        for bits in edges.chain([0, top]) {
            let noise = gumbel(bits);
            assert!(noise.is_finite() && noise <= MAX_NOISE, "{bits:#x}: {noise}");
            assert!(noise <= gumbel_bound(bits), "{bits:#x}: {noise} over {}", gumbel_bound(bits));
        }
    }

    #[test]
    fn equal_sums_go_to_the_lowest_id_in_any_order() {
        // So large that no noise changes the sum.
        let candidates = [5, 2, 9].map(|token| Candidate { token, logit: f32::MAX });
        let coordinates = Coordinates { seed: 1, output_index: 0, sequence: 0 };
        assert_eq!(draw(&candidates, coordinates), Some(2));
    }
}
