//! The time of a step as a function of what it computes, fitted to recent steps.
//!
//! ```text
//! seconds = step + decode * rows + prompt * tokens
//! ```
//!
//! `step` is mostly the time to read the weights. The three numbers follow from a weighted least-squares fit in which a step's
//! weight falls by [`MEMORY`] with each later step. Thus contexts need no term of their own: what they add to the time of a row or
//! of a prompt token changes slowly, and the fit follows. Errors count relative to the time of a step, so that a long step does not
//! blur what the short ones show.
//!
//! - Steps of equal sizes say nothing about `decode` and `prompt`. The fit has a weak pull to the last values of both, in proportion
//!   to how much longer steps have become. It decides then, and keeps the system of equations regular.
//! - A step that was interrupted counts as one of twice the expected time, and `decode` and `prompt` change at most by a factor of
//!   two with a step. If the machine really has changed its speed, the fit follows within some tens of steps.

/// Share of a measurement's weight that is left after the next one.
const MEMORY: f64 = 0.95;
/// Greatest factor between a measured and the expected time, and of the change of a cost with one measurement.
const MOST_CHANGE: f64 = 2.0;
/// Number of measurements after which an unexpected time is bounded.
const TRUSTED_AFTER: f64 = 4.0;
/// Strength of the pull to the last values: as if measurements deviated so many rows or tokens from their mean...
const PULL: [f64; 2] = [1.0, 4.0];
/// ...or this share of the mean.
const PULL_SHARE: f64 = 0.03;

/// Standard deviation of prompt tokens, as a share of their mean, that tells their cost.
const VARIATION: f64 = 0.2;

/// See the [module](self).
#[derive(Default)]
pub(super) struct StepTime {
    /// Seconds of a step without rows; of a row of a decode; of a prompt token.
    step: f64,
    cost: [f64; 2],
    /// Number of measurements, faded.
    count: f64,
    /// Sums over the measurements: of their weights, rows and tokens, seconds, and products of these.
    weight: f64,
    x: [f64; 2],
    y: f64,
    xx: [[f64; 2]; 2],
    xy: [f64; 2],
}

impl StepTime {
    /// Adds a step that computed `rows` rows of decodes and `tokens` prompt tokens in `seconds`.
    pub fn add(&mut self, rows: usize, tokens: usize, seconds: f64) {
        let x = [rows as f64, tokens as f64];
        // The clock of some machines stands still during a short step.
        if rows + tokens == 0 || !(seconds > 0.0 && seconds.is_finite()) {
            return;
        }
        let mut y = seconds;
        if self.count == 0.0 {
            self.cost = [y / (x[0] + x[1]); 2];
        }
        let expected = self.step + self.cost[0] * x[0] + self.cost[1] * x[1];
        if self.count > TRUSTED_AFTER && expected > 0.0 {
            y = y.clamp(expected / MOST_CHANGE, expected * MOST_CHANGE);
        }
        let weight = 1.0 / (y * y);
        let add = |sum: &mut f64, value: f64| *sum = *sum * MEMORY + weight * value;
        self.count = self.count * MEMORY + 1.0;
        add(&mut self.weight, 1.0);
        add(&mut self.y, y);
        for i in 0..2 {
            add(&mut self.x[i], x[i]);
            add(&mut self.xy[i], x[i] * y);
            (0..2).for_each(|j| add(&mut self.xx[i][j], x[i] * x[j]));
        }
        self.fit();
    }

    fn fit(&mut self) {
        let mean = self.x.map(|sum| sum / self.weight);
        let mean_y = self.y / self.weight;
        let expected = self.step + self.cost[0] * mean[0] + self.cost[1] * mean[1];
        let last = self.cost.map(|cost| if expected > 0.0 { cost * mean_y / expected } else { cost });
        let pull = |i: usize| PULL[i].powi(2) + (PULL_SHARE * mean[i]).powi(2);
        let covariance = |i: usize, j: usize| self.xx[i][j] / self.weight - mean[i] * mean[j];
        let right = |i: usize| self.xy[i] / self.weight - mean[i] * mean_y + pull(i) * last[i];
        let (a, b, d) = (covariance(0, 0) + pull(0), covariance(0, 1), covariance(1, 1) + pull(1));
        // Positive, because covariances are positive semidefinite.
        let determinant = a * d - b * b;
        let solved = [(right(0) * d - right(1) * b) / determinant, (right(1) * a - right(0) * b) / determinant];
        for (cost, solved) in self.cost.iter_mut().zip(solved).filter(|(_, solved)| solved.is_finite()) {
            *cost = solved.clamp(*cost / MOST_CHANGE, *cost * MOST_CHANGE);
        }
        self.step = mean_y - self.cost[0] * mean[0] - self.cost[1] * mean[1];
    }

    /// Whether the numbers of prompt tokens of recent steps differ enough to tell the cost of prompts from the rest.
    pub fn tokens_vary(&self) -> bool {
        let mean = self.x[1] / self.weight;
        self.xx[1][1] / self.weight - mean * mean >= (VARIATION * mean).powi(2)
    }

    /// Seconds of a step that computes only `rows` rows of decodes; above 0 after the first measurement. The fit to steps of which
    /// some were interrupted can have a line that crosses zero, but no step takes less than its rows.
    pub fn of_decodes(&self, rows: usize) -> f64 {
        self.step.max(0.0) + self.cost[0] * rows as f64
    }

    /// Seconds that a prompt token adds to a step; 0 before the first measurement.
    pub fn of_prompt_token(&self) -> f64 {
        self.cost[1]
    }
}
