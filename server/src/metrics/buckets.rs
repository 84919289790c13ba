//! Upper bounds of the histograms, the same as vLLM's.

/// Seconds to the first token.
pub const FIRST_TOKEN: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];

/// Seconds between two tokens.
pub const INTER_TOKEN: [f64; 19] =
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];

/// Seconds of a request or one of its phases.
pub const REQUEST: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];

/// 1, 2, 5, 10, 20, 50, … up to `most`.
pub fn one_two_five(most: usize) -> Vec<f64> {
    let steps = (0..).map(|i| [1usize, 2, 5][i % 3].saturating_mul(10usize.saturating_pow(i as u32 / 3)));
    let bounds: Vec<f64> =
        steps.take_while(|bound| *bound <= most && *bound < usize::MAX).map(|bound| bound as f64).collect();
    if bounds.is_empty() { vec![1.0] } else { bounds }
}
