//! How many drafts a sequence gets, so that speculation is not slower than none.
//!
//! **Costs.** A step that reads all weights for a few rows takes a time of about `a + b · rows`: `a` for the weights, `b` for the
//! arithmetic, the attention and the draw of a row. While `b` is small against `a`, more rows are nearly free; with many sequences
//! in the step they are not. [`StepCost`] fits both numbers to the times of recent steps without prompts.
//!
//! **Gain.** If a sequence's drafts are right with probability `p` each, its draft number `i` adds `pⁱ` tokens. A step of `n`
//! sequences without drafts takes `(a + b n) / n` per token. So the draft is worth its row if `pⁱ (a + b n) / n > b`, or
//!
//! ```text
//! pⁱ > t   with   t = b n / (a + b n)
//! ```
//!
//! which gives the greatest `i` at once. If a model computes the drafts, a pass of it over the sequences of the step takes a time `d`,
//! and the draft must be worth its share of that too: `t = (b n + d) / (a + b n)`. If accepted drafts are computed again, a draft takes
//! `1 + pⁱ` rows, so that `t = (b n + d) / a`. `t` grows with the batch, and the number of drafts falls to 0. [`Acceptance`] estimates
//! `p` from the sequence's recent drafts. A sequence without drafts tries a single one from time to time.
//!
//! Everything here steers the speed alone; the tokens are the same with any number of drafts.

/// Share of a measurement that is left after the next one.
const MEMORY: f64 = 0.95;
/// Share of the time of a draft model's passes that is left after the next one.
const PASS_MEMORY: f64 = 0.8;
/// Time of such a pass relative to `a` before it is measured.
const ASSUMED_PASS: f64 = 0.25;
/// `b / a` before it is measured.
const ASSUMED_ROW_COST: f64 = 0.1;
/// Steps of more rows are not measured: they are not bound by reading weights.
const MOST_ROWS: usize = 256;

/// Times of steps as a line over their rows: weighted sums for a regression.
pub struct StepCost {
    weight: f64,
    rows: f64,
    time: f64,
    rows_rows: f64,
    rows_time: f64,
    /// Cost of a row relative to that of a step without rows.
    ratio: f64,
    /// Time of a pass that computes a draft for each sequence; 0 before the first.
    pass: f64,
    /// What is assumed before, relative to the time of a step without rows.
    assumed_pass: f64,
}

impl StepCost {
    /// Nothing is measured yet. `has_passes`: a model computes the drafts.
    pub fn new(has_passes: bool) -> StepCost {
        let (ratio, assumed_pass) = (ASSUMED_ROW_COST, if has_passes { ASSUMED_PASS } else { 0.0 });
        StepCost { weight: 0.0, rows: 0.0, time: 0.0, rows_rows: 0.0, rows_time: 0.0, ratio, pass: 0.0, assumed_pass }
    }

    /// Adds a step of `rows` rows that took `seconds`.
    pub fn add(&mut self, rows: usize, seconds: f64) {
        if rows == 0 || rows > MOST_ROWS {
            return;
        }
        // A step that was interrupted says nothing about its rows.
        let usual = self.time / self.weight;
        let (x, y) = (rows as f64, if self.weight > 4.0 { seconds.min(4.0 * usual) } else { seconds });
        for (sum, value) in [
            (&mut self.weight, 1.0),
            (&mut self.rows, x),
            (&mut self.time, y),
            (&mut self.rows_rows, x * x),
            (&mut self.rows_time, x * y),
        ] {
            *sum = *sum * MEMORY + value;
        }
        let variance = self.rows_rows * self.weight - self.rows * self.rows;
        // Steps of equal sizes leave the last estimate as it is.
        if self.weight > 4.0 && variance > 0.25 * self.weight * self.weight {
            let slope = (self.rows_time * self.weight - self.rows * self.time) / variance;
            let base = (self.time - slope * self.rows) / self.weight;
            // Noise can make either number negative.
            let ratio = if base > 0.0 { (slope / base).max(0.0) } else { 1.0 };
            self.ratio = ratio.clamp(0.01, 1.0);
        }
    }

    /// Adds `passes` passes of a draft model that took `seconds`.
    pub fn add_passes(&mut self, passes: usize, seconds: f64) {
        let pass = seconds / passes.max(1) as f64;
        // The first of all also computes prompts, and the first after a pause what was drawn meanwhile.
        let usual = if self.pass > 0.0 { self.pass } else { pass };
        self.pass = usual * PASS_MEMORY + pass.min(4.0 * usual) * (1.0 - PASS_MEMORY);
    }

    /// Probability above which a draft is worth its row, in a step of `sequences` sequences, or its rows if it is computed again.
    pub fn threshold(&self, sequences: usize, recomputes: bool) -> f64 {
        let rows = self.ratio * sequences.max(1) as f64;
        (rows + self.relative_pass()) / if recomputes { 1.0 } else { 1.0 + rows }
    }

    /// Whether a draft may be tried after `pause` tokens without drafts. A draft model has to compute them all: `pause` rows of
    /// each sequence in one pass. The time of that pass is estimated from a usual one, in proportion to steps of these sizes.
    pub fn may_try(&self, pause: u32, sequences: usize) -> bool {
        let (rows, pause) = (self.ratio * sequences.max(1) as f64, f64::from(pause));
        self.relative_pass() * (1.0 + rows * pause) / (1.0 + rows) <= TRIAL * pause * (1.0 + rows)
    }

    /// Time of a pass relative to that of a step without rows.
    fn relative_pass(&self) -> f64 {
        let base = self.time / (self.weight + self.ratio * self.rows);
        if base > 0.0 && self.pass > 0.0 { self.pass / base } else { self.assumed_pass }
    }
}

/// Share of a draft's evidence that is left after the next verification.
const RECENT: f64 = 0.9;
/// Number of right drafts, and of all drafts, that are assumed before the first.
const ASSUMED: (f64, f64) = (1.4, 2.0);
/// A sequence without drafts tries one after this number of tokens, unless not even right drafts would be worth their rows.
const PROBE_AFTER: u32 = 32;
/// Threshold above which that is so.
const WORTHLESS: f64 = 0.95;
/// Greatest share of the time that a trial may take from the steps since the last one.
const TRIAL: f64 = 0.02;
/// Number of lookups in a row that find nothing after which a sequence is looked at less often, and how often it is then.
const PATIENCE: (u32, u32) = (4, 16);

/// What is known of a sequence's drafts.
pub struct Acceptance {
    right: f64,
    tried: f64,
    /// Tokens since drafts were last asked for.
    idle: u32,
    /// Times in a row that the proposer had nothing.
    misses: u32,
    /// Number of right drafts in the last verification.
    accepted: usize,
}

impl Default for Acceptance {
    fn default() -> Acceptance {
        let (right, tried) = ASSUMED;
        Acceptance { right, tried, idle: 0, misses: 0, accepted: 0 }
    }
}

impl Acceptance {
    /// Greatest number of drafts that are worth their rows, at most `most`. `may_try` returns whether one may be tried after a pause
    /// of this number of tokens.
    pub fn num_drafts(&self, threshold: f64, most: usize, may_try: impl Fn(u32) -> bool) -> usize {
        let probability = (self.right / self.tried).min(0.999);
        let worth = (threshold.ln() / probability.ln()).floor() as usize;
        let tries = threshold < WORTHLESS && self.idle >= PROBE_AFTER && may_try(self.idle);
        let probe = usize::from(tries);
        worth.max(probe).min(most)
    }

    /// Number of right drafts in the last verification.
    pub fn num_accepted(&self) -> usize {
        self.accepted
    }

    /// A sequence has drawn a token.
    pub fn token(&mut self) {
        self.idle = self.idle.saturating_add(1);
    }

    /// Whether it is worth waiting for the sequence's next token in order to propose drafts behind it.
    pub fn is_worth_waiting(&self) -> bool {
        self.misses < PATIENCE.0 || self.idle >= PATIENCE.1
    }

    /// The proposer was asked.
    pub fn asked(&mut self, found: bool) {
        self.idle = 0;
        self.misses = if found { 0 } else { self.misses.saturating_add(1) };
    }

    /// Records a verification: the first `right` of `drafts` drafts were right.
    pub fn verified(&mut self, drafts: usize, right: usize) {
        self.accepted = right;
        // Drafts behind the first wrong one say nothing.
        let tried = if right < drafts { right + 1 } else { right };
        self.tried = self.tried * RECENT + tried as f64;
        self.right = self.right * RECENT + right as f64;
    }
}
