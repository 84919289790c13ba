//! Problems that several variants solve. Each is generated, computed in float64 and copied to a device once for all of them.

use attention_kernels::Variant;
use serde_json::Value;
use trial::Look;

use super::failures::of_look;

/// A problem and the variants that are to solve it.
pub struct Asked {
    pub seed: u64,
    pub look: Look,
    /// The seed and the look, as failures show them.
    pub settings: Value,
    pub variants: Vec<&'static Variant>,
}

/// Joins equal problems, in the order in which they come first.
pub fn by_problem(asked: impl IntoIterator<Item = (u64, Look, &'static Variant)>) -> Vec<Asked> {
    let mut problems: Vec<Asked> = Vec::new();
    for (seed, look, variant) in asked {
        let settings = of_look(seed, &look);
        match problems.iter_mut().find(|problem| problem.settings == settings) {
            Some(problem) => problem.variants.push(variant),
            None => problems.push(Asked { seed, look, settings, variants: vec![variant] }),
        }
    }
    problems
}
