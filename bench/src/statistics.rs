//! Means, percentiles and spreads: the one definition for all figures.

/// Percentile of sorted numbers with linear interpolation between the two nearest ranks, as in `numpy.percentile`. `percent` is
/// from 0 to 100. The percentile of no numbers is 0.
pub fn percentile(sorted: &[f64], percent: f64) -> f64 {
    let rank = percent / 100.0 * sorted.len().saturating_sub(1) as f64;
    let at = |rank: f64| sorted.get(rank as usize).copied().unwrap_or(0.0);
    let (low, high) = (at(rank.floor()), at(rank.ceil()));
    low + (high - low) * rank.fract()
}

/// Arithmetic mean. The mean of no numbers is 0.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Median, and the difference between the greatest and the smallest value as a fraction of it.
pub fn median_and_spread(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let median = percentile(&values, 50.0);
    (median, (percentile(&values, 100.0) - percentile(&values, 0.0)) / median.max(f64::MIN_POSITIVE))
}
