//! The budget on simulated machines.

use std::collections::VecDeque;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use sched::{RequestId, SeqId, Span, StepPlan};

use super::*;

/// A machine with these costs in seconds, whose times vary.
#[derive(Clone, Copy, Debug)]
struct Machine {
    step: f64,
    row: f64,
    token: f64,
    /// Greatest relative deviation of a time.
    noise: f64,
    random: u64,
}

impl Machine {
    /// A number from 0 to 1 (SplitMix64).
    fn uniform(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn usual(&self, rows: usize, tokens: usize) -> f64 {
        self.step + self.row * rows as f64 + self.token * tokens as f64
    }

    fn seconds(&mut self, rows: usize, tokens: usize) -> f64 {
        let outlier = if self.uniform() < 0.01 { 20.0 } else { 1.0 };
        self.usual(rows, tokens) * outlier * (1.0 + self.noise * (2.0 * self.uniform() - 1.0))
    }
}

fn plan(rows: usize, tokens: usize) -> StepPlan {
    let span = |len: usize, request: u64| Span {
        seq: SeqId { request: RequestId(request), index: 0 },
        start: 0,
        tokens: vec![0; len],
        drafts: 0,
        awaits: None,
        groups: Vec::new(),
        cached: 0,
        sample: 0..1,
    };
    let mut spans: Vec<Span> = (0..rows as u64).map(|request| span(1, request)).collect();
    spans.extend((tokens > 1).then(|| span(tokens, u64::MAX)));
    StepPlan { spans, ..StepPlan::default() }
}

/// What a server does: prompts arrive now and then, the sequences whose prompts are complete decode.
struct Load {
    machine: Machine,
    budget: PromptBudget,
    rows: usize,
    /// Prompt tokens that wait.
    waiting: usize,
    /// One of so many steps has a new prompt.
    every: f64,
}

const MOST: usize = 2048;

impl Load {
    fn new(machine: Machine, target: ItlTarget, every: f64) -> Load {
        let config = SchedConfig { max_num_batched_tokens: MOST, ..SchedConfig::new(100, 16) };
        let (budget, waiting) = (PromptBudget::new(target, &config), 64 * 200);
        Load { machine, budget, rows: 0, waiting, every }
    }

    /// Runs a step. Returns its budget, its prompt tokens, and the time that it usually takes.
    fn step(&mut self) -> (usize, usize, f64) {
        if self.machine.uniform() < 1.0 / self.every {
            self.waiting += 200 + (self.machine.uniform() * 600.0) as usize;
        }
        let budget = self.budget.next(self.rows, self.rows);
        let tokens = self.waiting.min(budget);
        self.waiting -= tokens;
        let seconds = self.machine.seconds(self.rows, tokens);
        self.budget.measured(&plan(self.rows, tokens), seconds);
        let usual = self.machine.usual(self.rows, tokens);
        let change = (self.machine.uniform() * 5.0) as usize;
        self.rows = (self.rows + tokens / 200 + change).saturating_sub(2).clamp(1, 64);
        (budget, tokens, usual)
    }

    /// Runs steps, and returns the median and the 95th percentile of their usual times relative to the target. Only steps count that
    /// compute all prompt tokens that they may, and more than the least; `None` if there were few.
    fn relative_times(&mut self, steps: usize, target: impl Fn(&Machine, usize) -> f64) -> Option<(f64, f64)> {
        let mut ratios = Vec::new();
        for _ in 0..steps {
            let target = target(&self.machine, self.rows);
            let (budget, tokens, usual) = self.step();
            if tokens == budget && (LEAST_TOKENS + 1..MOST).contains(&budget) {
                ratios.push(usual / target);
            }
        }
        ratios.sort_by(f64::total_cmp);
        let at = |share: f64| ratios[(ratios.len() as f64 * share) as usize];
        (ratios.len() >= 20).then(|| (at(0.5), at(0.95)))
    }
}

fn machine() -> impl Strategy<Value = Machine> {
    // From a GPU, where a step takes 2 ms and a token 20 us, to a slow CPU.
    let ratios = (0.001..0.03f64, 0.002..0.05f64, prop_oneof![Just(0.0), 0.0..0.15f64]);
    (0.002..0.2f64, ratios, any::<u64>()).prop_map(|(step, (row, token, noise), random)| Machine {
        step,
        row: step * row,
        token: step * token,
        noise,
        random,
    })
}

/// The relative target follows the machine. Its estimate of decodes alone is less certain than that of the whole.
fn relative(machine: &Machine, rows: usize) -> f64 {
    AUTO_MULTIPLE * machine.usual(rows, 0)
}

/// Checks that `miss` returns `None` for at least 97 of 100 random cases. Not for all: interrupted steps come at random, and among all
/// machines and loads there are some that miss any bound.
fn hits_nearly_always<S: Strategy>(cases: S, miss: impl Fn(S::Value) -> Option<String>) {
    let mut runner = TestRunner::default();
    let mut draw = || cases.new_tree(&mut runner).expect("the strategies reject nothing").current();
    let misses: Vec<String> = (0..200).filter_map(|_| miss(draw())).collect();
    assert!(misses.len() <= 6, "{} of 200 cases miss: {misses:#?}", misses.len());
}

#[test]
fn steps_with_prompts_settle_near_the_target() {
    let cases = (machine(), 1.0..30f64, any::<bool>(), 1.3..6f64);
    hits_nearly_always(cases, |(machine, every, absolute, share)| {
        let millis = 1000.0 * share * machine.usual(64, 0);
        let target = if absolute { ItlTarget::Millis(millis) } else { ItlTarget::Auto };
        let mut load = Load::new(machine, target, every);
        let seconds = |machine: &Machine, rows: usize| if absolute { millis / 1000.0 } else { relative(machine, rows) };
        load.relative_times(200, seconds);
        let (median, p95) = load.relative_times(600, seconds)?;
        let (most, most_p95) = if absolute { (0.06, 1.2) } else { (0.3, 1.6) };
        let hits = (median - 1.0).abs() < most && p95 < most_p95;
        (!hits).then(|| {
            format!("median {median}, 95th percentile {p95}: {machine:?}, {target:?}, a prompt in {every} steps")
        })
    });
}

#[test]
fn a_machine_that_becomes_faster_or_slower_is_followed() {
    let cases = (machine(), prop_oneof![0.1..0.5f64, 2.0..10f64]);
    hits_nearly_always(cases, |(machine, factor)| {
        let mut load = Load::new(machine, ItlTarget::Auto, 5.0);
        load.relative_times(300, relative);
        let Machine { step, row, token, .. } = machine;
        load.machine = Machine { step: factor * step, row: factor * row, token: factor * token, ..load.machine };
        load.relative_times(200, relative);
        let (median, _) = load.relative_times(400, relative)?;
        ((median - 1.0).abs() >= 0.3).then(|| format!("median {median}: {machine:?}, factor {factor}"))
    });
}

/// Returns tokens per second, and median and 99th percentile of the time between tokens, of 64 clients that send a prompt of 200 tokens
/// whenever they have got 100. The first step takes `cold` times as long as others. Without a budget, that of one who knows the
/// machine is used.
fn closed_loop(machine: Machine, mut budget: Option<PromptBudget>, cold: f64) -> [f64; 3] {
    let mut most = 0;
    let mut known = |rows: usize| {
        most = rows.max(most);
        let tokens = (AUTO_MULTIPLE * machine.usual(most, 0) - machine.usual(rows, 0)) / machine.token;
        if rows == 0 { MOST } else { (tokens as usize).max(LEAST_TOKENS) }
    };
    let mut timed = machine;
    // Prompt tokens that wait, and tokens that are left to decode.
    let (mut waiting, mut left) = (VecDeque::from([200; 64]), Vec::new());
    let (mut between, mut time, mut made, mut factor) = (Vec::new(), 0.0, 0, cold);
    for _ in 0..1000 {
        let rows = left.len();
        let mut free = budget.as_mut().map_or_else(|| known(rows), |budget| budget.next(rows, 64)).clamp(1, MOST);
        let mut tokens = 0;
        while let Some(prompt) = waiting.front_mut().filter(|_| free > 0) {
            let now = free.min(*prompt);
            (*prompt, free, tokens) = (*prompt - now, free - now, tokens + now);
            if *prompt == 0 {
                waiting.pop_front();
                left.push(100);
            }
        }
        let usual = machine.usual(rows, tokens) * factor;
        if let Some(budget) = &mut budget {
            budget.measured(&plan(rows, tokens), timed.seconds(rows, tokens) * factor);
        }
        factor = 1.0;
        between.extend(std::iter::repeat_n(usual, rows));
        (time, made) = (time + usual, made + rows);
        left[..rows].iter_mut().for_each(|left| *left -= 1);
        let before = left.len();
        left.retain(|left| *left > 0);
        waiting.extend(std::iter::repeat_n(200, before - left.len()));
    }
    between.sort_by(f64::total_cmp);
    let at = |share: f64| between[(between.len() as f64 * share) as usize];
    [made as f64 / time, at(0.5), at(0.99)]
}

#[test]
fn auto_is_nearly_as_good_as_a_budget_that_knows_the_machine() {
    hits_nearly_always((machine(), 1.0..4f64), |(machine, cold)| {
        let config = SchedConfig { max_num_batched_tokens: MOST, ..SchedConfig::new(100, 16) };
        let budget = PromptBudget::new(ItlTarget::Auto, &config);
        let ([with, p50, p99], [known, ..]) =
            (closed_loop(machine, Some(budget), cold), closed_loop(machine, None, cold));
        let hits = with > 0.9 * known && p99 < 3.0 * p50;
        (!hits)
            .then(|| format!("{:.2} of the speed, p99 {:.1} times p50: {machine:?}, {cold}", with / known, p99 / p50))
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_budget_is_never_below_the_least_nor_above_the_step(
        millis in prop_oneof![Just(1.0), 1.0..60_000f64],
        steps in prop::collection::vec(
            (0..70usize, 0..3000usize, prop_oneof![Just(0.0), Just(f64::NAN), Just(f64::INFINITY), Just(1e-9), 0.0..1000f64]),
            0..50,
        ),
        most in prop_oneof![Just(MOST), 2..100usize],
    ) {
        let config = SchedConfig { max_num_batched_tokens: most, ..SchedConfig::new(100, 16) };
        for target in [ItlTarget::Auto, ItlTarget::Millis(millis)] {
            let (mut budget, mut was_measured) = (PromptBudget::new(target, &config), false);
            for &(rows, tokens, seconds) in &steps {
                let next = budget.next(rows, tokens);
                prop_assert!(rows == 0 || !was_measured || budget.target() > 0.0);
                was_measured |= rows + tokens > 0 && seconds > 0.0 && seconds.is_finite();
                let least = if rows > 0 { LEAST_TOKENS.min(most) } else { most };
                prop_assert!((least..=most).contains(&next), "{next}");
                prop_assert!(budget.target().is_finite() && budget.target() >= 0.0);
                budget.measured(&plan(rows, tokens), seconds);
            }
        }
    }
}

#[test]
fn in_a_pipeline_the_steps_of_all_stages_share_the_target() {
    let tokens = |stages: usize| {
        let config = SchedConfig { pipeline: stages > 1, max_in_flight: stages, ..SchedConfig::new(100, 16) };
        let mut budget = PromptBudget::new(ItlTarget::Millis(400.0), &config);
        // A step takes 10 ms, and 1 ms for each row and token.
        for (rows, tokens) in [(0, 500), (10, 100), (20, 0), (5, 300)].repeat(50) {
            budget.measured(&plan(rows, tokens), 0.010 + 0.001 * (rows + tokens) as f64);
        }
        budget.next(20, 30)
    };
    let near = |found: usize, expected: usize| found.abs_diff(expected) <= 3;
    assert!(near(tokens(1), 370), "{}", tokens(1));
    assert!(near(tokens(4), 70), "{}", tokens(4));
}

#[test]
fn auto_counts_sequences_that_wait_up_to_the_most_rows_that_were_measured() {
    let config = SchedConfig::new(100, 16);
    let mut budget = PromptBudget::new(ItlTarget::Auto, &config);
    // A step takes 10 ms, and 1 ms for each row and token.
    for (rows, tokens) in [(0, 500), (10, 100), (40, 0), (5, 300)].repeat(50) {
        budget.measured(&plan(rows, tokens), 0.010 + 0.001 * (rows + tokens) as f64);
    }
    for (rows, sequences, target) in [(4, 4, 31), (4, 40, 110), (40, 4, 110), (4, 90, 110)] {
        let tokens = budget.next(rows, sequences);
        assert!(tokens.abs_diff(target - 10 - rows) <= 3, "{rows} of {sequences}: {tokens}");
        assert!((budget.target() * 1000.0 - target as f64).abs() < 2.0, "{}", budget.target());
    }
}

#[test]
fn one_time_that_is_far_too_long_or_too_short_hardly_moves_the_budget() {
    for wrong in [1e-9, 1000.0] {
        let mut budget = PromptBudget::new(ItlTarget::Millis(200.0), &SchedConfig::new(100, 16));
        for (rows, tokens) in [(0, 500), (10, 100), (40, 0), (5, 300)].repeat(50) {
            budget.measured(&plan(rows, tokens), 0.010 + 0.001 * (rows + tokens) as f64);
        }
        let before = budget.next(20, 20);
        budget.measured(&plan(20, 100), wrong);
        let after = budget.next(20, 20);
        assert!(after.abs_diff(before) < before / 4, "{wrong}: from {before} to {after}");
    }
}
