//! A chi-square test of draws against probabilities.

/// Pearson's statistic, Σ (observed − expected)² / expected, and the number of classes. Classes with fewer than ten
/// expected draws are merged.
pub fn chi_square(counts: &[u32], probabilities: &[f32], draws: u32) -> (f64, usize) {
    let (mut statistic, mut classes) = (0.0, 0);
    let (mut rare_observed, mut rare_expected) = (0.0, 0.0);
    let mut add = |observed: f64, expected: f64| {
        statistic += (observed - expected).powi(2) / expected;
        classes += 1;
    };
    for (&count, &p) in counts.iter().zip(probabilities) {
        let expected = f64::from(p) * f64::from(draws);
        if expected >= 10.0 {
            add(f64::from(count), expected);
        } else {
            rare_observed += f64::from(count);
            rare_expected += expected;
        }
    }
    if rare_expected >= 10.0 {
        add(rare_observed, rare_expected);
    }
    (statistic, classes)
}

/// Chi-square with n degrees of freedom has mean n and standard deviation √(2n). The limit of 5 deviations is far
/// beyond chance, and a sampler that is off by a few percent on one likely token exceeds it.
pub fn assert_distribution(counts: &[u32], probabilities: &[f32], draws: u32, what: &str) {
    assert_eq!(counts.iter().sum::<u32>(), draws);
    let (statistic, classes) = chi_square(counts, probabilities, draws);
    let freedom = (classes - 1) as f64;
    let limit = freedom + 5.0 * (2.0 * freedom).sqrt();
    assert!(statistic < limit, "{what}: chi-square {statistic:.1} over {limit:.1} with {classes} classes");
}
