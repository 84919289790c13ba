//! What a fleet needs of a replica, and the replica that is a real scheduler.

use std::collections::HashMap;

use sched::SchedConfig;

use super::super::cost::CostModel;
use super::super::paged::{Machine, Text};
use super::super::trace::Arrival;
use super::measure::Tally;

/// Greatest number of sequences that a replica runs at once.
pub const MAX_NUM_SEQS: usize = 256;

/// Tokens of a block.
pub const BLOCK: usize = 16;

/// A request at a replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Job {
    pub id: u32,
    pub conversation: u64,
    pub app: u32,
    /// Number of tokens of the system prompt, of the whole prompt, and of output.
    pub system: u32,
    pub prompt: u32,
    pub output: u32,
    /// Time at which it arrived at the fleet.
    pub at: f64,
    /// If the prompt was computed elsewhere and its cache has been received: the time of its first token, which is not
    /// part of `output`.
    pub first_at: Option<f64>,
}

/// A first or last token. It can be both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Token {
    pub id: u32,
    pub is_first: bool,
    pub is_last: bool,
}

/// A replica as a discrete-event simulation. `submit` and `wake` return when to wake it next; that replaces what they
/// returned before. `None` if it is idle.
pub trait Replica {
    fn submit(&mut self, now: f64, job: Job, tally: &mut Tally) -> Option<f64>;
    /// Ends what was to end now, appends the tokens to `out`, and goes on.
    fn wake(&mut self, now: f64, tally: &mut Tally, out: &mut Vec<Token>) -> Option<f64>;
    /// Number of tokens of the job's prompt that a router believes to be cached here.
    fn cached(&self, job: &Job) -> u32;
    /// Seconds in which the device has computed.
    fn busy(&self) -> f64;
}

/// A replica that runs [`sched::Scheduler`] step by step.
pub struct Detailed<'a> {
    machine: Machine<'a>,
    inbox: Vec<Job>,
    /// Tokens of the turn that is under way, if one is.
    turn: Option<Vec<Token>>,
    counted: (u64, u64),
    /// Length of each conversation's last prompt here. The router does not learn of evictions.
    served: HashMap<u64, u32>,
}

impl<'a> Detailed<'a> {
    pub fn new(cost: &'a CostModel) -> Detailed<'a> {
        let blocks = SchedConfig::new(cost.kv_capacity / BLOCK, BLOCK);
        let config = SchedConfig { max_num_seqs: MAX_NUM_SEQS, hash_seed: Some(1), ..blocks };
        let (machine, served) = (Machine::new(cost, config, 0.0), HashMap::new());
        Detailed { machine, inbox: Vec::new(), turn: None, counted: (0, 0), served }
    }

    fn go_on(&mut self, now: f64, tally: &mut Tally) -> Option<f64> {
        self.machine.clock = now;
        for job in self.inbox.drain(..) {
            let text = Text { shared: job.app.into(), shared_len: job.system as usize, own: job.conversation };
            let arrival = Arrival { at: job.at, prompt: job.prompt as usize, output: job.output as usize };
            self.machine.submit(job.id.into(), text, arrival);
        }
        let mut tokens = Vec::new();
        let has_turned = self.machine.turn(|drawn| {
            let (is_first, is_last) = (drawn.number == 1, drawn.is_last);
            if !is_first {
                tally.intervals.add(drawn.after, 1);
            }
            if is_first || is_last {
                tokens.push(Token { id: drawn.id as u32, is_first, is_last });
            }
        });
        let (prompt, cached) = self.machine.prompt_tokens();
        tally.prompt_tokens += prompt - self.counted.0;
        tally.cached_tokens += cached - self.counted.1;
        self.counted = (prompt, cached);
        self.turn = has_turned.then_some(tokens);
        has_turned.then_some(self.machine.clock)
    }
}

impl Replica for Detailed<'_> {
    fn submit(&mut self, now: f64, job: Job, tally: &mut Tally) -> Option<f64> {
        self.inbox.push(job);
        self.served.insert(job.conversation, job.prompt);
        if self.turn.is_some() { Some(self.machine.clock) } else { self.go_on(now, tally) }
    }

    fn wake(&mut self, now: f64, tally: &mut Tally, out: &mut Vec<Token>) -> Option<f64> {
        out.extend(self.turn.take().into_iter().flatten());
        self.go_on(now, tally)
    }

    fn cached(&self, job: &Job) -> u32 {
        self.served.get(&job.conversation).copied().unwrap_or(0)
    }

    fn busy(&self) -> f64 {
        self.machine.run.device
    }
}
