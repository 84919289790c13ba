//! Row counts of products, in buckets that share an algorithm.
//!
//! ```text
//! 1 | 2 | 3..4 | 5..8 | 9..16 | 17..32 | … multiples of 16 to 256 … | 257..288 | … eight for each power of two …
//! ```
//!
//! Up to 256 the buckets end at the sizes of decode graphs. A larger bucket has at most an eighth more rows than a product in it.

use std::ops::RangeInclusive;

/// Returns the row counts that share the algorithm of products with `rows` rows, at least 1.
pub(super) fn bucket(rows: usize) -> RangeInclusive<usize> {
    let step = match rows {
        0..=8 => {
            let most = rows.next_power_of_two();
            return most / 2 + 1..=most;
        }
        9..=256 => 16,
        _ => rows.next_power_of_two() / 16,
    };
    let most = rows.next_multiple_of(step);
    (most - step + 1).max(9)..=most
}

/// Iterates over the buckets of up to `max_rows` rows.
pub(super) fn buckets(max_rows: usize) -> impl Iterator<Item = RangeInclusive<usize>> {
    let next = |last: &RangeInclusive<usize>| Some(bucket(last.end() + 1));
    std::iter::successors(Some(bucket(1)), next).take_while(move |bucket| *bucket.start() <= max_rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_and_hold_the_rows_that_name_them() {
        let mut next = 1;
        for found in buckets(70_000) {
            assert_eq!(*found.start(), next);
            next = found.end() + 1;
            for rows in found.clone() {
                assert_eq!(bucket(rows), found, "{rows}");
            }
            assert!(*found.end() <= 256 || (found.end() - found.start()) * 8 < *found.start(), "{found:?}");
        }
        assert!(next > 70_000);
        let ends: Vec<usize> = buckets(300).map(|bucket| *bucket.end()).collect();
        assert_eq!(ends[..7], [1, 2, 4, 8, 16, 32, 48]);
        assert_eq!(ends[18..], [240, 256, 288, 320]);
        assert_eq!(buckets(16384).count(), 68);
    }
}
