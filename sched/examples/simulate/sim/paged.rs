//! Quire's scheduler with a pool of blocks. The cost model takes the place of an executor.

use std::collections::{HashMap, VecDeque};

use sched::{Outcome, Request, RequestId, SchedConfig, Scheduler, StepPlan};

use super::cost::{CostModel, Work};
use super::measure::{Occupancy, Run};
use super::random::Random;
use super::trace::Arrival;

/// Tokens of a step in addition to one per sequence: vLLM's default budget.
pub const PREFILL_SHARE: usize = 2048;

/// Runs a trace with at most `batch` sequences and blocks of `block_size` tokens, without prefix sharing.
///
/// # Panics
/// If the scheduler refuses a configuration, a request or an outcome, which is a bug.
pub fn run(trace: &[Arrival], cost: &CostModel, batch: usize, block_size: usize, max_in_flight: usize) -> Run {
    let start = trace.first().map_or(0.0, |a| a.at);
    let config = SchedConfig {
        max_num_seqs: batch,
        enable_prefix_caching: false,
        max_in_flight,
        ..SchedConfig::new(cost.kv_capacity / block_size, block_size)
    };
    let mut machine = Machine::new(cost, config, start);
    let mut arrivals = trace.iter().zip(0..).peekable();
    loop {
        while let Some((&arrival, id)) = arrivals.next_if(|(a, _)| a.at <= machine.clock) {
            machine.submit(id, Text { own: id, ..Text::default() }, arrival);
        }
        if !machine.turn(|_| ()) {
            let Some((next, _)) = arrivals.peek() else { break };
            machine.clock = next.at;
        }
    }
    machine.run.elapsed = machine.clock - start;
    machine.run
}

/// The tokens of a request, as a pure function of their positions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Text {
    /// Which prefix it shares with others, and how long that is.
    pub shared: u64,
    pub shared_len: usize,
    /// What determines the tokens after the prefix.
    pub own: u64,
}

impl Text {
    fn token(self, position: usize) -> u32 {
        let stream = if position < self.shared_len { self.shared.wrapping_neg() } else { self.own };
        Random(stream.wrapping_mul(1 << 32).wrapping_add(position as u64)).next() as u32
    }
}

/// A token that a step has drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    /// The request.
    pub id: u64,
    /// Number of the token among those of the request, from 1.
    pub number: usize,
    /// Seconds since the token before it, or since the arrival.
    pub after: f64,
    /// Whether it is the last.
    pub is_last: bool,
}

struct Live {
    arrival: Arrival,
    text: Text,
    num_outputs: usize,
    /// Number of tokens that are cached after the steps in flight.
    cached: usize,
    has_begun: bool,
    last_at: f64,
}

/// A step on the device.
struct InFlight {
    plan: StepPlan,
    seconds: f64,
    /// Time at which the device completes it.
    done: f64,
    occupancy: Occupancy,
}

/// A scheduler with its device.
pub struct Machine<'a> {
    cost: &'a CostModel,
    scheduler: Scheduler,
    max_in_flight: usize,
    block_size: usize,
    live: HashMap<RequestId, Live>,
    flights: VecDeque<InFlight>,
    device_free: f64,
    /// Time at which the next turn begins. Requests that arrive until then are to be submitted before it.
    pub clock: f64,
    /// Measurements of the turns so far, without `elapsed`.
    pub run: Run,
}

impl<'a> Machine<'a> {
    /// Creates an idle machine. The limits on tokens follow from the cost model and the number of sequences.
    ///
    /// # Panics
    /// If the scheduler refuses the configuration, which is a bug.
    #[allow(clippy::expect_used)]
    pub fn new(cost: &'a CostModel, config: SchedConfig, clock: f64) -> Machine<'a> {
        let (max_in_flight, block_size) = (config.max_in_flight, config.block_size);
        let scheduler = Scheduler::new(SchedConfig {
            max_num_batched_tokens: config.max_num_seqs + PREFILL_SHARE,
            max_model_len: cost.max_model_len,
            ..config
        })
        .expect("a valid configuration");
        let (live, flights, run) = (HashMap::new(), VecDeque::new(), Run::default());
        Machine { cost, scheduler, max_in_flight, block_size, live, flights, device_free: clock, clock, run }
    }

    /// Adds a request.
    ///
    /// # Panics
    /// If the scheduler refuses the request, which is a bug.
    #[allow(clippy::expect_used)]
    pub fn submit(&mut self, id: u64, text: Text, arrival: Arrival) {
        // The length of the output is not known in advance.
        let most = self.cost.max_model_len - arrival.prompt;
        let prompt = (0..arrival.prompt).map(|position| text.token(position)).collect();
        self.scheduler.submit(Request::new(RequestId(id), prompt, most)).expect("a request that fits");
        let live = Live { arrival, text, num_outputs: 0, cached: 0, has_begun: false, last_at: arrival.at };
        self.live.insert(RequestId(id), live);
    }

    /// Plans a step if there is something to compute, and commits one if as many as possible are in flight. Returns
    /// whether it did either.
    ///
    /// # Panics
    /// If the scheduler refuses an outcome, which is a bug.
    #[allow(clippy::expect_used)]
    pub fn turn(&mut self, drawn: impl FnMut(Drawn)) -> bool {
        let plan = self.scheduler.plan();
        self.scheduler.submitted(plan.step).expect("a plan of this scheduler");
        for id in &plan.preempted {
            self.run.preemptions += 1;
            self.live.get_mut(id).expect("a preempted request is live").cached = 0;
        }
        let is_idle = plan.spans.is_empty();
        if !is_idle {
            self.launch(plan);
        }
        if self.flights.len() < self.max_in_flight && !is_idle {
            return true;
        }
        let Some(InFlight { plan, seconds, done, mut occupancy }) = self.flights.pop_front() else { return false };
        self.clock = self.clock.max(done);
        occupancy.wanted = plan.spans.iter().filter(|s| self.live.contains_key(&s.seq.request)).count();
        self.run.step(seconds, occupancy);
        self.commit(&plan, drawn);
        true
    }

    /// Number of prompt tokens of all requests that have run, and how many of them were cached.
    pub fn prompt_tokens(&self) -> (u64, u64) {
        let stats = self.scheduler.stats();
        (stats.prompt_tokens, stats.prefix_hits)
    }

    /// Starts a step on the device.
    #[allow(clippy::expect_used)]
    fn launch(&mut self, plan: StepPlan) {
        let planned = self.clock;
        self.clock += self.cost.host_seconds;
        let mut work = Work::default();
        for span in &plan.spans {
            work.add_span(span.start, span.tokens.len());
            let member = self.live.get_mut(&span.seq.request).expect("a planned request is live");
            if !std::mem::replace(&mut member.has_begun, true) {
                self.run.queueing.push(planned.max(self.device_free - self.cost.host_seconds) - member.arrival.at);
            }
            member.cached = span.start + span.tokens.len();
        }
        let stats = self.scheduler.stats();
        let occupancy = Occupancy {
            batch: stats.num_running,
            wanted: 0, // known when the step is done
            kv_used: self.live.values().map(|m| m.cached).sum(),
            kv_reserved: stats.blocks_in_use * self.block_size,
        };
        let seconds = self.cost.device_seconds(work);
        self.device_free = self.device_free.max(self.clock) + seconds;
        self.flights.push_back(InFlight { plan, seconds, done: self.device_free, occupancy });
    }

    /// Commits a step in which each sampled sequence draws a token. Ignores sequences that have ended.
    #[allow(clippy::expect_used)]
    fn commit(&mut self, plan: &StepPlan, mut drawn: impl FnMut(Drawn)) {
        let mut outcomes = Vec::with_capacity(plan.spans.len());
        for span in plan.spans.iter().filter(|span| !span.sample.is_empty()) {
            let id = span.seq.request;
            let Some(member) = self.live.get_mut(&id) else {
                continue;
            };
            let token = member.text.token(member.arrival.prompt + member.num_outputs);
            member.num_outputs += 1;
            let arrival = member.arrival;
            let is_last = member.num_outputs == arrival.output;
            let after = self.clock - std::mem::replace(&mut member.last_at, self.clock);
            drawn(Drawn { id: id.0, number: member.num_outputs, after, is_last });
            outcomes.push(Outcome::token(span.seq, token, is_last));
            if is_last {
                self.run.end_to_end.push(self.clock - arrival.at);
                self.run.output_tokens += arrival.output;
                self.live.remove(&id);
            }
        }
        self.scheduler.commit(plan.step, &outcomes).expect("outcomes of this plan");
    }
}
