//! Percentiles, medians and spreads: one definition for all figures.

/// The value below which `percent` of 100 of the sorted numbers lie, with a straight line between two neighbours, as
/// `numpy.percentile` has it; 0 of none.
pub fn percentile(sorted: &[f64], percent: f64) -> f64 {
    let rank = percent / 100.0 * sorted.len().saturating_sub(1) as f64;
    let at = |rank: f64| sorted.get(rank as usize).copied().unwrap_or(0.0);
    let (low, high) = (at(rank.floor()), at(rank.ceil()));
    low + (high - low) * rank.fract()
}

/// Median, and the range as a share of it.
pub fn median_and_spread(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let median = percentile(&values, 50.0);
    (median, (percentile(&values, 100.0) - percentile(&values, 0.0)) / median.max(f64::MIN_POSITIVE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_numpy() {
        // numpy.percentile([1, 2, 3, 4, 5], [50, 90, 95, 99])
        for (percent, expected) in [(50.0, 3.0), (90.0, 4.6), (95.0, 4.8), (99.0, 4.96)] {
            let found = percentile(&[1.0, 2.0, 3.0, 4.0, 5.0], percent);
            assert!((found - expected).abs() < 1e-12, "{found} is percentile {percent}, expected {expected}");
        }
        assert_eq!((percentile(&[7.0], 99.0), percentile(&[], 50.0)), (7.0, 0.0));
    }

    #[test]
    fn medians_and_spreads_are_those_of_the_sorted_values() {
        assert_eq!(median_and_spread(vec![3.0, 1.0, 2.0]), (2.0, 1.0));
        assert_eq!(median_and_spread(Vec::new()), (0.0, 0.0));
    }
}
